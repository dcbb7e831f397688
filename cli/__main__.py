"""`python -m iaprof.cli` is the `iaprof` command."""

from iaprof.cli.start import main

main()
