"""Which runs a sweep holds, and what they are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.config.experiment import Experiment
from fedgrove.config.grid import Variant, alternatives, grid, variants
from fedgrove.errors import InputError
from fedgrove.methods import Ditto, FedAvg, FedProx
from fedgrove.parts.local import SGD, LocalTraining


@dataclass(frozen=True)
class Phased(FedAvg):
    """A method with a field that is a list."""

    phases: tuple[int, ...] = (1, 2)
    level: float = 0.5


def of(*names: str, seeds: Any = (0,), texts: Any = ()) -> dict[str, Experiment]:
    return grid(names, Experiment(FedAvg(), rounds=3), seeds, texts, LocalTraining())


def test_methods_times_settings_times_seeds() -> None:
    found = of("fedprox", "ditto", seeds=(0, 3), texts=["mu=0.1,1", "batch=8,16", "epochs=2"])
    # 2 methods x 2 values of mu x 2 of batch x 2 seeds; epochs has one value, so no name needs it
    assert len(found) == 16
    assert list(found)[:3] == [
        "fedprox-mu=0.1-batch=8-s0",
        "fedprox-mu=0.1-batch=8-s3",
        "fedprox-mu=0.1-batch=16-s0",
    ]
    one = found["ditto-mu=1-batch=16-s3"]
    assert isinstance(one.method, Ditto)
    assert (one.method.pull.mu, one.seed, one.rounds) == (1.0, 3, 3)
    assert one.method.local == LocalTraining(batch=16, epochs=2)


def test_a_method_that_lacks_a_field_is_left_as_it_is_but_one_must_have_it() -> None:
    assert list(of("fedavg", "fedprox", texts=["mu=0.1,1"])) == [
        "fedavg-s0",
        "fedprox-mu=0.1-s0",
        "fedprox-mu=1-s0",
    ]
    with pytest.raises(InputError, match="there is no setting of fedavg 'mu'"):
        of("fedavg", "local", texts=["mu=0.1,1"])
    with pytest.raises(InputError, match="takes key=value"):
        of("fedavg", texts=["mu"])
    with pytest.raises(InputError, match=r"pull\.mu is 'x'; it must be a number"):
        of("fedprox", texts=["mu=0.1,x"])


def test_a_field_of_a_part_that_only_some_values_bring() -> None:
    found = of("fedavg", texts=["optimiser=SGD,Adam", "momentum=0.5,0.9"])
    assert list(found) == [
        "fedavg-optimiser=SGD-momentum=0.5-s0",
        "fedavg-optimiser=SGD-momentum=0.9-s0",
        "fedavg-optimiser=Adam-s0",
    ]
    optimiser = found["fedavg-optimiser=SGD-momentum=0.9-s0"].method.local.optimiser  # type: ignore[union-attr]
    assert isinstance(optimiser, SGD)
    assert optimiser.momentum == 0.9


def test_commas_belong_to_a_field_that_is_a_list_and_bars_separate_lists() -> None:
    assert alternatives(Phased(), "phases=0,0,50") == ["phases=0,0,50"]
    assert alternatives(Phased(), "phases=0,0,50|15,15,20") == ["phases=0,0,50", "phases=15,15,20"]
    assert alternatives(Phased(), "level=0.1, 0.2") == ["level=0.1", "level=0.2"]
    assert alternatives(Phased(), "level=0.1|0.2") == ["level=0.1", "level=0.2"]
    found = variants([Variant("phased", Phased())], ["phases=0,5|1,4"])
    assert [(v.label, v.method.phases) for v in found] == [  # type: ignore[attr-defined]
        ("phased-phases=0,5", (0, 5)),
        ("phased-phases=1,4", (1, 4)),
    ]


def test_no_run_comes_twice() -> None:
    for words, said in (
        ({"seeds": (3, 3)}, "fedprox-s3 twice"),
        ({"texts": ["mu=1,1"]}, "fedprox-mu=1-s0 twice"),
        ({"texts": ["mu=1,1.0"]}, "fedprox-mu=1 and fedprox-mu=1.0 would be the same run"),
        ({"texts": ["mu=1,2", "mu=3"]}, "fedprox-mu=1 and fedprox-mu=2 would be the same run"),
    ):
        with pytest.raises(InputError, match=said):
            of("fedprox", **words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="fedavg-s0 twice"):
        of("fedavg", "fedavg")
    for names, seeds in (((), (0,)), (("fedavg",), ())):
        with pytest.raises(InputError, match="or more"):
            of(*names, seeds=seeds)


@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=5, unique=True),
    st.sets(st.integers(0, 99), min_size=1),
)
def test_every_value_meets_every_seed_once(mus: list[float], seeds: set[int]) -> None:
    found = of("fedprox", seeds=sorted(seeds), texts=["mu=" + ",".join(map(repr, mus))])
    met = [(e.method.pull.mu, e.seed) for e in found.values() if isinstance(e.method, FedProx)]
    assert sorted(met) == sorted((mu, seed) for mu in mus for seed in seeds)
    assert all("/" not in name for name in found)
