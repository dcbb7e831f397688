"""Everything BPF: programs, probes, ring buffers and the perf side-band."""
