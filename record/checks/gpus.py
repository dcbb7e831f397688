"""Intel's GPUs: which can sample EU stalls, and which of their GTs are free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from iaprof.record.checks.result import Check, Level
from iaprof.record.sources import nvidia, xe

GROUP = "GPUs"
HOLDERS = "sudo find /proc/[0-9]*/fd -lname '*xe_eu_stall*'"  # see xe_eu_stall.c, Linux 6.15


def vendors() -> frozenset[str]:
    """Returns the names of the vendors whose GPUs may be recorded here."""
    found = {"intel"} if _nodes() else set()
    return frozenset(found | {"nvidia"} if nvidia.buses() else found)


def _nodes() -> list[str]:
    """Returns the render nodes, but for those of NVIDIA's driver."""
    others = nvidia.buses()
    return [path for path in xe.render_nodes() if xe.pci_address(path) not in others]


def checks() -> Iterator[Check]:
    """Checks each GPU by opening its streams, which has no effect before they are enabled."""
    nodes, has_others = _nodes(), bool(nvidia.buses())
    if not nodes:
        if not has_others:
            yield Check(GROUP, "none", Level.PROBLEM, xe.NO_GPU, "sudo modprobe xe")
        return
    gpu_checks = [check for path in nodes for check in _device(path)]
    if has_others or any(check.level is Level.OK for check in gpu_checks):  # recording works with those
        gpu_checks = [
            replace(check, level=Level.WARNING) if check.level is Level.PROBLEM else check for check in gpu_checks
        ]
    yield from gpu_checks


def _device(path: str) -> Iterator[Check]:
    name = xe.card_name(path) or os.path.basename(path)
    try:
        device = xe.open_device(path)
    except xe.DeviceError as error:
        yield Check(GROUP, name, Level.PROBLEM, f"it {str(error).removeprefix(path + ' ')}")
        return
    for gt in device.gts:
        yield _gt(name if len(device.gts) == 1 else f"{name} GT {gt.id}", device, gt)


def _gt(name: str, device: xe.Device, gt: xe.Gt) -> Check:
    try:
        layout = device.layout(gt)
        os.close(xe.open_stream(device, gt, device.rates[-1]))
    except xe.StreamBusy:
        text = "another profiler holds it: stop that one; this command finds it"
        return Check(GROUP, name, Level.PROBLEM, text, HOLDERS)
    except xe.NotPermitted:
        text = "may not be sampled: use sudo, or let everyone sample"
        return Check(GROUP, name, Level.PROBLEM, text, "sudo sysctl dev.xe.observation_paranoid=0")
    except xe.DeviceError as error:
        return Check(GROUP, name, Level.PROBLEM, str(error))
    if guess := device.guess(gt):
        return Check(GROUP, name, Level.WARNING, guess)
    xecores = f", {gt.xecores} XeCores" if gt.xecores else ""
    return Check(GROUP, name, Level.OK, f"{device.name}{xecores}, {layout.name} records; free")
