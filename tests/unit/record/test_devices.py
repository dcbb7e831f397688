"""The choice of GPUs and rates, the driver's answers, GPUs' names, and the table of `iaprof devices`."""

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from iaprof.basics.errors import UsageError
from iaprof.cli.main import main
from iaprof.record.sources import intel, nvidia, render_nodes, xe
from iaprof.record.sources.render_nodes import DeviceError, device_name
from iaprof.record.sources.stall_driver import Device, Engine, Gt
from unit.record.fakenvidia import NvidiaMachine, machine_of_nvidia
from unit.record.fakenvml import NOT_SUPPORTED

__all__ = ["machine_of_nvidia"]

RATES = (251, 502, 753, 1004, 1255, 1506, 1757)


def device(number: int = 0, address: str = "0000:03:00.0", rates: tuple[int, ...] = RATES, **more: object) -> Device:
    known = {
        "driver": "xe",
        "path": f"/dev/dri/renderD{128 + number}",
        "card": f"card{number}",
        "name": "Battlemage G21 [Arc B580]",
        "pci_address": address,
        "device_id": 0xE20B,
        "revision": 0,
        "gts": (Gt(0, 0, (20, 1, 0), 20),),
        "engines": (Engine(4, 0, 0),),
        "xecore_buffer_bytes": 512 << 10,
        "rates": rates,
    }
    return Device(**(known | more))  # type: ignore[arg-type]


BOTH = [device(0), device(1, "0001:8a:00.0")]


# ---- choosing ----


@pytest.mark.parametrize(
    ("wanted", "cards"),
    [
        ([], ["card0", "card1"]),
        (["card1"], ["card1"]),
        (["0"], ["card0"]),
        (["0000:03:00.0"], ["card0"]),
        (["03:00.0"], ["card0"]),
        (["0001:8A:00.0"], ["card1"]),
        (["renderD129"], ["card1"]),
        (["/dev/dri/renderD129"], ["card1"]),
        (["/dev/dri/card0"], ["card0"]),
        (["card1, 0"], ["card0", "card1"]),
        (["card1", "renderD129", "1"], ["card1"]),
    ],
)
def test_devices_have_many_names(wanted: list[str], cards: list[str]) -> None:
    assert [chosen.card for chosen in intel.choose(BOTH, wanted)] == cards
    assert [each.card for each in BOTH if intel.is_chosen(each, wanted)] == cards


@pytest.mark.parametrize("name", ["card2", "2", "8a:00.0", "renderD1", "", "card", "/dev/dri", "0,card9", "²"])
def test_an_unknown_device_is_reported_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"card0 \(0000:03:00.0\), card1 \(0001:8a:00.0\)"):
        intel.choose(BOTH, [name])


def test_rates_have_names_from_fastest_to_slowest() -> None:
    picked = [intel.pick_rate(device(), name) for name in intel.RATE_NAMES]
    assert picked == sorted(set(picked))
    assert (picked[0], picked[2], picked[-1]) == (RATES[0], RATES[3], RATES[-1])
    assert intel.pick_rate(device(), None) == RATES[-1]


@pytest.mark.parametrize("rates", [(100,), (100, 200), (100, 200, 300)])
def test_rates_have_names_where_there_are_few(rates: tuple[int, ...]) -> None:
    picked = [intel.pick_rate(device(rates=rates), name) for name in intel.RATE_NAMES]
    assert picked == sorted(picked)
    assert {picked[0], picked[-1]} == {rates[0], rates[-1]}


def test_a_rate_in_cycles_has_to_be_one_that_there_is() -> None:
    assert intel.pick_rate(device(), "753") == 753
    for rate in ("754", "0", "-251", "251.0", "quick", "", "9" * 5000, "²"):
        with pytest.raises(UsageError, match=r"fastest, .*251, 502, 753, 1004, 1255, 1506, 1757"):
            intel.pick_rate(device(), rate)


# ---- what the driver answers ----


def mask(gt: int, kind: int, bits: bytes) -> bytes:
    return struct.pack("<HHI", gt, kind, len(bits)) + bits


