"""Augmentation: crops, flips and cut-out squares by hand; draws that depend on nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import make_run, play, tensors
from torch import Tensor

from fedgrove import trees
from fedgrove.config.experiment import with_settings
from fedgrove.core import Batch, Train
from fedgrove.engines import Pool, Serial, Wired
from fedgrove.engines.batched.engine import Batched
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg, HeteroFL
from fedgrove.parts import local
from fedgrove.parts.augment import Augment, cut_out, draw_numbers, move
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.objective import ProblemLoss
from fedgrove.runs.checks import check_fit


def image() -> Tensor:
    """1 2 3 / 4 5 6 / 7 8 9, in two channels, the second ten times as large."""
    one = torch.arange(1.0, 10.0).view(3, 3)
    return torch.stack([one, 10 * one]).unsqueeze(0)


def test_moves_by_hand() -> None:
    """Down by 1 and right by -1: the first row is new, and the last column."""
    still = torch.tensor([False])
    moved = move(image(), torch.tensor([1]), torch.tensor([-1]), still)
    assert moved[0, 0].tolist() == [[0, 0, 0], [2, 3, 0], [5, 6, 0]]
    assert torch.equal(moved[0, 1], 10 * moved[0, 0])
    # Mirrored after that.
    mirrored = move(image(), torch.tensor([1]), torch.tensor([-1]), ~still)
    assert mirrored[0, 0].tolist() == [[0, 0, 0], [0, 3, 2], [0, 6, 5]]


def test_every_image_has_its_own_move() -> None:
    both = image().expand(2, -1, -1, -1)
    moved = move(both, torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([True, False]))
    assert moved[0, 0].tolist() == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]
    assert moved[1, 0].tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]


def test_a_square_by_hand() -> None:
    """Of side 2 around (1, 1): rows 0 and 1, columns 0 and 1; around (0, 2) only row 0 is inside."""
    cut = cut_out(image(), torch.tensor([1]), torch.tensor([1]), 2)
    assert cut[0, 0].tolist() == [[0, 0, 3], [0, 0, 6], [7, 8, 9]]
    cut = cut_out(image(), torch.tensor([0]), torch.tensor([2]), 2)
    assert cut[0, 0].tolist() == [[1, 0, 0], [4, 5, 6], [7, 8, 9]]
    assert torch.equal(cut_out(image(), torch.tensor([1]), torch.tensor([1]), 0), image())


@given(st.integers(0, 2**31 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
def test_draws_are_words(key: int, index: int, place: int) -> None:
    drawn = draw_numbers(torch.tensor(key), torch.tensor([index]), torch.tensor([place]), 3)
    assert 0 <= int(drawn) < 2**31


def test_draws_are_uniform_and_independent_of_each_other() -> None:
    """Of 20,000 draws in 0 to 8 each number is drawn 2222 times, with a deviation of 44."""
    index = torch.arange(20_000)
    place = index.roll(7)
    key = torch.tensor(12345)
    counts = Counter((draw_numbers(key, index, place, 0) % 9).tolist())
    assert sorted(counts) == list(range(9))
    assert all(abs(count - 2222) < 5 * 45 for count in counts.values())
    columns = [draw_numbers(key, index, place, purpose).double() for purpose in range(5)]
    columns.append(draw_numbers(key + 1, index, place, 0).double())
    columns.append(draw_numbers(key, index, place + 1, 0).double())
    columns.append(draw_numbers(key, index + 1, place, 0).double())
    correlations = torch.corrcoef(torch.stack(columns))
    # Five deviations of 1 / sqrt(20000).
    off = correlations[~torch.eye(len(columns), dtype=torch.bool)]
    assert float(off.abs().max()) < 0.036


def test_an_image_moves_in_both_directions_on_its_own() -> None:
    """Of 8 x 8 by -1, 0 or 1 each: a bright pixel is in nine places, 100 times of 900 with a deviation
    of 9.4."""
    x = torch.zeros(900, 1, 8, 8)
    x[:, 0, 4, 4] = 1
    index = torch.arange(900)
    moved = Augment(flip=False, cutout=0)(x, torch.tensor(3), index, index)
    counts = Counter(map(tuple, moved.nonzero()[:, 2:].tolist()))
    assert sorted(counts) == [(row, column) for row in (3, 4, 5) for column in (3, 4, 5)]
    assert all(abs(count - 100) < 48 for count in counts.values())


def test_small_images_are_changed_less() -> None:
    """Of 8 x 8 a pad of 4 is 1, and a square of 16 is 4 x 4: at most 16 + 15 of 64 pixels are lost."""
    x = torch.ones(500, 1, 8, 8)
    index = torch.arange(500)
    changed = Augment()(x, torch.tensor(3), index, index)
    lost = (changed == 0).flatten(1).sum(1)
    assert 0 < int(lost.max()) <= 31
    assert float(lost.double().mean()) > 8
    only_flips = Augment(pad=0, cutout=0)(
        image().expand(64, -1, -1, -1), index[0], index[:64], index[:64]
    )
    kinds = Counter(str(each[0].tolist()) for each in only_flips)
    assert len(kinds) == 2
    assert torch.equal(Augment(0, False, 0)(x, index[0], index, index), x)


def test_a_step_sees_the_augmented_images(tmp_path: Path) -> None:
    """The place in the epoch is that of the batch times its size, and the place in it."""
    run = make_run(FedAvg(), tmp_path, net="bn-cnn2", sizes=(20,))
    augment = Augment()
    stage = Train(ProblemLoss(), LocalTraining(1, 8, SGD(0.1), augment=augment))
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    batch = Batch(x, torch.zeros(3).long(), torch.ones(3), torch.tensor([5, 0, 9]), torch.tensor(2))
    key = torch.tensor(77)
    seen = local.augmented(stage, {"client": {local.DRAWS: key}}, batch).x
    expected = augment(x, key, torch.tensor([5, 0, 9]), torch.tensor([16, 17, 18]))
    assert torch.equal(seen, expected)
    assert not torch.equal(seen, x)
    plain = replace(stage, local=LocalTraining(1, 8, SGD(0.1)))
    assert local.augmented(plain, {}, batch) is batch
    assert run.marks(run.client(play_first_task(run), {})) == {}


def play_first_task(run: Any) -> Any:
    from fedgrove.runs.rounds import plan

    return plan(run, run.initial_state)[0]


@pytest.mark.parametrize("net", ["bn-cnn2", "resnet18"])
@pytest.mark.parametrize(
    "method", [FedAvg(), HeteroFL(widths=(1.0, 0.5))], ids=lambda m: type(m).__name__
)
def test_all_engines_augment_alike(method: Any, net: str, tmp_path: Path) -> None:
    """Two epochs in several batches: to the bit, or to rounding in stacks."""
    recipe = LocalTraining(2, 8, SGD(0.05), augment=Augment())
    states = {}
    engines = {
        "plain": Serial(), "serial": Serial(), "wired": Wired(), "pool": Pool(workers=2),
        "batched": Batched(),
    }  # fmt: skip
    for name, engine in engines.items():
        own = recipe if name != "plain" else replace(recipe, augment=None)
        run = make_run(
            replace(method, local=own), tmp_path / name, net=net, sizes=(20, 13, 9), rounds=2
        )
        states[name] = tensors(play(run, engine))
        engine.close()
    assert trees.identical(states["serial"], states["pool"])
    assert trees.identical(states["serial"], states["wired"])
    assert trees.distance(states["serial"], states["batched"]) < 1e-9
    assert trees.distance(states["serial"], states["plain"]) > 1e-3


def test_it_is_a_setting_of_local_training() -> None:
    made = with_settings(FedAvg(local=LocalTraining()), {"local.augment": "Augment"})
    assert made.local == LocalTraining(augment=Augment())
    made = with_settings(made, {"local.augment.cutout": 8})
    assert made.local == LocalTraining(augment=Augment(cutout=8))


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    recipe = LocalTraining(1, 8, augment=Augment())
    run = make_run(FedAvg(local=recipe), tmp_path)
    with pytest.raises(InputError, match=r"inputs have the shape \(12,\); it changes images"):
        check_fit(run)
    for name in ("pad", "cutout"):
        with pytest.raises(InputError, match=f"{name} is -1; it must be 0 or more pixels"):
            Augment(**{name: -1})
