"""`iaprof flame`: one command, a page and a capture."""

import functools
import operator
from pathlib import Path

import pytest

from iaprof.cli.terminal.stdout import open_output
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.profile import StackOptions
from iaprof.formats.writers.registry import WRITERS
from iaprof.formats.writers.writer import Needs
from iaprof.report.cpu_names import SymbolOptions
from iaprof.report.exporting import build_export
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.profile import ReportOptions
from integration.recording import environment, iaprof
from integration.totals import TOTALS
from standin import runtime
from standin.hardware import Hardware

pytestmark = pytest.mark.bpf


@pytest.mark.alone
def test_from_a_command_to_a_page(tmp_path: Path) -> None:
    page = tmp_path / "app.html"
    with Hardware(tmp_path / "gpu") as hardware:
        command = runtime.command([runtime.debug_elf("bmg", "matmul")], "--seconds", 1)
        # when the command ends with an exit code of its own
        words = ["sh", "-c", '"$@" && exit 3', "sh", *map(str, command)]
        done = iaprof("flame", "-o", page, "--", *words, env=environment(hardware))
    # then it is ours
    assert done.code == 3, done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app.html", "app.parquet", "gpu"]
    assert f"{page} opens in any browser; {tmp_path / 'app.parquet'} is the capture" in done.err
    # and the page has all that was recorded, as has every format that is made of the capture
    captured = hardware.ledger().samples_captured
    assert captured > 0
    assert TOTALS["html"](page) == captured
    assert TOTALS.keys() == WRITERS.keys()
    with GpuModuleLoader() as modules:
        everything = functools.reduce(operator.or_, Needs)
        reader = CaptureReader(tmp_path / "app.parquet")
        export, _ = build_export(reader, modules, ReportOptions(interval_s=0.1), SymbolOptions(), everything)
    for name in TOTALS.keys() - {"html"}:
        with open_output(made := tmp_path / f"made-{name}", WRITERS[name].binary) as out:
            WRITERS[name].write(export, StackOptions(), out)
        assert TOTALS[name](made) == captured, name
    again = iaprof("flame", "-o", page, "--", "true")
    assert (again.code, again.err) == (
        1,
        f"iaprof: {page} exists: name another file with -o, or overwrite it with --force\n",
    )


def test_what_cannot_be(tmp_path: Path) -> None:
    assert iaprof("flame").err == "iaprof: name a COMMAND to record, or a --duration\n"
    assert "has to be a page" in iaprof("flame", "-o", tmp_path / "x.svg", "--", "true").err
    # a program that there is not: record's own sentence, and nothing is left
    done = iaprof("flame", "-o", tmp_path / "x.html", "--", "no-such-program")
    assert done.code != 0
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
