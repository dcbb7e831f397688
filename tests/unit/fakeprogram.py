"""Programs of others that misbehave, built by the C compiler: what one may do that reads untrusted bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#define TRY(what) tried(#what, (errno = 0, (long)(what)))
static void tried(const char *what, long got) { printf("%s %ld %s\n", what, got, strerrorname_np(errno)); }
static unsigned char code[1 << 20];
int main(int count, char **arguments) {
    int file = open(arguments[count - 1], O_RDONLY);
    long length = file < 0 ? -1 : read(file, code, sizeof code);
    BODY
    return 0;
}
"""

NVDISASM = r"""
    /* "nop N" for each 16 bytes; 0xBB is a bad instruction, 0xEE one of which it does not say where it is. */
    unsigned long base = strtoul(arguments[5], 0, 0);
    int bad = 0;
    for (long at = 0; at < length; at += 16) {
        if (code[at] == 0xBB && ++bad)
            fprintf(stderr, "nvdisasm error   : Unrecognized operation at address 0x%lx\n", base + at);
        if (code[at] == 0xEE && ++bad)
            fprintf(stderr, "nvdisasm error   : Illegal instruction found\n");
        if (code[at] == 'E') { EVIL; }
    }
    if (!strcmp(arguments[2], "SM70")) {
        fprintf(stderr, "nvdisasm fatal   : Value 'SM70' is not defined for option 'binary'\n");
        return 1;
    }
    if (bad)
        return 1;
    printf("\t.headerflags\t@\"EF_CUDA_SM90\"\n");
    for (long at = 0; at < length; at += 16)
        if (code[at] == 'B')
            printf("        /*%04lx*/              @!P0 BRA.U 0x%lx ;\n", base + at, base + at - 16);
        else
            printf("        /*%04lx*/                   NOP.X R%d;\n", base + at, code[at]);
"""


def build(folder: Path, body: str, name: str = "program") -> Path:
    """A program that does `body` (C statements) with `code`, of `length` bytes, which its last argument names."""
    source, program = folder / f"{name}.c", folder / name
    source.write_text(_SOURCE.replace("BODY", body))
    subprocess.run(["cc", "-w", "-o", program, source], check=True)
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    return program


def build_nvdisasm(folder: Path, evil: str = "abort()") -> Path:
    """A program that takes the arguments of nvdisasm, and does `evil` at an instruction that begins with an E."""
    return build(folder, NVDISASM.replace("EVIL", evil), "nvdisasm")
