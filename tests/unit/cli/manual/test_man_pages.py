"""The man pages: correct roff, complete, and with the texts of help."""

import os
import re
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from iaprof.cli.main import app
from iaprof.cli.manual.commands import Command, Kind, Parameter
from iaprof.cli.manual.man import man_page

VERBS = get_command(app).commands  # type: ignore[attr-defined]


def rendered(page: Path) -> str:
    """The page as plain text, each run of white space as one space."""
    text = subprocess.run(["mandoc", "-T", "utf8", page], capture_output=True, text=True, check=True).stdout
    return " ".join(re.sub(r".\x08", "", text).replace("\u2010", "-").split())


def test_there_is_a_page_for_each_command(installed: Path) -> None:
    pages = {path.name for path in (installed / "share/man/man1").iterdir()}
    assert pages == {"iaprof.1", *(f"iaprof-{verb}.1" for verb in VERBS)}


def test_every_build_writes_the_same() -> None:
    # given two processes with another order of sets each
    code = """
from iaprof.cli.main import app
from iaprof.cli.manual.files import files
print(files(app, "1", "2026-11-25"))
"""
    # when, then
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True
        ).stdout
        for seed in ("0", "2")
    }
    assert len(texts) == 1


def test_mandoc_finds_no_fault(installed: Path) -> None:
    for page in (installed / "share/man/man1").iterdir():
        done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True)
        assert (done.stdout, done.stderr, done.returncode) == ("", "", 0), page.name


def test_a_page_has_every_option_with_the_text_of_help(installed: Path) -> None:
    for verb, command in VERBS.items():
        text = rendered(installed / f"share/man/man1/iaprof-{verb}.1")
        context = command.make_context(verb, [], resilient_parsing=True)
        records = [each.get_help_record(context) for each in command.get_params(context)]
        assert any(records)
        for names, about in filter(None, records):
            assert re.sub(r" <\S+>", "", " ".join(names.split())) in text, (verb, names)
            assert " ".join(about.split()) in text, (verb, names)
        assert "<" not in text.partition("EXAMPLES")[0], verb


def test_the_exit_codes_are_on_each_page(installed: Path) -> None:
    for page in (installed / "share/man/man1").iterdir():
        text = rendered(page)
        assert "EXIT STATUS 0 Success. 1 An error:" in text
        assert "141 The reader of stdout closed it, as head does." in text


def test_a_whole_page() -> None:
    """Given texts that would mean something to roff, they come out as they are."""
    option = Parameter(["-o", "--out"], "-o, --out FILE", ".5 of it's `x`; see ~/a-b\\c.", Kind.FILE)
    argument = Parameter([], "CAPTURE", "A file.", Kind.CAPTURE)
    groups = {"Options": [option], "Arguments": [argument]}
    endings = [("Examples", ["  iaprof do -o x"])]
    command = Command("do", "[OPTIONS]", ["Do it.", "'Quoted' begins it."], groups, endings)
    assert (
        man_page(command, "1.2", "2026-11-25", [])
        == """\
.TH IAPROF\\-DO 1 "2026-11-25" "iaprof 1.2" "iaprof manual"
.SH NAME
iaprof\\-do \\- do it
.SH SYNOPSIS
.B iaprof do
[OPTIONS]
.SH DESCRIPTION
\\(aqQuoted\\(aq begins it.
.SH "OPTIONS"
.TP
\\fB\\-o\\fR, \\fB\\-\\-out\\fR \\fIFILE\\fR
\\&.5 of it\\(aqs \\(gax\\(ga; see \\(ti/a\\-b\\ec.
.SH "ARGUMENTS"
.TP
\\fICAPTURE\\fR
A file.
.SH "EXAMPLES"
.EX
  iaprof do \\-o x
.EE
.SH "EXIT STATUS"
.TP
\\fB0\\fR
Success.
.TP
\\fB1\\fR
An error: one sentence on stderr says what is wrong and what to do.
.TP
\\fB2\\fR
The command line is wrong.
.TP
\\fB130\\fR
Interrupted by Ctrl\\-C.
.TP
\\fB141\\fR
The reader of stdout closed it, as head does.
.SH SEE ALSO
\\fBiaprof\\fR(1)
"""
    )
