# SPDX-License-Identifier: Apache-2.0
"""The stand-in's hardware as a test uses it: build it, start it, give a recorder its environment, read its ledger.

    with Hardware(tmp_path / "gpu", device="bmg") as hardware:
        subprocess.run([sys.executable, "-m", "iaprof", "record", ...], env=os.environ | hardware.env())
    ledger = hardware.ledger()
    captured = sum(row.captured for row in ledger.rows)

More than one card, cards that come and go, and what goes wrong with them:

    hardware = Hardware(folder, cards=("bmg", "pvc", "lnl"), unplugged=(2,), faults=["busy@1.0", "no-eu-stall@2"])

- `cards[i]` says where card i sits (`address`, `node` card0.., `render_node` renderD128.., `pmu`, `pmu_type`). Launches
  go to the main GTs of all cards that are there in turn; `Runtime.launch(..., gt=g)` chooses one, counted over all
  cards. Ledger: `Overflow` has `card`, `gt` and `xecore`, `gts` has what was produced and lost by card and main GT.
- The device `max` is `pvc` under Intel's i915 from outside the Linux kernel: one stream for each tile, opened through
  an engine; records say their XeCore, and whether the hardware dropped some of it; a reset is only counted.
- `set_faults(...)`: no-device, not-xe, no-eu-stall, busy, eacces, slow-reader, old-driver. `name@1` is card 1's only,
  `busy@0.1` (and eacces, slow-reader) that of main GT 1 of card 0.
- `unplug(i)`: its files vanish, open streams and old nodes give ENODEV, records that were not read are unread, events
  of its PMU read as empty, its sensors give ENODEV. What it had to execute is gone with it. `plug(i)`: it comes (back)
  as a new device at the same place.
- `reset()` or `reset(i)`: streams give ENODEV until they are opened again.
- `freeze()` or `freeze(i)`: no records, no POLLIN; reads take what was visible, then EAGAIN. Opening or enabling a
  stream fails with ETIMEDOUT after 50 ms (the driver's wait for a forcewake), opening an event with EINVAL. Counters
  stand. `thaw()`: it executes what it had not, that much later.
- `flood(records, seconds)`; `overflow(times, period, records)`: `times` overflows of `records` dropped records each,
  one every `period` seconds or later: as soon as the reader has met the one before. Each costs 8192 records to fill the
  buffer. 1000 at 12 ms take some 14 s. They begin when a kernel is known (`Runtime.kernel`, a first launch).
- `wait()` returns when all launches, the flood and the overflows are over and their records visible. `Runtime.sync()`
  waits for the launches of its process only (of a process that launched nothing: for all, as `wait()`).

The PMU (type and encodings are in the tree; perf_event_open through libc's syscall): engine-active-ticks of the compute
engine grow while at least one launch executes on that main GT, at `reference_clock` (19.2 MHz, PVC 25 MHz), also
between two looks of the GPU process; engine-total-ticks always. So a launch of 0.4 s in a second makes 40 %. A flood is
work as long as it lasts, ordered overflows are none. Frequencies are added up at each read, as xe_pmu.c does: 400 MHz
idle; while executing, and 5 ms after, 2400 actual and 2850 requested. gt-c6-residency counts the idle milliseconds.
xe_pmu.c says ENOENT, not EINVAL, to a config that it does not know; EINVAL to sampling, cpu -1 and a pid.
freq0/act_freq and cur_freq say the same. hwmon (discrete cards): the energy of the card is 20 W, and 150 W more while a
main GT executes; of the package, 70 % of it; temperatures and the fan rise by 20 degrees and 620 RPM while executing
and wobble a little. A test that writes into one of those files below `folder / "sysfs"` shows what it wrote.

The GPU itself is gpu.c, a process of its own; the driver is xe.c, preloaded into the recorder. The runtime of the
profiled program (ze.c) is not here: a program finds the GPU by the environment variable STANDIN_DIR, which `env()` has,
too. A test that needs no real program speaks for one through `Runtime`.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from standin.sysfs import Card, add_card, make_tree, place_cards, remove_card

SOURCES = Path(__file__).resolve().parent
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread")
LONGEST_WAIT = 120.0  # seconds that a test waits for the GPU before it gives up

# enum in protocol.h
MSG_KERNEL, MSG_LAUNCH, _MSG_DRIVER, MSG_SYNC, MSG_FAULT = 1, 2, 3, 4, 5
FAULT_RESET, FAULT_FLOOD, FAULT_LEDGER, FAULT_UNPLUG, FAULT_PLUG, FAULT_FREEZE, FAULT_THAW, FAULT_OVERFLOW = range(1, 9)
ALL_CARDS = -1


@dataclass(frozen=True)
class Programs:
    """The compiled parts."""

    gpu: Path
    driver: Path


def build(folder: Path = SOURCES / "build") -> Programs:
    """Compile what is older than its sources into `folder`; tests that run at the same time do not meet half a file."""
    programs = Programs(folder / "standin-gpu", folder / "libstandin_xe.so")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _compile("gpu.c", programs.gpu, ("-lm",))
        _compile("xe.c", programs.driver, ("-fPIC", "-shared", "-fvisibility=hidden", "-ldl"))
    if os.geteuid() == 0:  # tests run through sudo must not lock out the user whose checkout it is
        owner = SOURCES.stat()
        for path in (folder, folder / ".lock", programs.gpu, programs.driver):
            if path.stat().st_uid != owner.st_uid:
                os.chown(path, owner.st_uid, owner.st_gid)
    return programs


def _compile(name: str, output: Path, extra: Sequence[str]) -> None:
    source = SOURCES / name
    newest = max(path.stat().st_mtime_ns for path in (source, SOURCES / "protocol.h"))
    if output.exists() and output.stat().st_mtime_ns > newest:
        return
    fresh = output.with_name(output.name + ".new")
    subprocess.run([os.environ.get("CC", "cc"), *FLAGS, "-o", str(fresh), str(source), *extra], check=True)
    fresh.rename(output)


@dataclass(frozen=True)
class LedgerRow:
    """Samples (sums of the records' counters) of one reason at one instruction, as launched from one stack."""

    pid: int
    stack: str  # outermost function first, joined with ";"
    kernel: str
    address: int  # of the kernel's first instruction
    offset: int  # bytes from there
    reason: str
    produced: int
    dropped: int  # of produced: a full buffer had no room
    unread: int  # of produced: in a buffer when its stream was disabled, closed or reset

    @property
    def captured(self) -> int:
        """What a reader got."""
        return self.produced - self.dropped - self.unread


@dataclass(frozen=True)
class Overflow:
    """A buffer that was full: from the first dropped record to the last before the driver cleared the state."""

    gt: int  # which main GT of the card, counted from 0
    xecore: int
    first_ns: int  # CLOCK_MONOTONIC
    last_ns: int
    records: int
    card: int = 0


@dataclass(frozen=True)
class GtCount:
    """Records of one main GT."""

    card: int
    gt: int  # which main GT of the card, counted from 0
    produced: int
    dropped: int
    unread: int

    @property
    def captured(self) -> int:
        """What a reader got."""
        return self.produced - self.dropped - self.unread


@dataclass(frozen=True)
class LaunchCount:
    """How often a kernel was launched from one stack."""

    pid: int
    stack: str
    kernel: str
    address: int
    count: int


@dataclass(frozen=True)
class Site:
    """A kernel as launched from one stack; records of an `in_order` GPU say its number."""

    pid: int
    stack: str
    kernel: str
    address: int
    size: int  # bytes, padding included


@dataclass(frozen=True)
class Execution:
    """A piece of a launch's execution, in which no other launch executed. Times are CLOCK_MONOTONIC ns."""

    launch: int  # its number
    site: int  # index of Ledger.sites
    launched_ns: int
    begin_ns: int
    end_ns: int


@dataclass
class Ledger:
    """All that the GPU produced. A kernel placed twice at one address can have two rows of one key: add them up."""

    rows: list[LedgerRow] = field(default_factory=list)
    overflows: list[Overflow] = field(default_factory=list)
    launches: list[LaunchCount] = field(default_factory=list)
    gts: list[GtCount] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)  # of an `in_order` GPU, as are
    executions: list[Execution] = field(default_factory=list)  # sorted by time on each main GT
    records_produced: int = 0
    records_dropped: int = 0
    records_unread: int = 0

    @property
    def records_captured(self) -> int:
        """Records that a reader got."""
        return self.records_produced - self.records_dropped - self.records_unread

    @property
    def samples_captured(self) -> int:
        """The sum of all counters that a reader got."""
        return sum(row.captured for row in self.rows)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse the file that gpu.c wrote."""
        ledger = cls()
        header, *lines = path.read_text().splitlines()
        if header.split("\t") != list(LedgerRow.__dataclass_fields__):
            raise ValueError(f"{path} is not a ledger: {header!r}")
        for line in lines:
            match line.split("\t"):
                case ["#records", what, count]:
                    setattr(ledger, f"records_{what}", int(count))
                case ["#overflow", *numbers]:
                    card, gt, xecore, first, last, records = map(int, numbers)
                    ledger.overflows.append(Overflow(gt, xecore, first, last, records, card))
                case ["#gt", *numbers]:
                    ledger.gts.append(GtCount(*map(int, numbers)))
                case ["#launch", pid, stack, kernel, address, count]:
                    ledger.launches.append(LaunchCount(int(pid), stack, kernel, int(address, 16), int(count)))
                case ["#site", _, pid, stack, kernel, address, size]:
                    ledger.sites.append(Site(int(pid), stack, kernel, int(address, 16), int(size)))
                case ["#execution", *numbers]:
                    ledger.executions.append(Execution(*map(int, numbers)))
                case [pid, stack, kernel, address, offset, reason, produced, dropped, unread]:
                    row = LedgerRow(int(pid), stack, kernel, int(address, 16), int(offset, 16), reason,
                                    int(produced), int(dropped), int(unread))  # fmt: skip
                    ledger.rows.append(row)
                case _:
                    raise ValueError(f"{path} has a line that is none of a ledger's: {line!r}")
        return ledger


class Hardware:
    """The cards of a machine with their GPU process, in a folder of its own (STANDIN_DIR)."""

    def __init__(
        self,
        folder: Path,
        device: str = "bmg",
        *,
        xecores: int | None = None,
        gts: int | None = None,
        rate: float | None = None,
        zipf: float | None = None,
        saturated: float | None = None,
        seed: int | None = None,
        layout: str | None = None,
        in_order: bool = False,
        flood: tuple[int, float] | None = None,
        faults: Iterable[str] = (),
        cards: Sequence[str] = (),
        unplugged: Collection[int] = (),
        programs: Programs | None = None,
    ) -> None:
        """Make the tree and start the GPU.

        `cards` are devices, in the order of their nodes; without any there is one, `device`. `unplugged` are not there
        until they are plugged in. `xecores` and `gts` are those of each card, `rate` is records per second of execution
        and XeCore, `in_order`: a process's launches execute one after the other, and processes take turns (without,
        all execute at once, from their time on), `flood` (records, seconds), `faults` as xe.c names them.
        """
        self.folder = folder.resolve()
        self.programs = programs or build()
        shutil.rmtree(self.folder / "sysfs", ignore_errors=True)
        (self.folder / "ledger.tsv").unlink(missing_ok=True)
        devices = cards or (device,)
        self.cards: list[Card] = place_cards(devices, gts)
        self.card: Card = self.cards[0]
        self._generations = [0 if card.index in unplugged else 1 for card in self.cards]
        self._there = [card.index not in unplugged for card in self.cards]
        make_tree(self.folder / "sysfs")
        for card in self.cards:
            if self._there[card.index]:
                add_card(self.folder / "sysfs", card, 1)
        self.set_faults(*faults)
        options = {
            "--xecores": xecores,
            "--gts": gts,
            "--rate": rate,
            "--zipf": zipf,
            "--saturated": saturated,
            "--seed": seed,
            "--layout": layout,
        }
        command = [str(self.programs.gpu), str(self.folder), "--with-parent"]
        for card in self.cards:
            command += ["--device", card.model]
        for index in unplugged:
            command += ["--unplugged", str(index)]
        for name, value in options.items():
            command += [] if value is None else [name, str(value)]
        command += ["--in-order"] if in_order else []
        command += [] if flood is None else ["--flood", str(flood[0]), str(flood[1])]
        self._killed = False
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if self.process.stdout is None or self.process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the GPU did not start: {' '.join(command)}")

    def __enter__(self) -> Self:
        """Nothing to do: it runs."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the GPU, so that the ledger is written."""
        self.stop()

    def env(self) -> dict[str, str]:
        """What a recorder needs in its environment, and (of these) STANDIN_DIR what a profiled program needs."""
        return {"LD_PRELOAD": str(self.programs.driver), "STANDIN_DIR": str(self.folder)}

    def set_faults(self, *faults: str) -> None:
        """From now on the driver has these faults and no others."""
        (self.folder / "faults").write_text(",".join(faults))

    def reset(self, card: int = ALL_CARDS) -> None:
        """A GPU reset: every open stream dies."""
        self._fault(FAULT_RESET, card=card)

    def unplug(self, card: int) -> None:
        """The card is gone, with its files and what it had to execute."""
        if not self._there[card]:
            raise ValueError(f"card {card} is not there")
        self._there[card] = False
        self._fault(FAULT_UNPLUG, card=card)
        remove_card(self.folder / "sysfs", self.cards[card])

    def plug(self, card: int) -> None:
        """The card is there (again): a new device at the same place."""
        if self._there[card]:
            raise ValueError(f"card {card} is there already")
        self._there[card] = True
        self._generations[card] += 1
        self._fault(FAULT_PLUG, self._generations[card], card=card)
        add_card(self.folder / "sysfs", self.cards[card], self._generations[card])

    def freeze(self, card: int = ALL_CARDS) -> None:
        """The card stands still: it makes no records and does not answer."""
        self._fault(FAULT_FREEZE, card=card)

    def thaw(self, card: int = ALL_CARDS) -> None:
        """It goes on where it stood."""
        self._fault(FAULT_THAW, card=card)

    def overflow(self, times: int, period: float, records: int = 100) -> None:
        """Fill a buffer and drop `records` more, `times` times, one every `period` seconds once the last was met."""
        self._fault(FAULT_OVERFLOW, times, int(period * 1e9), drops=records)

    def flood(self, records: int, seconds: float) -> None:
        """Make that many records of the first kernel, evenly over that time, as soon as a stream is enabled."""
        self._fault(FAULT_FLOOD, records, int(seconds * 1e9))

    def kill(self) -> None:
        """The GPU is gone at once, as a card that falls off the bus; it leaves no ledger."""
        self.process.kill()
        self._killed = True

    def stop(self) -> None:
        """End the GPU process. The ledger is complete after this."""
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(LONGEST_WAIT)
        if self.process.stdout is not None:
            self.process.stdout.close()
        if code != 0 and not self._killed:
            raise RuntimeError(f"the GPU ended with {code}")

    def wait(self) -> None:
        """Wait until all launches, floods and overflows are over and their records visible to a reader."""
        with _connect(self.folder) as gpu:
            gpu.send(struct.pack("=II", MSG_SYNC, 1))
            gpu.recv(64)

    def ledger(self) -> Ledger:
        """What was produced: up to now, or in all if it was stopped."""
        if self.process.poll() is None:
            self._fault(FAULT_LEDGER)
        return Ledger.read(self.folder / "ledger.tsv")

    def runtime(self) -> "Runtime":
        """A voice for a profiled program that is not there."""
        return Runtime(self.folder)

    def _fault(
        self, code: int, records: int = 0, duration_ns: int = 0, *, card: int = ALL_CARDS, drops: int = 0
    ) -> None:
        with _connect(self.folder) as gpu:
            gpu.send(struct.pack("=IIQQiI", MSG_FAULT, code, records, duration_ns, card, drops))
            _, error = struct.unpack("=II", gpu.recv(64))
        if error:
            raise OSError(error, os.strerror(error))


