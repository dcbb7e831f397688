"""To whom processes belong: the scope, the recorder or others, by pid and time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from iaprof.formats.wire.sideband import Processes
from iaprof.record.left_out import LeftOut, Whose

SCOPE, OURS, OTHER = Whose.SCOPE, Whose.RECORDER, Whose.OTHER
RECORDER, LEARNER, READER, COMMAND, CHILD, FINISHER, STRANGER = 100, 90, 80, 200, 201, 210, 300
BEGAN = 1000
RAN = [(READER, LEARNER), (LEARNER, RECORDER), (RECORDER, 1), (STRANGER, 1), (1, 0), (2, 0)]  # (pid, parent)


def processes(forks: list[tuple[int, int, int]], running: list[tuple[int, int]] = RAN) -> LeftOut:
    """The forks (time, pid, parent) come in any order, as the buffers of several CPUs are read."""
    rows = Processes()
    events = [(BEGAN, *each, "running") for each in running] + [(*each, "fork") for each in reversed(forks)]
    for time_ns, pid, parent, event in events:
        rows.time.append(time_ns)
        rows.pid.append(pid)
        rows.tid.append(pid)
        rows.ppid.append(parent)
        rows.event.append(event)
    found = LeftOut()
    found.add(rows)
    return found


def whose(found: LeftOut, header: dict[str, Any], *samples: tuple[int, int]) -> list[int]:
    pids, times = np.array(samples, np.uint64).reshape(-1, 2).T
    numbers: list[int] = found.whose(header, pids.astype(np.uint32), times).tolist()
    return numbers


FORKS = [(1100, COMMAND, RECORDER), (1200, CHILD, COMMAND), (1300, FINISHER, RECORDER), (1400, STRANGER + 1, STRANGER)]
WITH_COMMAND = {"recorder_pid": RECORDER, "command_pid": [COMMAND, 1090], "sampled_pids": []}


def test_with_a_command() -> None:
    samples = [(pid, 1500) for pid in (COMMAND, CHILD, RECORDER, LEARNER, READER, FINISHER, STRANGER, STRANGER + 1, 2)]
    assert whose(processes(FORKS), WITH_COMMAND, *samples) == [SCOPE] * 2 + [OURS] * 4 + [OTHER] * 3
    # and where nothing is known
    assert whose(processes([], []), WITH_COMMAND, (COMMAND, 1500), (RECORDER, 1), (7, 7)) == [SCOPE, OURS, OTHER]
    assert whose(processes(FORKS), WITH_COMMAND) == []


def test_without_a_scope_only_the_recorder_s_own_are_left_out() -> None:
    header = {"recorder_pid": RECORDER, "command_pid": [COMMAND, 1090]}
    samples = [(pid, 1500) for pid in (COMMAND, CHILD, STRANGER, 2, RECORDER, LEARNER, READER, FINISHER)]
    assert whose(processes(FORKS), header, *samples) == [SCOPE] * 4 + [OURS] * 4


def test_chosen_processes_and_a_command_that_is_not_one_of_them() -> None:
    # given that the recorder runs below a chosen process, too
    ran = [*RAN[:2], (RECORDER, STRANGER), *RAN[3:], (400, STRANGER)]
    header = {"recorder_pid": RECORDER, "command_pid": [COMMAND, 1090], "scope": [STRANGER], "sampled_pids": [STRANGER]}
    samples = [(pid, 1500) for pid in (STRANGER, STRANGER + 1, 400, COMMAND, CHILD, 2, RECORDER, READER, FINISHER)]
    assert whose(processes(FORKS, ran), header, *samples) == [SCOPE] * 3 + [OTHER] * 3 + [OURS] * 3


def test_pids_are_used_again() -> None:
    forks = [
        *FORKS,
        (1600, CHILD, STRANGER),
        (1700, FINISHER, COMMAND),
        (1800, STRANGER, RECORDER),
        (1900, STRANGER, 1),
    ]
    times = (1150, 1250, 1350, 1650, 1750, 1850, 1950)
    child, finisher, stranger = (
        whose(processes(forks), WITH_COMMAND, *((pid, time_ns) for time_ns in times))
        for pid in (CHILD, FINISHER, STRANGER)
    )
    assert child == [OTHER, SCOPE, SCOPE, OTHER, OTHER, OTHER, OTHER]
    assert finisher == [OTHER, OTHER, OURS, OURS, SCOPE, SCOPE, SCOPE]
    assert stranger == [OTHER] * 5 + [OURS, OTHER]


def test_the_command_s_pid_is_used_before_and_after_it() -> None:
    forks = [(1050, COMMAND, STRANGER), *FORKS, (1950, COMMAND, STRANGER)]
    samples = [(COMMAND, time_ns) for time_ns in (1060, 1150, 1960)]
    assert whose(processes(forks), WITH_COMMAND, *samples) == [OTHER, SCOPE, OTHER]


def test_a_later_file_of_the_recording() -> None:
    # given a child of the command that has another parent now
    ran = [*RAN, (COMMAND, RECORDER), (CHILD, 1), (FINISHER, RECORDER)]
    header = WITH_COMMAND | {"sampled_pids": [COMMAND, CHILD]}
    samples = [(pid, 1001) for pid in (COMMAND, CHILD, RECORDER, READER, FINISHER, STRANGER)]
    assert whose(processes([], ran), header, *samples) == [SCOPE] * 2 + [OURS] * 3 + [OTHER]


@pytest.mark.parametrize(
    "header",
    [{}, {"sampled_pids": []}, {"recorder_pid": "1"}, {"recorder_pid": None, "command_pid": 7, "sampled_pids": {}}],
)
def test_spools_of_earlier_versions_leave_nothing_out(header: dict[str, Any]) -> None:
    assert whose(processes(FORKS), header, (RECORDER, 1500), (STRANGER, 1500)) == [SCOPE, SCOPE]


def test_damaged_members_are_as_if_they_were_not_there() -> None:
    header = WITH_COMMAND | {"command_pid": ["x", {}, -1], "sampled_pids": [None, 1 << 70, STRANGER]}
    assert whose(processes(FORKS), header, (STRANGER, 1500), (COMMAND, 1500), (2, 1)) == [SCOPE, OURS, OTHER]


def test_many_forks_take_seconds() -> None:
    found, forks, count = processes([]), Processes(), 300_000
    forks.time, forks.pid = list(range(2000, 2000 + count)), [1000 + each % 30_000 for each in range(count)]
    forks.tid, forks.ppid, forks.event = forks.pid, [COMMAND] * count, ["fork"] * count
    began = time.process_time()
    found.add(forks)
    assert set(whose(found, WITH_COMMAND, *((1000 + each, 10**9) for each in range(30_000)))) == {SCOPE}
    assert time.process_time() - began < 10
