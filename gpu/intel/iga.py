"""Binds Intel's decoder IGA (libiga64), through cffi in ABI mode: iga_calls.py has DECLARATIONS as cffi parses them.

IGA is C++ that parses untrusted bytes, so this runs only in the sandboxed child; other code uses report.gpu.decoder.
The packages contain no header: the declarations are from iga.h and kv.h of intel-graphics-compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from typing import Any

from iaprof.gpu.instructions import UNDECODABLE, Decoder, Decoding, NoDecoder, NotDecoded
from iaprof.gpu.intel.iga_calls import ffi
from iaprof.gpu.intel.instruction_set import Platform

LIBRARY_VARIABLE = "IAPROF_IGA_LIBRARY"
PACKAGES = "libigc2 (Debian unstable, Ubuntu) or intel-igc-core (Intel's repository)"
MIN_CODE_BYTES = 8  # a compacted instruction; IGA crashes on less

DECLARATIONS = """
const char *iga_version_string(void);
const char *iga_status_to_string(int32_t status);
int32_t iga_platforms_list(size_t bytes, uint32_t *platforms, size_t *bytes_needed);
struct kv_t *kv_create(uint32_t platform, const void *bytes, size_t length, int32_t *status,
                       char *errbuf, size_t errcap, uint32_t swsb_mode);
void kv_delete(struct kv_t *);
int32_t kv_get_inst_size(const struct kv_t *, int32_t pc);
uint32_t kv_get_opcode(const struct kv_t *, int32_t pc);
size_t kv_get_inst_syntax(const struct kv_t *, int32_t pc, char *buf, size_t cap, uint32_t fmt_opts,
                          void *get_label, void *env);
