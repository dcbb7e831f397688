// SPDX-License-Identifier: Apache-2.0
/* As much of OpenCL as inject_opencl.c needs: cl.h and cl_icd.h of its version 3.0, and NEO's own questions. */
#include <stddef.h>
#include <stdint.h>

typedef int cl_int; /* 0 is success */
typedef uint32_t cl_uint;
typedef void *cl_handle;
typedef cl_int ask_t(cl_handle object, cl_uint what, size_t size, void *answer, size_t *answer_size);

enum { DEVICE_PARENT = 0x1042, QUEUE_DEVICE = 0x1091, PROGRAM_NUM_DEVICES = 0x1162, PROGRAM_DEVICES = 0x1163 };
enum { PROGRAM_DEBUG_INFO = 0x4100, PROGRAM_DEBUG_INFO_SIZES = 0x4101 }; /* a debug ELF for each of its devices */
enum { KERNEL_NAME = 0x1190, KERNEL_PROGRAM = 0x1194, KERNEL_CODE = 0x407D, KERNEL_ADDRESS = 0x10010 };
enum { DEVICE_INFO_SLOT = 3, QUEUE_INFO_SLOT = 12, PROGRAM_INFO_SLOT = 32, KERNEL_INFO_SLOT = 39 };
enum { SLOTS = 131 }; /* as many of the table as are used */
