"""Captures made of other tools' files."""
