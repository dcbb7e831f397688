"""Dask clusters with TLS: as the documentation starts them, and what a caller with other certificates is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.report.fleet.cluster import Cluster
from thorough import thorough
from unit.report.fleet.fleets import SAMPLES
from waiting import LONGEST_WAIT_S, until

dask, distributed = pytest.importorskip("dask"), pytest.importorskip("distributed")
PAGE = Path(__file__).resolve().parents[4] / "docs" / "fleet.md"


def documented() -> Iterator[list[str]]:
    """The words of each command of the section about clusters."""
    section = PAGE.read_text().split("\n## On a cluster\n")[1].split("\n## ")[0]
    return map(shlex.split, re.findall(r"(?m)^ {4}\$ (.*)", section))


@contextlib.contextmanager
def running(words: list[str], *more: str, folder: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Dask's program, listening here on any port, and the file that has what it says."""
    log = folder / words[1]
    here = [sys.executable, "-m", *words, *more, "--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    with log.open("wb") as out:
        process = subprocess.Popen(here, cwd=folder, env=os.environ | environment, stdout=out, stderr=out)
    try:
        yield log
    finally:
        process.terminate()
        process.wait(LONGEST_WAIT_S)


def said(pattern: str, log: Path) -> str:
    """What a program says of itself, as soon as it does."""
    until(lambda: re.search(pattern, log.read_text()))
    return str(re.findall(pattern, log.read_text())[0])


async def identity(address: str, security: Any) -> Any:
    """What a scheduler or worker answers to whoever connects."""
    async with distributed.rpc(address, connection_args=security.get_connection_args("client")) as asked:
        return await asyncio.wait_for(asked.identity(), LONGEST_WAIT_S)


def top(cluster: str, *before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `iaprof top`, by another program."""
    command = [*before, sys.executable, "-m", "iaprof", "top", *map(str, SAMPLES[:2]), "--cluster", cluster]
    words = [*command, "--cache=none", "--json", "-q"]
    return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=False)


@thorough
def test_a_cluster_as_documented_lets_nobody_in_without_a_key(tmp_path: Path) -> None:
    # given what docs/fleet.md says, in its order, on this machine and with any port
    key, routes, scheduler, worker, authority, client, report = documented()
    assert [words[0] for words in (key, scheduler, worker, report)] == ["openssl", "dask", "dask", "iaprof"]
    assert worker[2] == report[report.index("--cluster") + 1] == "tls://HOST:8786"
    subprocess.run(key, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "dask.key").stat().st_mode & 0o777 == 0o600
    exported = dict(word.split("=", 1) for words in (routes, authority, client) for word in words[1:])
    exported = {name: value.replace("dask.", f"{tmp_path}/dask.") for name, value in exported.items()}
    crt, private = str(tmp_path / "dask.crt"), str(tmp_path / "dask.key")
    key_of_cluster = distributed.Security(tls_ca_file=crt, tls_client_cert=crt, tls_client_key=private)
    with running(scheduler, "--port", "0", folder=tmp_path, environment=exported) as log:
        address, page = said(r"Scheduler at: +(\S+)", log), said(r"dashboard at: +(\S+)/status", log)
        words = [*worker[:2], address, *worker[3:]]
        with running(words, "--local-directory", str(tmp_path), folder=tmp_path, environment=exported) as log:
            its_address, its_page = said(r"Start worker at: +(\S+)", log), said(r"dashboard at: +(\S+)", log)
            # when
            traced = ["strace", "-f", "-qq", "--seccomp-bpf", "-etrace=socket,bind,listen", f"-o{tmp_path}/calls"]
            done = top(address, *traced, **exported)
            # then it is the report of this machine
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout == top("local:1").stdout
            # and its own process has connected, and does not listen
            calls = (tmp_path / "calls").read_text()
            assert "socket(AF_INET, SOCK_STREAM" in calls
            assert not re.search("bind|listen", calls)
            # and who has no key, or another one, gets no answer
            for where, kind in ((address, "Scheduler"), (its_address, "Worker")):
                assert asyncio.run(identity(where, key_of_cluster))["type"] == kind
                for security in (distributed.Security(), distributed.Security.temporary()):
                    for each in (where, where.replace("tls:", "tcp:")):
                        with pytest.raises((OSError, TypeError, RuntimeError)):
                            asyncio.run(identity(each, security))
            # and HTTP has nothing to tell
            for server in (page, f"http://{its_page}"):
                for path in ("/", "/status", "/health", "/metrics", "/json/identity.json", "/info/main/workers.html"):
                    with pytest.raises(urllib.error.HTTPError, match="404"):
                        urllib.request.urlopen(f"{server}{path}", timeout=LONGEST_WAIT_S)


@pytest.fixture
def no_tls() -> Iterator[str]:
    """The address of a server that greets, and knows nothing of TLS: as a scheduler without it does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(bytes(64))

        threading.Thread(target=greet, daemon=True).start()
        yield f"tls://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def test_what_is_wrong_with_certificates_is_one_sentence(dask_cluster: Any, no_tls: str) -> None:
    address = dask_cluster.scheduler_address
    other = distributed.Security.temporary()
    wrong: list[tuple[str, dict[str, object], str]] = [
        (address, {"ca-file": None}, r"^tls://\S+ needs certificates: name them in Dask's configuration"),
        (address, {"ca-file": "/no/such"}, "^a certificate that Dask's configuration names cannot be read: .*No such"),
        (
            address,
            {"ca-file": other.tls_ca_file},
            "^no scheduler answers at .* or none that accepts Dask's certificates",
        ),
        (
            address,
            {"client.cert": other.tls_client_cert, "client.key": other.tls_client_key},
            "^no scheduler answers at .* or none that accepts Dask's certificates",
        ),
        (no_tls, {}, "^no scheduler answers at .* or none that accepts Dask's certificates"),
        (address.replace("tls:", "tcp:"), {}, "^no scheduler answers at tcp:"),
        (address.replace("tls:", "foo:"), {}, "^--cluster takes tcp://HOST:PORT, tls://HOST:PORT or local:N, not foo:"),
    ]
    for where, settings, sentence in wrong:
        with (
            dask.config.set({f"distributed.comm.tls.{name}": value for name, value in settings.items()}),
            pytest.raises(IaprofError, match=sentence),
        ):
            Cluster(where)
