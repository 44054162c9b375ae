"""A generator of features: the head on its own, the clients' term, the server's steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedgrove import trees
from fedgrove.core import Batch
from fedgrove.errors import InputError, UnfitError
from fedgrove.methods.fedgen import (
    FeatureGenerator,
    GeneratedFeatures,
    GeneratorTraining,
    check_ends_in_head,
    generator_inputs,
    head_logits,
    sameness,
)
from fedgrove.nets import Net
from fedgrove.parts.local import Adam

NET = Net(nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)), (1,))


def test_inputs_by_hand() -> None:
    found = generator_inputs(torch.tensor([2, 0]), torch.tensor([[0.5], [-1.0]]), 3)
    assert found.tolist() == [[0, 0, 1, 0.5], [1, 0, 0, -1]]


def test_the_head_alone_gives_the_networks_own_logits() -> None:
    params = NET.params()
    out = NET(params, torch.tensor([[3.0]]), train=False)
    assert out.features is not None
    assert torch.equal(head_logits(NET.layout, params, out.features), out.logits)
    check_ends_in_head(NET, params)


class Softened(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x).log_softmax(1)
        return out


def test_a_network_that_goes_on_behind_its_head_is_refused() -> None:
    net = Net(Softened(nn.Linear(1, 2), nn.Linear(2, 2)), (1,))
    with pytest.raises(UnfitError, match="its outputs are not those of its last linear layer"):
        check_ends_in_head(net, net.params())
    bare = Net(nn.Sequential(nn.Conv1d(1, 2, 1), nn.AdaptiveAvgPool1d(1), nn.Flatten()), (1, 4))
    with pytest.raises(UnfitError, match="it has none that is trained"):
        check_ends_in_head(bare, bare.params())


def test_the_clients_term_by_hand() -> None:
    # The head is the identity: logits are the features (ln 3, 0), class 1 has a share of 1/4, and
    # class 0 of 3/4: alpha (ln 4 + ln 4/3) / 2. Where the generator is not trained, 0. With a decay
    # of .5, in round 3 an eighth.
    params = {**NET.params(), "2.weight": torch.eye(2), "2.bias": torch.zeros(2)}
    z = torch.tensor([[math.log(3), 0.0], [math.log(3), 0.0]])
    generated = {"z": z, "y": torch.tensor([1, 0]), "own": torch.ones(2).bool()}
    x = torch.zeros(1, 1)
    batch = Batch(x, torch.zeros(1).long(), torch.ones(1), torch.arange(1), torch.tensor(0))
    expected = 2 * (math.log(4) + math.log(4 / 3)) / 2
    for weight, number, value in ((1.0, 0, expected), (0.0, 0, 0.0), (1.0, 3, expected / 8)):
        carry = {
            "generated": {**generated, "weight": torch.tensor(weight)},
            "settings": {"round": torch.tensor(float(number))},
        }
        out = NET(params, x, train=True)
        loss, _ = GeneratedFeatures(alpha=2.0, decay=0.5)(out, params, batch, carry)
        assert float(loss) == pytest.approx(value)


def test_outputs_of_another_task_do_not_count_by_hand() -> None:
    """Features (ln 3, ln 5) and a head that makes logits (ln 3, 0, ln 5) of them, for class 0: of all
    three outputs its share is 3/9, of the first two, which are the client's, 3/4: the loss is ln 4/3."""
    net = Net(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 3)), (1,))
    head = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    params = {**net.params(), "1.weight": head, "1.bias": torch.zeros(3)}
    generated = {
        "z": torch.tensor([[math.log(3), math.log(5)]]), "y": torch.tensor([0]),
        "own": torch.tensor([True, True, False]), "weight": torch.tensor(1.0),
    }  # fmt: skip
    carry = {"generated": generated, "settings": {"round": torch.tensor(0.0)}}
    out = net(params, torch.zeros(1, 1), train=True)
    batch = Batch(*[torch.zeros(1)] * 5)
    loss, _ = GeneratedFeatures(alpha=1.0)(out, params, batch, carry)
    assert float(loss) == pytest.approx(math.log(4 / 3))


