"""A session calls its sources' methods in order, and needs to know nothing else of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.record import session as module
from iaprof.record.budget import BudgetKeeper
from iaprof.record.journal import Journal
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.session import Callbacks, Session
from iaprof.record.signals import StopSignals
from iaprof.record.sources.source import Source
from iaprof.symbols.names.which import Symbols

STEPS = [name for name, member in vars(Source).items() if callable(member) and not name.startswith("_")]
OFTEN = {"read", "losses", "has_ended_part"}


class MadeUp(Source):
    """A source that notes the order of its calls."""

    def __init__(self, name: str, calls: list[tuple[str, str]], does: dict[str, Callable[[], object]]) -> None:
        self._name, self._calls, self._does = name, calls, does

    def __getattribute__(self, step: str) -> Any:
        found = super().__getattribute__(step)
        if step not in STEPS:
            return found

        def called(*given: object) -> object:
            self._calls.append((step, self._name))
            if step in self._does:
                self._does[step]()
            return found(*given)

        return called

    def header(self) -> dict[str, Any]:
        return {f"{self._name}_asked": 7, "cpu_hz": 0}

    def start(self, journal: Journal, loop: Loop) -> None:
        journal.loss(self._name, "made up", 5, "", 1, 2)

    def environment(self, environment: dict[str, str]) -> dict[str, str]:
        return {**environment, self._name.upper(): "found"}

    def footer(self) -> dict[str, Any]:
        return {f"{self._name}_found": 8, "cost": {f"{self._name}_cpu_s": 1.5}}

    @property
    def cpu_seconds(self) -> float:
        return 1000.0


class Recording:
    """A session with two sources; `does` are additional actions in steps of the second one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **does: Callable[[], object]) -> None:
        self.calls: list[tuple[str, str]] = []
        self.sources = [MadeUp("one", self.calls, {}), MadeUp("two", self.calls, does)]
        self.part: Callable[[], None] = lambda: None
        monkeypatch.setattr(module, "open_sources", self._open)

    def _open(
        self,
        _options: Options,
        _scope: None,
        _sampled: object,
        _roots: object,
        _signals: object,
        opened: ExitStack,
        _: object,
        _learner: object,
    ) -> Any:
        for source in self.sources:
            opened.callback(source.close)
        return self.sources

    def run(self, options: Options, signals: StopSignals) -> dict[str, Any]:
        """Records; returns the capture's header."""
        callbacks = Callbacks(lambda _: None, lambda _: None, lambda *_: self.part())
        session = Session(options, signals, callbacks)
        try:
            session.run()
            return session.finish()[0]
        finally:
            session.close()

    def steps(self) -> list[str]:
        """The steps in their order, without frequent ones."""
        calls = [call for call in self.calls if call[0] not in OFTEN and call[0] != "close"]
        steps = [(step, [name for _, name in both]) for step, both in groupby(calls, lambda call: call[0])]
        assert all(names == ["one", "two"] for _, names in steps), steps
        return [step for step, _ in steps]


def test_each_step_is_taken_with_every_source_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a recording that pauses, resumes, rotates its output, and ends when the first part is finished
    control = tmp_path / "control"
    os.mkfifo(control)
    commands = os.open(control, os.O_RDWR)
    recording = Recording(monkeypatch, start=lambda: os.write(commands, b"disable\nenable\nsnapshot\n"))
    recording.part = lambda: os.kill(os.getpid(), signal.SIGINT)
    # when
    with StopSignals() as signals:
        options = Options(tmp_path / "cap.parquet", control=f"fifo:{control}", symbols=Symbols.NONE)
        header = recording.run(options, signals)
    os.close(commands)
    # then
    assert recording.steps() == [
        "header", "start", "resume", "pause", "resume", "end_part", "footer", "header", "begin_part", "stop", "finish",
        "footer",
    ]  # fmt: skip
    often = [call for call in recording.calls if call[0] in OFTEN | {"end_part", "begin_part", "finish", "footer"}]
    before_end = often.index(("end_part", "one"))
    assert often[before_end - 2 : before_end] == [("read", "one"), ("read", "two")]
    assert often[before_end + 2 : before_end + 4] == [("losses", "one"), ("losses", "two")]
    assert [call for call in often if call[0] != "has_ended_part"][-4:] == [
        ("losses", "one"), ("losses", "two"), ("footer", "one"), ("footer", "two"),
    ]  # fmt: skip
    assert recording.calls[-2:] == [("close", "two"), ("close", "one")]
    # and both captures have the sources' members, in the usual order
    parts = [CaptureReader(path) for path in sorted(tmp_path.glob("cap*.parquet"))]
    assert sorted(reader.header["part"] for reader in parts) == [0, 1]
    for reader in parts:
        assert (reader.header["one_asked"], reader.header["two_found"]) == (7, 8)
        assert reader.header["cost"]["two_cpu_s"] == 1.5
        assert reader.header["cost"]["cpu_s"] > 2000
        names = [
            name for name in reader.header if name in ("clock", "cpu_hz", "one_asked", "end_ns", "cost", "two_found")
        ]
        assert names == ["clock", "cpu_hz", "one_asked", "end_ns", "cost", "two_found"]
    losses = [(loss["source"], loss["count"]) for reader in parts for loss in reader.header["losses"]]
    assert sorted(losses) == [("one", 5), ("two", 5)]
    assert header["part"] == 1


