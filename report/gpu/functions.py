"""Finds the functions and inlined calls that a GPU instruction belongs to, from DWARF's tree of entries.

Entries are read in the order of the section, without following sibling references, and other references are looked up
among the entries already read. So no file can make this loop. Addresses are canonical (48 bits, gpu.code).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from elftools.dwarf.die import DIE
from elftools.dwarf.ranges import BaseAddressEntry

from iaprof.gpu.code import canonical
from iaprof.report.gpu.lines import MAX_LINE, FileTable, text
from iaprof.symbols.names.demangle import demangled

MAX_ENTRIES = 8_000_000
MAX_RANGES = 1_000_000
MAX_SCOPE_DEPTH = 128  # of nested lexical blocks and inlined calls; deeper ones count as their parent
MAX_CHAIN = 16  # of abstract origins and specifications; compilers make chains of two

_SCOPES = {"DW_TAG_namespace", "DW_TAG_class_type", "DW_TAG_structure_type", "DW_TAG_union_type", "DW_TAG_module"}
_CLOSURE_PREFIX = "Ul"  # of a lambda's class in mangled names (Itanium C++ ABI, closure-type-name)
_LOCAL_REFERENCES = {"DW_FORM_ref1", "DW_FORM_ref2", "DW_FORM_ref4", "DW_FORM_ref8", "DW_FORM_ref", "DW_FORM_ref_udata"}
_CONSTANTS = {
    "DW_FORM_data1",
    "DW_FORM_data2",
    "DW_FORM_data4",
    "DW_FORM_data8",
    "DW_FORM_udata",
    "DW_FORM_sdata",
    "DW_FORM_implicit_const",
}


class TooMuchDebugInfo(Exception):
    """The debug information has more entries, ranges or segments than any real module."""


@dataclass(slots=True)
class Function:
    """A subprogram entry. The entry that it refers to may have further attributes of the function."""

    name: str  # qualified with namespaces and classes; "": the entry has none
    linkage_name: str
    file: str
    line: int  # of the declaration; 0: unknown
    refers_to: int | None  # another entry's offset in .debug_info
    is_nested: bool  # inside another function, as lambdas are: lines after its own may be the outer function's


@dataclass(slots=True)
class Scope:
    """A function, an inlined call or a lexical block."""

    parent: Scope | None  # the scope that contains it
    function: int | None  # the offset of the function's entry; None: a block
    ranges: list[tuple[int, int]]  # [start, end)
    call_file: str = ""
    call_line: int = 0
    depth: int = 0
    calls: list[Scope] = field(default_factory=list)  # for a function: the calls inlined into it

    @property
    def innermost_function(self) -> Scope | None:
        """This scope, or its nearest ancestor, that is not a block."""
        scope: Scope | None = self
        while scope is not None and scope.function is None:
            scope = scope.parent
        return scope

    def distance(self, address: int) -> int:
        """Returns the distance in bytes from an address to this scope's code, or its parent's if it has no ranges."""
        scope = self
        while not scope.ranges and scope.parent is not None:
            scope = scope.parent
        return min((max(start - address, address - end + 1, 0) for start, end in scope.ranges), default=1 << 64)


class FunctionTree:
    """The functions of a module, and the scopes in their code."""

    def __init__(self) -> None:
        self._functions: dict[int, Function] = {}  # by offset in .debug_info
        self._roots: list[tuple[int, int, list[Scope]]] = []  # start, end, scopes in preorder
        self._starts: list[int] = []
        self._lines: dict[str, list[int]] = {}  # by file: lines at which functions are declared, ascending
        self._names: dict[int, str] = {}
        self._calls: dict[int, dict[tuple[str, int], list[Scope]]] = {}  # by id of the scope
        self._entries_left = MAX_ENTRIES
        self._ranges_left = MAX_RANGES

    def read(self, unit: Any, files: FileTable | None, into: list[list[Scope]]) -> None:
        """Reads one compile unit.

        Args:
            unit: pyelftools' CompileUnit.
            files: the unit's files; None: unknown.
            into: gets the functions with code, each as a list of its scopes that begins with itself. `scopes` finds
                them after `add`.

        Raises:
            TooMuchDebugInfo: the module exceeds a limit.
            Exception: anything that pyelftools raises on damaged DWARF. Entries before the damage are kept.
        """
        _UnitReader(self, unit, files, into).read()

    def add(self, functions: Iterable[list[Scope]]) -> None:
        """Adds functions of units that were read, at the current addresses of their scopes."""
        for scopes in functions:
            self._roots.extend((start, end, scopes) for start, end in scopes[0].ranges)

    def finish(self) -> None:
        """Sorts what was added. Must be called once, after the last `add`."""
        self._roots.sort(key=lambda root: root[:2])
        self._starts = [start for start, _, _ in self._roots]
        lines: dict[str, set[int]] = {}
        for function in self._functions.values():
            if function.file and function.line and not function.is_nested:
                lines.setdefault(function.file, set()).add(function.line)
        self._lines = {file: sorted(known) for file, known in lines.items()}

    def scopes(self, start: int, end: int) -> Iterator[Scope]:
        """Yields every scope of functions with code between `start` and `end`, parents first."""
        low, high = bisect_right(self._starts, start), bisect_right(self._starts, end - 1)
        seen: set[int] = set()
        for _, root_end, scopes in self._roots[max(low - 1, 0) : high]:
            if root_end > start and id(scopes) not in seen:
                seen.add(id(scopes))
                yield from scopes

    def names(self, function: int | None) -> set[str]:
        """Returns all names in a function's entries: mangled and qualified."""
        chain = self._chain(function)
        return {name for each in chain for name in (each.linkage_name, each.name) if name}

    def name(self, function: int | None) -> str:
        """Returns a function's name: demangled if its linkage name is known, else qualified."""
        if function is None:
            return ""
        if function not in self._names:
            chain = self._chain(function)
            linkage = next((each.linkage_name for each in chain if each.linkage_name), "")
            self._names[function] = (
                demangled(linkage) if linkage else next((each.name for each in chain if each.name), "")
            ) or "[unnamed function]"
        return self._names[function]

    def call_of_line(self, function: Scope, address: int, file: str, line: int) -> Scope | None:
        """Returns the call inlined into `function` that a line's code must come from; None if it is the function's own.

        Intel's compiler omits the addresses of inlined calls with little remaining code, and single instructions from
        the ranges of others. But the line table has their lines. A line belongs to the last function declared before
        it; if that one was inlined more than once, this returns the call nearest to `address`.
        """
        known = self._lines.get(file)
        index = bisect_right(known, line) - 1 if known and line else -1
        if known is None or index < 0:
            return None
        declared = file, known[index]
        if self._declared_at(function.function) in (declared, ("", 0)):
            return None
        calls = self._calls_in(function).get(declared, ())
        return min(calls, key=lambda call: call.distance(address), default=None)

    def _calls_in(self, function: Scope) -> dict[tuple[str, int], list[Scope]]:
        """Returns all calls inlined into a function, recursively, by the declaration of the called function."""
        calls = self._calls.get(id(function))
        if calls is None:
            calls = self._calls[id(function)] = {}
            waiting = list(reversed(function.calls))
            while waiting:
                call = waiting.pop()
                calls.setdefault(self._declared_at(call.function), []).append(call)
                waiting.extend(reversed(call.calls))
        return calls

    def _declared_at(self, function: int | None) -> tuple[str, int]:
        chain = self._chain(function)
        return next(((each.file, each.line) for each in chain if each.file and each.line), ("", 0))

    def _chain(self, function: int | None) -> list[Function]:
        """Returns a function's entry and those that it refers to, directly or indirectly."""
        chain: list[Function] = []
        while function is not None and len(chain) < MAX_CHAIN:
            entry = self._functions.get(function)
            if entry is None or any(entry is known for known in chain):
                break
            chain.append(entry)
            function = entry.refers_to
        return chain

    def _charge(self, entries: int = 0, ranges: int = 0) -> None:
        self._entries_left -= entries
        self._ranges_left -= ranges
        if self._entries_left < 0 or self._ranges_left < 0:
            raise TooMuchDebugInfo


