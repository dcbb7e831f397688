"""The server of a page: loopback only, secret address, read-only."""

import contextlib
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from iaprof.cli.terminal.serving import Server
from limits import Within

PAGE = b"<!doctype html>\n<title>here</title>"


@pytest.fixture
def address() -> Iterator[str]:
    server = Server(PAGE, "text/html; charset=utf-8")
    thread = threading.Thread(
        target=server._http.serve_forever, args=(0.02,)
    )  # `run` must be in the main thread, as it handles signals
    thread.start()
    yield server.address
    server._http.shutdown()
    server._http.server_close()
    thread.join(10)


def asked(address: str, method: str = "GET", path: str | None = None, host: str | None = None) -> tuple[int, bytes]:
    at = urlsplit(address)
    with contextlib.closing(http.client.HTTPConnection(at.netloc, timeout=120)) as connection:
        connection.request(method, at.path if path is None else path, headers={"Host": host or at.netloc})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_the_address_gives_the_page(address: str) -> None:
    assert asked(address) == (200, PAGE)
    assert asked(address, "HEAD") == (200, b"")
    assert asked(address, host=f"localhost:{urlsplit(address).port}") == (200, PAGE)


@pytest.mark.parametrize("path", ["/", "//", "/index.html", "/../etc/passwd", "*", "http://127.0.0.1/"])
def test_other_addresses_give_nothing(address: str, path: str) -> None:
    status, body = asked(address, path=path)
    assert status == 404
    assert PAGE not in body


def test_similar_addresses_give_nothing(address: str) -> None:
    path = urlsplit(address).path
    for wrong in (path[:-2] + "/", path + "x", path.lower() if path != path.lower() else path.upper(), path[:-1]):
        assert asked(address, path=wrong)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_requests_cannot_write(address: str, method: str) -> None:
    assert asked(address, method)[0] == 501


def test_other_host_names_are_refused(address: str) -> None:
    assert asked(address, host="attacker.example")[0] == 404


def test_it_listens_on_the_loopback_only() -> None:
    server = Server(PAGE, "text/html")
    assert server._http.socket.getsockname()[0] == "127.0.0.1"
    server._http.server_close()


def test_two_servers_have_two_addresses() -> None:
    servers = [Server(PAGE, "text/html") for _ in range(2)]
    paths = {urlsplit(server.address).path for server in servers}
    assert len(paths) == 2
    assert all(len(path) > 32 for path in paths)
    for server in servers:
        server._http.server_close()


def test_idle_connections_block_nobody(address: str) -> None:
    at = urlsplit(address)
    silent = [socket.create_connection((at.hostname, at.port)) for _ in range(4)]
    assert asked(address) == (200, PAGE)
    for each in silent:
        each.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it(number: signal.Signals, within: Within) -> None:
    server = Server(PAGE, "text/html")
    before = signal.getsignal(number)
    answers = []

    def begun() -> None:
        def use() -> None:
            answers.append(asked(server.address))
            os.kill(os.getpid(), number)

        threading.Thread(target=use).start()

    with within(10):
        server.run(begun)
        assert answers == [(200, PAGE)]
    assert signal.getsignal(number) is before


def test_slow_readers_get_the_whole_page(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a page whose reader takes several times the timeout
    monkeypatch.setattr("iaprof.cli.terminal.serving._TIMEOUT_S", 1.5)
    page = b"x" * (24 << 20)  # more than the kernel's socket buffers hold
    server = Server(page, "text/html")
    thread = threading.Thread(target=server._http.serve_forever, args=(0.02,))
    thread.start()
    at = urlsplit(server.address)
    # when
    began, found = time.monotonic(), 0
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        reader.connect((at.hostname, at.port))
        reader.sendall(f"GET {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
        while piece := reader.recv(1 << 18):
            found += len(piece)
            time.sleep(0.04)
    took = time.monotonic() - began
    server._http.shutdown()
    server._http.server_close()
    thread.join(10)
    # then
    assert took > 3
    assert found > len(page)
