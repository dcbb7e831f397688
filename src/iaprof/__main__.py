"""`python -m iaprof` is the `iaprof` command."""

from iaprof.cli.start import main

main()
