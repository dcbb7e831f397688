"""Turning a compiler's symbol names into what the programmer wrote, parameters included, for CPU and GPU alike."""

from __future__ import annotations

import re

import multi_demangle  # type: ignore[import-untyped]

LONGEST_SYMBOL = 1 << 14  # bytes; a longer name is left as it is: demangled names can be far longer than mangled ones

# A method whose `this` points into an address space has a vendor qualifier in its nested name (_ZNU3AS4K2nn3Row...),
# a lambda's in the nested name behind that of the function around it (_ZZ4mainENU3AS4KUlvE_clEv).
_QUALIFIED_THIS = re.compile(r"(?<=N)U(\d{1,2})")
_ADDRESS_SPACE = re.compile(r"AS\d+|CL[a-z]+")  # clang's names, of targets and of OpenCL
# SYCL names a kernel by the type that submits it: its symbol is that type's "typeinfo name".
_KERNEL_TYPE = "typeinfo name for "
# Of a lambda that takes an object, as SYCL's take an item, multi_demangle prints the call operator's parameters among
# the lambda's: {lambda(item(item))#1}::operator() const. The lambda's own say it all.
_MISPRINTED = ("}::operator()", "}::operator() const")
_NO_PARAMETERS = multi_demangle.DemangleOptions(parameters=False)


def demangled(symbol: str) -> str:
    """The readable name of an Itanium C++ or Rust symbol; any other name as it is."""
    if not symbol.startswith(("_Z", "_R")) or len(symbol) > LONGEST_SYMBOL:
        return symbol
    form, name = symbol, str(multi_demangle.demangle_symbol(symbol))
    if name == form:
        form = _without_qualified_this(symbol)
        name = str(multi_demangle.demangle_symbol(form))
        if name == form:
            return symbol
    if name.endswith(_MISPRINTED):
        name = str(multi_demangle.demangle_symbol(form, _NO_PARAMETERS))
    return name.removeprefix(_KERNEL_TYPE)


def _without_qualified_this(symbol: str) -> str:
    """The symbol without the address spaces of `this`, which no demangler here knows and no reader misses.

    Those of parameters stay: `PU3AS1Kf` becomes `float const AS1*`.
    """
    parts, position = [], 0
    for match in _QUALIFIED_THIS.finditer(symbol):
        end = match.end() + int(match[1])
        if match.start() >= position and _ADDRESS_SPACE.fullmatch(symbol, match.end(), end):
            parts.append(symbol[position : match.start()])
            position = end
    return "".join(parts) + symbol[position:]
