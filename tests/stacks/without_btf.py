"""Runs a program without the kernel's BTF, for itself alone: its recorder walks stacks by frame pointers."""

from __future__ import annotations

from iaprof.bpf.btf import VMLINUX

WITHOUT_BTF = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null "$0" && exec "$@"', str(VMLINUX))
"""Words before a command, for root."""
