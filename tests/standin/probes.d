/* SPDX-License-Identifier: Apache-2.0 */
/* The probes that intel/iaprof's patches add to NEO 25.18. Made with dtrace -h and -G as there, so each has a semaphore. */
provider level_zero {
    probe launch_kernel(uint64_t iba, uint64_t address, uint64_t size, uintptr_t name);
    probe compile_kernel(uintptr_t path);
};
