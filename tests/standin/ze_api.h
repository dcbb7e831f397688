/* SPDX-License-Identifier: Apache-2.0
 *
 * What the stand-in's runtime offers: functions named as in Level Zero, as much of each as a profiler can see. */
#ifndef STANDIN_ZE_API_H
#define STANDIN_ZE_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define STANDIN_EXPORT __attribute__((visibility("default")))

typedef struct standin_module *ze_module_handle_t;
typedef struct standin_placed *ze_kernel_handle_t;

enum { ZE_RESULT_SUCCESS = 0, ZE_RESULT_ERROR_INVALID_NATIVE_BINARY = 1, ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY = 2 };

/* Takes 100 ms, as the real driver's does: what is attached to a library just mapped has this long to be in time. */
STANDIN_EXPORT int zeInit(uint32_t flags);
/* From the bytes of a debug ELF; writes it out and fires compile_kernel when somebody listens. */
STANDIN_EXPORT int zeModuleCreate(const void *elf, size_t size, ze_module_handle_t *module);
STANDIN_EXPORT int zeModuleDestroy(ze_module_handle_t module);
STANDIN_EXPORT size_t zeModuleGetKernelCount(ze_module_handle_t module);
STANDIN_EXPORT ze_kernel_handle_t zeKernelCreate(ze_module_handle_t module, size_t index);
STANDIN_EXPORT const char *zeKernelGetName(ze_kernel_handle_t kernel);
/* Fires launch_kernel and tells the GPU. `stack` is what the program says its stack is, for the ledger. */
STANDIN_EXPORT int zeCommandListAppendLaunchKernel(ze_kernel_handle_t kernel, const char *stack, uint64_t delay_ns,
                                                   uint64_t duration_ns);
/* Waits until the GPU has executed everything that this process launched. */
STANDIN_EXPORT int zeCommandQueueSynchronize(void);

#ifdef __cplusplus
}
#endif
#endif
