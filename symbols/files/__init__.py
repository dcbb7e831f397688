"""What is read of ELF files, debug information, perf maps and the kernel's symbols."""
