"""Errors while an answer is written: those of stdout, and those of files that the answer needs."""

from pathlib import Path

import pytest

from iaprof.basics.errors import IaprofError
from iaprof.cli.terminal.stdout import utf8_stdout


def test_a_file_that_the_answer_needs_is_named(tmp_path: Path) -> None:
    with pytest.raises(IaprofError, match=rf"^{tmp_path}/gone: No such file or directory$"), utf8_stdout():
        (tmp_path / "gone").read_text()
