"""Clones of this repository at a commit, for scripts that compare with it or run its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def caches() -> Path:
    """Returns the folder in which the scripts keep downloads and clones."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "iaprof-tests"


def full_name(commit: str) -> str:
    """Returns a commit's hash; exits if there is no such commit."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    return found or sys.exit(f"there is no commit {commit}")


def clone(commit: str, folder: Path) -> None:
    """Clones this repository into a folder that does not exist, at a commit."""
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(folder)], check=True)
    subprocess.run(["git", "-C", str(folder), "checkout", "--quiet", "--detach", commit], check=True)


def set_up(commit: str, folder: Path) -> None:
    """Makes a clone with a .venv of its own, unless the folder has one already."""
    made = folder / ".venv" / ".made"  # not there if an earlier set-up was interrupted
    if made.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    clone(commit, folder)
    subprocess.run(["make", "setup"], cwd=folder, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=True)
    made.touch()
