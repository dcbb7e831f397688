"""The error that says why BPF does not work on this machine."""

from iaprof.basics.errors import IaprofError


class BpfUnavailable(IaprofError):
    """BPF programs cannot be loaded or compiled here; the text says what to install or allow."""

    needs_bcc = False  # the kernel refused the programs that ship, so bcc and kernel headers are needed
