"""The page of `--format=html`: what it shows, and its scripts and styles."""
