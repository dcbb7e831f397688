"""What a process that gives up its privileges still may do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from iaprof.basics.files import sudo_user
from iaprof.sandbox.privileges import NOBODY, give_up_privileges

secret = sys.argv[1]
give_up_privileges({}, sudo_user() or (NOBODY, NOBODY))
open(secret).read()
"""


@pytest.mark.root
@pytest.mark.beside
@pytest.mark.parametrize("user", ["0", "1000", "-1", "4294967296", "abc", ""])
def test_whoever_is_behind_sudo_no_file_of_roots_can_be_read(tmp_path: Path, user: str) -> None:
    # given sudo of a root shell, of a user, or variables that somebody made up
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o600)
    environment = os.environ | {"SUDO_UID": user, "SUDO_GID": user}
    # when a process gives up its privileges
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, secret], env=environment, capture_output=True, text=True, check=False
    )
    # then it may not read what only root may
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"PermissionError: [Errno 13] Permission denied: '{secret}'")
