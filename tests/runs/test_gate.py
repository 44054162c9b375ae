"""What stands before every fold."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedgrove.core import (
    ClientInfo,
    ExpectedPacket,
    ExpectedReport,
    Packet,
    Report,
    Task,
    expected_as_sent,
    expected_no_packets,
)
from fedgrove.errors import InputError
from fedgrove.nets import Net
from fedgrove.runs.gate import (
    FEW_LENGTHS,
    RECENT_UPDATES,
    REFUSALS,
    Gate,
    RecentLengths,
    Refusal,
    Ruler,
    kind_of,
    measure_lengths,
)

NET = Net(nn.Linear(3, 2), (3,))
MODEL = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
TASK = Task(4, {"model": Packet(MODEL)})
HOLDS = expected_as_sent(TASK, NET)
INFO = ClientInfo(20)
SAY_SO = "a method declares what its reports contain with Give(..., expected=...)."
GOOD = Report(4, {"model": Packet(MODEL)}, 20)

MASK = {"weight": torch.tensor([[True, True, False], [True, False, False]])}
SPARSE = {"weight": MASK["weight"] * 2.0, "bias": torch.ones(2)}
MASKED_TASK = Task(4, {"model": Packet(SPARSE, MASK)})
MASKED_HOLDS = expected_as_sent(MASKED_TASK, NET)


def refusal(report: object, expected: ExpectedReport = HOLDS, task: Task = TASK) -> Refusal | None:
    found = Gate().refuses(report, task, expected, INFO)
    # Whether numbers are finite is then known from lengths: for the same reasons, in the same
    # words.
    assert Gate().refuses(report, task, expected, INFO, Ruler()) == found
    return found


def giving(values: Any, mask: Any = None, **words: Any) -> Report:
    """A report that gives a model."""
    return replace(GOOD, give={"model": Packet(values, mask)}, **words)


# ---- a golden sentence for every word ------------------------------------------------------------

NAN = MODEL | {"bias": torch.tensor([0.0, math.nan])}
RANGED = ExpectedReport(HOLDS.packets, {"group": (0, 2)})
SENTENCES: dict[str, list[tuple[object, ExpectedReport, str]]] = {
    "malformed": [
        (b"\x00", HOLDS, "client 4 answered with a bytes, which is not a report."),
        (None, HOLDS, "client 4 answered with a NoneType, which is not a report."),
        (
            replace(GOOD, memory="../../etc/passwd"),
            HOLDS,
            "client 4 names '../../etc/passwd' as its memory.",
        ),
        (
            giving(None),
            HOLDS,
            "client 4 sent a malformed report: TypeError: 'NoneType' object is not iterable.",
        ),
        (
            replace(GOOD, give=None),
            HOLDS,
            "client 4 sent a malformed report: AttributeError: "
            "'NoneType' object has no attribute 'keys'.",
        ),
    ],
    "client": [
        (replace(GOOD, of=1), HOLDS, "client 4 was given the task, but the report names client 1."),
        (
            replace(GOOD, of=-1),
            HOLDS,
            "client 4 was given the task, but the report names client -1.",
        ),
    ],
    "examples": [
        (
            replace(GOOD, examples=claimed),
            HOLDS,
            f"client 4 claims {claimed} examples but enrolled with 20.",
        )
        for claimed in (0, -20, 21, 10**12)
    ],
    "metrics": [
        (
            replace(GOOD, metrics={"loss": math.nan}),
            HOLDS,
            "client 4 sent loss = nan, which is not finite.",
        ),
        (
            replace(GOOD, metrics={"group": -math.inf}),
            RANGED,
            "client 4 sent group = -inf, which is not finite.",
        ),
        (
            replace(GOOD, metrics={"loss": -1.1e100}),
            HOLDS,
            "client 4 sent loss = -1.1e+100; it must be at most 1e+100 in size.",
        ),
        (GOOD, RANGED, "client 4 sent no group, which the answer must contain."),
        (
            replace(GOOD, metrics={"group": 3}),
            RANGED,
            "client 4 sent group = 3; it must be between 0 and 2.",
        ),
        (
            replace(GOOD, metrics={"group": -0.5}),
            RANGED,
            "client 4 sent group = -0.5; it must be between 0 and 2.",
        ),
    ],
    "packets": [
        (
            replace(GOOD, give={}),
            HOLDS,
            "client 4 sent nothing where the report of train must contain model; " + SAY_SO,
        ),
        (
            replace(GOOD, give={"update": Packet(MODEL)}),
            HOLDS,
            "client 4 sent update where the report of train must contain model; " + SAY_SO,
        ),
        (
            replace(GOOD, give={"model": Packet(MODEL), "extra": Packet({})}),
            HOLDS,
            "client 4 sent model, extra where the report of train must contain model; " + SAY_SO,
        ),
        (
            GOOD,
            ExpectedReport(),
            "client 4 sent model where the report of train must contain nothing; " + SAY_SO,
        ),
    ],
    "tensors": [
        (
            giving({"bias": torch.zeros(2)}),
            HOLDS,
            "client 4 sent model with tensors that differ from the requested ones: weight on one side only.",
        ),
        (
            giving(MODEL | {"scores": torch.zeros(7)}),
            HOLDS,
            "client 4 sent model with tensors that differ from the requested ones: scores on one side only.",
        ),
        (
            giving(dict(reversed(MODEL.items()))),
            HOLDS,
            "client 4 sent model with tensors that differ from the requested ones: another order.",
        ),
        (
            giving(MODEL | {"bias": torch.zeros(2, dtype=torch.complex64)}),
            HOLDS,
            "client 4 sent model with torch.complex64 of shape (2,) in bias; "
            "it must be torch.float32 of shape (2,).",
        ),
        # All shapes come before any value.
        (
            giving({"weight": torch.full((2, 3), math.nan), "bias": torch.zeros(3)}),
            HOLDS,
            "client 4 sent model with torch.float32 of shape (3,) in bias; "
            "it must be torch.float32 of shape (2,).",
        ),
    ],
    "mask": [
        (
            giving(MODEL, {"weight": torch.ones(2, 3).bool()}),
            HOLDS,
            "client 4 sent model with a mask where it must have none.",
        ),
        (
            giving(SPARSE),
            MASKED_HOLDS,
            "client 4 sent model with no mask where it must have one.",
        ),
        (
            giving(SPARSE, {"weight": ~MASK["weight"]}),
            MASKED_HOLDS,
            "client 4 sent model with a mask that differs from the one it was sent.",
        ),
        (
            giving(SPARSE, MASK | {"bias": torch.ones(2).bool()}),
            MASKED_HOLDS,
            "client 4 sent model with a mask that differs from the one it was sent.",
        ),
        (
            giving(MODEL, MASK),
            MASKED_HOLDS,
            "client 4 sent model with values outside its mask in weight.",
        ),
    ],
    "not finite": [
        (
            giving(NAN),
            HOLDS,
            "client 4 sent model with values that are not finite in bias; "
            "a lower lr or a gradient clip may help.",
        ),
    ],
}
CASES = [(word, *case) for word, cases in SENTENCES.items() for case in cases]


@pytest.mark.parametrize(("word", "report", "expected", "sentence"), CASES)
def test_the_sentence_of_a_refusal(
    word: str, report: object, expected: ExpectedReport, sentence: str
) -> None:
    assert refusal(report, expected) == (word, sentence)


def test_every_word_has_a_sentence_above_or_needs_other_reports_to_be_said() -> None:
    """Two depend on other answers: here, and in tests/runs/test_admission.py.

    Whether a memory is there depends on the run: tests/faults/test_faults.py.
    """
    assert set(REFUSALS) - set(SENTENCES) == {"duplicate", "memory", "too long"}
    assert set(SENTENCES) <= set(REFUSALS)


# ---- what passes ---------------------------------------------------------------------------------


def test_a_good_report_passes() -> None:
    assert refusal(GOOD) is None
    assert refusal(giving({k: v - 7 for k, v in MODEL.items()})) is None
    assert refusal(replace(GOOD, give={}), expected_no_packets(TASK, NET)) is None
    assert refusal(replace(GOOD, metrics={"loss": 0.5, "own": -3})) is None
    assert refusal(replace(GOOD, memory="client-00004.000000.train:evidence.safetensors")) is None
    for group in (0, 1, 2, 2.0):
        assert refusal(replace(GOOD, metrics={"group": group}), RANGED) is None


def test_a_report_under_its_mask_passes_also_as_a_copy() -> None:
    copied = {"weight": MASK["weight"].clone()}
    for mask in (MASK, copied):
        moved = {"weight": mask["weight"] * -3.0, "bias": torch.zeros(2)}
        assert refusal(giving(moved, mask), MASKED_HOLDS) is None
    # A product may leave -0.0 there, which is 0.
    negative = {"weight": -SPARSE["weight"], "bias": torch.zeros(2)}
    assert refusal(giving(negative, MASK), MASKED_HOLDS) is None


def test_a_mask_of_the_clients_own() -> None:
    own = ExpectedReport({"model": ExpectedPacket.of(MODEL, "own")})
    assert refusal(GOOD, own) is None
    assert refusal(giving(SPARSE, MASK), own) is None
    other = {"weight": ~MASK["weight"]}
    said = {
        "values outside its mask in weight.": (SPARSE, other),
        "a mask of scale, which it does not contain.": (MODEL, {"scale": torch.ones(2).bool()}),
        "a mask of torch.bool and shape (3, 2) in weight.": (
            MODEL,
            {"weight": torch.ones(3, 2).bool()},
        ),
        "a mask of torch.float32 and shape (2, 3) in weight.": (
            MODEL,
            {"weight": torch.ones(2, 3)},
        ),
    }
    for sentence, (values, mask) in said.items():
        assert refusal(giving(values, mask), own) == (
            "mask",
            f"client 4 sent model with {sentence}",
        )


def test_a_nan_outside_the_mask_is_found() -> None:
    values = {**SPARSE, "weight": torch.where(MASK["weight"], SPARSE["weight"], math.nan)}
    assert refusal(giving(values, MASK), MASKED_HOLDS) == (
        "mask",
        "client 4 sent model with values outside its mask in weight.",
    )


# ---- packets of any kind -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values_that_are_not_finite_in_any_type(value: float, dtype: torch.dtype) -> None:
    weight = torch.ones(2, 3, dtype=dtype)
    expected = ExpectedReport({"model": ExpectedPacket.of({"weight": weight})})
    assert refusal(giving({"weight": weight}), expected) is None
    spoilt = weight.clone()
    spoilt[1, 2] = value
    found = refusal(giving({"weight": spoilt}), expected)
    assert found is not None
    assert found.reason == "not finite"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_numbers_whose_sum_is_too_large_are_finite(dtype: torch.dtype) -> None:
    weight = torch.full((2, 3), torch.finfo(dtype).max, dtype=dtype)
    expected = ExpectedReport({"model": ExpectedPacket.of({"weight": weight})})
    assert not math.isfinite(float(weight.sum()))
    assert refusal(giving({"weight": weight}), expected) is None


def test_values_that_are_not_finite_are_found_under_any_name_and_in_any_packet() -> None:
    prototypes = {"class0": torch.tensor([1.0, math.inf])}
    expected = ExpectedReport({**HOLDS.packets, "prototypes": ExpectedPacket.of(prototypes)})
    report = replace(GOOD, give={"model": Packet(MODEL), "prototypes": Packet(prototypes)})
    assert refusal(report, expected) == (
        "not finite",
        "client 4 sent prototypes with values that are not finite in class0; "
        "a lower lr or a gradient clip may help.",
    )


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 3, 1), (1, 3), ()])
def test_a_wrong_shape_of_values(shape: tuple[int, ...]) -> None:
    assert refusal(giving(MODEL | {"weight": torch.ones(shape)})) == (
        "tensors",
        f"client 4 sent model with torch.float32 of shape {shape} in weight; "
        "it must be torch.float32 of shape (2, 3).",
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_integer_leaves_pass_where_they_were_asked_for(dtype: torch.dtype) -> None:
    codes = {"codes": torch.ones(4, dtype=dtype)}
    assert refusal(giving(codes), ExpectedReport({"model": ExpectedPacket.of(codes)})) is None
    found = refusal(
        giving(codes), ExpectedReport({"model": ExpectedPacket.of({"codes": torch.ones(4)})})
    )
    assert found is not None
    assert found.reason == "tensors"


def test_empty_leaves_pass() -> None:
    nothing = {"nothing": torch.zeros(0)}
    assert refusal(giving(nothing), ExpectedReport({"model": ExpectedPacket.of(nothing)})) is None


class Odd:
    """Whatever is looked up in it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("keep out")


