"""A second vendor is its own files and a line in each of two registries; everything else knows the interface only."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from iaprof import __file__ as package
from unit.gpu.acme import MEANINGS

HERE = Path(__file__).parent
SAMPLE = HERE.parents[1] / "data" / "captures" / "format-10.parquet"
OWN = {"gpu/acme.py": "acme.py", "record/sources/acme.py": "acme_sampler.py"}
REGISTRIES = {
    "gpu/vendors.py": (
        ("from iaprof.gpu.intel.vendor import Intel\n", "from iaprof.gpu.acme import Acme\n"),
        ("= (Intel(), Nvidia())", "= (Intel(), Nvidia(), Acme())"),
    ),
    "record/sources/opening.py": (
        (
            "from iaprof.record.sources.source import Sampler, Source\n",
            "from iaprof.record.sources.acme import AcmeSampler\n",
        ),
        ("= (Stalls, CudaSamples)", "= (AcmeSampler, Stalls, CudaSamples)"),
    ),
}
READS = 5
RECORD = """
import sys
from pathlib import Path
from iaprof.cli.live.state import LiveState
from iaprof.record.journal import Journal
from iaprof.record.spool import FrameKind, Spool
from iaprof.record.loop import Loop
from iaprof.record.options import Options
from iaprof.record.sources.opening import open_sampler
from iaprof.report.gpu.module import GpuModuleLoader

sampler = open_sampler(Options(Path("cap.parquet")))
spool = Spool(Path("cap.spool"))
journal, loop = Journal(spool, print, print), Loop()
clock = {"monotonic_ns": 0, "realtime_ns": 0}
journal.json(FrameKind.HEADER, {"clock": clock, "losses": [], **sampler.header()})
sampler.start(journal, loop)
sampler.resume()
while sampler.reads < int(sys.argv[1]):
    loop.turn()
loop.close()
with GpuModuleLoader() as loader:
    live = LiveState(spool.path, loader)
    live.read()
    live.contents("", "", 1.0)
    profile = live.contents("", "", 1.0).profile
print(dict(zip(profile.reasons, profile.counts.sum(axis=0).tolist())), [code.mnemonic for code in profile.codes])
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of iaprof with the vendor, and a capture of it in its folder."""
    folder = tmp_path_factory.mktemp("acme")
    copy = folder / "src" / "iaprof"
    shutil.copytree(Path(package).parent, copy)
    for name, source in OWN.items():
        shutil.copyfile(HERE / source, copy / name)
    for name, changes in REGISTRIES.items():
        text = (copy / name).read_text()
        for before, after in changes:
            assert before in text
            text = text.replace(before, after if before.startswith("=") else before + after)
        (copy / name).write_text(text)
    for each in (folder, folder.parent):  # the sandboxed child has no privileges
        each.chmod(0o755)
    said = run(folder, "-c", RECORD, str(READS))
    assert said.startswith("{'active': 5000, 'memory': 1500025, 'other': 35} ")
    assert "load" in said
    iaprof(folder, "recover", "cap.spool", "-o", "cap.parquet")
    return folder


def run(folder: Path, *words: str) -> str:
    """What Python prints with that copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def iaprof(folder: Path, *words: str) -> str:
    """What that copy's command prints."""
    return run(folder, "-m", "iaprof", *words)


def as_json(folder: Path, *words: str) -> Any:
    return json.loads(iaprof(folder, *words, "--json"))


def test_only_the_registries_name_it(tree: Path) -> None:
    copy, original = tree / "src" / "iaprof", Path(package).parent
    changed = {
        str(path.relative_to(copy))
        for path in copy.rglob("*.py")
        if not (original / path.relative_to(copy)).exists()
        or path.read_bytes() != (original / path.relative_to(copy)).read_bytes()
    }
    assert changed == {*OWN, *REGISTRIES}


def test_stalls_are_joined_to_kernels_launches_and_instructions(tree: Path) -> None:
    frames = "--frames=process,function,instruction,reason,offset"
    assert sorted(iaprof(tree, "report", "cap.parquet", frames, "-q").splitlines()) == [
        "app;-;scale_[G];add_[g];memory_[g];0x4_[g] 1500000",
        "app;-;scale_[G];load_[g];active_[g];0x0_[g] 5000",
        "app;-;sum(int*)_[G];add_[g];memory_[g];0x4_[g] 25",
        "app;-;sum(int*)_[G];load_[g];other_[g];0x0_[g] 35",
    ]


