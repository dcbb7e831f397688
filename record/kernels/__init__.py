"""How launches and code objects become known: drivers, the injected library, the debug-ELF collector."""