ODD = st.sampled_from([None, 0, -1, 1.5, "x", b"x", (), [], {}, {"model": None}, Odd()])


@given(
    field=st.sampled_from(["of", "give", "examples", "metrics", "memory"]),
    value=ODD | st.dictionaries(st.sampled_from(["model", "loss"]), ODD),
)
def test_no_report_whatever_it_holds_gets_an_error_out_of_the_gate(field: str, value: Any) -> None:
    found = refusal(replace(GOOD, **{field: value}))
    if found is not None:
        assert found.reason in REFUSALS
        assert "client 4" in found.sentence
    else:
        # No numbers, or no memory, or a name of one; {"loss": 0} is a number.
        assert field in ("metrics", "memory")


# ---- how long updates are ------------------------------------------------------------------------


def tree(**leaves: Sequence[float]) -> dict[str, Tensor]:
    return {name: torch.tensor(leaf) for name, leaf in leaves.items()}


def test_the_length_of_a_change_by_hand() -> None:
    # The change is (5, 0) and (12): 13 long. The model is (0, 3) and (4): 5 long.
    task = Task(0, {"model": Packet(tree(w=[0.0, 3.0], b=[4.0]))})
    report = Report(0, {"model": Packet(tree(w=[5.0, 3.0], b=[16.0]))})
    assert measure_lengths(report, task) == {"model": (13.0, 5.0)}


