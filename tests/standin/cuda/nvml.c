/* SPDX-License-Identifier: Apache-2.0 */
/* libnvidia-ml.so.1: NVIDIA's management library as the package nvidia-ml-py calls it, for GPUs of the stand-in.
 *
 * A GPU is known by any PCI address, except those in STANDIN_NVML_UNKNOWN. Each draws 200 W since the machine started, has a clock
 * of 1500 MHz, is in use by kernels 50 % of the time, and takes STANDIN_NVML_US microseconds for each answer. From the time
 * that the file STANDIN_NVML_LOST names exists, all GPUs are lost. Errors are NVML_ERROR_* of nvml.h. Written by hand from the
 * documents, as abi.h. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
enum { CLOCK_SM = 1, POWER_INSTANT = 186, WATTS = 200, UNSIGNED_INT = 1 };
enum { TEMPERATURE_V1 = 12 | 1 << 24, MEMORY_V2 = 40 | 2 << 24 };

struct field {
    uint32_t id, scope;
    int64_t time_us, latency_us;
    uint32_t type;
    int result;
    uint64_t value;
};
struct temperature {
    uint32_t version, sensor;
    int32_t celsius;
};
struct memory {
    uint32_t version;
    uint64_t total, reserved, free, used;
};
_Static_assert(sizeof(struct field) == 40 && sizeof(struct temperature) == 12 && sizeof(struct memory) == 40, "NVML");

/* What all functions do first. */
static int begin(void)
{
    const char *takes = getenv("STANDIN_NVML_US"), *lost = getenv("STANDIN_NVML_LOST");
    if (takes)
        usleep(strtoul(takes, NULL, 10));
    return lost && !access(lost, F_OK) ? GPU_IS_LOST : SUCCESS;
}

EXPORT int nvmlInitWithFlags(uint32_t flags)
{
    (void)flags;
    return SUCCESS;
}

EXPORT int nvmlShutdown(void)
{
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int result)
{
    (void)result;
    return "an error of the stand-in";
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **gpu)
{
    const char *unknown = getenv("STANDIN_NVML_UNKNOWN");
    *gpu = gpu;
    return unknown && strstr(unknown, bus) ? NOT_FOUND : begin();
}

EXPORT int nvmlDeviceGetClockInfo(void *gpu, uint32_t clock, uint32_t *mhz)
{
    (void)gpu;
    *mhz = clock == CLOCK_SM ? 1500 : 3200;
    return begin();
}

EXPORT int nvmlDeviceGetUtilizationRates(void *gpu, uint32_t percent[2])
{
    (void)gpu;
    percent[0] = 50;
    percent[1] = 20;
    return begin();
}

EXPORT int nvmlDeviceGetFieldValues(void *gpu, int many, struct field *fields)
{
    (void)gpu;
    for (struct field *each = fields; each < fields + many; each++) {
        each->result = each->id == POWER_INSTANT ? SUCCESS : NOT_SUPPORTED;
        each->type = UNSIGNED_INT;
        each->value = 1000 * WATTS;
    }
    return begin();
}

EXPORT int nvmlDeviceGetPowerUsage(void *gpu, uint32_t *milliwatts)
{
    (void)gpu;
    *milliwatts = 1000 * WATTS;
    return begin();
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *gpu, uint64_t *millijoules)
{
    (void)gpu;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = (now.tv_sec * 1000 + now.tv_nsec / 1000000) * WATTS;
    return begin();
}

EXPORT int nvmlDeviceGetTemperatureV(void *gpu, struct temperature *temperature)
{
    (void)gpu;
    temperature->celsius = 41;
    return temperature->version == TEMPERATURE_V1 ? begin() : VERSION_MISMATCH;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *gpu, struct memory *memory)
{
    (void)gpu;
    memory->used = 3UL << 30;
    return memory->version == MEMORY_V2 ? begin() : VERSION_MISMATCH;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor)
{
    (void)gpu;
    *major = 9;
    *minor = 0;
    return begin();
}

EXPORT int nvmlDeviceGetNumGpuCores(void *gpu, uint32_t *cores)
{
    (void)gpu;
    *cores = 16 * 128;
    return begin();
}

EXPORT int nvmlDeviceGetMigMode(void *gpu, uint32_t *now, uint32_t *next)
{
    (void)gpu;
    *now = *next = 0;
    return begin();
}
