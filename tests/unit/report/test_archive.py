"""Archives: captures with names for their frames, and redacted captures."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iaprof.formats.capture.limits import CaptureError
from iaprof.formats.capture.reader import CaptureReader
from iaprof.formats.capture.schema import FORMAT, KINDS
from iaprof.formats.capture.writer import CaptureWriter
from iaprof.gpu.intel.reasons import REASONS
from iaprof.report.archive.archiving import archive
from iaprof.report.archive.pseudonyms import Pseudonyms
from iaprof.report.archive.redaction import Redaction, redacted_path
from iaprof.report.cpu_names import SymbolizerChain
from iaprof.report.gpu.module import GpuModuleLoader
from iaprof.report.profile import build
from iaprof.symbols.names.names import Frame, Module, ModuleKind, Names, Symbolized
from iaprof.symbols.names.rows import CaptureNames
from unit.capturing import HEADER, capture, launch, named_by, record, stall
from unit.profiles import rows
from unit.symbols.names.test_address_space import spaces
from unit.zebins import debug_elf

NAMES = Pseudonyms(b"key")
SECRETS = ("secret-host", "secret-app", "/home/secret", "secret_function", "SecretKernel", "secret-cgroup",
           "secret.cpp", "secret-key", "secret-library", "secret-loss", "secret-container", "secret_py",
           "attention")  # fmt: skip
STRAY = int.from_bytes(b"!secret!", "little")  # data that an unwinder may take for a return address
KERNEL_IP = 0xFFFF_FFFF_8123_4567
FILE = Module(ModuleKind.FILE, "/home/secret/bin/secret-app", b"\x11" * 20)


class Everything:
    """A symbolizer that has a name for every address."""

    def name(self, module: Module, addresses: np.ndarray, times: np.ndarray) -> Symbolized:
        chains = {
            ModuleKind.FILE: [Frame("secret_function", "/home/secret/secret.cpp", 7), Frame("secret_function2")],
            ModuleKind.GENERATED: [Frame("py::secret_py:/home/secret/x.py")],
            ModuleKind.KERNEL: [Frame("do_syscall_64")],
        }
        entries = [(int(address), 1, chains[module.kind]) for address in addresses]
        return Symbolized(Names.of(entries), "debug information of /home/secret", "secret-key is missing", True)


@pytest.fixture
def recorded(tmp_path: Path) -> CaptureReader:
    """A capture with frames in a file, generated code and the Linux kernel, and secrets wherever there can be some."""
    process: dict[str, Any] = dict.fromkeys(field.name for field in KINDS["process"])
    process |= {"time_ns": 1, "pid": 7, "tid": 7, "event": "described", "comm": "secret-app", "uid": 1000, "gid": 1000,
                "cgroup": "/secret-cgroup", "container": "secret-container"}  # fmt: skip
    mapping = {"time_ns": 1, "pid": 7, "start": 0x1000, "length": 0x1000, "offset": 0x400, "path": FILE.path,
               "build_id": FILE.build_id, "inode": None}  # fmt: skip
    stacks = [
        {"id": 1, "time_ns": 2_000_000_000, "pid": 7, "truncated": False, "ips": [0x1010, 0x9001, 0x1021]},
        {"id": 2, "time_ns": 2_000_000_000, "pid": 0, "truncated": False, "ips": [KERNEL_IP, KERNEL_IP + 0x1001]},
        {"id": 3, "time_ns": 2_000_000_000, "pid": 7, "truncated": False, "ips": [0x1010, STRAY]},
    ]
    header = HEADER | {
        "host": {"name": "secret-host", "kernel": "6.18", "boot_id": "secret-key"},
        "command": ["/home/secret/secret-app", "--password=secret-key"],
        "arguments": ["iaprof", "record", "-o", "/home/secret/c"],
        "libraries": [{"path": "/home/secret/secret-library.so", "probes": 2, "since_ns": 5}],
        "users": {"secret-host": 3},
        "probes": {"launches": 4, "by": ["secret-app"]},
    }
    path = capture(
        tmp_path / "c.parquet",
        header,
        stall=[stall(2_500_000_000, record(0x8000_0000, sbid=5))],
        launch=[launch(2_000_000_000, 7, 0x8000_0000, comm="secret-app", name="SecretKernel", size=256)],
        stack=stacks,
        mapping=[mapping, mapping | {"start": 0x9000, "offset": 0, "path": "//anon", "build_id": None}],
        process=[process],
        kernel=[{"time_ns": 1, "pid": 7, "path": "/home/secret/k.elf", "digest": b"\1" * 32, "size": 4,
                 "elf": debug_elf("bmg", "attention")}],
        cpu_sample=[{"time_ns": 2_000_000_000, "pid": 7, "tid": 7, "cpu": 0, "stack": 1, "kernel_stack": 2}],
        loss=[{"begin_ns": 1, "time_ns": 2, "source": "kernels", "what": "refused", "count": 1,
               "detail": "/home/secret/secret-loss"}],
    )  # fmt: skip
    return CaptureReader(path)


def archived(
    capture: CaptureReader, tmp_path: Path, redact: bool = False, keep_kernels: bool | None = None
) -> CaptureReader:
    output = tmp_path / "archived.parquet"
    archive(
        capture,
        output,
        named_by(lambda part: SymbolizerChain([CaptureNames(part), Everything()])),
        lambda *_: None,
        redact=NAMES if redact else None,
        keep_kernels=not redact if keep_kernels is None else keep_kernels,
    )
    return CaptureReader(output)


def launching_stack(capture: CaptureReader) -> tuple[str, ...]:
    with GpuModuleLoader() as modules:
        (row,) = rows(build(capture, modules).profile)
    assert row.launch is not None
    return row.launch.stack


def test_an_archive_has_the_same_rows_and_the_names(recorded: CaptureReader, tmp_path: Path) -> None:
    # given a capture without names
    assert launching_stack(recorded) == ("[secret-app+0x420]", "[anon]", "[secret-app+0x410]")
    # when
    portable = archived(recorded, tmp_path)
    # then
    for kind in KINDS:
        if kind not in ("module", "symbol"):
            assert portable.table(kind).to_pylist() == recorded.table(kind).to_pylist(), kind
    added = {"symbols": portable.header["symbols"], "matched": portable.header["matched"]}
    assert portable.header == recorded.header | {"format": FORMAT} | added
    assert (added["matched"]["kernel"], added["matched"]["stack"], added["matched"]["ambiguous"]) == (1, 1, 0)
    assert portable.header["symbols"]["named"] == portable.header["symbols"]["addresses"] == 6
    assert launching_stack(portable) == (
        "secret_function", "secret_function2", "py::secret_py:/home/secret/x.py", "secret_function", "secret_function2"
    )  # fmt: skip


def test_an_archive_of_an_archive_keeps_its_names(recorded: CaptureReader, tmp_path: Path) -> None:
    once = archived(recorded, tmp_path)
    archive(once, tmp_path / "twice", named_by(CaptureNames), lambda *_: None, redact=None, keep_kernels=True)
    twice = CaptureReader(tmp_path / "twice")
    assert twice.table("symbol").to_pylist() == once.table("symbol").to_pylist()
    assert twice.table("module").to_pylist() == once.table("module").to_pylist()


def test_archives_without_kernels_lack_debug_elfs(recorded: CaptureReader, tmp_path: Path) -> None:
    assert archived(recorded, tmp_path, keep_kernels=False).table("kernel")["elf"].null_count == 1


def test_a_redacted_capture_has_no_secrets(recorded: CaptureReader, tmp_path: Path) -> None:
    def texts_of(capture: CaptureReader) -> str:
        return "\n".join([str(capture.header), *(str(capture.table(kind).to_pylist()) for kind in KINDS)])

    # given a capture that has all secrets when it is archived with its names
    whole = texts_of(archived(recorded, tmp_path))
    assert [secret for secret in SECRETS if secret not in whole] == []
    # when
    public = archived(recorded, tmp_path, redact=True)
    # then no text contains a secret
    texts = texts_of(public)
    for secret in SECRETS:
        assert secret not in texts, secret
    assert FILE.build_id is not None
    assert repr(FILE.build_id) in whole
    assert repr(FILE.build_id) not in texts
    assert public.table("process")["uid"].null_count == 1
    assert [row["ips"] for row in public.table("stack").to_pylist() if row["id"] == 3] == [[0x1010, 1]]
    assert public.table("kernel").to_pylist()[0]["digest"] != recorded.table("kernel").to_pylist()[0]["digest"]
    # but numbers stay
    assert public.header["probes"]["launches"] == 4
    assert public.header["streams"] == recorded.header["streams"]
    # and it does not reveal the Linux kernel's addresses
    kernel = [ip for row in public.table("stack").to_pylist() if row["pid"] == 0 for ip in row["ips"]]
    assert len(kernel) == 2
    assert max(kernel) < 0xFFFF_8000_0000_0000


def test_a_redacted_capture_still_shows_where_time_went(recorded: CaptureReader, tmp_path: Path) -> None:
    public = archived(recorded, tmp_path, redact=True)
    function, other = NAMES.name("function", "secret_function"), NAMES.name("function", "secret_function2")
    python = "py::" + NAMES.name("function", "py::secret_py:/home/secret/x.py")
    assert launching_stack(public) == (function, other, python, function, other)
    # and names of the Linux kernel still belong to their addresses
    kernel = public.table("stack").to_pylist()[1]
    names = CaptureNames(public).name(Module(ModuleKind.KERNEL), np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    assert names is not None
    asked = np.array([kernel["ips"][0], kernel["ips"][1] - 1], np.uint64)
    rows = names.names.find(asked)
    assert [names.names.frames(row) for row in rows] == [(Frame("do_syscall_64"),)] * 2
    assert public.header["redacted"] is True


def test_functions_in_common_files_keep_their_names() -> None:
    redaction = Redaction(NAMES, {}, spaces([], []), np.empty(0, np.uint64), keep_kernels=False)
    named = Symbolized(Names.of([(1, 1, [Frame("zeInit", "/home/secret/loader.cpp")])]), "from /home/secret", "")
    module, public = redaction.module(
        Module(ModuleKind.FILE, "/usr/lib/x86_64-linux-gnu/libze_loader.so.1", b"1"), named
    )
    assert module.path.endswith("/libze_loader.so.1")
    assert public.names.frames(0)[0].function == "zeInit"
    assert "secret" not in module.path + public.names.frames(0)[0].file + public.source


def test_a_redacted_capture_with_kernels_keeps_debug_elfs(recorded: CaptureReader, tmp_path: Path) -> None:
    assert archived(recorded, tmp_path, redact=True, keep_kernels=True).table("kernel")["elf"].null_count == 0


def test_labels_of_imported_samples_stay_and_names_do_not(tmp_path: Path) -> None:
    # given imported samples
    told = [
        # process, stack, kernel, file
        ("[unknown process]", "[unknown process]", "[unknown kernel]", "[unknown file]"),
        ("[ambiguous: 2 processes]", "", "[ambiguous kernel]", ""),
        ("secret-app", "[launched before recording]", "SecretKernel", "/home/secret/k.cl"),
        (
            "[secret]",
            "[truncated];[secret-app+0x10];0x7f00;main;[no frame pointers: libsecret.so]",
            "0x40",
            "x",
        ),
        ("[other process]", "[not recorded]", "[called functions]", ""),
        ("secret-app", "py::f:secret.py;fake_[k];secret_run;do_syscall_64_[k];0xffffffff81234567_[k]", "k", "x"),
    ]
    rest = {"time_ns": 1, "pid": 7, "address": 64, "offset": 0, "mnemonic": "mov"} | dict.fromkeys(REASONS, 1)
    sample = [dict(zip(("comm", "stack", "kernel", "file"), each, strict=True)) | rest for each in told]
    path = capture(tmp_path / "c", HEADER | {"imported": {"format": "iaprof 2026.2"}}, sample=sample)
    # when
    public = archived(CaptureReader(path), tmp_path, redact=True)

    # then
    app, other, kernel, odd = (
        NAMES.name("process", "secret-app"),
        NAMES.name("process", "[secret]"),
        NAMES.name("kernel", "SecretKernel"),
        NAMES.name("kernel", "k"),
    )
    unnamed, ended = (
        NAMES.name("function", "[secret-app+0x10]"),
        NAMES.name("function", "[no frame pointers: libsecret.so]"),
    )
    python = "py::" + NAMES.name("function", "py::f:secret.py")
    fake, run = NAMES.name("function", "fake_[k]"), NAMES.name("function", "secret_run")
    found = public.table("sample").to_pylist()
    assert [tuple(row[member] for member in ("comm", "stack", "kernel", "file")) for row in found] == [
        ("[unknown process]", "[unknown process]", "[unknown kernel]", "[unknown file]"),
        ("[ambiguous: 2 processes]", "", "[ambiguous kernel]", ""),
        (app, "[launched before recording]", kernel, redacted_path(NAMES, "/home/secret/k.cl")),
        (other, f"[truncated];{unnamed};0x7f00;main;{ended}", "0x40", redacted_path(NAMES, "x")),
        ("[other process]", "[not recorded]", "[called functions]", ""),
        (app, f"{python};{fake};{run};do_syscall_64_[k];[kernel]_[k]", odd, redacted_path(NAMES, "x")),
    ]  # fmt: skip
    # and a report matches as many samples as before
    assert public.header["matched"] == archived(CaptureReader(path), tmp_path).header["matched"]


# Errors


def damaged(path: Path) -> Path:
    """A capture with damage in its last rows."""
    launches = [launch(2, 7, 64)] * 1000
    sample = [launch(3, 7, 64) | {"pid": None}]
    with path.open("wb") as file:
        writer = CaptureWriter(file)
        for rows_ in (launches, sample):
            writer.write("launch", pa.array(rows_, KINDS["launch"]))
        writer.close(HEADER)
    return path


def test_a_damaged_capture_leaves_no_archive(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = damaged(tmp_path / "c")
    for redact in (False, True):
        with pytest.raises(CaptureError, match="c is damaged in its launch rows: column 'pid' has nulls"):
            archived(CaptureReader(path), tmp_path, redact=redact)
    gc.collect()
    assert list(tmp_path.iterdir()) == [path]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("share", [0.001, 0.5, 0.97])
def test_a_full_disk_is_one_sentence_and_leaves_no_archive(tmp_path: Path, share: float) -> None:
    # given a disk that is full: from the beginning, from the middle, and near the end
    rng = np.random.default_rng(1)
    stacks = [{"id": each, "time_ns": 1, "pid": 7, "truncated": False, "ips": [each]}
              for each in rng.integers(0, 1 << 62, 8000).tolist()]  # fmt: skip
    path = capture(tmp_path / "c", stack=stacks)
    nobody = named_by(CaptureNames)
    archive(CaptureReader(path), tmp_path / "old", nobody, lambda *_: None, redact=None, keep_kernels=True)
    room = int((tmp_path / "old").stat().st_size * share)
    (tmp_path / "old").write_text("kept")
    script = f"""
import resource
from iaprof.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))
main()
"""
    words: list[str | Path] = [sys.executable, "-c", script, "archive", path, "-o", tmp_path / "old", "--force"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"iaprof: {tmp_path}/old cannot be written: File too large\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["c", "old"]
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "libc.so.6"),
        ("/usr/bin/python3.12", "python3.12"),
        ("[vdso]", "[vdso]"),
        ("//anon", "//anon"),
    ],
)
def test_common_paths_stay(path: str, kept: str) -> None:
    assert redacted_path(NAMES, path).split("/")[-1] == kept.split("/")[-1]
    assert "secret" not in redacted_path(NAMES, path)


def test_a_name_always_has_the_same_hash() -> None:
    assert NAMES.name("function", "f") == NAMES.name("function", "f") != NAMES.name("function", "g")
    assert NAMES.name("function", "f") != NAMES.name("process", "f")
    assert redacted_path(NAMES, "/a/b") == redacted_path(NAMES, "/a/b") != redacted_path(NAMES, "/a/c")
    assert NAMES.name("function", "") == ""
