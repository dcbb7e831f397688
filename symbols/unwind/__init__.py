"""Unwinding without frame pointers: call frame information, rules for BPF made of it, and walks of copied stacks."""
