"""Finds drivers in processes, and attaches probes to them."""
