# SPDX-License-Identifier: Apache-2.0
"""Programs in Go and Java, compiled by what scripts/test-languages unpacked, and the calls that they make.

languages = prepare()
with probed(library) as seen:
    first, second = rounds(seen, [program, "word"], 2)
"""

from __future__ import annotations

import bisect
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from integration.probed import Call, Probed
from stacks.debugger import HERE as STACKS

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "languages"


@dataclass(frozen=True)
class Languages:
    """The compilers."""

    folder: Path

    @property
    def go(self) -> Path:
        """GOROOT."""
        (path,) = self.folder.glob("usr/lib/go-*")
        return path

    @property
    def java(self) -> Path:
        """JAVA_HOME."""
        (path,) = self.folder.glob("usr/lib/jvm/java-[0-9][0-9]-openjdk-amd64")
        return path


def prepare() -> Languages:
    """Download them where they are not there yet."""
    script = HERE.parents[1] / "scripts" / "test-languages"
    return Languages(Path(subprocess.run([script], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()))


def rounds(
    seen: Probed, command: Sequence[str | Path], count: int, settings: Mapping[str, str] | None = None
) -> list[list[Call]]:
    """Runs a program that writes how many calls it made so far, and waits for a line, `count` times.

    Gives the calls of each round: what the next one begins with is known by then.
    """
    words, environment = [str(word) for word in command], os.environ | dict(settings or {})
    found: list[list[Call]] = []
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for _ in range(count):
            line = program.stdout.readline()
            found.append(seen.calls())
            assert sum(map(len, found)) == int(line)
            program.stdin.write("\n")
            program.stdin.flush()
    assert program.returncode == 0
    return found


@dataclass(frozen=True)
class GoProgram:
    """stacks.go, compiled with cgo, at the addresses that it was linked to."""

    path: Path

    @cached_property
    def _functions(self) -> list[tuple[int, str]]:
        done = subprocess.run(["nm", "-n", self.path], capture_output=True, text=True, check=True)
        lines = (line.split() for line in done.stdout.splitlines())
        return [(int(words[0], 16), words[2]) for words in lines if len(words) == 3 and words[1] in "tT"]

    def function(self, address: int) -> str:
        """The name of the function that has a return address; empty where that is in a library."""
        index = bisect.bisect(self._functions, address - 1, key=lambda function: function[0]) - 1
        return self._functions[index][1] if 0 <= index < len(self._functions) - 1 else ""

    def behind_prologue(self, function: str) -> int:
        """How many bytes of a function come before the frame pointer is in its register."""
        words = ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={function}", str(self.path)]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        code = [line.split(None, 1) for line in lines if line.startswith(" ")]
        sets = next(at for at, (_, text) in enumerate(code) if text.endswith(",%rbp") and "%rsp" in text)
        start, behind = (int(code[at][0].rstrip(":"), 16) for at in (0, sets + 1))
        return behind - start


def build_go(languages: Languages, folder: Path) -> GoProgram:
    """Compiles it."""
    for source in (SOURCES / "stacks.go", SOURCES / "calls.c", STACKS / "probe.S"):
        (folder / source.name).write_bytes(source.read_bytes())
    (folder / "go.mod").write_text("module stacks\n\ngo 1.19\n")
    settings = {"GOROOT": languages.go, "GOCACHE": folder / "cache", "GOPATH": folder / "path", "CGO_ENABLED": "1"}
    own = {"GOFLAGS": "-mod=mod", "GOTOOLCHAIN": "local", "GO111MODULE": "on", "GOENV": "off"}
    environment = os.environ | own | {name: str(value) for name, value in settings.items()}
    subprocess.run([languages.go / "bin/go", "build", "-o", "stacks", "."], cwd=folder, env=environment, check=True)
    return GoProgram(folder / "stacks")


def build_java(languages: Languages, folder: Path, *options: str | Path) -> Path:
    """Compiles Stacks.java, and its native library with these options, of which this is the path."""
    subprocess.run([languages.java / "bin/javac", "-d", folder, SOURCES / "Stacks.java"], check=True)
    library = folder / "liblooking.so"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread")
    command = ["cc", *flags, SOURCES / "looking.c", STACKS / "probe.S", *options, "-o", library]
    subprocess.run([str(word) for word in command], check=True)
    return library
