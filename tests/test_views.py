"""How layers are seen as products: shapes, offsets, and both directions against F.unfold, F.fold and torch's formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import normal
from torch import Tensor

from hot.views import Conv2dView, LinearView, conv2d_view

SHAPES = [(6,), (5, 6), (3, 5, 6), (2, 3, 5, 6), (2, 3, 4, 5, 6)]
OPTIONS = [
    dict(kernel=(3, 3)), dict(kernel=(2, 3), stride=(2, 1)), dict(kernel=(3, 2), padding=(1, 2)), dict(kernel=(2, 4), padding="same"),
    dict(kernel=(3, 3), padding="valid", dilation=(2, 1)), dict(kernel=(4, 3), padding="same", dilation=(1, 3)),
    dict(kernel=(1, 1)), dict(kernel=(1, 1), stride=(2, 3)), dict(kernel=(1, 1), padding=(1, 0)), dict(kernel=(5, 5), stride=(3, 2), padding=(2, 2)),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_round_trip(shape: tuple[int, ...]) -> None:
    """(B, …, I) is B samples; fewer dimensions are one sample. Rows are input channels, in the order of the tokens."""
    view, x = LinearView(), normal(*shape)
    rows, tokens = view.input_rows(x), view.tokens(x)
    samples = shape[0] if len(shape) > 2 else 1
    assert rows.shape == view.rows_shape(x.shape) == (6, samples, x.numel() // 6 // samples)
    assert tokens.shape == (samples, x.numel() // 6 // samples, 6)
    assert torch.equal(rows.flatten(1).T, x.reshape(-1, 6)) and torch.equal(tokens.reshape(-1, 6), x.reshape(-1, 6))
    assert torch.equal(view.input_from_rows(tokens.reshape(-1, 6), x.shape, x.dtype), x)


def test_linear_views_do_not_copy() -> None:
    x = normal(2, 3, 6)
    assert LinearView().input_rows(x).data_ptr() == x.data_ptr() == LinearView().tokens(x).data_ptr()


def padded(x: Tensor, view: Conv2dView) -> Tensor:
    return F.pad(x, view.pads)


@pytest.mark.parametrize("shape", [(2, 3, 9, 10), (3, 9, 10)], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolution_columns(options: dict, shape: tuple[int, ...]) -> None:
    """product_rows ∘ input_rows is F.unfold, input_from_rows is its transpose, tokens are torch's output pixels."""
    view, x = Conv2dView(**options), normal(*shape)
    x4 = x if x.dim() == 4 else x[None]
    y = view.forward(x, normal(4, 3, *view.kernel), None)
    rows = view.input_rows(x)
    assert rows.shape == view.rows_shape(x.shape)
    columns = view.product_rows(rows, x.shape)  # (C·kh·kw, samples, tokens)
    expected = F.unfold(padded(x4, view), view.kernel, view.dilation, 0, view.stride)  # (samples, C·kh·kw, tokens)
    assert torch.equal(columns, expected.transpose(0, 1))
    assert view.tokens(y).shape == (len(x4), columns.shape[2], 4)
    assert torch.equal(view.tokens(y), (y if y.dim() == 4 else y[None]).flatten(2).transpose(1, 2))
    g = normal(len(x4) * columns.shape[2], columns.shape[0], seed=1)
    folded = view.input_from_rows(g, x.shape, x.dtype)
    assert folded.shape == x.shape
    left = (folded.double() * x.double()).sum()  # ⟨Aᵀg, x⟩ = ⟨g, A x⟩
    right = (g.double() * columns.permute(1, 2, 0).reshape(g.shape).double()).sum()
    assert torch.allclose(left, right)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weight_rows(options: dict) -> None:
    """The weight's rows stand in the order of the columns."""
    view, w = Conv2dView(**options), normal(4, 3, *options["kernel"])
    assert torch.equal(view.weight_rows(w)[:, 0].T.reshape(w.shape), w)


@pytest.mark.parametrize(("options", "pointwise"), [
    (dict(kernel=(1, 1)), True), (dict(kernel=(1, 1), padding="same"), True), (dict(kernel=(1, 1), stride=(2, 2)), True),
    (dict(kernel=(1, 1), padding=(0, 1)), False), (dict(kernel=(1, 2)), False), (dict(kernel=(1, 1), padding="valid"), True),
], ids=str)  # fmt: skip
def test_is_pointwise(options: dict, pointwise: bool) -> None:
    assert Conv2dView(**options).is_pointwise is pointwise


def test_views_are_keys() -> None:
    """Two layers share a buffer only if they see their input alike."""
    assert LinearView() == LinearView() and hash(LinearView()) == hash(LinearView())
    assert conv2d_view((3, 3), 1, 1, 1) == conv2d_view((3, 3), (1, 1), [1, 1], 1) != conv2d_view((3, 3), 2, 1, 1)
    assert hash(conv2d_view((3, 3), 1, [1, 1], 1)) == hash(
        conv2d_view((3, 3), 1, 1, 1)
    ) and LinearView() != conv2d_view((1, 1), 1, 0, 1)
