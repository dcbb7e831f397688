"""The formats of data from the kernel and from iaprof's BPF programs."""
