"""BPF programs and how they are loaded and attached, ring buffers, and perf's side-band."""
