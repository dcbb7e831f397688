# SPDX-License-Identifier: Apache-2.0
"""The stand-in for Intel's i915 from outside the Linux kernel answers and refuses as that driver does.

What both drivers have in common is in test_standin_xe.py, whose small recorder runs here, too.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from standin.hardware import Hardware, Programs
from unit.project.test_standin_xe import client, ledger_samples, programs, samples

__all__ = ["programs"]


@pytest.fixture
def hardware(tmp_path: Path, programs: Programs) -> Iterator[Hardware]:
    with Hardware(tmp_path / "gpu", "max", programs=programs) as made:
        yield made


QUERIES = """
def item(fd, number, flags=0, data=b"", length=None, outer=0):
    buffer = bytearray(data) if data else bytearray(1)
    length = len(data) if length is None else length
    it = bytearray(struct.pack("=QiIQ", number, length, flags, address(buffer)))
    fcntl.ioctl(fd, 0xc0106479, bytearray(struct.pack("=IIQ", 1, outer, address(it))))
    return struct.unpack_from("=i", it, 8)[0], bytes(buffer)

def answer(fd, number, flags=0):
    length, _ = item(fd, number, flags)
    return item(fd, number, flags, bytes(length))[1]

def param(fd, number):
    value = bytearray(4)
    fcntl.ioctl(fd, 0xc0106446, bytearray(struct.pack("=iiQ", number, 0, address(value))))
    return struct.unpack("=i", value)[0]

def resets(fd, context=0, flags=0):
    stats = bytearray(struct.pack("=6I", context, flags, 0, 0, 0, 0))
    fcntl.ioctl(fd, 0xc0186472, stats)
    return struct.unpack_from("=I", stats, 8)[0]
"""


def test_what_the_machine_looks_like(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        fd, name = device(), bytearray(8)
        fcntl.ioctl(fd, VERSION, bytearray(struct.pack("=iiiiQQQQQQ", 0, 0, 0, 0, 8, address(name), 0, 0, 0, 0)))
        card = Path("/sys/class/drm/card0")
        hwmon = {path.read_text().strip() for path in card.glob("device/hwmon/hwmon*/name")}
        say(name=name.decode().rstrip("\\0"), version=(card / "prelim_uapi_version").read_text(), hwmon=sorted(hwmon),
            gts=sorted(path.name for path in (card / "gt").iterdir()),
            pmus=[pmu for pmu in os.listdir("/sys/bus/event_source/devices") if pmu.startswith(("xe_", "i915_"))],
            paranoid=Path("/proc/sys/dev/i915/perf_stream_paranoid").read_text(),
            xe=os.path.exists("/proc/sys/dev/xe"), query=refusal(query, fd, 2), stream=refusal(open_stream, fd, (1, 0)))
        """,
    )
    assert said == {
        "name": "i915", "version": "2.0\n", "hwmon": ["i915", "i915_gt0", "i915_gt1"], "gts": ["gt0", "gt1"],
        "pmus": ["i915_0000_03_00.0"], "paranoid": "1\n", "xe": False, "query": "EINVAL", "stream": "EINVAL",
    }  # fmt: skip


