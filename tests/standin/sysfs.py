# SPDX-License-Identifier: Apache-2.0
"""The files of the stand-in's cards: what /dev/dri, /sys and their PMUs show of them.

`make_tree` writes them below one folder; xe.c shows that folder's `sys/class/drm` as `/sys/class/drm`, and so on. The
links and names are those of a real machine (an Arc B580, a Lunar Lake laptop). What the driver answers through ioctls
is not here but in gpu.c, which alone knows the devices' numbers. For files whose content moves (hwmon's inputs, freq0)
xe.c answers: it knows them, and the device nodes, by a mark in their time of modification (protocol.h). So a test that
writes into such a file shows the recorder what it wrote.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Card:
    """Where a device sits, and what its files say of it."""

    device_id: int
    mains: int  # GTs that can have an EU-stall stream, one per tile
    media: bool  # a media GT next to each of them
    discrete: bool
    driver: str = "xe"
    model: str = ""  # as gpu.c calls the device
    index: int = 0  # among the cards
    twin: int = 0  # among those that are discrete too, or integrated

    @property
    def bridges(self) -> tuple[str, ...]:
        """The PCI path down to the device, below /sys/devices."""
        n = self.twin
        if not self.discrete:
            return ("pci0000:00", f"0000:00:02.{n}")
        first = 4 * n + 1
        return (
            "pci0000:00",
            f"0000:00:01.{n}",
            f"0000:{first:02x}:00.0",
            f"0000:{first + 1:02x}:01.0",
            f"0000:{first + 2:02x}:00.0",
        )

    @property
    def address(self) -> str:
        """The PCI address, such as 0000:03:00.0."""
        return self.bridges[-1]

    @property
    def pmu(self) -> str:
        """The PMU's name: perf reserves the colon."""
        return f"{self.driver}_" + self.address.replace(":", "_")

    @property
    def node(self) -> str:
        """The name of the node that mode setting uses, such as card0."""
        return f"card{self.index}"

    @property
    def render_node(self) -> str:
        """The name of the render node, such as renderD128."""
        return f"renderD{128 + self.index}"

    @property
    def pmu_type(self) -> int:
        """What perf_event_open calls the PMU."""
        return PMU_TYPE + self.index


CARDS = {
    "bmg": Card(0xE20B, 1, True, True),
    "lnl": Card(0x64A0, 1, True, False),
    "ptl": Card(0xB080, 1, True, False),
    "pvc": Card(0x0BD5, 2, False, True),
    "max": Card(0x0BD5, 2, False, True, "i915", "pvc"),  # the same GPU, under Intel's i915
    "xe3p": Card(0xD750, 1, True, False),
    "future": Card(0xFFF0, 1, True, False),  # one that nobody knows yet
}

PARANOID = {"xe": "observation_paranoid", "i915": "perf_stream_paranoid"}

# enums in protocol.h
PMU_TYPE = 1_000_061
MARK = 1_000_000_000
NODE, ENERGY, TEMPERATURE, FAN, ACTUAL, REQUESTED = range(1, 7)

# As Linux's xe_pmu.c prints them.
PMU_FORMAT = {
    "event": "config:0-11",
    "engine_instance": "config:12-19",
    "engine_class": "config:20-27",
    "function": "config:44-59",
    "gt": "config:60-63",
}
PMU_EVENTS = {
    "gt-c6-residency": "event=0x01",
    "gt-c6-residency.unit": "ms",
    "engine-active-ticks": "event=0x02",
    "engine-total-ticks": "event=0x03",
    "gt-actual-frequency": "event=0x04",
    "gt-actual-frequency.unit": "MHz",
    "gt-requested-frequency": "event=0x05",
    "gt-requested-frequency.unit": "MHz",
}
# As i915_pmu.c of Intel's i915 from outside the Linux kernel prints them, for a GPU of two tiles.
I915_PMU_FORMAT = {"i915_eventid": "config:0-63"}
I915_PMU_EVENTS = {
    "any-engine-group-busy-gt0": "config=0x10000a",
    "any-engine-group-busy-gt0.unit": "ns",
    "any-engine-group-busy-gt1": "config=0x100000000010000a",
    "any-engine-group-busy-gt1.unit": "ns",
}
HWMON = {
    "name": "xe",
    "energy1_input": "123456789012",
    "energy1_label": "card",
    "energy2_input": "98765432109",
    "energy2_label": "pkg",
    "power1_max": "190000000",
    "power1_crit": "380000000",
    "power1_label": "card",
    "temp2_input": "48000",
    "temp2_label": "pkg",
    "temp3_input": "52000",
    "temp3_label": "vram",
    "fan1_input": "1180",
}
I915_HWMON = {"name": "i915", "energy1_input": "123456789012", "in0_input": "800", "power1_max": "600000000"}
MARKED_HWMON = {
    "energy1_input": (ENERGY, 1),
    "energy2_input": (ENERGY, 2),
    "temp2_input": (TEMPERATURE, 2),
    "temp3_input": (TEMPERATURE, 3),
    "fan1_input": (FAN, 1),
}
FREQUENCY = {"act_freq": "2400", "cur_freq": "2400", "min_freq": "400", "max_freq": "2850", "rp0_freq": "2850"}


