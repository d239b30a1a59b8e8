"""How a layer is seen as matrix products: its tokens, its rows, and the way back. Shapes only, no arithmetic of its own.

A gradient is (samples, tokens, outputs). The input of a product over tokens is (rows, samples, tokens), one row an input
channel (for a k×k convolution: a channel and a tap). No view copies more than it must.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 2**26
"""Elements of the unfolded gradient of a k×k convolution that exist at once (256 MiB in float32)."""


class Like(NamedTuple):
    """The shapes, dtypes and memory formats that gradients come back in."""

    x_shape: torch.Size
    x_dtype: torch.dtype
    x_format: torch.memory_format
    weight_shape: torch.Size
    weight_dtype: torch.dtype
    weight_format: torch.memory_format
    bias_dtype: torch.dtype | None

    @staticmethod
    def of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Like:
        own = x.shape, x.dtype, _format(x), weight.shape, weight.dtype, _format(weight)
        return Like(*own, None if bias is None else bias.dtype)


def _format(t: Tensor) -> torch.memory_format:
    """channels_last where a 4-D tensor is laid out so, else contiguous."""
    last = t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


@dataclass(frozen=True)
class LinearView:
    """``F.linear``. (I,) is one token; (T, I) is one sample of T tokens; (B, …, I) is B samples of prod(…) tokens."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_rows(self, x: Tensor) -> Tensor:
        """x → (I, samples, tokens)."""
        return self.tokens(x).permute(2, 0, 1)

    def tokens(self, t: Tensor) -> Tensor:
        """x or the gradient of y → (samples, tokens, channels)."""
        if t.dim() == 3:
            return t
        samples = t.shape[0] if t.dim() > 2 else 1
        tokens = t.shape[:-1].numel() // samples if samples else 0
        return t.reshape(samples, tokens, t.shape[-1])

    def rows_shape(self, x_shape: torch.Size) -> tuple[int, int, int]:
        """The shape of `input_rows`."""
        samples = x_shape[0] if len(x_shape) > 2 else 1
        return x_shape[-1], samples, x_shape[:-1].numel() // samples

    def product_rows(self, values: Tensor, x_shape: torch.Size) -> Tensor:
        """What a buffer gives back → the rows of the product: the same."""
        return values

    def samples_at_once(self, columns: int) -> int:
        """How many samples of a product with so many elements each to compute at a time; 0: all."""
        return 0

    def weight_rows(self, weight: Tensor) -> Tensor:
        """(O, I) → (I, 1, O): the operand of grad_input, contracted over O."""
        return weight.T.unsqueeze(1)

    def input_from_rows(self, product: Tensor, x_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """(samples·tokens, I) → the shape of x."""
        return product.to(dtype).view(x_shape)

    def exact(
        self, g: Tensor, x: Tensor | None, weight: Tensor | None, like: Like
    ) -> tuple[Tensor | None, Tensor | None]:
        """What torch computes: the gradient of x where the weight is given, that of the weight where x is, in g's dtype.

        Equals: (g @ weight, g.T @ x)
        """
        rows = g.reshape(-1, g.shape[-1])
        return (
            None if weight is None else (rows @ weight).view(like.x_shape),
            None if x is None else rows.T @ x.reshape(-1, x.shape[-1]),
        )

    def exact_grad_bias(self, g: Tensor) -> Tensor:
        return g.reshape(-1, g.shape[-1]).sum(0)


@dataclass(frozen=True)
class Conv2dView:
    """``F.conv2d`` with groups = 1 on (B, C, H, W) or (C, H, W). The tokens of a sample are its output pixels, row by row."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] | str = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """Zeros (left, right, top, bottom) as F.pad takes them. ``same`` puts the odd one right and below, as torch does."""
        if not isinstance(self.padding, str):
            return self.padding[1], self.padding[1], self.padding[0], self.padding[0]
        if self.padding == "valid":
            return 0, 0, 0, 0
        total_h, total_w = (d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True))
        return total_w // 2, total_w - total_w // 2, total_h // 2, total_h - total_h // 2

    @property
    def is_pointwise(self) -> bool:
        """Whether the product's tokens are pixels of x: then x can be projected and packed as a linear input is."""
        return self.kernel == (1, 1) and self.pads == (0, 0, 0, 0)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)

    def input_rows(self, x: Tensor) -> Tensor:
        """x → (C, samples, pixels): for a pointwise layer the pixels that it reads, else all of them."""
        x = _batched(x)
        if self.is_pointwise:
            x = x[:, :, :: self.stride[0], :: self.stride[1]]
        return x.permute(1, 0, 2, 3).flatten(2)

    def tokens(self, t: Tensor) -> Tensor:
        """The gradient of y → (samples, tokens, outputs)."""
        return _batched(t).permute(0, 2, 3, 1).flatten(1, 2)

    def rows_shape(self, x_shape: torch.Size) -> tuple[int, int, int]:
        """The shape of `input_rows`."""
        height, width = self.output_size(x_shape[-2:]) if self.is_pointwise else x_shape[-2:]
        return x_shape[-3], x_shape[0] if len(x_shape) == 4 else 1, height * width

    def samples_at_once(self, columns: int) -> int:
        """How many samples of a product with so many elements each to compute at a time; 0: all. Columns are k² times as
        large as the input that they fold into, so no more than COLUMNS of them exist at once."""
        return 0 if self.is_pointwise else max(COLUMNS // columns, 1)

    def product_rows(self, values: Tensor, x_shape: torch.Size) -> Tensor:
        """(C, samples, pixels) → (C·kh·kw, samples, tokens), unfolded; the same for a pointwise layer."""
        if self.is_pointwise:
            return values
        height, width = x_shape[-2:]
        padded = F.pad(values.unflatten(2, (height, width)), self.pads)
        (kh, kw), (sh, sw), (dh, dw) = self.kernel, self.stride, self.dilation
        windows = padded.unfold(2, dh * (kh - 1) + 1, sh).unfold(3, dw * (kw - 1) + 1, sw)[..., ::dh, ::dw]
        return windows.permute(0, 4, 5, 1, 2, 3).flatten(4, 5).flatten(0, 2)

    def weight_rows(self, weight: Tensor) -> Tensor:
        """(O, C, kh, kw) → (C·kh·kw, 1, O): the operand of grad_input, contracted over O."""
        return weight.flatten(1).T.unsqueeze(1)

    def input_from_rows(self, product: Tensor, x_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Columns (samples·tokens, C·kh·kw) → those samples in the shape of x; a pixel's shares in several windows add up."""
        if self.is_pointwise:
            return self._pixels_from_rows(product, x_shape, dtype)
        left, right, top, bottom = self.pads
        height, width = x_shape[-2:]
        size = (height + top + bottom, width + left + right)
        out_h, out_w = self.output_size(size)
        columns = product.view(-1, out_h * out_w, product.shape[1]).transpose(1, 2)
        if columns.dtype in (torch.float16, torch.bfloat16):
            columns = columns.float()
        folded = F.fold(columns, size, self.kernel, self.dilation, 0, self.stride)
        grad = folded[:, :, top : top + height, left : left + width].to(dtype)
        return grad if len(x_shape) == 4 else grad[0]

    def _pixels_from_rows(self, product: Tensor, x_shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Rows are pixels: nothing adds up, and rows lie as channels_last does."""
        height, width = self.output_size(x_shape[-2:])
        pixels = product.to(dtype).view(-1, height, width, product.shape[1]).permute(0, 3, 1, 2)
        if self.stride != (1, 1):  # pixels that the layer never read
            read, size = pixels, (pixels.shape[0], *x_shape[-3:])
            pixels = torch.zeros(size, dtype=dtype, device=product.device).to(memory_format=torch.channels_last)
            pixels[:, :, :: self.stride[0], :: self.stride[1]] = read
        return pixels if len(x_shape) == 4 else pixels[0]

    def output_size(self, padded: tuple[int, int] | torch.Size) -> tuple[int, int]:
        """Output size by torch's formula, from the padded size."""
        h, w = (
            (n - d * (k - 1) - 1) // s + 1
            for n, d, k, s in zip(padded, self.dilation, self.kernel, self.stride, strict=True)
        )
        return h, w

    def exact(
        self, g: Tensor, x: Tensor | None, weight: Tensor | None, like: Like
    ) -> tuple[Tensor | None, Tensor | None]:
        """As `LinearView.exact`; an asymmetric ``same`` is padded by hand first, as torch's forward does."""
        needs = [weight is not None, x is not None, False]
        # What is not given is only a shape, but torch picks the layout of everything by it, and copies what does not lie so.
        if x is None:
            x = torch.empty(like.x_shape, dtype=g.dtype, device=g.device, memory_format=like.x_format)
        if weight is None:
            weight = torch.empty(like.weight_shape, dtype=g.dtype, device=g.device, memory_format=like.weight_format)
        left, right, top, bottom = self.pads
        batched, height, width = _batched(x), *x.shape[-2:]
        symmetric = left == right and top == bottom
        padding = (top, left) if symmetric else (0, 0)
        if not symmetric:
            batched = F.pad(batched, self.pads)
        grad_x, grad_w, _ = torch.ops.aten.convolution_backward.default(
            _batched(g), batched, weight, None, self.stride, padding, self.dilation, False, [0, 0], 1, needs
        )
        if needs[0] and not symmetric:
            grad_x = grad_x[:, :, top : top + height, left : left + width]
        return grad_x[0] if needs[0] and x.dim() == 3 else grad_x, grad_w

    def exact_grad_bias(self, g: Tensor) -> Tensor:
        return _batched(g).sum((0, 2, 3))


def conv2d_view(
    kernel: tuple[int, int],
    stride: int | tuple[int, int],
    padding: int | tuple[int, int] | str,
    dilation: int | tuple[int, int],
) -> Conv2dView:
    """The view of a convolution given as F.conv2d takes its options: numbers, pairs, or a padding by name."""
    pads = padding if isinstance(padding, str) else _pair(padding)
    make = Conv2dView if torch.compiler.is_compiling() else _conv2d_view
    return make(kernel, _pair(stride), pads, _pair(dilation))


_conv2d_view = lru_cache(maxsize=1024)(Conv2dView)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])  # torch takes (1,) for (1, 1)


def _batched(t: Tensor) -> Tensor:
    return t if t.dim() == 4 else t.unsqueeze(0)


View = LinearView | Conv2dView
