"""The sandbox that reads zebins and GPU code: one's own, or one that is shared."""

from __future__ import annotations

from iaprof.sandbox.closing import Closing
from iaprof.sandbox.parent import Limits, Sandbox


def gpu_sandbox(limits: Limits | None = None) -> Sandbox:
    """A sandbox in which report.gpu_reader works."""
    return Sandbox("iaprof.report.gpu.reader", limits)


class GpuSandboxed(Closing):
    """Has its work done in such a sandbox; also a context manager."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        """`sandbox` is for sharing a child process; without one, this has its own and closes it."""
        self._is_shared = sandbox is not None
        self._sandbox = sandbox or gpu_sandbox()

    def close(self) -> None:
        """End the child process, unless it is shared."""
        if not self._is_shared:
            self._sandbox.close()
