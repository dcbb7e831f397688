"""The xe driver of Linux.

Numbers and layouts: include/uapi/drm/xe_drm.h and drivers/gpu/drm/xe/xe_eu_stall.c, Linux 6.15.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from dataclasses import replace

from iaprof.gpu.intel import generations
from iaprof.gpu.intel.records import RECORD_BYTES
from iaprof.record.sources.render_nodes import INTEL, DeviceError, card_name, device_name, open_node, pci_address
from iaprof.record.sources.stall_driver import Device, Driver, Engine, Gt

_DEVICE_QUERY = 0xC0286440
_OBSERVATION = 0x4020644B
_QUERY_ENGINES, _QUERY_CONFIG, _QUERY_GT_LIST, _QUERY_GT_TOPOLOGY, _QUERY_EU_STALL = 0, 2, 3, 5, 10
_DSS_GEOMETRY, _DSS_COMPUTE = 1, 2  # masks of XeCores, which xe_drm.h calls by their old name, DSS
_PROPERTY_GT_ID, _PROPERTY_SAMPLE_RATE, _PROPERTY_WAIT_NUM_REPORTS = 1, 2, 3
_MAIN_GT = 0
_MAX_QUERY_BYTES = 1 << 20

NO_EU_STALLS = (
    "has no EU stall sampling: that needs a Battlemage, Lunar Lake or Panther Lake, or newer, and Linux 6.15 or later; "
    "Arc A-series, Meteor Lake and older cannot do it"
)


class Xe(Driver):
    """The driver."""

    name = "xe"
    holders = "sudo find /proc/[0-9]*/fd -lname '*xe_eu_stall*'"  # see xe_eu_stall.c
    paranoid = "dev.xe.observation_paranoid"
    keeps_unread = False
    overflow_errno = errno.EIO
    never = errno.ENODEV, NO_EU_STALLS

    def describe(self, fd: int, path: str) -> Device:
        """See Driver."""
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
            driver=self.name,
            path=path,
            card=card_name(path),
            name=device_name(INTEL, device & 0xFFFF) or generations.device_name(*gts[0].ip_version[:2]),
            pci_address=pci_address(path),
            device_id=device & 0xFFFF,
            revision=device >> 16 & 0xFF,
            gts=gts,
            engines=_engines(_query_if_there(fd, _QUERY_ENGINES, "engines", path)),
            xecore_buffer_bytes=buffer_bytes,
            rates=rates,
        )

    def open_stream(self, device: Device, gt: Gt, rate: int, wait_num_reports: int = 1) -> int:
        """See Driver."""
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
        node = open_node(device.path)
        try:
            fd: int = fcntl.ioctl(node, _OBSERVATION, request)
        except OSError as error:
            raise self.refused(device, gt, error) from error
        finally:
            os.close(node)
        try:
            os.set_inheritable(fd, False)
            os.set_blocking(fd, False)
        except OSError:
            os.close(fd)
            raise
        return fd


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
