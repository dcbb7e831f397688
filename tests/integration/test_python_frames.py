"""Frames of Python in stacks of launches, of interpreters as people have them: each is what sys._getframe tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from iaprof.formats.wire.launches import MAX_PYTHON
from integration.pythons import PROGRAMS, Recording, arguments
from integration.recording import IN_TURN, folded
from pythons.frames import Frames, frames_of, frames_told, launches_of
from pythons.interpreters import LOADING, started_as
from thorough import usually

pytestmark = [pytest.mark.bpf, IN_TURN]  # a thousand new stacks at once, which all recorders copy
BETWEEN = ("between_launches_of_c", "between_launches_of_a_thread_with_a_state")
CASES = ("plain", "long_table", "thread_of_c", "stale", "in_turns", "long_names", "deep", *BETWEEN)  # of cases.py
TIMES = 20  # that most of these launch
ROUNDS = 10  # of launches.py
MADE = ("<made>", "<string>")  # files of code objects of exec and eval
RUNNING = "running"  # launches.py, which was there before the recorder


class Runs:
    """One recording of all programs with one interpreter."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, python = folder, started_as(name)
        self._pids: dict[str, int] = {}
        recording = Recording(folder)
        running = recording.started(self._words(python, RUNNING))
        with recording:
            self._pids[RUNNING] = recording.wait(running, self._go(RUNNING))
            for case in ("many", *CASES):
                self._pids[case] = recording.run(self._words(python, case), self._go(case))
        self.reader, self.capture = recording.reader, recording.capture

    def _words(self, python: list[str], case: str) -> list[str]:
        told = arguments(self._folder, self.told(case))
        if case in CASES:
            return [*python, str(PROGRAMS / "cases.py"), case, *told, str(self._go(case))]
        return [*python, str(PROGRAMS / "launches.py"), *told, str(ROUNDS), str(self._go(case))]

    def told(self, case: str) -> Path:
        return self._folder / f"{case}.told"

    def _go(self, case: str) -> Path:
        return self._folder / f"{case}.go"

    def frames(self, case: str) -> tuple[dict[int, list[Frames]], dict[int, list[Frames]]]:
        """Frames of each launch by thread: those that were recorded, and those that the program told."""
        return frames_of(self.reader, self._pids[case]), frames_told(self.told(case))

    def ended(self, case: str) -> list[str]:
        """How Python ended at each launch."""
        return [stack["python_ended"] for _, stack in launches_of(self.reader, self._pids[case])]


@pytest.fixture(scope="module", params=usually(["own"], LOADING))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pythons"), request.param)


@pytest.mark.parametrize("case", ["many", RUNNING])
def test_each_frame_is_what_the_interpreter_tells(runs: Runs, case: str) -> None:
    found, expected = runs.frames(case)
    assert {tid: len(each) for tid, each in found.items()} == {tid: len(each) for tid, each in expected.items()}
    launches = [launch for each in expected.values() for launch in each]
    assert len(launches) > 1000
    assert len({json.dumps(launch) for launch in launches}) > 50
    assert len(expected) == 3
    wrong = [
        (number, frames, wanted)
        for tid, each in expected.items()
        for number, (frames, wanted) in enumerate(zip(found[tid], each, strict=True))
        if frames != wanted
    ]
    # only another code object that exec or eval made at the same address may be taken for one that was seen just before
    others = [each for each in wrong if all(file not in MADE for file, *_ in each[2])]
    assert not others, json.dumps(others[:2], indent=1)
    assert len(wrong) < len(launches) / 20
    # and all that are not marked are whole
    assert set(runs.ended(case)) == {"whole"}


def test_readers_see_them_with_callers_above_the_library_below(runs: Runs) -> None:
    program = PROGRAMS / "launches.py"
    assert f"py::step:{program};py::plain:{program};py::launch:" in folded(runs.capture)


@pytest.mark.parametrize("case", ["plain", "long_table", "thread_of_c", "stale"])
def test_what_is_seldom_met(runs: Runs, case: str) -> None:
    (found,), (expected,) = (list(each.values()) for each in runs.frames(case))
    assert found == expected
    assert len(expected) == TIMES


@pytest.mark.parametrize("case", BETWEEN)
def test_a_thread_that_runs_python_now_and_then(runs: Runs, case: str) -> None:
    """BPF knows its stacks without Python, too: no launch with functions of Python gets one of them."""
    (found,), (expected,) = (list(each.values()) for each in runs.frames(case))
    assert len(found) == len(expected) > 1000
    assert [frames for frames in expected if not frames] == 900 * [[]]
    wrong = [(frames, told) for frames, told in zip(found, expected, strict=True) if frames != told]
    assert not wrong, json.dumps(wrong[:2], indent=1)


def test_launches_that_differ_in_nothing_but_lines(runs: Runs) -> None:
    """BPF expects a stack after the one that it followed the last time, and sees which one it is."""
    (found,), (expected,) = (list(each.values()) for each in runs.frames("in_turns"))
    assert found == expected
    assert len(expected) == 1000
    assert len({json.dumps(launch) for launch in expected}) > 8


def test_long_names_are_marked(runs: Runs) -> None:
    ((frames,),), ((expected,),) = (list(each.values()) for each in runs.frames("long_names"))
    assert [line for *_, line in frames] == [line for *_, line in expected]
    for (*texts, _), (*wanted, _) in zip(frames, expected, strict=True):
        for text, whole in zip(texts, wanted, strict=True):
            assert text == whole or (text.endswith("…") and whole.startswith(text[:-1]) and len(text) > 200)
    assert sum(text.endswith("…") for *texts, _ in frames for text in texts) == 3


def test_more_frames_than_are_kept_are_said_to_be_missing(runs: Runs) -> None:
    ((frames,),), ((expected,),) = (list(each.values()) for each in runs.frames("deep"))
    assert len(expected) > 400
    assert frames == expected[: len(frames)]
    assert len(frames) >= MAX_PYTHON - 2
    assert runs.ended("deep") == ["deep"]


def test_a_process_that_executes_another_interpreter(tmp_path: Path) -> None:
    # given interpreters that differ: the recorder is not told again of one that comes to the same addresses
    names = list(dict.fromkeys(("own", LOADING[1], LOADING[-1])))
    program = str(PROGRAMS / "cases.py")
    told: list[Path] = []
    goes: list[Path] = []
    words: list[str] = []
    for number, name in reversed(list(enumerate(names))):
        told.append(tmp_path / f"{number}.told")
        goes.append(tmp_path / f"{number}.go")
        case = "executes_another" if words else "plain"
        words = [*started_as(name), program, case, *arguments(tmp_path, told[-1]), str(goes[-1]), *words]
    # when
    with Recording(tmp_path) as recording:
        pid = recording.run(words, *reversed(goes))
    # then
    assert frames_of(recording.reader, pid) == frames_told(*reversed(told))


def test_a_process_that_executes_the_same_interpreter_at_the_same_addresses(tmp_path: Path) -> None:
    told, go = tmp_path / "told", tmp_path / "go"
    program = str(PROGRAMS / "executes_itself.py")
    words = ["setarch", "-R", *started_as("own"), program, "0", *arguments(tmp_path, told), str(go)]
    with Recording(tmp_path) as recording:
        pid = recording.run(words, go)
    (expected,) = frames_told(*(Path(f"{told}{stage}") for stage in (0, 1))).values()
    (found,) = frames_of(recording.reader, pid).values()
    names = [[name for _, name, _ in frames] for frames in found]
    assert names == [[name for _, name, _ in frames] for frames in expected]
