"""The interface of the drivers under which Intel's GPUs sample EU stalls, and what each tells of a GPU."""

from __future__ import annotations

import errno
import fcntl
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from iaprof.gpu.intel import generations
from iaprof.gpu.intel.records import RecordLayout
from iaprof.record.sources.render_nodes import DeviceError

_ENABLE, _DISABLE = 0x6900, 0x6901  # the same in both drivers
POLL_NS = 5_000_000  # between the driver's polls of the hardware's buffers: a read sees what the last poll saw


class OtherDriver(DeviceError):
    """A driver under which no EU stalls are sampled drives a GPU."""

    def __init__(self, path: str, driver: str) -> None:
        """Args: the GPU's render node, and the driver's name; an empty one if it is unknown."""
        super().__init__(f"{path} is driven by {driver or 'an unknown driver'}; EU stalls need Intel's xe driver")


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

    engine_class: int  # 0 render, 1 copy, 2 video decode, 3 video enhance, 4 compute
    instance: int
    gt: int


@dataclass(frozen=True)
class Device:
    """A GPU, as its driver describes it."""

    driver: str  # its name
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


class Driver(ABC):
    """A driver: describes GPUs, and opens their streams.

    A stream is a file descriptor. A read returns whole records, or fails with EAGAIN if nothing is left of what the
    last poll of the hardware's buffers saw; polls are POLL_NS apart.
    """

    name: str  # as DRM_IOCTL_VERSION says it
    holders: str  # a command that finds who holds a stream
    paranoid: str  # the sysctl: if it is 0, everyone may sample
    keeps_unread: bool  # whether what was sampled before a stream was disabled is read after it is enabled again
    overflow_errno: int  # of a read: the hardware dropped records, once, and the stream goes on; 0: no read fails so
    never: tuple[int, str]  # the errno with which it refuses a GPU that does not sample, and what to say of that GPU

    def samples(self, path: str) -> bool:
        """Whether the driver of this name that drives the GPU behind a render node is this one."""
        del path
        return True

    @abstractmethod
    def describe(self, fd: int, path: str) -> Device:
        """Queries the driver about the GPU behind a render node.

        Args:
            fd: the node, opened.
            path: of the node.

        Raises:
            DeviceError: the GPU cannot sample EU stalls.
            OSError, struct.error: the driver does not answer as expected.
        """

    @abstractmethod
    def open_stream(self, device: Device, gt: Gt, rate: int, wait_num_reports: int = 1) -> int:
        """Opens a stream, not yet enabled; returns its descriptor, which is non-blocking and close-on-exec.

        Args:
            device: the GPU.
            gt: a GT of it.
            rate: GPU cycles between samples, one of `device.rates`.
            wait_num_reports: how many records make the stream readable.

        Raises:
            DeviceError: another profiler holds the stream, permission is missing, or the driver refuses.
        """

    def enable_stream(self, fd: int, device: Device) -> None:
        """Starts sampling.

        Raises:
            DeviceError: the driver refuses.
        """
        try:
            fcntl.ioctl(fd, _ENABLE, 0)
        except OSError as error:
            raise DeviceError(f"the EU-stall stream of {device.path} cannot be enabled: {error.strerror}") from error

    def disable_stream(self, fd: int) -> None:
        """Stops sampling, until the stream is enabled again; reads fail meanwhile.

        Raises:
            OSError: the GPU was reset or has vanished.
        """
        fcntl.ioctl(fd, _DISABLE, 0)

    def dropping(self, records: NDArray[np.uint64]) -> Sequence[int]:
        """Returns the XeCores whose buffers were full, as far as records say so.

        Args:
            records: uint64[n, 8], as read.
        """
        del records
        return ()

    def resets(self, device: Device, gt: Gt) -> int | None:
        """Returns how often the GT was reset, where reads do not tell: None if they do, or if nothing does."""
        del device, gt
        return None

    def refused(self, device: Device, gt: Gt, error: OSError) -> DeviceError:
        """Returns why a stream cannot be opened, in words."""
        what = f"{device.path} (GT {gt.id})"
        never, text = self.never
        if error.errno == never:
            return DeviceError(f"{what} {text}")
        if error.errno == errno.EBUSY:
            return StreamBusy(
                f"{what} is held by another profiler: only one can sample EU stalls at a time; stop it first"
            )
        if error.errno in (errno.EACCES, errno.EPERM):
            return NotPermitted(
                f"{what} may not be sampled: run iaprof with sudo, or as root: sysctl {self.paranoid}=0"
            )
        return DeviceError(f"{what} refuses an EU-stall stream: {error.strerror}")
