"""Another user of the machine, who tries to run code in processes of ours that listen, as Dask does for its clients."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.recording import IAPROF
from waiting import until

pytestmark = pytest.mark.beside
CAPTURES = Path(__file__).resolve().parents[1] / "data" / "captures"
SAMPLES = [CAPTURES / "format-8.parquet", CAPTURES / "format-9.parquet"]  # one for each worker
ROOT, VICTIM, ATTACKER = 0, 60001, 60002

# Stays, as the namespace does meanwhile, which has nothing but a loopback interface (SIOCSIFFLAGS, IFF_UP).
NETWORK = """
import fcntl, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14x", b"lo", 1))
print("up", flush=True)
sys.stdin.read()
"""

# Prints each new listener, and has it write a file that is named by its user, if it runs what Dask's clients want.
ATTACK = """
import contextlib, os, sys, threading, time
import distributed

def attack(address, folder):
    with contextlib.suppress(Exception), distributed.Client(address, timeout=10) as client:
        client.run_on_scheduler(os.system, f"id -u > {folder}/$(id -u)")

known = set()
print("looking", flush=True)
while True:
    for name, here in (("tcp", "127.0.0.1"), ("tcp6", "[::1]")):
        for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
            local, state = line.split()[1::2][:2]
            port = int(local.rpartition(":")[2], 16)
            if state == "0A" and (name, port) not in known:
                known.add((name, port))
                print(f"{name} {port}", flush=True)
                threading.Thread(target=attack, args=(f"tcp://{here}:{port}", sys.argv[1]), daemon=True).start()
    time.sleep(0.002)
"""


def of(user: int, *words: str | Path) -> list[str]:
    """The command line of a user's process; it may read all files, as this Python may be where only root may go."""
    may_read = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    rights = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *may_read] if user else []
    return [*rights, *map(str, words)]


def listening(log: Path) -> list[str]:
    """The sockets that the attacker found; Dask's client may write of its own end, too."""
    return [line for line in log.read_text().splitlines() if line.startswith("tcp")]


@pytest.fixture
def inside() -> Iterator[list[str]]:
    """How command lines begin that run in a network of their own: other tests listen, too."""
    words = ["unshare", "--net", sys.executable, "-c", NETWORK]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        try:
            yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        finally:
            holder.communicate()


@contextlib.contextmanager
def running(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that goes on until the block ends, and writes what it says to a file."""
    with log.open("wb") as out, subprocess.Popen(words, stdout=out, stderr=out, cwd="/") as process:
        try:
            yield process
        finally:
            process.kill()


def test_nobody_else_gets_into_the_processes_of_a_verb(folder: Path, inside: list[str]) -> None:
    # given
    won, log = folder / "won", folder / "attacker.log"
    won.mkdir()
    won.chmod(0o777)
    for user in (VICTIM, ROOT):
        (folder / str(user)).mkdir()
        os.chown(folder / str(user), user, user)
    with running([*inside, *of(ATTACKER, sys.executable, "-c", ATTACK, won)], log) as attacker:
        until(lambda: log.read_text() == "looking\n", attacker)
        # and that the attacker gets into a scheduler of Dask's without TLS
        scheduler = ["-m", "dask", "scheduler", "--host=127.0.0.1", "--port=0", "--dashboard-address=127.0.0.1:0"]
        with running([*inside, *of(VICTIM, sys.executable, *scheduler)], folder / "scheduler.log") as process:
            until(lambda: (won / str(VICTIM)).exists(), process)
        (won / str(VICTIM)).unlink()
        seen = listening(log)
        assert len(seen) == 2  # the scheduler, and its HTTP server
        # when
        for user in (VICTIM, ROOT):
            report = [*IAPROF, "report", *map(str, SAMPLES), "--cluster=local:2", "--cache=none", "-o", "out.html"]
            subprocess.run(
                [*inside, *of(user, *report)],
                cwd=folder / str(user),
                env=os.environ | {"HOME": str(folder)},
                check=True,
            )
        # then
        assert attacker.poll() is None
        assert [path.name for path in won.iterdir()] == []
        assert listening(log) == seen
