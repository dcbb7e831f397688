# SPDX-License-Identifier: Apache-2.0
"""The files of the stand-in's device: what /dev/dri, /sys and the xe PMU show of it.

`make_tree` writes them below one folder; xe.c shows that folder's `sys/class/drm` as `/sys/class/drm`, and so on. The
links and names are those of a real machine (an Arc B580, a Lunar Lake laptop). What the driver answers through ioctls
is not here but in gpu.c, which alone knows the device's numbers.
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Card:
    """Where a device sits, and what its files say of it."""

    device_id: int
    bridges: tuple[str, ...]  # the PCI path down to the device, below /sys/devices
    mains: int  # GTs that can have an EU-stall stream, one per tile
    media: bool  # a media GT next to each of them
    discrete: bool

    @property
    def address(self) -> str:
        """The PCI address, such as 0000:03:00.0."""
        return self.bridges[-1]

    @property
    def pmu(self) -> str:
        """The PMU's name: perf reserves the colon."""
        return "xe_" + self.address.replace(":", "_")


INTEGRATED = ("pci0000:00", "0000:00:02.0")
DISCRETE = ("pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:01.0", "0000:03:00.0")

CARDS = {
    "bmg": Card(0xE20B, DISCRETE, 1, True, True),
    "lnl": Card(0x64A0, INTEGRATED, 1, True, False),
    "ptl": Card(0xB080, INTEGRATED, 1, True, False),
    "pvc": Card(0x0BD5, DISCRETE, 2, False, True),
    "xe3p": Card(0xD750, INTEGRATED, 1, True, False),
}

PMU_TYPE = 61  # no PMU of a real machine has it, so that perf_event_open refuses it instead of measuring something else

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
FREQUENCY = {"act_freq": "2400", "cur_freq": "2400", "min_freq": "400", "max_freq": "2850", "rp0_freq": "2850"}


def make_tree(root: Path, device: str, gts: int | None = None, real_pmus: Path | None = None) -> Card:
    """Write the tree of `device` below `root`, with `gts` tiles if given, and say what card it is.

    `real_pmus` is where the machine's own PMUs are listed; the listing here gets a link to each.
    """
    card = CARDS[device]
    folder = root / "sys/devices" / Path(*card.bridges)
    _write_device(folder, card, gts or card.mains)
    _write_nodes(root, folder, card)
    _write_pmu(root, card, real_pmus or Path("/sys/bus/event_source/devices"))
    _write(root / "proc/sys/dev/xe", {"observation_paranoid": "1"})
    return card


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def _link(path: Path, to: Path) -> None:
    """A relative link, as sysfs makes them: it leads to the same place in the tree and where the tree is shown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(to, path.parent))


def _write_device(folder: Path, card: Card, tiles: int) -> None:
    identity = {
        "vendor": "0x8086",
        "device": f"0x{card.device_id:04x}",
        "subsystem_vendor": "0x8086",
        "subsystem_device": "0x1100",
        "revision": "0x00",
        "class": "0x030000",
        "uevent": f"DRIVER=xe\nPCI_CLASS=30000\nPCI_ID=8086:{card.device_id:04X}\nPCI_SLOT_NAME={card.address}",
    }
    _write(folder, identity)
    for tile in range(tiles):
        for gt in range(2 if card.media else 1):
            number = tile * (2 if card.media else 1) + gt
            _write(folder / f"tile{tile}" / f"gt{number}" / "freq0", FREQUENCY)
    if card.discrete:
        _write(folder / "hwmon/hwmon3", HWMON)
        _link(folder / "hwmon/hwmon3/device", folder)


def _write_nodes(root: Path, folder: Path, card: Card) -> None:
    """The device nodes are ordinary files here; xe.c makes character devices of them."""
    for name, minor in (("card0", 0), ("renderD128", 128)):
        node = root / "dev/dri" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()
        node.chmod(0o660)
        shown = folder / "drm" / name
        uevent = f"MAJOR=226\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor"
        _write(shown, {"dev": f"226:{minor}", "uevent": uevent})
        _link(shown / "device", folder)
        _link(root / "sys/class/drm" / name, shown)
        _link(root / f"sys/dev/char/226:{minor}", shown)
    _write(folder / "drm/card0/card0-DP-1", {"status": "disconnected"})
    _link(root / "sys/class/drm/card0-DP-1", folder / "drm/card0/card0-DP-1")
    _write(root / "sys/class/drm", {"version": "drm 1.1.0 20060810"})
    _link(root / f"dev/dri/by-path/pci-{card.address}-card", root / "dev/dri/card0")
    _link(root / f"dev/dri/by-path/pci-{card.address}-render", root / "dev/dri/renderD128")
    _link(root / f"sys/bus/pci/devices/{card.address}", folder)
    (root / "sys/bus/pci/drivers/xe").mkdir(parents=True, exist_ok=True)
    _link(folder / "driver", root / "sys/bus/pci/drivers/xe")


def _write_pmu(root: Path, card: Card, real: Path) -> None:
    pmu = root / "sys/devices" / card.pmu
    _write(pmu, {"type": str(PMU_TYPE), "cpumask": "0", "perf_event_mux_interval_ms": "4"})
    _write(pmu / "format", PMU_FORMAT)
    _write(pmu / "events", PMU_EVENTS)
    listing = root / "sys/bus/event_source/devices"
    listing.mkdir(parents=True, exist_ok=True)
    for entry in sorted(real.iterdir()) if real.is_dir() else []:
        if not entry.name.startswith("xe_"):
            (listing / entry.name).symlink_to(entry.resolve())
    _link(listing / card.pmu, pmu)
