"""iaprof: from `main()` to the stalled GPU instruction, recorded first and reported anywhere."""

__version__ = "0.1.0"
