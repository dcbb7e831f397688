"""Time lines of accelerators at the command line: their options, tables and messages."""
