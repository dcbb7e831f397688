"""Makes `python -m iaprof.cli` the `iaprof` command."""

from iaprof.cli.start import main

main()
