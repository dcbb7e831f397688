/* SPDX-License-Identifier: Apache-2.0
 * waiting WAITS THREADS: waits WAITS times in each of the functions in which programs of Level Zero wait, in each thread, and asks
 * as often with a timeout of 0. Prints a JSON line for each thread and function: how often, and how many ns it took, by this
 * program's clock; and one with the offsets in the driver's file of the functions to which the loader's table leads. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <level_zero/ze_api.h>
#include <level_zero/ze_ddi.h>

static ze_driver_handle_t driver;
static ze_device_handle_t device;
static ze_context_handle_t context;
static int waits;

#define PROGRAM "waiting"
#define RESULT "0x%x"
#include "must.h"

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

#define TIMED(which, call)                                                                                              \
    do {                                                                                                                \
        uint64_t begin = now();                                                                                         \
        MUST(call);                                                                                                     \
        ns[which] += now() - begin;                                                                                     \
    } while (0)

enum { EVENT, QUEUE, FENCE, LIST, DEVICE, FUNCTIONS };
static const char *const NAMES[] = {"zeEventHostSynchronize", "zeCommandQueueSynchronize", "zeFenceHostSynchronize",
                                    "zeCommandListHostSynchronize", "zeDeviceSynchronize"};

static void *work(void *nothing)
{
    uint64_t ns[FUNCTIONS] = {0};
    ze_command_queue_handle_t queue;
    ze_command_list_handle_t immediate, closed;
    ze_event_pool_handle_t pool;
    ze_event_handle_t event;
    ze_fence_handle_t fence;
    ze_command_queue_desc_t of_queue = {.stype = ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC, .mode = ZE_COMMAND_QUEUE_MODE_ASYNCHRONOUS};
    ze_command_list_desc_t of_list = {.stype = ZE_STRUCTURE_TYPE_COMMAND_LIST_DESC};
    ze_event_pool_desc_t of_pool = {
        .stype = ZE_STRUCTURE_TYPE_EVENT_POOL_DESC, .flags = ZE_EVENT_POOL_FLAG_HOST_VISIBLE, .count = 1};
    ze_event_desc_t of_event = {
        .stype = ZE_STRUCTURE_TYPE_EVENT_DESC, .signal = ZE_EVENT_SCOPE_FLAG_HOST, .wait = ZE_EVENT_SCOPE_FLAG_HOST};
    ze_fence_desc_t of_fence = {.stype = ZE_STRUCTURE_TYPE_FENCE_DESC};
    MUST(zeCommandQueueCreate(context, device, &of_queue, &queue));
    MUST(zeCommandListCreateImmediate(context, device, &of_queue, &immediate));
    MUST(zeCommandListCreate(context, device, &of_list, &closed));
    MUST(zeCommandListAppendBarrier(closed, NULL, 0, NULL));
    MUST(zeCommandListClose(closed));
    MUST(zeEventPoolCreate(context, &of_pool, 1, &device, &pool));
    MUST(zeEventCreate(pool, &of_event, &event));
    MUST(zeFenceCreate(queue, &of_fence, &fence));
    for (int i = 0; i < waits; i++) {
        MUST(zeCommandListAppendBarrier(immediate, event, 0, NULL));
        TIMED(EVENT, zeEventHostSynchronize(event, UINT64_MAX));
        MUST(zeEventHostSynchronize(event, 0));
        TIMED(LIST, zeCommandListHostSynchronize(immediate, UINT64_MAX));
        MUST(zeEventHostReset(event));
        MUST(zeCommandQueueExecuteCommandLists(queue, 1, &closed, fence));
        TIMED(FENCE, zeFenceHostSynchronize(fence, UINT64_MAX));
        TIMED(QUEUE, zeCommandQueueSynchronize(queue, UINT64_MAX));
        MUST(zeFenceReset(fence));
        TIMED(DEVICE, zeDeviceSynchronize(device));
    }
    for (int i = 0; i < FUNCTIONS; i++)
        printf("{\"pid\": %d, \"tid\": %ld, \"function\": \"%s\", \"waits\": %d, \"ns\": %lu}\n", getpid(), syscall(SYS_gettid),
               NAMES[i], waits, ns[i]);
    return nothing;
}

static unsigned long offset(void *function)
{
    Dl_info found;
    return dladdr(function, &found) ? (char *)function - (char *)found.dli_fbase : 0;
}

int main(int count, char **words)
{
    pthread_t started[64];
    if (count < 3)
        return 2;
    waits = atoi(words[1]);
    int threads = atoi(words[2]);
    MUST(zeInit(ZE_INIT_FLAG_GPU_ONLY));
    uint32_t one = 1;
    MUST(zeDriverGet(&one, &driver));
    one = 1;
    MUST(zeDeviceGet(driver, &one, &device));
    ze_context_desc_t desc = {.stype = ZE_STRUCTURE_TYPE_CONTEXT_DESC};
    MUST(zeContextCreate(driver, &desc, &context));
    for (int i = 1; i < threads; i++)
        pthread_create(&started[i], NULL, work, NULL);
    work(NULL);
    for (int i = 1; i < threads; i++)
        pthread_join(started[i], NULL);

    void *library = dlopen(getenv("ZE_ENABLE_ALT_DRIVERS"), RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return 3;
#define TABLE(of)                                                                                                       \
    ze_##of##_dditable_t of = {0};                                                                                      \
    MUST(((ze_result_t(*)(ze_api_version_t, ze_##of##_dditable_t *))dlsym(library, GET_##of))(ZE_API_VERSION_CURRENT, &of))
#define GET_event "zeGetEventProcAddrTable"
#define GET_command_queue "zeGetCommandQueueProcAddrTable"
#define GET_fence "zeGetFenceProcAddrTable"
#define GET_command_list "zeGetCommandListProcAddrTable"
#define GET_device "zeGetDeviceProcAddrTable"
    TABLE(event);
    TABLE(command_queue);
    TABLE(fence);
    TABLE(command_list);
    TABLE(device);
    printf("{\"zeEventHostSynchronize\": %lu, \"zeCommandQueueSynchronize\": %lu, \"zeFenceHostSynchronize\": %lu, "
           "\"zeCommandListHostSynchronize\": %lu, \"zeDeviceSynchronize\": %lu}\n",
           offset(event.pfnHostSynchronize), offset(command_queue.pfnSynchronize), offset(fence.pfnHostSynchronize),
           offset(command_list.pfnHostSynchronize), offset(device.pfnSynchronize));
    return 0;
}
