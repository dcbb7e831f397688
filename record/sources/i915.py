"""Intel's i915 driver from outside the Linux kernel, the only one that drives Data Center GPU Max. Untried on hardware.

Numbers and layouts: i915_drm.h, Linux 6.15; i915_drm_prelim.h and i915_perf_stall_cntr.c of intel-gpu-i915-backports,
version 25.1. There, each tile has one stream, which is opened through an engine of that tile.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.intel import generations
from iaprof.record.sources.render_nodes import (
    DRM,
    INTEL,
    DeviceError,
    card_name,
    device_name,
    open_node,
    pci_address,
    pci_number,
)
from iaprof.record.sources.stall_driver import POLL_NS, Device, Driver, Engine, Gt, OtherDriver

_GETPARAM, _QUERY, _PERF_OPEN, _RESET_STATS = 0xC0106446, 0xC0106479, 0x40106476, 0xC0186472
_PARAM_DEVICE_ID, _PARAM_REVISION = 4, 32
_QUERY_DISTANCE, _QUERY_XECORES, _QUERY_IP_VERSION, _QUERY_ENGINES = 0x10005, 0x10008, 0x1000C, 0x1000D
_COMPUTE = 4  # I915_ENGINE_CLASS_COMPUTE
_DEVICE_MEMORY = 1  # I915_MEMORY_CLASS_DEVICE: a tile has an instance of it
_MOST_TILES = 8
_CLOSE_ON_EXEC, _NON_BLOCKING, _DISABLED, _EU_STALL = 1, 2, 4, 0x10000
_BUFFER_BYTES, _RATE, _POLL_PERIOD, _ENGINE_CLASS, _ENGINE_INSTANCE, _REPORTS = range(1001, 1007)
_MAX_ANSWER_BYTES = 1 << 20

XECORE_BYTES = 512 << 10  # the largest buffer that the driver makes
_CYCLES = 251
_RATES = tuple(_CYCLES * step for step in range(1, 8))
_MAX_IDS = frozenset((0x0B69, 0x0B6E, *range(0x0BD0, 0x0BDC)))
_MAX_VERSION = 12, 60, 0

# Bytes 48 to 51 of a record are set by the driver: the XeCore, and flags.
_DRIVER_WORD, _XECORE, _DROPPED = 6, np.uint64(0xFFFF), np.uint64(1 << 24)

NO_EU_STALLS = "has no EU stall sampling: under Intel's i915 driver, only a Data Center GPU Max can do it"
_NOT_INTELS = (
    "is driven by the i915 driver of the Linux kernel: a Data Center GPU Max needs Intel's own, from outside the "
    "kernel (package intel-i915-dkms)"
)


class I915(Driver):
    """The driver."""

    name = "i915"
    holders = "sudo find /proc/[0-9]*/fd -lname '*i915_eu_stall*'"
    paranoid = "dev.i915.perf_stream_paranoid"
    keeps_unread = True
    overflow_errno = 0
    never = errno.EPERM, NO_EU_STALLS

    def samples(self, path: str) -> bool:
        """See Driver: Linux's own i915 has no such file."""
        return os.path.exists(f"{DRM}/{card_name(path)}/prelim_uapi_version")

    def describe(self, fd: int, path: str) -> Device:
        """See Driver.

        Raises:
            OtherDriver: it is the i915 of the Linux kernel.
        """
        if not self.samples(path):
            if pci_number(path, "device") in _MAX_IDS:
                raise DeviceError(f"{path} {_NOT_INTELS}")
            raise OtherDriver(path, self.name)
        device_id = _param(fd, _PARAM_DEVICE_ID)
        engines = tuple(
            Engine(engine_class, instance, _tile(fd, engine_class, instance))
            for engine_class, instance in _engines(_query(fd, _QUERY_ENGINES))
        )
        gts = tuple(
            Gt(engine.gt, engine.gt, _ip_version(fd, engine, device_id), _xecores(fd, engine))
            for engine in _samplers(engines)
        )
        if not gts or generations.layout(*gts[0].ip_version[:2]) is None:
            raise DeviceError(f"{path} {NO_EU_STALLS}")
        return Device(
            driver=self.name,
            path=path,
            card=card_name(path),
            name=device_name(INTEL, device_id) or generations.device_name(*gts[0].ip_version[:2]),
            pci_address=pci_address(path),
            device_id=device_id,
            revision=_param(fd, _PARAM_REVISION),
            gts=gts,
            engines=engines,
            xecore_buffer_bytes=XECORE_BYTES,
            rates=_RATES,
        )

    def open_stream(self, device: Device, gt: Gt, rate: int, wait_num_reports: int = 1) -> int:
        """See Driver."""
        engine = next(engine for engine in _samplers(device.engines) if engine.gt == gt.id)
        properties = {
            _BUFFER_BYTES: XECORE_BYTES,
            _RATE: rate // _CYCLES,
            _POLL_PERIOD: POLL_NS,
            _ENGINE_CLASS: engine.engine_class,
            _ENGINE_INSTANCE: engine.instance,
        }
        node = open_node(device.path)
        try:
            try:
                return _perf_open(node, properties | {_REPORTS: wait_num_reports})
            except OSError as error:
                if error.errno != errno.EINVAL or wait_num_reports != 1:
                    raise
                return _perf_open(node, properties)  # older drivers do not know the last one, whose default is 1
        except OSError as error:
            raise self.refused(device, gt, error) from error
        finally:
            os.close(node)

    def dropping(self, records: NDArray[np.uint64]) -> Sequence[int]:
        """See Driver: the records of a XeCore that dropped some have a flag, in the read after."""
        said = records[:, _DRIVER_WORD]
        if not np.bitwise_or.reduce(said) & _DROPPED:
            return ()
        xecores: list[int] = np.unique(said[(said & _DROPPED) != 0] & _XECORE).tolist()
        return xecores

    def resets(self, device: Device, gt: Gt) -> int | None:
        """See Driver: resets of the GPU, which are told to CAP_SYS_ADMIN only, and of engines of the GT."""
        counts = []
        try:
            node = open_node(device.path)
            try:
                # drm_i915_reset_stats: context 0, flags, number of resets, two more numbers, padding
                answer = bytearray(24)
                fcntl.ioctl(node, _RESET_STATS, answer)
                counts.append(struct.unpack_from("<I", answer, 8)[0])
            finally:
                os.close(node)
        except (DeviceError, OSError):
            pass
        try:
            with open(f"{DRM}/{device.card}/gt/gt{gt.id}/error_counter/engine_reset") as file:
                counts.append(int(file.read(64)))
        except (OSError, ValueError):
            pass
        return sum(counts) if counts else None


