"""`iaprof devices` and `iaprof check` on the stand-in's hardware: as it should be, with each fault, without root."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration.attacking import NOBODY
from integration.recording import Finished, iaprof
from standin import runtime
from standin.hardware import Hardware
from thorough import thorough, usually

pytestmark = [pytest.mark.bpf, pytest.mark.beside]

# Once as root first, with all modules imported: the other user may not be allowed to read the Python that runs this,
# and what is imported when depends on what else runs.
AS_NOBODY = f"""
import contextlib, importlib, io, os, pkgutil
import iaprof
import iaprof.cli.main as command
for module in pkgutil.walk_packages(iaprof.__path__, "iaprof."):
    if not module.name.rpartition(".")[2].startswith(("__main__", "libiaprof_")):
        importlib.import_module(module.name)
with contextlib.redirect_stdout(io.StringIO()):
    command.app(standalone_mode=False)
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
command.main()
"""


def as_nobody(hardware: Hardware, *words: str) -> Finished:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *words],
        env=os.environ | hardware.env(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def checked(hardware: Hardware) -> dict[str, Any]:
    """What check says as JSON, and whether its exit code agrees."""
    done = iaprof("check", "--json", env=hardware.env())
    said: dict[str, Any] = json.loads(done.out)
    assert done.err == ""
    assert done.code == (0 if said["works"] else 1)
    assert said["works"] is all(check["level"] != "problem" for check in said["checks"])
    return said


def lines(said: dict[str, Any], group: str) -> list[tuple[str, str, str]]:
    return [(each["name"], each["level"], each["text"]) for each in said["checks"] if each["group"] == group]


@pytest.mark.parametrize(
    ("model", "card", "records", "tiles"),
    [
        ("bmg", "8086:e20b", "xe2", 1),
        ("lnl", "8086:64a0", "xe2", 1),
        ("pvc", "8086:0bd5", "pvc", 2),
        ("max", "8086:0bd5", "pvc", 2),
        ("xe3p", "8086:d750", "xe3p", 1),
    ],
)
def test_devices(tmp_path: Path, model: str, card: str, records: str, tiles: int) -> None:
    with Hardware(tmp_path / "gpu", model) as hardware:
        table = iaprof("devices", env=hardware.env())
        said = json.loads(iaprof("devices", "--json", env=hardware.env()).out)
    assert (table.code, table.err) == (0, "")
    headings, row, *_ = table.out.splitlines()
    assert len(headings.split("  ")) > 5
    assert row.split()[:4] == ["card0", "renderD128", hardware.card.address, card]
    assert row.split()[5::2] == [str(tiles), records]
    assert f", driven by {hardware.card.driver}\n" in table.out
    assert max(map(len, table.out.splitlines())) <= 80
    (device,) = said["devices"]
    assert [gt["tile"] for gt in device["gts"]] == list(range(tiles))
    assert device["driver"] == hardware.card.driver
    assert device["rates"] == sorted(device["rates"])


@pytest.mark.parametrize("model", usually(["max"], ["pvc", "max"]))
def test_a_machine_that_is_as_it_should_be(tmp_path: Path, model: str) -> None:
    with Hardware(tmp_path / "gpu", model) as hardware:
        said = checked(hardware)
        # nothing was sampled, and nothing is held: recording can begin at once
        assert checked(hardware)["works"]
    assert said["works"], said
    assert [(name, level) for name, level, _ in lines(said, "GPUs")] == [("card0 GT 0", "ok"), ("card0 GT 1", "ok")]
    assert all(f"pvc records, driven by {hardware.card.driver}; free" in text for _, _, text in lines(said, "GPUs"))
    assert {level for _, level, _ in lines(said, "Kernel")} == {"ok"}
    [paranoid] = [text for name, _, text in lines(said, "Limits") if name == "EU stalls"]
    assert paranoid.startswith(
        "dev.i915.perf_stream_paranoid is 1" if model == "max" else "dev.xe.observation_paranoid"
    )
    assert [name for name, _, _ in lines(said, "BPF")] == ["maps", "programs"]
    assert hardware.ledger().records_produced == 0


FAULTS = {
    "not-xe": ("it is driven by i915", ""),
    "no-eu-stall": ("it has no EU stall sampling", ""),
    "busy": ("another profiler holds it", "sudo find /proc/[0-9]*/fd -lname '*xe_eu_stall*'"),
    "eacces": ("may not be sampled", "sudo sysctl dev.xe.observation_paranoid=0"),
}


def refused(hardware: Hardware, expected: dict[str, tuple[str, str]]) -> None:
    """check finds these problems, by name with what is said and what fixes it, and says so as JSON and as text."""
    found, text = checked(hardware), iaprof("check", env=hardware.env())
    assert not found["works"]
    problems = [each for each in found["checks"] if each["level"] == "problem"]
    assert [(problem["group"], problem["name"]) for problem in problems] == [("GPUs", name) for name in expected]
    for problem, (said, mend) in zip(problems, expected.values(), strict=True):
        assert said in problem["text"]
        assert problem["fix"] == mend
        assert f"  problem  {problem['name']} " in text.out
        assert not mend or f"$ {mend}\n" in text.out
    assert text.code == 1
    assert f"Recording cannot work: {len(expected)} problem" in text.out
    # a path is in one piece, as long as it may be, and so is a command
    lines = [line for line in text.out.splitlines() if " " in line.strip() and not line.strip().startswith("$ ")]
    assert max(map(len, lines)) <= 80, lines


def test_each_fault_is_a_problem(tmp_path: Path) -> None:
    """One GPU that can be sampled would make them warnings: none of these four can."""
    faults = [f"{fault}@{card}" for card, fault in enumerate(FAULTS)]
    with Hardware(tmp_path / "gpu", cards=["bmg"] * len(FAULTS), faults=faults) as hardware:
        refused(hardware, {f"card{card}": told for card, told in enumerate(FAULTS.values())})


@thorough
def test_each_fault_under_intel_s_i915(tmp_path: Path) -> None:
    faults = {
        "no-eu-stall": ("has no EU stall sampling: under Intel's i915 driver, only a Data Center GPU Max can", ""),
        "busy": ("another profiler holds it", "sudo find /proc/[0-9]*/fd -lname '*i915_eu_stall*'"),
        "eacces": ("may not be sampled", "sudo sysctl dev.i915.perf_stream_paranoid=0"),
    }
    cards = [f"{fault}@{card}" for card, fault in enumerate(faults)]
    with Hardware(tmp_path / "gpu", cards=["max"] * len(faults), gts=1, faults=cards) as hardware:
        refused(hardware, {f"card{card}": told for card, told in enumerate(faults.values())})


@thorough
def test_a_max_under_another_driver(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu", "pvc", faults=["not-xe"]) as hardware:
        said = "a Data Center GPU Max needs Intel's own, from outside the kernel (package intel-i915-dkms)"
        refused(hardware, {"card0": (said, "")})


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu", faults=["no-device"]) as hardware:
        refused(hardware, {"none": ("no GPU was found", "sudo modprobe xe")})


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("no-device", 1, "no GPU was found"),
        ("not-xe", 0, "not sampled: it is driven by i915"),
        ("no-eu-stall", 0, "not sampled: it has no EU stall sampling"),
        ("busy", 0, "sampled every 251 (fastest), "),
        ("eacces", 0, "sampled every 251 (fastest), "),
    ],
)
def test_devices_with_faults(tmp_path: Path, fault: str, code: int, said: str) -> None:
    with Hardware(tmp_path / "gpu", faults=[fault]) as hardware:
        done = iaprof("devices", env=hardware.env())
    assert done.code == code
    assert said in (done.err if code else done.out)
    assert (done.out == "") is bool(code)


@thorough
def test_a_gpu_that_is_recorded_is_held(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        holder = (
            "from iaprof.record.sources import intel; device, = intel.find_devices()[0]; "
            "fd = intel.driver_of(device).open_stream(device, device.gts[0], device.rates[0]); "
            "print('open', flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", holder], env=os.environ | hardware.env(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            held = checked(hardware)
            process.communicate("\n")
        assert not held["works"]
        assert "another profiler" in lines(held, "GPUs")[0][2]
        assert checked(hardware)["works"]


# ---- without root ----


@pytest.fixture
def everyones(folder: Path) -> Iterator[Hardware]:
    """Hardware whose files everyone can reach."""
    with Hardware(folder / "gpu") as hardware:
        (hardware.folder / "gpu.sock").chmod(0o777)
        yield hardware


@thorough
def test_without_root(everyones: Hardware) -> None:
    done = as_nobody(everyones, "check", "--json")
    assert (done.code, done.err) == (1, "")
    said = {each["name"]: each for each in json.loads(done.out)["checks"]}
    assert (said["root"]["level"], said["root"]["fix"]) == ("problem", "sudo iaprof check")
    assert said["maps"]["text"] == "unknown without root"
    assert "programs" not in said
    assert said["card0"]["text"] == "it may not be opened: run iaprof with sudo"
    assert said["Python"]["text"] == "only root can tell whether running Pythons will be seen"


@thorough
def test_devices_need_no_root_where_nodes_can_be_opened(everyones: Hardware) -> None:
    # given nodes of root's alone
    refused = as_nobody(everyones, "devices")
    assert (refused.code, refused.err) == (0, "")
    assert "not sampled: it may not be opened: run iaprof with sudo" in refused.out
    # when everyone may open them
    for node in (everyones.folder / "sysfs/dev/dri").glob("render*"):
        node.chmod(0o666)
    done = as_nobody(everyones, "devices")
    # then
    assert (done.code, done.err) == (0, "")
    assert done.out == iaprof("devices", env=everyones.env()).out
    assert "sampled every 251 (fastest), " in done.out


# ---- what processes have mapped ----


def mapping(*paths: Path) -> subprocess.Popen[str]:
    """A process that has these files mapped; ends with its stdin."""
    code = (
        "import mmap, sys\nfiles = [open(path, 'rb') for path in sys.argv[1:]]\nkept = [mmap.mmap(file.fileno(), 0, "
        "flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC) for file in files]\n"
        "print('mapped', flush=True)\ninput()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


@thorough
def test_libraries_that_processes_have_mapped(tmp_path: Path) -> None:
    # given one with probes, one without, one that is broken, and names that would do things to a terminal
    hostile = tmp_path / "\x1b[31m\x07"
    hostile.mkdir()
    good, plain, broken = (tmp_path / name / "libze_intel_gpu.so.1" for name in ("good", "plain", "broken"))
    for path in (good, plain, broken):
        path.parent.mkdir()
    shutil.copy(runtime.build().library, good)
    (tmp_path / "plain.c").write_text("int f(int *p) { return *p; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", plain, tmp_path / "plain.c"], check=True)
    broken.write_bytes(b"\x7fELF\x02\x01" + os.urandom(10000))
    odd = Path(shutil.copy(good, hostile / "libze_intel_gpu.so.1"))
    # when
    with Hardware(tmp_path / "gpu") as hardware, mapping(good, plain, broken, odd) as process:
        said = checked(hardware)
        text = iaprof("check", env=hardware.env()).out
        process.communicate("\n")
    # then
    drivers = {each["file"]: each for each in said["checks"] if each["name"] == "driver"}
    assert drivers[str(good)]["level"] == "ok"
    assert drivers[str(plain)]["text"].startswith("it has no probes, and its build (")
    assert drivers[str(plain)]["fix"] == f"sudo iaprof calibrate {plain}"
    assert drivers[str(broken)]["level"] == "warning"
    assert said["works"]
    assert "\x1b" not in text
    assert "\x07" not in text
    assert str(tmp_path / "\\x1b[31m\\x07" / "libze_intel_gpu.so.1") in drivers


# ---- on a terminal ----


@thorough
def test_colour_only_on_a_terminal(tmp_path: Path) -> None:
    with Hardware(tmp_path / "gpu") as hardware:
        assert "\x1b" not in iaprof("check", env=hardware.env()).out
        shown = on_a_terminal(hardware)
        plain = on_a_terminal(hardware, NO_COLOR="1")
    assert "\x1b[32mok\x1b[0m" in shown
    assert "\x1b" not in plain


def on_a_terminal(hardware: Hardware, **environment: str) -> str:
    ours, its = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "iaprof", "check"],
        env=os.environ | {"TERM": "xterm"} | hardware.env() | environment, stdout=its, stdin=its, stderr=its,
    ):  # fmt: skip
        os.close(its)
        shown = b""
        try:
            while data := os.read(ours, 1 << 16):
                shown += data
        except OSError:  # EIO: the other end is closed
            pass
    os.close(ours)
    return shown.decode()
