"""Sections and symbols that an ELF file must have, typed as pyelftools types them."""

from __future__ import annotations

from typing import TypeVar

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import Section, Symbol, SymbolTableSection

_Kind = TypeVar("_Kind", bound=Section)


def section(elf: ELFFile, name: str, kind: type[_Kind]) -> _Kind:
    """Returns the section of that name, which must be of that kind."""
    found = elf.get_section_by_name(name)
    assert isinstance(found, kind), name
    return found


def symbols(elf: ELFFile, table: str = ".dynsym") -> SymbolTableSection:
    """Returns a symbol table."""
    return section(elf, table, SymbolTableSection)


def symbol(elf: ELFFile, name: str, table: str = ".dynsym") -> Symbol:
    """Returns the only symbol of that name."""
    found = symbols(elf, table).get_symbol_by_name(name)
    assert found is not None, name
    (only,) = found
    return only