def test_a_command_waits_for_all_sources_and_gets_its_environment_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    recording = Recording(monkeypatch, ready=lambda: told.write_text("not yet\n"))
    with StopSignals() as signals:
        script = f'echo "$ONE $TWO" >> {told}'
        recording.run(Options(tmp_path / "c", command=("sh", "-c", script), symbols=Symbols.NONE), signals)
    assert told.read_text() == "not yet\nfound found\n"
    assert recording.steps()[:5] == ["header", "start", "resume", "ready", "environment"]


def test_nothing_is_left_of_a_recording_whose_source_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise IaprofError("there is none")

    recording = Recording(monkeypatch, start=refuse)
    with StopSignals() as signals, pytest.raises(IaprofError, match="there is none"):
        recording.run(Options(tmp_path / "c"), signals)
    assert recording.calls[-2:] == [("close", "two"), ("close", "one")]
    assert list(tmp_path.iterdir()) == []


def test_every_step_is_one_of_the_table() -> None:
    """The table in the interface's docstring has every method."""
    table = (Source.__doc__ or "").partition("methods\n")[2].partition("\n\n")[0]
    assert set(STEPS) <= set(table.replace(",", " ").replace(";", " ").split())


def test_a_restarted_recording_keeps_what_was_there_and_its_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a finished file of the same name, and two more than there is room for
    output = tmp_path / "cap.parquet"
    output.write_bytes(b"x" * 1000)
    old = [tmp_path / f"cap.20250101-000000{number}.parquet" for number in range(2)]
    for number, path in enumerate(old):
        path.write_bytes(b"x" * 1000)
        os.utime(path, (number, number))
    recording = Recording(monkeypatch, start=lambda: os.kill(os.getpid(), signal.SIGINT))
    # when
    with StopSignals() as signals:
        options = Options(output, keep_earlier=True, max_total=1500, symbols=Symbols.NONE)
        header = recording.run(options, signals)
    # then
    assert not any(path.exists() for path in old)
    (kept,) = tmp_path.glob("cap.2*.parquet")
    assert kept.read_bytes() == b"x" * 1000
    assert CaptureReader(output).header["removed_files"] == header["removed_files"] == {"files": 2, "bytes": 2000}
    assert not list(tmp_path.glob("*.spool"))


def test_a_link_in_the_place_of_the_output_leaves_no_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "victim").write_text("root's own")
    (tmp_path / "c").symlink_to(tmp_path / "victim")
    recording = Recording(monkeypatch)
    with StopSignals() as signals, pytest.raises(IaprofError, match="is not a file"):
        recording.run(Options(tmp_path / "c", keep_earlier=True), signals)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "victim"]


def test_a_budget_stands_in_the_header_and_its_changes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET_NS", 1_000_000)

    def measured(keeper: BudgetKeeper) -> None:
        keeper._journal.append("thinned", {"cpu_hz": 24, "metric_interval_ns": 10_000_000})
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(BudgetKeeper, "measure", lambda _: None)

    monkeypatch.setattr(BudgetKeeper, "measure", measured)
    with StopSignals() as signals:
        header = Recording(monkeypatch).run(Options(tmp_path / "c", max_cpu=0.01, symbols=Symbols.NONE), signals)
    assert header["max_cpu_percent"] == 1.0
    assert header["thinned"] == [{"cpu_hz": 24, "metric_interval_ns": 10_000_000}]
