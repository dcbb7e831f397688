"""A process (child.py) that runs a driver without a GPU for `iaprof calibrate`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import IO, Any

from iaprof.basics.clean import clean
from iaprof.record.calibrate.answer import MAX_PROBLEM, Problem
from iaprof.record.calibrate.opencl_driver import GPUS
from iaprof.sandbox.worker import Worker

DYNAMIC_LINKER = "ld-linux-x86-64.so.2"


class Kind(StrEnum):
    """The API of a driver, as in layouts."""

    LEVEL_ZERO = "level_zero"
    OPENCL = "opencl"


# Make the driver simulate a GPU; ProductFamilyOverride and HardwareInfoOverride say which.
_SETTINGS = {
    "NEOReadDebugKeys": "1",
    "SetCommandStreamReceiver": "1",
    "UseAubStream": "0",
    "UseBindlessMode": "0",
    "NEO_CACHE_PERSISTENT": "0",
    # NumPy would start a thread for each core, with 40 MiB each, before the process drops its rights.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_OF_KIND: dict[Kind, dict[str, str]] = {
    Kind.LEVEL_ZERO: {},
    Kind.OPENCL: {
        # Several GPUs, each with kernels of its own, and tiles, which have no own kernels and count as no GPUs.
        "CreateMultipleRootDevices": str(GPUS),
        "CreateMultipleSubDevices": "2",
        "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
        "EnableTimestampWaitForQueues": "0",  # no GPU writes time stamps: clFinish would wait forever
        "EnableBlitterForEnqueueOperations": "0",  # kernels copy, not a copy engine
    },
}
_SECONDS_TO_END = 5.0  # after SIGKILL
_MAX_ANSWER = 1 << 20  # bytes; child.py's limit of a file


class Process:
    """A driver running as one device."""

    def __init__(self, device: str, worker: Worker, answer: IO[bytes], errors: IO[bytes]) -> None:
        self.device = device
        self._worker = worker
        self._answer, self._errors = answer, errors

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        driver: Kind,
        device: str,
        settings: dict[str, str],
        library: int,
        folder: int | None,
        private: str,
        user: int | None,
    ) -> Iterator[Process]:
        """Starts the process, which has ended when the context ends.

        Args:
            driver: the driver's API.
            device: the device, as in the names of modules.
            settings: environment variables that choose the device.
            library: the driver's descriptor, so that the checked file is loaded, even by a user who may not open its
                path.
            folder: descriptor of the folder with the dynamic linker and C library that the driver needs; None for ours.
            private: the working folder.
            user: runs what is in `folder` from its first instruction on; None for our user.
        """
        libraries = f"/proc/self/fd/{folder}"
        linker = [] if folder is None else [f"{libraries}/{DYNAMIC_LINKER}", "--library-path", libraries]
        # With this system's libraries the child drops its rights itself (child.py). Another system's dynamic linker and
        # C library never get root's rights: root of a container could have written them.
        inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with (
            tempfile.TemporaryFile() as answer,
            tempfile.TemporaryFile() as errors,
            Worker(
                "iaprof.record.calibrate.child:main",
                f"/proc/self/fd/{library}",
                device,
                driver,
                files=(library,) if folder is None else (library, folder),
                environment=inherited | _SETTINGS | _OF_KIND[driver] | settings | {"HOME": private},
                folder=private,
                output=answer,
                errors=errors,
                user=None if folder is None else user,
                linker=linker,
            ) as worker,
        ):
            yield cls(device, worker, answer, errors)

    def answer(self, seconds: float, deadline: float) -> Any:
        """Waits for the answer, which can be any JSON.

        Args:
            seconds: the time limit, for messages.
            deadline: the time limit, in time.monotonic(). The process is killed then; an answer that lacks only the
                places of the driver's own kernels is used.

        Raises:
            Problem: there is no answer.
        """
        late = f"it has not ended after {seconds:.0f} s"
        if self._worker.wait(deadline - time.monotonic()):
            return self._read_answer()
        self._worker.close(_SECONDS_TO_END)
        with contextlib.suppress(Problem):
            raw = self._read_answer()
            if isinstance(raw, dict) and "no_own" in raw:
                return {**raw, "no_own": late}
        raise Problem(late)

    def _read_answer(self) -> Any:
        self._answer.seek(0)
        text = self._answer.read(_MAX_ANSWER)
        if not text:
            raise Problem(self._last_error())
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Problem("its answer makes no sense") from None

    def _last_error(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4096))
        lines = self._errors.read(4096).decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process ends without an answer{f' ({clean(last[:MAX_PROBLEM])})' if last else ''}"
