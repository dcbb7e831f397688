"""Each member of a header is described once, in formats/header/members.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.header.members import MEMBERS
from iaprof.record.options import Options
from iaprof.record.session import footer, header
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.archive.redaction import redacted_header

ROOT = Path(__file__).resolve().parents[3]
CAPTURES = sorted((ROOT / "tests" / "data" / "captures").glob("*.parquet"))
NAMES = Pseudonyms(b"key")


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_every_member_of_a_recorded_header_is_described(path: Path) -> None:
    reader = CaptureReader(path)
    for each in (reader.header, *(part.header for part in reader.parts)):
        assert not each.keys() - MEMBERS.keys()


def test_recorders_write_members_in_the_order_of_the_descriptions(tmp_path: Path) -> None:
    for members in (header(Options(tmp_path / "c"), 0, []), footer(1, 1, [])):
        assert list(members) == [name for name in MEMBERS if name in members]


def test_the_page_about_the_format_has_the_same_members() -> None:
    page = (ROOT / "docs" / "capture-format.md").read_text()
    section = page.split("\n## The header\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted([*named, "parts", "file"]) == sorted(MEMBERS)


def test_redaction_drops_a_member_without_a_description() -> None:
    assert "owner" not in redacted_header({"owner": "ann", "cpu_hz": 49}, NAMES)


@pytest.mark.parametrize(
    "value", ["ann", ["ann"], [["ann"]], {"ann": "ann", "": "ann"}, [{"name": "ann", "by": "ann"}]]
)
@pytest.mark.parametrize("member", [name for name, each in MEMBERS.items() if "" not in each.texts])
def test_no_text_stays_that_the_description_does_not_name(member: str, value: Any) -> None:
    described = MEMBERS[member]

    def texts(found: Any, name: str = "") -> list[str]:
        if isinstance(found, dict):
            return [text for key, each in found.items() for text in texts(each, key)]
        if isinstance(found, list):
            return [text for each in found for text in texts(each, name)]
        return [found] if isinstance(found, str) and name not in described.texts else []

    assert "ann" not in texts(redacted_header({member: value}, NAMES).get(member))
