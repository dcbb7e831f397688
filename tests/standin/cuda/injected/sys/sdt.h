/* SPDX-License-Identifier: Apache-2.0 */
/* In place of the real <sys/sdt.h> when inject_cuda.c is compiled for a test: probes call functions of injected.c. */
#define DTRACE_PROBE1(provider, name, a) probe_##name(a)
#define DTRACE_PROBE7(provider, name, a, b, c, d, e, f, g) probe_##name(a, b, c, d, e, f, g)
