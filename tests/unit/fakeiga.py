"""A libiga64 that misbehaves, built by the C compiler: what a decoder may do to the process that it runs in."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <stddef.h>
const char *iga_version_string(void) { return "fake"; }
const char *iga_status_to_string(int32_t s) { return "a status"; }
int32_t iga_platforms_list(size_t bytes, uint32_t *p, size_t *needed) { p[0] = 0x2000000; *needed = 4; return 0; }
/* Code that starts with an E is evil; the rest is one 8-byte `nop` after the other. */
void *kv_create(uint32_t platform, const uint8_t *bytes, size_t length, int32_t *status, char *err, size_t cap,
                uint32_t mode) {
    size_t *view = malloc(sizeof *view);
    if (bytes[0] == 'E') { EVIL; }
    *view = length; *status = 0;
    return view;
}
void kv_delete(void *view) { free(view); }
int32_t kv_get_inst_size(const void *view, int32_t pc) { return 8; }
uint32_t kv_get_opcode(const void *view, int32_t pc) { return 1; }
size_t kv_get_inst_syntax(const void *v, int32_t pc, char *buf, size_t cap, uint32_t o, void *l, void *e) {
    strcpy(buf, "nop");
    return 4;
}
uint32_t kv_get_inst_targets(const void *view, int32_t pc, int32_t *pcs) { return 0; }
int32_t iga_opspec_from_op(uint32_t platform, uint32_t op, void **spec) { *spec = 0; return 0; }
int32_t iga_opspec_mnemonic(void *spec, char *buf, size_t *length) { strcpy(buf, "nop"); return 0; }
"""

ABORT, LOOP, HOG = "abort()", "for (;;) ;", "for (;;) memset(malloc(1 << 26), 1, 1 << 26)"


def build(folder: Path, evil: str) -> Path:
    """The library, which does `evil` (C statements) on code that starts with an E."""
    source, library = folder / "iga.c", folder / "libiga64.so.2"
    source.write_text(_SOURCE.replace("EVIL", evil))
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return library
