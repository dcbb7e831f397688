# SPDX-License-Identifier: Apache-2.0
"""The stand-in for the xe driver is as strict as the kernel, and its ledger is exact.

Each test runs a small recorder (CLIENT and a few lines more) as a process of its own under the preload, because that is
where the stand-in lives. What the recorder prints as JSON is what the test looks at.
"""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from limits import Within
from standin.hardware import Hardware, Ledger, Programs, build
from waiting import LONGEST_WAIT_S

TESTS = Path(__file__).resolve().parents[2]
KERNEL = 0xFFFF8000FFBE0000  # as BMG reports addresses: sign-extended
OFFSETS = [0, 16, 32, 40, 48, 64, 80, 96, 104, 112, 128, 144]
REASONS = ("active", "control", "pipestall", "send", "dist_acc", "sbid", "sync", "inst_fetch", "other", "tdr")
# spec/eu-stall.md, in the order of REASONS
BITS = {
    "pvc": (29, 45, 53, 61, 69, 77, 85, 93, 37, None),
    "xe2": (101, 45, 53, 61, 69, 77, 85, 93, 37, 29),
    "xe3p": (133, 77, 85, 93, 101, 109, 117, 125, 69, 61),
}

CLIENT = """
import array, ctypes, errno, fcntl, json, os, select, stat, struct, subprocess, sys, threading, time
from pathlib import Path
from standin.hardware import Runtime, FAULT_FLOOD, FAULT_RESET, MSG_FAULT

VERSION, QUERY, OBSERVATION, ENABLE, DISABLE = 0xc0406400, 0xc0286440, 0x4020644b, 0x6900, 0x6901
GT_ID, SAMPLE_RATE, WAIT_NUM_REPORTS = 1, 2, 3
GPU = Runtime(Path(os.environ["STANDIN_DIR"]))
KERNEL, OFFSETS = 0xFFFF8000FFBE0000, [0, 16, 32, 40, 48, 64, 80, 96, 104, 112, 128, 144]

def address(buffer):
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))

def query(fd, number, size=None, extensions=0, reserved=0):
    head = bytearray(struct.pack("=QIIQQQ", extensions, number, 0, 0, reserved, 0))
    fcntl.ioctl(fd, QUERY, head)
    wanted = struct.unpack_from("=I", head, 12)[0]
    if size is not None:
        wanted = size
    data = bytearray(max(wanted, 1))
    head = bytearray(struct.pack("=QIIQQQ", 0, number, wanted, address(data), 0, 0))
    fcntl.ioctl(fd, QUERY, head)
    return bytes(data)

def open_stream(fd, *properties, name=0, pad=0, pad2=0, extensions=0, kind=1, op=0):
    chain, following = [], 0
    for number, value in reversed(properties):
        link = bytearray(struct.pack("=QIIIIQQQ", following, name, pad, number, pad2, value, 0, 0))
        chain.append(link)
        following = address(link)
    return fcntl.ioctl(fd, OBSERVATION, bytearray(struct.pack("=QQQQ", extensions, kind, op, following)))

def device(node="/dev/dri/renderD128"):
    return os.open(node, os.O_RDWR | os.O_CLOEXEC)

I915 = os.path.exists("/sys/class/drm/card0/prelim_uapi_version")
BUFFER, STEPS, PERIOD, CLASS, INSTANCE, REPORTS = range(1001, 1007)
CLOEXEC, NONBLOCK, DISABLED, EU_STALL = 1, 2, 4, 0x10000

def perf_open(fd, *properties, flags=DISABLED | EU_STALL, count=None):
    array = bytearray(struct.pack(f"={2 * len(properties)}Q", *(number for pair in properties for number in pair)))
    count = len(properties) if count is None else count
    return fcntl.ioctl(fd, 0x40106476, bytearray(struct.pack("=IIQ", flags, count, address(array) if array else 0)))

def started(wait=1, nonblocking=True, gt=0):
    if I915:
        stream = perf_open(device(), (BUFFER, 512 << 10), (CLASS, 4), (INSTANCE, 4 * gt + 3), (REPORTS, wait))
    else:
        stream = open_stream(device(), (GT_ID, gt), (WAIT_NUM_REPORTS, wait))
    if nonblocking:
        os.set_blocking(stream, False)
    fcntl.ioctl(stream, ENABLE)
    return stream

def refusal(function, *args, **keywords):
    try:
        function(*args, **keywords)
    except OSError as error:
        return errno.errorcode[error.errno]
    return ""

def readable(stream, seconds=0.0):
    return bool(select.select([stream], [], [], seconds)[0])

def drain(stream, size=16 << 20):
    "All that is visible now, and how often EIO came; under i915, how often a XeCore's records said that some are lost."
    data, lost = [], 0
    while True:
        try:
            data.append(os.read(stream, size))
            lost += I915 and len({data[-1][at : at + 2] for at in range(48, len(data[-1]), 64) if data[-1][at + 3]})
        except BlockingIOError:
            return b"".join(data), lost
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            lost += 1

def fault(code, records=0, ns=0):
    GPU._gpu.send(struct.pack("=IIQQ", MSG_FAULT, code, records, ns))
    GPU._gpu.recv(64)

def say(**values):
    print(json.dumps(values))

LIBC = ctypes.CDLL(None, use_errno=True)
ACTIVE, TOTAL, ACTUAL, REQUESTED, C6 = 2, 3, 4, 5, 1
GROUP, TOTAL_TIMES, ID = 8, 3, 4

def engine(event, kind=4, gt=0, instance=0):
    return event | instance << 12 | kind << 20 | gt << 60

def counter(config, leader=-1, read_format=GROUP, cpu=0, pid=-1, period=0, disabled=0, card=0):
    attr = struct.pack("=IIQQQQQ", 1_000_061 + card, 128, config, period, 0, read_format, disabled).ljust(128, bytes(1))
    fd = LIBC.syscall(298, ctypes.c_char_p(attr), ctypes.c_int(pid), ctypes.c_int(cpu), ctypes.c_int(leader),
                      ctypes.c_ulong(8))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "perf_event_open")
    return fd

def counts(fd):
    return struct.unpack(f"={len(data) // 8}Q", data) if (data := os.read(fd, 4096)) else ()
"""

C_READER = r"""
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>
static uint64_t property[2][6];
int main(void) {
    uint64_t records = 0, eio = 0, reads = 0;
    property[0][0] = (uint64_t)&property[1], property[0][2] = 1, property[0][3] = 0;
    property[1][2] = 3, property[1][3] = 1000;
    uint64_t observation[4] = {0, 1, 0, (uint64_t)&property[0]};
    int card = open("/dev/dri/renderD128", O_RDWR), fd = ioctl(card, 0x4020644b, observation);
    char *buffer = malloc(16 << 20);
    if (fd < 0 || fcntl(fd, F_SETFL, O_NONBLOCK) || ioctl(fd, 0x6900, 0)) return perror("stream"), 1;
    puts("enabled"), fflush(stdout);
    /* Its input ends when all records have been made: the last ones may be fewer than poll waits for. */
    struct pollfd p[] = {{.fd = fd, .events = POLLIN}, {.fd = 0, .events = POLLIN}};
    do {
        poll(p, 2, -1);
        for (;;) {
            ssize_t size = read(fd, buffer, 16 << 20);
            if (size < 0 && errno == EIO) { eio++; continue; }
            if (size < 0) break;
            records += size / 64, reads++;
        }
    } while (!p[1].revents);
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    printf("{\"records\": %llu, \"eio\": %llu, \"reads\": %llu, \"cpu\": %.3f}\n", (unsigned long long)records,
           (unsigned long long)eio, (unsigned long long)reads, t.tv_sec + t.tv_nsec / 1e9);
    return 0;
}
"""


def c_reader(folder: Path) -> Path:
    """Build C_READER, which keeps up with more records than CLIENT does."""
    source, reader = folder / "reader.c", folder / "reader"
    source.write_text(C_READER)
    subprocess.run(["cc", "-O2", "-Wall", "-o", str(reader), str(source)], check=True)
    return reader


