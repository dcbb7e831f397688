"""Output formats: one module each, and the registry of all of them."""
