"""The vendors of GPUs, and what of them depends on a capture."""

from __future__ import annotations

from collections.abc import Sequence

from iaprof.gpu.intel.vendor import Intel
from iaprof.gpu.nvidia.vendor import Nvidia
from iaprof.gpu.samples import SampleLayout
from iaprof.gpu.vendor import Vendor

VENDORS: tuple[Vendor, ...] = (Intel(), Nvidia())
"""All vendors. What names no vendor is the first one's."""
REASONS = tuple(dict.fromkeys(reason for vendor in VENDORS for reason in vendor.meanings))
"""All reasons, in the order of tables."""
FIRST_REASONS = tuple(VENDORS[0].meanings)
"""The reasons of what names no vendor, such as imported texts: `sample` rows have a field for each."""
SAMPLE_ROWS = tuple(vendor.rows for vendor in VENDORS)
"""The kinds of rows that have samples."""
LONGEST_INSTRUCTION = max(vendor.longest_instruction for vendor in VENDORS)  # bytes


def layouts() -> dict[str, SampleLayout]:
    """Returns the layouts of records, by their names in a capture's header."""
    return {name: layout for vendor in VENDORS for name, layout in vendor.layouts.items()}


def by_name(name: str) -> Vendor:
    """Returns the vendor of that name; KeyError if there is none."""
    return {vendor.name: vendor for vendor in VENDORS}[name]


def of_layout(name: object) -> Vendor:
    """Returns the vendor with a layout of that name."""
    return next((vendor for vendor in VENDORS if name in vendor.layouts), VENDORS[0])


def of_code(data: bytes) -> Vendor:
    """Returns the vendor of a code object."""
    return next((vendor for vendor in VENDORS if vendor.is_code(data)), VENDORS[0])


def meanings(reasons: Sequence[str]) -> list[str]:
    """Returns what the reasons of a capture mean, in English; "" if unknown.

    Vendors may use a word in different senses: that of a vendor that has all of the reasons counts.
    """
    known = sorted(VENDORS, key=lambda vendor: not vendor.meanings.keys() >= set(reasons))
    return [next((vendor.meanings[each] for vendor in known if each in vendor.meanings), "") for each in reasons]


def abbreviation(reason: str) -> str:
    """Returns a name of a reason for columns, of at most 7 characters if it is known."""
    return next((vendor.abbreviations[reason] for vendor in VENDORS if reason in vendor.abbreviations), reason)
