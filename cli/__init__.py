"""The `iaprof` command: one file per verb."""
