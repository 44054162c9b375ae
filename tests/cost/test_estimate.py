import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import small

import fedgrove
from fedgrove import methods
from fedgrove.core import Give, Outcome, Packet, Report, Task
from fedgrove.cost.estimate import cost
from fedgrove.errors import InputError
from fedgrove.methods import FedAvg, LGFedAvg, Local
from fedgrove.parts.local import SGD, Adam, LocalTraining
from fedgrove.wire.codec import Dense, Smallest

WISDM = {
    "net": "har-cnn",
    "shape": (3, 200),
    "classes": 6,
    "clients": 36,
    "cohort": 10,
    "rounds": 50,
}
UCI = {"net": "har-cnn", "shape": (9, 128), "classes": 6, "clients": 30, "cohort": 10, "rounds": 50}
DIGITS = {"net": "mlp", "shape": (1, 8, 8), "classes": 10, "clients": 5, "cohort": 3, "rounds": 2}


def trained(method: Any, folder: Path) -> dict[str, Any]:
    words = {"clients": 5, "cohort": 3, "rounds": 2, "evaluate": 0}
    return fedgrove.run(method, data="digits", engine="serial", out=folder / "run", **words).summary


@pytest.mark.parametrize(
    ("setting", "params", "mib"), [(WISDM, 124_198, 473.8), (UCI, 89_254, 340.5)]
)
def test_dense_mebibytes_are_those_of_the_ca_afp_table(
    setting: dict, params: int, mib: float
) -> None:
    # 8 bytes * 124,198 * 10 clients * 50 rounds = 496,792,000 bytes = 473.78 MiB; 8 * 89,254 * 500 / 2^20 = 340.48
    found = cost(FedAvg(), **setting)
    assert (found["params"], found["mib_paper"], found["reduction_paper"]) == (params, mib, 0.0)
    assert found["bytes_paper"] == 8 * params * 500


def test_real_bytes_are_the_parameters_and_a_small_head() -> None:
    found = cost(FedAvg(), **WISDM)
    for way in ("bytes_up", "bytes_down"):
        assert 4 * 124_198 * 500 < found[way] < 4 * 124_198 * 500 * 1.001


def test_the_paper_counts_nothing_for_local_and_the_head_for_lg_fedavg() -> None:
    assert cost(Local(), **WISDM)["reduction_paper"] == 1.0
    # the last two layers: 3200*32 + 32 + 32*6 + 6 = 102,630 of 124,198 parameters
    assert cost(LGFedAvg(), **WISDM)["reduction_paper"] == round(1 - 102_630 / 124_198, 6)


@pytest.mark.parametrize("name", methods.names())
def test_a_real_run_sends_no_more_and_hardly_less(name: str, tmp_path: Path) -> None:
    method = small(name)
    found, real = cost(method, **DIGITS), trained(method, tmp_path)
    for way in ("bytes_up", "bytes_down"):
        assert real[way] <= found[way]
        # Where only heads of sixty bytes travel, a digit more or less is much; other codecs are merely bounded.
        if name != "local" and isinstance(method.codec, Dense):
            assert real[way] >= 0.99 * found[way]
    assert real["bytes_paper"] == found["bytes_paper"]
    assert real["params"] == found["params"]
    assert real["macs"] == found["macs"]


def test_an_adaptive_codec_is_bounded_by_the_static_one(tmp_path: Path) -> None:
    method = FedAvg(codec=Smallest())
    found, real = cost(method, **DIGITS), trained(method, tmp_path)
    assert real["bytes_up"] <= found["bytes_up"]
    assert real["bytes_down"] <= found["bytes_down"]
    assert abs(found["bytes_up"] / cost(FedAvg(), **DIGITS)["bytes_up"] - 1) < 0.01


def test_memory_follows_batch_and_optimiser() -> None:
    """(2 + slots) d + activations * batch numbers of 4 bytes; har-cnn's activations: 64*200 + 64*100 + 32 + 6.

    From plain SGD (no slot) to Adam (two): 2 d more, d = 124,198, and the activations of 31 more examples.
    """
    small = cost(FedAvg(local=LocalTraining(batch=1, optimiser=SGD())), **WISDM)["memory"]
    large = cost(FedAvg(local=LocalTraining(batch=32, optimiser=Adam())), **WISDM)["memory"]
    assert large - small == 4 * (2 * 124_198 + 31 * (64 * 200 + 64 * 100 + 32 + 6))
    assert (
        cost(FedAvg(), **WISDM, recipe=LocalTraining(batch=1, optimiser=SGD()))["memory"] == small
    )


@dataclasses.dataclass(frozen=True)
class State:
    round: int
    met: bool


@dataclasses.dataclass(frozen=True)
class MeetsFirst(FedAvg):
    """Asks everybody for one number before round 0, in an exchange that is not a round, and says a number each time."""

    def init(self, start):  # type: ignore[no-untyped-def]
        return State(0, False)

    def deliver(self, state, client) -> Mapping[str, Packet]:  # type: ignore[no-untyped-def]
        return {}

    def plan(self, state, cohort) -> list[Task]:  # type: ignore[no-untyped-def]
        return [Task(k) for k in cohort]

    def fold(self, state, reports):  # type: ignore[no-untyped-def]
        assert all(isinstance(r, Report) for r in reports)
        return State(state.round + state.met, True)

    def work(self, verb):  # type: ignore[no-untyped-def]
        return (Give(lambda carry, client: Outcome(metrics={"x": 0.5})),)


def test_an_exchange_that_is_not_a_round_counts_once() -> None:
    one, two = (cost(MeetsFirst(), **{**DIGITS, "rounds": n})["bytes_up"] for n in (1, 2))
    assert one == 2 * (two - one)
    # per client: 4 bytes of length, and a head with the number at 25 characters
    head = '{"of":4,"examples":9999999,"metrics":{"x":' + "9" * 25 + '},"packets":[]}'
    assert two - one == 3 * (4 + len(head))


def test_nobody_to_send_to_is_refused() -> None:
    with pytest.raises(InputError, match=r"^clients is 0; it must be 1 or more"):
        cost(FedAvg(), **{**DIGITS, "clients": 0})
