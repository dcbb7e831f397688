"""Intel's GPUs: which can sample EU stalls, and which of their GTs are free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from iaprof.record.checks.result import Check, Level
from iaprof.record.sources import intel, nvidia, render_nodes
from iaprof.record.sources.render_nodes import DeviceError
from iaprof.record.sources.stall_driver import Device, Driver, Gt, NotPermitted, StreamBusy

GROUP = "GPUs"


def vendors() -> frozenset[str]:
    """Returns the names of the vendors whose GPUs may be recorded here."""
    found = {"intel"} if _nodes() else set()
    return frozenset(found | {"nvidia"} if nvidia.buses() else found)


def drivers() -> list[Driver]:
    """Returns the drivers of Intel's GPUs here that sample EU stalls; xe if there is none."""
    found = {driver.name: driver for path in _nodes() if (driver := intel.sampling_driver(path))}
    return list(found.values()) or [intel.XE]


def _nodes() -> list[str]:
    """Returns the render nodes, but for those of NVIDIA's driver."""
    others = nvidia.buses()
    return [path for path in render_nodes.render_nodes() if render_nodes.pci_address(path) not in others]


def checks() -> Iterator[Check]:
    """Checks each GPU by opening its streams, which has no effect before they are enabled."""
    nodes, has_others = _nodes(), bool(nvidia.buses())
    if not nodes:
        if not has_others:
            yield Check(GROUP, "none", Level.PROBLEM, intel.NO_GPU, "sudo modprobe xe")
        return
    gpu_checks = [check for path in nodes for check in _device(path)]
    if has_others or any(check.level is Level.OK for check in gpu_checks):  # recording works with those
        gpu_checks = [
            replace(check, level=Level.WARNING) if check.level is Level.PROBLEM else check for check in gpu_checks
        ]
    yield from gpu_checks


def _device(path: str) -> Iterator[Check]:
    name = render_nodes.card_name(path) or os.path.basename(path)
    try:
        device = intel.open_device(path)
    except DeviceError as error:
        yield Check(GROUP, name, Level.PROBLEM, f"it {str(error).removeprefix(path + ' ')}")
        return
    for gt in device.gts:
        yield _gt(name if len(device.gts) == 1 else f"{name} GT {gt.id}", device, gt)


def _gt(name: str, device: Device, gt: Gt) -> Check:
    driver = intel.driver_of(device)
    try:
        layout = device.layout(gt)
        os.close(driver.open_stream(device, gt, device.rates[-1]))
    except StreamBusy:
        text = "another profiler holds it: stop that one; this command finds it"
        return Check(GROUP, name, Level.PROBLEM, text, driver.holders)
    except NotPermitted:
        text = "may not be sampled: use sudo, or let everyone sample"
        return Check(GROUP, name, Level.PROBLEM, text, f"sudo sysctl {driver.paranoid}=0")
    except DeviceError as error:
        return Check(GROUP, name, Level.PROBLEM, str(error))
    if guess := device.guess(gt):
        return Check(GROUP, name, Level.WARNING, guess)
    xecores = f", {gt.xecores} XeCores" if gt.xecores else ""
    return Check(
        GROUP, name, Level.OK, f"{device.name}{xecores}, {layout.name} records, driven by {device.driver}; free"
    )
