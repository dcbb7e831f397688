"""`python -m iaprof.cli` is the `iaprof` command."""

from iaprof.cli.main import main

main()
