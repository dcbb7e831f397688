"""Demangles the symbols of CPU and GPU code, parameters included."""

from __future__ import annotations

import re

import multi_demangle  # type: ignore[import-untyped]

LONGEST_SYMBOL = 1 << 14  # bytes; longer symbols stay mangled: a demangled name can be far longer than its symbol

# The symbol of a method whose `this` points into an address space has a vendor qualifier: _ZNU3AS4K2nn3Row... In the
# symbol of a lambda, the qualifier follows the name of the enclosing function: _ZZ4mainENU3AS4KUlvE_clEv.
_QUALIFIED_THIS = re.compile(r"(?<=N)U(\d{1,2})")
_ADDRESS_SPACE = re.compile(r"AS\d+|CL[a-z]+")  # clang's names for address spaces, of targets and of OpenCL
# SYCL names a kernel after the type that submits it: the symbol is the "typeinfo name" of that type.
_KERNEL_TYPE = "typeinfo name for "
# For a lambda that takes an object, as SYCL's take an item, multi_demangle prints the call operator's parameters among
# the lambda's own: {lambda(item(item))#1}::operator() const. The name is printed again without parameters.
_MISPRINTED = ("}::operator()", "}::operator() const")
_NO_PARAMETERS = multi_demangle.DemangleOptions(parameters=False)

PLT = "@plt"  # behind the name of a function, that of the entry of a procedure linkage table that jumps to it


def demangled(symbol: str) -> str:
    """Returns the demangled name of an Itanium C++ or Rust symbol, and any other name unchanged."""
    if not symbol.startswith(("_Z", "_R")) or len(symbol) > LONGEST_SYMBOL:
        return symbol
    if symbol.endswith(PLT):
        return demangled(symbol.removesuffix(PLT)) + PLT
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
    """Returns the symbol without the address space of `this`, which multi_demangle does not know.

    The address spaces of parameters stay: `PU3AS1Kf` becomes `float const AS1*`.
    """
    parts, position = [], 0
    for match in _QUALIFIED_THIS.finditer(symbol):
        end = match.end() + int(match[1])
        if match.start() >= position and _ADDRESS_SPACE.fullmatch(symbol, match.end(), end):
            parts.append(symbol[position : match.start()])
            position = end
    return "".join(parts) + symbol[position:]
