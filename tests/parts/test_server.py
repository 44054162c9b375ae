"""How the server moves its model: each rule by hand, over two rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgrove import trees
from fedgrove.errors import InputError
from fedgrove.parts.server import (
    ServerAdagrad,
    ServerAdam,
    ServerOptimiser,
    ServerSGD,
    ServerYogi,
    begin_server,
    step_server,
)

F64 = torch.float64


def tree(*numbers: float) -> trees.Tree:
    return {"w": torch.tensor(numbers, dtype=F64)}


def walk(server: ServerOptimiser, start: float, means: list[float]) -> list[float]:
    """The server's weight after each round, if the clients' mean is as given."""
    model = tree(start)
    state = begin_server(server, model)
    found = []
    for mean in means:
        model, state = step_server(server, model, tree(mean), state)
        found.append(model["w"].item())
    return found


def test_momentum_by_hand() -> None:
    """Updates of 2, and then from 11 to 12 of 1: v = 2, then .5 · 2 + 1 = 2; half of it is added."""
    assert walk(ServerSGD(step=0.5, momentum=0.5), 10.0, [12.0, 12.0]) == [11.0, 12.0]


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        # From 10, updates of 3 and 1. v = 1/4 · 16 + 3/4 · ... is worked out in each case; tau = 4, so v = 16.
        # m = 1.5, then 1.25. v = .5 · 16 + .5 · 9 = 12.5, then .5 · 12.5 + .5 = 6.75.
        (ServerAdam, (1.5 / (12.5**0.5 + 4), 1.25 / (6.75**0.5 + 4))),
        # 9 < 16, so v falls by .5 · 9 to 11.5; 1 < 11.5: by .5 to 11.
        (ServerYogi, (1.5 / (11.5**0.5 + 4), 1.25 / (11.0**0.5 + 4))),
    ],
)
def test_adam_and_yogi_by_hand(server: type, expected: tuple[float, float]) -> None:
    rule = server(step=2.0, beta1=0.5, beta2=0.5, tau=4.0)
    first = 10.0 + 2.0 * expected[0]
    second = first + 2.0 * expected[1]
    assert walk(rule, 10.0, [13.0, first + 1.0]) == pytest.approx([first, second], abs=1e-14)


def test_yogi_rises_with_a_large_update() -> None:
    """v = 1/4, the square 9 is larger: v = .25 + .5 · 9 = 4.75; m = 3."""
    (found,) = walk(ServerYogi(step=1.0, beta1=0.0, beta2=0.5, tau=0.5), 0.0, [3.0])
    assert found == pytest.approx(3.0 / (4.75**0.5 + 0.5), abs=1e-14)


def test_adagrad_by_hand() -> None:
    """tau = 4: v = 16 + 9 = 25, so a step of 2 is 2 · 3 / (5 + 4) = 2/3; then the update is 1: v = 26."""
    first = 2 / 3
    second = first + 2.0 / (26**0.5 + 4.0)
    found = walk(ServerAdagrad(step=2.0, tau=4.0), 0.0, [3.0, first + 1.0])
    assert found == pytest.approx([first, second], abs=1e-14)


def test_v_begins_at_tau_squared_and_m_at_zero() -> None:
    state = ServerAdam(tau=0.5).begin(tree(7.0))
    assert state["v"]["w"].tolist() == [0.25]
    assert state["m"]["w"].tolist() == [0.0]


FLOATS = st.floats(-1e3, 1e3, width=32)


@given(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=5))
def test_a_whole_step_without_momentum_is_the_mean(pairs: list[tuple[float, float]]) -> None:
    before = {"w": torch.tensor([w for w, _ in pairs])}
    mean = {"w": torch.tensor([m for _, m in pairs])}
    server = ServerSGD()
    moved, _ = step_server(server, before, mean, begin_server(server, before))
    assert torch.allclose(moved["w"], mean["w"], rtol=1e-7, atol=1e-12)
    assert step_server(None, before, mean, {}) == (mean, {})


def test_running_statistics_are_averaged_in_their_place() -> None:
    before = {"a.running_var": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    mean = {"a.running_var": torch.tensor([4.0]), "b": torch.tensor([3.0])}
    server = ServerSGD(step=0.5)
    moved, state = step_server(server, before, mean, begin_server(server, {"b": before["b"]}))
    assert {name: value.item() for name, value in moved.items()} == {"a.running_var": 4.0, "b": 2.0}
    assert list(moved) == list(before)
    assert moved["b"].dtype == state["velocity"]["b"].dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServerSGD(step=0), "step is 0; it must be above 0."),
        (lambda: ServerSGD(momentum=1.0), r"momentum is 1.0; it must be in \[0, 1\)."),
        (lambda: ServerAdam(step=-1), "step is -1; it must be above 0."),
        (lambda: ServerAdam(beta1=1.0), r"beta1 is 1.0; it must be in \[0, 1\)."),
        (lambda: ServerAdam(beta2=1.0), r"beta2 is 1.0; it must be in \[0, 1\)."),
        (lambda: ServerYogi(beta2=-0.1), r"beta2 is -0.1; it must be in \[0, 1\)."),
        (lambda: ServerAdagrad(tau=0), "tau is 0; it must be above 0."),
    ],
)
def test_wrong_numbers_are_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        make()


def test_a_server_that_remembers_nothing_moves_every_weight() -> None:
    class Sign:
        def begin(self, params: trees.Tree) -> dict[str, trees.Tree]:
            return {}

        def move(
            self, update: trees.Tree, state: object
        ) -> tuple[trees.Tree, dict[str, trees.Tree]]:
            return trees.map(torch.sign, update), {}

    counts = {"count": torch.tensor(3)}
    moved, state = step_server(Sign(), tree(1.0, 5.0), tree(4.0, 2.0) | counts, {})
    assert moved["w"].tolist() == [2.0, 4.0]
    assert int(moved["count"]) == 3
    assert state == {}
