"""Errors, output files and number formatting that every package shares."""
