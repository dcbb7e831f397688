"""What the command imports, and Ctrl-C outside of verbs or when Python ignores the KeyboardInterrupt that it raises."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from iaprof.cli.main import app

COMMAND: Any = get_command(app)
CAPTURE = max(
    (Path(__file__).parents[2] / "data" / "captures").glob("format-*.parquet"),
    key=lambda path: int(path.stem.partition("-")[2]),
)
IMPORTS = """
import sys
from iaprof.cli import start
sys.argv = ["iaprof", *sys.argv[1:]]
try:
    start.main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
SLOW = {"pydantic", "rich.console", "http.client", "urllib.request", "multiprocessing", "pydoc", "cffi", "numpy.ma"}
"""Imports that take 5 to 60 ms each, of libraries that no report of one capture needs."""


def imported(*words: str | Path) -> set[str]:
    """The modules that `iaprof` has imported when it ends."""
    done = subprocess.run([sys.executable, "-c", IMPORTS, *words], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["help"]])
def test_the_list_of_verbs_imports_no_verb(words: list[str]) -> None:
    modules = imported(*words)
    verbs = {name for name in modules if name.startswith("iaprof.cli.verbs.")} - {"iaprof.cli.verbs.help"}
    assert not verbs | modules & {"numpy", "pyarrow", *SLOW}


@pytest.mark.parametrize("verb", COMMAND.commands)
def test_help_of_a_verb_imports_neither_arrow_nor_another_verb(verb: str) -> None:
    modules = imported(verb, "--help")
    verbs = {name for name in modules if name.startswith("iaprof.cli.verbs.")}
    others = {"flame": {"record", "report"}, "import": {"import_"}, "merge": {"info"}, "timeline": {"import_"}}.get(
        verb, set()
    ) | {verb}
    assert verbs <= {f"iaprof.cli.verbs.{each}" for each in others}
    assert not modules & {"numpy", "pyarrow", "google.protobuf", *SLOW}


@pytest.mark.parametrize("words", [["report", "--format=folded"], ["report", "--max-stack=3", "-o"], ["top", "-n5"]])
def test_a_report_imports_no_slow_library_that_it_does_not_need(words: list[str], tmp_path: Path) -> None:
    verb, *options = words
    modules = imported(verb, CAPTURE, *options, *([tmp_path / "cap.folded"] if options[-1] == "-o" else []))
    assert "pyarrow.compute" in modules
    assert not modules & SLOW


@pytest.mark.parametrize("width", [20, 45, 100])
@pytest.mark.parametrize("verb", COMMAND.commands)
def test_the_list_of_verbs_says_what_a_verb_says_of_itself(verb: str, width: int) -> None:
    listed = COMMAND.KNOWN[verb].listed(verb)
    assert listed.get_short_help_str(width) == COMMAND.commands[verb].get_short_help_str(width) != ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "--max-stack", "0"], "--max-stack"),
        (["report", "--max-stack", "1.5"], "--max-stack takes a whole number"),
        (["top", "-n", "-1"], "--limit"),
        (["top", "-n", "five"], "--limit takes a whole number"),
        (["report", "--percent-limit", "much"], "--percent-limit takes a number"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused(words: list[str], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "iaprof", *words, CAPTURE], capture_output=True, text=True, check=False, timeout=90
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_values_have_the_types_that_the_verbs_expect() -> None:
    """What is converted here without typer is what typer would make of it."""
    report = COMMAND.commands["report"]
    words = ["a", "b", "--max-stack=3", "--percent-limit=2", "--interval=0.5", "-o", "x.html", "--pid=1", "--pid=2,3"]
    values = report.make_context("report", words).params
    assert values["captures"] == ["a", "b"]
    assert (values["max_stack"], values["percent_limit"], values["interval"]) == (3, 2.0, 0.5)
    assert [type(values[name]) for name in ("max_stack", "percent_limit", "interval")] == [int, float, float]
    assert (values["output"], values["pid"], values["tid"]) == (Path("x.html"), ["1", "2,3"], ())
    assert values["force"] is False
    by_typer = report.make_context("report", ["--percent-limit=2e0", "--max-stack=+3"]).params
    assert (by_typer["percent_limit"], by_typer["max_stack"]) == (2.0, 3)
    assert [type(by_typer[name]) for name in ("percent_limit", "max_stack")] == [float, int]


PROGRAM = """
import atexit, os, signal, time, weakref
from iaprof.cli import main, start

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

class Lasting:
    pass

class Dying:
    __del__ = interrupt

def run():
    {moment}

main.main = run
start.main()
"""


def started(moment: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `iaprof` with this code in place of the command."""
    program = before + PROGRAM.format(moment=moment)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("moment", ["Dying()", "watching = weakref.ref(Lasting(), interrupt)", "interrupt()"])
def test_ctrl_c_in_a_destructor_or_a_callback_or_outside_a_verb_ends_it(moment: str) -> None:
    done = started(f"{moment}; time.sleep(100)")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


SLOW_THREADS = """
import threading, time
begin = threading.Thread.start

def slowly(thread):
    begin(thread)
    time.sleep(0.1)

threading.Thread.start = slowly
"""


def test_ctrl_c_in_a_destructor_on_a_machine_that_is_busy() -> None:
    done = started("Dying(); time.sleep(100)", SLOW_THREADS)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_it_ends() -> None:
    done = started("atexit.register(interrupt)")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("moment", ["interrupt()", "atexit.register(interrupt)"])
def test_a_background_command_of_a_shell_ignores_ctrl_c(moment: str) -> None:
    done = started(f"{moment}; print('went on')", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_other_errors_in_a_destructor_are_still_printed() -> None:
    done = started("Dying.__del__ = lambda self: 1 / 0; Dying()")
    assert (done.returncode, done.stdout) == (0, "")
    assert "ZeroDivisionError" in done.stderr