def _perf_open(node: int, properties: dict[int, int]) -> int:
    pairs = struct.pack(f"<{2 * len(properties)}Q", *(number for pair in properties.items() for number in pair))
    array = ctypes.create_string_buffer(pairs, len(pairs))
    flags = _CLOSE_ON_EXEC | _NON_BLOCKING | _DISABLED | _EU_STALL
    request = bytearray(struct.pack("<IIQ", flags, len(properties), ctypes.addressof(array)))
    fd: int = fcntl.ioctl(node, _PERF_OPEN, request)  # a bytearray: with bytes ioctl hides the result
    return fd


def _param(fd: int, param: int) -> int:
    value = ctypes.c_int()
    fcntl.ioctl(fd, _GETPARAM, bytearray(struct.pack("<iiQ", param, 0, ctypes.addressof(value))))
    return value.value


def _query(fd: int, query: int, flags: int = 0, asked: bytes = b"") -> bytes:
    """Makes a query; raises OSError if the driver refuses.

    Args:
        fd: the node, opened.
        query: its number.
        flags: of the query.
        asked: what the query is about, of the answer's length; without it, the driver is asked for the length first.
    """
    data = ctypes.create_string_buffer(asked, len(asked) or _item(fd, query, 0, flags, 0))
    length = _item(fd, query, len(data), flags, ctypes.addressof(data))
    return data.raw[:length]


def _item(fd: int, query: int, length: int, flags: int, address: int) -> int:
    """Asks for one item, and returns the length of its answer."""
    item = ctypes.create_string_buffer(struct.pack("<QiIQ", query, length, flags, address), 24)
    fcntl.ioctl(fd, _QUERY, bytearray(struct.pack("<IIQ", 1, 0, ctypes.addressof(item))))
    answered: int = struct.unpack_from("<i", item, 8)[0]
    if answered < 0:
        raise OSError(-answered, os.strerror(-answered))
    if answered > _MAX_ANSWER_BYTES:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    return answered


def _engines(answer: bytes) -> list[tuple[int, int]]:
    """Returns the class and instance of each engine: a count, from byte 16 on 56 bytes for each."""
    (count,) = struct.unpack_from("<I", answer)
    existing = min(count, (len(answer) - 16) // 56)
    return [struct.unpack_from("<HH", answer, 16 + 56 * index) for index in range(existing)]


def _samplers(engines: Sequence[Engine]) -> list[Engine]:
    """Returns a compute engine of each tile, in the order of the tiles."""
    first: dict[int, Engine] = {}
    for engine in engines:
        if engine.engine_class == _COMPUTE:
            first.setdefault(engine.gt, engine)
    return [first[tile] for tile in sorted(first)]


def _tile(fd: int, engine_class: int, instance: int) -> int:
    """Returns the tile of an engine: the number of the device memory that is nearest to it; 0 if there is none."""
    distances: list[int] = []
    for memory in range(_MOST_TILES):
        asked = struct.pack("<HHHHiIII", engine_class, instance, _DEVICE_MEMORY, memory, 0, 0, 0, 0)
        try:
            distances.append(struct.unpack_from("<i", _query(fd, _QUERY_DISTANCE, 0, asked), 8)[0])
        except OSError:
            break
    return distances.index(min(distances)) if distances else 0


def _ip_version(fd: int, engine: Engine, device_id: int) -> tuple[int, int, int]:
    """Returns the graphics IP's version; the driver has a stepping of its own counting instead of a revision."""
    asked = struct.pack("<HHBBBB", engine.engine_class, engine.instance, 0, 0, 0, 0)
    try:
        major, minor = struct.unpack_from("<BB", _query(fd, _QUERY_IP_VERSION, 0, asked), 5)
    except OSError:  # older drivers do not know this query
        return _MAX_VERSION if device_id in _MAX_IDS else (0, 0, 0)
    return major, minor, 0


def _xecores(fd: int, engine: Engine) -> int:
    """Returns how many XeCores the tile of an engine has; 0 if the driver does not say."""
    try:
        return _count_xecores(_query(fd, _QUERY_XECORES, engine.engine_class | engine.instance << 8))
    except (OSError, struct.error):
        return 0


def _count_xecores(answer: bytes) -> int:
    """Counts the XeCores in a drm_i915_query_topology_info: 16-bit numbers, then masks of slices and their XeCores."""
    _, slices, _, _, offset, stride, _, _ = struct.unpack_from("<8H", answer)
    masks = answer[16 + offset : 16 + offset + slices * stride]
    return int.from_bytes(masks, "little").bit_count()
