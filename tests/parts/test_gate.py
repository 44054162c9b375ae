"""What stands before every fold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedgrove.core import Info, Packet, Report
from fedgrove.nets.layout import Layout
from fedgrove.parts.gate import Gate

LAYOUT = Layout.of(nn.Linear(3, 2), (3,))
CLIENTS = {0: Info(10), 4: Info(20)}
GOOD = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}


def said(report: Report, gate: Gate = Gate()) -> str | None:
    return gate.refuses(report, LAYOUT, CLIENTS)


def test_a_good_report_passes() -> None:
    assert said(Report(4, {"model": Packet(GOOD)}, 20)) is None
    assert said(Report(0, {}, 10)) is None


def test_an_unknown_client() -> None:
    assert (
        said(Report(1, {"model": Packet(GOOD)}, 10))
        == "client 1 is not one of the 2 clients enrolled."
    )


@pytest.mark.parametrize("claimed", [0, -20, 21, 10**12])
def test_a_client_cannot_buy_weight(claimed: int) -> None:
    assert said(Report(4, {"model": Packet(GOOD)}, claimed)) == (
        f"client 4 claims {claimed} examples but enrolled with 20."
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(2, 3, dtype=dtype)
    weight[1, 2] = value
    sentence = said(Report(4, {"model": Packet({"weight": weight, "bias": torch.zeros(2)})}, 20))
    assert sentence == (
        "client 4 sent model with values that are not finite in weight; "
        "a lower lr or a gradient clip may help."
    )


def test_values_that_are_not_finite_are_found_under_any_name_and_in_any_packet() -> None:
    packets = {
        "model": Packet(GOOD),
        "prototypes": Packet({"class0": torch.tensor([1.0, math.inf])}),
    }
    assert str(said(Report(4, packets, 20))).startswith(
        "client 4 sent prototypes with values that are not finite in"
    )


def test_finiteness_can_be_left_unchecked() -> None:
    spoilt = Report(4, {"model": Packet({"weight": torch.full((2, 3), math.nan)})}, 20)
    assert said(spoilt, Gate(finite=False)) is None


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), (1, 3), ()])
def test_a_wrong_shape_of_values(shape: tuple[int, ...]) -> None:
    assert said(Report(0, {"model": Packet({"weight": torch.ones(shape)})}, 10)) == (
        f"client 0 sent model with values of shape {shape} in weight; the network has (2, 3)."
    )


def test_a_wrong_shape_of_a_mask() -> None:
    packet = Packet(GOOD, {"weight": torch.ones(3, 2).bool()})
    assert said(Report(0, {"model": packet}, 10)) == (
        "client 0 sent model with a mask of shape (3, 2) in weight; the network has (2, 3)."
    )


def test_other_names_may_have_any_shape() -> None:
    assert said(Report(0, {"model": Packet(GOOD | {"scores.weight": torch.ones(7)})}, 10)) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integer_leaves_pass(dtype: torch.dtype) -> None:
    assert (
        said(Report(0, {"model": Packet(GOOD | {"codes": torch.ones(4, dtype=dtype)})}, 10)) is None
    )


def test_empty_leaves_pass() -> None:
    assert said(Report(0, {"model": Packet({"nothing": torch.zeros(0)})}, 10)) is None
