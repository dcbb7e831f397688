"""The render nodes of this machine: what sysfs and every driver of the kernel's DRM say of them, and names of GPUs."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import re
import struct

from iaprof.basics.errors import IaprofError

_VERSION = 0xC0406400  # DRM_IOCTL_VERSION
DRI, DRM = "/dev/dri", "/sys/class/drm"
INTEL = 0x8086


class DeviceError(IaprofError):
    """A GPU or its stream cannot be used; the text says why and what to do."""


def render_nodes() -> list[str]:
    """Returns the paths of the current render nodes."""
    try:
        return sorted(f"{DRI}/{name}" for name in os.listdir(DRI) if name.startswith("renderD"))
    except OSError:
        return []


def pci_address(path: str) -> str:
    """Returns the PCI address of a render node's GPU, such as 0000:03:00.0; `device` if it is unknown."""
    return os.path.basename(os.path.realpath(f"{DRM}/{os.path.basename(path)}/device"))


def pci_number(path: str, name: str) -> int:
    """Returns a number that sysfs has of a render node's GPU, such as `vendor` or `device`; 0 if it is unknown."""
    try:
        with open(f"{DRM}/{os.path.basename(path)}/device/{name}") as file:
            return int(file.read(), 16)
    except (OSError, ValueError):
        return 0


def card_name(path: str) -> str:
    """Returns the name of a GPU's card node, such as card0, given its render node; empty if there is none."""
    try:
        nodes = os.listdir(f"{DRM}/{os.path.basename(path)}/device/drm")
    except OSError:
        return ""
    return min((name for name in nodes if name.startswith("card")), default="")


def open_node(path: str) -> int:
    """Opens a render node.

    Raises:
        DeviceError: it may not be opened, or is gone.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise DeviceError(f"{path} may not be opened: run iaprof with sudo") from None
    except OSError as error:
        raise DeviceError(f"{path} cannot be opened: {error.strerror}") from error


def driver_name(fd: int) -> str:
    """Returns the name of the driver behind an open node, such as xe.

    Raises:
        OSError: it does not say.
    """
    # struct drm_version: three ints and padding, then length and pointer of name, date and description
    name = ctypes.create_string_buffer(64)
    version = bytearray(struct.pack("<iiiiQQQQQQ", 0, 0, 0, 0, 64, ctypes.addressof(name), 0, 0, 0, 0))
    fcntl.ioctl(fd, _VERSION, version)
    length = struct.unpack_from("<Q", version, 16)[0]
    return name.raw[: min(length, 64)].decode(errors="replace")


DATABASES = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")
_MOST_BYTES = 16 << 20  # of the database, which has 1.5 MB today


def device_name(vendor: int, device: int) -> str:
    """Returns a PCI device's name, such as 'Battlemage G21 [Arc B580]'; empty if it is unknown.

    It is that in the database which distributions install (https://pci-ids.ucw.cz).
    """
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
