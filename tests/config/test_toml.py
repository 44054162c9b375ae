import dataclasses
import tomllib
from typing import Literal, Protocol

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedgrove import methods
from fedgrove.config.experiment import Experiment
from fedgrove.config.grid import Variant, variants
from fedgrove.config.settings import (
    _accepts,
    allowed,
    assign,
    coerce,
    fitting,
    hints,
    part_types,
    settable,
    walk,
)
from fedgrove.config.toml import from_toml, read_run_table, same, to_toml
from fedgrove.data import from_arrays
from fedgrove.errors import InputError
from fedgrove.methods import Ditto, FedAvg, FedProx, LGFedAvg
from fedgrove.options.definition import is_plain, members, options_of
from fedgrove.parts import allocate, quantise
from fedgrove.parts.local import SGD, Adam, LocalTraining, Optimiser
from fedgrove.parts.objective import CrossEntropy, Objective, Proximal
from fedgrove.wire.codec import Bitmap, Codec, Dense, Entropy, Planes, Smallest, Sparse

RECIPE = LocalTraining(5, 16, Adam(1e-3))
OPTIMISERS = [cls.__name__ for cls in members(hints(LocalTraining)["optimiser"])]


# ---- TOML ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods.names())
def test_every_method_comes_back_equal(name: str) -> None:
    made = methods.find(name)()
    for method in (made, dataclasses.replace(made, local=RECIPE)):
        experiment = Experiment(
            method,
            rounds=3,
            finetune=(0, 3),
            standardise=False,
            partition="classes:2:grouped",
            validation=0.25,
        )
        assert from_toml(to_toml(experiment)) == experiment


NEED_MORE_THAN_A_NAME = {"GatedLoss", "MaskedLoss", "Responsible", "Sum"}


@pytest.mark.parametrize(
    "name", sorted(cls.__name__ for cls in part_types() if issubclass(cls, Objective))
)
def test_every_objective_that_needs_no_more_than_its_name_can_be_assigned(name: str) -> None:
    if name in NEED_MORE_THAN_A_NAME:
        with pytest.raises(
            InputError, match=f"'{name}', which needs more than a name; make it in Python"
        ):
            assign(FedAvg(), f"objective={name}")
    else:
        assert type(assign(FedAvg(), f"objective={name}").objective).__name__ == name


@given(st.floats(min_value=1e-300, allow_nan=False, allow_infinity=False), st.integers(1, 10**9))
def test_numbers_come_back_to_the_bit(lr: float, epochs: int) -> None:
    experiment = Experiment(FedAvg(local=LocalTraining(epochs, optimiser=SGD(lr))))
    assert from_toml(to_toml(experiment)) == experiment


def test_sums_and_chains_are_nested_tables() -> None:
    method = Ditto(
        objective=CrossEntropy() + Proximal(0.3),
        codec=Sparse() >> Planes() >> Entropy(0.5),
        local=RECIPE,
    )
    text = to_toml(Experiment(method))
    table = tomllib.loads(text)["method"]
    assert [t["type"] for t in table["objective"]["terms"]] == ["CrossEntropy", "Proximal"]
    assert table["codec"]["first"]["then"] == {"type": "Planes"}
    assert table["local"]["optimiser"] == {
        "type": "Adam", "lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0,
    }  # fmt: skip
    assert "clip" not in table["local"]
    assert from_toml(text).method == method


def test_the_run_words_are_there_for_people() -> None:
    words = read_run_table(to_toml(Experiment(LGFedAvg(), "motion", "mlp", rounds=7)))
    given = {"method": "lg-fedavg", "data": "motion", "net": "mlp", "rounds": 7}
    assert given.items() <= words.items()
    # The others as they are without a word; what is then open is left out.
    defaults = {name: option.default for name, option in options_of(Experiment).items()}
    closed = {name for name, default in defaults.items() if default is not None}
    assert words.keys() == closed | given.keys()
    assert (words["finetune"], words["norm_bound"], words["standardise"]) == ([0], 100.0, True)


