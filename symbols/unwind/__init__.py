"""Unwinding without frame pointers: call frame information, the rules that BPF walks by, and stacks from copies."""
