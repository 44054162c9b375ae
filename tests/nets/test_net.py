import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.functional import cross_entropy

from fedgrove import nets, trees
from fedgrove.core import ExpectedPacket
from fedgrove.errors import InputError
from fedgrove.nets import Net
from fedgrove.nets.net import channels_last
from fedgrove.trees import Tree

torch.set_num_threads(1)
CASES = [
    ("har-cnn", (3, 20), {}, False),
    ("har-cnn", (3, 20), {"dropout": False}, True),
    ("mnist-cnn", (1, 8, 8), {}, True),
    ("lenet", (3, 16, 16), {}, True),
    ("leafcnn", (1, 16, 16), {}, True),
    ("bn-cnn2", (1, 8, 8), {"width": 4}, True),
    ("bn-cnn2", (1, 8, 8), {"width": 4}, False),
    ("bn-cnn4", (3, 16, 16), {"width": 4}, True),
    ("bn-cnn4", (3, 16, 16), {"width": 4, "norm": "none"}, True),
    ("resnet18", (3, 8, 8), {"width": 4}, True),
    ("resnet18", (3, 8, 8), {"width": 4, "norm": "group"}, True),
    ("shufflenetv2", (3, 8, 8), {"width": 4}, True),
    ("shufflenetv2", (3, 8, 8), {"width": 4, "norm": "group"}, True),
    ("mlp", (2, 3), {}, True),
]


def make(name: str, shape: tuple[int, ...], **options: object) -> Net:
    return Net(nets.build(name, shape, 3, seed=0, **options).double(), shape)


def split(net: Net, tree: Tree) -> tuple[Tree, Tree]:
    return trees.pick(tree, net.layout.params), trees.pick(tree, net.layout.buffers)


def step(net: Net, train: bool):
    """The gradient of the loss, and the buffers after the step."""

    def loss(params: Tree, buffers: Tree, x: Tensor, y: Tensor) -> tuple[Tensor, Tree]:
        mine = {k: v.clone() for k, v in buffers.items()}
        out = net({**params, **mine}, x, train)
        return cross_entropy(out.logits, y) + out.features.square().mean(), mine

    return grad(loss, has_aux=True)


@pytest.mark.parametrize(("name", "shape", "options", "train"), CASES)
def test_three_clients_stacked_equal_three_alone(name, shape, options, train) -> None:
    """Weights, BatchNorm statistics and data differ between the clients; gradients and new statistics must agree."""
    net = make(name, shape, **options)
    draw = torch.Generator().manual_seed(1)
    clients = [
        trees.map(lambda v: v + 0.1 * torch.rand(v.shape, generator=draw), net.params())
        for _ in range(3)
    ]
    x = torch.randn((3, 5, *shape), generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (3, 5), generator=draw)
    stacked = split(net, trees.stack(clients))
    grads, buffers = vmap(step(net, train))(*stacked, x, y)
    for i, client in enumerate(clients):
        g, b = step(net, train)(*split(net, client), x[i], y[i])
        largest = max(
            float(v.abs().max()) for v in g.values()
        )  # in the thousands: 1e-12 alone would be its last bit
        assert trees.distance(g, {k: v[i] for k, v in grads.items()}) < 1e-12 * max(1.0, largest)
        assert trees.distance(b, {k: v[i] for k, v in buffers.items()}) < 1e-12
        moved = [k for k in b if not torch.equal(b[k], client[k])]
        assert moved == (list(net.layout.buffers) if train else [])


