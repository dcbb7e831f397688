"""A made-up vendor: what a second vendor needs, and nothing else. test_second_vendor.py adds it to a copy of iaprof.

Its samples are like those of CUPTI: a row for each instruction and reason, with a function and an offset, and a count.
Its code objects are JSON behind a magic. An instruction has four bytes: an opcode, and three of operands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iaprof.gpu.code import CodeFunction, CodeKernel, CodeObject, CodeObjectError
from iaprof.gpu.instructions import (
    UNDECODABLE,
    Decoder,
    Decoding,
    Dependencies,
    Instruction,
    InstructionSet,
    NotDecoded,
    OpenProgram,
    Wait,
)
from iaprof.gpu.samples import SampleLayout, SampleRows
from iaprof.gpu.vendor import Vendor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"ACME1\n"
BYTES = 4  # of an instruction
NO_ABBREVIATIONS: dict[str, str] = {}
MEANINGS = {
    "active": "an instruction was issued: no stall",
    "memory": "waits for the memory of Acme",
    "other": "anything else, on Acme's GPUs",
}
ROWS = SampleRows("acme_sample", ("module", "function", "offset", "reason", "count"), required=5, since=11)


class Sets(InstructionSet):
    """Acme's instruction sets."""

    NINE = 9

    @property
    def vendor(self) -> str:
        return "acme"


class Sums(SampleLayout):
    """Rows that have sums: `reason` is an index into MEANINGS."""

    name = "acme-sums"
    reasons = tuple(MEANINGS)
    words = 5

    @property
    def rows(self) -> SampleRows:
        return ROWS

    @property
    def most(self) -> int:
        return (1 << 32) - 1

    @property
    def unit_bits(self) -> int:
        return 2

    def ips(self, words: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        """An address is a number of a module, of a function in it, and an offset: the code objects say the same."""
        module, function, offset = words[:3]
        return ((module << 32) + (function << 16) + offset).astype("u8")

    def counts(self, words: list[NDArray[np.uint64]], reason: str) -> NDArray[np.uint32]:
        found = words[4].astype("u4")
        found[words[3] != self._number(reason)] = 0
        return found

    def ip_sql(self) -> str:
        return "(w0 << 32) + (w1 << 16) + w2"

    def count_sql(self, reason: str) -> str:
        return f"CASE WHEN w3 = {self._number(reason)} THEN w4 ELSE 0 END"

    def _number(self, reason: str) -> int:
        """The word for a reason; one that no record has for those of other vendors."""
        return self.reasons.index(reason) if reason in self.reasons else len(self.reasons)


class AcmeDecoder(Decoder):
    """Decodes: 1 is a load, 2 adds what was loaded, 3 ends."""

    def decode(self, instruction_set: Any, code: bytes, texts: bool = True) -> Decoding:
        if len(code) % BYTES:
            raise NotDecoded("the code is cut off")
        pcs = list(range(0, len(code), BYTES))
        names = [{1: "load", 2: "add", 3: "end"}.get(code[pc], UNDECODABLE) for pc in pcs]
        shown = [f"{name} r{code[pc + 1]}, r{code[pc + 2]}" for name, pc in zip(names, pcs, strict=True)]
        return Decoding(pcs, [BYTES] * len(pcs), names, shown if texts else [], [[] for _ in pcs] if texts else [], "")


@dataclass(frozen=True)
class LoadWait(Wait):
    """A wait for a load."""

    def describe(self, instructions: Sequence[str]) -> str:
        return f"waits for what {' and '.join(instructions)} fetches"

    def opcode(self, text: str) -> str:
        return text.split()[0]


class Loads(Dependencies):
    """An add waits for all loads before it."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._instructions = instructions

    def waits(self, offset: int) -> Sequence[Wait]:
        loads = [each.offset for each in self._instructions if each.text.startswith("load") and each.offset < offset]
        adds = [each for each in self._instructions if each.offset == offset and each.text.startswith("add")]
        return [LoadWait("load", ("memory",), tuple(loads))] if adds and loads else []


class Acme(Vendor):
    """Acme."""

    name = "acme"
    meanings = MEANINGS
    abbreviations = NO_ABBREVIATIONS
    rows = ROWS
    instruction_sets = Sets
    decoder = "AcmeDecode"
    decoder_packages = ("acme-decode", "acme-decode")
    longest_instruction = BYTES

    @property
    def layouts(self) -> Mapping[str, SampleLayout]:
        return LAYOUTS

    def instruction_set(self, major: int, minor: int) -> InstructionSet | None:
        return Sets.NINE if major == 9 else None

    def generation(self, major: int, minor: int) -> str:
        return "Acme Nine" if major == 9 else ""

    def sampled(self) -> Mapping[InstructionSet, str]:
        return {Sets.NINE: "Acme Nine"}

    def is_code(self, data: bytes) -> bool:
        return data.startswith(MAGIC)

    def code_reader(self) -> Callable[[bytes], CodeObject]:
        return read_code

    def open_decoder(self, open_program: OpenProgram) -> Decoder:
        del open_program
        return AcmeDecoder()

    def dependencies(self, instructions: Sequence[Instruction]) -> Dependencies:
        return Loads(instructions)


LAYOUTS: dict[str, SampleLayout] = {"acme-sums": Sums()}


def code_object(module: int, functions: Mapping[str, bytes]) -> bytes:
    """A code object with the code of each function."""
    codes = {name: code.hex() for name, code in functions.items()}
    return MAGIC + json.dumps({"module": module, "code": codes}).encode()


def read_code(data: bytes) -> CodeObject:
    """Reads what `code_object` made: function N of module M lies at M << 32 | N << 16."""
    try:
        found = json.loads(data[len(MAGIC) :])
        codes = [(name, bytes.fromhex(code)) for name, code in found["code"].items()]
        kernels = [
            CodeKernel(name, (found["module"] << 32) + (number << 16), len(code), code, (CodeFunction("tail", 8, 4),))
            for number, (name, code) in enumerate(codes)
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CodeObjectError("it is no code object of Acme") from None
    return CodeObject(tuple(kernels), has_debug=False, placed=True)
