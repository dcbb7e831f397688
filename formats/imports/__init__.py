"""Importers: captures from other tools' files."""
