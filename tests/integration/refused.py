"""Recording where the kernel refuses the BPF programs that ship, so that they have to be compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from iaprof.bpf import bytecode
from iaprof.bpf.bytecode import Bytecode
from iaprof.bpf.programs import SHIPPED


def refused_text() -> str:
    """What ships, but that on_launch ends without a result, which no verifier takes."""
    content = json.loads(SHIPPED.read_text())
    content["programs"]["on_launch"] = {"maps": [], "constants": [], "calls": [], "code": ["95" + "00" * 7]}
    return json.dumps(content)


def refused() -> Bytecode:
    return bytecode.from_text(refused_text())


def where_it_is_refused(
    folder: Path, *command: str, before: str = "", env: Mapping[str, str] | None = None
) -> list[str]:
    """The command, to be run by root where that ships, and nothing was compiled before.

    Args:
        folder: for a file.
        command: with its arguments.
        before: what a shell does first, in the same mount namespace.
        env: in the command's environment only.
    """
    file = folder / "refused.json"
    file.write_text(refused_text())
    steps = [
        f"mount --bind '{file}' '{SHIPPED.resolve()}'",
        "mount -t tmpfs -o mode=755 none /var/cache",
        before or ":",
    ]
    words = [f"{name}={value}" for name, value in (env or {}).items()]
    return ["unshare", "-m", "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh", "env", *words, *command]
