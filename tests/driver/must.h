/* SPDX-License-Identifier: Apache-2.0
 * What a program of these tests does where the runtime refuses a call: it ends, with the call on stderr.
 *
 *     #define PROGRAM "copies"
 *     #define RESULT "0x%x"       how the runtime's results are written: Level Zero's; "%d" for OpenCL's
 *     #include "must.h"
 *     MUST(zeInit(0)); */
#include <stdio.h>
#include <unistd.h>

static void must(int result, const char *call)
{
    if (!result)
        return;
    fprintf(stderr, PROGRAM ": %s: " RESULT "\n", call, result);
    _exit(1);
}
#define MUST(call) must(call, #call)
