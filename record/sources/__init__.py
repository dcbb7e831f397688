"""What is recorded: one file per source of rows."""
