/* SPDX-License-Identifier: Apache-2.0
 * waiting_opencl WAITS: waits WAITS times in clWaitForEvents, for one event of two, and in clFinish. Prints a JSON line for each of
 * them: how often, how many ns it took, by this program's clock, and for what it waited last. */
#define _GNU_SOURCE
#define CL_TARGET_OPENCL_VERSION 300
#include <CL/cl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PROGRAM "waiting"
#define RESULT "%d"
#include "must.h"

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

int main(int count, char **words)
{
    cl_platform_id platform;
    cl_device_id device;
    cl_int failed;
    uint64_t in_events = 0, in_queue = 0, begin;
    cl_event events[2];
    int waits = count > 1 ? atoi(words[1]) : 1;
    MUST(clGetPlatformIDs(1, &platform, NULL));
    MUST(clGetDeviceIDs(platform, CL_DEVICE_TYPE_GPU, 1, &device, NULL));
    cl_context context = clCreateContext(NULL, 1, &device, NULL, NULL, &failed);
    MUST(failed);
    cl_command_queue queue = clCreateCommandQueueWithProperties(context, device, NULL, &failed);
    MUST(failed);
    for (int i = 0; i < waits; i++) {
        MUST(clEnqueueMarkerWithWaitList(queue, 0, NULL, &events[0]));
        MUST(clEnqueueMarkerWithWaitList(queue, 0, NULL, &events[1]));
        begin = now();
        MUST(clWaitForEvents(2, events));
        in_events += now() - begin;
        MUST(clReleaseEvent(events[0]));
        MUST(clReleaseEvent(events[1]));
        begin = now();
        MUST(clFinish(queue));
        in_queue += now() - begin;
    }
    printf("{\"pid\": %d, \"function\": \"clWaitForEvents\", \"waits\": %d, \"ns\": %lu, \"handle\": %lu}\n", getpid(), waits, in_events,
           (uint64_t)events[0]);
    printf("{\"pid\": %d, \"function\": \"clFinish\", \"waits\": %d, \"ns\": %lu, \"handle\": %lu}\n", getpid(), waits, in_queue,
           (uint64_t)queue);
    return 0;
}
