"""What reports show of a trace once its stages have run: stacks, totals, differences, pictures."""