class Runtime:
    """Says to the GPU what the runtime in a profiled program says: kernels, launches, and waits for them."""

    def __init__(self, folder: Path) -> None:
        """Connect to the GPU in `folder`."""
        self._gpu = _connect(folder)

    def __enter__(self) -> Self:
        """Nothing to do: it is connected."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect. What was launched still executes."""
        self._gpu.close()

    def kernel(self, name: str, address: int, offsets: Sequence[int], *, pid: int | None = None) -> None:
        """A kernel is placed at `address`; instructions start at `offsets` from there."""
        size = offsets[-1] + 16
        head = struct.pack("=IIQQ128sI", MSG_KERNEL, pid or os.getpid(), address, size, name.encode(), len(offsets))
        self._gpu.send(head + struct.pack(f"={len(offsets)}I", *offsets))

    def launch(
        self,
        address: int,
        duration: float,
        stack: str = "main",
        *,
        delay: float = 0,
        pid: int | None = None,
        gt: int | None = None,
    ) -> None:
        """Launch the kernel at `address`; it executes for `duration` seconds, `delay` seconds from now.

        `gt` is on which main GT, counted over all cards; without it they have their turns.
        """
        pid = pid or os.getpid()
        times = (int(delay * 1e9), int(duration * 1e9))
        self._gpu.send(
            struct.pack(
                "=IIIIQQQ512s", MSG_LAUNCH, pid, pid, 0 if gt is None else 1 + gt, address, *times, stack.encode()
            )
        )

    def sync(self) -> None:
        """Wait until all that was launched has executed and its records are visible to a reader."""
        self._gpu.send(struct.pack("=I", MSG_SYNC))
        self._gpu.recv(64)


def _connect(folder: Path) -> socket.socket:
    """Connect through the folder's descriptor: its path may be longer than a socket's address can be."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    gpu = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gpu.settimeout(LONGEST_WAIT)
    try:
        gpu.connect(f"/proc/self/fd/{directory}/gpu.sock")
    except OSError:
        gpu.close()
        raise
    finally:
        os.close(directory)
    return gpu
