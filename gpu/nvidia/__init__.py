"""NVIDIA GPUs: what CUPTI samples, cubins, and their SASS."""
