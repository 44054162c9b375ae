import doctest
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fedgrove import nets, trees
from fedgrove.errors import InputError
from fedgrove.nets import net, user_files
from fedgrove.nets.dropout import Dropout
from fedgrove.nets.layout import named_tensors

SMALL = {
    "har-cnn": (3, 20),
    "mnist-cnn": (1, 8, 8),
    "lenet": (1, 16, 16),
    "leafcnn": (1, 16, 16),
    "bn-cnn2": (1, 8, 8),
    "bn-cnn4": (3, 16, 16),
    "resnet18": (3, 8, 8),
    "shufflenetv2": (3, 8, 8),
    "mlp": (2, 3),
}
NARROW = {"resnet18": {"width": 4}, "shufflenetv2": {"width": 4}, "bn-cnn4": {"width": 4}}
"""Options that make the large nets quick to build."""


def count(name: str, shape: tuple[int, ...], classes: int, **options: object) -> int:
    return sum(p.numel() for p in nets.build(name, shape, classes, seed=0, **options).parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "params"),
    [
        # 9·64·5+64 + 64·64·5+64 + 2048·32+32 + 32·6+6: 128 / 4 = 32 steps of 64 channels are left
        ("har-cnn", (9, 128), 6, 89_254),
        # 3·64·5+64 + 20544 + 50·64·32+32 + 198
        ("har-cnn", (3, 200), 6, 124_198),
        # 832 + 51264 + 7·7·64·128+128 + 1290
        ("mnist-cnn", (1, 28, 28), 10, 454_922),
        # 2432 + 51264 + 1600·120+120 + 120·84+84 + 850
        ("lenet", (3, 32, 32), 10, 256_830),
        # 832 + 51264 + 1024·2048+2048 + 2048·47+47
        ("leafcnn", (1, 28, 28), 47, 2_247_599),
        # convs 576 + 73728, norms 2·(64+128), head 128·7·7·10+10
        ("bn-cnn2", (1, 28, 28), 10, 137_418),
        # convs 1728 + 73728 + 294912 + 1179648, norms 2·960, head 512·2·2·10+10
        ("bn-cnn4", (3, 32, 32), 10, 1_572_426),
        # stem 1728 + 128; layer1 4·36864 + 512; layer2-4: convs 524288·(1 + 4 + 16),
        # norms 2·5·(128 + 256 + 512); head 5130
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        # stem 648; stage2: 216 + 1392 + 1392 + 522 + 3364 in its first unit and 2·3364 + 522 in each
        # of three others, 28636; stage3: 1044 + 3·13456 + 1044, and 7·(2·13456 + 1044), 238148;
        # stage4: 2088 + 3·53824 + 2088, and 3·(2·53824 + 2088), 494856; conv5 464·1024 = 475136;
        # norms 2·(24 + 778 + 3016 + 3248 + 1024); head 10250
        ("shufflenetv2", (3, 32, 32), 10, 1_263_854),
        # 64·64+64 twice, 64·10+10
        ("mlp", (1, 8, 8), 10, 8_970),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, params: int) -> None:
    assert count(name, shape, classes) == params


def test_a_large_stem() -> None:
    """7 · 7 in place of 3 · 3 of 3 · 64 weights are 7680 more in ResNet-18, as in torchvision's;
    ShuffleNetV2's first conv only has another stride. An image of 32 × 32 is 8 × 8 behind either."""
    assert count("resnet18", (3, 32, 32), 10, stem="large") == 11_181_642
    assert count("shufflenetv2", (3, 32, 32), 10, stem="large") == 1_263_854
    for name, first in (("resnet18", "layer1"), ("shufflenetv2", "stage2")):
        for stem, side in (("small", 32), ("large", 8)):
            built = nets.build(name, (3, 32, 32), 10, seed=0, width=4, stem=stem)
            seen: list[torch.Tensor] = []
            hook = lambda _, args, seen=seen: seen.append(args[0])  # noqa: E731
            built.get_submodule(first).register_forward_pre_hook(hook)
            built(torch.zeros(2, 3, 32, 32))
            assert seen[0].shape[2:] == (side, side)


