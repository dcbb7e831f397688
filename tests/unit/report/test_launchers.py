"""The launching function: a Python function, or the innermost one outside GPU runtimes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from iaprof.formats.profile import CodeKind, Launch, Origin
from iaprof.report.views.launchers import by_launcher, launcher
from unit.in_process import iaprof

REAL = Path(__file__).resolve().parents[2] / "data" / "captures" / "format-7.parquet"
APP, ZE, SYCL, PYTHON = "/opt/app", "/usr/lib/libze_intel_gpu.so.1", "/opt/libsycl.so.8.0", "/usr/bin/python3.11"
Frame = tuple[str, str]
LAUNCH = ("zeCommandListAppendLaunchKernel", ZE)


def launch(*frames: Frame, origins: bool = True) -> Launch:
    """A launch with these frames, outermost first, each with its file."""
    kinds = {True: CodeKind.UNKNOWN, False: CodeKind.C}
    made = tuple(Origin(kinds[name.startswith("[")], module) for name, module in frames)
    return Launch("app", 7, tuple(name for name, _ in frames), origins=made if origins else ())


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ((("main", APP), ("train", APP), LAUNCH), "train"),
        ((("main", APP), ("train", APP), ("helper", SYCL), ("[libur.so+0x5]", SYCL), ("x", ZE), LAUNCH), "train"),
        ((("main", APP), ("train", APP), ("void sycl::queue::submit<int>(int)", APP), LAUNCH), "train"),
        ((("main", APP), ("train", APP), ("clEnqueueNDRangeKernel", "/x.so"), ("[anon]", "")), "train"),
        ((("main", APP), ("[app+0x77]", APP), LAUNCH), "main"),
        ((("py::main:/a.py", PYTHON), ("py::step:/a.py", PYTHON), ("call", "/x.so"), LAUNCH), "py::step:/a.py"),
        ((("py::step:/a.py", PYTHON), ("py::[unknown]", PYTHON), ("call", "/x.so"), LAUNCH), "py::step:/a.py"),
        ((("py::[unknown]", PYTHON), ("call", "/x.so"), LAUNCH), "call"),
        (([("[x+0x1]", APP), LAUNCH][1],), LAUNCH[0]),
        ((("[stack lost]", ""),), "[stack lost]"),
        ((), "[no stack]"),
    ],
)
def test_the_launcher_of_a_stack(frames: tuple[Frame, ...], expected: str) -> None:
    assert launcher(launch(*frames)) == expected


def test_launchers_of_imported_stacks() -> None:
    frames = (("main", ""), ("train", ""), ("[unknown]", ""), LAUNCH)
    assert launcher(launch(*frames, origins=False)) == "train"
    assert launcher(None) == "[unknown process]"


def test_samples_are_added_up_by_launcher() -> None:
    launches = [launch(("a", APP)), launch(("main", APP), ("a", APP)), launch(("b", APP)), None, launch(("none", APP))]
    of, counts = np.array([0, 1, 2, 2, 3]), np.array([1, 2, 3, 4, 5], np.uint64)
    assert list(by_launcher(launches, of, counts).items()) == [("b", 7), ("[unknown process]", 5), ("a", 3)]


def test_verbs_name_python_functions() -> None:
    # given the launch stacks
    stacks: dict[str, int] = {}
    for line in iaprof("report", REAL, "-q", "--frames", "cpu").out.splitlines():
        stack, _, count = line.rpartition(" ")
        last = [frame for frame in stack.split(";") if frame.startswith("py::")][-1]
        stacks[last] = stacks.get(last, 0) + int(count)
    # then
    entries = json.loads(iaprof("top", REAL, "-q", "--by", "launcher", "--json").out)["entries"]
    assert {entry["launcher"]: entry["samples"] for entry in entries} == stacks
    assert len(stacks) > 5
    (kernel,) = json.loads(iaprof("annotate", REAL, "multiply_basic", "-q", "--json").out)["kernels"]
    assert {each["launcher"]: each["samples"] for each in kernel["launchers"]} == stacks
    most = max(stacks, key=lambda name: stacks[name])
    assert most == "py::Layer.forward:/opt/example/train.py"
    text = iaprof("annotate", REAL, "multiply_basic", "-q").out
    assert f"launched by\n{100 * stacks[most] / sum(stacks.values()):>7.1f} %  {most}\n" in text
    assert f"{'':11}and {len(stacks) - 5} more\n" in text
    assert f"0.0                  {most}\n" in iaprof("diff", REAL, REAL, "-q", "--by", "launcher").out
