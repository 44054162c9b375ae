import math

import pytest
import torch
from torch import nn

from fedgrove.core import Batch
from fedgrove.methods.fedkd import (
    MENTEE,
    MENTOR,
    MutualDistillation,
    Pair,
    divergence,
    join,
    part,
)
from fedgrove.nets import Net
from fedgrove.problems import CLASSES, numbers


def test_a_pair_is_taken_apart_as_it_was_joined():
    one = {"w": torch.ones(1), "b": torch.zeros(1)}
    other = {"w": torch.zeros(2)}
    pair = join(one, other)
    assert list(pair) == ["mentee.w", "mentee.b", "mentor.w"]
    assert part(pair, MENTEE) == one
    assert part(pair, MENTOR) == other


def test_the_divergence_by_hand():
    # Teacher (1/2, 1/2), learner (3/4, 1/4): .5 ln(.5/.75) + .5 ln(.5/.25) = .5 ln(4/3) = .1438.
    # The other way: .75 ln(.75/.5) + .25 ln(.25/.5) = .3041 - .1733 = .1308.
    even = torch.zeros(1, 2)
    sure = torch.tensor([[math.log(3.0), 0.0]])
    assert float(divergence(CLASSES, even, sure, {})) == pytest.approx(0.5 * math.log(4 / 3))
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(divergence(CLASSES, sure, even, {})) == pytest.approx(expected)
    # Numbers: half of 3^2 + 4^2.
    far = divergence(numbers(), torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]), {})
    assert far.tolist() == [12.5]


def test_labels_that_a_client_does_not_have_do_not_count():
    own = {"allowed": torch.tensor([True, True, False])}
    teacher = torch.tensor([[0.0, 0.0, 50.0]])
    learner = torch.tensor([[math.log(3.0), 0.0, -9.0]])
    expected = 0.5 * math.log(4 / 3)
    assert float(divergence(CLASSES, teacher, learner, own)) == pytest.approx(expected)


class Bias(nn.Module):
    """Two logits that do not depend on the input."""

    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.b + 0 * x[:, :1]


def losses(mentee, mentor, weight, padding=0):
    net = Net(Pair(Bias(), Bias()), (1,))
    tree = {
        "mentee.b": mentee.clone().requires_grad_(),
        "mentor.b": mentor.clone().requires_grad_(),
    }
    ones = torch.ones(1 + padding)
    ones[1:] = 0
    batch = Batch(
        torch.ones(1 + padding, 1),
        torch.zeros(1 + padding, dtype=torch.int64),
        ones,
        torch.arange(1 + padding),
        torch.tensor(0),
    )
    out = net(tree, batch.x, train=True)
    loss, _ = MutualDistillation(weight)(out, tree, batch, {})
    return loss.item(), torch.autograd.grad(loss, list(tree.values()))


def test_the_losses_of_a_pair_by_hand():
    # Mentee (1/2, 1/2), mentor (3/4, 1/4), the class is 0: task losses ln 2 and ln 4/3, together
    # ln 8/3 = .9808; distillation .1438 + .1308, divided by that.
    mentee = torch.zeros(2, dtype=torch.float64)
    mentor = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64)
    tasks = math.log(8 / 3)
    apart = 0.5 * math.log(4 / 3) + 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    for padding in (0, 3):
        loss, (of_mentee, of_mentor) = losses(mentee, mentor, 2.0, padding)
        assert loss == pytest.approx(tasks + 2.0 * apart / tasks)
        # By logits: p - y of the task, and (p - p_teacher) of the distillation, times 2 / ln 8/3.
        pull = 2.0 / tasks * 0.25
        assert of_mentee.tolist() == pytest.approx([-0.5 - pull, 0.5 + pull])
        assert of_mentor.tolist() == pytest.approx([-0.25 + pull, 0.25 - pull])


def test_without_weight_each_learns_alone():
    mentee = torch.zeros(2, dtype=torch.float64)
    mentor = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64)
    _, (of_mentee, of_mentor) = losses(mentee, mentor, 0.0)
    assert of_mentee.tolist() == pytest.approx([-0.5, 0.5])
    assert of_mentor.tolist() == pytest.approx([-0.25, 0.25])


def test_two_that_are_sure_do_not_divide_by_nothing():
    sure = torch.tensor([80.0, -80.0], dtype=torch.float64)
    loss, gradients = losses(sure, sure, 1.0)
    assert math.isfinite(loss)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
