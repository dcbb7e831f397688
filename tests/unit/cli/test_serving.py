"""The server of a page: loopback only, secret address, read-only."""

import contextlib
import http.client
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from iaprof.cli.terminal.destination import opened_secretly
from iaprof.cli.terminal.serving import Server
from limits import Within
from thorough import thorough

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


def test_no_other_page_may_show_or_keep_it(address: str) -> None:
    at = urlsplit(address)
    with contextlib.closing(http.client.HTTPConnection(at.netloc, timeout=120)) as connection:
        connection.request("GET", at.path)
        headers = connection.getresponse().headers
    assert (headers["X-Frame-Options"], headers["Cache-Control"]) == ("DENY", "no-store")
    assert (headers["Referrer-Policy"], headers["X-Content-Type-Options"]) == ("no-referrer", "nosniff")


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


@pytest.mark.parametrize("number", [4, 16, 200])
def test_idle_connections_block_nobody(address: str, number: int) -> None:
    at = urlsplit(address)
    silent = [socket.create_connection((at.hostname, at.port)) for _ in range(number)]
    for each in silent[::2]:
        each.sendall(b"GET /")
    begun = time.monotonic()
    assert asked(address) == (200, PAGE)
    assert time.monotonic() - begun < 8  # not only when the silent ones have used up their time
    for each in silent:
        each.close()


def test_connections_without_end_leave_a_slow_reader_its_page() -> None:
    page = b"x" * (24 << 20)
    server = Server(page, "text/html")
    thread = threading.Thread(target=server._http.serve_forever, args=(0.02,))
    thread.start()
    at = urlsplit(server.address)
    found, others = 0, []
    with socket.create_connection((at.hostname, at.port)) as reader:
        reader.sendall(f"GET {at.path} HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
        found += len(reader.recv(1 << 16))
        others = [socket.create_connection((at.hostname, at.port)) for _ in range(150)]
        while piece := reader.recv(1 << 20):
            found += len(piece)
    for each in others:
        each.close()
    server._http.shutdown()
    server._http.server_close()
    thread.join(10)
    assert found > len(page)


def no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)


def test_the_secret_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # given a browser that notes its command line, and what is in the file that it is to open
    no_root(monkeypatch)
    noted, read, folder = tmp_path / "noted", tmp_path / "read", tmp_path / "folder"
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\nls -l "${{1#file://}}" | cut -c-10 >{read}\n'
        f'ls -ld "$(dirname "${{1#file://}}")" >{folder}\ncat "${{1#file://}}" >>{read}\necho "$1" >{noted}\n'
    )
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setattr("webbrowser._tryorder", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server = Server(PAGE, "text/html")
    secret = urlsplit(server.address).path.strip("/")
    # when
    with opened_secretly(server.address):
        deadline = time.monotonic() + 60
        while not (noted.exists() and noted.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
    server._http.server_close()
    # then
    assert noted.read_text().startswith("file://")
    assert secret not in noted.read_text()
    assert read.read_text().startswith("-rw-------")
    assert folder.read_text().startswith("drwx------")
    assert f"url={server.address}" in read.read_text()
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == []


def test_a_browser_that_is_waited_for_gets_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, within: Within
) -> None:
    # given a browser that ends when it has the page
    no_root(monkeypatch)
    got = tmp_path / "got"
    browser = tmp_path / "browser"
    browser.write_text(
        f"#!{sys.executable}\nimport os, re, sys, urllib.request\n"
        "address = re.search('url=([^\"]+)', open(sys.argv[1].removeprefix('file://')).read())[1]\n"
        f"open({str(got)!r}, 'wb').write(urllib.request.urlopen(address, timeout=60).read())\n"
        f"os.kill({os.getpid()}, 2)\n"
    )
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setattr("webbrowser._tryorder", None)
    server = Server(PAGE, "text/html")
    with within(60), opened_secretly(server.address):
        server.run()
    assert got.read_bytes() == PAGE


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


@thorough
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
