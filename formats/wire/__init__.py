"""What the kernel and our BPF programs send."""
