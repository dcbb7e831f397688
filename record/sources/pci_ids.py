"""Names of PCI devices, from the database that distributions install (https://pci-ids.ucw.cz)."""

from __future__ import annotations

import functools
import re

DATABASES = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")
_MOST_BYTES = 16 << 20  # it has 1.5 MB today


def device_name(vendor: int, device: int) -> str:
    """What the database calls a device, such as 'Battlemage G21 [Arc B580]'; empty when it does not say."""
    for line in _devices(vendor).splitlines():
        if line.startswith(f"\t{device:04x}  "):
            return line[7:].strip()
    return ""


@functools.cache
def _devices(vendor: int) -> str:
    """The lines below a vendor's: its devices, and theirs."""
    for path in DATABASES:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_BYTES)
        except OSError:
            continue
        found = re.search(rf"^{vendor:04x}  .*\n((?:[\t#].*\n|\n)*)", text, re.MULTILINE)
        return found[1] if found else ""
    return ""
