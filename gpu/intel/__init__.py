"""Intel's GPUs."""