def test_xecores_are_those_of_either_mask() -> None:
    answer = (
        mask(0, 1, b"\xff\x0f\0\0")  # geometry
        + mask(0, 2, b"\xff\xff\x0f\0")  # compute
        + mask(0, 4, b"\xff\xff")  # EUs of one
        + mask(1, 1, bytes(4))
        + mask(1, 2, b"\x01\0\0\x80")
    )
    assert xe._xecores(answer) == {0: 20, 1: 2}


@pytest.mark.parametrize("answer", [b"", b"\0" * 7, struct.pack("<HHI", 0, 2, 1 << 31), mask(0, 3, b"\xff")])
def test_a_topology_that_says_nothing(answer: bytes) -> None:
    assert sum(xe._xecores(answer).values()) == 0


def test_engines() -> None:
    engines = [(0, 0, 0), (4, 1, 0), (2, 0, 1)]
    answer = struct.pack("<II", 3, 0) + b"".join(struct.pack("<HHHHQQQ", *engine, 0, 0, 0, 0) for engine in engines)
    assert xe._engines(answer) == tuple(Engine(*engine) for engine in engines)
    assert xe._engines(answer[:-1]) == tuple(Engine(*engine) for engine in engines[:2])
    assert xe._engines(b"") == ()


# ---- names ----

DATABASE = """\
# a comment
8085  Another
\te20b  Wrong vendor
8086  Intel Corporation
\t0007  82379AB
\te20b  Battlemage G21 [Arc B580]
\t\t1849 6020  Of a board
# between

\te20c  Battlemage G21 [Arc B570]
8087  A third
\te20d  Wrong vendor
"""


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "pci.ids"
    path.write_text(DATABASE)
    monkeypatch.setattr(render_nodes, "DATABASES", (str(tmp_path / "none"), str(path)))
    render_nodes._devices.cache_clear()
    return path


def test_names_come_from_the_database(database: Path) -> None:
    assert device_name(0x8086, 0xE20B) == "Battlemage G21 [Arc B580]"
    assert device_name(0x8086, 0xE20C) == "Battlemage G21 [Arc B570]"
    assert device_name(0x8086, 0xE20D) == ""
    assert device_name(0x1234, 0xE20B) == ""


def test_without_a_database_there_are_no_names(database: Path) -> None:
    database.unlink()
    assert device_name(0x8086, 0xE20B) == ""


