"""An attacker: processes of another user that fire `compile_kernel` as they like, and a file system that never answers.

The probe is the real one, in a library of the attacker's own; the recorder finds it by LD_LIBRARY_PATH.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from standin import runtime

NOBODY = 65534
PYTHON = "/usr/bin/python3"  # the tests' own may lie where the other user cannot go
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]

LIBRARY = """
#include "probes.h"
void compiled(const char *path) { LEVEL_ZERO_COMPILE_KERNEL(path); }
void launched(void) { LEVEL_ZERO_LAUNCH_KERNEL(0, 0, 0, ""); }
"""

# Fires with a path; to be made setuid root, and so the library is not its caller's choice.
SETUID = """
#include <dlfcn.h>
#include <unistd.h>
int main(int count, char **words) {
    void (*compiled)(const char *) = count == 3 ? dlsym(dlopen(LIBRARY, RTLD_NOW), "compiled") : 0;
    if (!compiled || geteuid() != 0 || getuid() == 0)
        return 1;
    compiled(words[1]);
    if (chdir(words[2]))
        return 1;
    for (int turn = 0; turn < 12000 && access(GATE, F_OK); turn++)
        usleep(10000);
    return 0;
}
"""

# Who fires stays until this is there, seen from its folder: its /proc entry is needed until what it named was opened.
GATE = "../gate"

# Fires with each path, and stays.
FIRE = """
import ctypes, json, os, sys, time
library, paths, folder, seconds = sys.argv[1:]
os.chdir(folder)
fire = ctypes.CDLL(library).compiled
for path in json.loads(paths):
    fire(ctypes.c_void_p(8) if path is None else ctypes.c_char_p(bytes.fromhex(path)))
end = time.monotonic() + float(seconds)
while time.monotonic() < end and not os.path.exists("../gate"):
    time.sleep(0.01)
"""

# A file system that answers its mount (FUSE_INIT, opcode 26; include/uapi/linux/fuse.h) and then takes requests without
# an answer to any. Seen in a mount namespace of its own, so that nobody else's `df` hangs in it.
HANG = """
import ctypes, os, struct, sys
folder, command = sys.argv[1], sys.argv[2:]
libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fuse},rootmode=40000,user_id=65534,group_id=65534,allow_other".encode()
if libc.mount(b"none", folder.encode(), b"fuse", 6, options):
    sys.exit(os.strerror(ctypes.get_errno()))
if os.fork():
    os.close(fuse)
    os.execvp(command[0], command)
os.setresuid(65534, 65534, 65534)
libc.prctl(1, 9)  # PR_SET_PDEATHSIG: it ends with the command, and with it go all that hang
request = os.read(fuse, 1 << 20)
unique, = struct.unpack_from("<Q", request, 8)
assert struct.unpack_from("<I", request, 4) == (26,)
answer = struct.pack("<IIIIHHIIHHI", 7, 31, 4096, 0, 12, 9, 4096, 1, 1, 0, 0) + bytes(28)
os.write(fuse, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
while True:
    os.read(fuse, 1 << 20)
"""


@contextlib.contextmanager
def folder_of_the_other_user() -> Iterator[Path]:
    """A folder of the other user's, below one that everyone may pass.

    It is not below pytest's: any pytest that starts takes others' rights to its folders away.
    """
    with tempfile.TemporaryDirectory(prefix="iaprof-test-") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder) / "other"
        path.mkdir()
        os.chown(path, NOBODY, NOBODY)
        yield path


@functools.cache
def _built() -> Path:
    """A folder that everyone may read, with the library and the setuid program."""
    folder = Path(tempfile.mkdtemp(prefix="iaprof-attacker-"))
    atexit.register(shutil.rmtree, folder)
    probes = runtime.build().library.parent
    flags = [*runtime.COMMON, "-O1", f"-I{probes}"]
    (folder / "library.c").write_text(LIBRARY)
    (folder / "setuid.c").write_text(SETUID)
    words: list[str | Path] = ["cc", *flags, "-fPIC", "-shared", folder / "library.c", probes / "probes.o"]
    subprocess.run([*words, "-o", folder / runtime.LIBRARY], check=True)
    defines = [f'-DLIBRARY="{folder / runtime.LIBRARY}"', f'-DGATE="{GATE}"']
    subprocess.run(["cc", *flags, *defines, "-o", folder / "setuid", folder / "setuid.c", "-ldl"], check=True)
    folder.chmod(0o755)
    (folder / "setuid").chmod(0o4755)
    return folder


def library() -> Path:
    """The attacker's library, compiled once."""
    return _built() / runtime.LIBRARY


def firing(*paths: str | Path | bytes | None, cwd: Path, stay: float = 120, prefix: tuple[str, ...] = ()) -> list[str]:
    """The command line of a process of the other user's that fires with each path; None is a pointer to nowhere.

    It stays until GATE is there, or for `stay` seconds.
    """
    hexed = [None if path is None else os.fsencode(path).hex() for path in paths]
    fire = [PYTHON, "-I", "-c", FIRE, str(library()), json.dumps(hexed), str(cwd), str(stay)]
    return [*AS_NOBODY, *prefix, *fire]


def firing_with_root(path: Path, cwd: Path) -> list[str]:
    """The same through a setuid program, whose effective user is root."""
    return [*AS_NOBODY, str(_built() / "setuid"), str(path), str(cwd)]


def hanging(folder: Path, command: list[str]) -> list[str]:
    """The command line of a command that sees a file system at `folder` that never answers."""
    return ["unshare", "-m", "--propagation", "private", PYTHON, "-I", "-c", HANG, str(folder), *command]


def at_once(*commands: list[str]) -> list[str]:
    """The command line that runs commands side by side, and ends with all of them."""
    return ["sh", "-c", " & ".join(shlex.join(command) for command in commands) + " & wait"]
