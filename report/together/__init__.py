"""Traces beside stalls: their clocks joined to a capture's, and the operators in which launches happened."""