def test_the_length_of_what_is_new_by_hand() -> None:
    # Of the update (3, 4), beside all that was sent: (2, 0) and (1), (2), which is 3 long.
    task = Task(
        0, {"model": Packet(tree(w=[2.0, 0.0], b=[1.0])), "reference": Packet(tree(w=[2.0]))}
    )
    report = Report(0, {"update": Packet(tree(w=[3.0, 4.0]))})
    assert measure_lengths(report, task) == {"update": (5.0, 3.0)}
    assert measure_lengths(report, Task(0)) == {"update": (5.0, 0.0)}


def test_a_tensor_that_was_not_sent_or_has_another_shape_counts_whole() -> None:
    # w changes by 3; b, two numbers where one was sent, counts as it is, (4, 0), and so does c, 12.
    task = Task(0, {"model": Packet(tree(w=[2.0], b=[0.0], left=[100.0]))})
    report = Report(0, {"model": Packet(tree(w=[5.0], b=[4.0, 0.0], c=[12.0]))})
    assert measure_lengths(report, task) == {"model": (13.0, 2.0)}


def test_integers_have_no_length() -> None:
    signs = {"signs": torch.tensor([-1, 1, 1], dtype=torch.int8)}
    report = Report(0, {"evidence": Packet(signs), "empty": Packet({})})
    assert measure_lengths(report, Task(0)) == {}
    mixed = Report(0, {"evidence": Packet(signs | tree(grow=[3.0, 4.0]))})
    assert measure_lengths(mixed, Task(0)) == {"evidence": (5.0, 0.0)}


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, 65504.0), (torch.bfloat16, 1e30), (torch.float32, 1e30)],
)
def test_lengths_whose_squares_are_too_large_for_their_type(
    dtype: torch.dtype, value: float
) -> None:
    # 0.6² + 0.8² = 1.
    leaf = torch.tensor([0.6 * value, 0.8 * value], dtype=dtype)
    ((length, model_length),) = measure_lengths(
        Report(0, {"update": Packet({"w": leaf})}), Task(0)
    ).values()
    assert length == pytest.approx(value, rel=5e-3)
    assert model_length == 0


