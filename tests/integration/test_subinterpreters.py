"""Python functions of a thread that runs code in several interpreters at once, each as sys._getframe tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.pythons import PROGRAMS, Recording, arguments
from integration.recording import IN_TURN
from pythons.frames import frames_of, frames_told, launches_of
from pythons.interpreters import LOADING, started_as
from thorough import usually

pytestmark = [pytest.mark.bpf, IN_TURN]


@pytest.mark.parametrize("name", usually(["own"], LOADING))
def test_functions_of_all_interpreters_are_in_their_order(tmp_path: Path, name: str) -> None:
    recording, told, go = Recording(tmp_path), tmp_path / "told", tmp_path / "go"
    words = [*started_as(name), str(PROGRAMS / "subinterpreters.py"), *arguments(tmp_path, told), str(go)]
    with recording:
        pid = recording.run(words, go)
    found, expected = frames_of(recording.reader, pid), frames_told(told)
    assert {tid: len(each) for tid, each in found.items()} == {tid: len(each) for tid, each in expected.items()}
    wrong = [
        (number, frames, wanted)
        for tid, each in expected.items()
        for number, (frames, wanted) in enumerate(zip(found[tid], each, strict=True))
        if frames != wanted
    ]
    assert not wrong, (len(wrong), json.dumps(wrong[:2], indent=1))
    assert len(expected) == 3
    several = [each for launches in expected.values() for each in launches if len({path for path, *_ in each}) > 1]
    assert len(several) > 100
    assert {stack["python_ended"] for _, stack in launches_of(recording.reader, pid)} == {"whole"}
