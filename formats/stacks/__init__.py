"""Stacks as columns, as trees, and as lists of frames."""
