"""`python -m iaprof` is the `iaprof` command."""

from iaprof.cli.main import main

main()
