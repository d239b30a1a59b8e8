"""The reference backend: every op as a few lines of plain torch, right in float64, on CPU and CUDA.

Its float32 products on CUDA follow torch.set_float32_matmul_precision, as torch's own do.
"""

from hot.backends.reference import products, quantization, transforms  # noqa: F401  registers the kernels
