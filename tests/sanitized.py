"""Every CUDA C++ kernel on small cases of the table, for NVIDIA's compute-sanitizer; nothing is compared here.

compute-sanitizer --tool memcheck python tests/sanitized.py
compute-sanitizer --tool racecheck python tests/sanitized.py
"""

from __future__ import annotations

import torch

from hot.backends import OPS, kernels, ops_for
from hot.checking import cases

DTYPES = "bfloat16", "float32"
LAYOUTS = "contiguous", "transposed"


def main() -> None:
    ops_for("cupy", "cuda")
    for op in OPS:
        kernel, ran = kernels[f"cupy.{op}"], 0
        for dtype in DTYPES:
            for layout in LAYOUTS:
                for case in cases(op, dtype, layout, torch.device("cuda")):
                    if kernel.supports(*case.args.values()):
                        kernel.call(*case.args.values())
                        ran += 1
        torch.cuda.synchronize()
        print(f"{op}: {ran} cases", flush=True)


if __name__ == "__main__":
    main()
