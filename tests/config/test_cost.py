import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.contract import small

import fedgrove
from fedgrove import methods
from fedgrove.api import train
from fedgrove.config import cost as cost_module
from fedgrove.config.cost import (
    estimate_cost,
    estimate_run_cost,
    expect_bytes,
    forecast_work,
)
from fedgrove.config.experiment import Experiment, Federations
from fedgrove.config.plan import Plan, plan
from fedgrove.core import ClientInfo, Give, Outcome, Packet, Report, Task
from fedgrove.data.devices import Steps
from fedgrove.engines import Serial
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
    # What is sent does not depend on how long clients train.
    method = dataclasses.replace(method, local=LocalTraining(1, 128, SGD(0.05)))
    words = {"clients": 5, "cohort": 3, "rounds": 2, "evaluate": 0}
    return fedgrove.run(method, data="digits", engine="serial", out=folder / "run", **words).summary


@pytest.mark.parametrize(
    ("setting", "params", "mib"), [(WISDM, 124_198, 473.8), (UCI, 89_254, 340.5)]
)
def test_dense_mebibytes_are_those_of_the_ca_afp_table(
    setting: dict, params: int, mib: float
) -> None:
    # 8 bytes * 124,198 * 10 clients * 50 rounds = 496,792,000 bytes = 473.78 MiB; 8 * 89,254 * 500 / 2^20 = 340.48
    found = estimate_cost(FedAvg(), **setting)
    assert (found["params"], found["mib_paper"], found["reduction_paper"]) == (params, mib, 0.0)
    assert found["bytes_paper"] == 8 * params * 500


def test_real_bytes_are_the_parameters_and_a_small_head() -> None:
    found = estimate_cost(FedAvg(), **WISDM)
    for way in ("bytes_up", "bytes_down"):
        assert 4 * 124_198 * 500 < found[way] < 4 * 124_198 * 500 * 1.001


def test_the_paper_counts_nothing_for_local_and_the_head_for_lg_fedavg() -> None:
    assert estimate_cost(Local(), **WISDM)["reduction_paper"] == 1.0
    # the last two layers: 3200*32 + 32 + 32*6 + 6 = 102,630 of 124,198 parameters
    assert estimate_cost(LGFedAvg(), **WISDM)["reduction_paper"] == round(1 - 102_630 / 124_198, 6)


@pytest.mark.parametrize("name", methods.names())
def test_a_real_run_sends_no_more_and_hardly_less(name: str, tmp_path: Path) -> None:
    method = small(name)
    found, real = estimate_cost(method, **DIGITS), trained(method, tmp_path)
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
    found, real = estimate_cost(method, **DIGITS), trained(method, tmp_path)
    assert real["bytes_up"] <= found["bytes_up"]
    assert real["bytes_down"] <= found["bytes_down"]
    assert abs(found["bytes_up"] / estimate_cost(FedAvg(), **DIGITS)["bytes_up"] - 1) < 0.01


