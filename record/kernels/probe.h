// SPDX-License-Identifier: Apache-2.0
/* The instruction of a probe, for <sys/sdt.h>, which comes before this: its nop, and then one of five bytes. Linux 6.18 calls the
 * recorder's programs from that one by a system call, in half the time of the trap that the short one takes. Older kernels would
 * single-step it, so the recorder chooses (bpf/probes/usdt.py). It does so in our libraries only, which have no red zone: the call
 * writes below the stack pointer. The third nop, of seven bytes, tells them from others. */
#undef _SDT_NOP
#define _SDT_NOP nop; .byte 0x0f; .byte 0x1f; .byte 0x44; .byte 0x00; .byte 0x00; .byte 0x0f; .byte 0x1f; .byte 0x80; .ascii "iapr"
