"""The page of `--format=html`: its data, scripts and styles."""