def test_options() -> None:
    assert count("mlp", (8,), 3, hidden=5) == 8 * 5 + 5 + 5 * 5 + 5 + 5 * 3 + 3
    group = nets.build("resnet18", (3, 8, 8), 2, seed=0, norm="group", width=4)
    assert not [m for m in group.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {m.num_groups for m in group.modules() if isinstance(m, nn.GroupNorm)} == {2}
    # without norms the convs have biases; 8 channels of 2 × 2 reach the head
    params = (9 + 1) * 4 + (4 * 9 + 1) * 8 + 8 * 4 * 3 + 3
    assert count("bn-cnn2", (1, 8, 8), 3, norm="none", width=4) == params
    plain = nets.build("har-cnn", (3, 20), 2, 0, dropout=False)
    assert not [m for m in plain.modules() if isinstance(m, Dropout)]


def test_the_default_weights_of_har_cnn_are_torchs_to_the_bit() -> None:
    """What the class gave before it had an option: its layers drawn in their order."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        conv1 = nn.Conv2d(3, 64, (1, 5), padding=(0, 2))
        conv2 = nn.Conv2d(64, 64, (1, 5), padding=(0, 2))
        fc1 = nn.Linear(64 * 5, 32)
        head = nn.Linear(32, 2)
    built = nets.build("har-cnn", (3, 20), 2, seed=3)
    for name, layer in (("conv1", conv1), ("conv2", conv2), ("fc1", fc1), ("head", head)):
        assert torch.equal(built.get_submodule(name).weight, layer.weight)
        assert torch.equal(built.get_submodule(name).bias, layer.bias)


def test_glorot_weights_by_hand() -> None:
    """Bounds sqrt(6 / (fan_in + fan_out)), a fan being channels times the 5 steps of the kernel:
    conv1 sqrt(6 / (15 + 320)) = .1338, conv2 sqrt(6 / 640) = .0968, fc1 sqrt(6 / (320 + 32)) =
    .1306, head sqrt(6 / (32 + 2)) = .4201. Biases are 0; drawn anew the weights differ, within the
    same bounds."""
    bounds = {"conv1": 0.1338, "conv2": 0.0968, "fc1": 0.1306, "head": 0.4201}
    built = nets.build("har-cnn:init=glorot", (3, 20), 2, seed=0)
    other = nets.Net(built, (3, 20)).redraw(seed=1)
    assert count("har-cnn", (3, 20), 2, init="glorot") == count("har-cnn", (3, 20), 2)
    for name, bound in bounds.items():
        layer = built.get_submodule(name)
        for weight in (layer.weight.detach(), other[f"{name}.weight"]):
            # The largest of 64 and more uniform draws is near the bound, and never above it.
            assert 0.9 * bound < float(weight.abs().max()) < bound + 5e-5
        assert not torch.equal(layer.weight, other[f"{name}.weight"])
        assert not bool(layer.bias.any())
        assert not bool(other[f"{name}.bias"].any())
    with pytest.raises(InputError, match=r"^init is 'keras'; it must be torch or glorot\.$"):
        nets.build("har-cnn:init=keras", (3, 20), 2, seed=0)


def test_dropout_rates_of_the_paper() -> None:
    built = nets.build("har-cnn", (3, 20), 2, seed=0)
    assert [m.p for m in built.modules() if isinstance(m, Dropout)] == [0.3, 0.3, 0.2]


@pytest.mark.parametrize("name", nets.names())
def test_weights_follow_from_the_seed_and_global_state_is_untouched(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    options = NARROW.get(name, {})
    one = named_tensors(nets.build(name, SMALL[name], 3, seed=1, **options))
    same = named_tensors(nets.build(name, SMALL[name], 3, seed=1, **options))
    other = named_tensors(nets.build(name, SMALL[name], 3, seed=2, **options))
    assert torch.equal(before, torch.get_rng_state())
    assert trees.equal(one, same)
    assert not trees.equal(one, other)


@pytest.mark.parametrize("name", nets.names())
def test_every_state_is_float_and_the_module_comes_in_train_mode(name: str) -> None:
    options = NARROW.get(name, {})
    built = nets.build(name, SMALL[name], 3, seed=0, **options)
    assert all(v.is_floating_point() for v in built.state_dict().values())
    assert all(m.training for m in built.modules())


@pytest.mark.parametrize("name", nets.names())
def test_least_shapes(name: str) -> None:
    """What a net says it takes, it takes; one less it refuses."""
    built_in = nets._NETS[name]
    if built_in.spatial is None:
        return
    least = [built_in.least] * built_in.spatial
    too_small = [built_in.least - 1] * built_in.spatial
    options = NARROW.get(name, {})
    nets.build(name, (2, *least), 3, seed=0, **options)
    with pytest.raises(InputError):
        nets.build(name, (2, *too_small), 3, seed=0, **options)


def test_a_shape_that_does_not_fit() -> None:
    with pytest.raises(InputError) as caught:
        nets.build("har-cnn", (1, 28, 28), 10, seed=0)
    assert str(caught.value) == (
        "net 'har-cnn' takes (channels, length) with a length of at least 4 and was given "
        "(1, 28, 28); nets that take this shape: "
        "mnist-cnn, lenet, leafcnn, bn-cnn2, bn-cnn4, resnet18, shufflenetv2, mlp."
    )


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("lenett", {}, "did you mean 'lenet'"),
        ("mlp", {"hiden": 3}, "did you mean 'hidden'"),
        ("resnet18", {"norm": "layer"}, "batch, group, none"),
        ("shufflenetv2", {"width": 6}, "a multiple of 4"),
        ("resnet18", {"stem": "tiny"}, "stem is 'tiny'; it must be one of small, large"),
        ("shufflenetv2:stem=7", {}, "stem is '7'; it must be one of small, large"),
        ("mlp:hiden=3", {}, "did you mean 'hidden'"),
        (
            "mlp:hidden=many",
            {},
            r"^net 'mlp:hidden=many' has an option that cannot be read; "
            r"write options as in mlp:hidden=64\.$",
        ),
    ],
)
def test_bad_words(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        nets.build(name, (3, 32, 32), 10, seed=0, **options)


def test_options_behind_a_name() -> None:
    written = nets.build("bn-cnn2:norm=none,width=4", (1, 8, 8), 3, seed=0)
    given = nets.build("bn-cnn2", (1, 8, 8), 3, seed=0, norm="none", width=4)
    assert [p.shape for p in written.parameters()] == [p.shape for p in given.parameters()]
    quiet = nets.build("har-cnn:dropout=false", (3, 16), 3, seed=0)
    assert not any("Dropout" in type(m).__name__ for m in quiet.modules())
    with pytest.raises(InputError, match="write options as in har-cnn:dropout=True"):
        nets.build("har-cnn:dropout=maybe", (3, 16), 3, seed=0)


@pytest.mark.parametrize(("shape", "classes"), [((), 2), ((0, 3), 2), ((3.5,), 2), ((3,), 0)])
def test_bad_numbers(shape: tuple[int, ...], classes: int) -> None:
    with pytest.raises(InputError):
        nets.build("mlp", shape, classes, seed=0)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "says"),
    [
        ("mlp:hidden=99999999999", (8,), 3, "hidden of net 'mlp' is 99999999999; it must be at"),
        # 200000·8 + 200000·200000 + 3·200000 weights, 2·200000 + 3 biases
        ("mlp:hidden=200000", (8,), 3, "has 40,002,600,003 parameters for these inputs; it must"),
        (
            "mlp",
            (99999999, 99999999),
            3,
            "shape of an input is (99999999, 99999999); it must be at",
        ),
        ("har-cnn", (3, 999999999999), 3, "it must be at most 16777216 numbers"),
        ("mlp", (8,), 99999999999, "classes is 99999999999; it must be above 0 and at most"),
    ],
)
def test_absurd_sizes_are_refused_before_memory_is_allocated(
    name: str, shape: tuple[int, ...], classes: int, says: str
) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        nets.build(name, shape, classes, seed=0)


def test_describe() -> None:
    assert nets.describe("bn-cnn2") == (
        "the 2-conv CNN of SAFL for MNIST; takes (channels, height, width) with sides of "
        "at least 4; options: width=64, norm=batch"
    )
    assert all(nets.describe(name) for name in nets.names())


def test_a_module_is_copied_and_keeps_its_weights() -> None:
    mine = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    mine[1].train()
    built = nets.build(mine, (4,), 3, seed=0)
    assert built is not mine
    assert trees.equal(named_tensors(built), named_tensors(mine))
    assert [m.training for m in built.modules()] == [False, False, True]
    assert mine[1].num_batches_tracked is not None
    assert list(built.state_dict()) == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
    ]


def test_a_module_that_does_not_do() -> None:
    with pytest.raises(InputError, match=r"gave \(2, 3\) .* must give \(2, 5\)"):
        nets.build(nn.Linear(4, 3), (4,), 5, seed=0)
    with pytest.raises(InputError, match=r"zeros of shape \(2, 6\) and raised RuntimeError: mat1"):
        nets.build(nn.Linear(4, 3), (6,), 3, seed=0)
    cumulative = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    embedding = nn.Sequential(nn.Embedding(5, 2), nn.Flatten())
    with pytest.raises(InputError, match=r"inputs are torch.float32: convert them .* x.long\(\)"):
        nets.build(embedding, (3,), 6, seed=0)
    with pytest.raises(InputError, match="'1' has momentum=None"):
        nets.build(cumulative, (4,), 3, seed=0)
    with pytest.raises(InputError, match="options hidden"):
        nets.build(nn.Linear(4, 3), (4,), 3, seed=0, hidden=2)


FILE = """
from torch import nn
from neighbour import WIDTH

class Both(nn.Sequential):
    def __init__(self, s, c):
        super().__init__(nn.Linear(s[0], WIDTH), nn.Linear(WIDTH, c))

class Named(nn.Sequential):
    def __init__(self, width=6, *, classes, shape):
        super().__init__(nn.Linear(shape[0], width), nn.Linear(width, classes))

class Count(nn.Sequential):
    def __init__(self, num_classes=1000):
        super().__init__(nn.LazyLinear(num_classes))

class One(nn.Linear):
    def __init__(self, n):
        super().__init__(4, n)

class Fixed(nn.Linear):
    def __init__(self, width=3):
        super().__init__(4, width)

class Three(nn.Linear):
    def __init__(self, a, b, c):
        super().__init__(a, b)

class Broken(nn.Linear):
    def __init__(self, n):
        raise KeyError("oops")
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "neighbour.py").write_text("WIDTH = 7\n")
    (tmp_path / "own.py").write_text(FILE)
    return str(tmp_path / "own.py")


