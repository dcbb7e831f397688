"""Compiles the BPF programs: for a release, and on machines whose kernel refuses those that ship."""
