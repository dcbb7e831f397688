"""Intel's GPUs that sample EU stalls, whichever of the drivers they have, and the user's choice of GPUs and rates."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence

from iaprof.basics.errors import UsageError
from iaprof.record.sources import render_nodes
from iaprof.record.sources.i915 import I915
from iaprof.record.sources.render_nodes import DRI, DeviceError, driver_name, open_node
from iaprof.record.sources.stall_driver import Device, Driver, OtherDriver
from iaprof.record.sources.xe import Xe

XE, MAX_I915 = Xe(), I915()
_DRIVERS: dict[str, Driver] = {driver.name: driver for driver in (XE, MAX_I915)}
RATE_NAMES = ("fastest", "fast", "medium", "slow", "slowest")

NO_GPU = (
    f"no GPU was found: {DRI} has no render node. iaprof records Intel GPUs under the xe driver, Data Center GPU Max "
    "under Intel's own i915, and NVIDIA's under NVIDIA's; 'lspci -k' lists GPUs and their drivers"
)


def driver_of(device: Device) -> Driver:
    """Returns the driver of a GPU."""
    return _DRIVERS[device.driver]


def sampling_driver(path: str) -> Driver | None:
    """Returns the driver of the GPU behind a render node; None if it samples nothing, or the node may not be opened."""
    try:
        fd = open_node(path)
    except DeviceError:
        return None
    try:
        driver = _DRIVERS.get(driver_name(fd))
    except OSError:
        return None
    finally:
        os.close(fd)
    return driver if driver is not None and driver.samples(path) else None


def find_devices() -> tuple[list[Device], list[str]]:
    """Returns the GPUs that can sample EU stalls, and why other GPUs of their drivers cannot.

    Raises:
        DeviceError: there is no such GPU; the text has the reason for each GPU.
    """
    nodes = render_nodes.render_nodes()
    if not nodes:
        raise DeviceError(NO_GPU)
    devices: list[Device] = []
    problems: list[DeviceError] = []
    for path in nodes:
        try:
            devices.append(open_device(path))
        except DeviceError as error:
            problems.append(error)
    if not devices:
        raise DeviceError("; ".join(map(str, problems)))
    return devices, [str(problem) for problem in problems if not isinstance(problem, OtherDriver)]


def open_device(path: str) -> Device:
    """Asks the driver about the GPU behind a render node.

    Raises:
        DeviceError: another driver drives the GPU, it cannot sample EU stalls, or may not be opened.
    """
    fd = open_node(path)
    name = ""
    try:
        name = driver_name(fd)
        if (driver := _DRIVERS.get(name)) is None:
            raise OtherDriver(path, name)
        return driver.describe(fd, path)
    except (struct.error, OSError) as error:
        raise DeviceError(f"{path} does not answer as the {name or 'a'} driver does: {error}") from error
    finally:
        os.close(fd)


def choose(devices: Sequence[Device], choice: Iterable[str]) -> list[Device]:
    """Returns the chosen devices; all without a choice.

    Args:
        devices: to choose from.
        choice: cards (`card0` or `0`), PCI addresses (with or without the domain 0000) and render nodes (names
            or paths); an entry may be several with commas between them.

    Raises:
        UsageError: an entry matches no device.
    """
    names = _names(choice)
    for name in names:
        if not any(_is_called(device, name) for device in devices):
            existing = ", ".join(f"{device.card or device.path} ({device.pci_address})" for device in devices)
            raise UsageError(f"no GPU that can be recorded is called '{name}': there is {existing or 'none'}")
    return [device for device in devices if is_chosen(device, names)]


def is_chosen(device: Device, choice: Iterable[str]) -> bool:
    """Whether `choose` would choose this device, if each entry matched a device."""
    names = _names(choice)
    return not names or any(_is_called(device, name) for name in names)


def _names(choice: Iterable[str]) -> list[str]:
    return [name.strip() for entry in choice for name in entry.split(",")]


def _is_called(device: Device, name: str) -> bool:
    name = name.lower()
    card = f"card{name}" if name.isdecimal() else name.removeprefix(f"{DRI}/")
    node = os.path.basename(device.path).lower()
    return card in (device.card, node) or device.pci_address.lower() in (name, f"0000:{name}")


def named_rates(device: Device) -> dict[str, int]:
    """Returns a device's rates in GPU cycles by name, the fastest first; of few rates, one has several names."""
    last = len(device.rates) - 1
    quarter = round(last / 4)
    indices = (0, quarter, last // 2, last - quarter, last)
    return {name: device.rates[index] for name, index in zip(RATE_NAMES, indices, strict=True)}


def pick_rate(device: Device, rate: str | None) -> int:
    """Returns the sampling rate, in GPU cycles between samples.

    Args:
        device: the GPU.
        rate: one of RATE_NAMES, or one of the device's rates; None for the slowest, which costs least.

    Raises:
        UsageError: the device has no such rate.
    """
    rates, by_name = device.rates, named_rates(device)
    if rate is None:
        return rates[-1]
    if rate in by_name:
        return by_name[rate]
    cycles = int(rate) if rate.isascii() and rate.isdecimal() and len(rate) < 20 else 0
    if cycles not in rates:
        raise UsageError(
            f"{device.card or device.path} has no sampling rate '{rate}': it has {', '.join(RATE_NAMES)}, or in GPU "
            f"cycles between samples {', '.join(map(str, rates))}"
        )
    return cycles
