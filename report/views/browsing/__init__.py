"""A profile as a tree that opens level by level, for the interactive view."""
