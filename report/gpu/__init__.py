"""GPU code: kernels, their instructions and source, and the decoder."""
