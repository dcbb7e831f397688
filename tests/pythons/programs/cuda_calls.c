// SPDX-License-Identifier: Apache-2.0
// For launching.py, in place of launching_calls.c: launches with CUDA. prepare(CUBIN, KERNEL), then launch().
#include <dlfcn.h>
#include <stdio.h>

static int (*launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static int (*set_current)(void *);
static void *context, *kernel;
static __thread int is_current;

__attribute__((visibility("default"))) int prepare(const char *cubin, const char *name)
{
    static char content[1 << 20];
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *module;
    FILE *file = fopen(cubin, "r");
    if (!cuda || !file || !fread(content, 1, sizeof content, file) || fclose(file))
        return 1;
    int (*init)(unsigned) = dlsym(cuda, "cuInit"), (*retain)(void **, int) = dlsym(cuda, "cuDevicePrimaryCtxRetain");
    int (*load)(void **, const void *) = dlsym(cuda, "cuModuleLoadData");
    int (*function)(void **, void *, const char *) = dlsym(cuda, "cuModuleGetFunction");
    set_current = dlsym(cuda, "cuCtxSetCurrent");
    launch_kernel = dlsym(cuda, "cuLaunchKernel");
    return init(0) || retain(&context, 0) || set_current(context) || load(&module, content) || function(&kernel, module, name);
}

__attribute__((visibility("default"))) void launch(void)
{
    void *arguments[] = {NULL};
    if (!is_current)
        is_current = !set_current(context);
    launch_kernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL);
    __asm__ volatile(""); /* no tail call */
}
