// SPDX-License-Identifier: Apache-2.0
/* What the two halves of libiaprof_inject.so share: inject.c raises the probes, inject_children.c sees to the environment
 * and to the programs that this one starts. */
#ifndef INJECT_H
#define INJECT_H

#define INJECT_PATH_BYTES 512

/* The path of this library; its folder is where debug ELFs go. Empty where it is too long. */
extern char inject_library[INJECT_PATH_BYTES];
extern int inject_folder_length; /* of that path, without the last slash */

/* The next library's dlsym, which is there after inject_begin. */
extern void *(*inject_dlsym)(void *handle, const char *name);

/* Finds what both halves need, once; whatever runs first calls it. */
void inject_begin(void);

#endif