uint32_t kv_get_inst_targets(const struct kv_t *, int32_t pc, int32_t *pcs);
int32_t iga_opspec_from_op(uint32_t platform, uint32_t op, void **opspec);
int32_t iga_opspec_mnemonic(void *opspec, char *buf, size_t *length);
"""
_FUNCTIONS = re.findall(r"(\w+)\(", DECLARATIONS)

_DECODE_ERROR = 4  # IGA_DECODE_ERROR: IGA could not decode some instructions, but decoded the others
_UNSUPPORTED_PLATFORM = 10  # IGA_UNSUPPORTED_PLATFORM
_ILLEGAL = "illegal"  # the mnemonic of opcode 0, and of bytes that IGA does not know
_END_OF_THREAD = 4  # in a send's fifth byte
_OPCODE_BITS = 0x7F  # of an instruction's first byte; 0 is the real `illegal` on every platform
_MESSAGE_BYTES = 4096
_SYNTAX_BYTES = 4096
_MAX_CODE_BYTES = 0x7FFF_FFFF  # pcs are int32_t
_MOST_KEPT = 2 << 20  # bytes of code whose instructions are kept: with texts up to 70 MB


class Iga(Decoder):
    """A loaded libiga64."""

    def __init__(self) -> None:
        """Loads the first library that is found.

        Raises:
            NoDecoder: there is none; the text has the dynamic loader's message.
        """
        self._ffi = ffi
        self.path, self._lib = self._load()
        self.version = self._text(self._lib.iga_version_string())
        self.platforms = self._platforms()
        self._mnemonics: dict[Platform, dict[int, str]] = {}  # by platform and opcode
        self._kept: dict[tuple[Platform, bytes, bool], Decoding] = {}  # by the arguments of `decode`
        self._room = _MOST_KEPT

    def decode(self, instruction_set: Platform, code: bytes, texts: bool = True) -> Decoding:
        """See Decoder; code has MIN_CODE_BYTES or more.

        It is decoded once: each process of a program compiles the same kernels, into modules of its own.
        """
        key = instruction_set, code, texts
        if (found := self._kept.get(key)) is None:
            found = self._decode(*key)
            if len(code) <= self._room:
                self._kept[key] = found
                self._room -= len(code)
        return found

    def _decode(self, platform: Platform, code: bytes, texts: bool) -> Decoding:
        if not MIN_CODE_BYTES <= len(code) <= _MAX_CODE_BYTES:
            raise NotDecoded(f"{len(code)} bytes are not an instruction: the shortest has {MIN_CODE_BYTES}")
        if platform.value not in self.platforms:
            raise NoDecoder(
                f"{self.path} (version {self.version}) does not know {platform.name}: install a newer {PACKAGES}"
            )
        status = self._ffi.new("int32_t *")
        message = self._ffi.new("char[]", _MESSAGE_BYTES)
        # The view points to these bytes, so the buffer must outlive it.
        buffer = self._ffi.new("uint8_t[]", code)
        view = self._lib.kv_create(platform.value, buffer, len(code), status, message, _MESSAGE_BYTES, 0)
        try:
            if status[0] == _UNSUPPORTED_PLATFORM:
                raise NoDecoder(f"{self.path} does not know {platform.name}: install a newer {PACKAGES}")
            message_text = self._text(message).strip()
            if view == self._ffi.NULL or status[0] not in (0, _DECODE_ERROR):
                raise NotDecoded(message_text or self._text(self._lib.iga_status_to_string(status[0])))
            return self._instructions(view, platform, code, texts, message_text)
        finally:
            if view != self._ffi.NULL:
                self._lib.kv_delete(view)

    def _instructions(self, view: object, platform: Platform, code: bytes, texts: bool, message_text: str) -> Decoding:
        ffi, lib = self._ffi, self._lib
        size_of, opcode_of, known = lib.kv_get_inst_size, lib.kv_get_opcode, self._mnemonics.setdefault(platform, {})
        syntax = ffi.new("char[]", _SYNTAX_BYTES)
        targets = ffi.new("int32_t[3]")
        found = Decoding([], [], [], [], [], message_text)
        pc, end, is_over = 0, len(code), False
        while pc < end:
            size = size_of(view, pc)
            if size <= 0 or pc + size > end:
                break
            opcode = opcode_of(view, pc)
            mnemonic = known.get(opcode) or self._mnemonic(platform, opcode)
            if mnemonic == _ILLEGAL and code[pc] & _OPCODE_BITS:
                mnemonic = UNDECODABLE
            # Behind the end of the thread, Mesa has a NOP that IGA does not know, and the shader's data.
            if is_over and mnemonic in (_ILLEGAL, UNDECODABLE) and any(code[pc:]):
                break
            is_over |= mnemonic.startswith("send") and size > MIN_CODE_BYTES and bool(code[pc + 4] & _END_OF_THREAD)
            found.pcs.append(pc)
            found.sizes.append(size)
            found.mnemonics.append(mnemonic)
            if texts:
                lib.kv_get_inst_syntax(view, pc, syntax, _SYNTAX_BYTES, 0, ffi.NULL, ffi.NULL)
                found.texts.append(self._text(syntax).rstrip())
                count = min(lib.kv_get_inst_targets(view, pc, targets), 3)
                found.targets.append([targets[index] for index in range(count)])
            pc += size
        return found

    def _mnemonic(self, platform: Platform, opcode: int) -> str:
        """Returns the opcode's name, and caches it."""
        specification = self._ffi.new("void **")
        name = self._ffi.new("char[64]")
        length = self._ffi.new("size_t *", 64)
        if self._lib.iga_opspec_from_op(platform.value, opcode, specification) == 0:
            self._lib.iga_opspec_mnemonic(specification[0], name, length)
        self._mnemonics[platform][opcode] = found = self._text(name) or _ILLEGAL
        return found

    def _platforms(self) -> frozenset[int]:
        capacity = 64
        ids = self._ffi.new("uint32_t[]", capacity)
        needed = self._ffi.new("size_t *")
        if self._lib.iga_platforms_list(4 * capacity, ids, needed) != 0:
            return frozenset()
        return frozenset(ids[index] for index in range(min(needed[0] // 4, capacity)))

    def _load(self) -> tuple[str, Any]:
        refusals = []
        for path in candidates():
            try:
                library: Any = self._ffi.dlopen(path)
                for name in _FUNCTIONS:
                    getattr(library, name)
            except (OSError, ffi.error) as error:
                refusals.append(str(error))
            else:
                return path, library
        raise NoDecoder(
            f"libiga64 cannot be loaded ({refusals[0]}): install {PACKAGES}, or name the library in {LIBRARY_VARIABLE}"
        )

    def _text(self, string: Any) -> str:
        return bytes(self._ffi.string(string)).decode("utf-8", "backslashreplace")  # type: ignore[arg-type]


def installed() -> str:
    """Returns the library that would be loaded, as `candidates` names it; "" if there is none."""
    for path in candidates():
        with contextlib.suppress(OSError):
            ctypes.CDLL(path)
            return path
    return ""


def candidates() -> list[str]:
    """Returns the libraries to try, in order; the dynamic loader searches for names without a folder."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        return [named]  # no fallback: the user wants this one
    return [os.path.join(sys.prefix, "lib", "iaprof", "libiga64.so.2"), "libiga64.so.2", "libiga64.so.1"]
