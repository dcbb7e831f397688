/* The two probes of intel/iaprof's patched runtime. */
provider level_zero {
    probe launch_kernel(uint64_t, uint64_t, uint64_t, char *);
    probe compile_kernel(char *);
};
