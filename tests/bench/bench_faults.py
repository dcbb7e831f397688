"""What goes wrong, and whether it is accounted for: what was captured and what was dropped is what was produced.

Each fault happens to a recording of its own, on the stand-in. Records: produced = captured + dropped + unread, and
every drop lies inside a span that the capture reports. Launches: the capture, what it says was lost, and the programs'
own counts agree.

    sudo .venv/bin/python tests/bench/bench_faults.py [--only overflow,reset,...] [--device max]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import IAPROF, Recorder, machine, needs_root, print_table
from iaprof.formats.capture.reader import CaptureReader
from standin import runtime
from standin.hardware import Hardware, Ledger

OVERFLOWS, OVERFLOW_PERIOD_S = 1000, 0.015
RESETS = 20
PROCESSES = 10_000
SMALL_DISK = "48m"


@dataclass
class Outcome:
    """What a recording has to say for itself."""

    produced: int
    captured: int
    dropped: int
    unread: int
    outside: int  # drops in no reported span
    losses: str
    fine: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--device", default="bmg", help="of the stand-in; max is under Intel's i915, others under xe")
    arguments = parser.parse_args()
    needs_root("recording")
    print(machine())
    rows = []
    failed = []
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory(prefix="iaprof-bench-", dir="/var/tmp") as folder:
            started = time.monotonic()
            done = FAULTS[name](Path(folder), arguments.device)
            numbers = [done.produced, done.captured, done.dropped, done.unread, done.outside]
            seconds = f"{time.monotonic() - started:.0f} s"
            rows.append([name, *(f"{number:,}" for number in numbers), "yes" if done.fine else "NO", seconds])
            print(f"  {name}: {done.losses or 'lost: nothing'}", flush=True)
            failed += [] if done.fine else [name]
    heads = ["fault", "produced", "captured", "dropped", "unread", "outside spans", "adds up", "took"]
    print_table("Stall records, by fault", heads, rows)
    if failed:
        sys.exit(f"not accounted for: {', '.join(failed)}")


def outcome(capture: Path, ledger: Ledger, more: bool = True) -> Outcome:
    """Compares a capture with the ledger.

    Args:
        capture: of the whole recording.
        ledger: of the same.
        more: what else had to be so.
    """
    reader = CaptureReader(capture)
    header = reader.header
    captured = header["totals"].get("stalls", 0)
    spans = [
        (row["begin_ns"], row["time_ns"])
        for row in reader.table("loss").to_pylist()
        if row["what"] in ("overflow", "reset", "gap", "stream")
    ]
    outside = sum(
        over.records
        for over in ledger.overflows
        if not any(begin <= over.first_ns and over.last_ns <= end for begin, end in spans)
    )
    unwritten = sum(loss["count"] or 0 for loss in header["losses"] if loss["what"] == "unwritten")
    missing = ledger.records_produced - ledger.records_dropped - ledger.records_unread - captured - unwritten
    losses = "; ".join(
        f"{loss['source']} {loss['what']}: {loss['events']} times"
        + (f", {loss['count']:,}" if loss["count"] is not None else "")
        for loss in header["losses"]
    )
    fine = more and outside == 0 and missing == 0
    return Outcome(
        ledger.records_produced, captured, ledger.records_dropped, ledger.records_unread, outside, losses, fine
    )


@contextlib.contextmanager
def launching(hardware: Hardware, folder: Path, *options: str | float) -> Iterator[list[runtime.Summary]]:
    """A program that launches meanwhile; what it counted is there afterwards."""
    words = runtime.command([runtime.debug_elf("bmg", "matmul")], *options)
    environment = os.environ | {"STANDIN_DIR": str(hardware.folder), "STANDIN_DUMP_DIR": str(folder)}
    program = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    summaries: list[runtime.Summary] = []
    try:
        yield summaries
    finally:
        out, _ = program.communicate()
        summaries += runtime.read_summaries(out)


def launches_agree(capture: Path, summaries: list[runtime.Summary]) -> bool:
    """Whether the launches in the capture, with those that it says were lost, are those that the programs counted."""
    reader = CaptureReader(capture)
    pids = {summary.pid for summary in summaries}
    mine = sum(pid in pids for pid in reader.table("launch", ("pid",))["pid"].to_pylist())
    lost = sum(
        loss["count"] for loss in reader.header["losses"] if loss["source"] == "launches" and loss["what"] == "lost"
    )
    told = sum(summary.launches for summary in summaries)
    if mine + lost != told:
        print(f"  launches: {mine:,} in the capture, {lost:,} lost, {told:,} by the programs", flush=True)
    return bool(mine + lost == told)


def recorded(folder: Path, device: str, during: Callable[[Hardware, Recorder], None], **hardware: Any) -> Outcome:
    """A recording while `during` happens, and 500 launches a second."""
    capture = folder / "c.parquet"
    with Hardware(folder / "gpu", device, **hardware) as gpu, Recorder(gpu, capture) as recorder:
        with launching(gpu, folder, "--seconds", 1, "--rate", 500, "--recompile-ms", 200) as summaries:
            during(gpu, recorder)
        recorder.stop()
        gpu.stop()
    return outcome(capture, gpu.ledger(), launches_agree(capture, summaries))


def overflow(folder: Path, device: str) -> Outcome:
    def during(gpu: Hardware, _: Recorder) -> None:
        gpu.overflow(OVERFLOWS, OVERFLOW_PERIOD_S)
        with gpu.runtime() as all_done:
            all_done.sync()

    done = recorded(folder, device, during)
    done.fine &= done.dropped > 0
    return done


def reset(folder: Path, device: str) -> Outcome:
    def during(gpu: Hardware, _: Recorder) -> None:
        for _number in range(RESETS):
            time.sleep(0.25)
            gpu.reset()
        time.sleep(0.5)

    return recorded(folder, device, during)


def silence(folder: Path, device: str) -> Outcome:
    def during(gpu: Hardware, _: Recorder) -> None:
        gpu.freeze()
        time.sleep(1)
        gpu.reset()
        time.sleep(1)
        gpu.thaw()
        time.sleep(0.5)

    return recorded(folder, device, during)


def flood(folder: Path, device: str) -> Outcome:
    def during(gpu: Hardware, _: Recorder) -> None:
        gpu.flood(20_000_000, 1.5)  # more than this machine reads
        with gpu.runtime() as all_done:
            all_done.sync()

    return recorded(folder, device, during, xecores=4)


def clock(folder: Path, device: str) -> Outcome:
    """The wall clock is set an hour ahead and back; it is not a clock of a recording's."""

    def during(_: Hardware, __: Recorder) -> None:
        for hour in (3600, -3600):
            time.sleep(0.3)
            time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME) + hour)
        time.sleep(0.3)

    return recorded(folder, device, during)


