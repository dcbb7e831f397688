"""Joins stalls to launches: placements of kernels, their lifetimes, command lists, and the attribution of stalls."""