def test_a_config_by_hand_may_name_the_method_only() -> None:
    assert from_toml('[run]\nmethod = "fedprox"\nrounds = 4') == Experiment(FedProx(), rounds=4)
    whole = from_toml('[run]\nmethod = "fedprox"\nvalidation = 0.1')
    assert whole == Experiment(FedProx(), validation=0.1)


@dataclasses.dataclass(frozen=True)
class Mine(FedAvg):
    phases: tuple[int, ...] = (0, 5)
    kind: Literal["a", "b"] = "a"
    top: float | None = 0.5


def test_a_method_of_the_users_own_is_recorded_and_must_be_given() -> None:
    text = to_toml(Experiment(Mine(top=None), rounds=2))
    table = tomllib.loads(text)["method"]
    assert table["type"].endswith(":Mine")
    assert table["phases"] == [0, 5]
    assert table["top"] == "none"  # not None by default, so leaving it out would bring 0.5 back
    with pytest.raises(
        InputError, match=r"never imported by name; .* fedgrove.resume\(path, method=...\)"
    ):
        from_toml(text)
    assert from_toml(text, method=Mine()).rounds == 2


def test_arrays_and_modules_are_marked_and_must_be_given() -> None:
    federation = from_arrays(torch.randn(40, 3).numpy(), [0, 1] * 20, name="mine", clients=2)
    net = nn.Linear(3, 2)
    text = to_toml(Experiment(FedAvg(), federation, net))
    assert read_run_table(text)["data"] == "<arrays: mine>"
    assert read_run_table(text)["net"] == "<module: Linear>"
    with pytest.raises(
        InputError, match=r"data was made in Python \(<arrays: mine>\).*resume\(path, data=...\)"
    ):
        from_toml(text, net=net)
    with pytest.raises(InputError, match=r"net was made in Python"):
        from_toml(text, data=federation)
    back = from_toml(text, data=federation, net=net)
    assert back.data is federation
    assert back.net is net


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[run", "config.toml is not TOML"),
        ("[run]\nrounds = 3", "names no method"),
        ("[rum]\nx = 1", "no table of config.toml 'rum'; did you mean 'run'"),
        (
            '[run]\nmethod = "fedavg"\nround = 3',
            r"no option of \[run\] 'round'; did you mean 'rounds'",
        ),
        ('[run]\nmethod = "fedavg"\nrounds = "ten"', "rounds is 'ten'; it must be a whole number"),
        ('[method]\ntype = "FedAvgg"', "no type for method 'FedAvgg'; did you mean 'FedAvg'"),
        ('[method]\ntype = "FedAvg"\nlr = 1', "no field of method, a FedAvg, 'lr'"),
        ('[method]\ntype = "os.system"', "no type for method 'os.system'"),
        ('[method]\ntype = "FedAvg"\ncodec = 3', "method.codec is 3; it must be one of Dense, "),
        (
            '[method]\ntype = "FedAvg"\n[method.codec]\ntype = "Adam"',
            "no type for method.codec 'Adam'",
        ),
        (
            '[method]\ntype = "FedAvg"\n[method.codec]\ntype = "Chain"',
            "method.codec cannot be created: .*'first'",
        ),
        (
            '[method]\ntype = "FedAvg"\nlocal.type = "LocalTraining"\n[method.local.optimiser]\ntype = "SGD"\nlr = -1',
            "method.local.optimiser.lr is -1.0; it must be above 0",
        ),
    ],
)
def test_what_cannot_be_rebuilt_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        from_toml(text)


