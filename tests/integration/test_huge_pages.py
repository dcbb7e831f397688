"""Text that a program has copied into huge pages is its file's: names and whole stacks, as without that."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from iaprof.basics.elf import ElfFile, in_memory
from integration.recording import IAPROF, environment
from standin.hardware import Hardware
from thorough import thorough

pytestmark = pytest.mark.bpf
SOURCE = Path(__file__).parents[1] / "stacks" / "hugepages.c"
FLAGS = ["-O2", "-fno-toplevel-reorder", "-fomit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-inline"]
OURS = "main;outer;middle;innermost"
EXECUTABLE = 2  # the type of an ELF file
FEW = 20  # samples, which a program gets in a second on a busy machine, too
NODE = shutil.which("node")
SCRIPT = """
console.log('ready');
for (const end = Date.now() + %d; Date.now() < end;) JSON.stringify(process.versions);
"""


@pytest.fixture
def hardware(tmp_path: Path) -> Iterator[Hardware]:
    with Hardware(tmp_path / "gpu") as made:
        yield made


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("program") / "hugepages"
    subprocess.run(["gcc", *FLAGS, "-o", made, SOURCE], check=True)
    return made


@contextlib.contextmanager
def running(words: Sequence[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a program, and waits until it is in its remapped text; kills it in the end."""
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def remapped(pid: int, program: str) -> range | None:
    """Executable memory without a file between mappings of the program, in whole huge pages; None if there is none."""
    rows = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " r-xp " in line]
    names = [row[5] if len(row) > 5 else "" for row in rows]
    for at in range(1, len(rows) - 1):
        low, high = (int(bound, 16) for bound in rows[at][0].split("-"))
        if names[at - 1 : at + 2] == [program, "", program] and not (low | high) % (2 << 20):
            return range(low, high)
    return None


def cpu_samples(capture: Path, comm: str) -> Counter[str]:
    """Samples by stack, without the frames in the kernel."""
    done = subprocess.run([*IAPROF, "report", capture, "--cpu-samples"], capture_output=True, text=True, check=True)
    stacks: Counter[str] = Counter()
    for line in done.stdout.splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = [frame for frame in stack.split(";") if not frame.endswith("_[k]")]
        if frames[0] == comm:
            stacks[";".join(frames)] += int(count)
    return stacks


def recorded(hardware: Hardware, capture: Path, *words: str) -> subprocess.Popen[str]:
    command = [*IAPROF, "record", "-o", str(capture), "--cpu-freq", "499", *words]
    return subprocess.Popen(command, env=os.environ | environment(hardware), stderr=subprocess.PIPE, text=True)


def test_a_program_that_was_started_before(hardware: Hardware, program: Path, tmp_path: Path) -> None:
    # given
    with running([program, "60"]) as process:
        assert remapped(process.pid, str(program))
        # when
        recorder = recorded(hardware, tmp_path / "c", "--duration", "2")
        _, told = recorder.communicate(timeout=120)
        assert recorder.returncode == 0, told
    # then
    stacks = cpu_samples(tmp_path / "c", "hugepages")
    whole = sum(count for stack, count in stacks.items() if OURS in stack and "[cut" not in stack)
    assert whole > 0.8 * stacks.total() > FEW, stacks


def test_a_program_that_remaps_its_text_while_it_is_recorded(hardware: Hardware, program: Path, tmp_path: Path) -> None:
    recorder = recorded(hardware, tmp_path / "c", "--", str(program), "1")
    _, told = recorder.communicate(timeout=120)
    assert recorder.returncode == 0, told
    stacks = cpu_samples(tmp_path / "c", "hugepages")
    whole = sum(count for stack, count in stacks.items() if OURS in stack and "[cut" not in stack)
    assert whole > 0.8 * stacks.total() > FEW, stacks


@pytest.mark.skipif(NODE is None, reason="it has no node")
@thorough
@pytest.mark.parametrize("before", [False, True])
def test_node_with_large_pages(before: bool, hardware: Hardware, tmp_path: Path) -> None:
    options = ["--use-largepages=on", "--interpreted-frames-native-stack"]
    long, short = (["node", *options, "-e", SCRIPT % milliseconds] for milliseconds in (60_000, 3000))
    path = os.path.realpath(str(NODE))
    # given what this node copies, at the addresses that its file says
    with running(long) as process:
        copied = remapped(process.pid, path)
        if copied is None or ElfFile(in_memory(Path(path).read_bytes())).header.type != EXECUTABLE:
            pytest.skip("this node does not copy its text, or is no program at fixed addresses")
        if before:
            recorder = recorded(hardware, tmp_path / "c", "--duration", "2")
            _, told = recorder.communicate(timeout=120)
    if not before:
        recorder = recorded(hardware, tmp_path / "c", "--", *short)
        _, told = recorder.communicate(timeout=120)
    assert recorder.returncode == 0, told
    # then functions that are there have names in nearly all stacks
    listed = subprocess.run(["nm", "-DC", path], capture_output=True, text=True, check=True).stdout
    symbols = (line.split(" ", 2) for line in listed.splitlines() if not line.startswith(" "))
    functions = {name for address, _, name in symbols if int(address, 16) in copied}
    stacks = cpu_samples(tmp_path / "c", "node")
    named = sum(count for stack, count in stacks.items() if functions & set(stack.split(";")))
    assert named > 0.8 * stacks.total() > 100, stacks.most_common(3)
