"""The reference backend: every op as a few lines of plain torch, right in float64, on CPU and CUDA."""

from hot.backends.reference import products, quantization, transforms  # noqa: F401  registers the kernels