def test_the_terms_weight_is_that_of_the_authors_code() -> None:
    """10 at first, times .98 a round: 10 · .98 · .98 = 9.604 in round 2."""
    params = {**NET.params(), "2.weight": torch.zeros(2, 2), "2.bias": torch.zeros(2)}
    z = torch.zeros(1, 2)
    generated = {
        "z": z, "y": torch.tensor([0]), "own": torch.ones(2).bool(), "weight": torch.tensor(1.0)
    }  # fmt: skip
    batch = Batch(*[torch.zeros(1)] * 5)
    out = NET(params, torch.zeros(1, 1), train=True)
    for number, alpha in ((0, 10.0), (1, 9.8), (2, 9.604)):
        carry = {"generated": generated, "settings": {"round": torch.tensor(float(number))}}
        loss, _ = GeneratedFeatures()(out, params, batch, carry)
        # Of two classes alike the loss is ln 2.
        assert float(loss) == pytest.approx(alpha * math.log(2))


def test_sameness_by_hand() -> None:
    """Features 1 and 2 apart in the mean, noise 9 and 1 apart in the mean square, each pair twice, of
    nine pairs; those of one with itself are 0: exp(-2 (1 · 9 + 1 · 4 + 2 · 1) / 9) = exp(-30/9)."""
    z = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    noise = torch.tensor([[0.0], [3.0], [1.0]])
    assert float(sameness(z, noise)) == pytest.approx(math.exp(-30 / 9))


def test_the_server_keeps_it_from_overlooking_its_noise() -> None:
    """A head of zeros makes every class as likely, whatever the features: all that is left to learn
    from is how alike they are. One step down the gradient is twice as long for twice the weight."""
    torch.manual_seed(0)
    net = Net(FeatureGenerator(2, 3, 16, 2).double(), (5,))
    model = {**NET.params(), "2.weight": torch.zeros(2, 2), "2.bias": torch.zeros(2)}
    model = trees.map(Tensor.double, model)
    before = net.params()
    # Where eps is far above the gradient, Adam's step is lr / eps times the gradient.
    plain_step = Adam(1e9, eps=1e9)
    moved = {}
    for diversity in (0.0, 1.0, 2.0):
        train = GeneratorTraining(steps=1, diversity=diversity, optimiser=plain_step)
        after = train(net, before, NET.layout, model, torch.tensor([0.5, 0.5]), 3)
        moved[diversity] = trees.sub(after, before)
    assert trees.sq_norm(moved[0.0]) == 0
    assert trees.sq_norm(moved[1.0]) > 0
    twice = trees.map(lambda leaf: 2 * leaf, moved[1.0])
    assert trees.distance(moved[2.0], twice) < 1e-6 * float(trees.sq_norm(twice)) ** 0.5
    # And the step makes them less alike.
    y = torch.arange(64) % 2
    noise = torch.randn(64, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    alike = []
    for weights in (before, trees.map(torch.add, before, moved[1.0])):
        z = net(weights, generator_inputs(y, noise, 2), train=False).logits
        alike.append(float(sameness(z, noise)))
    assert alike[1] < alike[0]


def test_the_server_teaches_it_what_the_head_knows() -> None:
    torch.manual_seed(0)
    net = Net(FeatureGenerator(2, 3, 16, 2), (5,))
    model = {**NET.params(), "2.weight": 3 * torch.eye(2), "2.bias": torch.zeros(2)}
    before = net.params()
    untouched = {k: v.clone() for k, v in before.items()}
    train = GeneratorTraining(steps=200)
    # Class 0 alone is asked for.
    after = train(net, before, NET.layout, model, torch.tensor([1.0, 0.0]), seed=3)
    assert trees.identical(before, untouched)
    assert trees.identical(
        after, train(net, before, NET.layout, model, torch.tensor([1.0, 0.0]), 3)
    )
    y = torch.zeros(50).long()
    inputs = generator_inputs(y, torch.randn(50, 3), 2)
    shares = []
    for weights in (before, after):
        z = net(weights, inputs, train=False).logits
        shares.append(head_logits(NET.layout, model, z).softmax(1)[:, 0].mean())
    assert float(shares[0]) < 0.8
    assert float(shares[1]) > 0.9


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: GeneratedFeatures(alpha=-1), "alpha is -1; it must be 0 or more."),
        (lambda: GeneratedFeatures(decay=1.5), r"decay is 1.5; it must be in \(0, 1\]."),
        (lambda: GeneratorTraining(steps=-1), "steps is -1; it must be 0 or more."),
        (lambda: GeneratorTraining(batch=1), "batch is 1; it must be 2 or more."),
        (lambda: GeneratorTraining(diversity=-1), "diversity is -1; it must be 0 or more."),
    ],
)
def test_impossible_values_are_refused(make, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        make()
