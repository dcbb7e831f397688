"""Every example in help and docs is run; of those that need root, a GPU or a network, the options are checked."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from iaprof.cli.main import app
from iaprof.record.spool import FrameKind, Spool
from thorough import thorough
from unit.capturing import HEADER, capture, launch, record, stall
from unit.report.together import runs
from unit.timelines.clock_examples import E1

ROOT = Path(__file__).resolve().parents[3]
COMMAND = typer.main.get_command(app)
NEED_ROOT = {"record", "flame", "check", "devices", "calibrate"}
ELSEWHERE = re.compile(
    r"s3://|gs://|az://|tcp://|/var/lib|/shared/|/mnt/|--cluster|--serve|--open|--live|-i\b|--interactive| - |\.\.\.|\["
)
"""Examples that need a store, a cluster, a browser, a terminal, standard input or others' folders; and placeholders."""
MISTAKES = {"--format=htlm": 2, "gemm": 1}
"""Words of examples that show an error, and its exit code."""
SECOND = 1_000_000_000


def commands(text: str) -> list[str]:
    """Returns the calls of iaprof in a text of examples, without comments and what follows in a pipe."""
    found = []
    text = re.sub(r"\\\n\s*", " ", text)
    for line in re.findall(r"^ {2,}(?:\$ )?((?:sudo )?(?:[A-Z_]+=\S+ )?iaprof (?! ).*)$", text, flags=re.MULTILINE):
        if line.count('"') % 2:  # the query goes on in the next line
            begin = text.index(line)
            line = " ".join(text[begin : text.index('"', begin + len(line)) + 1].split())
        line = re.sub(r"^(?:sudo )?(?:[A-Z_]+=\S+ )?iaprof ", "", line)
        kept = re.match(r"""(?:[^\s|>#"']+|"[^"]*"|'[^']*'| (?! ))+""", line)
        assert kept, line
        found.append(kept[0].strip())
    return found


def examples() -> list[str]:
    """Returns every example of help and docs once."""
    texts = [command.epilog or "" for command in COMMAND.commands.values()]  # type: ignore[attr-defined]
    pages = [path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]]
    blocks = ["\n".join(re.findall(r"^ {4,}.*$", page, flags=re.MULTILINE)) for page in pages]
    return [*dict.fromkeys(each for text in [*texts, *blocks] for each in commands(text))]


EXAMPLES = examples()
VERBS = set(COMMAND.commands)  # type: ignore[attr-defined]
RUN = [each for each in EXAMPLES if each.split()[0] not in NEED_ROOT and not ELSEWHERE.search(each + " ")]