# ---- the command ----


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Device | str]:
    """GPUs by path; a string is why one cannot be sampled."""
    gpus: dict[str, Device | str] = {}

    def open_device(path: str) -> Device:
        found = gpus[path]
        if isinstance(found, str):
            raise DeviceError(f"{path} {found}")
        return found

    monkeypatch.setattr(nvidia, "GPUS", Path("/nowhere"))
    monkeypatch.setattr(render_nodes, "render_nodes", lambda: sorted(gpus))
    monkeypatch.setattr(intel, "open_device", open_device)
    return gpus


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["iaprof", "devices", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_table(
    machine: dict[str, Device | str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a card with two tiles, and one that cannot
    tiles = (Gt(0, 0, (12, 60, 0), 64), Gt(1, 1, (12, 60, 0), 64))
    name = "Ponte Vecchio XT (2 Tile) [Data Center GPU Max 1550]"
    machine["/dev/dri/renderD128"] = device(gts=tiles, name=name, device_id=0x0BD5)
    machine["/dev/dri/renderD999"] = "is driven by i915; EU stalls need Intel's xe driver"
    # when
    assert run(monkeypatch) == 0
    # then
    assert capsys.readouterr().out == (
        "CARD    NODE        PCI ADDRESS   PCI ID     IP      TILES  XECORES  RECORDS\n"
        "card0   renderD128  0000:03:00.0  8086:0bd5  12.60.0     2      128  pvc\n"
        "        Ponte Vecchio XT (2 Tile) [Data Center GPU Max 1550], driven by xe\n"
        "        sampled every 251 (fastest), 502, 753 (fast), 1004 (medium),\n"
        "        1255 (slow), 1506, 1757 (slowest) GPU cycles\n"
        "-       renderD999  device        0000:0000  -           -        -  -\n"
        "        not sampled: it is driven by i915; EU stalls need Intel's xe driver\n"
    )


def test_the_table_fits_a_terminal(
    machine: dict[str, Device | str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine["/dev/dri/renderD128"] = device(
        name="long " * 40, rates=tuple(range(100000, 100040)), gts=(Gt(0, 0, (20, 99, 99), 1000),)
    )
    machine["/dev/dri/renderD129"] = xe.NO_EU_STALLS
    assert run(monkeypatch) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_names_do_not_reach_the_terminal_as_they_are(
    machine: dict[str, Device | str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine["/dev/dri/renderD128"] = device(name="a\x1b[31mb\nc")
    assert run(monkeypatch) == 0
    assert "a\\x1b[31mb\\x0ac" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rates", "said"),
    [((9,), "9 (fastest)"), ((1, 2), "1 (fastest), 2 (slowest)"), ((1, 2, 3), "1 (fastest), 2 (medium), 3 (slowest)")],
)
def test_few_rates_have_one_name_each(
    machine: dict[str, Device | str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    rates: tuple[int, ...], said: str,
) -> None:  # fmt: skip
    machine["/dev/dri/renderD128"] = device(rates=rates)
    assert run(monkeypatch) == 0
    assert f"sampled every {said} GPU cycles\n" in capsys.readouterr().out


def test_records_that_nobody_can_read(
    machine: dict[str, Device | str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine["/dev/dri/renderD128"] = device(gts=(Gt(0, 0, (12, 70, 4), 0),))
    assert run(monkeypatch) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("card0")]
    assert row.split()[4:] == ["12.70.4", "1", "-", "unknown"]


def test_json_has_all_of_it(
    machine: dict[str, Device | str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine["/dev/dri/renderD128"] = device()
    machine["/dev/dri/renderD999"] = "may not be opened"
    assert run(monkeypatch, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    (gpu,), (other,) = said["devices"], said["others"]
    assert (gpu["card"], gpu["node"], gpu["pci_address"], gpu["pci_id"]) == (
        "card0", "renderD128", "0000:03:00.0", "8086:e20b",
    )  # fmt: skip
    assert gpu["gts"] == [{"id": 0, "tile": 0, "ip_version": "20.01.0", "xecores": 20, "layout": "xe2"}]
    assert gpu["engines"] == [{"engine_class": 4, "instance": 0, "gt": 0}]
    assert gpu["rates"] == list(RATES)
    assert (gpu["rate_names"]["fastest"], gpu["rate_names"]["slowest"]) == (RATES[0], RATES[-1])
    assert (other["node"], other["problem"]) == ("renderD999", "/dev/dri/renderD999 may not be opened")


def test_no_gpu_is_one_sentence(
    machine: dict[str, Device | str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("iaprof: no GPU was found: /dev/dri has no render node")
    assert said.err.count("\n") == 1


def test_render_nodes_of_a_machine_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def listdir(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert render_nodes.render_nodes() == []
    monkeypatch.setattr(os, "listdir", lambda path: ["card0", "renderD129", "by-path", "renderD128"])
    assert render_nodes.render_nodes() == ["/dev/dri/renderD128", "/dev/dri/renderD129"]


# ---- NVIDIA's ----


def test_the_table_of_nvidia_s(
    machine: dict[str, Device | str],
    machine_of_nvidia: NvidiaMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine_of_nvidia.install("NVIDIA H200", "NVIDIA H200")
    machine_of_nvidia.nvml.answers["MigMode"] = [1, 1]
    assert run(monkeypatch) == 0
    said = capsys.readouterr().out
    assert said == (
        "CARD     PCI ADDRESS       PCI ID     COMPUTE   SMS  RECORDS\n"
        "nvidia0  0000:01:00.0      10de:2335  9.0       132  pc-samples\n"
        "        NVIDIA H200 (Hopper), divided by MIG\n"
        "        sampled every 262144 GPU cycles, or 32 to 2147483648 in powers of 2\n"
        "nvidia1  0000:02:00.0      10de:2335  9.0       132  pc-samples\n"
        "        NVIDIA H200 (Hopper), divided by MIG\n"
        "        sampled every 262144 GPU cycles, or 32 to 2147483648 in powers of 2\n"
    )
    assert machine_of_nvidia.nvml.opened == 0


def test_both_vendors_have_a_table_and_a_render_node_of_nvidia_s_is_not_intel_s(
    machine: dict[str, Device | str],
    machine_of_nvidia: NvidiaMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # given a render node of NVIDIA's driver beside one of Intel's
    machine["/dev/dri/renderD128"] = device()
    machine["/dev/dri/renderD129"] = "is driven by nvidia-drm; EU stalls need Intel's xe driver"
    machine_of_nvidia.install("NVIDIA A100-SXM4-40GB" + " long" * 30)
    monkeypatch.setattr(render_nodes, "pci_address", lambda path: f"0000:0{2 if path.endswith('128') else 1}:00.0")
    assert run(monkeypatch) == 0
    said = capsys.readouterr().out
    first, second = said.split("\n\n")
    assert "card0" in first and "nvidia-drm" not in said
    assert second.startswith("CARD     PCI ADDRESS") and "nvidia0" in second
    assert max(map(len, said.splitlines())) <= 80
    assert run(monkeypatch, "--json") == 0
    known = json.loads(capsys.readouterr().out)
    assert [gpu["card"] for gpu in known["devices"]] == ["card0", "nvidia0"]
    assert known["others"] == []


def test_json_of_nvidia_s_and_gpus_that_cannot_be_sampled(
    machine: dict[str, Device | str],
    machine_of_nvidia: NvidiaMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine_of_nvidia.install("NVIDIA H200")
    assert run(monkeypatch, "--json") == 0
    (gpu,) = json.loads(capsys.readouterr().out)["devices"]
    assert (gpu["card"], gpu["path"], gpu["name"]) == ("nvidia0", "/dev/nvidia0", "NVIDIA H200")
    assert (gpu["pci_address"], gpu["pci_id"]) == ("0000:01:00.0", "10de:2335")
    assert (gpu["compute_capability"], gpu["generation"], gpu["multiprocessors"]) == ("9.0", "Hopper", 132)
    assert (gpu["mig"], gpu["layout"], gpu["default_rate"]) == (False, "pc-samples", 1 << 18)
    assert (gpu["rates"][0], gpu["rates"][-1], len(gpu["rates"])) == (32, 1 << 31, 27)
    # when it is an old one, whose cores are not known
    machine_of_nvidia.nvml.answers["CudaComputeCapability"] = (6, 0)
    assert run(monkeypatch, "--json") == 0
    known = json.loads(capsys.readouterr().out)
    assert known["devices"] == []
    assert known["others"][0]["problem"].startswith("CUPTI samples instructions on GPUs of compute capability 7.0")
    assert run(monkeypatch) == 0
    assert "        not sampled: CUPTI samples instructions on GPUs of" in capsys.readouterr().out


@pytest.mark.parametrize("has_package", [True, False])
def test_without_nvml_less_is_known(
    machine: dict[str, Device | str],
    machine_of_nvidia: NvidiaMachine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_package: bool,
) -> None:
    machine_of_nvidia.install("NVIDIA H200")
    if not has_package:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    machine_of_nvidia.nvml.fails |= dict.fromkeys(
        ("nvmlDeviceGetNumGpuCores", "nvmlDeviceGetCudaComputeCapability"), NOT_SUPPORTED
    )
    assert run(monkeypatch) == 0
    said = capsys.readouterr().out
    assert "nvidia0  0000:01:00.0      10de:2335  -           -  pc-samples\n        NVIDIA H200\n" in said
    assert ("pip install nvidia-ml-py" in " ".join(said.split())) is not has_package
