"""Captures made of traces in Chrome's format, which sandboxed children read."""
