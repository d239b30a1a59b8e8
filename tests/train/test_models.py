"""Models: shapes, names, the same weights from the same seed, and what cannot be built."""

import sys

import pytest
import torch

from hot.errors import HotError
from hot.policies.layers import layers_of
from hot.train.models import FromFile, ResNet18, Timm, Vit, model_spec


def _names(model: torch.nn.Module) -> set[str]:
    return {layer.name for layer in layers_of(model)}


@pytest.mark.parametrize("pool", ["mean", "token"])
@pytest.mark.parametrize("fused", [True, False])
def test_vit(pool, fused) -> None:
    model = Vit(patch=4, dim=16, depth=2, heads=2, pool=pool, fused_qkv=fused).build((3, 8, 12), 5)
    assert model(torch.randn(2, 3, 8, 12)).shape == (2, 5)
    assert model.pos_embed.shape == (1, 6 + (pool == "token"), 16)
    attention = {"attn.qkv"} if fused else {"attn.q", "attn.k", "attn.v"}
    in_block = attention | {"attn.proj", "mlp.fc1", "mlp.fc2"}
    assert _names(model) == {"patch_embed", "head", *(f"blocks.{i}.{name}" for i in range(2) for name in in_block)}


def test_fused_and_separate_qkv_are_the_same_function() -> None:
    fused, separate = (Vit(dim=8, depth=1, heads=2, fused_qkv=fused).build((1, 8, 8), 3) for fused in (True, False))
    state = fused.state_dict()
    for part in ("weight", "bias"):
        rows = state.pop(f"blocks.0.attn.qkv.{part}").chunk(3)
        state.update({f"blocks.0.attn.{name}.{part}": row for name, row in zip("qkv", rows, strict=True)})
    separate.load_state_dict(state)
    x = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(fused(x), separate(x))


def test_resnet18_is_the_standard_one() -> None:
    model = ResNet18().build((3, 32, 32), 10)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962  # the published count with this stem and 10 classes
    assert {"conv1", "layer1.0.conv1", "layer2.0.downsample.0", "layer4.1.conv2", "fc"} <= _names(model)


def test_one_seed_one_model() -> None:
    for spec in (Vit(dim=16, depth=1), ResNet18(width=4)):
        states = []
        for _ in range(2):
            torch.manual_seed(3)
            states.append(spec.build((1, 32, 32), 10).state_dict())
        assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (Vit(dim=10, heads=4), (1, 8, 8), "4 does not divide dim 10"),
        (Vit(patch=3), (1, 28, 28), r"3 does not divide images of \(1, 28, 28\)"),
        (FromFile(path="nowhere.py"), (1, 8, 8), r"nowhere\.py is not there"),
    ],
)
def test_what_cannot_be_built_says_why(spec, shape, message) -> None:
    with pytest.raises(HotError, match=message):
        spec.build(shape, 10)


def test_missing_timm_is_named_with_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(HotError, match=r"pip install 'hot-training\[timm\]'"):
        Timm(name="vit_tiny_patch16_224").build((3, 224, 224), 10)


def test_a_file_of_ones_own(tmp_path) -> None:
    path = tmp_path / "net.py"
    path.write_text("import torch\ndef build():\n    return torch.nn.Linear(3, 2)\ndef other():\n    return 3\n")
    assert FromFile(path=str(path)).build((3,), 2)(torch.zeros(1, 3)).shape == (1, 2)
    with pytest.raises(HotError, match=r"returned a int, not an nn\.Module"):
        FromFile(path=str(path), function="other").build((3,), 2)
    with pytest.raises(HotError, match="defines no missing"):
        FromFile(path=str(path), function="missing").build((3,), 2)


def test_short_forms() -> None:
    assert model_spec("vit") == {"kind": "vit"}
    assert model_spec("timm:resnet18") == {"kind": "timm", "name": "resnet18"}
    assert model_spec("nets/mine.py:make") == {"kind": "file", "path": "nets/mine.py", "function": "make"}


def test_overlapping_patches_make_as_many_tokens() -> None:
    plain, overlapping = (
        Vit(patch=4, dim=16, depth=1, heads=2, overlap=o).build((1, 16, 20), 3) for o in (False, True)
    )
    x = torch.randn(2, 1, 16, 20)
    assert plain.patch_embed(x).shape == overlapping.patch_embed(x).shape == (2, 16, 4, 5)
    assert overlapping.patch_embed.kernel_size == (7, 7) and overlapping(x).shape == (2, 3)
