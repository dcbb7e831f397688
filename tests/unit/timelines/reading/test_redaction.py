"""Redacted time lines tell nothing about their owner, and the stages still find what they look for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from iaprof.formats.capture.reader import CaptureReader
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.archive.redaction import (
    redacted_category,
    redacted_name,
    redacted_peers,
    redacted_phase,
    redacted_series,
    redacted_type,
)
from unit.in_process import iaprof
from unit.timelines.clock_examples import E1, e6
from unit.timelines.examples import launch

NAMES = Pseudonyms()
_SYNC = "[sync=AllReduce_all_reduce_3_s0_r0x7_12]"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("acme_conv_12 Cmpt Exec", r"slice-[a-p]{8}_12 Cmpt Exec"),
        ("k DmaI", r"slice-[a-p]{8} DmaI"),
        (f"SenRdmaSend_71 - Xseg to rank 2 {_SYNC} DmaO", None),
        (f"SenRdmaSend_71 - Set BcList {_SYNC} DmaO", None),
        (f"SenRdmaSend_71 Data {_SYNC} DmaO", None),
        (f"SenRdmaRecv_72 [524288B] {_SYNC} DmaI", None),
        ("SenRdmaSend_1 [sync=acme_s0_r1_2] DmaO", r"SenRdmaSend_1 \[sync=slice-[a-p]{8}_s0_r1_2\] DmaO"),
        ("AllReduce_all_reduce_3_Add_1 Cmpt Exec", None),
        ("AllReduce_all_reduce_3", None),
        ("Flex RoundTrip", None),
        ("AIU Roundtrip", None),
        ("aiuScheduleWait", None),
        ("aiuAcmeModel", r"slice-[a-p]{8}"),
        ("Memcpy (HtoD)", None),
        ("acme/model.py(12): step", r"slice-[a-p]{8}"),
        ("process_name", None),
        ("Barrier: acme", r"Barrier: slice-[a-p]{8}"),
        ("", ""),
    ],
)
def test_words_of_runtimes_stay_and_others_become_hashes(name: str, expected: str | None) -> None:
    if expected is None:
        assert redacted_name(NAMES, name) == name
    else:
        assert re.fullmatch(expected, redacted_name(NAMES, name))


def test_the_same_name_has_the_same_hash_in_all_windows_of_an_operation() -> None:
    heads = {
        redacted_name(NAMES, f"acme_7{window}").partition("_7")[0] for window in (" DmaI", " Cmpt Exec", " Cmpt Prep")
    }
    assert len(heads) == 1


@given(st.lists(st.sampled_from(["_12", " Cmpt Exec", "AllReduce", "acme", " ", "[sync=", "_s0_r1_2]", "secret", "3"])))
def test_no_word_of_a_user_stays(parts: list[str]) -> None:
    redacted = redacted_name(NAMES, "".join(parts))
    assert "acme" not in redacted and "secret" not in redacted
    assert len(redacted) <= 16 * len("".join(parts)) + 16


def test_other_texts_of_rows() -> None:
    assert redacted_category(NAMES, "kernel") == "kernel"
    assert re.fullmatch(r"category-[a-p]{8} gpu", redacted_category(NAMES, "gpu_acme"))
    assert (redacted_type(NAMES, "SingleCast"), redacted_peers(NAMES, "0,1, 2"), redacted_phase(NAMES, "X")) == (
        "SingleCast",
        "0,1, 2",
        "X",
    )
    for change in (redacted_type, redacted_peers, redacted_phase, redacted_series):
        assert re.fullmatch(r"(type|peers|phase|series)-[a-p]{8}", change(NAMES, "acme"))


def _traces(folder: Path) -> list[Path]:
    """E1 with a secret kernel and an odd event, E6 as ranks 0 and 1 of their own, and E11."""
    odd = {"ph": "acmephase", "name": "acme", "pid": "acme pid", "tid": "acme tid", "ts": 1, "cat": "acme cat"}
    value = {"ph": "C", "name": "acme counter", "pid": 0, "ts": 5, "args": {"acme series": 5}}
    named: list[Any] = [{**event, "name": event["name"].replace("k_1", "acme_1")} for event in E1]
    files: list[Any] = [[*named, odd, value], *e6()]
    files[0][0]["args"] |= {"Type": "acme type", "Peer": "acme peer", "path": "acme path"}
    files.append(
        {
            "deviceProperties": [{"id": 0, "name": "acme device", "acme key": 5}],
            "distributedInfo": {"rank": 2, "pg_config": "acme group"},
            "acme member": "acme",
            "traceEvents": launch(),
        }
    )
    paths = [folder / f"acme-{number}.json" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        path.write_text(json.dumps(content))
    return paths


def test_a_redacted_capture_has_the_same_time_lines(tmp_path: Path) -> None:
    plain, redacted = tmp_path / "run.parquet", tmp_path / "redacted.parquet"
    assert iaprof("import", *_traces(tmp_path), "-o", plain, "-q").code == 0
    assert iaprof("archive", "--redact", plain, "-o", redacted).code == 0
    assert b"acme" not in redacted.read_bytes()
    reader = CaptureReader(redacted)
    for kind in ("slice", "counter", "flow", "instant"):
        assert "acme" not in str(reader.table(kind).to_pylist())
    assert "acme" not in json.dumps(reader.header)
    both: list[Any] = []
    for path in (plain, redacted):
        done = iaprof("timeline", path, "--flow", "--collectives", "--json")
        assert done.code == 0, done.err
        both.append(json.loads(done.out))
    one, other = both
    assert one["events"] == other["events"]
    assert one["events"]["made"]["ends of arrows from sends to receives"] == 4
    assert one["tables"].keys() == other["tables"].keys()
    for name, rows in one["tables"].items():
        expected = [pytest.approx(_numbers(row), abs=0.05) for row in rows]  # a moved clock leaves 16 ns
        assert [_numbers(row) for row in other["tables"][name]] == expected, name


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a row, but for times of the clock, which is moved."""
    moved = ("Start Time", "End Time", "First Arrival", "Last Arrival")
    return {name: value for name, value in row.items() if isinstance(value, int | float) and name not in moved}
