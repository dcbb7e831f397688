# SPDX-License-Identifier: Apache-2.0
# probe_me(n): where a stack is looked at; n tells which. gdb stops behind the probe, so that both see the same stack.
.globl probe_me, probe_me_after
.type probe_me, @function
.type probe_me_after, @function
.text
.p2align 4
probe_me:
.cfi_startproc
    endbr64
    nop
probe_me_after:
    nop
    ret
.cfi_endproc
.size probe_me, . - probe_me
.size probe_me_after, . - probe_me_after
.section .note.GNU-stack, "", @progbits
