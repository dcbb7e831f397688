"""GPU jobs: the formats of the tracepoints, their records as perf writes them, and the rows that become of these."""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Any

import pytest

from iaprof.bpf import gpu_jobs
from iaprof.formats.header.gpu_jobs import SOURCE
from iaprof.formats.wire.gpu_jobs import JobFormat, JobStep, decode, format_of, formats_from_json, formats_to_json
from iaprof.record.capture.gpu_jobs import GpuJobRows
from iaprof.record.sources import gpu_jobs as source_of_jobs
from iaprof.record.sources.gpu_jobs import GpuJobs
from iaprof.record.spool import Frame, FrameKind

COMMON = """\
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:unsigned char common_flags;	offset:2;	size:1;	signed:0;
	field:unsigned char common_preempt_count;	offset:3;	size:1;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

"""
# as Debian's 6.12.117 and 7.2.13 have them
OLD = {
    "drm_sched_job": (1502, [("struct drm_sched_entity * entity", 8, 8), ("struct dma_fence * fence", 16, 8),
                             ("__data_loc char[] name", 24, 4), ("uint64_t id", 32, 8), ("u32 job_count", 40, 4)]),
    "drm_run_job": (1501, [("struct drm_sched_entity * entity", 8, 8), ("struct dma_fence * fence", 16, 8),
                           ("__data_loc char[] name", 24, 4), ("uint64_t id", 32, 8), ("u32 job_count", 40, 4)]),
    "drm_sched_process_job": (1500, [("struct dma_fence * fence", 8, 8)]),
}  # fmt: skip
_NEW = [("__data_loc char[] name", 8, 4), ("u32 job_count", 12, 4), ("int hw_job_count", 16, 4),
        ("__data_loc char[] dev", 20, 4), ("u64 fence_context", 24, 8), ("u64 fence_seqno", 32, 8),
        ("u64 client_id", 40, 8)]  # fmt: skip
NEW = {
    "drm_sched_job_queue": (1599, _NEW),
    "drm_sched_job_run": (1598, _NEW),
    "drm_sched_job_done": (1597, [("u64 fence_context", 8, 8), ("u64 fence_seqno", 16, 8)]),
}
FORMATS = [JobFormat(1599, JobStep.QUEUED, 24, 32, 8, 20), JobFormat(1598, JobStep.RUN, 24, 32, 8, 20),
           JobFormat(1597, JobStep.DONE, 8, 16, -1, -1)]  # fmt: skip
IN_CALLBACK = 1  # flag of a record: interrupts are off


def tracefs(folder: Path, events: dict[str, Any]) -> Path:
    """Writes the formats of tracepoints as tracefs has them."""
    for name, (number, fields) in events.items():
        lines = [f"\tfield:{field};\toffset:{at};\tsize:{size};\tsigned:0;" for field, at, size in fields]
        path = folder / "events" / "gpu_scheduler" / name
        path.mkdir(parents=True)
        (path / "format").write_text(
            f"name: {name}\nID: {number}\nformat:\n{COMMON}" + "\n".join(lines) + '\n\nprint fmt: ""\n'
        )
    return folder


def sample(time: int, pid: int, raw: bytes) -> bytes:
    """A PERF_RECORD_SAMPLE with TID, TIME, CPU and RAW."""
    raw += b"\0" * (-(len(raw) + 4) % 8)
    body = struct.pack("<IIQIII", pid, pid, time, 0, 0, len(raw)) + raw
    return struct.pack("<IHH", 9, 0, 8 + len(body)) + body


def given(
    step: JobStep, time: int, number: int, pid: int = 0, queue: bytes = b"ccs0", device: bytes = b"0000:03:00.0"
) -> bytes:
    """A record of job `number` that was queued or given to the driver."""
    texts = queue + b"\0" + device + b"\0"
    raw = struct.pack("<HBBi", FORMATS[step].id, 0, 0, pid) + struct.pack("<IIi", 48 | len(queue) + 1 << 16, 0, 0)
    raw += struct.pack("<IQQQ", 48 + len(queue) + 1 | len(device) + 1 << 16, 3, number, 7)
    return sample(time, pid, raw + texts)


