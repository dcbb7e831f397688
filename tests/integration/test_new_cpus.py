"""CPUs that come online while they are recorded."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from iaprof.bpf import perf_event, sideband
from iaprof.bpf.perf_event import IOC_DISABLE, online_cpus
from iaprof.bpf.probes.launches import LaunchProbes
from iaprof.bpf.sideband import SideBandBuffers
from iaprof.formats.wire.sideband import SideBand as Band, decode
from iaprof.record.sources.cpu_samples import CpuSamples
from iaprof.record.sources.side_band import SideBand
from waiting import until

pytestmark = [pytest.mark.root, pytest.mark.bpf, pytest.mark.beside]
FIRST, *LATER = online_cpus()


class Journal:
    """Keeps what a source writes."""

    def __init__(self) -> None:
        self.losses: list[tuple[str, str]] = []
        self.frames: list[bytes] = []

    def loss(self, source: str, what: str, count: int | None, detail: str, begin: int, end: int) -> None:
        assert (what, count) == ("lost", None)
        assert begin <= end
        self.losses.append((source, detail))

    def write(self, _: object, data: bytes, **__: object) -> None:
        self.frames.append(bytes(data))


class Loop:
    """Calls what a source asks for when the test says so."""

    action: Callable[[], object] | None = None

    def wait_for(self, *_: object) -> None:
        pass

    def keep_calling(self, _: object, action: Callable[[], object]) -> None:
        self.action = action

    def stop_calling(self, _: object) -> None:
        self.action = None

    def is_calling(self, _: object) -> bool:
        return False


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first CPU seems to be online, until `show`."""
    assert LATER, "this machine has one CPU"
    monkeypatch.setattr(perf_event, "online_cpus", lambda: [FIRST])


def show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_event, "online_cpus", online_cpus)


def on_cpu(cpu: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["taskset", "-c", str(cpu), "sleep", "600"])


@pytest.mark.usefixtures("hidden")
def test_the_side_band_of_a_new_cpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    source, journal, loop = SideBand(Mock(), Mock(), Mock()), Journal(), Loop()
    source.start(journal, loop)  # type: ignore[arg-type]
    # given a process that begins on a CPU that is not watched
    with on_cpu(LATER[0]) as before:
        until(lambda: Path(f"/proc/{before.pid}/comm").read_text() == "sleep\n")
        source.losses()
        assert journal.losses == []
        # when the CPU comes online, and another process begins there
        show(monkeypatch)
        source.losses()
        while loop.action:
            loop.action()
        with on_cpu(LATER[0]) as after:
            until(lambda: Path(f"/proc/{after.pid}/comm").read_text() == "sleep\n")
            source.read()
            band = Band()
            for data in journal.frames:
                decode(data, band)
            before.kill()
            after.kill()
    source.losses()
    source.close()
    # then both are known, the first by what runs at that time; and what may be missing is a loss
    assert {before.pid, after.pid} <= set(band.mappings.pid)
    ((name, detail),) = journal.losses
    assert name == "side-band"
    assert detail.startswith(f"CPU{'s' if len(LATER) > 1 else ''} {LATER[0]}")
    assert "came online" in detail


@pytest.mark.usefixtures("hidden")
def test_a_cpu_that_goes_leaves_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch)
    buffers = SideBandBuffers()
    with on_cpu(LATER[0]) as process:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        process.kill()
    monkeypatch.setattr(perf_event, "online_cpus", lambda: [FIRST])
    assert buffers.follow_cpus() == []
    band = Band()
    for _, data in buffers.read():
        decode(data, band)
    assert process.pid in band.mappings.pid
    show(monkeypatch)
    assert buffers.follow_cpus() == LATER
    buffers.close()


