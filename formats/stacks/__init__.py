"""Stacks as columns, as trees, and as the frames that people read."""
