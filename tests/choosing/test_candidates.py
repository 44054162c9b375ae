"""Who is tried, and why others are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.export.made import with_onnx

import fedgrove as fg
from fedgrove import data, methods
from fedgrove.choosing.candidates import CANDIDATES, size
from fedgrove.choosing.choose import ChoicePlan, plan_choice
from fedgrove.errors import InputError
from fedgrove.options import ChooseOptions
from fedgrove.options.definition import make_options

WORDS = {"data": "digits", "clients": 4, "cohort": 2, "finetune": (0,)}


def planned(**given: object) -> ChoicePlan:
    values = {**WORDS, "rounds": 10, "seeds": 1, **given}
    return plan_choice(make_options(ChooseOptions, values, "choose"))


def tried(
    budget: str | None = None, names: list[str] | None = None, **words: object
) -> tuple[list[str], dict[str, str]]:
    plan = planned(budget=budget, methods=names, **words)
    return [fit.method for fit in plan.chosen], dict(plan.left_out)


def profile(path: Path, memory: int) -> str:
    lines = ["client,up,down,speed,memory", f"0,5,5,10,{memory}"]
    lines += [f"{k},5,5,10,1000000000" for k in (1, 2, 3)]
    path.write_text("\n".join(lines))
    return str(path)


def test_the_list_names_methods_that_there_are() -> None:
    for candidate in CANDIDATES:
        method = methods.make(candidate.method)
        assert candidate.about
        if candidate.fitting:
            key = candidate.fitting.partition("=")[0]
            assert hasattr(method, key)


def test_without_a_budget_or_small_devices() -> None:
    names, left_out = tried()
    assert names[:4] == ["local", "fedavg", "ditto", "fedchar"]
    assert {"stc", "ca-afp", "adfedwcp", "fedlayerprune", "grove"} <= set(names)
    assert sorted(left_out) == ["fedapta", "fedbn", "heterofl"]
    assert left_out["fedbn"] == "it is made for nets with norm layers, and there are none here."


def test_a_net_with_norm_layers() -> None:
    assert "fedbn" in tried(net="bn-cnn2")[0]


def test_a_budget_leaves_out_who_cannot_keep_to_it() -> None:
    # fedavg on digits sends 8 bytes for each of 8,970 parameters, in 5 of 10 rounds: 359 kB, less
    # heads. ca-afp may be coded to half of what its paper counts.
    names, left_out = tried(budget="300kB")
    assert "fedavg" not in names
    assert "ditto" not in names
    assert left_out["fedavg"] == (
        "a client would send and receive at least 359 kB in 10 rounds; the budget is 300 kB."
    )
    assert "local" in names
    assert "stc" in names
    assert "grove" in names
    assert "fedavg" in tried(budget="400kB")[0]


def test_grove_spends_what_its_own_shares_would_not_fit_in() -> None:
    def grove(budget: str) -> object:
        plan = planned(budget=budget, methods=["grove"])
        recipe = plan.federations.recipe(plan.base)
        return plan.chosen[0].made((), recipe, plan.budget, share=0.5)

    assert grove("1MB") == methods.Grove()
    # 9 tenths of 5 kB, and half of that in half of the rounds.
    assert grove("5kB") == methods.Grove(budget="2250B")


def test_small_devices_leave_out_who_needs_the_whole_net(tmp_path: Path) -> None:
    names, left_out = tried(profile=profile(tmp_path / "devices.csv", 100_000))
    assert names == ["heterofl", "fedapta", "grove"]
    assert "1 of 4 devices have less memory" in left_out["fedavg"]


def test_who_says_that_it_fits_devices_does(tmp_path: Path) -> None:
    file = profile(tmp_path / "devices.csv", 100_000)
    for candidate in CANDIDATES:
        if candidate.fitting is None:
            continue
        result = fg.run(
            candidate.method,
            data="digits",
            clients=4,
            rounds=1,
            epochs=1,
            profile=file,
            engine="serial",
            progress=False,
        )
        own = result.summary["density_clients"]
        assert own["0"] < min(own[k] for k in "123"), candidate.method


def test_what_the_user_asked_for_is_tried_though_it_be_idle() -> None:
    assert tried(names=["fedbn", "heterofl"]) == (["fedbn", "heterofl"], {})


def test_a_method_says_itself_what_it_cannot() -> None:
    names, left_out = tried(data="rooms")
    assert "adfedwcp" not in names
    assert left_out["adfedwcp"].startswith(
        "adfedwcp measures the importance of layers by imprinting, which needs cl"
    )
    assert "fedavg" in names


def test_a_setting_that_a_refusal_advises_is_for_a_run() -> None:
    _, left_out = tried(data="rooms")
    assert left_out["adfedwcp"].endswith(
        "--set importance=gradient, magnitude or alike. A choice takes no settings: use that one "
        "in a run of adfedwcp by itself."
    )


def test_tasks() -> None:
    straight = fg.load("digits", clients=2, validation=0.2)
    turned = fg.load("digits:turned", clients=2, validation=0.2)
    both = data.mix({"straight": straight, "turned": turned})
    plan = planned(data=both, clients=None, cohort=None, rounds=4)
    assert "fedapta" in [fit.method for fit in plan.chosen]


def test_a_federation_without_validation_data_is_refused() -> None:
    with pytest.raises(InputError, match=r"load the federation with validation=0\.2, or"):
        tried(data=fg.load("digits", clients=2), clients=None, cohort=None)


def test_metrics_that_have_no_mean() -> None:
    both = data.mix({"rooms": fg.load("rooms", clients=2), "tags": fg.load("tags", clients=2)})
    with pytest.raises(InputError, match="have no mean that methods could be ranked by"):
        tried(data=both, clients=None, cohort=None)


def test_sizes() -> None:
    assert [size(n) for n in (999, 1000, 8e6, 1.25e9)] == ["999 B", "1 kB", "8 MB", "1.25 GB"]


@with_onnx
def test_a_size_leaves_out_who_removes_no_channels() -> None:
    """The file of digits' net takes about 15 kB in int8: 8,970 weights, and the graph."""
    names, left_out = tried(size="12kB", names=["fedavg", "ca-afp", "grove", "fedlps"])
    # Whether the others get smaller, only a trial shows.
    assert names == ["grove", "fedlps"]
    for name in ("fedavg", "ca-afp"):
        assert re.fullmatch(
            r"the exported file of the whole net takes 1\d\.\d kB in int8; the size is 12kB, and "
            r"it removes no channels\.",
            left_out[name],
        )
    assert tried(size="20kB", names=["fedavg"])[0] == ["fedavg"]
    with pytest.raises(InputError, match=r"size is '12'; it must be the most bytes of a file"):
        planned(size="12")
    with pytest.raises(InputError, match=r"none of the methods fits\. .* a larger size"):
        planned(size="12kB", methods=["fedavg"])
