"""scripts/test-repeat: what it runs, what it keeps, and how it goes on; a checkout plays whose `make test` is quick."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from thorough import thorough
from waiting import until

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
# Tells what it was run with; is red, or does not end, where the test says so.
MAKEFILE = """\
test:
\t@mkdir -p .venv; echo made >> .venv/times; touch left
\t@echo "$(shell git rev-parse HEAD) $$IAPROF_TEST_SHUFFLE $$(cat .venv/times | wc -l)" >> $(TOLD)
\t@[ ! -e $(RED) ] || { printf 'FAILED tests/unit/test_a.py::test_b[x y] - 1 == 2\\nERROR tests/c.py\\n'; exit 1; }
\t@[ ! -e $(HANG) ] || sleep 600
"""


class Checkout:
    """One with a commit, and the caches of a user."""

    def __init__(self, folder: Path) -> None:
        self.root, self.cache = folder / "checkout", folder / "cache"
        self.red, self.hang, self._told = folder / "red", folder / "hang", folder / "told"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("test-repeat", "checkouts.py"):
            shutil.copy(SCRIPTS / name, self.root / "scripts")
        (self.root / "Makefile").write_text(f"TOLD := {self._told}\nRED := {self.red}\nHANG := {self.hang}\n{MAKEFILE}")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=b")
        done = subprocess.run(["git", *names, *words], cwd=self.root, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "x")

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.root / "scripts" / "test-repeat"), *words]
        env = os.environ | {"XDG_CACHE_HOME": str(self.cache)}
        env.pop("IAPROF_TEST_SHUFFLE", None)  # this test may itself run in random order
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def repeat(self, *words: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        with self.start(*words) as process:
            out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    @property
    def folder(self) -> Path:
        """Where the commit's runs are kept."""
        return self.cache / "iaprof-tests" / f"repeat-{self.git('rev-parse', 'HEAD')[:12]}"

    def told(self) -> list[list[str]]:
        return [line.split(" ") for line in self._told.read_text().splitlines()] if self._told.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_plan_has_what_was_promised() -> None:
    text = (SCRIPTS / "test-repeat").read_text()
    words = text[text.index("PLAN = (") : text.index(")  # fmt", text.index("PLAN = ("))].split('"')[1::2]
    assert Counter(words) == {"plain": 9, "stress": 5, "idle": 2, "memory": 2, "random": 2}


def test_each_run_is_in_a_clean_clone_that_keeps_its_environment(checkout: Checkout) -> None:
    (checkout.root / "uncommitted").touch()
    # when
    code, out, _ = checkout.repeat("--only", "plain,random", "--runs", "5")
    # then
    assert code == 0
    commit = checkout.git("rev-parse", "HEAD")
    assert checkout.told() == [[commit, seed, str(count)] for count, seed in enumerate(["", "", "", "", "8"], 1)]
    assert not (checkout.folder / "clone" / "uncommitted").exists()
    # and the table has them, in Markdown
    assert "5 of 20 runs, 5 green" in out
    rows = [line.split(" | ")[:3] for line in out.splitlines() if line.startswith("| ")][1:]
    assert rows == [[f"| {number}", kind, "green"] for number, kind in
                    ((1, "plain"), (3, "plain"), (5, "plain"), (7, "plain"), (8, "random"))]  # fmt: skip
    assert (checkout.folder / "table.md").read_text() == out


def test_a_red_run_names_its_tests_and_keeps_its_log(checkout: Checkout) -> None:
    checkout.red.touch()
    code, out, _ = checkout.repeat("--only", "plain", "--runs", "1")
    assert code == 1
    assert "| 1 | plain | red |" in out
    assert "`tests/unit/test_a.py::test_b[x y]`, `tests/c.py`" in out
    [log] = checkout.folder.glob("*.log")
    assert "1 == 2" in log.read_text()
    # and a green one leaves none
    checkout.red.unlink()
    assert checkout.repeat("--only", "plain", "--runs", "1")[0] == 1
    assert list(checkout.folder.glob("*.log")) == [log]
    # and it goes on behind them; another commit begins anew
    assert checkout.repeat("--table")[1].count("| plain |") == 2
    checkout.commit()
    assert checkout.repeat("--table")[1].count("| plain |") == 0


def test_what_is_interrupted_is_done_again(checkout: Checkout) -> None:
    checkout.hang.touch()
    with checkout.start("--only", "plain") as process:
        until(checkout.told, process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted; 0 of 20 runs are done" in err
    # then the next call begins with that run
    checkout.hang.unlink()
    assert checkout.repeat("--only", "plain", "--runs", "1")[0] == 0
    assert [row["number"] for row in json.loads((checkout.folder / "state.json").read_text())["runs"]] == [1]


def test_another_machine_goes_on_with_results_that_are_taken_there(checkout: Checkout) -> None:
    results = checkout.root / "results.json"
    assert checkout.repeat("--only", "plain", "--runs", "1", "--results", str(results))[0] == 0
    shutil.rmtree(checkout.cache)
    # when
    _, out, _ = checkout.repeat("--only", "plain", "--runs", "1", "--results", str(results))
    # then both runs are in the table; another commit has none of them
    assert "2 of 20 runs, 2 green" in out
    assert [run["number"] for run in json.loads(results.read_text())["runs"]] == [1, 3]
    checkout.commit()
    assert "0 of 20 runs" in checkout.repeat("--table", "--results", str(results))[1]


@thorough
def test_idle_processes_are_there_meanwhile_and_gone_afterwards(checkout: Checkout) -> None:
    checkout.hang.touch()
    with checkout.start("--only", "idle") as process:
        until(checkout.told, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert len(children) == 1000 + 1
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_a_run_has_half_of_the_memory(checkout: Checkout) -> None:
    code, out, err = checkout.repeat("--only", "memory", "--runs", "1")
    assert (code, "| 6 | memory | green |" in out) == (0, True), err


def test_two_at_once_and_what_there_is_not(checkout: Checkout) -> None:
    checkout.hang.touch()
    with checkout.start("--only", "plain") as process:
        until(checkout.told, process)
        assert "another one runs" in checkout.repeat("--table")[2]
        process.send_signal(signal.SIGINT)
    assert "there is no condition full moon" in checkout.repeat("--only", "full moon")[2]