def test_top_counts_its_reasons(tree: Path) -> None:
    found = as_json(tree, "top", "cap.parquet", "--by=reason", "-n0", "-q")["entries"]
    assert {each["reason"]: each["samples"] for each in found} == {"active": 5000, "memory": 1_500_025, "other": 35}
    assert as_json(tree, "top", "cap.parquet", "--reason=other", "-q")["total"]["samples"] == 35


def test_annotate_shows_its_instructions_and_what_they_wait_for(tree: Path) -> None:
    (listing, *_) = as_json(tree, "annotate", "cap.parquet", "-q")["kernels"]
    assert listing["kernel"] == "scale"
    assert [each["text"] for each in listing["instructions"]] == ["load r0, r9", "add r1, r0", "end r0, r0"]
    assert listing["instructions"][1]["reasons"] == {"memory": 1_500_000}
    assert listing["instructions"][1]["waits"] == [{"what": "load", "for": [0]}]
    assert "waits for what 0x0 load fetches" in iaprof(tree, "annotate", "cap.parquet", "-q")


def test_queries_decode_its_records(tree: Path) -> None:
    sql = "SELECT printf('%x', ip) AS ip, active, memory, other FROM stalls WHERE time_ns = 1000 ORDER BY 1"
    assert iaprof(tree, "query", "cap.parquet", sql, "--format=csv").split() == [
        "ip,active,memory,other", "700000000,1000,0,0", "700000004,0,300000,0", "700010000,0,0,7", "700010004,0,5,0",
    ]  # fmt: skip


def test_info_names_its_gpu(tree: Path) -> None:
    found = as_json(tree, "info", "cap.parquet")
    (part,) = found["parts"]
    (stream,) = part["streams"]
    assert (stream["generation"], stream["layout"], stream["name"]) == ("Acme Nine", "acme-sums", "Acme 9000")
    assert (found["counts"]["stalls"], found["counts"]["stall_reads"]) == (4 * READS, READS)


def test_its_words_keep_their_meaning(tree: Path) -> None:
    program = "import sys; from iaprof.gpu.vendors import meanings; print(*meanings(sys.argv[1:]), sep='\\n')"
    assert run(tree, "-c", program, *MEANINGS).splitlines() == list(MEANINGS.values())
    # while those of another vendor keep theirs
    assert run(tree, "-c", program, "sbid", "other").splitlines()[1] == "anything else"
    assert "memory" in iaprof(tree, "top", "--help")


def test_another_vendors_capture_is_read_as_before(tree: Path) -> None:
    shown = as_json(tree, "top", str(SAMPLE), "--by=reason", "-n0", "-q")
    with_only_intel = subprocess.run(
        [sys.executable, "-m", "iaprof", "top", str(SAMPLE), "--by=reason", "-n0", "-q", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown == json.loads(with_only_intel.stdout)


def test_a_merged_capture_has_both_vendors(tree: Path) -> None:
    iaprof(tree, "merge", "cap.parquet", str(SAMPLE), "-o", "both.parquet")
    entries = as_json(tree, "top", "both.parquet", "--by=reason", "-n0")["entries"]
    found = {each["reason"]: each["samples"] for each in entries}
    assert found["memory"] == 1_500_025
    assert found["sbid"] > 0
    sql = "SELECT part, sum(memory) AS m, sum(sbid) > 0 AS s FROM stalls GROUP BY part ORDER BY m"
    assert iaprof(tree, "query", "both.parquet", sql, "--format=csv").split()[1:] == ["0,0,True", "1,1500025,False"]
    kernels = {each["kernel"] for each in as_json(tree, "top", "both.parquet", "-n0")["entries"]}
    assert {"scale", "multiply_basic"} <= kernels


def test_check_tries_its_decoder(tree: Path) -> None:
    imports = "from iaprof.cli.verbs.check import _decoder; from iaprof.gpu.vendors import by_name"
    assert (
        run(tree, "-c", f"{imports}; print(_decoder(by_name('acme')).text)").strip() == "AcmeDecode decodes Acme Nine"
    )