def test_a_length_that_no_number_holds_is_refused_like_any_other() -> None:
    leaf = torch.tensor([1e300, 1e300], dtype=torch.float64)
    before = torch.zeros(2, dtype=torch.float64)
    task = Task(0, {"model": Packet({"w": before})})
    lengths = measure_lengths(Report(0, {"model": Packet({"w": leaf})}), task)
    assert lengths == {"model": (math.inf, 0.0)}
    found = Gate().refuses_lengths(task, lengths, {"train/model": 1.0})
    assert found is not None
    assert found.reason == "too long"


def test_a_length_of_many_parts() -> None:
    # 9 * 2**20 ones: 3 * 2**10 long; from 2 to 1 they change by that too.
    task = Task(0, {"model": Packet({"w": torch.full((9, 1 << 20), 2.0)})})
    report = Report(0, {"model": Packet({"w": torch.ones(9, 1 << 20)})})
    assert measure_lengths(report, task) == {"model": (3072.0, 6144.0)}


def test_a_ruler_measures_what_was_sent_once() -> None:
    sent = Packet(tree(w=[3.0, 4.0]))
    ruler = Ruler()
    for client in range(3):
        report = Report(client, {"model": Packet(tree(w=[3.0, 4.0 + client]))})
        ruler.start_report()
        expected = {"model": (float(client), 5.0)}
        assert measure_lengths(report, Task(client, {"model": sent}), ruler) == expected
    # It was not looked at again: what is written behind its back is not seen.
    sent.values["w"].zero_()
    assert ruler.length(sent, ("w",)) == 5.0
    assert ruler.length(Packet(tree(w=[0.0])), ("w",)) == 0.0


