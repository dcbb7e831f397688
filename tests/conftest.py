"""What every test shares: the marks for root and BPF, `--no-skips` and `--shuffle`, and limits of time."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import glob
import itertools
import os
import random
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import limits
from iaprof.sandbox import memory
from waiting import LONGEST_WAIT_S

FAILED = pytest.StashKey[bool]()
LONGEST_TEST_S = 2 * LONGEST_WAIT_S  # what a test waits for has failed by then
INTEGRATION, UNIT, DRIVER = (Path(__file__).parent / each for each in ("integration", "unit", "driver"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failed test")
    parser.addoption("--shuffle", metavar="SEED", help="random order of files and in files, and random examples")


def pytest_configure(config: pytest.Config) -> None:
    """Properties hold whatever the speed of the machine; and one commit has one result, so examples are the same."""
    settings.register_profile(
        "iaprof",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize=config.getoption("--shuffle") is None,
    )
    settings.load_profile("iaprof")


@pytest.fixture(autouse=True)
def limit_and_priority_as_before() -> Iterator[None]:
    """Takes back what verbs set where a test runs them in its own process: browsers would inherit the memory limit."""
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    memory.lift_limit()
    if os.getpriority(os.PRIO_PROCESS, 0) < priority:
        os.setpriority(os.PRIO_PROCESS, 0, priority)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    """The same for verbs that a fixture runs: one of a whole file is set up before any fixture of a test."""
    try:
        return (yield)
    finally:
        memory.lift_limit()


@pytest.fixture(autouse=True, scope="session")
def as_from_a_terminal() -> None:
    """What tests start ends by SIGHUP and SIGINT; nohup, and a shell's &, leave these ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test that is chosen are not read: reading all takes seconds in each process."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None  # whatever pytest would do
    chosen = config.option.markexpr  # as in scripts/test
    is_of_driver = collection_path.is_relative_to(DRIVER)
    is_left_out = (
        (is_of_driver and "not driver" in chosen)
        or (not is_of_driver and chosen == "driver")
        or (chosen.startswith("thorough") and not may_have("thorough", collection_path))
        or (chosen.endswith("and root and not beside") and not may_have("root", collection_path))
        or (chosen.endswith("(not root or beside)") and not may_have("beside", collection_path))
    )
    return True if is_left_out else None


@functools.cache
def may_have(mark: str, path: Path) -> bool:
    """Whether a file can have tests with a mark; only those of tests/integration need `beside` to be chosen with it."""
    if mark == "root":
        return not path.is_relative_to(UNIT) or re.search(r"\bmark\.(root|bpf)\b", path.read_text()) is not None
    if mark == "beside" and not path.is_relative_to(INTEGRATION):
        return True
    return re.search(rf"\b{mark}\b", path.read_text()) is not None


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which selects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(INTEGRATION) or item.get_closest_marker("bpf"):
            item.add_marker("root")
        for mark in ("root", "beside", "thorough"):
            if item.get_closest_marker(mark) and not may_have(mark, item.path):
                raise pytest.UsageError(
                    f"{item.nodeid} is marked {mark}, which its file does not say: it would be left out"
                )
        if "within" in getattr(item, "fixturenames", ()):
            item.add_marker("timed")
    if seed := config.getoption("--shuffle"):
        items[:] = shuffled(items, seed)
    items[:] = spread(items)
    # Who waits to be alone keeps all others waiting, as long as the longest that runs: these come together, last.
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)


