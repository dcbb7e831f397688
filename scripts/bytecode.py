"""Compiles the BPF programs into bpf/programs.json, always with the bcc of Debian 12: `make bytecode`.

    sudo .venv/bin/python scripts/bytecode.py
    .venv/bin/python scripts/bytecode.py --check    checks that the file matches the C files; needs no bcc, no root

As it does not read the old file, run it after a merge conflict in that file.
"""

import os
import subprocess
import sys
from pathlib import Path

from iaprof.basics.errors import IaprofError
from iaprof.bpf.bytecode import Bytecode, BytecodeError
from iaprof.bpf.compile.compilation import Compilation
from iaprof.bpf.programs import SHIPPED, shipped, source

RELEASE = "bookworm"


def compiled(release: str) -> Bytecode:
    """Compiles this checkout's programs with bcc and LLVM of a release of Debian.

    Raises:
        BpfUnavailable: the programs do not compile.
        CalledProcessError: bcc could not be downloaded.
    """
    script = Path(__file__).with_name("debian-bcc")
    folder = subprocess.run([script, release], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()
    packages = f"{folder}/usr/lib/python3/dist-packages"
    return Compilation(source(), (packages,), (f"{folder}/python",)).wait()


def check() -> str | None:
    """Returns what is wrong with the file; None if it is current."""
    try:
        if shipped().source == source().digest():
            return None
    except BytecodeError as error:
        return str(error)
    return "it was not made from the current C files and numbers"


def main() -> None:
    """Compiles the programs, or checks the file."""
    if sys.argv[1:] == ["--check"]:
        if wrong := check():
            sys.exit(f"bpf/programs.json: {wrong}; run 'make bytecode'")
        return
    try:
        text = compiled(RELEASE).to_text()
    except (IaprofError, subprocess.CalledProcessError) as error:
        sys.exit(f"bytecode: {error}")
    path = SHIPPED.resolve()
    new = path.with_suffix(".new")
    new.write_text(text)
    owner = path.parent.stat()
    os.chown(new, owner.st_uid, owner.st_gid)
    new.replace(path)


if __name__ == "__main__":
    main()
