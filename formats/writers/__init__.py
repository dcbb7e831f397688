"""Output formats: a file for each, and the registry that knows them all."""
