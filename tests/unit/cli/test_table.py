"""Plain-text tables: aligned, fitted to the terminal, and without control characters."""

from __future__ import annotations

import sys

import pytest
from rich.cells import cell_len

from iaprof.cli.terminal import table as module
from iaprof.cli.terminal.table import STRONG, WARM, Column, Table, shortened


def table() -> Table:
    made = Table(Column("COUNT", right=True), Column("NAME", flexible=True), Column("WHY"))
    made.add("1,234", "漢字のカーネル", "sbid", style=("", "", WARM))
    made.add("5", "matmul_with_a_rather_long_name", "")
    made.add("6", "größe\x1b[2J", "sync", style=STRONG)
    return made


def test_columns_line_up_by_cells() -> None:
    assert table().lines(None, colours=False) == [
        "COUNT  NAME                            WHY",
        "1,234  漢字のカーネル                  sbid",
        "    5  matmul_with_a_rather_long_name",
        "    6  größe\\x1b[2J                    sync",
    ]


def test_a_terminal_gets_names_shortened_in_the_middle() -> None:
    lines = table().lines(30, colours=False)
    assert lines == [
        "COUNT  NAME               WHY",
        "1,234  漢字のカーネル     sbid",
        "    5  matmul_w…ong_name",
        "    6  größe\\x1b[2J       sync",
    ]
    assert max(map(cell_len, lines)) == 30


def test_colours_change_no_width() -> None:
    lines = table().lines(30, colours=True)
    assert lines[0] == "\x1b[1mCOUNT\x1b[0m  \x1b[1mNAME\x1b[0m               \x1b[1mWHY\x1b[0m"
    assert lines[1] == "1,234  漢字のカーネル     \x1b[31msbid\x1b[0m"
    assert lines[2] == "    5  matmul_w…ong_name"
    assert lines[3] == "    \x1b[1m6\x1b[0m  \x1b[1mgröße\\x1b[2J\x1b[0m       \x1b[1msync\x1b[0m"


def test_a_very_narrow_terminal_keeps_part_of_the_names() -> None:
    assert table().lines(5, colours=False)[2] == "    5  matmul…_name"


@pytest.mark.parametrize("text", ["", "a", "abcdefghij", "漢字漢字漢字", "e\u0301" * 8, "a漢b字c", "x" * 16384])
@pytest.mark.parametrize("width", range(1, 14))
def test_shortened_texts_fit_and_keep_their_ends(text: str, width: int) -> None:
    short = shortened(text, width)
    assert cell_len(short) <= width
    if cell_len(text) <= width:
        assert short == text
    else:
        begin, end = short.split("…")
        assert text.startswith(begin)
        assert text.endswith(end)
        assert cell_len(short) >= width - 2  # a character of two cells may fit at neither end


@pytest.mark.parametrize(
    ("terminal", "environment", "expected"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": ""}, False),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours_need_a_terminal_without_no_color(
    terminal: bool, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COLUMNS", "77")
    assert module.coloured() is expected
    assert module.terminal_width() == (77 if terminal else None)
