"""The learner: a process that finishes the stacks BPF could not walk, and writes the missing rules for BPF."""
