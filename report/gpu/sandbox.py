"""Starts or shares the sandbox that reads code objects and GPU code."""

from __future__ import annotations

from iaprof.sandbox.parent import Limits, Sandbox
from iaprof.sandbox.worker import Closing


def gpu_sandbox(limits: Limits | None = None) -> Sandbox:
    """Returns a sandbox that runs report.gpu.reader."""
    return Sandbox("iaprof.report.gpu.reader", limits)


class GpuSandboxed(Closing):
    """Base class of what works in such a sandbox; also a context manager."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        """Takes a child process to share; None: starts one, which `close` ends."""
        self._is_shared = sandbox is not None
        self._sandbox = sandbox or gpu_sandbox()

    def close(self) -> None:
        """Ends the child process, unless it is shared."""
        if not self._is_shared:
            self._sandbox.close()
