"""CPython's own structures: where an interpreter keeps its frames, and the texts and lines of its code objects."""
