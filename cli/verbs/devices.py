"""`iaprof devices`: lists the GPUs and what each can sample."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iaprof.basics.clean import clean
from iaprof.basics.errors import IaprofError
from iaprof.cli.terminal.stdout import utf8_stdout

if TYPE_CHECKING:
    from iaprof.record.sources import nvidia
    from iaprof.record.sources.stall_driver import Device

EXAMPLES = """\b
Examples:
  iaprof devices                         the GPUs of this machine
  iaprof devices --json | jq '.devices[].rates'
  sudo iaprof record --device card1      records one of them
"""
_WIDTH = 80
_HEADINGS = ("CARD", "NODE", "PCI ADDRESS", "PCI ID", "IP", "TILES", "XECORES", "RECORDS")
_ROW = "{:<7} {:<11} {:<13} {:<10} {:<7} {:>5}  {:>7}  {}"
_NVIDIA_HEADINGS = ("CARD", "PCI ADDRESS", "PCI ID", "COMPUTE", "SMS", "RECORDS")
_NVIDIA_ROW = "{:<8} {:<17} {:<10} {:<8} {:>4}  {}"
_MARGIN = " " * 8


def devices(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the GPUs.

    Lists their names, addresses and sampling rates, or why they cannot be sampled. Needs no root if you may open
    the render nodes.
    """
    from iaprof.record.sources import intel, nvidia, render_nodes

    of_nvidia, less = nvidia.devices()
    known = {device.pci_address for device in of_nvidia}
    nodes = [path for path in render_nodes.render_nodes() if render_nodes.pci_address(path) not in known]
    if not nodes and not of_nvidia:
        if as_json:
            _print_json([], [])
        raise IaprofError(intel.NO_GPU)
    found: list[Device] = []
    others: list[dict[str, str]] = []
    for path in nodes:
        try:
            found.append(intel.open_device(path))
        except render_nodes.DeviceError as error:
            others.append(_other(path, str(error)))
    if as_json:
        rows = [_as_dict(device) for device in found]
        rows += [asdict(device) for device in of_nvidia if not device.problem]
        _print_json(rows, [*others, *(asdict(device) for device in of_nvidia if device.problem)])
        return
    with utf8_stdout():
        if nodes:
            _show_all(found, others)
        if nodes and of_nvidia:
            print()
        if of_nvidia:
            _show_nvidia(of_nvidia, less)


def _print_json(devices: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    with utf8_stdout():
        print(json.dumps({"devices": devices, "others": others}, indent=2))


def _show_nvidia(devices: list[nvidia.Device], less: str) -> None:
    print(_NVIDIA_ROW.format(*_NVIDIA_HEADINGS))
    for device in devices:
        numbers = device.compute_capability or "-", device.multiprocessors or "-"
        print(_NVIDIA_ROW.format(device.card or "-", device.pci_address, device.pci_id, *numbers, device.layout))
        generation = f" ({device.generation})" if device.generation else ""
        _explain(f"{device.name or 'unnamed'}{generation}{', divided by MIG' if device.mig else ''}")
        if device.problem:
            _explain(f"not sampled: {device.problem}")
        else:
            first, last = device.rates[0], device.rates[-1]
            _explain(f"sampled every {device.default_rate} GPU cycles, or {first} to {last} in powers of 2")
    if less:
        _explain(f"not all is known: {less}")


def _show_all(devices: list[Device], others: list[dict[str, str]]) -> None:
    print(_ROW.format(*_HEADINGS))
    for device in devices:
        _show(device)
    for other in others:
        print(_ROW.format(*(other[key] for key in ("card", "node", "pci_address", "pci_id")), "-", "-", "-", "-"))
        _explain(other["name"])
        _explain(f"not sampled: it {other['problem'].removeprefix(other['path'] + ' ')}")


def _show(device: Device) -> None:
    layouts = sorted({_layout(device, index) for index in range(len(device.gts))})
    xecores = sum(gt.xecores for gt in device.gts)
    print(
        _ROW.format(
            device.card or "-",
            os.path.basename(device.path),
            device.pci_address,
            _pci_id(device),
            _ip_version(device, 0),
            len({gt.tile for gt in device.gts}),
            xecores or "-",
            ", ".join(layouts),
        ).rstrip()
    )
    _explain(f"{device.name}, driven by {device.driver}")
    _explain(f"sampled every {', '.join(_named(device))} GPU cycles")


def _named(device: Device) -> list[str]:
    """Its rates, as `record --rate` takes them."""
    from iaprof.record.sources.intel import named_rates

    names: dict[int, str] = {}
    for name, rate in named_rates(device).items():
        names[rate] = name if rate != device.rates[0] else names.get(rate, name)
    return [f"{rate} ({names[rate]})" if rate in names else str(rate) for rate in device.rates]


def _explain(text: str) -> None:
    """Prints wrapped lines below a device; never breaks a line before a parenthesis."""
    bound = clean(text).replace(" (", "\N{NO-BREAK SPACE}(")
    for line in textwrap.wrap(bound, _WIDTH - len(_MARGIN), break_on_hyphens=False):
        print(_MARGIN + line.replace("\N{NO-BREAK SPACE}", " "))


def _other(path: str, problem: str) -> dict[str, str]:
    """What is known of a GPU that cannot be sampled."""
    from iaprof.record.sources import render_nodes

    vendor, device = (render_nodes.pci_number(path, name) for name in ("vendor", "device"))
    return {
        "card": render_nodes.card_name(path) or "-",
        "node": os.path.basename(path),
        "path": path,
        "pci_address": render_nodes.pci_address(path),
        "pci_id": f"{vendor:04x}:{device:04x}",
        "name": render_nodes.device_name(vendor, device),
        "problem": problem,
    }


def _as_dict(device: Device) -> dict[str, Any]:
    from iaprof.record.sources.intel import named_rates

    known = asdict(device)
    for index, gt in enumerate(known["gts"]):
        gt["ip_version"] = _ip_version(device, index)
        gt["layout"] = _layout(device, index)
    return {
        "node": os.path.basename(device.path),
        "pci_id": _pci_id(device),
        **known,
        "rate_names": named_rates(device),
    }


def _pci_id(device: Device) -> str:
    return f"8086:{device.device_id:04x}"


def _ip_version(device: Device, gt: int) -> str:
    major, minor, revision = device.gts[gt].ip_version
    return f"{major}.{minor:02}.{revision}"


def _layout(device: Device, gt: int) -> str:
    from iaprof.record.sources.render_nodes import DeviceError

    try:
        return device.layout(device.gts[gt]).name
    except DeviceError:
        return "unknown"