def place_cards(devices: Sequence[str], gts: int | None = None) -> list[Card]:
    """The cards of a machine with these devices, with `gts` tiles each if given."""
    cards: list[Card] = []
    for name in devices:
        card = CARDS[name]
        twins = sum(other.discrete == card.discrete for other in cards)
        model = card.model or name
        cards.append(replace(card, mains=gts or card.mains, model=model, index=len(cards), twin=twins))
    return cards


def make_tree(root: Path, real_pmus: Path = Path("/sys/bus/event_source/devices")) -> None:
    """Write what is there without any card below `root`.

    `real_pmus` is where the machine's own PMUs are listed; the listing here gets a link to each.
    """
    for folder in ("dev/dri/by-path", "sys/devices", "sys/dev/char", "sys/bus/pci/devices"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    _write(root / "sys/class/drm", {"version": "drm 1.1.0 20060810"})
    listing = root / "sys/bus/event_source/devices"
    listing.mkdir(parents=True, exist_ok=True)
    for entry in sorted(real_pmus.iterdir()) if real_pmus.is_dir() else []:
        if not entry.name.startswith(("xe_", "i915_")):
            (listing / entry.name).symlink_to(entry.resolve())


def add_card(root: Path, card: Card, generation: int) -> None:
    """The card's files appear, its nodes last; it is plugged in for the `generation`th time."""
    folder = _folder(root, card)
    (root / "sys/bus/pci/drivers" / card.driver).mkdir(parents=True, exist_ok=True)
    _write(root / "proc/sys/dev" / card.driver, {PARANOID[card.driver]: "1"})
    _write_device(folder, card, generation)
    _write_pmu(root, card)
    for name, minor in ((card.node, card.index), (card.render_node, 128 + card.index)):
        shown = folder / "drm" / name
        uevent = f"MAJOR=226\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor"
        _write(shown, {"dev": f"226:{minor}", "uevent": uevent})
        _link(shown / "device", folder)
    output = f"{card.node}-DP-1"
    _write(folder / "drm" / card.node / output, {"status": "disconnected"})
    for path, to in _links(root, card):
        _link(path, to)
    for name, minor in ((card.node, card.index), (card.render_node, 128 + card.index)):
        _write_node(root, name, minor, card, generation)


def remove_card(root: Path, card: Card) -> None:
    """The card's files vanish, its nodes first."""
    for name in (card.node, card.render_node):
        (root / "dev/dri" / name).unlink()
    for path, _ in _links(root, card):
        path.unlink()
    shutil.rmtree(root / "sys/devices" / card.pmu)
    shutil.rmtree(_folder(root, card))


def _folder(root: Path, card: Card) -> Path:
    return root / "sys/devices" / Path(*card.bridges)


def _links(root: Path, card: Card) -> Iterator[tuple[Path, Path]]:
    """The links to a card's folders and nodes, and where each leads."""
    folder = _folder(root, card)
    for name in (card.node, card.render_node, f"{card.node}-DP-1"):
        inside = f"{card.node}/{name}" if name.endswith("-DP-1") else name
        yield root / "sys/class/drm" / name, folder / "drm" / inside
    yield root / f"sys/dev/char/226:{card.index}", folder / "drm" / card.node
    yield root / f"sys/dev/char/226:{128 + card.index}", folder / "drm" / card.render_node
    yield root / f"dev/dri/by-path/pci-{card.address}-card", root / "dev/dri" / card.node
    yield root / f"dev/dri/by-path/pci-{card.address}-render", root / "dev/dri" / card.render_node
    yield root / f"sys/bus/pci/devices/{card.address}", folder
    yield root / "sys/bus/event_source/devices" / card.pmu, root / "sys/devices" / card.pmu


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def _mark(path: Path, kind: int, card: Card, number: int, generation: int) -> None:
    """Say in the file's time of modification what xe.c answers for it."""
    time = (MARK + generation) * 1_000_000_000 + kind * 1_000_000 + card.index * 10_000 + number
    os.utime(path, ns=(time, time))


def _link(path: Path, to: Path) -> None:
    """A relative link, as sysfs makes them: it leads to the same place in the tree and where the tree is shown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(to, path.parent))


def _write_device(folder: Path, card: Card, generation: int) -> None:
    pci = f"PCI_CLASS=30000\nPCI_ID=8086:{card.device_id:04X}\nPCI_SLOT_NAME={card.address}"
    identity = {
        "vendor": "0x8086",
        "device": f"0x{card.device_id:04x}",
        "subsystem_vendor": "0x8086",
        "subsystem_device": "0x1100",
        "revision": "0x00",
        "class": "0x030000",
        "uevent": f"DRIVER={card.driver}\n{pci}",
    }
    _write(folder, identity)
    (_write_i915_files if card.driver == "i915" else _write_xe_files)(folder, card, generation)
    _link(folder / "driver", folder.parents[len(card.bridges)] / "bus/pci/drivers" / card.driver)


def _write_xe_files(folder: Path, card: Card, generation: int) -> None:
    for tile in range(card.mains):
        for gt in range(2 if card.media else 1):
            number = tile * (2 if card.media else 1) + gt
            frequencies = folder / f"tile{tile}" / f"gt{number}" / "freq0"
            _write(frequencies, FREQUENCY)
            _mark(frequencies / "act_freq", ACTUAL, card, number, generation)
            _mark(frequencies / "cur_freq", REQUESTED, card, number, generation)
    if card.discrete:
        hwmon = folder / f"hwmon/hwmon{3 + card.index}"
        _write(hwmon, HWMON)
        for name, (kind, number) in MARKED_HWMON.items():
            _mark(hwmon / name, kind, card, number, generation)
        _link(hwmon / "device", folder)


def _write_i915_files(folder: Path, card: Card, generation: int) -> None:
    node = folder / "drm" / card.node
    _write(node, {"prelim_uapi_version": "2.0"})
    hwmons = [folder / f"hwmon/hwmon{3 + 8 * card.index + place}" for place in range(1 + card.mains)]
    for gt in range(card.mains):
        files = node / f"gt/gt{gt}"
        _write(files, {"rps_act_freq_mhz": "1600", "rps_cur_freq_mhz": "1600"})
        _write(files / "error_counter", {"engine_reset": "0"})
        _mark(files / "rps_act_freq_mhz", ACTUAL, card, gt, generation)
        _mark(files / "rps_cur_freq_mhz", REQUESTED, card, gt, generation)
        _write(hwmons[1 + gt], {"name": f"i915_gt{gt}", "energy1_input": "98765432109"})
    _write(hwmons[0], I915_HWMON)
    for number, hwmon in enumerate(hwmons):
        _mark(hwmon / "energy1_input", ENERGY, card, min(1 + number, 2), generation)
        _link(hwmon / "device", folder)


def _write_node(root: Path, name: str, minor: int, card: Card, generation: int) -> None:
    """The device nodes are ordinary files here; xe.c makes character devices of them. They appear as what they are."""
    fresh = root / f"{name}.new"
    fresh.touch()
    fresh.chmod(0o660)
    _mark(fresh, NODE, card, minor, generation)
    fresh.rename(root / "dev/dri" / name)


def _write_pmu(root: Path, card: Card) -> None:
    pmu = root / "sys/devices" / card.pmu
    _write(pmu, {"type": str(card.pmu_type), "cpumask": "0", "perf_event_mux_interval_ms": "4"})
    _write(pmu / "format", I915_PMU_FORMAT if card.driver == "i915" else PMU_FORMAT)
    _write(pmu / "events", I915_PMU_EVENTS if card.driver == "i915" else PMU_EVENTS)
