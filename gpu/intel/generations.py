"""The table of Intel's generations. A new one needs a row here, and a layout in records.py if its records are new.

Sources: drivers/gpu/drm/xe/xe_pci.c, Linux 6.18 (versions as in GMD_ID, names); iga_platforms_list of libiga64.so.2,
Intel Graphics Compiler 2 (platforms).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from iaprof.gpu.intel.instruction_set import Platform
from iaprof.gpu.intel.records import PVC, XE2, XE3P, RecordLayout

_FIRST_MAJOR_TO_GUESS = 20  # Xe2: since then, a new generation's records are likely those of the one before

ANY = None
"""As a minor version: all those that no other row has."""


@dataclass(frozen=True, eq=False)
class Generation:
    """GPUs with the same stall records and instruction set."""

    name: str  # the vendor's name, for headers, tables and messages: "Xe2"
    versions: tuple[tuple[int, int | None], ...]  # graphics IP versions: major, and minor or ANY
    layout: RecordLayout | None  # of stall records; None: the hardware does not sample stalls
    platform: Platform | None  # the decoder's name of the instruction set; None: no decoder
    devices: Mapping[int | None, str] = field(default_factory=dict)  # names of GPUs, by minor version or ANY

    def has(self, major: int, minor: int) -> bool:
        """Whether a graphics IP version belongs to this generation."""
        return (major, minor) in self.versions or (major, ANY) in self.versions

    def device(self, minor: int) -> str:
        """Returns the name of GPUs with that minor version; "" if unknown."""
        return self.devices.get(minor) or self.devices.get(ANY, "")


GENERATIONS = (
    Generation("Xe-HP", ((12, 50),), None, Platform.XE_HP),
    # DG2, and Meteor Lake and Arrow Lake with the same instruction set.
    Generation("Xe-HPG", tuple((12, minor) for minor in (55, 56, 57, 70, 71, 73, 74)), None, Platform.XE_HPG),
    Generation("Xe-HPC", ((12, 60),), PVC, Platform.XE_HPC, {60: "Ponte Vecchio (Xe-HPC)"}),
    Generation("Xe-HPC", ((12, 61),), None, Platform.XE_HPC),
    Generation(
        "Xe2",
        ((20, ANY),),
        XE2,
        Platform.XE2,
        {1: "Battlemage (Xe2)", 2: "Battlemage (Xe2)", 4: "Lunar Lake (Xe2)"},
    ),
    Generation(
        "Xe3",
        ((30, ANY),),
        XE2,
        Platform.XE3,
        {0: "Panther Lake (Xe3)", 1: "Panther Lake (Xe3)", ANY: "GPU of the Xe3 generation"},
    ),
    Generation("Xe3P", ((35, ANY),), XE3P, Platform.XE3P, {ANY: "GPU of the Xe3p generation"}),
)
LAYOUTS = {each.layout.name: each.layout for each in GENERATIONS if each.layout}
"""Layouts of stall records, by their name in a capture's header."""


def generation(major: int, minor: int) -> Generation | None:
    """Returns the generation of a graphics IP version, as the driver reports it; None if no row has it."""
    return next((each for each in GENERATIONS if each.has(major, minor)), None)


def platform_of(major: int, minor: int) -> Platform | None:
    """Returns IGA's platform for a graphics IP version; None if unknown."""
    known = generation(major, minor)
    return known.platform if known else None


def layout(major: int, minor: int) -> RecordLayout | None:
    """Returns the layout of a graphics IP version's stall records; None if it does not sample stalls.

    For a version that no row has, this guesses (see `is_guess`): it returns the layout of the newest generation before
    it, as the xe driver does with GPUs newer than itself.
    """
    if known := generation(major, minor):
        return known.layout
    older = [each for each in GENERATIONS if _FIRST_MAJOR_TO_GUESS <= each.versions[0][0] < major]
    return older[-1].layout if older else None


def is_guess(major: int, minor: int) -> bool:
    """Whether `layout` is a guess for this graphics IP version."""
    return generation(major, minor) is None and layout(major, minor) is not None


def device_name(major: int, minor: int) -> str:
    """Returns Intel's name of GPUs with this graphics IP version; a description if there is none."""
    known = generation(major, minor)
    return (known and known.device(minor)) or f"GPU with graphics IP {major}.{minor:02}"


def guessed_layout(gpu: str, ip_version: str, layout: str) -> str:
    """Returns the warning about a GPU whose record layout is a guess."""
    return (
        f"{gpu} has graphics IP {ip_version}, which this version of iaprof does not know: its stall records are "
        f"read as {layout} records, which is a guess, so kernels and counts may be wrong; use a newer iaprof"
    )
