"""What names in an ELF file may be from, in the words that people read; the best first."""

DEBUG_INFORMATION, SYMBOL_TABLE, DYNAMIC_SYMBOLS = "debug information", "symbol table", "dynamic symbols"
SOURCES = (DEBUG_INFORMATION, SYMBOL_TABLE, DYNAMIC_SYMBOLS)