def test_memory_follows_batch_and_optimiser() -> None:
    """(2 + slots) d + activations * batch numbers of 4 bytes; har-cnn's activations: 64*200 + 64*100 + 32 + 6.

    From plain SGD (no slot) to Adam (two): 2 d more, d = 124,198, and the activations of 31 more examples.
    """
    small = estimate_cost(FedAvg(local=LocalTraining(batch=1, optimiser=SGD())), **WISDM)["memory"]
    large = estimate_cost(FedAvg(local=LocalTraining(batch=32, optimiser=Adam())), **WISDM)[
        "memory"
    ]
    assert large - small == 4 * (2 * 124_198 + 31 * (64 * 200 + 64 * 100 + 32 + 6))
    assert (
        estimate_cost(FedAvg(), **WISDM, recipe=LocalTraining(batch=1, optimiser=SGD()))["memory"]
        == small
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
    one, two = (estimate_cost(MeetsFirst(), **{**DIGITS, "rounds": n})["bytes_up"] for n in (1, 2))
    assert one == 2 * (two - one)
    # per client: 4 bytes of length, and a head with the number at 25 characters
    head = '{"of":4,"examples":9999999,"metrics":{"x":' + "9" * 25 + '},"packets":[]}'
    assert two - one == 3 * (4 + len(head))


def test_nobody_to_send_to_is_refused() -> None:
    with pytest.raises(InputError, match=r"^clients is 0; it must be 1 or more"):
        estimate_cost(FedAvg(), **{**DIGITS, "clients": 0})


# ---- on devices ----------------------------------------------------------------------------------


def test_time_and_bytes_of_two_devices_by_hand() -> None:
    """100 examples, 2 epochs, 3 passes.

    Client 0: .5 GMAC/s, 4 Mbit/s down, 1 up; client 1: 2 GMAC/s,
    40 both ways. The round lasts as long as client 0.
    """
    devices = [ClientInfo(100, 1.0, speed=0.5, downlink=4.0), ClientInfo(100, 40.0, speed=2.0)]
    words = {**DIGITS, "clients": 2, "cohort": 2, "rounds": 3}
    local = LocalTraining(2, 8, SGD(0.1))
    found = estimate_cost(FedAvg(local=local), **words, info=devices.__getitem__)
    macs = 3 * 100 * 2 * found["macs"]
    # All clients send and get as much in every round.
    up = found["bytes_up"] / 6
    down = found["bytes_down"] / 6
    slow = 8 * down / 4e6 + macs / 0.5e9 + 8 * up / 1e6
    fast = 8 * down / 40e6 + macs / 2e9 + 8 * up / 40e6
    device = found["per_device"]
    assert device["macs"] == {"min": macs, "median": macs, "max": macs}
    assert device["bytes_up"] == {"min": up, "median": up, "max": up}
    assert device["bytes_down"]["max"] == down
    assert device["seconds"] == pytest.approx(
        {"min": fast, "median": (fast + slow) / 2, "max": slow}, abs=1e-9
    )
    assert found["virtual_seconds"] == pytest.approx(3 * slow, abs=1e-8)


def test_a_trace_is_followed_from_round_to_round() -> None:
    """An outage of 5 s in the first round; none of the later ones meets it."""
    steps = Steps((0.0, 1e-6, 5.0), (8.0, 0.0, 8.0), (8.0, 0.0, 8.0))
    words = {**DIGITS, "clients": 1, "cohort": 1, "rounds": 3}
    info = ClientInfo(10, bandwidth=8.0)
    plain = estimate_cost(FedAvg(), **words, info=lambda k: info)["virtual_seconds"]
    traced = estimate_cost(FedAvg(), **words, info=lambda k: info, trace={0: steps})[
        "virtual_seconds"
    ]
    assert traced == pytest.approx(plain + 5.0 - 1e-6, abs=1e-8)


def planned_cost(method: Any, **words: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was estimated, and the summary of the real run."""
    experiment = Experiment(
        method, "digits", clients=5, cohort=3, rounds=2, evaluate=0, profile="phones", **words
    )
    planned = plan(experiment, Path(), Federations())
    net = planned.experiment.net
    assert net is not None
    return estimate_run_cost(planned.run, net), train(experiment, engine="serial").summary


@pytest.mark.parametrize("name", ["fedavg", "ditto", "ifca", "clusterfl", "lg-fedavg", "local"])
def test_a_real_run_takes_as_long_as_estimated(name: str) -> None:
    """Where the lengths of messages do not depend on the data; also with two Train stages."""
    found, real = planned_cost(small(name))
    assert 0.999 * found["virtual_seconds"] <= real["virtual_seconds"] <= found["virtual_seconds"]


def test_devices_of_different_widths_are_counted_as_they_are() -> None:
    """HeteroFL sends a slow phone fewer channels, and the phone computes less."""
    found, real = planned_cost(methods.HeteroFL())
    device = found["per_device"]
    for name in ("bytes_up", "bytes_down", "macs"):
        assert device[name]["min"] < 0.5 * device[name]["max"]
    assert 0.8 * found["virtual_seconds"] < real["virtual_seconds"] <= found["virtual_seconds"]
    equal = estimate_cost(methods.HeteroFL(), **DIGITS)["per_device"]
    assert equal["bytes_up"]["min"] == equal["bytes_up"]["max"]


def test_an_exchange_before_the_rounds_is_no_round_of_a_device() -> None:
    """AdFedWCP asks all 5 clients before round 1, and 3 train: figures are of those, and of rounds.

    One client of one round sends what FedWCP's does, which asks nobody, and what it was asked.
    """
    words = {**DIGITS, "rounds": 1}
    asks = estimate_cost(methods.AdFedWCP(), **words)
    plain = estimate_cost(methods.FedWCP(), **words)["per_device"]
    device = asks["per_device"]
    assert device["bytes_up"]["min"] >= plain["bytes_up"]["min"]
    assert device["bytes_up"]["max"] < 1.1 * plain["bytes_up"]["max"]
    assert device["macs"]["min"] > plain["macs"]["min"]
    # 3 devices do all that is done but for the asking of the 2 others
    assert 3 * device["bytes_up"]["median"] <= asks["bytes_up"] <= 3.2 * device["bytes_up"]["max"]


# ---- the work of each round, and what a trial shows ----------------------------------------------


def planned_digits(method: Any, **words: Any) -> Plan:
    words = {"data": "digits", "clients": 5, "cohort": 3, "rounds": 3} | words
    return plan(Experiment(method, **words), Path(), Federations())


def test_the_work_of_rounds_is_that_of_their_phases() -> None:
    planned = planned_digits(FedAvg(), finetune=(0, 2))
    assert planned.experiment.net is not None
    *rounds, tuning = forecast_work(planned.run, planned.experiment.net)
    assert len(rounds) == 3
    assert max(rounds) < 3 * min(rounds)
    examples = sum(planned.run.federation.info(client).examples for client in range(5))
    # Two epochs over all examples; a gradient counts as three forward passes.
    assert tuning == 3 * planned.run.net.layout.macs * 2 * examples
    # SAFL's first stage trains its clients for many more epochs.
    words = {"net": "bn-cnn2:width=4", "rounds": 6}
    planned = planned_digits(methods.make("safl"), **words)
    *rounds, tuning = forecast_work(planned.run, planned.experiment.net or "")
    assert rounds[0] > 5 * rounds[-1]
    assert tuning == 0


@pytest.mark.parametrize("name", ["stc", "grove", "fedpaq", "ca-afp"])
def test_a_trial_expects_the_bytes_of_coded_messages(name: str) -> None:
    for rounds, error in ((3, 0.0), (8, 0.1)):
        planned = planned_digits(methods.make(name), rounds=rounds)
        found = expect_bytes(planned, Federations(), Serial())
        result = train(planned.experiment, engine="serial")
        for direction in ("up", "down"):
            sent = result.summary[f"bytes_{direction}"]
            assert found[f"expected_{direction}"] == pytest.approx(sent, rel=error)
    assert found["trial_rounds"] == 5


def test_what_is_not_coded_or_takes_long_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    federations = Federations()
    assert expect_bytes(planned_digits(FedAvg()), federations, Serial()) == {}
    monkeypatch.setattr(cost_module, "TRIAL_WORK", 1.0)
    assert expect_bytes(planned_digits(methods.make("stc")), federations, Serial()) == {}