def test_parameters_and_queries(hardware: Hardware) -> None:
    said = client(
        hardware,
        QUERIES
        + """
fd = device()
engines = answer(fd, 0x1000d)
count = struct.unpack_from("=I", engines)[0]
engines = [struct.unpack_from("=HH", engines, 16 + 56 * i) for i in range(count)]
distances = [[struct.unpack_from("=i", item(fd, 0x10005, 0, struct.pack("=HHHHi12x", *engine, 1, tile, 0))[1], 8)[0]
    for tile in (0, 1)] for engine in engines]
topology = answer(fd, 0x10008, 4 | 5 << 8)
head = struct.unpack_from("=8H", topology)
before = time.monotonic_ns()
cycles = struct.unpack("=HHIQQQiI", item(fd, 0x10009, 0, struct.pack("=HHIQQQiI", 4, 0, 0, 0, 0, 0, 1, 0))[1])
say(id=param(fd, 4), revision=param(fd, 32), engines=engines, distances=distances, slices=head[1],
    xecores=int.from_bytes(topology[16 + head[4] : 16 + head[4] + head[5]], "little").bit_count(),
    version=list(item(fd, 0x1000c, 0, struct.pack("=HHBBBB", 4, 0, 0, 0, 0, 0))[1][5:7]),
    frequency=cycles[4], on_time=before <= cycles[5] <= time.monotonic_ns(), ticks=cycles[3] > 0,
    unknown=refusal(param, fd, 5))
""",
    )
    assert (said["id"], said["revision"], said["unknown"]) == (0x0BD5, 0, "EINVAL")
    assert said["engines"] == [[1, 0], [1, 1], *([4, instance] for instance in range(8))]
    near, far = [0, 1000], [1000, 0]
    assert said["distances"] == [near, far, near, near, near, near, far, far, far, far]
    assert (said["slices"], said["xecores"], said["version"]) == (1, 20, [12, 60])
    assert (said["frequency"], said["on_time"], said["ticks"]) == (25_000_000, True, True)


def test_queries_are_refused_in_the_item(hardware: Hardware) -> None:
    said = client(
        hardware,
        QUERIES
        + """
fd = device()
near = struct.pack("=HHHHi12x", 4, 0, 1, 0, 0)
say(outer=refusal(item, fd, 0x1000d, outer=1), none=refusal(item, fd, 0),
    refused=[item(fd, *each)[0] for each in (
        (0x10011,), (0x1000d, 1), (0x1000d, 0, bytes(64)), (0x1000d, 0, bytes([1]) + bytes(1023)),
        (0x10008, 4 | 9 << 8),
        (0x10005, 0, struct.pack("=HHHHi12x", 4, 0, 1, 2, 0)), (0x10005, 0, struct.pack("=HHHHi12x", 4, 8, 1, 0, 0)),
        (0x10005, 0, near[:-1] + b"x"), (0x10009, 0, struct.pack("=HHIQQQiI", 0, 0, 0, 0, 0, 0, 1, 0)),
        (0x1000c, 0, struct.pack("=HHBBBB", 4, 0, 1, 0, 0, 0)))],
    sizes=[item(fd, number, 4)[0] for number in (0x10005, 0x10009)] + [item(fd, 0x1000c)[0]])
""",
    )
    assert (said["outer"], said["none"]) == ("EINVAL", "EINVAL")
    assert set(said["refused"]) == {-22}
    assert said["sizes"] == [24, 40, 8]