@pytest.mark.parametrize(
    ("cls", "params"),
    [("Both", 35 + 24), ("Named", 30 + 21), ("Count", 15), ("One", 15), ("Fixed", 15)],
)
def test_the_users_own_class(own: str, cls: str, params: int) -> None:
    before = torch.get_rng_state()
    one = nets.build(f"{own}:{cls}", (4,), 3, seed=0)
    two = nets.build(f"{own}:{cls}", (4,), 3, seed=0)
    assert sum(p.numel() for p in one.parameters()) == params
    assert trees.equal(named_tensors(one), named_tensors(two))
    assert torch.equal(before, torch.get_rng_state())
    assert type(one) is type(two)


def test_options_reach_the_users_class(own: str) -> None:
    assert nets.build(f"{own}:Named", (4,), 3, seed=0, width=2)[0].out_features == 2


@pytest.mark.parametrize(
    ("tail", "says"),
    [
        (
            ":Three",
            r"takes \(a, b, c\); "
            r"Three\(shape, classes\), Three\(classes\) and Three\(\) were tried",
        ),
        (":Broken", "raised KeyError: 'oops'"),
        (":Fixd", "did you mean 'Fixed'"),
        ("", "write path/file.py:Class"),
        ("x.py:Fixed", "there is no file"),
    ],
)
def test_the_users_class_that_does_not_do(own: str, tail: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        nets.build(own + tail, (4,), 3, seed=0)


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_thing")
    with pytest.raises(InputError, match="ModuleNotFoundError: No module named 'no_such_thing'"):
        nets.build(f"{tmp_path / 'bad.py'}:Net", (4,), 3, seed=0)


def test_every_option_is_described_in_the_docstring() -> None:
    for name in nets.names():
        built_in = nets._NETS[name]
        # a partial keeps the class it calls in .func
        cls = getattr(built_in.make, "func", built_in.make)
        doc = inspect.getdoc(cls) or ""
        assert [option for option in built_in.options if f"``{option}" not in doc] == [], name


@pytest.mark.parametrize("module", [nets, net, user_files], ids=lambda m: m.__name__)
def test_doctests(module: object) -> None:
    assert doctest.testmod(module).failed == 0


def test_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "nets.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    assert blocks
    space: dict[str, object] = {}
    for block in blocks:
        exec(block, space)
