/* SPDX-License-Identifier: Apache-2.0 */
/* As much of Level Zero as the profiled program (workload.cpp) needs, written for this stand-in: the functions' names, their
 * parameters' order and the results' numbers are Level Zero's public ones. What a real program passes and this runtime has no use
 * for (contexts, devices, arguments, events) may be NULL. */
#ifndef STANDIN_ZE_API_H
#define STANDIN_ZE_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZE_APIEXPORT __attribute__((visibility("default")))

typedef enum _ze_result_t {
    ZE_RESULT_SUCCESS = 0,
    ZE_RESULT_NOT_READY = 1,
    ZE_RESULT_ERROR_DEVICE_LOST = 0x70000001,
    ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY = 0x70000002,
    ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY = 0x70000003,
    ZE_RESULT_ERROR_UNINITIALIZED = 0x78000001,
    ZE_RESULT_ERROR_UNSUPPORTED_FEATURE = 0x78000003,
    ZE_RESULT_ERROR_INVALID_ARGUMENT = 0x78000004,
    ZE_RESULT_ERROR_INVALID_NULL_HANDLE = 0x78000005,
    ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE = 0x78000006,
    ZE_RESULT_ERROR_INVALID_NULL_POINTER = 0x78000007,
    ZE_RESULT_ERROR_INVALID_NATIVE_BINARY = 0x7800000f,
    ZE_RESULT_ERROR_INVALID_KERNEL_NAME = 0x78000011,
} ze_result_t;

typedef struct _ze_context_handle_t *ze_context_handle_t;
typedef struct _ze_device_handle_t *ze_device_handle_t;
typedef struct _ze_command_queue_handle_t *ze_command_queue_handle_t;
typedef struct _ze_command_list_handle_t *ze_command_list_handle_t;
typedef struct _ze_event_handle_t *ze_event_handle_t;
typedef struct _ze_module_handle_t *ze_module_handle_t;
typedef struct _ze_module_build_log_handle_t *ze_module_build_log_handle_t;
typedef struct _ze_kernel_handle_t *ze_kernel_handle_t;

typedef enum _ze_module_format_t { ZE_MODULE_FORMAT_IL_SPIRV = 0, ZE_MODULE_FORMAT_NATIVE = 1 } ze_module_format_t;

typedef struct _ze_module_desc_t {
    ze_module_format_t format; /* NATIVE; here the bytes are those of a debug ELF, which has addresses */
    size_t inputSize;
    const uint8_t *pInputModule;
} ze_module_desc_t;

typedef struct _ze_kernel_desc_t {
    const char *pKernelName;
} ze_kernel_desc_t;

typedef struct _ze_group_count_t {
    uint32_t groupCountX, groupCountY, groupCountZ;
} ze_group_count_t;

ZE_APIEXPORT ze_result_t zeInit(uint32_t flags);
ZE_APIEXPORT ze_result_t zeModuleCreate(ze_context_handle_t context, ze_device_handle_t device, const ze_module_desc_t *desc,
                                        ze_module_handle_t *module, ze_module_build_log_handle_t *build_log);
ZE_APIEXPORT ze_result_t zeModuleDestroy(ze_module_handle_t module);
ZE_APIEXPORT ze_result_t zeModuleGetKernelNames(ze_module_handle_t module, uint32_t *count, const char **names);
ZE_APIEXPORT ze_result_t zeKernelCreate(ze_module_handle_t module, const ze_kernel_desc_t *desc, ze_kernel_handle_t *kernel);
ZE_APIEXPORT ze_result_t zeKernelDestroy(ze_kernel_handle_t kernel);
ZE_APIEXPORT ze_result_t zeCommandListAppendLaunchKernel(ze_command_list_handle_t list, ze_kernel_handle_t kernel,
                                                         const ze_group_count_t *groups, ze_event_handle_t signal,
                                                         uint32_t waits, ze_event_handle_t *wait);
/* The timeout is in nanoseconds, UINT64_MAX waits for ever. Every command list here is an immediate one: a launch executes
 * without further ado, and one queue is all there is. */
ZE_APIEXPORT ze_result_t zeCommandQueueSynchronize(ze_command_queue_handle_t queue, uint64_t timeout);

/* Not Level Zero's: what a launch of this thread tells the GPU from now on. `stack` must stay readable until the next call; it is
 * the launching functions, outermost first, joined with ';', and goes into the ledger. */
ZE_APIEXPORT void zexStandinSetLaunch(const char *stack, uint64_t delay_ns, uint64_t duration_ns);
/* Not Level Zero's either: 1 a GPU is there, 0 none was wanted (no STANDIN_DIR), -1 it was there and is gone. */
ZE_APIEXPORT int zexStandinGpu(void);

#ifdef __cplusplus
}
#endif
#endif
