"""The sources of names in an ELF file, as users see them, the best first."""

DEBUG_INFORMATION, SYMBOL_TABLE, DYNAMIC_SYMBOLS = "debug information", "symbol table", "dynamic symbols"
RELOCATIONS, CODE = "relocations", "code"  # of functions that call others in libraries, and of signal handlers' ends
SOURCES = (DEBUG_INFORMATION, SYMBOL_TABLE, DYNAMIC_SYMBOLS, RELOCATIONS, CODE)