def test_a_ruler_lets_reports_go() -> None:
    ruler = Ruler()
    packet = Packet(tree(w=[1.0]))
    held = weakref.ref(packet)
    ruler.changes(packet, None)
    del packet
    ruler.start_report()
    assert held() is None


def test_a_kind_is_a_packet_of_a_verb_whatever_its_qualifier() -> None:
    assert kind_of(Task(0, verb="train:evidence"), "model") == "train/model"
    assert kind_of(Task(0, verb="cluster"), "update") == "cluster/update"


# ---- what is usual -------------------------------------------------------------------------------


def now(
    *lengths: float, model: float = 0.0
) -> list[tuple[Task, Mapping[str, tuple[float, float]]]]:
    return [(TASK, {"model": (length, model)}) for length in lengths]


@pytest.mark.parametrize(
    ("before", "came", "usual"),
    [
        # One alone is compared with the model, or with itself.
        ([], now(1e30, model=7.0), 7.0),
        ([], now(5.0), 5.0),
        # Of two, the shorter.
        ([], now(1e30, 2.0), 2.0),
        ([4.0], now(9.0), 4.0),
        ([], now(1e30, 2.0, 3.0), 3.0),
        # Of an even number, the lower one in the middle.
        ([1.0, 2.0], now(3.0, 1e30), 2.0),
        ([8.0] * (FEW_LENGTHS - 1), now(1.0, 1.0), 8.0),
        # Enough are known: those that came now do not count.
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0], now(1e30, 1e30), 5.0),
        ([2.0] * RECENT_UPDATES, now(1.0), 2.0),
    ],
)
def test_what_is_usual_by_hand(
    before: list[float], came: list[tuple[Task, Any]], usual: float
) -> None:
    recent = RecentLengths({"train/model": before})
    assert recent.usual(came) == {"train/model": usual}
    # Asking changes nothing.
    assert recent.by_kind == {"train/model": before}


