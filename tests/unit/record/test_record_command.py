"""`iaprof record`: messages for unexpected errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.cli.main import main
from iaprof.cli.verbs import record as record_command
from iaprof.record import session as session_module
from iaprof.record.options import Options
from iaprof.record.signals import Interrupted, StopSignals


def failing(error: Exception, spool: Path) -> type:
    """A session that ends with this error."""

    class Failing:
        command_runs = False

        def __init__(self, *_: object) -> None:
            self.spool = SimpleNamespace(path=spool)

        def run(self) -> int:
            raise error

        def close(self) -> None:
            pass

    return Failing


def test_an_unexpected_error_is_one_sentence_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = tmp_path / "c.spool"
    spool.touch()
    monkeypatch.setattr(session_module, "Session", failing(ZeroDivisionError("division by zero"), spool))
    with StopSignals() as signals, pytest.raises(IaprofError) as raised:
        record_command._record(Options(tmp_path / "c"), signals, quiet=False, verbose=False, learner=Mock())
    text = str(raised.value)
    assert "ZeroDivisionError (division by zero) at test_record_command.py:" in text
    assert f"iaprof recover {spool} -o FILE" in text
    assert raised.value.exit_code == 1


def test_an_interruption_keeps_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "Session", failing(Interrupted(15), tmp_path / "c.spool"))
    with StopSignals() as signals, pytest.raises(IaprofError) as raised:
        record_command._record(Options(tmp_path / "c"), signals, quiet=False, verbose=False, learner=Mock())
    assert raised.value.exit_code == 143
    assert str(raised.value) == "interrupted before the recording began: nothing was recorded"


def test_a_signal_may_do_something_else_once() -> None:
    # given a recording that has ended and is symbolizing, which a signal can cut short
    done: list[str] = []
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        signals.call_once = lambda: done.append("skipped")
        # when a second signal arrives
        os.kill(os.getpid(), signal.SIGINT)
        # then it cuts that short, and does not quit
        assert done == ["skipped"]
        assert signals.count == 1
        # and the next one quits
        signals.exit_message = lambda: ""
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_recorder_stays_small() -> None:
    """Another process than the recorder imports the writer of captures and the symbolizers."""
    code = "import sys, iaprof.cli.verbs.record, iaprof.record.session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pyarrow", "symbolic", "multi_demangle"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-total", "1G"], "--max-total removes earlier files of --switch-output, which is not given"),
        (["--max-cpu", "0%"], "--max-cpu takes percent of one CPU, such as 1% or 0.5%, not '0%'"),
        (["--max-cpu", "1e9"], "--max-cpu takes percent of one CPU"),
        (["--switch-output", "10m", "--max-total", "much"], "--max-total takes a size such as 500M or 2G"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(session_module, "Session", failing(AssertionError("it must not begin"), tmp_path / "none"))
    monkeypatch.setattr(sys, "argv", ["iaprof", "record", "-o", str(tmp_path / "c"), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
