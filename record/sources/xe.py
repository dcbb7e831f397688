"""The xe driver: the GPUs that it drives, the user's choice of them, and their EU-stall streams.

Numbers and layouts: include/uapi/drm/xe_drm.h and drivers/gpu/drm/xe/xe_eu_stall.c, Linux 6.15.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from iaprof.basics.errors import IaprofError, UsageError
from iaprof.gpu.intel import generations
from iaprof.gpu.intel.records import RECORD_BYTES, RecordLayout

_VERSION = 0xC0406400
_DEVICE_QUERY = 0xC0286440
_OBSERVATION = 0x4020644B
_ENABLE, _DISABLE = 0x6900, 0x6901
_QUERY_ENGINES, _QUERY_CONFIG, _QUERY_GT_LIST, _QUERY_GT_TOPOLOGY, _QUERY_EU_STALL = 0, 2, 3, 5, 10
_DSS_GEOMETRY, _DSS_COMPUTE = 1, 2  # masks of XeCores, which xe_drm.h calls by their old name, DSS
_PROPERTY_GT_ID, _PROPERTY_SAMPLE_RATE, _PROPERTY_WAIT_NUM_REPORTS = 1, 2, 3
_MAIN_GT = 0
_MAX_QUERY_BYTES = 1 << 20
_INTEL = 0x8086
_DRI, _DRM = "/dev/dri", "/sys/class/drm"
RATE_NAMES = ("fastest", "fast", "medium", "slow", "slowest")

NO_EU_STALLS = (
    "has no EU stall sampling: that needs a Battlemage, Lunar Lake or Panther Lake, or newer, and Linux 6.15 or later; "
    "Arc A-series, Meteor Lake and older cannot do it"
)
# None of these ids is among those of xe.ko or i915.ko in Debian's Linux 7.2.13 (November 2026): only Intel's i915 from
# outside the Linux kernel drives such a GPU.
_MAX_IDS = frozenset((0x0B69, 0x0B6E, *range(0x0BD0, 0x0BDC)))
_MAX = (
    "is a Data Center GPU Max, which iaprof does not record yet: only Intel's own i915 driver, from outside the Linux "
    "kernel, drives it"
)

NO_GPU = (
    f"no GPU was found: {_DRI} has no render node. iaprof records Intel GPUs under the xe driver, and NVIDIA's under "
    "NVIDIA's; 'lspci -k' lists GPUs and their drivers"
)


class DeviceError(IaprofError):
    """A GPU or its stream cannot be used; the text says why and what to do."""


class OtherDriver(DeviceError):
    """Another driver than xe drives a GPU."""


class StreamBusy(DeviceError):
    """Another profiler holds a GT's stream."""


class NotPermitted(DeviceError):
    """The driver refuses this process to sample."""


@dataclass(frozen=True)
class Gt:
    """A GT that runs kernels."""

    id: int
    tile: int
    ip_version: tuple[int, int, int]  # graphics IP: major, minor, revision
    xecores: int = 0  # 0 if the driver does not say


@dataclass(frozen=True)
class Engine:
    """A hardware engine."""

    engine_class: int  # DRM_XE_ENGINE_CLASS_*: 0 render, 1 copy, 2 video decode, 3 video enhance, 4 compute
    instance: int
    gt: int


@dataclass(frozen=True)
class Device:
    """A GPU, as its driver describes it."""

    path: str  # of the render node
    card: str  # such as card0; empty without such a node
    name: str
    pci_address: str
    device_id: int
    revision: int
    gts: tuple[Gt, ...]
    engines: tuple[Engine, ...]  # empty if the driver does not say
    xecore_buffer_bytes: int
    rates: tuple[int, ...]  # GPU cycles between samples, fastest first

    def layout(self, gt: Gt) -> RecordLayout:
        """Returns the layout of a GT's records.

        Raises:
            DeviceError: this version does not know the layout.
        """
        layout = generations.layout(*gt.ip_version[:2])
        if layout is None:
            major, minor, _ = gt.ip_version
            raise DeviceError(f"{self.path} has graphics IP {major}.{minor:02}, whose records this iaprof cannot read")
        return layout

    def guess(self, gt: Gt) -> str:
        """Returns why the layout of a GT's records is a guess; empty if it is not."""
        major, minor, _ = gt.ip_version
        layout = generations.layout(major, minor)
        if layout is None or not generations.is_guess(major, minor):
            return ""
        return generations.guessed_layout(self.path, f"{major}.{minor:02}", layout.name)


def find_devices() -> tuple[list[Device], list[str]]:
    """Returns the GPUs that can sample EU stalls, and why other GPUs of the xe driver cannot.

    Raises:
        DeviceError: there is no such GPU; the text has the reason for each GPU.
    """
    nodes = render_nodes()
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


def render_nodes() -> list[str]:
    """Returns the paths of the current render nodes."""
    try:
        return sorted(f"{_DRI}/{name}" for name in os.listdir(_DRI) if name.startswith("renderD"))
    except OSError:
        return []


