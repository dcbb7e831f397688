"""Which sockets verbs open: none that anybody else can reach, but for the server of `iaprof report --serve`.

strace sees every socket of every process that a verb starts, however short it is open. A look at /proc/net sees only
those of that moment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from iaprof.cli.main import app
from iaprof.record.spool import FrameKind, Spool
from integration.recording import IAPROF, environment, iaprof
from standin import runtime
from standin.hardware import Hardware
from terminals import Terminal
from thorough import usually
from unit.timelines.clock_examples import E1
from waiting import LONGEST_WAIT_S, until

pytestmark = pytest.mark.bpf
CAPTURES = Path(__file__).resolve().parents[1] / "data" / "captures"
TRACED = ["strace", "-D", "-f", "-ff", "-q", "--seccomp-bpf", "-yy", "-etrace=socket,bind,listen"]
CALLS = [
    "help record",
    "check",
    "devices",
    "calibrate {driver} -o {out}.json",
    "record -o {out}.parquet -- {program}",
    "record --launches inject -o {out}.parquet -- {program}",
    "flame -o {out}.html -- {program}",
    "recover {spool} -o {out}.parquet",
    "info {capture}",
    "report {capture} -o {out}.html",
    "report {captures} --group-by host -o {out}.html",
    "report {captures} --cluster local:2 -o {out}.html",
    "report {traces} -o {out}.html",
    "report {capture} -i",
    "report {capture} --serve",
    "top {captures} --cluster local:2 --percentiles --group-by host",
    "top --live -- {longer}",
    "annotate {capture}",
    "diff {capture} {other} -o {out}.html",
    "diff {captures} {captures} --cluster local:2 -o {out}.html",
    "query {capture} 'SELECT sum(samples) FROM samples'",
    "merge {capture} {traces} -o {out}.parquet",
    "archive {capture} --redact -o {out}.parquet",
    "import {trace} -o {out}.parquet",
    "timeline {traces} --html --pddf --tb -o {out}",
]
OFTEN = [
    "record --launches inject -o {out}.parquet -- {program}",
    "report {captures} --cluster local:2 -o {out}.html",
    "report {capture} -i",
    "report {capture} --serve",
    "top --live -- {longer}",
    "query {capture} 'SELECT sum(samples) FROM samples'",
]
ALLOWED = {
    "report {capture} --serve": {
        "socket AF_INET, SOCK_STREAM|SOCK_CLOEXEC, IPPROTO_IP",
        'bind {sa_family=AF_INET, sin_port=htons(0), sin_addr=inet_addr("127.0.0.1")}',
        "listen TCP:[127.0.0.1]",
    }
}
"""Besides sockets of AF_UNIX without a name."""
MAY_FAIL = {"check", "calibrate"}  # on a machine that lacks something, and as the stand-in's driver is none


def test_every_verb_is_called() -> None:
    assert {call.split()[0] for call in CALLS} == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What calls name."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "rank_0.json").write_text(json.dumps(E1))
    assert iaprof("import", folder / "rank_0.json", "-o", folder / "traces.parquet").code == 0
    spool = Spool(folder / "spool")
    spool.write(FrameKind.SIDEBAND, b"", time=1)
    spool.close()
    several = folder / "captures"
    several.mkdir()
    for name in ("format-8.parquet", "format-9.parquet"):  # one for each worker
        shutil.copy(CAPTURES / name, several)
    files = {"spool": folder / "spool", "trace": folder / "rank_0.json", "traces": folder / "traces.parquet",
             "capture": CAPTURES / "format-9.parquet", "other": CAPTURES / "format-8.parquet",
             "captures": several, "driver": runtime.build().library}  # fmt: skip
    elfs = [runtime.debug_elf("bmg", "matmul")]
    seconds = {"program": 1, "longer": 300}
    commands = {name: shlex.join(runtime.command(elfs, "--seconds", each)) for name, each in seconds.items()}
    return commands | {name: shlex.quote(str(path)) for name, path in files.items()}


@pytest.fixture
def hardware(tmp_path: Path) -> Iterator[Hardware]:
    with Hardware(tmp_path / "gpu") as started:
        yield started


def sockets(line: str) -> str | None:
    """What a line of strace's opens; None for a socket of AF_UNIX, for signals, and for how a process ended."""
    if line.startswith(("--- ", "+++ ", "socket(AF_UNIX")):
        return None
    found = re.fullmatch(r"(socket|bind|listen)\((?:\d+<)?(.*)\) += .*", line)
    assert found, line
    call, arguments = found.groups()
    if call == "listen":
        arguments = re.sub(r":\d+\]>, \d+$", "]", arguments)
    elif call == "bind":
        arguments = re.sub(r"^.*?(\{.*\}), \d+$", r"\1", arguments)
    return f"{call} {arguments}"


def run(words: list[str]) -> tuple[int, str]:
    """Runs a verb to its end; returns its exit code, and what it says."""
    if "--serve" in words:
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            assert any("serving http" in line for line in server.stderr)
            server.send_signal(signal.SIGINT)
            return server.wait(LONGEST_WAIT_S), ""
    if "-i" in words or "--live" in words:
        with Terminal(words, os.environ, columns=120, lines=30) as terminal:
            terminal.until("launches/s" if "--live" in words else "SAMPLES")
            terminal.press("q")
            return terminal.wait(), terminal.text
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LONGEST_WAIT_S)
    return done.returncode, done.stderr


@pytest.mark.parametrize("call", usually(OFTEN, CALLS))
def test_verbs_open_no_sockets_for_others(call: str, world: dict[str, str], tmp_path: Path, hardware: Hardware) -> None:
    # given
    logs = tmp_path / "logs"
    logs.mkdir()
    verb, *words = shlex.split(call.format(out=tmp_path / "out", **world))
    env = environment(hardware) | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    own = [f"-E{name}={value}" for name, value in env.items()]  # not of strace, into which the stand-in would be loaded
    # when
    code, said = run([*TRACED, f"-o{logs}/of", *own, *IAPROF, verb, *words])
    assert code == 0 or verb in MAY_FAIL, said
    # then, when each of its processes has ended
    until(lambda: all(re.search(r"(?m)^\+\+\+ ", log.read_text()) for log in logs.iterdir()))
    lines = [line for log in logs.iterdir() for line in log.read_text().splitlines()]
    assert {sockets(line) for line in lines} - {None} == ALLOWED.get(call, set())
