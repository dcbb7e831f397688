"""Names for the addresses of CPU stacks: what was mapped where, and what files, generated code and the kernel say."""
