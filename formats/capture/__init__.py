"""The capture file: its schema, reader and writer."""