def pci_address(path: str) -> str:
    """Returns the PCI address of a render node's GPU, such as 0000:03:00.0; `device` if it is unknown."""
    return os.path.basename(os.path.realpath(f"{_DRM}/{os.path.basename(path)}/device"))


def pci_number(path: str, name: str) -> int:
    """Returns a number that sysfs has of a render node's GPU, such as `vendor` or `device`; 0 if it is unknown."""
    try:
        with open(f"{_DRM}/{os.path.basename(path)}/device/{name}") as file:
            return int(file.read(), 16)
    except (OSError, ValueError):
        return 0


def card_name(path: str) -> str:
    """Returns the name of a GPU's card node, such as card0, given its render node; empty if there is none."""
    try:
        nodes = os.listdir(f"{_DRM}/{os.path.basename(path)}/device/drm")
    except OSError:
        return ""
    return min((name for name in nodes if name.startswith("card")), default="")


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
    card = f"card{name}" if name.isdecimal() else name.removeprefix(f"{_DRI}/")
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


def open_device(path: str) -> Device:
    """Queries the driver about the GPU behind a render node.

    Raises:
        DeviceError: the GPU is not driven by xe, cannot sample EU stalls, or may not be opened.
    """
    fd = _open_node(path)
    try:
        driver = _driver_name(fd)
        if driver != "xe":
            if pci_number(path, "device") in _MAX_IDS:
                raise DeviceError(f"{path} {_MAX}")
            raise OtherDriver(f"{path} is driven by {driver or 'an unknown driver'}; EU stalls need Intel's xe driver")
        info = _query(fd, _QUERY_CONFIG, "configuration", path)
        device, _ = struct.unpack_from("<QQ", info, 8)
        stall = _query(fd, _QUERY_EU_STALL, "EU-stall sampling", path)
        if len(stall) < 80:
            raise DeviceError(f"{path} answers a query for EU-stall sampling with too few bytes")
        _, record_size, buffer_bytes = struct.unpack_from("<QQQ", stall, 8)
        (count,) = struct.unpack_from("<Q", stall, 72)
        if record_size != RECORD_BYTES or 80 + 8 * count > len(stall) or count == 0:
            raise DeviceError(f"{path} has records of {record_size} bytes, which this iaprof cannot read")
        rates = struct.unpack_from(f"<{count}Q", stall, 80)
        xecores = _xecores(_query_if_there(fd, _QUERY_GT_TOPOLOGY, "topology", path))
        gts = tuple(
            replace(gt, xecores=xecores.get(gt.id, 0)) for gt in _main_gts(_query(fd, _QUERY_GT_LIST, "GTs", path))
        )
        if not gts:
            raise DeviceError(f"{path} has no GT that runs kernels")
        return Device(
            path=path,
            card=card_name(path),
            name=device_name(_INTEL, device & 0xFFFF) or generations.device_name(*gts[0].ip_version[:2]),
            pci_address=pci_address(path),
            device_id=device & 0xFFFF,
            revision=device >> 16 & 0xFF,
            gts=gts,
            engines=_engines(_query_if_there(fd, _QUERY_ENGINES, "engines", path)),
            xecore_buffer_bytes=buffer_bytes,
            rates=rates,
        )
    except (struct.error, OSError) as error:
        raise DeviceError(f"{path} does not answer as the xe driver does: {error}") from error
    finally:
        os.close(fd)


