"""Files of weights to start from: what fits, and the sentences for what does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedgrove import nets
from fedgrove.errors import InputError
from fedgrove.nets import initial_weights as given
from fedgrove.nets.layout import named_tensors

SHAPE = (1, 8, 8)


def module(classes: int = 3, width: int = 4) -> nn.Module:
    return nets.build("bn-cnn2", SHAPE, classes, seed=0, width=width)


def weights(**changes: Tensor | None) -> dict[str, Tensor]:
    """Those of the module, all different from its own; None leaves one out."""
    tensors = {k: v.detach() + 1 for k, v in named_tensors(module()).items()}
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    return tensors


def taken(tensors: dict[str, Tensor], folder: Path, into: nn.Module, word: str = "") -> None:
    path = folder / "w.safetensors"
    save_file(tensors, path)
    origin, read = given.read_weights(f"{path}{word}")
    assert str(origin) == f"{path}{word}"
    given.load_weights(origin, read, into, SHAPE)


def test_every_tensor_is_taken(tmp_path: Path) -> None:
    mine = module()
    expected = weights()
    # A file of torch's has the counters of BatchNorm, and may have another type.
    file = {k: v.double() for k, v in expected.items()}
    file["norm1.num_batches_tracked"] = torch.tensor(7)
    taken(file, tmp_path, mine)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in named_tensors(mine).items())


def test_all_but_the_head(tmp_path: Path) -> None:
    """Whatever head the file has, of other classes or none."""
    for file in (weights(), weights(head__weight=None, head__bias=None)):
        mine = module(classes=5)
        before = {k: v.detach().clone() for k, v in named_tensors(mine).items()}
        taken(file, tmp_path, mine, ":body")
        for name, tensor in named_tensors(mine).items():
            expected = before[name] if name.startswith("head") else file[name]
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"conv1__weight": torch.zeros(4, 1, 5, 5)},
            "'conv1.weight' is (4, 1, 5, 5) and in the net (4, 1, 3, 3). Give weights of exactly this",
        ),
        ({"norm2__running_var": None}, "'norm2.running_var' is not in it. Give weights of"),
        ({"fc1__weight": torch.zeros(1)}, "'fc1.weight' is not in the net. Give weights of"),
        (
            {"head__weight": torch.zeros(9, 32), "head__bias": torch.zeros(9)},
            "Only the head differs, for example because the classes differ: to load everything except the head",
        ),
        ({"conv1__weight": torch.full((4, 1, 3, 3), torch.nan)}, "not finite (NaN or infinity)"),
        ({"conv1__weight": torch.zeros(4, 1, 3, 3).long()}, "is torch.int64; weights must be"),
    ],
)
def test_what_does_not_fit(changes: dict[str, Tensor], sentence: str, tmp_path: Path) -> None:
    mine = module()
    before = {k: v.detach().clone() for k, v in named_tensors(mine).items()}
    with pytest.raises(InputError, match=re.escape(sentence)):
        taken(weights(**changes), tmp_path, mine)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(mine).items())


def test_body_still_has_to_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'conv1\.weight' is .*; and 6 more\. Give weights"):
        taken(weights(), tmp_path, module(width=6), ":body")
    headless = nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten())
    with pytest.raises(InputError, match="has no linear layer that could be its head"):
        taken(weights(), tmp_path, headless, ":body")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        given.read_weights(str(tmp_path / "none.safetensors"))
    with pytest.raises(InputError, match=r"is the folder .*; give a file"):
        given.read_weights(str(tmp_path))
    text = tmp_path / "text.safetensors"
    for content in (b"", b"not tensors at all, only text", b"\xff" * 64):
        text.write_bytes(content)
        with pytest.raises(InputError, match="is not a safetensors file"):
            given.read_weights(str(text))


def test_what_a_module_has_frozen_itself_may_be_left_out(tmp_path: Path) -> None:
    mine = module()
    mine.get_parameter("conv1.weight").requires_grad_(False)
    taken(weights(conv1__weight=None), tmp_path, mine)
    assert not torch.equal(mine.get_parameter("conv1.weight"), weights()["conv1.weight"])
    taken(weights(), tmp_path, mine)
    assert torch.equal(mine.get_parameter("conv1.weight"), weights()["conv1.weight"])
