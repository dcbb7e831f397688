"""`--json`: one complete document, even with hostile names."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from iaprof.formats.export import Export
from iaprof.formats.profile import Code, Kernel, Launch, Profile, StackOptions
from iaprof.formats.writers.folded import Folded
from iaprof.formats.writers.json_stacks import JsonStacks
from iaprof.gpu.intel.reasons import REASONS
from unit.capturing import capture, launch, record, stall
from unit.in_process import iaprof
from unit.profiles import Row, counts, profile, rows

APP = Launch("app", 42, ("main", "run(int)"), ("do_syscall_64",))
REMOTE = Launch("", 0, (), (), "node1")
MATMUL = Kernel(0x8000, "matmul", "src/matmul.cl")
DOT = Code("send", ("matmul", "dot(float)"), (4, 9), ("src/matmul.cl", "lib/vec.h"))
ROWS = [
    Row(0, APP, MATMUL, DOT, 0x10, counts(sbid=7, active=1)),
    Row(1, REMOTE, Kernel(0, "fill", ""), Code("mov", ("fill",), (0,)), 0x20, counts(tdr=2)),
    Row(1, None, None, Code("[no binary]", (), ()), 0xFFFF_FFFF_FFFF_FFF8, counts(control=3)),
]
PROFILE = replace(profile(ROWS, (10.0, 11.5)), launch_counts={0: 1200}, matched={"kernel": 0.75, "instruction": 0.5})
DOCUMENT = """\
{"matched": {"kernel": 0.75, "instruction": 0.5}, "intervals": [10.0, 11.5], "launches": [\
{"process": "app", "pid": 42, "host": null, "stack": ["main", "run(int)", "do_syscall_64_[k]"]}, \
{"process": "", "pid": 0, "host": "node1", "stack": []}, \
{"process": null, "pid": null, "host": null, "stack": []}], "kernels": [\
{"name": "matmul", "file": "src/matmul.cl", "address": 32768, "launches": 1200}, \
{"name": "fill", "file": null, "address": 0, "launches": 0}, \
{"name": "[unknown kernel]", "file": null, "address": null, "launches": 0}], "codes": [\
{"mnemonic": "send", "functions": ["matmul", "dot(float)"], "lines": [4, 9], "files": ["src/matmul.cl", "lib/vec.h"]}, \
{"mnemonic": "mov", "functions": ["fill"], "lines": [0], "files": []}, \
{"mnemonic": "[no binary]", "functions": [], "lines": [], "files": []}], "rows": [
{"interval": 0, "launch": 0, "kernel": 0, "code": 0, "offset": 16, "samples": {"active": 1, "sbid": 7}},
{"interval": 1, "launch": 1, "kernel": 1, "code": 1, "offset": 32, "samples": {"tdr": 2}},
{"interval": 1, "launch": 2, "kernel": 2, "code": 2, "offset": 18446744073709551608, "samples": {"control": 3}}]}
"""
NAMES = [
    "main",
    "a;b",
    ";",
    "-",
    "",
    "\n",
    "a\tb",
    "\u202e",
    '"',
    "\\",
    "\0",
    "\x1b[2J",
    "é",
    "\udcff",
    "</script>",
    "x_[k]",
]


def written(writer: JsonStacks | Folded, made: Profile, options: StackOptions | None = None) -> str:
    out = io.StringIO()
    writer.write(Export(made), options or StackOptions(), out)
    return out.getvalue()


def read_back(document: dict[str, Any]) -> Profile:
    """The profile that a document describes; kernel frames are part of its stacks."""

    def launch_of(told: dict[str, Any]) -> Launch | None:
        if told["pid"] is None:
            return None
        return Launch(told["process"], told["pid"], tuple(told["stack"]), (), told["host"] or "")

    def kernel_of(told: dict[str, Any]) -> Kernel | None:
        return None if told["address"] is None else Kernel(told["address"], told["name"], told["file"] or "")

    launches, kernels = [*map(launch_of, document["launches"])], [*map(kernel_of, document["kernels"])]
    codes = [
        Code(told["mnemonic"], *(tuple(told[what]) for what in ("functions", "lines", "files")))
        for told in document["codes"]
    ]
    return profile(
        [
            Row(
                told["interval"],
                launches[told["launch"]],
                kernels[told["kernel"]],
                codes[told["code"]],
                told["offset"],
                counts(**told["samples"]),
            )
            for told in document["rows"]
        ],
        document["intervals"],
    )


def random_profile(rng: random.Random) -> Profile:
    """Random rows with hostile names."""

    def some(most: int) -> tuple[str, ...]:
        return tuple(rng.choices(NAMES, k=rng.randrange(most + 1)))

    def row() -> Row:
        functions = some(3)
        lines = tuple(rng.randrange(3) for _ in functions)
        return Row(
            rng.randrange(3),
            rng.choice((None, Launch(rng.choice(NAMES), rng.randrange(9), some(4), some(2), rng.choice(("", "n;1"))))),
            rng.choice((None, Kernel(rng.randrange(1 << 48), rng.choice(NAMES), rng.choice(NAMES)))),
            Code(rng.choice(NAMES), functions, lines, some(3)),
            rng.getrandbits(64),
            [rng.choice((0, 1, rng.getrandbits(40))) for _ in REASONS],
        )

    return profile([row() for _ in range(rng.randrange(20))], (1.0, 2.25, 1e9))


def test_the_whole_document() -> None:
    assert written(JsonStacks(), PROFILE) == DOCUMENT


def test_an_empty_profile() -> None:
    assert json.loads(written(JsonStacks(), profile([]))) == {
        "matched": {},
        "intervals": [0.0],
        "launches": [],
        "kernels": [],
        "codes": [],
        "rows": [],
    }


def test_max_stack_applies_to_json() -> None:
    launches = json.loads(written(JsonStacks(), PROFILE, StackOptions(max_stack=2)))["launches"]
    assert launches[0]["stack"] == ["[truncated]", "run(int)", "do_syscall_64_[k]"]


def test_hostile_names_keep_all_rows() -> None:
    rng = random.Random(1)
    for _ in range(30):
        # given
        made = random_profile(rng)
        # when
        text = written(JsonStacks(), made)
        found = read_back(json.loads(text))
        # then
        assert text.isascii()
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text.splitlines()) == len(made) + 1
        assert [(row.interval, row.kernel, row.code, row.offset, tuple(row.counts)) for row in rows(found)] == [
            (row.interval, row.kernel, row.code, row.offset, tuple(row.counts)) for row in rows(made)
        ]
        assert written(Folded(), found) == written(Folded(), made)


def test_the_command(tmp_path: Path) -> None:
    # given stalls in a known and in an unknown kernel
    stalls = [stall(1_000_000_009, record(0x1000, sbid=3), record(0x9000, send=1))]
    path = capture(tmp_path / "c", stall=stalls, launch=[launch(1_000_000_002, 7, 0x1000, name='e"\x1b[2J')])
    # when
    done = iaprof("report", path, "--json", "-q")
    output = tmp_path / "out.json"
    assert iaprof("report", path, "-o", output, "-q") == (0, "", "")
    # then
    assert (done.code, done.err) == (0, "")
    assert output.read_text() == iaprof("report", path, "--format=json", "-q").out == done.out
    document = json.loads(done.out)
    assert document["matched"] == {"kernel": 0.75, "instruction": 0.0, "stack": 0.75, "ambiguous": 0.0}
    assert sorted(kernel["name"] for kernel in document["kernels"]) == ["[unknown kernel]", 'e"\x1b[2J']
    assert written(Folded(), read_back(document)) == iaprof("report", path, "-q").out


def test_two_formats_at_once(tmp_path: Path) -> None:
    assert iaprof("report", capture(tmp_path / "c", stall=[]), "--json", "--format=folded") == (
        2,
        "",
        "iaprof: --json and --format=folded contradict each other: leave one of them out\n",
    )


def json_total(file: Path) -> int:
    return sum(sum(row["samples"].values()) for row in json.loads(file.read_text())["rows"])


TOTALS = {"json": json_total}