def test_a_stream_is_refused_as_the_driver_refuses_it(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        fd = device()
        tile = (CLASS, 4), (INSTANCE, 0)
        most = 20 * 512 * 1024 // 64
        say(oa=refusal(perf_open, fd, *tile, flags=DISABLED), flag=refusal(perf_open, fd, *tile, flags=EU_STALL | 8),
            none=refusal(perf_open, fd), buffer=refusal(perf_open, fd, (BUFFER, 64 << 10)),
            stopped=refusal(perf_open, fd, (STEPS, 0)), slow=refusal(perf_open, fd, (STEPS, 8)),
            period=refusal(perf_open, fd, (PERIOD, 99_999)), engine=refusal(perf_open, fd, (CLASS, 4), (INSTANCE, 8)),
            half=refusal(perf_open, fd, (CLASS, 4)), unknown=refusal(perf_open, fd, (1007, 1)),
            zero=refusal(perf_open, fd, (0, 1)), reports=refusal(perf_open, fd, (REPORTS, 0)),
            many=refusal(perf_open, fd, (REPORTS, most + 1)), much=refusal(perf_open, fd, *[(STEPS, 1)] * 1007),
            right=[refusal(lambda *p: os.close(perf_open(fd, *p)), *p) for p in (
                tile, [(STEPS, 7)], [(REPORTS, most), (PERIOD, 100_000)], [(INSTANCE, 7), (CLASS, 4)],
                [(CLASS, 1), (INSTANCE, 1)], [(STEPS, 1)] * 1006, [(BUFFER, 128 << 10), (STEPS, 1), *tile])],
            address=refusal(perf_open, fd, count=2))
        """,
    )
    assert set(said.pop("right")) == {""}
    assert said.pop("address") == "EFAULT"
    assert set(said.values()) == {"EINVAL"}


def test_flags_of_the_descriptor_and_of_its_tile(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        fd = device()
        flags = lambda stream, which: fcntl.fcntl(stream, which)
        look = lambda stream: (flags(stream, fcntl.F_GETFD), flags(stream, fcntl.F_GETFL) & os.O_NONBLOCK > 0)
        first = perf_open(fd, (CLASS, 4), (INSTANCE, 2), flags=EU_STALL | DISABLED | CLOEXEC | NONBLOCK)
        # the last instance of several is the one whose tile is sampled
        second = perf_open(fd, (CLASS, 4), (INSTANCE, 0), (INSTANCE, 4), flags=EU_STALL | NONBLOCK)
        say(first=look(first), second=look(second), busy=[refusal(perf_open, fd, (CLASS, 4), (INSTANCE, instance))
            for instance in (0, 7)], default=refusal(perf_open, fd, (STEPS, 1)), disabled=refusal(os.read, first, 64),
            enabled=refusal(os.read, second, 64), part=refusal(os.read, second, 100), no=refusal(os.read, second, 0))
        """,
    )
    assert (said["first"], said["second"]) == ([1, True], [0, True])
    assert (said["busy"], said["default"]) == (["EBUSY", "EBUSY"], "EBUSY")
    assert (said["disabled"], said["enabled"]) == ("EIO", "EAGAIN")
    assert (said["part"], said["no"]) == ("EINVAL", "EINVAL")


@pytest.mark.parametrize(
    ("fault", "error"), [("busy", "EBUSY"), ("busy@0.1", ""), ("eacces", "EACCES"), ("no-eu-stall", "EPERM")]
)
def test_faults_on_demand(hardware: Hardware, fault: str, error: str) -> None:
    hardware.set_faults(fault)
    said = client(
        hardware, "say(tiles=[refusal(perf_open, device(), (CLASS, 4), (INSTANCE, instance)) for instance in (0, 4)])"
    )
    assert said["tiles"] == [error, error or "EBUSY"]


def test_an_older_driver_lacks_a_property_and_a_query(hardware: Hardware) -> None:
    hardware.set_faults("old-driver")
    said = client(
        hardware,
        QUERIES
        + """
fd = device()
say(property=refusal(perf_open, fd, (REPORTS, 1)), without=refusal(perf_open, fd, (STEPS, 1)),
    version=item(fd, 0x1000c, 0, struct.pack("=HHBBBB", 4, 0, 0, 0, 0, 0))[0])
""",
    )
    assert said == {"property": "EINVAL", "without": "", "version": -22}


def test_records_say_whose_they_are_and_whether_some_are_lost(tmp_path: Path, programs: Programs) -> None:
    # given three XeCores of which one dropped records
    with Hardware(tmp_path / "gpu", "max", gts=1, xecores=3, programs=programs) as hardware:
        said = client(
            hardware,
            """
            stream = started()
            GPU.kernel("k", KERNEL, OFFSETS)
            GPU.launch(KERNEL, 0.05)
            GPU.sync()
            early = os.read(stream, 64 << 20)
            print("overflow", flush=True), sys.stdin.readline()
            with Runtime(Path(os.environ["STANDIN_DIR"])) as other:
                other._gpu.send(struct.pack("=II", 4, 1)), other._gpu.recv(64)
            # when they are read
            late = os.read(stream, 64 << 20)
            GPU.launch(KERNEL, 0.05)
            GPU.sync()
            last = os.read(stream, 64 << 20)
            Path(os.environ["STANDIN_DIR"], "records").write_bytes(early + late + last)
            say(reads=[sorted({struct.unpack_from("=HH", data, at) for at in range(48, len(data), 64)})
                for data in (early, late, last)])
            """,
            overflow=lambda: hardware.overflow(1, 0.01, 25),
        )
    ledger = hardware.ledger()
    (overflow,) = ledger.overflows
    # then the records of that XeCore say so, once
    early, late, last = said["reads"]
    assert early == last == [[0, 0], [1, 0], [2, 0]]
    assert late == [[overflow.xecore, 0x100]]
    # and nothing else is in them that was not there without
    got = (hardware.folder / "records").read_bytes()
    assert len(got) // 64 == ledger.records_captured
    assert samples(got, "pvc") == ledger_samples(ledger, "pvc")
    assert not any(got[at] for start in range(0, len(got), 64) for at in range(start + 52, start + 64))


