"""The command that installs a package on this distribution."""

from __future__ import annotations

import shutil


def install_command(debian: str, fedora: str) -> str:
    """Returns the command, given the package's names in Debian and Ubuntu, and in Fedora; empty on other systems."""
    if shutil.which("apt"):
        return f"sudo apt install {debian}"
    if shutil.which("dnf"):
        return f"sudo dnf install {fedora}"
    return ""