def done(time: int, number: int, flags: int = IN_CALLBACK) -> bytes:
    """A record of the end of job `number`."""
    return sample(time, 12, struct.pack("<HBBiQQ", 1597, flags, 0, 12, 3, number))


def whole(number: int, begin: int, pid: int = 7) -> bytes:
    """The records of a job that was given to the driver 10 ns after it was queued, and took 100."""
    return (
        given(JobStep.QUEUED, begin, number, pid)
        + given(JobStep.RUN, begin + 10, number, 12)
        + done(begin + 110, number)
    )


def frame(*records: bytes) -> Frame:
    meta = formats_to_json(FORMATS)
    return Frame(FrameKind.GPU_JOBS, 0, len(meta), 0, 0, meta + b"".join(records))


def rows_of(*frames: Frame, first_ns: int = 1, at_once: int = 1 << 17) -> list[dict[str, Any]]:
    rows = GpuJobRows(at_once)
    for each in frames:
        rows.add(each)
    found: list[dict[str, Any]] = rows.take(first_ns).to_pylist()
    return found


ROW = {
    "time_ns": 1010, "end_ns": 1110, "queued_ns": 1000, "pid": 7,
    "queue": "ccs0", "device": "0000:03:00.0", "at_once": False,
}  # fmt: skip


def test_the_formats_of_old_and_new_kernels(tmp_path: Path) -> None:
    old = gpu_jobs.job_formats([tmp_path / "none", tracefs(tmp_path / "old", OLD)])
    assert [(each.id, each.key, each.second_key, each.queue, each.device) for each in old] == [
        (1502, 16, -1, 24, -1), (1501, 16, -1, 24, -1), (1500, 8, -1, -1, -1)
    ]  # fmt: skip
    assert gpu_jobs.job_formats([tracefs(tmp_path / "new", NEW)]) == FORMATS
    assert formats_from_json(formats_to_json(FORMATS)) == FORMATS
    # and without a driver with the scheduler, or where a tracepoint has changed, there are none
    assert gpu_jobs.job_formats([tmp_path / "none"]) == []
    changed = NEW | {"drm_sched_job_done": (1597, [("u64 what", 8, 8)])}
    assert gpu_jobs.job_formats([tracefs(tmp_path / "changed", changed)]) == []
    assert format_of(JobStep.RUN, "ID: 7\n\tfield:u64 other;\toffset:8;") is None


def test_a_job_is_put_together_from_the_records_of_several_cpus() -> None:
    ends, begins = frame(done(1110, 1)), frame(given(JobStep.QUEUED, 1000, 1, 7), given(JobStep.RUN, 1010, 1, 12))
    assert rows_of(ends, begins) == [ROW]


def test_a_job_that_the_scheduler_ends_itself_may_run_on() -> None:
    records = given(JobStep.QUEUED, 1000, 1, 7), given(JobStep.RUN, 1010, 1, 12), done(1110, 1, flags=0)
    assert rows_of(frame(*records)) == [ROW | {"at_once": True}]


def test_jobs_of_which_not_all_is_known() -> None:
    # given one that ran before the recording, one that was queued before, one that runs on, and one that never ran
    records = (
        done(50, 1),
        given(JobStep.RUN, 60, 2, 12), done(70, 2),
        given(JobStep.QUEUED, 80, 3, 8), given(JobStep.RUN, 90, 3, 12),
        given(JobStep.QUEUED, 100, 4, 9),
    )  # fmt: skip
    nobody = {"queued_ns": None, "pid": 0}
    assert rows_of(frame(*records), first_ns=20) == [
        ROW | nobody | {"time_ns": 20, "end_ns": 50, "queue": None, "device": None},
        ROW | nobody | {"time_ns": 60, "end_ns": 70},
        ROW | {"time_ns": 90, "end_ns": None, "queued_ns": 80, "pid": 8},
    ]


