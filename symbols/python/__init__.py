"""Reads CPython's structures: where an interpreter keeps its frames, and the texts and lines of code objects."""
