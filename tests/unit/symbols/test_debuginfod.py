"""The debuginfod client: it uses files of the right build only, and misbehaving servers cost only names."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from iaprof.symbols.symbolizers.binaries import Binaries
from iaprof.symbols.symbolizers.debuginfod import Bounds, Debuginfod, Kind
from iaprof.symbols.symbolizers.local_files import LocalFiles
from limits import Within
from unit.builds import Build, build, copied, function_at, no_descriptor_is_lost, symbolize, take_out_debug_information

SMALL = Bounds(wait_s=60, download_s=60, size=1 << 20)
Answer: TypeAlias = Callable[[http.server.BaseHTTPRequestHandler], None]


class Server:
    """A debuginfod server in this process, with answers that a test chooses."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.default: Answer = status(404)
        self.asked: list[str] = []
        self.agents: set[str | None] = set()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.asked.append(self.path)
                server.agents.add(self.headers["User-Agent"])
                self.close_connection = True
                with contextlib.suppress(OSError):  # the client closed the connection
                    server.answers.get(self.path, server.default)(self)

            def log_message(self, *_: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self.host = self.url.removeprefix("http://")
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def status(code: int, **headers: str) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(code, "<b>\x1b[31m")
        for key, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(key, value)
        handler.end_headers()

    return answer


def sends(content: bytes, length: int | None = None) -> Answer:
    """Sends the content, with a claimed length."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def never_ends(pause_s: float = 0.0) -> Answer:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(200 if pause_s else 10_000):
            handler.wfile.write(b"\x7fELF" * (1 if pause_s else 1 << 14))
            handler.wfile.flush()
            time.sleep(pause_s)

    return answer


def redirects_without_end(code: int) -> Answer:
    """Redirects to the same path, with an endless body."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        handler.send_header("Location", handler.path)
        handler.end_headers()
        for _ in range(10_000):
            handler.wfile.write(b"x" * (1 << 16))

    return answer


def drips_headers(handler: http.server.BaseHTTPRequestHandler) -> None:
    for _ in range(100):
        handler.wfile.write(b"H")
        handler.wfile.flush()
        time.sleep(0.05)


def is_silent(_handler: http.server.BaseHTTPRequestHandler) -> None:
    time.sleep(60)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy must not be used for the servers of the tests."""
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def second() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Build:
    return build(tmp_path_factory.mktemp("compiled") / "libhere.so")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "debuginfod"


def address(built: Build, kind: Kind = Kind.EXECUTABLE) -> str:
    assert built.build_id is not None
    return f"/buildid/{built.build_id.hex()}/{kind}"


def find(
    client: Debuginfod, binaries: Binaries, built: Build, kind: Kind = Kind.EXECUTABLE
) -> tuple[bytes | None, str, list[str]]:
    """Returns content and path of the file that the client finds, and problems."""
    assert built.build_id is not None
    problems: list[str] = []
    candidate = client.find(built.build_id, kind, binaries, problems)
    if candidate is None:
        return None, "", problems
    with os.fdopen(candidate.file, "rb") as file:
        return file.read(), candidate.path, problems


def test_a_downloaded_file_goes_to_the_shared_cache(
    server: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given
    content = compiled.path.read_bytes()
    server.answers[address(compiled)] = sends(content)
    client = Debuginfod([f"{server.url}/"], cache)
    # when
    with no_descriptor_is_lost():
        assert find(client, binaries, compiled) == (content, f"{server.host} (debuginfod)", [])
        cached = cache / address(compiled).removeprefix("/buildid/")
        assert [path for path in cache.rglob("*") if path.is_file()] == [cached]
        assert cached.read_bytes() == content
        assert find(client, binaries, compiled) == (content, str(cached), [])
    # then
    assert server.asked == [address(compiled)]
    assert server.agents == {"iaprof"}


def test_a_miss_is_remembered_for_a_while(server: Server, binaries: Binaries, compiled: Build, cache: Path) -> None:
    # given
    client = Debuginfod([server.url], cache)
    cached = cache / address(compiled).removeprefix("/buildid/")
    # when asked twice
    assert [find(client, binaries, compiled) for _ in range(2)] == [(None, "", [])] * 2
    assert server.asked == [address(compiled)]
    assert cached.stat().st_size == 0
    # and when some time has passed
    os.utime(cached, (0, time.time() - 599))
    find(client, binaries, compiled)
    assert len(server.asked) == 1
    os.utime(cached, (0, time.time() - 601))
    server.answers[address(compiled)] = sends(compiled.path.read_bytes())
    assert find(client, binaries, compiled)[0] == compiled.path.read_bytes()
    assert len(server.asked) == 2
    # and when a file in the cache sets the time
    cached.write_bytes(b"")
    os.utime(cached, (0, time.time() - 50))
    (cache / "cache_miss_s").write_text("40\n")
    assert find(client, binaries, compiled)[0] is not None
    assert len(server.asked) == 3


def test_the_second_server_is_asked_if_the_first_has_no_file(
    server: Server, second: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given that the second server has the file
    second.answers[address(compiled)] = sends(compiled.path.read_bytes())
    client = Debuginfod([server.url, second.url], cache)
    # when
    content, path, problems = find(client, binaries, compiled)
    # then
    assert content == compiled.path.read_bytes()
    assert (path, problems) == (f"{second.host} (debuginfod)", [])
    assert server.asked == second.asked == [address(compiled)]


def test_a_failure_is_not_cached_as_a_miss(
    server: Server, second: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given a server that fails and one that does not have the file
    server.default = status(500)
    # when
    client = Debuginfod([server.url, second.url], cache)
    assert find(client, binaries, compiled)[2] == [f"debuginfod server {server.host} answered with HTTP status 500"]
    # then
    assert not any(path.is_file() for path in cache.rglob("*"))
    # and the server that failed is not asked again
    assert find(client, binaries, compiled, Kind.DEBUG_INFO) == (None, "", [])
    assert (len(server.asked), len(second.asked)) == (1, 2)


MISBEHAVING = {
    "nothing": (is_silent, "did not answer within 0.3 s"),
    "hangs up": (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), "cannot be asked"),
    "endless headers": (drips_headers, "took longer than 0.9 s"),
    "endless and fast": (never_ends(), "sends more than 1048576 bytes"),
    "endless and slow": (never_ends(0.05), "took longer than 0.9 s"),
    "stops": (sends(b"\x7fELF", 1000), "broke off"),
    "no ELF file": (sends(b"<html>" * 100), "what is not a file of that build"),
    "empty": (sends(b""), "what is not a file of that build"),
    "redirects without end": (redirects_without_end(302), "HTTP status 302"),
    "others without end": (redirects_without_end(308), "HTTP status 308"),
    "to a file": (status(302, Location="file:///etc/passwd"), "HTTP status 302"),
    "to FTP": (status(302, Location="ftp://127.0.0.1/x"), "cannot be asked"),
    "to data": (status(301, Location="data:,x"), "HTTP status 301"),
    "nonsense": (lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"), "cannot be asked"),
    "bad chunks": (status(200, **{"Transfer-Encoding": "chunked"}), ""),
}


@pytest.mark.parametrize("case", MISBEHAVING)
def test_misbehaving_servers_cost_only_names(
    server: Server, binaries: Binaries, compiled: Build, cache: Path, case: str, within: Within
) -> None:
    # given
    server.default, expected = MISBEHAVING[case]
    # (limits are short only where they end the download: on a busy machine a server may answer late)
    wait_s, download_s = 0.3 if "within" in expected else 60, 0.9 if "longer" in expected else 60
    client = Debuginfod([server.url], cache, Bounds(wait_s, download_s, size=1 << 20))
    # when
    with within(2):
        content, _, problems = find(client, binaries, compiled)
    # then
    assert content is None
    (problem,) = problems
    assert problem.startswith(f"debuginfod server {server.host} ")
    assert expected in problem
    assert problem.isprintable()
    assert not any(path.is_file() for path in cache.rglob("*"))
    # and the server is not asked again
    asked = len(server.asked)
    assert find(client, binaries, compiled) == (None, "", [])
    assert len(server.asked) == asked


def test_a_file_of_another_build_is_refused(server: Server, binaries: Binaries, compiled: Build, cache: Path) -> None:
    other = build(cache.parent / "other.so", "wrong")
    server.default = sends(other.path.read_bytes())
    content, _, problems = find(Debuginfod([server.url], cache), binaries, compiled)
    assert (content, problems) == (None, [f"debuginfod server {server.host} sent a file of another build"])


def test_redirects_are_followed_up_to_a_limit(
    server: Server, second: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given a redirect to another server
    server.answers[address(compiled)] = status(302, Location=f"{second.url}/moved")
    second.answers["/moved"] = status(307, Location="/here")
    second.answers["/here"] = sends(compiled.path.read_bytes())
    assert find(Debuginfod([server.url], cache), binaries, compiled)[0] == compiled.path.read_bytes()
    # and redirects in a circle, and ones that never end
    shutil.rmtree(cache)
    server.answers[address(compiled)] = status(302, Location=address(compiled))
    assert find(Debuginfod([server.url], cache), binaries, compiled)[0] is None

    def further(handler: http.server.BaseHTTPRequestHandler) -> None:
        status(302, Location=f"{handler.path}x")(handler)

    second.default = further
    assert find(Debuginfod([second.url], cache), binaries, compiled)[0] is None
    assert len(second.asked) < 15
    assert len(server.asked) < 15


def test_a_file_that_is_too_large_is_skipped_but_the_server_is_asked_again(
    server: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    content = compiled.path.read_bytes()
    server.answers[address(compiled)] = sends(content)
    server.answers[address(compiled, Kind.DEBUG_INFO)] = sends(content, 1 << 40)
    client = Debuginfod([server.url], cache, SMALL)
    problem = f"debuginfod server {server.host} has a file of more than 1048576 bytes"
    assert find(client, binaries, compiled, Kind.DEBUG_INFO)[2] == [problem]
    assert find(client, binaries, compiled)[0] == content


def test_unreachable_servers_are_a_problem(binaries: Binaries, compiled: Build, cache: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        for url in (f"http://{host}", "http://", "http://[", "http://\0", "http://127.0.0.1:x"):
            content, _, problems = find(Debuginfod([url], cache, SMALL), binaries, compiled)
            assert content is None
            assert len(problems) == 1
            assert "cannot be asked" in problems[0]


def test_cached_files_are_used_only_if_they_are_of_the_build(
    server: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given
    server.default = sends(compiled.path.read_bytes())
    cached = cache / address(compiled).removeprefix("/buildid/")
    cached.parent.mkdir(parents=True)
    other = build(cache.parent / "other.so", "wrong")

    def fifo() -> None:
        os.mkfifo(cached)

    makers: list[Callable[[], object]] = [
        lambda: shutil.copy(other.path, cached),
        lambda: cached.write_text("text"),
        lambda: cached.symlink_to("nowhere"),
        fifo,
    ]
    # when
    for make in makers:
        make()
        assert find(Debuginfod([server.url], cache), binaries, compiled)[0] == compiled.path.read_bytes()
        # then the downloaded file is in the cache
        assert cached.read_bytes() == compiled.path.read_bytes()
        cached.unlink()


def test_downloaded_files_are_used_without_a_writable_cache(
    server: Server, binaries: Binaries, compiled: Build, tmp_path: Path
) -> None:
    # given no cache folder, and one that cannot be created
    server.default = sends(compiled.path.read_bytes())
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "cache"):
        with no_descriptor_is_lost():
            content, path, problems = find(Debuginfod([server.url], folder), binaries, compiled)
        assert (content, path) == (compiled.path.read_bytes(), f"{server.host} (debuginfod)")
        assert problems == []


@pytest.mark.root
def test_root_makes_no_files_in_another_users_home(
    server: Server, binaries: Binaries, compiled: Build, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    server.default = sends(compiled.path.read_bytes())
    client = Debuginfod([server.url], home / ".cache" / "debuginfod_client")
    assert find(client, binaries, compiled)[0] == compiled.path.read_bytes()
    assert list(home.iterdir()) == []


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment with a home folder, without variables for debuginfod."""
    for name in list(os.environ):
        if name.startswith(("DEBUGINFOD_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_the_client_is_off_unless_the_environment_names_servers(environment: pytest.MonkeyPatch) -> None:
    assert Debuginfod.of_environment() is None
    for urls in ("", "  ", "file:///srv", "ima:enforcing", "ftp://a.b", "http"):
        environment.setenv("DEBUGINFOD_URLS", urls)
        assert Debuginfod.of_environment() is None


def test_the_environment_sets_servers_and_limits(
    environment: pytest.MonkeyPatch, server: Server, second: Server, binaries: Binaries, compiled: Build, tmp_path: Path
) -> None:
    # given a silent server, and one that has the file
    server.default = is_silent
    second.default = sends(compiled.path.read_bytes())
    environment.setenv("DEBUGINFOD_URLS", f" {server.url} ima:ignore file:///srv {second.url}/ ")
    environment.setenv("DEBUGINFOD_TIMEOUT", "2.5")  # enough for the second server, also on a busy machine
    # when
    client = Debuginfod.of_environment()
    # then
    assert client is not None
    content, path, problems = find(client, binaries, compiled)
    assert (content, path) == (compiled.path.read_bytes(), f"{second.host} (debuginfod)")
    assert problems == [f"debuginfod server {server.host} did not answer within 2.5 s"]
    assert (tmp_path / ".cache/debuginfod_client" / address(compiled).removeprefix("/buildid/")).is_file()
    # and with a limit of the size
    environment.setenv("DEBUGINFOD_URLS", second.url)
    environment.setenv("DEBUGINFOD_MAXSIZE", "100")
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    client = Debuginfod.of_environment()
    assert client is not None
    assert find(client, binaries, compiled)[2] == [f"debuginfod server {second.host} has a file of more than 100 bytes"]
    # and with a limit of the time
    second.default = never_ends(0.05)
    environment.setenv("DEBUGINFOD_MAXTIME", "0.4")
    environment.setenv("DEBUGINFOD_MAXSIZE", "nonsense")
    client = Debuginfod.of_environment()
    assert client is not None
    assert find(client, binaries, compiled)[2] == [f"debuginfod server {second.host} took longer than 0.4 s"]
    # and without limits
    second.default = sends(compiled.path.read_bytes())
    environment.setenv("DEBUGINFOD_MAXTIME", "1e300")
    client = Debuginfod.of_environment()
    assert client is not None
    assert find(client, binaries, compiled)[0] == compiled.path.read_bytes()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, ".cache/debuginfod_client"),
        ({"XDG_CACHE_HOME": "relative"}, ".cache/debuginfod_client"),
        ({"XDG_CACHE_HOME": "/HOME/xdg"}, "xdg/debuginfod_client"),
        ({"XDG_CACHE_HOME": "/HOME/xdg", "DEBUGINFOD_CACHE_PATH": "/HOME/own"}, "own"),
    ],
)
def test_the_cache_folder_is_that_of_other_clients(
    environment: pytest.MonkeyPatch,
    server: Server,
    binaries: Binaries,
    compiled: Build,
    tmp_path: Path,
    variables: dict[str, str],
    folder: str,
) -> None:
    for key, value in variables.items():
        environment.setenv(key, value.replace("/HOME", str(tmp_path)))
    environment.setenv("DEBUGINFOD_URLS", server.url)
    server.default = sends(compiled.path.read_bytes())
    client = Debuginfod.of_environment()
    assert client is not None
    find(client, binaries, compiled)
    (cached,) = (path for path in tmp_path.rglob("executable"))
    assert cached.parent.parent == tmp_path / folder


