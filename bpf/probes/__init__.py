"""Finding drivers in processes, and putting probes into them."""
