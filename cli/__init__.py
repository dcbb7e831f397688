"""The `iaprof` command: one module per verb."""
