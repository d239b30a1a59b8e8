"""A second stream of the GPU, for kernels that need not wait for each other."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch
from torch import Tensor

from hot.errors import BackendError


class Aside:
    """Work beside torch's current stream: small kernels fill the chip together, and large ones the ends of each other.

        aside = Aside(t)
        with aside:             # from where the current stream is now
            ready = prepare(t)
        other = ...             # meanwhile
        aside.join()            # what is launched from here on sees `ready`

    Without a second stream, calls just follow each other: where t is on no CUDA device or None, and where the compiler is
    watching, which would have to leave its graph.

    Tensors that are made aside are as safe as others. Their memory belongs to the second stream, which is used here alone and
    always after all that the current stream was given before: whatever reads them there is done when it is given out again.
    """

    def __init__(self, t: Tensor | None) -> None:
        self.second = None
        if t is not None and t.is_cuda and not torch.compiler.is_compiling():
            self.current = torch.cuda.current_stream(t.device)
            self.second = _second(self.current)

    def __enter__(self) -> None:
        if self.second is not None:
            self.second.wait_stream(self.current)
            torch.cuda.set_stream(self.second)

    def __exit__(self, *error: object) -> None:
        if self.second is not None:
            torch.cuda.set_stream(self.current)

    def join(self) -> None:
        """Let the current stream wait for what was launched aside."""
        if self.second is not None:
            self.current.wait_stream(self.second)


@cache
def _second(current: torch.cuda.Stream) -> torch.cuda.Stream | None:
    """The second stream of each: unlike those of torch's pool, it is given to nobody else. None without NVIDIA's driver."""
    if torch.version.hip:
        return None
    driver, stream = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), ctypes.c_void_p()
    with torch.cuda.device(current.device):
        torch.cuda.mem_get_info()  # a thread that has not asked the runtime for anything yet has no context
        not_waiting_for_stream_0 = 1
        if error := driver.cuStreamCreate(ctypes.byref(stream), not_waiting_for_stream_0):
            raise BackendError(f"no second CUDA stream on {current.device}: cuStreamCreate returned {error}")
    return torch.cuda.ExternalStream(stream.value, current.device)
