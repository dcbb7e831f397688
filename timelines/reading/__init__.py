"""Captures made of traces of other tools, which sandboxed children read."""
