/* SPDX-License-Identifier: Apache-2.0
 * What preloaded.c and dispatched.c, which are one library, have of each other. */
#ifndef PROGRAMS_DISPATCHED_H
#define PROGRAMS_DISPATCHED_H

#include <stdint.h>

/* preloaded.c: whether the program itself enqueued the kernel of OpenCL at this address. */
int enqueued_by_program(uint64_t address);

/* dispatched.c: what the program is to call as zeKernelCreate, whose own code `next` is. */
void *dispatched_create_kernel(void *next);

#endif
