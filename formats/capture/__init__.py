"""The capture: its schema, and how it is written and read."""
