"""What keeps BPF from working here."""

from iaprof.basics.errors import IaprofError


class BpfUnavailable(IaprofError):
    """BPF programs cannot be loaded here, or compiled; the text says what to install or allow."""

    needs_bcc = False  # whether the kernel refused what ships, so that bcc and kernel headers are needed
