"""Sums of samples while stalls are joined: by address, divided among candidates, and as whole counts."""
