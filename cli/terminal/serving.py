"""Serves a page on the loopback interface, for browsers that cannot open the file, such as through an ssh tunnel."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_TIMEOUT_S = 10.0  # per request: idle connections must not block others
_PIECE = 1 << 16  # bytes
_MOST_AT_ONCE = 16  # requests that know the address
_MOST_WAITING = 64  # connections that have not told yet whether they do: of more the oldest is closed
_LOOK_S = 0.05  # polling interval for shutdown
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Server:
    """Serves one page, read-only, at an address whose last component is a random token."""

    def __init__(self, page: bytes, content_type: str) -> None:
        """Binds a free port of 127.0.0.1."""
        self._token = secrets.token_urlsafe(24)
        self._names: list[str] = []  # valid values of the Host header
        self._http = _Server(("127.0.0.1", 0), self._handler(page, content_type))
        self._port = int(self._http.server_address[1])
        self._names += [f"127.0.0.1:{self._port}", f"localhost:{self._port}"]

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://127.0.0.1:{self._port}/{self._token}/"

    def run(self, begun: Callable[[], None] = lambda: None) -> None:
        """Serves until Ctrl-C or SIGTERM.

        Args:
            begun: called when the server accepts requests.
        """

        def stop(*_: object) -> None:
            # In a thread, as `shutdown` waits for serve_forever, which runs in this one.
            threading.Thread(target=self._http.shutdown, daemon=True).start()

        before = [(number, signal.signal(number, stop)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            begun()
            self._http.serve_forever(_LOOK_S)
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            self._http.server_close()

    def _handler(self, page: bytes, content_type: str) -> type[BaseHTTPRequestHandler]:
        path, names = f"/{self._token}/".encode(), self._names

        class Handler(BaseHTTPRequestHandler):
            server_version, sys_version = "iaprof", ""
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                self._answer(with_page=True)

            def do_HEAD(self) -> None:
                self._answer(with_page=False)

            def _answer(self, with_page: bool) -> None:
                # Against DNS rebinding: a hostile domain may resolve to 127.0.0.1, but its requests name that domain.
                known = self.headers.get("Host") in names
                if not known or not hmac.compare_digest(self.path.encode("utf-8", "surrogateescape"), path):
                    self.send_error(404)
                    return
                if not isinstance(self.server, _Server) or not self.server.begin_answer(self.connection):
                    self.send_error(503)
                    return
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(page)))
                for name, value in _HEADERS.items():
                    self.send_header(name, value)
                self.end_headers()
                if with_page:  # the timeout is per chunk, as the whole page may take minutes through a tunnel
                    for begin in range(0, len(page), _PIECE):
                        self.wfile.write(page[begin : begin + _PIECE])

            def log_message(self, *_: object) -> None:
                """Logs nothing: the terminal shows the address."""

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait for their thread

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[object, None] = {}  # connections, the oldest first
        self._answered: set[object] = set()
        super().__init__(address, handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING:  # it is silent, or there are too many for anybody
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with contextlib.suppress(OSError):
                    assert isinstance(oldest, socket.socket)
                    oldest.shutdown(socket.SHUT_RDWR)  # which ends its thread
            self._waiting[request] = None
        super().process_request(request, client_address)

    def begin_answer(self, request: object) -> bool:
        """Tells whether there is room for an answer to a connection that knows the address, which nobody closes now."""
        with self._lock:
            self._waiting.pop(request, None)
            if len(self._answered) >= _MOST_AT_ONCE:
                return False
            self._answered.add(request)
            return True

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            with self._lock:
                self._waiting.pop(request, None)
                self._answered.discard(request)

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Ignores errors: browsers disconnect when they like."""