def test_examples_are_found() -> None:
    assert len(EXAMPLES) > 120
    assert len(RUN) > 80
    assert {each.split()[0] for each in EXAMPLES} >= VERBS - {"help"}


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each not in RUN and "[" not in each])
def test_the_options_of_an_example_are_right(example: str) -> None:
    verb, *words = shlex.split(example)
    command = COMMAND.commands[verb]  # type: ignore[attr-defined]
    command.make_context(verb, words)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with all files that examples name."""
    folder = tmp_path_factory.mktemp("world")
    captures(folder)
    traces(folder)
    iaprof(folder, "report", "cap.parquet", "-q", "-o", "old.iaprof.txt")
    for name in ("old.txt", "cap.iaprof.txt"):
        shutil.copy(folder / "old.iaprof.txt", folder / name)
    iaprof(folder, "merge", "-q", "node1.parquet", "node2.parquet", "-o", "merged.parquet")
    for name in ("all", "two", "job"):
        shutil.copy(folder / "merged.parquet", folder / f"{name}.parquet")
    (folder / "key").write_bytes(bytes(range(32)))
    (folder / "key").chmod(0o600)
    return folder


def captures(folder: Path) -> None:
    """Writes captures of stalls, each of another recording."""
    names = ["cap", "iaprof", "old", "new", "before", "after", "node1", "node2", "rank0", "rank1", "cap.1", "odd",
             "huge", "both", "public", "iaprof.20261120-0554231", "captures/date=2026-11-20/host=a/one",
             "captures/date=2026-11-20/host=b/two", "v41/one", "v41/two", "v42/one", "v42/two"]  # fmt: skip
    names += [
        "captures/one",
        "captures/two",
        *(f"captures/date=2026-11-2{number}/host={host}/more" for number in (1, 2) for host in "abc"),
    ]
    for number, name in enumerate(names):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded(path, number)
    recorded(folder / "demo" / "cap.parquet", len(names))
    spool = Spool(folder / "cap.parquet.spool")
    spool.write(FrameKind.SIDEBAND, b"", time=SECOND)
    spool.close()
    for name in ("src", "builds", "tests/data/zebin/src"):
        (folder / name).mkdir(parents=True)


def recorded(path: Path, number: int) -> None:
    """Writes a capture of 30 s with every kind of row that examples ask for."""
    path.parent.mkdir(exist_ok=True)
    names = ["matmul", "attn_scores", "multiply_basic"]
    at = [0x8000_0001_0000 + 0x1000 * each for each in range(3)]
    launches = [launch(each * SECOND, 4711, at[each % 3], 0, name=names[each % 3], comm="app") for each in range(2, 30)]
    stalls = [
        stall(each * SECOND + SECOND // 2, record(at[each % 3] + 8, sbid=3 + number, send=1), begin_ns=each * SECOND)
        for each in range(2, 30)
    ]
    metric = {"stream": 0, "pid": None, "name": "energy-card-J"}
    wait = {"pid": 4711, "tid": 4711, "comm": "app", "count": 1, "handle": 16, "stack": 0, "flags": 0}
    copy = {"pid": 4711, "tid": 4711, "cpu": 0, "comm": "app", "stack": 0, "bytes": 4096, "flags": 0}
    sample = {"pid": 4711, "tid": 4711, "cpu": 0, "stack": 0, "kernel_stack": 0}
    begin = (1 + 100 * number) * 1_000
    header = HEADER | {
        "clock": {"monotonic_ns": SECOND + begin, "realtime_ns": 1_790_000_000 * SECOND + begin},
        "end_ns": 31 * SECOND,
        "host": {"name": f"host{number % 4}"},
    }
    capture(
        path,
        header,
        launch=launches,
        stall=stalls,
        metric=[metric | {"time_ns": each * SECOND, "value": 10.0 * each} for each in range(1, 31)],
        wait=[
            wait
            | {"time_ns": 3 * SECOND, "end_ns": 4 * SECOND, "waited_ns": SECOND, "function": "zeEventHostSynchronize"}
        ],
        transfer=[copy | {"time_ns": 4 * SECOND, "function": "zeCommandListAppendMemoryCopy"}],
        cpu_sample=[sample | {"time_ns": each * SECOND} for each in range(2, 30)],
    )


def traces(folder: Path) -> None:
    """Writes traces, and captures of them."""
    for name in ("job-0.json", "rank_0.json"):
        (folder / name).write_text(json.dumps(E1))
    (folder / "compile.log").write_text(
        " Ideal/Total Cycles \nk_1-opCatBmm_fp16 22000\nm_2-opCatScalar 0\n====== Perf Summary End ======\n"
    )
    runs.trace(folder / "trace.pt.trace.json", runs.calls())
    runs.recorded(folder / "torch-stalls.parquet")
    iaprof(folder, "import", "-q", "trace.pt.trace.json", "--with", "torch-stalls.parquet", "-f", "-o", "both.parquet")
    iaprof(folder, "import", "-q", "job-0.json", "-o", "run.parquet")
    iaprof(folder, "timeline", "-q", "run.parquet", "-o", "made")
    shutil.copy(folder / "made" / "trace.pftrace", folder / "trace.pftrace")
    for name in ("run-1", "run-2"):
        shutil.copy(folder / "run.parquet", folder / f"{name}.parquet")
    iaprof(folder, "import", "-q", "trace.pt.trace.json", "-o", "torch.parquet")


def iaprof(folder: Path, *words: str) -> None:
    """Runs a verb in a folder; it has to succeed, unless the example is of an error."""
    environment = os.environ | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80"}
    line = [sys.executable, "-m", "iaprof", *words]
    done = subprocess.run(line, cwd=folder, capture_output=True, check=False, timeout=600, env=environment)
    expected = next((code for mistake, code in MISTAKES.items() if mistake in words), 0)
    assert done.returncode == expected, f"{shlex.join(words)}\n{done.stderr.decode()}"


@thorough
@pytest.mark.parametrize("example", RUN)
def test_an_example_works(example: str, world: Path, tmp_path: Path) -> None:
    # given the files that it names, without those that it writes
    shutil.copytree(world, tmp_path, symlinks=True, dirs_exist_ok=True)
    words = [part for word in shlex.split(example) for part in expanded(word, example, tmp_path)]
    for option in ("-o", "--output"):
        if option in words:
            target = tmp_path / words[words.index(option) + 1]
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    if words[0] in ("import", "merge", "recover"):
        words.append("--force")
    if "--with" in words:
        shutil.copy(tmp_path / "torch-stalls.parquet", tmp_path / "cap.parquet")
    # when, then it works
    iaprof(tmp_path, *words)


def expanded(word: str, example: str, folder: Path) -> list[str]:
    """Returns what a shell makes of a word: patterns without quotes become files."""
    if "*" in word and f"'{word}'" not in example and '"' not in example:
        found = sorted(str(path.relative_to(folder)) for path in folder.glob(word))
        assert found, word
        return found
    return [word.replace("~", str(folder))]