@dataclass(slots=True)
class _OpenEntry:
    """An entry whose children are being read."""

    qualifier: str  # of names inside: `outer::inner::`
    scope: Scope | None = None
    scopes: list[Scope] = field(default_factory=list)  # of the function that contains the scope
    is_nested: bool = False  # inside a function


class _UnitReader:
    """Reads one compile unit's entries."""

    def __init__(self, tree: FunctionTree, unit: Any, files: FileTable | None, roots: list[list[Scope]]) -> None:
        self._tree = tree
        self._unit = unit
        self._files = files
        self._base = 0
        self._functions_found = roots  # for each function with code: its scopes in preorder, itself first

    def read(self) -> None:
        """Reads the unit's entries."""
        unit = self._unit
        top = unit.get_top_DIE()
        self._base = self._address(top, "DW_AT_low_pc") or 0
        stream = unit.dwarfinfo.debug_info_sec.stream
        end = unit.cu_offset + unit.size
        offset = unit.cu_die_offset
        open_entries: list[_OpenEntry] = []
        while offset < end:
            entry = DIE(unit, stream, offset)
            offset += entry.size
            self._tree._charge(entries=1)
            if entry.is_null():
                if len(open_entries) < 2:
                    break  # the end of the unit's own children: padding may follow
                open_entries.pop()
                continue
            opened = self._enter(entry, open_entries[-1] if open_entries else _OpenEntry(""))
            if entry.has_children:
                open_entries.append(opened)
            elif not open_entries:
                break

    def _enter(self, entry: Any, parent: _OpenEntry) -> _OpenEntry:
        """Stores an entry's function or scope; returns the context for its children."""
        tag = entry.tag
        if tag in _SCOPES:
            name = self._name(entry, "DW_AT_name") or "(anonymous)"
            return _OpenEntry(f"{parent.qualifier}{name}::", is_nested=parent.is_nested)
        if tag == "DW_TAG_subprogram":
            self._tree._functions[entry.offset] = self._function(entry, parent)
            ranges = self._ranges(entry)
            if not ranges:
                return _OpenEntry(parent.qualifier, is_nested=True)
            scopes = [Scope(None, entry.offset, ranges)]
            self._functions_found.append(scopes)
            return _OpenEntry(parent.qualifier, scopes[0], scopes, is_nested=True)
        if tag in ("DW_TAG_inlined_subroutine", "DW_TAG_lexical_block") and parent.scope is not None:
            inner = self._inner_scope(entry, parent.scope, parent.scopes)
            return _OpenEntry(parent.qualifier, inner, parent.scopes, is_nested=True)
        return parent

    def _inner_scope(self, entry: Any, parent: Scope, scopes: list[Scope]) -> Scope:
        if parent.depth >= MAX_SCOPE_DEPTH:
            return parent
        ranges = self._ranges(entry)
        if entry.tag == "DW_TAG_lexical_block":
            if not ranges:
                return parent
            scope = Scope(parent, None, ranges, depth=parent.depth + 1)
        else:
            origin = self._reference(entry, "DW_AT_abstract_origin")
            scope = Scope(
                parent,
                -1 if origin is None else origin,
                ranges,
                call_file=self._file(entry, "DW_AT_call_file"),
                call_line=self._number(entry, "DW_AT_call_line"),
                depth=parent.depth + 1,
            )
            caller = parent.innermost_function
            if caller is not None:
                caller.calls.append(scope)
        scopes.append(scope)
        return scope

    def _function(self, entry: Any, parent: _OpenEntry) -> Function:
        name = self._name(entry, "DW_AT_name")
        linkage_name = self._name(entry, "DW_AT_linkage_name") or self._name(entry, "DW_AT_MIPS_linkage_name")
        origin = self._reference(entry, "DW_AT_abstract_origin")
        return Function(
            name=parent.qualifier + name if name else "",
            linkage_name=linkage_name,
            file=self._file(entry, "DW_AT_decl_file"),
            line=self._number(entry, "DW_AT_decl_line"),
            refers_to=origin if origin is not None else self._reference(entry, "DW_AT_specification"),
            is_nested=parent.is_nested or _CLOSURE_PREFIX in linkage_name,
        )

    def _ranges(self, entry: Any) -> list[tuple[int, int]]:
        """Returns the ranges of an entry's code, as canonical addresses; empty if it has none."""
        if "DW_AT_ranges" in entry.attributes:
            found = self._range_list(entry.attributes["DW_AT_ranges"])
        else:
            start = self._address(entry, "DW_AT_low_pc")
            end = entry.attributes.get("DW_AT_high_pc")
            if start is None or end is None or not isinstance(end.value, int):
                return []
            found = [(start, start + end.value if end.form in _CONSTANTS else end.value)]
        self._tree._charge(ranges=len(found))
        placed = [(canonical(start), canonical(end - 1) + 1) for start, end in found if start < end]
        return [(start, end) for start, end in placed if start < end]

    def _range_list(self, attribute: Any) -> list[tuple[int, int]]:
        lists = self._unit.dwarfinfo.range_lists()
        if lists is None or not isinstance(attribute.value, int):
            return []
        base = self._base
        found = []
        for each in lists.get_range_list_at_offset(attribute.value, self._unit):
            if isinstance(each, BaseAddressEntry):
                base = each.base_address
            else:
                shift = 0 if each.is_absolute else base
                found.append((each.begin_offset + shift, each.end_offset + shift))
        return found

    def _address(self, entry: Any, name: str) -> int | None:
        attribute = entry.attributes.get(name)
        return attribute.value if attribute is not None and isinstance(attribute.value, int) else None

    def _reference(self, entry: Any, name: str) -> int | None:
        attribute = entry.attributes.get(name)
        if attribute is None or not isinstance(attribute.value, int):
            return None
        return attribute.value + (self._unit.cu_offset if attribute.form in _LOCAL_REFERENCES else 0)

    def _number(self, entry: Any, name: str) -> int:
        attribute = entry.attributes.get(name)
        value = attribute.value if attribute is not None else 0
        return value if isinstance(value, int) and 0 <= value <= MAX_LINE else 0

    def _file(self, entry: Any, name: str) -> str:
        return self._files.path(self._number(entry, name)) if self._files and name in entry.attributes else ""

    def _name(self, entry: Any, name: str) -> str:
        attribute = entry.attributes.get(name)
        return text(attribute.value) if attribute is not None and isinstance(attribute.value, bytes) else ""
