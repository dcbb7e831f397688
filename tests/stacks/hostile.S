# SPDX-License-Identifier: Apache-2.0
# Functions whose call frame information does harm. Each calls probe_me with a number of its own.

.macro calls number
    sub $8, %rsp
    mov $\number, %edi
    call probe_me
    add $8, %rsp
    ret
.endm

.macro function name
.globl \name
.type \name, @function
.p2align 4
\name:
.endm

.text
function loops                      # the CFA is an expression that jumps to its own start
.cfi_startproc
.cfi_escape 0x0f, 3, 0x2f, 0xfd, 0xff
    calls 1
.cfi_endproc

function wild                       # the CFA is what lies at address 8
.cfi_startproc
.cfi_escape 0x0f, 2, 0x38, 0x06
    calls 2
.cfi_endproc

function down                       # the caller's frame is below
.cfi_startproc
.cfi_def_cfa rsp, -64
    calls 3
.cfi_endproc

function here                       # the caller's frame is this one
.cfi_startproc
.cfi_def_cfa rsp, 0
    calls 4
.cfi_endproc

function again                      # the return address is the function's own
.cfi_startproc
.cfi_def_cfa rsp, 16
.cfi_escape 0x16, 16, 3, 0x80, 0, 0x12
    calls 5
.cfi_endproc

function rows                       # more instructions than any function has
.cfi_startproc
.rept 70000
    nop
.cfi_adjust_cfa_offset 8
.endr
    calls 6
.cfi_endproc

function pops                       # more is restored than was remembered
.cfi_startproc
.cfi_escape 0x0b, 0x0b
    calls 8
.cfi_endproc

function far                        # a register that no machine has
.cfi_startproc
.cfi_escape 0x05, 0xff, 0xff, 0xff, 0xff, 0x0f, 1
    calls 9
.cfi_endproc

function liar                       # the test makes this one's range the whole file's
.cfi_startproc
.cfi_def_cfa rsp, 4096
    nop
    ret
.cfi_endproc

function bare                       # and so this one's rows are the one's before
    calls 10

.section .note.GNU-stack, "", @progbits
