"""Turning a compiler's symbol names into what the programmer wrote, parameters included, for CPU and GPU alike."""

from __future__ import annotations

import re

import multi_demangle  # type: ignore[import-untyped]

LONGEST_SYMBOL = 1 << 14  # bytes; a longer name is left as it is: demangled names can be far longer than mangled ones

# A method whose `this` points into an address space has a vendor qualifier in its nested name (_ZNU3AS4K2nn3Row...).
_QUALIFIED_THIS = re.compile(r"(_ZZ*N)U(\d{1,5})")
# SYCL names a kernel by the type that submits it: its symbol is that type's "typeinfo name".
_KERNEL_TYPE = "typeinfo name for "


def demangled(symbol: str) -> str:
    """The readable name of an Itanium C++ or Rust symbol; any other name as it is."""
    if not symbol.startswith(("_Z", "_R")) or len(symbol) > LONGEST_SYMBOL:
        return symbol
    name = str(multi_demangle.demangle_symbol(symbol))
    if name == symbol:
        plain = _without_qualified_this(symbol)
        name = str(multi_demangle.demangle_symbol(plain))
        if name == plain:
            return symbol
    return name.removeprefix(_KERNEL_TYPE)


def _without_qualified_this(symbol: str) -> str:
    """The symbol without the vendor qualifiers of `this`, which no demangler here knows and no reader misses."""
    while match := _QUALIFIED_THIS.match(symbol):
        symbol = match[1] + symbol[match.end() + int(match[2]) :]
    return symbol