def shuffled(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """The files in another order, and the tests of each: what the tests of a file share is made once."""
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    chance = random.Random(seed)  # every worker of pytest-xdist has to come to the same order
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    return [item for tests in files for item in tests]


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same with files of tests that need root, which wait for much of their time, evenly among the others."""
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    place: dict[Path, float] = {}
    for is_root in (False, True):
        those = [tests for tests in files if any(map(needs_root, tests)) is is_root]
        place |= {tests[0].path: (number + 0.5) / len(those) for number, tests in enumerate(those)}
    return sorted(items, key=lambda item: place[item.path])


def needs_root(item: pytest.Item) -> bool:
    return item.get_closest_marker("root") is not None


@pytest.fixture(autouse=True)
def no_program_outlives_a_failure(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test that fails has started is killed: the next one that records would see it."""
    before = descendants(os.getpid())
    yield
    if request.node.stash.get(FAILED, False):
        for pid in descendants(os.getpid()) - before:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
    found: set[int] = set()
    for tasks in glob.glob(f"/proc/{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, Path(tasks).read_text().split()):
                found |= {child} | descendants(child)
    return found


def what_it_does(pid: int) -> str:
    """A process's command, and where its threads wait in the kernel, if that is told; empty if there is none."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
        text = f"{pid} {command[:300]}\n"
        for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
            state = (task / "stat").read_text().rpartition(") ")[2][0]
            text += f"  {task.name} {state} {(task / 'stack').read_text().replace(chr(10), ' ')}\n"
        return text
    return ""


@pytest.fixture
def within() -> limits.Within:
    """`with within(2): ...`: see limits.py."""
    return limits.Within()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root: `make test` runs it through sudo")
    if item.get_closest_marker("bpf") and (refusal := bpf_refusal()):
        pytest.skip(f"this kernel refuses BPF: {refusal}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Waits until the test and its fixtures may begin: those that need root go side by side, but for those `alone`."""
    with contextlib.ExitStack() as until_it_has_run:
        if item.get_closest_marker("root"):
            turn = until_it_has_run.enter_context(open(__file__))
            room = until_it_has_run.enter_context(open(INTEGRATION / "conftest.py"))  # any files that all have
            fcntl.flock(turn, fcntl.LOCK_EX)  # who waits to be alone lets nobody pass
            fcntl.flock(room, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
            fcntl.flock(turn, fcntl.LOCK_UN)
        until_it_has_run.enter_context(failing_at_last())
        return (yield)


@contextlib.contextmanager
def failing_at_last() -> Iterator[None]:
    """A test that does not end by itself fails, and says what its processes wait for: all others wait for it."""

    def fail(*_: object) -> None:
        faulthandler.dump_traceback()
        running = "".join(map(what_it_does, sorted(descendants(os.getpid()))))
        pytest.fail(f"it has not ended after {LONGEST_TEST_S} s, while these processes ran:\n{running}")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_TEST_S, LONGEST_TEST_S)  # again, as its fixtures may wait, too
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def bpf_refusal() -> str:
    """Why bpf(2) will not make the simplest map (x86-64 numbers), or an empty string."""
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = (ctypes.c_uint32 * 18)(2, 4, 4, 1)  # BPF_MAP_TYPE_ARRAY, key and value of 4 bytes, 1 entry
    fd = libc.syscall(321, 0, attributes, ctypes.sizeof(attributes))  # bpf, BPF_MAP_CREATE
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    os.close(fd)
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    # An expected failure is reported as skipped too; it did run.
    if report.skipped and not hasattr(report, "wasxfail"):
        fail_if_skips_are_forbidden(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with contextlib.ExitStack() as stack:
        if isinstance(collector, pytest.Module):
            # All workers of pytest-xdist read all files, in one order. The first writes pytest's byte code of a file,
            # which takes twice as long as all else, and the others take it from there.
            file = stack.enter_context(collector.path.open())
            fcntl.flock(file, fcntl.LOCK_EX)
        report = yield
    if report.skipped:  # a whole module, by importorskip and the like
        fail_if_skips_are_forbidden(collector.config, report)
    return report


def fail_if_skips_are_forbidden(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if config.getoption("--no-skips"):
        where, line, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
        report.outcome = "failed"
        report.longrepr = f"{where}:{line}: {reason} (skipped, which --no-skips forbids)"
