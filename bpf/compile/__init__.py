"""Compiling the BPF programs, for releases and where a kernel refuses those that ship."""
