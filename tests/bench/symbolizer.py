"""What llvm-symbolizer says of addresses, and in which way our names differ from it.

Differences, all of them meant:

- `other symbol`: the outermost function, of which there are several symbols at one address (the two constructors C1
  and C2, for one). llvm-symbolizer takes any; we take a global one before a weak one before a local one.
- `no function`: bytes between functions, as padding, which belong to a line but to no function. llvm-symbolizer has a
  line without a function for them; we have nothing.
- `no line`: assembly and the like, of which there are only symbols. llvm-symbolizer gives the source file that the
  symbol table has for local symbols; we give none.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from iaprof.symbols.names.names import Frame

SAME, OTHER_SYMBOL, NO_FUNCTION, NO_LINE = "same", "other symbol", "no function", "no line"
MEANT = {SAME, OTHER_SYMBOL, NO_FUNCTION, NO_LINE}
_STRUCTOR = re.compile(r"([CD])[0-9](E|I)")


def llvm_symbolizer(program: Path, addresses: Sequence[int]) -> list[list[Frame]]:
    """The frames of each address, the outermost first; one frame without a function where it knows none."""
    command = ["llvm-symbolizer", f"--obj={program}", "--functions=linkage", "--no-demangle", "--output-style=JSON"]
    asked = "".join(f"{address:#x}\n" for address in addresses)
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return [
        [Frame(each["FunctionName"], each["FileName"], each["Line"]) for each in reversed(json.loads(line)["Symbol"])]
        for line in done.stdout.splitlines()
    ]


def difference(ours: Sequence[Frame], theirs: Sequence[Frame]) -> str:
    """A word for how two chains differ."""
    if not ours and len(theirs) == 1 and not theirs[0].function:
        return NO_FUNCTION
    if list(ours) == list(theirs):
        return SAME
    if len(ours) != len(theirs):
        return "depth"
    if [each.function for each in ours[1:]] != [each.function for each in theirs[1:]]:
        return "inlined function"
    if _without_kind(ours[0].function) != _without_kind(theirs[0].function):
        return "function"
    if [(each.file, each.line) for each in ours] == [(each.file, each.line) for each in theirs]:
        return OTHER_SYMBOL
    return NO_LINE if len(ours) == 1 and not ours[0].file and not theirs[0].line else "file or line"


def differences(ours: Sequence[Sequence[Frame]], theirs: Sequence[Sequence[Frame]]) -> Counter[str]:
    """How many there are of each kind."""
    return Counter(difference(*each) for each in zip(ours, theirs, strict=True))


def _without_kind(function: str) -> str:
    """A mangled name that is the same for all constructors, and for all destructors, of a class."""
    return _STRUCTOR.sub(r"\1*\2", function)
