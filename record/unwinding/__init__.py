"""Finishing the stacks that BPF could not walk, and teaching it the rules that were missing, in a process apart."""