@pytest.mark.parametrize(("name", "shape", "options", "train"), CASES)
def test_equal_to_functional_call(name, shape, options, train) -> None:
    net = make(name, shape, **options)
    tree = trees.map(lambda v: v + 0.01, net.params())
    theirs = {k: v.clone() for k, v in tree.items()}
    x = torch.randn((4, *shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, out = {k: v.clone() for k, v in tree.items()}, net(tree, x, train)
    lay = channels_last if getattr(net.module, "channels_last", False) else torch.as_tensor
    laid = {k: lay(v) for k, v in theirs.items()}
    assert torch.equal(out.logits, functional_call(net.module.train(train), laid, (lay(x),)))
    assert trees.equal(tree, laid)
    # As it stands in memory otherwise, sums are taken in another order.
    torch.testing.assert_close(
        out.logits, functional_call(net.module.train(train), plain, (x,)), rtol=1e-12, atol=0
    )
    for k in tree:
        torch.testing.assert_close(tree[k], plain[k], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_in_memory(channels: int) -> None:
    """The same numbers in other places; kernels go by the strides, which for one channel say nothing by themselves."""
    x = torch.arange(2.0 * channels * 4 * 5).view(2, channels, 4, 5)
    last = channels_last(x)
    assert torch.equal(last, x)
    assert last.stride() == (20 * channels, 1, 5 * channels, channels)
    assert F.conv2d(last, channels_last(torch.ones(6, channels, 3, 3))).is_contiguous(
        memory_format=torch.channels_last
    )
    assert torch.equal(vmap(channels_last)(x[:, None]), x[:, None])
    row = torch.ones(3)
    assert channels_last(row) is row


def test_the_module_is_left_as_it_was() -> None:
    net = make("bn-cnn2", (1, 8, 8), width=4)
    before, own = net.params(), dict(net.module.named_parameters())
    net(trees.map(torch.zeros_like, before), torch.ones(2, 1, 8, 8).double(), True)
    assert trees.equal(before, net.params())
    assert all(p is own[k] for k, p in net.module.named_parameters())
    with pytest.raises(RuntimeError):
        net(trees.map(torch.zeros_like, before), torch.ones(2, 5, 8, 8).double(), True)
    assert trees.equal(before, net.params())
    assert all(not m._forward_pre_hooks for m in net.module.modules())


def test_params_are_copies_in_layout_order() -> None:
    net = make("bn-cnn2", (1, 8, 8), width=4)
    tree = net.params()
    assert tuple(tree) == net.layout.params + net.layout.buffers == tuple(net.layout.shapes)
    assert not any(v.requires_grad for v in tree.values())
    tree["head.bias"].fill_(7)
    assert not (net.params()["head.bias"] == 7).any()


def test_features_and_modes() -> None:
    """The logits are the head applied to the features."""
    net = make("har-cnn", (3, 20))
    tree, x = net.params(), torch.randn(6, 3, 20).double()
    out = net(tree, x, train=False)
    assert out.net is net
    assert not out.train
    assert out.features.shape == (6, 32)
    torch.testing.assert_close(out.features @ tree["head.weight"].T + tree["head.bias"], out.logits)
    assert torch.equal(net(tree, x, False).logits, out.logits)
    assert not torch.equal(net(tree, x, True).logits, out.logits)  # dropout
    assert net.module.training


def test_no_linear_layer_gives_no_features() -> None:
    net = Net(nn.Sequential(nn.Conv1d(2, 3, 4), nn.Flatten()), (2, 4))
    assert net(net.params(), torch.zeros(1, 2, 4), False).features is None
    assert net.layout.head == ()


def test_a_linear_layer_over_steps_gives_flat_features() -> None:
    net = Net(nn.Sequential(nn.Linear(2, 3), nn.Flatten()), (5, 2))
    assert net(net.params(), torch.zeros(4, 5, 2), False).features.shape == (4, 10)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))], ids=["deepcopy", "pickle"]
)
def test_copies_work_alone(copied) -> None:
    net = make("bn-cnn2", (1, 8, 8), width=4)
    x = torch.randn(3, 1, 8, 8).double()
    net(net.params(), x.requires_grad_(), True)
    twin = copied(net)
    tree = trees.map(lambda v: v + 0.1, net.params())
    with torch.no_grad():
        for p in net.module.parameters():
            p.zero_()
    out, theirs = net(tree, x, False), twin(tree, x, False)
    assert torch.equal(out.logits, theirs.logits)
    assert torch.equal(out.features, theirs.features)
    assert twin.layout == net.layout
    assert twin.params()["conv1.weight"].any()


def test_a_tree_that_lacks_a_name() -> None:
    net = make("mlp", (2, 3))
    tree = net.params()
    del tree["fc2.bias"]
    with pytest.raises(
        InputError,
        match=r"no 'fc2.bias'; it must contain .*fc1.weight, fc1.bias, fc2.weight, fc2.bias",
    ):
        net(tree, torch.zeros(1, 2, 3).double(), False)


def test_other_names_are_ignored() -> None:
    net = make("mlp", (2, 3))
    x = torch.ones(1, 2, 3).double()
    more = {**net.params(), "lr": torch.tensor(0.1)}
    assert torch.equal(net(more, x, False).logits, net(net.params(), x, False).logits)


def test_filled_holds_the_tree() -> None:
    net = make("bn-cnn2", (1, 8, 8), width=4)
    tree, x = trees.map(lambda v: v + 0.1, net.params()), torch.randn(3, 1, 8, 8).double()
    module = net.filled(tree).eval()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = channels_last(tensor.data)
    assert torch.equal(module(channels_last(x)), net(tree, x, False).logits)
    assert trees.equal(net.params(), make("bn-cnn2", (1, 8, 8), width=4).params())


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_a_shared_weight_is_one_leaf_and_reaches_both_layers() -> None:
    net = Net(Tied(), (3,))
    tree = net.params()
    assert tuple(tree) == ("a.weight", "a.bias", "b.bias")
    tree = {"a.weight": 2 * torch.eye(3), "a.bias": torch.zeros(3), "b.bias": torch.ones(3)}
    assert net(tree, torch.ones(1, 3), False).logits.tolist() == [[5, 5, 5]]  # 2·2·1 + 1
    assert net.layout.prunable == ("a.weight",)
    assert net.layout.prunable_size == 9
    assert net.layout.macs == 18
    assert net.filled(tree)(torch.ones(1, 3)).tolist() == [[5, 5, 5]]


class Steps(nn.Module):
    """A recurrent net, which keeps a list of its weights besides."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(2, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def test_recurrent_nets_follow_the_tree() -> None:
    net = Net(Steps(), (5, 2))
    zero = trees.map(torch.zeros_like, net.params())
    assert not net(zero, torch.ones(2, 5, 2), False).logits.any()
    tree, x = trees.map(lambda v: v + 0.3, net.params()), torch.ones(2, 5, 2)
    assert torch.equal(net(tree, x, False).logits, functional_call(net.module, tree, (x,)))
    assert (
        net.layout.macs == 5 * (3 * 4 * 2 + 3 * 4 * 4) + 4 * 3
    )  # five steps of three gates, then the head


def test_a_blank_tree_looks_like_the_parameters_and_follows_their_type() -> None:
    net = Net(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), (3,))
    assert ExpectedPacket.of(net.blank()) == ExpectedPacket.of(net.params())
    net.module.double()
    assert ExpectedPacket.of(net.blank()) == ExpectedPacket.of(net.params())
    assert net.blank()["0.weight"].dtype == torch.float64
