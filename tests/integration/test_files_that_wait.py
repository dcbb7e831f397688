"""A driver's name on a user's own file system, which answers until its file is mapped, and then never again."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.attacking import AS_NOBODY, PYTHON
from waiting import LONGEST_WAIT_S

pytestmark = [pytest.mark.root, pytest.mark.beside]

# A file system with one file (fuse(4), include/uapi/linux/fuse.h), and perhaps an overlay over it: the kernel opens
# files below an overlay with the rights of who mounted it, which no longer keeps root from waiting for that user.
SERVER = """
import ctypes, mmap, os, signal, struct, sys
folder, source, with_overlay = sys.argv[1:]
name, content = "libze_intel_gpu.so.1", open(source, "rb").read()
libc = ctypes.CDLL(None, use_errno=True)

def mount(what, where, kind, options):
    if libc.mount(what, f"{folder}/{where}".encode(), kind, 6, options.encode()):
        sys.exit(f"{kind}: {os.strerror(ctypes.get_errno())}")

def attributes(node):
    mode, size = (0o40755, 0) if node == 1 else (0o100755, len(content))
    return struct.pack("<6Q10I", node, size, 8, 1, 1, 1, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

def serve():
    while True:
        request = os.read(fuse, 1 << 20)
        opcode, unique, node = struct.unpack_from("<IQQ", request, 4)
        body, error = b"", 0
        if opcode == 26:  # INIT
            body = struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 0, 0, 4096, 1, 1, 0, *[0] * 8)
        elif opcode == 1:  # LOOKUP
            if request[40:].split(b"\\0")[0] == name.encode():
                body = struct.pack("<4Q2I", 2, 0, 1000, 1000, 0, 0) + attributes(2)
            else:
                error = -2
        elif opcode == 3:  # GETATTR
            body = struct.pack("<Q2I", 1000, 0, 0) + attributes(node)
        elif opcode in (14, 27):  # OPEN, OPENDIR
            body = struct.pack("<Q2I", 1, 0, 0)
        elif opcode == 15:  # READ
            _, at, size = struct.unpack_from("<QQI", request, 40)
            body = content[at : at + size]
        elif opcode == 17:  # STATFS
            body = bytes(80)
        elif opcode in (2, 42):  # FORGET, BATCH_FORGET
            continue
        elif opcode not in (18, 25, 28, 29, 44):  # RELEASE, FLUSH, READDIR, RELEASEDIR, READDIRPLUS
            error = -38
        os.write(fuse, struct.pack("<IiQ", 16 + len(body), error, unique) + body)

for each in ("below", "empty", "over"):
    os.mkdir(f"{folder}/{each}")
fuse = os.open(f"{folder}/device", os.O_RDWR)
mount(b"none", "below", b"fuse", f"fd={fuse},rootmode=40000,user_id=0,group_id=0")
server = os.fork()
if not server:
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG
    serve()
os.close(fuse)
if with_overlay == "yes":
    mount(b"none", "over", b"overlay", f"lowerdir={folder}/below:{folder}/empty,userxattr")
where = f"{folder}/{'over' if with_overlay == 'yes' else 'below'}/{name}"
with open(where, "rb") as file:
    kept = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC)
os.kill(server, signal.SIGSTOP)
print(os.getpid(), server, flush=True)
sys.stdin.read()
"""

LOOK = """
import re, sys
from iaprof.bpf.probes.libraries import Libraries
from iaprof.bpf.processes import describe
from iaprof.record.checks.stacks import mapped
pid = int(sys.argv[1])
assert b"libze_intel_gpu.so.1" in describe(pid, 5)
for _ in range(2):
    for outcome in Libraries(lambda *_: "", lambda *_: None).mapped(pid):
        print(outcome.problem)
assert pid not in [each.pid for each in mapped(re.compile(rb"libze_.*"))]
"""


@contextmanager
def mapped(folder: Path, with_overlay: str, of_root: bool = False) -> Iterator[int]:
    """A process of another user's, or root's, that has mapped a file of a file system that answers no more."""
    shutil.copy("/bin/true", folder / "content")
    os.mknod(folder / "device", 0o666 | stat.S_IFCHR, os.makedev(10, 229))
    (folder / "device").chmod(0o666)
    command = [PYTHON, "-I", "-c", SERVER, str(folder), str(folder / "content"), with_overlay]
    words = ["unshare", "-m", *command] if of_root else [*AS_NOBODY, "unshare", "-Urm", *command]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                assert process.stderr is not None
                pytest.skip(f"this kernel lets no user mount that: {process.stderr.read()}")
            pid, server = map(int, line.split())
            try:
                yield pid
            finally:
                os.kill(server, signal.SIGKILL)  # first: whoever closes a file waits for it, too
        finally:
            process.kill()


@pytest.mark.parametrize("with_overlay", ["no", "yes"])
def test_nobody_waits_for_a_users_file_system(folder: Path, with_overlay: str) -> None:
    with mapped(folder, with_overlay) as pid:
        said = looked_at(pid)
    # then it says once why it has no probes there
    assert said.startswith("neither root nor who started this recording mounted its file system")


@pytest.mark.parametrize("with_overlay", ["no", "yes"])
def test_nobody_waits_for_a_file_system_that_root_mounted(folder: Path, with_overlay: str) -> None:
    with mapped(folder, with_overlay, of_root=True) as pid:
        said = looked_at(pid)
    assert said.startswith("its file system does not answer")


def looked_at(pid: int) -> str:
    """Looks at a process as the recorder does, in a process of its own, as that may be kept forever."""
    looking = subprocess.run(
        [sys.executable, "-c", LOOK, str(pid)], capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )
    assert looking.returncode == 0, looking.stderr
    first, second = looking.stdout.splitlines()
    assert first == second
    return first