def _open_node(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError:
        raise DeviceError(f"{path} may not be opened: run iaprof with sudo") from None
    except OSError as error:
        raise DeviceError(f"{path} cannot be opened: {error.strerror}") from error


def _driver_name(fd: int) -> str:
    # struct drm_version: three ints and padding, then length and pointer of name, date and description
    name = ctypes.create_string_buffer(64)
    version = bytearray(struct.pack("<iiiiQQQQQQ", 0, 0, 0, 0, 64, ctypes.addressof(name), 0, 0, 0, 0))
    fcntl.ioctl(fd, _VERSION, version)
    length = struct.unpack_from("<Q", version, 16)[0]
    return name.raw[: min(length, 64)].decode(errors="replace")


def _query(fd: int, query: int, what: str, path: str) -> bytes:
    """Makes one device query: first for the answer's size, then for the answer."""
    request = bytearray(struct.pack("<QIIQQQ", 0, query, 0, 0, 0, 0))
    try:
        fcntl.ioctl(fd, _DEVICE_QUERY, request)
        size = struct.unpack_from("<I", request, 12)[0]
        if size > _MAX_QUERY_BYTES:
            raise DeviceError(f"{path} answers a query for {what} with an absurd size")
        data = ctypes.create_string_buffer(size)
        struct.pack_into("<IQ", request, 12, size, ctypes.addressof(data))
        fcntl.ioctl(fd, _DEVICE_QUERY, request)
    except OSError as error:
        if query == _QUERY_EU_STALL and error.errno in (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP):
            raise DeviceError(f"{path} {NO_EU_STALLS}") from error
        raise DeviceError(f"{path} refuses a query for {what}: {error.strerror}") from error
    return data.raw


def _query_if_there(fd: int, query: int, what: str, path: str) -> bytes:
    """Makes a query that recording can do without; returns b"" if the driver refuses it."""
    try:
        return _query(fd, query, what, path)
    except DeviceError:
        return b""


def _main_gts(answer: bytes) -> tuple[Gt, ...]:
    (count,) = struct.unpack_from("<I", answer)
    gts = []
    for index in range(min(count, (len(answer) - 8) // 96)):
        base = 8 + 96 * index
        kind, tile, gt = struct.unpack_from("<HHH", answer, base)
        if kind == _MAIN_GT:
            gts.append(Gt(gt, tile, struct.unpack_from("<HHH", answer, base + 32)))
    return tuple(gts)


def _xecores(answer: bytes) -> dict[int, int]:
    """Returns how many XeCores each GT has, from structs drm_xe_query_topology_mask, one after the other."""
    masks: dict[int, int] = {}
    offset = 0
    while offset + 8 <= len(answer):
        gt, kind, length = struct.unpack_from("<HHI", answer, offset)
        if kind in (_DSS_GEOMETRY, _DSS_COMPUTE):
            masks[gt] = masks.get(gt, 0) | int.from_bytes(answer[offset + 8 : offset + 8 + length], "little")
        offset += 8 + length
    return {gt: mask.bit_count() for gt, mask in masks.items()}


def _engines(answer: bytes) -> tuple[Engine, ...]:
    """Reads struct drm_xe_query_engines: a count, and 32 bytes for each engine."""
    if len(answer) < 8:
        return ()
    (count,) = struct.unpack_from("<I", answer)
    existing = min(count, (len(answer) - 8) // 32)
    return tuple(Engine(*struct.unpack_from("<HHH", answer, 8 + 32 * index)) for index in range(existing))


def open_stream(device: Device, gt: Gt, rate: int, wait_num_reports: int = 1) -> int:
    """Opens an EU-stall stream, not yet enabled; returns its descriptor, which is non-blocking and close-on-exec.

    Args:
        device: the GPU.
        gt: a GT of it.
        rate: GPU cycles between samples, one of `device.rates`.
        wait_num_reports: how many records make the stream readable.

    Raises:
        DeviceError: another profiler holds the stream, permission is missing, or the driver refuses.
    """
    properties = (
        (_PROPERTY_GT_ID, gt.id),
        (_PROPERTY_SAMPLE_RATE, rate),
        (_PROPERTY_WAIT_NUM_REPORTS, wait_num_reports),
    )
    # A chain of drm_xe_ext_set_property, 48 bytes each: next, name 0, pad, property, pad, value, reserved.
    chain = ctypes.create_string_buffer(48 * len(properties))
    first = ctypes.addressof(chain)
    for index, (name, value) in enumerate(properties):
        following = first + 48 * (index + 1) if index + 1 < len(properties) else 0
        struct.pack_into("<QIIIIQ", chain, 48 * index, following, 0, 0, name, 0, value)
    # drm_xe_observation_param: extensions, type 1 (EU stall), operation 0 (open a stream), first property
    request = bytearray(struct.pack("<QQQQ", 0, 1, 0, first))  # a bytearray: with bytes ioctl hides the result
    node = _open_node(device.path)
    try:
        fd: int = fcntl.ioctl(node, _OBSERVATION, request)
    except OSError as error:
        raise _no_stream(device, gt, error) from error
    finally:
        os.close(node)
    try:
        os.set_inheritable(fd, False)
        os.set_blocking(fd, False)
    except OSError:
        os.close(fd)
        raise
    return fd


def enable_stream(fd: int, device: Device) -> None:
    """Starts sampling.

    Raises:
        DeviceError: the driver refuses.
    """
    try:
        fcntl.ioctl(fd, _ENABLE, 0)
    except OSError as error:
        raise DeviceError(f"the EU-stall stream of {device.path} cannot be enabled: {error.strerror}") from error


def disable_stream(fd: int) -> None:
    """Stops sampling, until the stream is enabled again; reads fail meanwhile.

    Raises:
        OSError: the GPU was reset or has vanished.
    """
    fcntl.ioctl(fd, _DISABLE, 0)


def _no_stream(device: Device, gt: Gt, error: OSError) -> DeviceError:
    what = f"{device.path} (GT {gt.id})"
    if error.errno == errno.EBUSY:
        return StreamBusy(f"{what} is held by another profiler: only one can sample EU stalls at a time; stop it first")
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotPermitted(
            f"{what} may not be sampled: run iaprof with sudo, or as root: sysctl dev.xe.observation_paranoid=0"
        )
    if error.errno == errno.ENODEV:
        return DeviceError(f"{what} {NO_EU_STALLS}")
    return DeviceError(f"{what} refuses an EU-stall stream: {error.strerror}")


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
