"""The sources of names in an ELF file, as users see them, the best first."""

DEBUG_INFORMATION, SYMBOL_TABLE, DYNAMIC_SYMBOLS = "debug information", "symbol table", "dynamic symbols"
SOURCES = (DEBUG_INFORMATION, SYMBOL_TABLE, DYNAMIC_SYMBOLS)
