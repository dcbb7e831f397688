"""A driver that runs without a GPU for `iaprof calibrate`, in a process of its own (child.py)."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import IO, Any

from iaprof.formats.profile import clean
from iaprof.record.calibrate.answer import MAX_PROBLEM, Problem
from iaprof.record.calibrate.opencl_driver import GPUS
from iaprof.sandbox.worker import Worker

DYNAMIC_LINKER = "ld-linux-x86-64.so.2"


class Kind(StrEnum):
    """What a driver is, as layouts have it."""

    LEVEL_ZERO = "level_zero"
    OPENCL = "opencl"


# What makes the driver believe in a GPU; ProductFamilyOverride and HardwareInfoOverride say in which.
_SETTINGS = {
    "NEOReadDebugKeys": "1",
    "SetCommandStreamReceiver": "1",
    "UseAubStream": "0",
    "UseBindlessMode": "0",
    "NEO_CACHE_PERSISTENT": "0",
    # NumPy would start a thread for each core, with 40 MiB each, before the process gives up its rights.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
_OF_KIND: dict[Kind, dict[str, str]] = {
    Kind.LEVEL_ZERO: {},
    Kind.OPENCL: {
        # Several GPUs, of which each has its own kernels, and tiles, which have not, and are no GPUs.
        "CreateMultipleRootDevices": str(GPUS),
        "CreateMultipleSubDevices": "2",
        "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE",
        "EnableTimestampWaitForQueues": "0",  # nobody writes time stamps: clFinish would wait for them for ever
        "EnableBlitterForEnqueueOperations": "0",  # kernels copy, not a copy engine
    },
}
_SECONDS_TO_END = 5.0  # after SIGKILL
_MAX_ANSWER = 1 << 20  # bytes; child.py's limit of a file


class Process:
    """The driver, running as one device."""

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
        """Starts it; whatever it does, it has ended when this ends.

        Args:
            driver: what it is.
            device: as modules for it are named.
            settings: those that make it the device.
            library: the driver's descriptor: what was checked is what is loaded, and who is nobody can load it.
            folder: a descriptor of one with the dynamic linker and C library that it needs, or None for this system's.
            private: the working folder.
            user: as whom to run what is in `folder`, from its first instruction on; None for who runs this.
        """
        libraries = f"/proc/self/fd/{folder}"
        linker = [] if folder is None else [f"{libraries}/{DYNAMIC_LINKER}", "--library-path", libraries]
        # With this system's libraries the child gives up its rights itself (child.py). Another system's dynamic linker
        # and C library never have them: root of a container could have written these.
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
        """What it found, as it wrote it, which can be anything.

        Args:
            seconds: that it has from its start on, for people.
            deadline: when they end, in time.monotonic(). It is killed then; if it has told all but the places of the
                driver's own kernels, this is the answer.

        Raises:
            Problem: nothing.
        """
        late = f"it has not ended after {seconds:.0f} s"
        if self._worker.wait(deadline - time.monotonic()):
            return self._told()
        self._worker.close(_SECONDS_TO_END)
        with contextlib.suppress(Problem):
            told = self._told()
            if isinstance(told, dict) and "no_own" in told:
                return {**told, "no_own": late}
        raise Problem(late)

    def _told(self) -> Any:
        self._answer.seek(0)
        text = self._answer.read(_MAX_ANSWER)
        if not text:
            raise Problem(self._last_words())
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise Problem("it answers what makes no sense") from None

    def _last_words(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4096))
        lines = self._errors.read(4096).decode("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its process ends without an answer{f' ({clean(last[:MAX_PROBLEM])})' if last else ''}"
