"""What runs on the profiled machine: sources, the loop that pumps them, the spool."""
