"""Each network against the papers' description, written as one row of torch layers.

Both hold the same weights.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgrove import nets
from fedgrove.nets.layout import named_tensors

ROWS = {
    "har-cnn": (
        nn.Conv1d(3, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(64, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(64 * 5, 32),
        nn.ReLU(),
        nn.Linear(32, 3),
    ),
    "mnist-cnn": (
        nn.Conv2d(3, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 5, 128),
        nn.ReLU(),
        nn.Linear(128, 3),
    ),
    "lenet": (
        nn.Conv2d(3, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 1 * 2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 3),
    ),
    "leafcnn": (
        nn.Conv2d(3, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 1 * 2, 2048),
        nn.ReLU(),
        nn.Linear(2048, 3),
    ),
    "bn-cnn2": (
        nn.Conv2d(3, 64, 3, padding="same", bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding="same", bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 4 * 5, 3),
    ),
    "mlp": (
        nn.Flatten(),
        nn.Linear(960, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 3),
    ),
}


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("train", [False, True])
def test_as_described(name: str, train: bool) -> None:
    """In train mode too, with dropout left out: it draws in an order of its own."""
    if name == "har-cnn":
        shape = (3, 20)
        options = {"dropout": False}
    else:
        shape = (3, 16, 20)
        options = {}
    built = nets.build(name, shape, 3, seed=0, **options).double().train(train)
    row = nn.Sequential(*ROWS[name]).double()
    row.train(train)
    with torch.no_grad():
        for mine, theirs in zip(
            named_tensors(built).values(), named_tensors(row).values(), strict=True
        ):
            theirs.copy_(mine.view(theirs.shape))
        outs = []
        for module in (built, row):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(9)
                outs.append(module(values(4, *shape)))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-12)


def norm(x: Tensor, tree: dict[str, Tensor], name: str) -> Tensor:
    return F.batch_norm(x, None, None, tree[f"{name}.weight"], tree[f"{name}.bias"], training=True)


STEMS = pytest.mark.parametrize(("stem", "side"), [("small", 16), ("large", 64)])
"""A large stem leaves a quarter of each side: 16 of 64."""


@STEMS
def test_resnet18_as_described(stem: str, side: int) -> None:
    """Eight blocks, the first of groups 2 to 4 with stride 2 and a projection; ReLU after sums."""
    built = nets.build("resnet18", (3, side, side), 3, seed=0, width=4, stem=stem).double()
    t = named_tensors(built)
    x = values(4, 3, side, side)
    if stem == "large":
        y = F.conv2d(x, t["conv1.weight"], stride=2, padding=3)
        y = F.max_pool2d(F.relu(norm(y, t, "norm1")), 3, stride=2, padding=1)
    else:
        y = F.relu(norm(F.conv2d(x, t["conv1.weight"], padding=1), t, "norm1"))
    for group in (1, 2, 3, 4):
        for i in (0, 1):
            block = f"layer{group}.{i}"
            stride = 2 if group > 1 and i == 0 else 1
            z = F.conv2d(y, t[f"{block}.conv1.weight"], stride=stride, padding=1)
            z = F.relu(norm(z, t, f"{block}.norm1"))
            z = F.conv2d(z, t[f"{block}.conv2.weight"], padding=1)
            z = norm(z, t, f"{block}.norm2")
            if stride == 2:
                y = F.conv2d(y, t[f"{block}.shortcut.conv.weight"], stride=2)
                y = norm(y, t, f"{block}.shortcut.norm")
            y = F.relu(z + y)
    assert y.shape == (4, 32, 2, 2)
    logits = F.linear(F.adaptive_avg_pool2d(y, 1).flatten(1), t["head.weight"], t["head.bias"])
    torch.testing.assert_close(built(x), logits, rtol=0, atol=1e-12)


@STEMS
def test_shufflenetv2_as_described(stem: str, side: int) -> None:
    """Three stages; the first unit of each halves the image in both branches, the others pass half
    of the channels by. Behind a unit channel 2i is the i-th of the branch that passes by, and
    channel 2i + 1 the i-th of the other."""
    built = nets.build("shufflenetv2", (3, side, side), 3, seed=0, width=8, stem=stem).double()
    t = named_tensors(built)

    def conv(x: Tensor, name: str, **options: int) -> Tensor:
        return F.conv2d(x, t[f"{name}.weight"], **options)

    x = values(4, 3, side, side)
    if stem == "large":
        y = F.relu(norm(conv(x, "conv1", stride=2, padding=1), t, "norm1"))
        y = F.max_pool2d(y, 3, stride=2, padding=1)
    else:
        y = F.relu(norm(conv(x, "conv1", padding=1), t, "norm1"))
    for stage, units in ((2, 4), (3, 8), (4, 4)):
        for i in range(units):
            unit = f"stage{stage}.{i}"
            stride = 2 if i == 0 else 1
            if i == 0:
                side = conv(y, f"{unit}.side_conv1", stride=2, padding=1, groups=y.shape[1])
                side = conv(norm(side, t, f"{unit}.side_norm1"), f"{unit}.side_conv2")
                side = F.relu(norm(side, t, f"{unit}.side_norm2"))
                z = y
            else:
                half = y.shape[1] // 2
                side = y[:, :half]
                z = y[:, half:]
            z = F.relu(norm(conv(z, f"{unit}.conv1"), t, f"{unit}.norm1"))
            z = conv(z, f"{unit}.conv2", stride=stride, padding=1, groups=z.shape[1])
            z = conv(norm(z, t, f"{unit}.norm2"), f"{unit}.conv3")
            z = F.relu(norm(z, t, f"{unit}.norm3"))
            y = z.new_empty(4, 2 * z.shape[1], *z.shape[2:])
            y[:, 0::2] = side
            y[:, 1::2] = z
    assert y.shape == (4, 32, 2, 2)
    y = F.relu(norm(conv(y, "conv5"), t, "norm5"))
    logits = F.linear(F.adaptive_avg_pool2d(y, 1).flatten(1), t["head.weight"], t["head.bias"])
    torch.testing.assert_close(built(x), logits, rtol=0, atol=1e-12)
