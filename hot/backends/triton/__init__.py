"""The Triton backend: kernels for NVIDIA GPUs from compute capability 8.0. Importing it needs no driver."""
