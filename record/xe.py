"""The xe driver: which GPUs it drives, and their EU-stall streams.

Numbers and layouts: include/uapi/drm/xe_drm.h and drivers/gpu/drm/xe/xe_eu_stall.c, Linux 6.15.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from iaprof.formats.errors import IaprofError
from iaprof.formats.stalls import RECORD_BYTES, Layout

_VERSION = 0xC0406400
_DEVICE_QUERY = 0xC0286440
_OBSERVATION = 0x4020644B
_ENABLE = 0x6900
_QUERY_CONFIG, _QUERY_GT_LIST, _QUERY_EU_STALL = 2, 3, 10
_PROPERTY_GT_ID, _PROPERTY_SAMPLE_RATE, _PROPERTY_WAIT_NUM_REPORTS = 1, 2, 3
_MAIN_GT = 0
_MAX_QUERY_BYTES = 1 << 20

NO_EU_STALLS = (
    "has no EU stall sampling: that needs a Battlemage, Lunar Lake, Panther Lake or Data Center GPU Max (PVC), or "
    "newer, and Linux 6.15 or later; Arc A-series, Meteor Lake and older cannot do it"
)


class DeviceError(IaprofError):
    """A GPU, or its stream, cannot be used; the text says why and what to do."""


class OtherDriver(DeviceError):
    """A GPU is not driven by xe."""


@dataclass(frozen=True)
class Gt:
    """One GT that runs kernels."""

    id: int
    tile: int
    ip_version: tuple[int, int, int]  # graphics IP: major, minor, revision


@dataclass(frozen=True)
class Device:
    """One GPU, by what its driver says."""

    path: str  # of the render node
    pci_address: str
    device_id: int
    revision: int
    gts: tuple[Gt, ...]
    xecore_buffer_bytes: int
    rates: tuple[int, ...]  # GPU cycles between samples, fastest first

    def layout(self, gt: Gt) -> Layout:
        """The layout of that GT's records.

        Raises:
            DeviceError: this version does not know it.
        """
        layout = Layout.from_ip_version(*gt.ip_version[:2])
        if layout is None:
            major, minor, _ = gt.ip_version
            raise DeviceError(f"{self.path} has graphics IP {major}.{minor:02}, whose records this iaprof cannot read")
        return layout


def find_devices() -> tuple[list[Device], list[str]]:
    """The GPUs that can sample EU stalls, and why others of the xe driver cannot.

    Raises:
        DeviceError: there is none, with the reason of each GPU that is there but cannot.
    """
    folder = Path("/dev/dri")
    try:
        nodes = sorted(name for name in os.listdir(folder) if name.startswith("renderD"))
    except OSError:
        nodes = []
    if not nodes:
        raise DeviceError(
            "no GPU was found: /dev/dri has no render node. iaprof records Intel GPUs under the xe driver"
        )
    devices: list[Device] = []
    problems: list[DeviceError] = []
    for name in nodes:
        try:
            devices.append(open_device(str(folder / name)))
        except DeviceError as error:
            problems.append(error)
    if not devices:
        raise DeviceError("; ".join(map(str, problems)))
    return devices, [str(problem) for problem in problems if not isinstance(problem, OtherDriver)]


def open_device(path: str) -> Device:
    """What the driver says of the GPU behind a render node.

    Raises:
        DeviceError: it is not driven by xe, cannot sample EU stalls, or may not be opened.
    """
    fd = _open_node(path)
    try:
        driver = _driver_name(fd)
        if driver != "xe":
            raise OtherDriver(f"{path} is driven by {driver or 'an unknown driver'}; EU stalls need Intel's xe driver")
        info = _query(fd, _QUERY_CONFIG, "configuration", path)
        device, _ = struct.unpack_from("<QQ", info, 8)
        stall = _query(fd, _QUERY_EU_STALL, "EU-stall sampling", path)
        if len(stall) < 80:
            raise DeviceError(f"{path} answers a query for EU-stall sampling with too little")
        _, record_size, buffer_bytes = struct.unpack_from("<QQQ", stall, 8)
        (count,) = struct.unpack_from("<Q", stall, 72)
        if record_size != RECORD_BYTES or 80 + 8 * count > len(stall) or count == 0:
            raise DeviceError(f"{path} has records of {record_size} bytes, which this iaprof cannot read")
        rates = struct.unpack_from(f"<{count}Q", stall, 80)
        gts = _main_gts(_query(fd, _QUERY_GT_LIST, "GTs", path))
        if not gts:
            raise DeviceError(f"{path} has no GT that runs kernels")
        pci = os.path.basename(os.path.realpath(f"/sys/class/drm/{os.path.basename(path)}/device"))
        return Device(path, pci, device & 0xFFFF, device >> 16 & 0xFF, gts, buffer_bytes, rates)
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
    """The answer to one device query: asked for its size first, then for itself."""
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


def _main_gts(answer: bytes) -> tuple[Gt, ...]:
    (count,) = struct.unpack_from("<I", answer)
    gts = []
    for index in range(min(count, (len(answer) - 8) // 96)):
        base = 8 + 96 * index
        kind, tile, gt = struct.unpack_from("<HHH", answer, base)
        if kind == _MAIN_GT:
            gts.append(Gt(gt, tile, struct.unpack_from("<HHH", answer, base + 32)))
    return tuple(gts)


def open_stream(device: Device, gt: Gt, rate: int, wait_num_reports: int = 1) -> int:
    """An EU-stall stream, not yet enabled; its descriptor does not block and is closed on exec.

    Args:
        device: whose.
        gt: of that device.
        rate: GPU cycles between samples, one of `device.rates`.
        wait_num_reports: how many records make the stream readable.

    Raises:
        DeviceError: another profiler holds it, no permission, or the driver refuses.
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
        raise DeviceError(_why_no_stream(device, gt, error)) from error
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


def _why_no_stream(device: Device, gt: Gt, error: OSError) -> str:
    what = f"{device.path} (GT {gt.id})"
    if error.errno == errno.EBUSY:
        return f"{what} is held by another profiler: only one can sample EU stalls at a time; stop it first"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{what} may not be sampled: run iaprof with sudo, or as root: sysctl dev.xe.observation_paranoid=0"
    if error.errno == errno.ENODEV:
        return f"{what} {NO_EU_STALLS}"
    return f"{what} refuses an EU-stall stream: {error.strerror}"