# --- in a report


def test_file_and_debug_information_from_a_server(
    server: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given a server with a stripped file and its separate debug file
    library = copied(compiled, cache.parent / "libhere.so")
    debug = cache.parent / "x.debug"
    take_out_debug_information(library, debug, link=False)
    server.answers[address(compiled)] = sends(library.path.read_bytes())
    server.answers[address(compiled, Kind.DEBUG_INFO)] = sends(debug.read_bytes())
    module = compiled.module("/gone")
    # when
    with no_descriptor_is_lost():
        symbolized = symbolize(LocalFiles(binaries, None, [], Debuginfod([server.url], cache)), module, compiled.offset)
    # then
    assert function_at(symbolized, compiled.offset) == "here"
    assert (symbolized.source, symbolized.problem) == (f"debug information of {server.host} (debuginfod)", "")
    assert server.asked == [address(compiled), address(compiled, Kind.DEBUG_INFO)]


def test_servers_are_not_asked_for_local_files(
    server: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given the file with its debug information
    client = Debuginfod([server.url], cache)
    symbolizer = LocalFiles(binaries, None, [], client)
    assert function_at(symbolize(symbolizer, compiled.module(), compiled.offset), compiled.offset) == "here"
    assert server.asked == []
    # and a file without debug information: servers are asked for that only
    library = copied(compiled, cache.parent / "libhere.so")
    debug = cache.parent / "x.debug"
    take_out_debug_information(library, debug, link=False)
    server.answers[address(compiled, Kind.DEBUG_INFO)] = sends(debug.read_bytes())
    assert function_at(symbolize(symbolizer, compiled.module(library.path), compiled.offset), compiled.offset) == "here"
    assert server.asked == [address(compiled, Kind.DEBUG_INFO)]


def test_failures_of_servers_are_reported_as_problems(
    server: Server, binaries: Binaries, compiled: Build, cache: Path
) -> None:
    # given a server that fails when asked for a file, and for the debug information of another file
    server.default = status(503)
    symbolizer = LocalFiles(binaries, None, [], Debuginfod([server.url], cache))
    symbolized = symbolize(symbolizer, compiled.module("/gone"), compiled.offset)
    assert (symbolized.source, symbolized.problem) == (
        "",
        f"debuginfod server {server.host} answered with HTTP status 503",
    )
    library = copied(compiled, cache.parent / "libhere.so")
    take_out_debug_information(library, cache.parent / "x.debug", link=False)
    symbolizer = LocalFiles(binaries, None, [], Debuginfod([server.url], cache))
    symbolized = symbolize(symbolizer, compiled.module(library.path), compiled.offset)
    assert f"debuginfod server {server.host} answered with HTTP status 503" in symbolized.problem