@pytest.mark.usefixtures("hidden")
def test_a_new_cpu_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = LaunchProbes()
    source, journal = CpuSamples({"on_sample": probes.maps["on_sample"]}, 499), Journal()
    source.start(journal, Loop())  # type: ignore[arg-type]
    source.resume()
    busy = subprocess.Popen(["taskset", "-c", str(LATER[0]), "sh", "-c", "while :; do :; done"])

    def used_s() -> float:
        fields = Path(f"/proc/{busy.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def samples_of(seconds: float) -> int:
        end, parts = used_s() + seconds, []
        while used_s() < end:
            time.sleep(0.02)
            parts.append(probes.samples.read())
        return int((np.concatenate(parts)["pid"] == busy.pid).sum())

    until(lambda: Path(f"/proc/{busy.pid}/comm").read_text() == "sh\n")  # taskset may begin on another CPU
    probes.samples.read()
    before = samples_of(0.5)
    show(monkeypatch)
    source.losses()
    after = samples_of(0.5)
    busy.kill()
    busy.wait()
    source.losses()
    source.close()
    source.losses()  # as at the end of a recording, when nothing is opened again
    probes.close()
    assert (before, after > 100) == (0, True)
    ((name, detail),) = journal.losses
    assert name == "cpu samples"
    assert detail.endswith("samples there")


def test_a_cpu_that_goes_and_comes_back_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    source, journal, loop = SideBand(Mock(), Mock(), Mock()), Journal(), Loop()
    source.start(journal, loop)  # type: ignore[arg-type]
    source.losses()
    assert journal.losses == []
    # when events do not count any more, as the kernel leaves those of a CPU that goes
    buffer = list(source._buffers._events.values())[-1]
    fcntl.ioctl(buffer.fds[-1], IOC_DISABLE, 0)
    source.losses()  # it counted since the last look
    source.losses()
    # then what happens there is recorded again, and a loss says what may be missing
    while loop.action:
        loop.action()
    with on_cpu(buffer.cpu) as process:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n")
        process.kill()
    journal.frames.clear()
    source.read()
    band = Band()
    for data in journal.frames:
        decode(data, band)
    source.close()
    assert process.pid in band.mappings.pid
    ((_, detail),) = journal.losses
    assert detail.startswith(f"CPU {buffer.cpu} came online")


def test_a_cpu_is_sampled_again_after_it_has_gone_and_come_back() -> None:
    probes = LaunchProbes()
    source, journal = CpuSamples({"on_sample": probes.maps["on_sample"]}, 499), Journal()
    source.start(journal, Loop())  # type: ignore[arg-type]
    source.losses()  # it does not run yet, so nothing counts
    assert journal.losses == []
    source.resume()
    source.losses()
    before = dict(source._clock._events)
    fcntl.ioctl(before[FIRST], IOC_DISABLE, 0)
    for _ in range(3):
        source.losses()
    assert [detail.split(",")[0] for _, detail in journal.losses] == [f"CPU {FIRST} came online"]
    assert source._clock._events.keys() == before.keys()
    source.close()
    probes.close()


@pytest.mark.usefixtures("hidden")
def test_of_several_new_cpus_some_of_which_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    source, journal = SideBand(Mock(), Mock(), Mock()), Journal()
    source.start(journal, Loop())  # type: ignore[arg-type]
    real, last = sideband.CpuSideBand, LATER[-1] + 1

    def opened(cpu: int, pages: int) -> sideband.CpuSideBand:
        if cpu == last:
            raise OSError(12, "Cannot allocate memory")
        return real(cpu, pages)

    monkeypatch.setattr(sideband, "CpuSideBand", opened)
    monkeypatch.setattr(perf_event, "online_cpus", lambda: [FIRST, *LATER, last])
    for _ in range(3):
        source.losses()
    source.close()
    # then both is told: what came, and what cannot be watched
    first, second = (detail for _, detail in journal.losses)
    assert "came online, and w" in first
    assert second.startswith("a CPU came online that cannot be watched (perf_event_open: Cannot allocate memory)")


@pytest.mark.usefixtures("hidden")
def test_a_recording_does_not_begin_where_one_cpu_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_event, "online_cpus", lambda: [FIRST, *LATER])
    real = sideband.CpuSideBand

    def opened(cpu: int, pages: int) -> sideband.CpuSideBand:
        if cpu == LATER[-1]:
            raise OSError(12, "Cannot allocate memory")
        return real(cpu, pages)

    monkeypatch.setattr(sideband, "CpuSideBand", opened)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        SideBandBuffers()


@pytest.mark.usefixtures("hidden")
def test_a_cpu_that_cannot_be_watched_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source, journal = SideBand(Mock(), Mock(), Mock()), Journal()
    source.start(journal, Loop())  # type: ignore[arg-type]

    def refused(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(sideband, "CpuSideBand", refused)
    show(monkeypatch)
    for _ in range(3):
        source.losses()
    source.close()
    assert [detail for _, detail in journal.losses] == [
        "a CPU came online that cannot be watched (perf_event_open: Cannot allocate memory): "
        "mappings, names, forks and exits there"
    ]