def test_old_kernels_name_jobs_by_an_address_that_is_used_again() -> None:
    records = whole(1, 1000) + whole(1, 2000, pid=8)
    assert [(row["queued_ns"], row["pid"], row["end_ns"]) for row in rows_of(frame(records))] == [
        (1000, 7, 1110), (2000, 8, 2110)
    ]  # fmt: skip


def test_rows_are_made_while_a_recording_is_read_and_jobs_that_run_are_kept() -> None:
    rows = GpuJobRows(events_at_once=30)
    rows.add(frame(*(whole(number, 1000 * number) for number in range(9)), given(JobStep.QUEUED, 1, 99, 7)))
    assert not rows.is_full
    rows.add(frame(whole(10, 10_000), given(JobStep.RUN, 5, 99, 12)))
    assert rows.is_full
    assert len(rows.take()) == 10
    assert not rows.is_full
    rows.add(frame(done(20, 99)))
    assert [row["time_ns"] for row in rows.take(0).to_pylist()] == [5]
    # and what is incomplete because records were lost does not become more and more
    for number in range(100, 300):
        rows.add(frame(given(JobStep.QUEUED, number, number, 7)))
        if rows.is_full:
            rows.take()
    assert sum(map(len, rows._events)) < 100


def test_records_that_were_lost_are_counted() -> None:
    rows = GpuJobRows()
    rows.add(frame(struct.pack("<IHHQQ", 2, 0, 24, 1, 41)))
    assert rows.lost == 41


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (b"\1" * 24, "are not records"),
        (struct.pack("<IHHIIQ", 9, 0, 24, 1, 1, 1), "no raw data"),
        (sample(1, 1, struct.pack("<HBBi", 1598, 0, 0, 1)), "shorter"),
        (sample(1, 1, struct.pack("<HBBi", 44, 0, 0, 1)), "unknown tracepoint"),
    ],
)
def test_other_bytes_are_refused(record: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(FORMATS, record)


def test_names_that_end_nowhere_are_cut() -> None:
    # given a text that begins behind the record, and one longer than it
    record = bytearray(given(JobStep.RUN, 1, 1, 12))
    struct.pack_into("<I", record, 36 + 8, 0xFFFF | 0xFFFF << 16)
    struct.pack_into("<I", record, 36 + 20, 48 | 0xFFFF << 16)
    events, _ = decode(FORMATS, bytes(record))
    assert events["queue"].tolist() == [b""]
    assert events["device"].tolist() == [b"ccs0"]


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"{}\n",
        b"[[1,2]]\n",
        b'[["a",0,0,0,0,0]]\n',
        b"[[1,9,0,0,0,0]]\n",
        b"[[1,1,99999,0,0,0]]\n",
        b"[[1,1,-1,0,0,0]]\n",
        b"7\n",
    ],
)
def test_damaged_formats_are_refused(meta: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        GpuJobRows().add(Frame(FrameKind.GPU_JOBS, 0, len(meta), 0, 0, meta))


class Journal:
    """Keeps losses and warnings."""

    def __init__(self) -> None:
        self.losses: list[tuple[str, str]] = []
        self.warnings: list[str] = []

    def loss(self, source: str, what: str, count: int | None, detail: str, begin: int, end: int) -> None:
        self.losses.append((source, detail))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_a_kernel_that_refuses_the_tracepoints_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(formats: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(source_of_jobs, "job_formats", lambda: FORMATS)
    monkeypatch.setattr(source_of_jobs, "JobBuffers", refused)
    source, journal = GpuJobs(), Journal()
    source.start(journal, None)  # type: ignore[arg-type]
    for step in (source.read, source.losses, source.finish, source.close):
        step()
    said = "the jobs on GPUs cannot be watched (perf_event_open: Permission denied)"
    assert journal.losses == [(SOURCE, said)]
    assert journal.warnings == [said]
    # and for GPUs without such a driver nobody asks
    unasked = GpuJobs(wanted=False)
    unasked.start(journal, None)  # type: ignore[arg-type]
    assert journal.warnings == [said]