# ---- --set ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mu=0.5", Ditto(pull=Proximal(0.5))),
        ("pull.mu=0.5", Ditto(pull=Proximal(0.5))),
        (" mu = 0.5 ", Ditto(pull=Proximal(0.5))),
        ("codec=Smallest", Ditto(codec=Smallest())),
        ("objective=CrossEntropy", Ditto(objective=CrossEntropy())),
        ("epochs=2", Ditto(local=LocalTraining(2, 16, Adam(1e-3)))),
        ("lr=0.01", Ditto(local=LocalTraining(5, 16, Adam(0.01)))),
        ("optimiser.lr=0.01", Ditto(local=LocalTraining(5, 16, Adam(0.01)))),
        ("optimiser=SGD", Ditto(local=LocalTraining(5, 16, SGD()))),
        ("clip=none", Ditto(local=RECIPE)),
        ("local=LocalTraining", Ditto(local=LocalTraining())),
        ("local=none", Ditto()),
    ],
)
def test_set_finds_the_field(text: str, expected: Ditto) -> None:
    assert assign(Ditto(), text, RECIPE) == expected


def test_set_reaches_into_the_terms_of_a_sum() -> None:
    method = FedAvg(objective=CrossEntropy() + Proximal(0.3))
    assert assign(method, "mu=1").objective == CrossEntropy() + Proximal(1.0)


def test_set_takes_tuples_words_and_none() -> None:
    assert assign(Mine(), "phases=0,0,50").phases == (0, 0, 50)
    assert assign(Mine(), "kind=b").kind == "b"
    assert assign(Mine(), "top=none").top is None


def test_set_leaves_the_method_it_was_given_alone() -> None:
    method = FedProx()
    assign(method, "mu=3")
    assert method == FedProx()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr=-1", r"^local.optimiser.lr is -1.0; it must be above 0.$"),
        ("mu=-1", r"^pull.mu is -1.0; it must be 0 or more.$"),
        ("epochs=ten", r"^local.epochs is 'ten'; it must be a whole number.$"),
        ("epochs=1.5", r"^local.epochs is '1.5'; it must be a whole number.$"),
        ("clip=x", r"^local.clip is 'x'; it must be a number or none.$"),
        ("lr=inf", r"^local.optimiser.lr is 'inf'; it must be a number.$"),
        (
            "optimiser=Adamm",
            rf"^local.optimiser is 'Adamm'; it must be one of {', '.join(OPTIMISERS)}.$",
        ),
        ("codec=Adam", r"^codec is 'Adam'; it must be one of Dense, "),
        ("pull=CrossEntropy", r"^pull is 'CrossEntropy'; it must be Proximal.$"),
        (
            "puul.mu=1",
            r"^there is no setting of ditto 'puul.mu'; did you mean 'pull.mu'\? There are: .*local.epochs",
        ),
        ("nosuch=1", r"^there is no setting of ditto 'nosuch'. There are: codec, "),
        ("lr", r"takes key=value"),
        ("=1", r"takes key=value"),
    ],
)
def test_set_refuses_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        assign(Ditto(), text, RECIPE)


def test_a_name_that_several_parts_have_must_be_written_in_full() -> None:
    method = Ditto(objective=CrossEntropy() + Proximal(0.3))
    with pytest.raises(
        InputError, match=r"'mu' could be any of pull.mu, objective.terms.1.mu; write one"
    ):
        assign(method, "mu=1")


def test_a_constant_of_an_optimiser_is_not_meant_by_its_name_alone() -> None:
    recipe = LocalTraining(optimiser=Adam())
    for name in ("eps", "beta1", "beta2"):
        with pytest.raises(
            InputError, match=rf"fedavg has no setting '{name}' of .* local.optimiser.{name}; if"
        ):
            assign(FedAvg(), f"{name}=0.2", recipe)
    assert assign(FedAvg(), "optimiser.eps=0.2", recipe).local == LocalTraining(
        optimiser=Adam(eps=0.2)
    )
    for name in ("lr", "weight_decay"):
        made = assign(FedAvg(), f"{name}=0.2", recipe)
        assert getattr(made.local.optimiser, name) == 0.2
    # In a sweep too, where a method without the field is left as it is.
    with pytest.raises(InputError, match="fedavg has no setting 'eps' of its own"):
        variants([Variant("fedavg", FedAvg())], ["eps=0.1,0.2"], recipe)