def drained(reader: Path, hardware: Hardware) -> dict[str, Any]:
    """Read records in C until the flood and the overflows are over; what the reader said."""
    with subprocess.Popen(
        reader, env=os.environ | hardware.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "enabled\n"
        hardware.wait()
        output, _ = process.communicate(timeout=LONGEST_WAIT_S)
    said: dict[str, Any] = json.loads(output)
    return said


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return build(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def hardware(tmp_path: Path, programs: Programs) -> Iterator[Hardware]:
    with Hardware(tmp_path / "gpu", programs=programs) as made:
        yield made


def client(
    hardware: Hardware, body: str, environment: Mapping[str, str] | None = None, **orders: Callable[[], None]
) -> dict[str, Any]:
    """Run CLIENT and `body` under the preload; what it said. A line before that is an order, whose end it waits for."""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": str(TESTS), **hardware.env(), **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        impatience = threading.Timer(LONGEST_WAIT_S, process.kill)
        impatience.start()
        output = process.stdout.readline()
        while output.strip() in orders:
            orders[output.strip()]()
            process.stdin.write("\n")
            process.stdin.flush()
            output = process.stdout.readline()
        process.wait()
        impatience.cancel()
    assert process.returncode == 0
    said = json.loads(output)
    assert isinstance(said, dict)
    return said


def samples(records: bytes, layout: str) -> Counter[tuple[int, str]]:
    """The sum of the counters by (ip, reason)."""
    sums: Counter[tuple[int, str]] = Counter()
    ip_bits = 61 if layout == "xe3p" else 29
    for at in range(0, len(records), 64):
        value = int.from_bytes(records[at : at + 64], "little")
        for reason, bit in zip(REASONS, BITS[layout], strict=True):
            if bit is not None and (count := value >> bit & 0xFF):
                sums[value & (1 << ip_bits) - 1, reason] += count
    return sums


def ledger_samples(ledger: Ledger, layout: str) -> Counter[tuple[int, str]]:
    sums: Counter[tuple[int, str]] = Counter()
    for row in ledger.rows:
        if row.captured:
            sums[row.address + row.offset >> 3 & (1 << (61 if layout == "xe3p" else 29)) - 1, row.reason] += (
                row.captured
            )
    return sums


# ---- what the machine looks like ----


def test_the_tree_is_shown_at_its_real_places(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        import glob
        nodes = [entry for entry in os.scandir("/dev/dri") if not entry.is_dir()]
        kinds = {entry.name: stat.S_ISCHR(entry.stat().st_mode) and not entry.is_file() for entry in nodes}
        numbers = os.stat("/dev/dri/renderD128").st_rdev, os.fstat(device()).st_rdev, os.stat("/dev/dri/card0").st_rdev
        pmu = Path("/sys/bus/event_source/devices/xe_0000_03_00.0")
        say(kinds=kinds, numbers=numbers, cards=sorted(glob.glob("/sys/class/drm/card?")),
            device=os.path.realpath("/sys/class/drm/card0/device"), link=os.readlink("/sys/class/drm/card0"),
            vendor=Path("/sys/class/drm/card0/device/vendor").read_text(), pmus=os.listdir(pmu.parent),
            events=sorted(os.listdir(pmu / "events")), active=(pmu / "events/engine-active-ticks").read_text(),
            software=Path("/sys/bus/event_source/devices/software/type").read_text(),
            hwmon=glob.glob("/sys/class/drm/card0/device/hwmon/hwmon*/energy1_input"),
            there=os.access("/dev/dri/renderD128", os.R_OK), by_path=os.path.realpath(
                "/dev/dri/by-path/pci-0000:03:00.0-render"), other=os.path.exists("/dev/dri/card1"))
        """,
    )
    assert said["kinds"] == {"card0": True, "renderD128": True}
    assert said["numbers"] == [os.makedev(226, 128), os.makedev(226, 128), os.makedev(226, 0)]
    assert said["cards"] == ["/sys/class/drm/card0"]
    assert said["device"] == "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:03:00.0"
    assert said["link"].startswith("../../devices/pci0000:00/")
    assert said["vendor"] == "0x8086\n"
    assert {"xe_0000_03_00.0", "software"} <= set(said["pmus"])
    assert {"engine-active-ticks", "engine-total-ticks", "gt-actual-frequency", "gt-c6-residency"} <= set(
        said["events"]
    )
    assert said["active"] == "event=0x02\n"
    assert said["software"] == "1\n"
    assert len(said["hwmon"]) == 1
    assert said["there"]
    assert said["by_path"] == "/dev/dri/renderD128"
    assert not said["other"]


def test_the_preload_does_not_reach_a_child(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        child = "import os, json; print(json.dumps([os.environ.get('LD_PRELOAD'), " \\
                "'standin' in open('/proc/self/maps').read(), 'STANDIN_DIR' in os.environ]))"
        say(mine="LD_PRELOAD" in os.environ, child=json.loads(subprocess.check_output([sys.executable, "-c", child])))
        """,
    )
    assert said["mine"] is False
    preload, mapped, directory = said["child"]
    assert preload is None
    assert not mapped
    assert directory  # the runtime in the child finds the GPU by it


def test_another_preload_stays(hardware: Hardware) -> None:
    said = client(hardware, "say(preload=os.environ['LD_PRELOAD'])",
                  {"LD_PRELOAD": f"libutil.so.1:{hardware.programs.driver}"})  # fmt: skip
    assert said["preload"] == "libutil.so.1"


# ---- queries ----


def test_the_version_is_given_in_two_calls(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        fd = device()
        empty = bytearray(64)
        fcntl.ioctl(fd, VERSION, empty)
        name = bytearray(b"........")
        full = bytearray(struct.pack("=iiiiQQQQQQ", 0, 0, 0, 0, 2, address(name), 0, 0, 0, 0))
        fcntl.ioctl(fd, VERSION, full)
        short = bytearray(b"........")
        fcntl.ioctl(fd, VERSION, bytearray(struct.pack("=iiiiQQQQQQ", 0, 0, 0, 0, 1, address(short), 0, 0, 0, 0)))
        say(size=struct.unpack_from("=Q", empty, 16)[0], name=name.decode(), short=short.decode(),
            bad=refusal(fcntl.ioctl, fd, 0xc0406401, bytearray(64)), alien=refusal(fcntl.ioctl, fd, 0x6900))
        """,
    )
    assert said == {"size": 2, "name": "xe......", "short": "x.......", "bad": "EINVAL", "alien": "ENOTTY"}


def test_queries_tell_of_the_device(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        fd = device("/dev/dri/card0")
        config, gts, stall = query(fd, 2), query(fd, 3), query(fd, 10)
        cycles = bytearray(struct.pack("=HHHHiIQQQ", 4, 0, 0, 0, time.CLOCK_MONOTONIC, 0, 0, 0, 0))
        before = time.monotonic_ns()
        fcntl.ioctl(fd, QUERY, bytearray(struct.pack("=QIIQQQ", 0, 6, 40, address(cycles), 0, 0)))
        width, ticks, cpu = struct.unpack_from("=IQQ", cycles, 12)
        say(config=struct.unpack("=II5Q", config), count=struct.unpack_from("=I", gts)[0], size=len(gts),
            gts=[struct.unpack_from("=HHH", gts, at) + struct.unpack_from("=HH", gts, at + 32) for at in (8, 8 + 96)],
            stall=struct.unpack("=10Q7Q", stall), width=width, ticks=ticks,
            on_time=before <= cpu <= time.monotonic_ns())
        """,
    )
    assert said["config"][0] == 5
    assert said["config"][2] & 0xFFFF == 0xE20B
    assert said["config"][5] == 48
    assert (said["count"], said["size"]) == (2, 8 + 2 * 96)
    assert said["gts"] == [[0, 0, 0, 20, 1], [1, 0, 1, 13, 1]]
    assert said["stall"][1:4] == [1, 64, 512 * 1024]
    assert said["stall"][9:] == [7, *(251 * i for i in range(1, 8))]
    assert said["width"] == 64
    assert said["ticks"] > 0
    assert said["on_time"]


def test_queries_refuse_what_the_kernel_refuses(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        fd = device()
        cycles = bytearray(struct.pack("=HHHHiIQQQ", 4, 0, 7, 0, time.CLOCK_MONOTONIC, 0, 0, 0, 0))
        head = lambda data, size: bytearray(struct.pack("=QIIQQQ", 0, 6, size, data, 0, 0))
        say(size=refusal(query, fd, 10, size=80), extension=refusal(query, fd, 3, extensions=1),
            reserved=refusal(query, fd, 3, reserved=1), unknown=refusal(query, fd, 99),
            gt=refusal(fcntl.ioctl, fd, QUERY, head(address(cycles), 40)),
            address=refusal(fcntl.ioctl, fd, QUERY, head(8, 40)))
        """,
    )
    assert said == {
        "size": "EINVAL", "extension": "EINVAL", "reserved": "EINVAL", "unknown": "EINVAL", "gt": "EINVAL",
        "address": "EFAULT",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "device_id", "version", "mains"),
    [
        ("lnl", 0x64A0, [20, 4], 1),
        ("ptl", 0xB080, [30, 0], 1),
        ("pvc", 0x0BD5, [12, 60], 2),
        ("xe3p", 0xD750, [35, 10], 1),
    ],
)
def test_every_device_says_what_it_is(
    tmp_path: Path, programs: Programs, name: str, device_id: int, version: list[int], mains: int
) -> None:
    with Hardware(tmp_path / "gpu", name, programs=programs) as hardware:
        said = client(
            hardware,
            """
            fd = device()
            gts = query(fd, 3)
            rows = [struct.unpack_from("=HHHHIIQQHH", gts, at) for at in range(8, len(gts), 96)]
            mains = [row for row in rows if row[0] == 0]
            streams = [open_stream(fd, (GT_ID, row[2])) for row in mains]
            say(id=struct.unpack_from("=Q", query(fd, 2), 8)[0] & 0xffff, version=mains[0][8:10], mains=len(mains),
                tiles=[row[1] for row in mains], streams=len(streams))
            """,
        )
    assert said == {
        "id": device_id, "version": version, "mains": mains, "tiles": list(range(mains)), "streams": mains,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "xecores", "engines"),
    [
        ("bmg", 20, [[0, 0, 0], [1, 0, 0], [4, 0, 0], [2, 0, 1], [3, 0, 1]]),
        ("pvc", 64, [[1, 0, 0], [4, 0, 0], [1, 0, 1], [4, 0, 1]]),
    ],
)
def test_engines_and_topology(
    tmp_path: Path, programs: Programs, name: str, xecores: int, engines: list[list[int]]
) -> None:
    with Hardware(tmp_path / "gpu", name, programs=programs, xecores=xecores) as hardware:
        said = client(
            hardware,
            """
            fd = device()
            engines, topology, masks, at = query(fd, 0), query(fd, 5), [], 0
            while at < len(topology):
                gt, kind, size = struct.unpack_from("=HHI", topology, at)
                masks.append((gt, kind, size, int.from_bytes(topology[at + 8 : at + 8 + size], "little").bit_count()))
                at += 8 + size
            count = struct.unpack_from("=I", engines)[0]
            say(engines=[struct.unpack_from("=HHH", engines, 8 + 32 * i) for i in range(count)], size=len(engines),
                masks=masks, refused=refusal(query, fd, 5, size=8))
            """,
        )
    assert said["engines"] == engines
    assert said["size"] == 8 + 32 * len(engines)
    assert said["refused"] == "EINVAL"
    # then main GTs have the XeCores that were asked for; PVC has none that draw, media GTs have none at all
    drawing = 0 if name == "pvc" else xecores
    assert said["masks"][:4] == [[0, 1, 16, drawing], [0, 2, 16, xecores], [0, 3, 8, 8], [0, 5, 8, 8]]
    other = xecores if name == "pvc" else 0
    assert [mask for mask in said["masks"] if mask[:2] == [1, 2]] == [[1, 2, 16, other]]


# ---- how busy it is ----


def test_ticks_of_the_compute_engine_follow_the_launches(hardware: Hardware, within: Within) -> None:
    # given the compute engine's and the copy engine's counters in a group
    said = client(
        hardware,
        """
        leader = counter(engine(ACTIVE), read_format=GROUP | TOTAL_TIMES | ID)
        for config in (engine(TOTAL), engine(ACTIVE, 1), engine(TOTAL, 1), C6):
            counter(config, leader)
        GPU.kernel("k", KERNEL, OFFSETS)
        first, start = counts(leader), time.monotonic()
        # when two launches at the same time take 0.4 s of a second, and one of 20 more a ms each
        GPU.launch(KERNEL, 0.4, delay=0.1), GPU.launch(KERNEL, 0.2, delay=0.2)
        for turn in range(20):
            GPU.launch(KERNEL, 0.001, delay=0.6 + turn / 100)
        looks = []
        while time.monotonic() < start + 1:
            time.sleep(0.01)
            looks.append(counts(leader))
        GPU.sync()
        looks.append(counts(leader))
        say(first=first, looks=looks)
        """,
    )
    first, last = said["first"], said["looks"][-1]
    assert first[0] == 5
    assert len(first) == 3 + 2 * 5
    ids = first[4::2]
    assert len(set(ids)) == 5
    assert last[4::2] == ids
    assert last[1] == last[2]
    # then it was busy for 0.42 s (a GPU that waits for a CPU counts in longer steps)
    active, _, copying, _, _ = (b - a for a, b in zip(first[3::2], last[3::2], strict=True))
    assert active / 19.2e6 == pytest.approx(0.42, abs=0.02)
    assert copying == 0
    # (they are read one after the other, so here are the differences at the look that took the least time)
    at = [
        (look[1] - first[1], *(b - a for a, b in zip(first[3::2], look[3::2], strict=True))) for look in said["looks"]
    ]
    assert min(abs(total / 19.2e6 - enabled / 1e9) for enabled, _, total, _, _, _ in at) < 0.01
    assert min(abs(copy_total - total) for _, _, total, _, copy_total, _ in at) < 1000
    assert min(abs(c6_ms - 1000 * (total - active) / 19.2e6) for _, active, total, _, _, c6_ms in at) < 10
    # and at any look the engine was either busy all the time or not at all, or it changed in between
    looks = [look[3::2] for look in said["looks"]]
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(looks) if b[1] > a[1]]
    shares = [active / total for active, total in steps]
    assert min(shares) >= 0
    # (both were read, but not in one instant: what is in between stands out in the shortest looks)
    assert sum(share > 1.01 for share in shares) <= 0.02 * len(shares)
    full = [total for active, total in steps if active > 0.97 * total]
    assert full
    if within.measures:
        assert sum(full) / 19.2e6 >= 0.4 * 0.5


def test_frequencies_are_added_up_and_rise_with_work(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        leader = counter(ACTUAL)
        counter(REQUESTED, leader), counter(ACTUAL | 1 << 60, leader)
        freq0 = Path("/sys/class/drm/renderD128/device/tile0/gt0/freq0")
        GPU.kernel("k", KERNEL, OFFSETS)
        seen, before = [], [0] * 4
        def look():
            global before
            now = counts(leader)
            seen.append([b - a for a, b in zip(before[1:], now[1:])] + [
                int((freq0 / name).read_text()) for name in ("act_freq", "cur_freq", "max_freq")])
            before = now
        def until_at(frequency):
            while int((freq0 / "act_freq").read_text()) != frequency:
                time.sleep(0.001)
        look()
        GPU.launch(KERNEL, 3)
        until_at(2400)
        look()
        until_at(400)
        look()
        say(seen=seen)
        """,
    )
    assert said["seen"] == [
        [400, 400, 400, 400, 400, 2850], [2400, 2850, 400, 2400, 2850, 2850], [400, 400, 400, 400, 400, 2850],
    ]  # fmt: skip


def test_events_are_refused_as_the_kernel_refuses_them(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        cpus = os.sysconf("SC_NPROCESSORS_CONF")
        leader, other = counter(C6), counter(C6)
        member = counter(C6, leader)
        file = os.open("/dev/null", os.O_RDONLY)
        real = refusal(LIBC.syscall, 298, None, 0, 0, -1, 0), ctypes.get_errno()
        say(unknown=[refusal(counter, config) for config in (
                0, 6, engine(C6), engine(C6, 0, instance=1), engine(ACTIVE, 2), engine(ACTIVE, 5), C6 | 2 << 60,
                engine(ACTIVE, instance=1), engine(ACTIVE) | 1 << 44)],
            invalid=[refusal(counter, C6, **how) for how in (
                {"cpu": -1}, {"cpu": cpus}, {"period": 1000}, {"pid": os.getpid()}, {"leader": member},
                {"read_format": 32})],
            none=refusal(counter, C6, file), absent=refusal(counter, C6, card=1), real=real,
            small=refusal(os.read, leader, 16), media=refusal(counter, engine(ACTIVE, 2, 1)),
            ioctl=refusal(fcntl.ioctl, leader, 0x2405))
        """,
    )
    assert set(said["unknown"]) == {"ENOENT"}
    assert set(said["invalid"]) == {"EINVAL"}
    assert (said["none"], said["absent"], said["small"], said["media"]) == ("EBADF", "ENOENT", "ENOSPC", "")
    assert said["ioctl"] == "ENOTTY"


def test_an_event_can_wait_be_stopped_and_be_set_to_zero(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        ENABLE, DISABLE, RESET, NUMBER, WHOLE = 0x2400, 0x2401, 0x2403, 0x80082407, 1
        leader = counter(engine(TOTAL), read_format=GROUP | ID, disabled=1)
        member = counter(engine(TOTAL), leader, read_format=TOTAL_TIMES)
        number = bytearray(8)
        fcntl.ioctl(member, NUMBER, number)
        look = lambda: (counts(leader)[1::2], counts(member))
        time.sleep(0.05)
        looks = [look()]
        for request in (ENABLE, DISABLE):
            fcntl.ioctl(leader, request)
            time.sleep(0.05)
            looks.append(look())
        time.sleep(0.05)
        looks.append(look())
        fcntl.ioctl(leader, RESET, WHOLE)
        looks.append(look())
        say(looks=looks, same=struct.unpack("=Q", number)[0] == counts(leader)[4],
            copy=counts(os.dup(member))[0] == counts(member)[0])
        """,
    )
    before, running, stopped, later, zero = said["looks"]
    assert before == [[0, 0], [0, 0, 0]]
    assert min(running[0]) >= 0.05 * 19.2e6
    assert stopped == later
    assert stopped[1][0] >= running[1][0]
    assert zero[0] == [0, 0]
    assert zero[1][0] == 0
    assert zero[1][1:] == later[1][1:]
    assert said["same"]
    assert said["copy"]


def test_sensors_follow_the_work(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        hwmon = Path("/sys/class/drm/card0/device/hwmon/hwmon3")
        files = {path.name: os.open(path, os.O_RDONLY) for path in hwmon.glob("*_input")}
        values = lambda: {name: int(os.pread(fd, 64, 0)) for name, fd in files.items()}
        look = lambda: (time.monotonic(), values(), time.monotonic())
        GPU.kernel("k", KERNEL, OFFSETS)
        looks = [look()]
        time.sleep(0.3)
        looks.append(look())
        GPU.launch(KERNEL, 1)
        while (hot := values())["temp2_input"] < looks[1][1]["temp2_input"] + 15_000:
            time.sleep(0.01)
        GPU.sync()
        looks.append(look())
        energy = (hwmon / "energy1_input").read_text(), os.pread(files["energy1_input"], 3, 0)
        say(looks=looks, hot=hot, energy=[energy[0], energy[1].decode()], label=(hwmon / "energy1_label").read_text())
        """,
    )
    (_, cold, _), (_, cool, _), (_, done, _) = said["looks"]
    hot = said["hot"]
    assert set(cold) == {"energy1_input", "energy2_input", "temp2_input", "temp3_input", "fan1_input"}
    # 20 W always, and 150 J for a second of work; each value was read at some time between those before and after it
    for (early, before, late), (then, after, last), work in zip(
        said["looks"], said["looks"][1:], (0, 150), strict=False
    ):
        used = (after["energy1_input"] - before["energy1_input"]) / 1e6
        assert work + 20 * (then - late) - 0.1 <= used <= work + 20 * (last - early) + 0.1
    assert cold["energy2_input"] < cool["energy2_input"] < done["energy2_input"] < done["energy1_input"]
    assert hot["fan1_input"] > cool["fan1_input"] + 500
    assert said["energy"][0].endswith("\n")
    assert said["energy"][0].startswith(said["energy"][1])
    assert said["label"] == "card\n"


# ---- opening a stream ----


def test_a_stream_is_refused_as_the_kernel_refuses_it(hardware: Hardware) -> None:
    # given a device, when a stream is asked for in each wrong way
    said = client(
        hardware,
        """
        fd = device()
        most = 20 * 512 * 1024 // 64
        gt = (GT_ID, 0)
        say(no_gt=refusal(open_stream, fd, (SAMPLE_RATE, 251)), no_properties=refusal(open_stream, fd),
            pad=refusal(open_stream, fd, gt, pad=1), pad2=refusal(open_stream, fd, gt, pad2=1),
            name=refusal(open_stream, fd, gt, name=1), unknown=refusal(open_stream, fd, gt, (4, 0)),
            zero=refusal(open_stream, fd, gt, (0, 0)), rate=refusal(open_stream, fd, gt, (SAMPLE_RATE, 250)),
            slow=refusal(open_stream, fd, gt, (SAMPLE_RATE, 251 * 8)), media=refusal(open_stream, fd, (GT_ID, 1)),
            gt=refusal(open_stream, fd, (GT_ID, 9)), wait=refusal(open_stream, fd, gt, (WAIT_NUM_REPORTS, 0)),
            many=refusal(open_stream, fd, gt, (WAIT_NUM_REPORTS, most + 1)), six=refusal(open_stream, fd, *[gt] * 6),
            extension=refusal(open_stream, fd, gt, extensions=1), kind=refusal(open_stream, fd, gt, kind=2),
            op=refusal(open_stream, fd, gt, op=1),
            none=[refusal(lambda *p: os.close(open_stream(fd, *p)), *p) for p in (
                [gt], [gt, (SAMPLE_RATE, 251 * 7)], [(WAIT_NUM_REPORTS, most), gt], [gt] * 5)])
        """,
    )
    # then each has its errno, and the right ways have none
    assert said.pop("none") == ["", "", "", ""]
    assert said.pop("six") == "E2BIG"
    assert said.pop("no_properties") == "EFAULT"
    assert set(said.values()) == {"EINVAL"}


def test_the_stream_is_an_ordinary_descriptor(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        stream = open_stream(device(), (GT_ID, 0))
        before = fcntl.fcntl(stream, fcntl.F_GETFD), fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_NONBLOCK
        os.set_inheritable(stream, False), os.set_blocking(stream, False)
        after = fcntl.fcntl(stream, fcntl.F_GETFD), fcntl.fcntl(stream, fcntl.F_GETFL) & os.O_NONBLOCK
        copy = os.dup(stream)
        fcntl.ioctl(copy, ENABLE)
        say(before=before, after=after, copy=refusal(os.read, copy, 64), unknown=refusal(fcntl.ioctl, stream, 0x6902))
        """,
    )
    assert said == {"before": [0, 0], "after": [1, os.O_NONBLOCK], "copy": "EAGAIN", "unknown": "EINVAL"}


def test_one_stream_per_gt_across_processes_until_the_last_copy_is_gone(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        fd = device()
        stream = open_stream(fd, (GT_ID, 0))
        mine = refusal(open_stream, fd, (GT_ID, 0))
        again = []
        gate, opens = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = refusal(open_stream, device(), (GT_ID, 0)) == "EBUSY"
            os.close(opens)
            os.read(gate, 1)
            os._exit(code)
        os.close(stream)  # the child has a copy
        again.append(refusal(open_stream, fd, (GT_ID, 0)))
        os.close(opens)
        theirs = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        stream = open_stream(fd, (GT_ID, 0))
        os.close(stream)
        again.append(refusal(open_stream, fd, (GT_ID, 0)))
        say(mine=mine, theirs=theirs, again=again)
        """,
    )
    assert said == {"mine": "EBUSY", "theirs": 1, "again": ["EBUSY", ""]}


@pytest.mark.parametrize(("fault", "error"), [("busy", "EBUSY"), ("eacces", "EACCES"), ("no-eu-stall", "ENODEV")])
def test_faults_on_demand(hardware: Hardware, fault: str, error: str) -> None:
    hardware.set_faults(fault)
    said = client(hardware, "say(open=refusal(open_stream, device(), (GT_ID, 0)), query=refusal(query, device(), 10))")
    assert said == {"open": error, "query": "ENODEV" if fault == "no-eu-stall" else ""}


def test_no_device_and_another_driver(hardware: Hardware) -> None:
    body = """
        name = bytearray(8)
        version = bytearray(struct.pack("=iiiiQQQQQQ", 0, 0, 0, 0, 8, 0, 0, 0, 0, 0))
        struct.pack_into("=Q", version, 24, address(name))
        there = os.path.exists("/dev/dri"), os.path.exists("/sys/class/drm")
        if there[0]:
            fcntl.ioctl(device(), VERSION, version)
        say(there=there, node=refusal(device), name=name.decode().rstrip("\\0"))
        """
    gone = client(hardware, body, {"STANDIN_FAULTS": "no-device"})
    other = client(hardware, body, {"STANDIN_FAULTS": "slow-reader,not-xe"})
    assert gone == {"there": [False, False], "node": "ENOENT", "name": ""}
    assert other == {"there": [True, True], "node": "", "name": "i915"}


# ---- reading ----


def test_reads_are_refused_until_enabled_and_after_disabling(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        stream = open_stream(device(), (GT_ID, 0))
        os.set_blocking(stream, False)
        answers = [refusal(os.read, stream, 4096)]
        fcntl.ioctl(stream, ENABLE)
        answers += [refusal(os.read, stream, 63), refusal(os.read, stream, 4096)]
        fcntl.ioctl(stream, DISABLE)
        answers += [refusal(os.read, stream, 4096)]
        fcntl.ioctl(stream, ENABLE), fcntl.ioctl(stream, ENABLE)
        answers += [refusal(os.read, stream, 64), refusal(os.readv, stream, [bytearray(64)])]
        say(answers=answers)
        """,
    )
    assert said["answers"] == ["EINVAL", "EINVAL", "EAGAIN", "EINVAL", "EAGAIN", "EAGAIN"]


def test_a_blocking_read_waits(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        stream = started(nonblocking=False)
        GPU.kernel("k", KERNEL, OFFSETS)
        start = time.monotonic()
        GPU.launch(KERNEL, 1.0, delay=0.2)
        size = len(os.read(stream, 1 << 20))
        say(size=size, waited=time.monotonic() - start)
        """,
    )
    assert said["size"] > 0
    assert said["size"] % 64 == 0
    assert said["waited"] > 0.2


def test_a_read_rounds_down_and_clears_pollin_even_if_data_remains(hardware: Hardware) -> None:
    # given records in the buffers
    said = client(
        hardware,
        """
        stream = started()
        idle = readable(stream)
        GPU.kernel("k", KERNEL, OFFSETS)
        GPU.launch(KERNEL, 0.02)
        GPU.sync()
        # when a little is read with a crooked size, by select and by epoll
        poller = select.epoll()
        poller.register(stream, select.EPOLLIN)
        before = readable(stream), len(poller.poll(0))
        deadline = time.monotonic() + 120
        size, after = 0, True
        while after and time.monotonic() < deadline:  # the driver may look in between, so more than once
            size = len(os.read(stream, 130))
            after = readable(stream)
        later = readable(stream, 60)
        rest, _ = drain(stream)
        say(idle=idle, before=before, size=size, after=after, later=later, rest=len(rest), end=readable(stream, 0.05))
        """,
    )
    # then POLLIN is gone although data remains, and back at the driver's next look
    assert said["idle"] is False
    assert said["before"] == [True, 1]
    assert said["size"] == 128
    assert said["after"] is False
    assert said["later"] is True
    assert said["rest"] > 0
    assert said["end"] is False


def test_pollin_waits_for_the_wanted_number_of_reports(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        stream = started(wait=3000)
        GPU.kernel("k", KERNEL, OFFSETS)
        GPU.launch(KERNEL, 0.05)  # 2000 records
        GPU.sync()
        few = readable(stream, 0.05)
        launches, many = 1, False
        while not many and launches < 1000:  # one more is enough, unless the GPU waits for a CPU
            GPU.launch(KERNEL, 0.05)
            GPU.sync()
            launches, many = launches + 1, readable(stream, 0.1)
        say(few=few, many=many, size=len(drain(stream)[0]) // 64, launches=launches)
        """,
    )
    assert said["few"] is False
    assert said["many"] is True
    assert 3000 <= said["size"] <= 2000 * said["launches"]


def test_eio_comes_once_and_then_the_data(hardware: Hardware) -> None:
    # given more records than the buffers hold, when they are read
    said = client(
        hardware,
        """
        stream = started()
        GPU.kernel("k", KERNEL, OFFSETS)
        fault(FAULT_FLOOD, 400_000, 200_000_000)
        with Runtime(Path(os.environ["STANDIN_DIR"])) as other:
            other.sync()
        first = refusal(os.read, stream, 1 << 30)
        data, more = drain(stream)
        say(first=first, more=more, records=len(data) // 64)
        """,
    )
    hardware.stop()
    ledger = hardware.ledger()
    # then one EIO says so, and all that fitted is there
    assert said == {"first": "EIO", "more": 0, "records": 20 * 8192}
    assert ledger.records_produced == 400_000
    assert ledger.records_dropped == 400_000 - 20 * 8192
    assert ledger.records_unread == 0
    assert sum(overflow.records for overflow in ledger.overflows) == ledger.records_dropped
    assert {overflow.xecore for overflow in ledger.overflows} == set(range(20))
    assert all(overflow.first_ns < overflow.last_ns for overflow in ledger.overflows)


@pytest.mark.parametrize("how", ["fault(FAULT_RESET)", "os.kill(gpu, signal.SIGUSR1), GPU.sync()"])
def test_a_reset_kills_the_stream_until_a_new_one_is_opened(hardware: Hardware, how: str) -> None:
    said = client(
        hardware,
        """
        import signal
        stream = started()
        GPU.kernel("k", KERNEL, OFFSETS)
        GPU.launch(KERNEL, 0.02)
        GPU.sync()
        HOW
        dead = [readable(stream), refusal(os.read, stream, 4096), readable(stream), refusal(os.read, stream, 4096)]
        busy = refusal(open_stream, device(), (GT_ID, 0))
        os.close(stream)
        stream = started()
        GPU.launch(KERNEL, 0.02)
        GPU.sync()
        say(dead=dead, busy=busy, records=len(drain(stream)[0]) // 64)
        """.replace("HOW", how.replace("gpu", str(hardware.process.pid))),
    )
    ledger = hardware.ledger()
    assert said["dead"] == [True, "ENODEV", True, "ENODEV"]
    assert said["busy"] == "EBUSY"
    assert said["records"] == ledger.records_captured > 0
    assert ledger.records_unread > 0


def test_a_blocked_read_ends_when_the_gpu_is_reset_or_gone(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        import threading
        stream = started(nonblocking=False)
        threading.Timer(0.1, fault, [FAULT_RESET]).start()
        reset = refusal(os.read, stream, 4096)
        os.close(stream)
        stream = started(nonblocking=False)
        threading.Timer(0.1, os.kill, [gpu, 9]).start()
        gone = refusal(os.read, stream, 4096)
        os.set_blocking(stream, False)
        still, node = refusal(os.read, stream, 4096), refusal(open_stream, device(), (GT_ID, 0))
        say(reset=reset, gone=gone, still=still, node=node)
        """.replace("gpu", str(hardware.process.pid)),
    )
    hardware.kill()  # it is dead already; this says that it is meant to be
    assert said == {"reset": "ENODEV", "gone": "ENODEV", "still": "ENODEV", "node": "ENODEV"}


# ---- the ledger ----


@pytest.mark.parametrize(("device", "layout"), [("bmg", "xe2"), ("pvc", "pvc"), ("max", "pvc"), ("xe3p", "xe3p")])
def test_what_is_drained_equals_the_ledger(tmp_path: Path, programs: Programs, device: str, layout: str) -> None:
    # given launches of two kernels from several stacks, at the same time and one after the other
    with Hardware(tmp_path / "gpu", device, programs=programs, gts=1) as hardware:
        said = client(
            hardware,
            """
            stream = started()
            GPU.kernel("first", KERNEL, OFFSETS)
            GPU.kernel("second", KERNEL + 0x10000, OFFSETS)
            for turn in range(20):
                GPU.launch(KERNEL, 0.02, "main;a")
                GPU.launch(KERNEL, 0.005, "main;b", delay=0.01)
                GPU.launch(KERNEL + 0x10000, 0.01, "main;a")
            GPU.sync()
            # when all of it is drained
            data, lost = drain(stream, 64 * 1_500)
            fcntl.ioctl(stream, DISABLE)
            Path(os.environ["STANDIN_DIR"], "records").write_bytes(data)
            say(lost=lost)
            """,
        )
    ledger = hardware.ledger()
    got = samples((tmp_path / "gpu" / "records").read_bytes(), layout)
    # then every sample is in the ledger, and no other
    assert said == {"lost": 0}
    assert ledger.records_captured == ledger.records_produced > 1000
    assert got == ledger_samples(ledger, layout)
    assert {(row.stack, row.kernel) for row in ledger.rows} == {
        ("main;a", "first"), ("main;b", "first"), ("main;a", "second"),
    }  # fmt: skip
    assert sorted(launch.count for launch in ledger.launches) == [20, 20, 20]
    assert ("tdr" in {row.reason for row in ledger.rows}) == (layout != "pvc")
    by_offset = Counter[int]()
    for row in ledger.rows:
        by_offset[row.offset] += row.produced
    assert max(by_offset.values()) > 3 * sum(by_offset.values()) / len(OFFSETS)  # a few instructions are hot


@pytest.mark.parametrize("device", ["pvc", "max"])
def test_two_gts_have_a_stream_each(tmp_path: Path, programs: Programs, device: str) -> None:
    # given a device of two tiles, both sampled
    with Hardware(tmp_path / "gpu", device, programs=programs) as hardware:
        said = client(
            hardware,
            """
            streams = [started(gt=gt) for gt in (0, 1)]
            GPU.kernel("k", KERNEL, OFFSETS)
            for turn in range(10):
                GPU.launch(KERNEL, 0.01)
            GPU.sync()
            # when each is read with readv into two buffers
            data = []
            for stream in streams:
                parts = bytearray(64 * 100), bytearray(64 * 8192 * 20)
                size = os.readv(stream, parts)
                data.append((parts[0] + parts[1])[:size])
            Path(os.environ["STANDIN_DIR"], "records").write_bytes(b"".join(data))
            say(sizes=[len(part) // 64 for part in data])
            """,
        )
    ledger = hardware.ledger()
    # then both had work, and together they are the ledger
    assert min(said["sizes"]) > 0
    assert sum(said["sizes"]) == ledger.records_produced
    assert samples((tmp_path / "gpu" / "records").read_bytes(), "pvc") == ledger_samples(ledger, "pvc")


@pytest.mark.parametrize(("device", "layout"), [("bmg", "xe2"), ("max", "pvc")])
def test_unread_records_are_counted_apart_and_nothing_is_made_unwatched(
    tmp_path: Path, programs: Programs, device: str, layout: str
) -> None:
    hardware = Hardware(tmp_path / "gpu", device, gts=1, programs=programs)
    said = client(
        hardware,
        """
        GPU.kernel("k", KERNEL, OFFSETS)
        GPU.launch(KERNEL, 0.05, "nobody looks")
        GPU.sync()
        stream = started()
        GPU.launch(KERNEL, 0.05, "half is read")
        GPU.sync()
        data = os.read(stream, 64 * 500)
        fcntl.ioctl(stream, DISABLE)
        GPU.launch(KERNEL, 0.05, "disabled")
        GPU.sync()
        fcntl.ioctl(stream, ENABLE)
        empty = refusal(os.read, stream, 64)
        GPU.launch(KERNEL, 0.05, "closed")
        GPU.sync()
        os.close(stream)
        Path(os.environ["STANDIN_DIR"], "records").write_bytes(data)
        say(empty=empty)
        """,
    )
    hardware.stop()
    ledger = hardware.ledger()
    assert said == {"empty": "EAGAIN"}
    assert {row.stack for row in ledger.rows} == {"half is read", "closed"}
    assert {launch.stack for launch in ledger.launches} == {"nobody looks", "half is read", "disabled", "closed"}
    assert ledger.records_captured == 500
    assert ledger.records_unread == ledger.records_produced - 500 > 500
    got = samples((hardware.folder / "records").read_bytes(), layout)
    assert got == ledger_samples(ledger, layout)


@pytest.mark.parametrize("device", ["bmg", "max"])
def test_a_slow_reader_loses_and_the_ledger_says_so(tmp_path: Path, programs: Programs, device: str) -> None:
    # given a flood, and a reader whose every read takes 300 ms
    slow = {"faults": ["slow-reader"], "flood": (1_000_000, 1.0)}
    with Hardware(tmp_path / "gpu", device, gts=1, programs=programs, **slow) as hardware:  # type: ignore[arg-type]
        said = client(
            hardware,
            """
            stream = started()
            GPU.kernel("k", KERNEL, OFFSETS)
            records = lost = 0
            over = threading.Event()
            threading.Thread(target=lambda: (print("wait", flush=True), sys.stdin.readline(), over.set())).start()
            while readable(stream, 0.05) or not over.is_set():
                if readable(stream):
                    data, more = drain(stream)
                    records, lost = records + len(data) // 64, lost + more
            fcntl.ioctl(stream, DISABLE)
            say(records=records, lost=lost)
            """,
            {"STANDIN_SLOW_MS": "300"},
            wait=hardware.wait,
        )
    ledger = hardware.ledger()
    # then it saw EIO, and the ledger holds exactly what it missed
    assert said["lost"] >= 1
    assert ledger.records_produced == 1_000_000
    assert ledger.records_dropped > 100_000
    assert said["records"] == ledger.records_captured


def test_a_killed_reader_frees_the_gt(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        GPU.kernel("k", KERNEL, OFFSETS)
        gate, opens = os.pipe()
        pid = os.fork()
        if pid == 0:
            stream = started(nonblocking=False)
            while True:
                os.read(stream, 64 * 100)
                os.write(opens, b"x")
        GPU.launch(KERNEL, 1.0)
        os.read(gate, 1)
        busy = refusal(open_stream, device(), (GT_ID, 0))
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        stream = started()
        GPU.launch(KERNEL, 0.05)
        say(busy=busy, readable=readable(stream, 60))
        """,
    )
    assert said == {"busy": "EBUSY", "readable": True}


def test_two_million_records_in_a_second_are_drained_or_counted_as_lost(tmp_path: Path, programs: Programs) -> None:
    # given a reader in C
    reader = c_reader(tmp_path)
    with Hardware(tmp_path / "gpu", programs=programs, flood=(2_000_000, 1.0)) as hardware, hardware.runtime() as gpu:
        gpu.kernel("k", KERNEL, OFFSETS)
        # when the GPU makes two million records in a second
        said = drained(reader, hardware)
    ledger = hardware.ledger()
    # then none is lost without being told, and none at all if the reader got its CPU in time
    assert ledger.records_produced == 2_000_000
    assert said["records"] == ledger.records_captured == ledger.records_produced - ledger.records_dropped > 0
    assert (said["eio"] > 0) == (ledger.records_dropped > 0)


# ---- several cards ----


def test_every_card_has_its_place_nodes_counters_and_streams(tmp_path: Path, programs: Programs) -> None:
    # given a machine with three cards, two of them discrete
    with Hardware(tmp_path / "gpu", cards=("bmg", "pvc", "lnl"), programs=programs) as hardware:
        said = client(
            hardware,
            """
            import glob
            nodes = [f"/dev/dri/renderD{128 + card}" for card in range(3)]
            places = [os.path.realpath(f"/sys/class/drm/{os.path.basename(node)}/device") for node in nodes]
            ids = [struct.unpack_from("=Q", query(device(node), 2), 8)[0] & 0xffff for node in nodes]
            streams = [[open_stream(device(nodes[card]), (GT_ID, gt)) for gt in gts] for card, gts in
                       enumerate(([0], [0, 1], [0]))]
            for stream in sum(streams, []):
                os.set_blocking(stream, False)
                fcntl.ioctl(stream, ENABLE)
            active = [counter(engine(ACTIVE), card=card) for card in range(3)]
            GPU.kernel("k", KERNEL, OFFSETS)
            before = [counts(fd)[1] for fd in active]
            # when each main GT gets as many launches, and card 2 one more
            for turn in range(8):
                GPU.launch(KERNEL, 0.02)
            GPU.launch(KERNEL, 0.2, gt=3)
            GPU.sync()
            data = [[drain(stream)[0] for stream in each] for each in streams]
            for card, name in enumerate(("bmg", "pvc", "lnl")):
                Path(os.environ["STANDIN_DIR"], name).write_bytes(b"".join(data[card]))
            say(places=places, ids=ids, cards=sorted(os.listdir("/dev/dri")),
                active=[counts(fd)[1] - first for fd, first in zip(active, before)],
                pmus=[name for name in os.listdir("/sys/bus/event_source/devices") if name.startswith("xe_")],
                sizes=[[len(part) // 64 for part in each] for each in data], busy=refusal(
                    open_stream, device(nodes[1]), (GT_ID, 1)), none=refusal(open_stream, device(nodes[2]), (GT_ID, 2)),
                energy=[len(glob.glob(f"/sys/class/drm/card{card}/device/hwmon/*/energy1_input")) for card in range(3)])
            """,
        )
    ledger = hardware.ledger()
    # then each is a device of its own
    assert [place.rsplit("/", 1)[1] for place in said["places"]] == ["0000:03:00.0", "0000:07:00.0", "0000:00:02.0"]
    assert [card.address for card in hardware.cards] == [place.rsplit("/", 1)[1] for place in said["places"]]
    assert said["ids"] == [0xE20B, 0x0BD5, 0x64A0]
    assert {"card0", "card1", "card2", "renderD128", "renderD129", "renderD130"} <= set(said["cards"])
    assert set(said["pmus"]) == {card.pmu for card in hardware.cards}
    assert said["energy"] == [1, 1, 0]
    assert (said["busy"], said["none"]) == ("EBUSY", "EINVAL")
    # and all counted and sampled what it executed, in the layout of its kind
    clocks = [19.2e6, 25e6, 19.2e6]
    seconds = [ticks / clock for ticks, clock in zip(said["active"], clocks, strict=True)]
    assert 0.015 < min(seconds[:2]) <= max(seconds[:2]) < 0.06  # of two launches that do not overlap wholly, more
    assert 0.19 < seconds[2] < 0.26
    by_gt = {(count.card, count.gt): count.captured for count in ledger.gts}
    assert [[by_gt[0, 0]], [by_gt[1, 0], by_gt[1, 1]], [by_gt[2, 0]]] == said["sizes"]
    assert by_gt[2, 0] > by_gt[0, 0]
    assert min(by_gt.values()) > 0
    got: Counter[str] = Counter()
    for name, layout in (("bmg", "xe2"), ("pvc", "pvc"), ("lnl", "xe2")):
        for (_, reason), count in samples((hardware.folder / name).read_bytes(), layout).items():
            got[reason] += count
    made: Counter[str] = Counter()
    for row in ledger.rows:
        made[row.reason] += row.captured
    assert got == made


def test_overflows_say_whose_they_are(tmp_path: Path, programs: Programs) -> None:
    with Hardware(tmp_path / "gpu", cards=("bmg", "pvc"), xecores=2, programs=programs) as hardware:
        said = client(
            hardware,
            """
            stream = open_stream(device("/dev/dri/renderD129"), (GT_ID, 1))
            os.set_blocking(stream, False)
            fcntl.ioctl(stream, ENABLE)
            GPU.kernel("k", KERNEL, OFFSETS)
            fault(FAULT_FLOOD, 30_000, 50_000_000)
            with Runtime(Path(os.environ["STANDIN_DIR"])) as other:
                other.sync()
            data, lost = drain(stream)
            say(records=len(data) // 64, lost=lost)
            """,
        )
    ledger = hardware.ledger()
    assert said == {"records": 2 * 8192, "lost": 1}
    assert {(each.card, each.gt, each.xecore) for each in ledger.overflows} == {(1, 1, 0), (1, 1, 1)}
    assert [count.dropped for count in ledger.gts] == [0, 0, 30_000 - 2 * 8192]


def test_faults_of_one_card_or_gt(tmp_path: Path, programs: Programs) -> None:
    faults = ["busy@0.1", "no-eu-stall@1", "not-xe@2", "eacces@3.0"]
    cards = ("pvc", "bmg", "lnl", "bmg")
    with Hardware(tmp_path / "gpu", cards=cards, xecores=1, faults=faults, programs=programs) as hardware:
        said = client(
            hardware,
            """
            fds = [device(f"/dev/dri/renderD{128 + card}") for card in range(4)]
            say(open=[refusal(lambda: os.close(open_stream(fd, (GT_ID, gt)))) for fd, gt in zip(fds[:1] * 2 + fds[1:],
                (0, 1, 0, 0, 0))], stall=[refusal(query, fd, 10) for fd in fds])
            """,
        )
    assert said == {"open": ["", "EBUSY", "ENODEV", "EINVAL", "EACCES"], "stall": ["", "ENODEV", "EINVAL", ""]}


# ---- cards that come and go ----


def test_a_card_that_is_unplugged_is_gone_and_comes_back(tmp_path: Path, programs: Programs) -> None:
    # given two cards that are sampled, one with records that nobody has read
    with Hardware(tmp_path / "gpu", cards=("bmg", "lnl"), programs=programs) as hardware:
        said = client(
            hardware,
            """
            def look():
                return [sorted(name for name in os.listdir(folder) if any(part in name for part in (
                    "card0", "renderD128", "03:00", "03_00"))) for folder in (
                    "/dev/dri", "/dev/dri/by-path", "/sys/class/drm", "/sys/bus/pci/devices",
                    "/sys/bus/event_source/devices")] + [os.path.exists("/sys/dev/char/226:128")]
            def opened(node):
                stream = open_stream(device(node), (GT_ID, 0))
                os.set_blocking(stream, False)
                fcntl.ioctl(stream, ENABLE)
                return stream
            node = device()
            streams = [opened("/dev/dri/renderD128"), opened("/dev/dri/renderD129")]
            event, other = counter(engine(TOTAL)), counter(engine(TOTAL), card=1)
            energy = os.open("/sys/class/drm/card0/device/hwmon/hwmon3/energy1_input", os.O_RDONLY)
            GPU.kernel("k", KERNEL, OFFSETS)
            GPU.launch(KERNEL, 0.05, gt=0), GPU.launch(KERNEL, 0.05, gt=1)
            GPU.sync()
            before = look()
            # when the first is unplugged
            print("unplug", flush=True), sys.stdin.readline()
            gone = look(), refusal(device), [refusal(os.read, stream, 64) for stream in streams], readable(streams[0])
            dead = [refusal(query, node, 2), refusal(open_stream, node, (GT_ID, 0)), refusal(os.pread, energy, 64, 0),
                    refusal(fcntl.ioctl, streams[0], ENABLE), refusal(counter, engine(TOTAL))]
            counted = len(os.read(event, 64)), len(os.read(other, 64))
            GPU.launch(KERNEL, 0.05), GPU.launch(KERNEL, 0.05)
            GPU.sync()
            # and plugged in again
            print("plug", flush=True), sys.stdin.readline()
            again = look()
            stream = opened("/dev/dri/renderD128")
            GPU.launch(KERNEL, 0.05, gt=0)
            GPU.sync()
            data = [drain(each)[0] for each in (stream, streams[1])]
            say(before=before, gone=gone, dead=dead, counted=counted, again=again, old=refusal(os.read, streams[0], 64),
                node=refusal(query, node, 2), records=[64 + len(each) for each in data],
                value=len(os.read(counter(engine(TOTAL)), 64)))
            """,
            unplug=lambda: hardware.unplug(0),
            plug=lambda: hardware.plug(0),
        )
    ledger = hardware.ledger()
    # then its files are there, not there, and there again
    assert [len(names) for names in said["before"][:-1]] == [2, 2, 3, 1, 1]
    assert said["before"][-1]
    nothing, node, reads, told = said["gone"]
    assert nothing == [[]] * 5 + [False]
    assert said["again"] == said["before"]
    # and what was open of it is dead for good, while the other card goes on
    assert (node, reads, told) == ("ENOENT", ["ENODEV", ""], True)
    assert said["dead"] == ["ENODEV", "ENODEV", "ENODEV", "ENODEV", "ENOENT"]
    assert said["counted"] == [0, 16]
    assert (said["old"], said["node"], said["value"]) == ("ENODEV", "ENODEV", 16)
    first, second = ledger.gts
    assert (first.unread, second.unread) == (first.produced - first.captured, 0)
    assert first.unread > 0
    assert [size // 64 for size in said["records"]] == [first.captured + 1, second.captured]
    assert second.captured > 500


def test_a_card_that_was_not_there_from_the_start(tmp_path: Path, programs: Programs) -> None:
    with Hardware(tmp_path / "gpu", cards=("bmg", "bmg"), unplugged=(1,), programs=programs) as hardware:
        body = """
            nodes = [name for name in sorted(os.listdir("/dev/dri")) if name.startswith("renderD")]
            say(nodes=nodes, open=[refusal(open_stream, device("/dev/dri/" + name), (GT_ID, 0)) for name in nodes])
            """
        before = client(hardware, body)
        hardware.plug(1)
        after = client(hardware, body)
        with pytest.raises(ValueError, match="already"):
            hardware.plug(1)
        hardware.unplug(0)
        alone = client(hardware, body)
    assert before == {"nodes": ["renderD128"], "open": [""]}
    assert after == {"nodes": ["renderD128", "renderD129"], "open": ["", ""]}
    assert alone == {"nodes": ["renderD129"], "open": [""]}


# ---- a GPU that does not answer ----


def test_a_gpu_that_stands_still_is_silent_and_goes_on_later(hardware: Hardware, within: Within) -> None:
    said = client(
        hardware,
        """
        stream = started()
        event = counter(engine(TOTAL))
        GPU.kernel("k", KERNEL, OFFSETS)
        GPU.launch(KERNEL, 2)  # 80,000 records
        readable(stream, 120)
        # when it stands still, then what was visible can be read, and no more comes
        print("freeze", flush=True), sys.stdin.readline()
        first = len(drain(stream)[0]) // 64
        ticks = counts(event)
        quiet = readable(stream, 0.4), refusal(os.read, stream, 64), counts(event) == ticks
        # and nobody waits long for it
        times = []
        def timed(function, *args):
            start = time.monotonic()
            times.append(refusal(function, *args))
            times.append(time.monotonic() - start)
        timed(fcntl.ioctl, stream, DISABLE)
        timed(fcntl.ioctl, stream, ENABLE)
        timed(counter, engine(TOTAL))
        os.close(stream)
        timed(open_stream, device(), (GT_ID, 0))
        # and when it goes on, the rest of the launch is executed
        print("thaw", flush=True), sys.stdin.readline()
        stream = started()
        GPU.sync()
        say(first=first, quiet=quiet, times=times, rest=len(drain(stream)[0]) // 64, more=counts(event)[1] > ticks[1])
        """,
        freeze=hardware.freeze,
        thaw=hardware.thaw,
    )
    assert 0 < said["first"] < 80_000
    assert said["quiet"] == [False, "EAGAIN", True]
    assert said["times"][::2] == ["", "ETIMEDOUT", "EINVAL", "ETIMEDOUT"]
    within.took(max(said["times"][1::2]), 0.1)
    assert said["rest"] > 0
    assert 40_000 < said["first"] + said["rest"] <= 80_000
    assert said["more"]


def test_one_card_stands_still_and_is_reset_while_another_goes_on(tmp_path: Path, programs: Programs) -> None:
    with Hardware(tmp_path / "gpu", cards=("bmg", "bmg"), programs=programs) as hardware:
        said = client(
            hardware,
            """
            streams = []
            for node in ("/dev/dri/renderD128", "/dev/dri/renderD129"):
                streams.append(open_stream(device(node), (GT_ID, 0)))
                os.set_blocking(streams[-1], False)
                fcntl.ioctl(streams[-1], ENABLE)
            GPU.kernel("k", KERNEL, OFFSETS)
            print("freeze", flush=True), sys.stdin.readline()
            GPU.launch(KERNEL, 10, gt=0), GPU.launch(KERNEL, 10, gt=1)
            still = readable(streams[1], 1), readable(streams[0], 0.1)
            print("reset", flush=True), sys.stdin.readline()
            say(still=still, after=[refusal(os.read, stream, 64) for stream in streams])
            """,
            freeze=lambda: hardware.freeze(0),
            reset=lambda: hardware.reset(0),
        )
    assert said == {"still": [True, False], "after": ["ENODEV", ""]}


# ---- overflows on order ----


def test_overflows_are_made_and_dropped_as_ordered(tmp_path: Path, programs: Programs) -> None:
    # given forty overflows of 25 records on two GTs
    with Hardware(tmp_path / "gpu", "pvc", xecores=3, programs=programs) as hardware:
        said = client(
            hardware,
            """
            import threading
            streams = [started(gt=gt) for gt in (0, 1)]
            GPU.kernel("k", KERNEL, OFFSETS)
            print("overflow", flush=True), sys.stdin.readline()
            ended = threading.Event()
            def wait():
                with Runtime(Path(os.environ["STANDIN_DIR"])) as other:
                    other.sync()
                ended.set()
            threading.Thread(target=wait).start()
            # when they are read as they come
            records, spans, before = 0, [], time.monotonic_ns()
            while not ended.is_set():
                for stream in select.select(streams, [], [], 0.01)[0]:
                    try:
                        records += len(os.read(stream, 16 << 20)) // 64
                    except OSError as error:
                        spans.append((before, time.monotonic_ns(), errno.errorcode[error.errno]))
                        records += len(os.read(stream, 16 << 20)) // 64
                    before = time.monotonic_ns()
            for stream in streams:
                records += len(drain(stream)[0]) // 64
            say(records=records, spans=spans)
            """,
            overflow=lambda: hardware.overflow(40, 0.01, 25),
        )
    ledger = hardware.ledger()
    # then each one is there with its span, and the reader was told of each
    assert len(ledger.overflows) == len(said["spans"]) == 40
    assert {each.records for each in ledger.overflows} == {25}
    assert {(each.gt, each.xecore) for each in ledger.overflows} == {(gt, core) for gt in (0, 1) for core in range(3)}
    assert all(each.first_ns < each.last_ns for each in ledger.overflows)
    assert {told for *_, told in said["spans"]} == {"EIO"}
    assert ledger.records_dropped == 40 * 25
    assert ledger.records_captured == said["records"] == 40 * 8192
    starts = sorted(each.first_ns for each in ledger.overflows)
    assert min(b - a for a, b in pairwise(starts)) >= 0.01 * 1e9


def test_waiting_for_all_that_the_gpu_does(hardware: Hardware) -> None:
    # given a test that launched something, and a flood and overflows that take longer
    def flood() -> None:
        hardware.flood(1000, 0.3)
        hardware.overflow(1, 0.01)

    said = client(
        hardware,
        """
        stream = started()
        GPU.kernel("k", KERNEL, OFFSETS)
        GPU.launch(KERNEL, 0.01)
        early = time.monotonic()
        print("begin", flush=True), sys.stdin.readline()
        GPU.sync()
        print("wait", flush=True), sys.stdin.readline()
        say(took=time.monotonic() - early, first=refusal(os.read, stream, 1 << 24), size=len(drain(stream)[0]) // 64)
        """,
        begin=flood,
        wait=hardware.wait,
    )
    assert said["took"] > 0.3
    assert said["first"] == "EIO"
    assert hardware.ledger().records_captured == said["size"] > 8192 + 900


def test_two_hundred_overflows_take_less_than_five_seconds(tmp_path: Path, programs: Programs, within: Within) -> None:
    reader = c_reader(tmp_path)
    with Hardware(tmp_path / "gpu", programs=programs) as hardware, hardware.runtime() as gpu:
        gpu.kernel("k", KERNEL, OFFSETS)
        hardware.overflow(200, 0.012)
        began = time.monotonic()
        said = drained(reader, hardware)
        seconds = time.monotonic() - began
    ledger = hardware.ledger()
    assert len(ledger.overflows) == said["eio"] == 200
    assert ledger.records_dropped == 20_000
    assert said["records"] == ledger.records_captured
    within.took(seconds, 5)
