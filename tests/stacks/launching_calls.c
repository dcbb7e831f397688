// SPDX-License-Identifier: Apache-2.0
// For Python's ctypes: prepare(ELF, KERNEL), then launch().
#include "one_kernel.h"

enum { DURATION_NS = 1000 };

static ze_kernel_handle_t kernel;

__attribute__((visibility("default"))) int prepare(const char *elf, const char *name)
{
    ze_module_handle_t module;
    int failed = make_kernel(elf, name, &module, &kernel);
    zexStandinSetLaunch("launch", 0, DURATION_NS);
    return failed;
}

__attribute__((visibility("default"))) void launch(void)
{
    const ze_group_count_t groups = {1, 1, 1};
    zeCommandListAppendLaunchKernel(NULL, kernel, &groups, NULL, 0, NULL);
    __asm__ volatile(""); /* no tail call */
}