def test_an_own_field_that_is_out_of_range_is_named_plainly() -> None:
    with pytest.raises(InputError, match=r"^shared is 0; it must be 1 or more layers.$"):
        assign(LGFedAvg(), "shared=0")


@pytest.mark.parametrize("name", methods.names())
def test_whatever_is_settable_can_be_set_to_what_it_is(name: str) -> None:
    method = methods.find(name)(local=RECIPE)
    for path, value, said in settable(method):
        assert said
        if isinstance(value, int | float | str):
            assert assign(method, f"{path}={value}") == method


def test_settable_has_paths_values_and_words() -> None:
    rows = {path: (value, said) for path, value, said in settable(Ditto(), RECIPE)}
    assert rows["pull.mu"] == (0.1, "a number")
    assert rows["local.clip"] == (None, "a number or none")
    assert rows["local.optimiser"] == (Adam(1e-3), f"one of {', '.join(OPTIMISERS)}")


# ---- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", methods.names())
def test_no_field_takes_two_parts_of_one_name(name: str) -> None:
    """They would make a config mean either, and the table would silently hold the last."""
    for setting in walk(methods.find(name)(local=RECIPE)):
        if fits := fitting(setting.hint):
            same = [cls for cls in part_types() if cls.__name__ in fits]
            assert all(
                fits[cls.__name__] is cls or not _accepted(cls, setting.hint) for cls in same
            ), setting.path


def _accepted(cls: type, hint: object) -> bool:
    return any(_accepts(m, cls) for m in members(hint) if not is_plain(m))


def test_a_field_takes_only_parts_that_do_what_it_needs() -> None:
    class Picks(Protocol):
        def __call__(self, scores: object, density: float) -> object: ...

    class Rounds(Protocol):
        def __call__(self, tree: object, draw: object = None) -> object: ...

    assert fitting(Picks)["Uniform"] is allocate.Uniform
    assert "UniformQuantiser" not in fitting(Picks)
    assert fitting(Rounds)["UniformQuantiser"] is quantise.UniformQuantiser
    assert "Uniform" not in fitting(Rounds)


def test_protocols_take_what_has_their_methods() -> None:
    assert {"SGD", "Adam"} <= set(OPTIMISERS) == set(fitting(Optimiser))
    assert {"Dense", "Bitmap", "Smallest"} <= set(fitting(Codec))
    assert not {"Adam", "CrossEntropy", "LocalTraining", "Gate"} & set(fitting(Codec))
    assert set(fitting(int | None)) == set()


def test_text_is_tried_last_in_a_union() -> None:
    assert coerce("k", "3", str | int) == 3
    assert coerce("k", "x", str | int) == "x"
    assert allowed(tuple[float, float]) == "2 numbers separated by commas"
    assert allowed(Literal["a", "b"]) == "a or b"


def test_a_part_of_the_users_own_is_kept_by_assign() -> None:
    @dataclasses.dataclass(frozen=True)
    class Half(Dense):
        pass

    assert assign(FedAvg(codec=Half()), "epochs=2", RECIPE).codec == Half()
    assert assign(FedAvg(codec=Half()), "codec=Bitmap").codec == Bitmap()


def test_a_default_that_changed_with_the_format_is_not_the_same_run() -> None:
    """Before format 3 CA-AFP left phases out where it meant no warm-up at all."""
    now = to_toml(Experiment(methods.CAAFP()))
    lines = [line for line in now.splitlines() if line.strip()]
    start = lines.index("phases = [")
    before = "\n".join(lines[:start] + lines[start + 5 :])
    assert same(before, now)
    assert not same(before.replace("format = 2", "format = 1"), now)
