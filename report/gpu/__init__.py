"""GPU code in captures: kernels, their instructions, source lines, and what instructions wait for."""
