# SPDX-License-Identifier: Apache-2.0
"""Recording a program, while Linux counts its launches: what was recorded, said and counted.

The program is the only one that maps the files in which the counted functions are: scripts/test-programs copies them.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.wire.launches import LaunchFlags
from iaprof.gpu.code import canonical
from integration.recording import IAPROF
from programs.counting import Calls
from programs.programs import Programs, Run
from standin.hardware import Hardware
from waiting import until

Places = tuple[tuple[str, int], ...]  # files and offsets in them
LONGEST = 240  # seconds that a recording may take on a busy machine


@dataclass(frozen=True)
class Recording:
    """A capture of one program, what was said meanwhile, and how often the program launched."""

    capture: Path
    code: int  # exit code of `iaprof record`
    out: str
    said: str  # on stderr
    pid: int
    launches: int  # calls of the launch functions while the recorder recorded
    traced: int = 0  # bytes that `trace`, in its folder, had before

    def table(self, kind: str) -> list[dict[str, Any]]:
        """The capture's rows of the program."""
        return [row for row in CaptureReader(self.capture).table(kind).to_pylist() if row["pid"] == self.pid]

    @cached_property
    def all_recorded(self) -> list[dict[str, Any]]:
        """Its launches and those that its drivers made of kernels of their own, in the order of time."""
        return sorted(self.table("launch"), key=lambda row: row["time_ns"])

    @cached_property
    def recorded(self) -> list[dict[str, Any]]:
        """Its launches, in the order of time."""
        return [row for row in self.all_recorded if not row["flags"] & LaunchFlags.OWN]

    @cached_property
    def stacks(self) -> dict[int, dict[str, Any]]:
        """Its rows of stacks, by id."""
        return {row["id"]: row for row in self.table("stack")}

    def place(self, address: int) -> tuple[str, int]:
        """The file that was mapped at an address, and where in the file that is; an empty name where nothing was."""
        for row in self._mappings:
            if row["start"] <= address < row["start"] + row["length"]:
                return row["path"], address - row["start"] + row["offset"]
        return "", 0

    def path(self, stack: int) -> Places:
        """The places of a stack's addresses, the innermost first."""
        return tuple(self.place(address) for address in self.stacks[stack]["ips"])

    @cached_property
    def paths(self) -> Counter[tuple[str, Places]]:
        """Its launches by the kernel's name and the path."""
        return self._paths_of(self.recorded)

    @property
    def all_paths(self) -> Counter[tuple[str, Places]]:
        """The same, its drivers' own too."""
        return self._paths_of(self.all_recorded)

    def _paths_of(self, launches: list[dict[str, Any]]) -> Counter[tuple[str, Places]]:
        paths: Counter[tuple[str, Places]] = Counter()
        for (name, stack), count in Counter((row["name"], row["stack"]) for row in launches).items():
            paths[name, self.path(stack)] += count
        return paths

    @cached_property
    def _mappings(self) -> list[dict[str, Any]]:
        return self.table("mapping")

    @cached_property
    def placed(self) -> dict[tuple[int, int], set[str]]:
        """Names of the kernels whose code is in the capture, by address and bytes: as the sections of the modules say.

        More than one where a module was gone and another came to its place.
        """
        reader = CaptureReader(self.capture)
        elfs = {row["digest"]: row["elf"] for row in reader.table("kernel").to_pylist() if row["elf"] is not None}
        kernels: dict[tuple[int, int], set[str]] = {}
        for row in self.table("kernel"):
            for section in ELFFile(BytesIO(elfs[row["digest"]])).iter_sections():
                if section.name.startswith(".text.") and any(section.data()):
                    place = (canonical(section["sh_addr"]), section["sh_size"])
                    kernels.setdefault(place, set()).add(section.name.removeprefix(".text."))
        return kernels

    @property
    def recorded_names(self) -> Counter[str]:
        """Launches by name; empty where no code of a kernel of that name is where the launch says it is."""
        return self._names_of(self.recorded)

    @property
    def all_recorded_names(self) -> Counter[str]:
        """The same, its drivers' own too."""
        return self._names_of(self.all_recorded)

    def _names_of(self, launches: list[dict[str, Any]]) -> Counter[str]:
        places = [(row["name"], (canonical(row["address"]), row["size"])) for row in launches]
        return Counter(name if name in self.placed.get(place, ()) else "" for name, place in places)

    @property
    def losses(self) -> list[dict[str, Any]]:
        """What was lost of it: callers, too, but no mappings and names that came too fast."""
        return [loss for loss in self.info["losses"] if loss["source"] != "perf"]

    @property
    def info(self) -> dict[str, Any]:
        """What `iaprof info --json` says of it."""
        (part,) = json.loads(self.told("info", "--json"))["parts"]
        return dict(part)

    def told(self, verb: str, *options: str) -> str:
        """What a verb says of it, which has to work."""
        done = subprocess.run([*IAPROF, verb, self.capture, *options], capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == 0, done.stderr
        return done.stdout


def record(programs: Programs, run: Run, folder: Path, *options: str) -> Recording:
    """Records a program from its start to its end, in `folder`."""
    with Hardware(folder / "gpu", "bmg") as hardware, Calls(programs.launch_functions()) as calls:
        words, environment = run.started(folder)
        done = _record(words, environment | hardware.env(), folder, *options)
        launches = calls.total()
    return _recording(folder, done, launches)


def record_running(programs: Programs, run: Run, folder: Path, *options: str) -> Recording:
    """Records a program that has launched already and waits: `folder`/go.ready is there until it finds `folder`/go."""
    go, ready = folder / "go", folder / "go.ready"
    with Hardware(folder / "gpu", "bmg") as hardware, Calls(programs.launch_functions()) as calls:
        words, environment = run.started(folder)
        environment |= hardware.env()
        with (folder / "out").open("w") as out:
            program = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out)
        try:
            until(lambda: ready.exists() or program.poll() is not None, longest_s=LONGEST)
            assert program.poll() is None, (folder / "out").read_text()
            before = calls.total()
            traced = (folder / "trace").stat().st_size if (folder / "trace").exists() else 0
            # What the recorder starts, it starts when its probes are in.
            script = f"touch {go}; until grep -q '^State:.Z' /proc/{program.pid}/status; do sleep 0.05; done"
            done = _record(["sh", "-c", script], environment, folder, *options)
        finally:
            go.touch()
            program.wait(LONGEST)
        assert program.returncode == 0, (folder / "out").read_text()
        launches = calls.total() - before
    assert before
    return replace(_recording(folder, done, launches), traced=traced)


def _record(
    command: list[str], environment: dict[str, str], folder: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    # The environment is the recorder's, too: it leads it to the drivers, which it probes before they are mapped.
    words = [*IAPROF, "record", "-o", "capture", *options, "--", *command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST)


def _recording(folder: Path, done: subprocess.CompletedProcess[str], launches: int) -> Recording:
    pid = int((folder / "pid").read_text())
    return Recording(folder / "capture", done.returncode, done.stdout, done.stderr, pid, launches)


def ledger(file: Path) -> Counter[str]:
    """Launches by name, as preloaded.c wrote them."""
    lines = (line.split(" ", 1) for line in file.read_text().splitlines())
    launches: Counter[str] = Counter()
    for count, name in lines:
        launches[name] += int(count)
    return launches
