"""Names the addresses of a recording's stacks, from the files of its processes."""
