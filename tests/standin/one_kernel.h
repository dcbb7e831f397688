/* SPDX-License-Identifier: Apache-2.0
 *
 * For programs that launch one kernel: a module out of a file, and a kernel of it. */
#ifndef ONE_KERNEL_H
#define ONE_KERNEL_H

#include <stdint.h>
#include <stdio.h>

#include "ze_api.h"

/* Gives 0 if both were made. */
static int make_kernel(const char *path, const char *name, ze_module_handle_t *module, ze_kernel_handle_t *kernel)
{
    static uint8_t elf[16 << 20];
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (!file)
        return 1;
    ze_module_desc_t module_desc = {ZE_MODULE_FORMAT_NATIVE, fread(elf, 1, sizeof(elf), file), elf};
    ze_kernel_desc_t kernel_desc = {name};
    fclose(file);
    return zeInit(0) || zeModuleCreate(NULL, NULL, &module_desc, module, NULL) || zeKernelCreate(*module, &kernel_desc, kernel);
}

#endif