def test_a_reset_is_silent_and_counted(hardware: Hardware) -> None:
    said = client(
        hardware,
        QUERIES
        + """
fd, stream = device(), started()
GPU.kernel("k", KERNEL, OFFSETS)
GPU.launch(KERNEL, 0.02, gt=0)
GPU.sync()
before = resets(fd), refusal(resets, fd, 1), refusal(resets, fd, 0, 1)
fault(FAULT_RESET)
silent = refusal(os.read, stream, 64), refusal(fcntl.ioctl, stream, DISABLE), refusal(fcntl.ioctl, stream, ENABLE)
GPU.launch(KERNEL, 0.02, gt=0)
GPU.sync()
after = resets(fd), resets(fd), refusal(os.read, stream, 64)
os.close(stream)
stream = started()
GPU.launch(KERNEL, 0.02, gt=0)
GPU.sync()
records, lost = drain(stream)
fault(FAULT_RESET)
say(before=before, silent=silent, after=after, records=len(records) // 64, lost=lost, again=resets(fd))
""",
    )
    ledger, told = hardware.ledger(), not os.geteuid()  # the driver tells only root how often
    assert said["before"] == [0, "ENOENT", "EINVAL"]
    assert said["silent"] == ["EAGAIN", "", ""]
    assert said["after"] == [told, told, "EAGAIN"]
    assert (said["records"], said["lost"], said["again"]) == (ledger.records_captured, 0, 2 * told)
    assert ledger.records_captured > 0 < ledger.records_unread


def test_counters_and_sensors(hardware: Hardware) -> None:
    said = client(
        hardware,
        """
        busy = [counter(0x10000a | gt << 60) for gt in (0, 1)]
        energy = [Path(path) for path in sorted(__import__("glob").glob(
            "/sys/class/drm/card0/device/hwmon/hwmon*/energy1_input"))]
        values = lambda: [int(path.read_text()) for path in energy]
        files = [Path(f"/sys/class/drm/card0/gt/gt0/rps_{name}_freq_mhz") for name in ("act", "cur")]
        GPU.kernel("k", KERNEL, OFFSETS)
        first, cold, before = [counts(fd)[1] for fd in busy], [int(file.read_text()) for file in files], values()
        GPU.launch(KERNEL, 0.3, gt=1)
        while int(Path("/sys/class/drm/card0/gt/gt1/rps_act_freq_mhz").read_text()) == cold[0]:
            time.sleep(0.001)
        GPU.sync()
        say(busy=[counts(fd)[1] - old for fd, old in zip(busy, first)], cold=cold,
            more=all(new > old for new, old in zip(values(), before)), sensors=len(energy),
            refused=[refusal(counter, config) for config in (0x10000b, 0x10000a | 2 << 60, engine(ACTIVE), C6)])
        """,
    )
    assert said["busy"][0] == 0
    assert said["busy"][1] == pytest.approx(0.3e9, abs=0.02e9)
    assert (said["cold"], said["sensors"], said["more"]) == ([400, 400], 3, True)
    assert set(said["refused"]) == {"ENOENT"}