def test_kinds_do_not_mix() -> None:
    recent = RecentLengths({"train/model": [1.0] * FEW_LENGTHS})
    update = (Task(4, verb="cluster"), {"update": (50.0, 0.0)})
    assert recent.usual([*now(9.0), update]) == {"train/model": 1.0, "cluster/update": 50.0}


def test_a_kind_is_known_once_there_are_enough() -> None:
    recent = RecentLengths()
    lengths = {"model": (2.0, 1.0)}
    for count in range(FEW_LENGTHS):
        assert not recent.knows(TASK, lengths)
        recent.add(TASK, lengths)
        assert recent.by_kind == {"train/model": [2.0] * (count + 1)}
    assert recent.knows(TASK, lengths)
    assert recent.knows(replace(TASK, verb="train:evidence"), lengths)
    assert not recent.knows(TASK, lengths | {"evidence": (1.0, 0.0)})
    assert not recent.knows(Task(4, verb="cluster"), lengths)
    # A report without packets has nothing to wait for.
    assert RecentLengths().knows(TASK, {})


def test_only_recent_lengths_are_remembered() -> None:
    recent = RecentLengths()
    for length in range(RECENT_UPDATES + 3):
        recent.add(TASK, {"model": (float(length), 0.0)})
    assert recent.by_kind["train/model"] == [float(k) for k in range(3, RECENT_UPDATES + 3)]


def test_recent_lengths_are_a_copy() -> None:
    given_lengths = {"train/model": [1.0]}
    RecentLengths(given_lengths).add(TASK, {"model": (2.0, 0.0)})
    assert given_lengths == {"train/model": [1.0]}


# ---- too long ------------------------------------------------------------------------------------


def too_long(length: float, model: float, usual: float, gate: Gate = Gate()) -> Refusal | None:
    return gate.refuses_lengths(TASK, {"model": (length, model)}, {"train/model": usual})


def test_an_update_that_is_too_long_by_hand() -> None:
    assert too_long(2000.5, 7.0, 20.0) == (
        "too long",
        "client 4 sent model with a change of length 2e+03; recent ones allow 2e+03, 100 times "
        "their median. norm_bound changes the factor.",
    )
    assert too_long(2000.0, 7.0, 20.0) is None
    found = too_long(2000.0, 7.0, 20.0, Gate(norm=50))
    assert found is not None
    assert "recent ones allow 1e+03, 50 times their median." in found.sentence


def test_an_update_200_times_the_median_but_shorter_than_the_model_passes() -> None:
    assert too_long(2.0, 2.0, 0.01) is None
    assert too_long(2.0, 1.9, 0.01) is not None
    # At rest, all updates may be 0.
    assert too_long(1.0, 3.0, 0.0) is None
    assert too_long(0.0, 0.0, 0.0) is None


def test_the_bound_is_off() -> None:
    report = giving({k: torch.full_like(v, 1e30) for k, v in MODEL.items()})
    assert set(Gate().lengths(report, TASK)) == {"model"}
    assert Gate(norm=0).lengths(report, TASK) == {}


@pytest.mark.parametrize("norm", [-1.0, 0.5, math.nan])
def test_an_impossible_bound_is_refused(norm: float) -> None:
    with pytest.raises(InputError, match=r"^norm is .*; it must be 0 \(off\) or 1 and more\.$"):
        Gate(norm=norm)
