# SPDX-License-Identifier: Apache-2.0
# Functions with different first instructions, at which uprobes are put. Each is named by it.
.macro function name
.globl enter_\name
.type enter_\name, @function
.p2align 4
enter_\name:
.cfi_startproc
.endm
.macro end name
.cfi_endproc
.size enter_\name, . - enter_\name
.endm
.macro pushes name, register
function \name
    push %\register
.cfi_adjust_cfa_offset 8
    nop
    pop %\register
.cfi_adjust_cfa_offset -8
    ret
end \name
.endm

.text
pushes push_rbx, rbx
pushes push_rbp, rbp
pushes push_r12, r12
function nop
    nop
    ret
end nop
function endbr64
    endbr64
    nop
    ret
end endbr64
function sub
    sub $8, %rsp
.cfi_adjust_cfa_offset 8
    nop
    add $8, %rsp
.cfi_adjust_cfa_offset -8
    ret
end sub
function nop5 # which newer kernels replace by a call
    .byte 0x0f, 0x1f, 0x44, 0x00, 0x00
    nop
    ret
end nop5
function ret
    ret
end ret
function jmp
    jmp enter_jumped
end jmp
function jumped
    nop
    ret
end jumped
function call
    call enter_jumped
    ret
end call
function mov
    mov %rsp, %rax
    nop
    ret
end mov
.section .note.GNU-stack, "", @progbits