def forks(folder: Path, device: str) -> Outcome:
    """Ten thousand short processes: each one's beginning and end is in the capture."""

    def during(_: Hardware, __: Recorder) -> None:
        subprocess.run(["sh", "-c", f"i=0; while [ $i -lt {PROCESSES} ]; do (:); i=$((i+1)); done"], check=True)

    done = recorded(folder, device, during)
    events = CaptureReader(folder / "c.parquet").table("process", ("event",))["event"].to_pylist()
    done.fine &= min(events.count("fork"), events.count("exit")) >= PROCESSES and "side-band" not in done.losses
    done.losses += f"; {events.count('fork'):,} forks, {events.count('exit'):,} exits"
    return done


def ring(folder: Path, device: str) -> Outcome:
    """More launches at once than the ring buffer holds while the recorder is stopped: counted to the last one."""
    capture = folder / "c.parquet"
    with Hardware(folder / "gpu", device) as gpu, Recorder(gpu, capture) as recorder:
        # One program has the library mapped, so that it is probed before the other starts.
        with launching(gpu, folder, "--seconds", 3, "--rate", 10) as few:
            time.sleep(0.5)
            recorder.process.send_signal(signal.SIGSTOP)
            with launching(gpu, folder, "--launches", 200_000, "--rate", 0, "--no-gpu") as many:
                pass
            recorder.process.send_signal(signal.SIGCONT)
        recorder.stop()
        gpu.stop()
    done = outcome(capture, gpu.ledger(), launches_agree(capture, few + many))
    done.fine &= "launches lost" in done.losses
    return done


def disk(folder: Path, device: str) -> Outcome:
    """The disk fills: what was recorded before is recovered to another one."""
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "none", str(small)], check=True)
    try:
        with Hardware(folder / "gpu", device) as gpu, gpu.runtime() as program:
            program.kernel("flooded", 0x10_0000, [16 * number for number in range(5000)])
            words = [*IAPROF, "record", "-o", str(small / "c"), "-d", "20"]
            recorder = subprocess.Popen(words, env=os.environ | gpu.env(), stderr=subprocess.PIPE, text=True)
            gpu.flood(10_000_000, 4)
            _, errors = recorder.communicate(timeout=60)
            gpu.stop()
        told = "No space left on device" in errors and recorder.returncode == 1
        subprocess.run(
            [*IAPROF, "recover", str(small / "c.spool"), "-o", str(folder / "c")], check=True, capture_output=True
        )
        return outcome(folder / "c", gpu.ledger(), told)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


FAULTS: dict[str, Callable[[Path, str], Outcome]] = {
    "overflow": overflow,
    "reset": reset,
    "silence": silence,
    "flood": flood,
    "ring": ring,
    "forks": forks,
    "clock": clock,
    "disk": disk,
}


if __name__ == "__main__":
    main()
