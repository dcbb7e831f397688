"""Names of PCI devices, from the database that distributions install (https://pci-ids.ucw.cz)."""

from __future__ import annotations

import functools
import re

DATABASES = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")
_MOST_BYTES = 16 << 20  # of the database, which has 1.5 MB today


def device_name(vendor: int, device: int) -> str:
    """Returns a device's name, such as 'Battlemage G21 [Arc B580]'; empty if the database does not have it."""
    for line in _devices(vendor).splitlines():
        if line.startswith(f"\t{device:04x}  "):
            return line[7:].strip()
    return ""


@functools.cache
def _devices(vendor: int) -> str:
    """Returns the lines below a vendor's: its devices and their subsystems."""
    for path in DATABASES:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_BYTES)
        except OSError:
            continue
        match = re.search(rf"^{vendor:04x}  .*\n((?:[\t#].*\n|\n)*)", text, re.MULTILINE)
        return match[1] if match else ""
    return ""
