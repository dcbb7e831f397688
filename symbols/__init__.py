"""Symbolizes and unwinds CPU code: names of addresses, and the callers of frames."""
