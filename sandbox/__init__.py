"""Reads untrusted data in child processes without privileges and with limits."""
