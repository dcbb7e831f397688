"""Reads ELF files, debug information, perf maps, jitdumps and the Linux kernel's symbols."""
