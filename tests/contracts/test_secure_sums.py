"""Which methods could run under secure aggregation: tried, and compared with the table in the docs.

A server under secure aggregation learns sums over the clients of an exchange, weighted by their
examples, and not what any one of them sent. A method can do with that if its next state stays the
same (1) where random numbers that cancel in the sum are added to what clients send, and (2) where
two clients exchange what they send. Both are done here to real reports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import admitted, make_run
from tests.contract import contract_of, small

from fedgrove import methods
from fedgrove.core import Packet, Report
from fedgrove.engines import Serial
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg
from fedgrove.parts.robust import ClippedMean, GeometricMedian, Median, MultiKrum, TrimmedMean
from fedgrove.runs import privacy
from fedgrove.runs.checkpoint import state_to_json
from fedgrove.runs.privacy import Privacy
from fedgrove.runs.rounds import plan

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"
ROW = re.compile(r"^\| \[?`([a-z0-9-]+)`[^|]*\| (yes|no) \| (yes|no) \| (.+) \|$")


def rows() -> dict[str, tuple[bool, bool, str]]:
    """The table: noise at the client, secure aggregation, why."""
    found = {}
    for line in PAGE.read_text().splitlines():
        match = ROW.match(line)
        if match:
            name, noise, sums, why = match.groups()
            found[name] = (noise == "yes", sums == "yes", why)
    return found


def blinded(reports: Sequence[Report]) -> list[Report]:
    """The reports with random numbers that cancel where they are added up, weighted by examples.

    Only where all clients have a value: in a real protocol those who have none send a masked 0.
    """
    generator = torch.Generator().manual_seed(3)
    given = [dict(report.give) for report in reports]
    for name in sorted({name for report in reports for name in report.give}):
        holders = [i for i, report in enumerate(reports) if name in report.give]
        if len(holders) < 2:
            continue
        for leaf, first in reports[holders[0]].give[name].values.items():
            if not first.is_floating_point():
                continue
            kept = torch.ones_like(first, dtype=torch.bool)
            for i in holders:
                mask = reports[i].give[name].mask
                if mask is not None and leaf in mask:
                    kept &= mask[leaf]
            total = torch.zeros_like(first, dtype=torch.float64)
            for i in holders:
                blind = torch.randn(first.shape, generator=generator, dtype=torch.float64)
                if i == holders[-1]:
                    blind = -total
                total += blind
                packet = given[i][name]
                # Not in the leaf's own type: a half would round the blind.
                value = packet.values[leaf].double() + blind * kept / reports[i].examples
                given[i][name] = Packet({**packet.values, leaf: value}, packet.mask)
    return [replace(report, give=own) for report, own in zip(reports, given, strict=True)]


def exchanged(reports: Sequence[Report]) -> list[Report]:
    """Every report with what the next client sent; all have as many examples."""
    others = [*reports[1:], reports[0]]
    result = []
    for report, other in zip(reports, others, strict=True):
        result.append(replace(report, give=other.give, metrics=other.metrics))
    return result


def same(a: Any, b: Any) -> bool:
    """Whether two states agree, but for rounding and the order of dictionaries."""
    if isinstance(a, torch.Tensor):
        close = {"rtol": 1e-6, "atol": 1e-9}
        return a.shape == b.shape and torch.allclose(a.double(), b.double(), **close)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == pytest.approx(b)
    return a == b


def thawed(state: Any) -> Any:
    """A state as plain containers with its tensors in their places."""
    tensors: dict[str, torch.Tensor] = {}
    plain = state_to_json(state, tensors)

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {"tensor"}:
                return tensors[value["tensor"]]
            return {key: put(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [put(each) for each in value]
        return value

    return put(plain)


def needs_sums_only(method, folder: Path) -> bool:
    """Whether a run's states follow from sums alone, exchange by exchange."""
    # As many examples for all, so that clients can be exchanged; and two of three reports at least.
    run = make_run(method, folder, rounds=4, sizes=(16, 16, 16, 16))
    state = run.initial_state
    while state.round < run.rounds:
        reports = admitted(run, Serial(), plan(run, state))
        after = run.server.fold(state, iter(reports))
        for altered in (blinded(reports), exchanged(reports)):
            try:
                other = run.server.fold(state, iter(altered))
            except Exception:
                # What was sent cannot be read where it is blinded.
                return False
            if not same(thawed(other), thawed(after)):
                return False
        state = after
    return True


def test_the_table_has_every_method_once() -> None:
    """If this fails: python tools/generate.py"""
    assert list(rows()) == methods.names()


@pytest.mark.parametrize("name", methods.names())
def test_the_table_says_what_noise_can_protect(name: str, tmp_path: Path) -> None:
    """If this fails: python tools/generate.py"""
    run = make_run(small(name), tmp_path, privacy=Privacy(1.0, 0.0))
    if rows()[name][0]:
        privacy.check_protected(run)
        return
    with pytest.raises(InputError, match="cannot run with privacy"):
        privacy.check_protected(run)


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names())
def test_the_table_says_who_can_do_with_sums(name: str, tmp_path: Path) -> None:
    contract = contract_of(name)
    method = replace(small(name), **contract.forms_groups_with, **contract.summed_with)
    assert rows()[name][1] is needs_sums_only(method, tmp_path)


@pytest.mark.parametrize(
    "mean", [Median(), TrimmedMean(0.4), ClippedMean(), MultiKrum(0.4), GeometricMedian()]
)
def test_no_robust_mean_can_do_with_sums(mean, tmp_path: Path) -> None:
    assert not needs_sums_only(FedAvg(mean=mean), tmp_path)


def test_fedavg_can(tmp_path: Path) -> None:
    assert needs_sums_only(FedAvg(), tmp_path)
