"""States as JSON; and a tree that stays is written once, one that changed again."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.test_folder import Killed, kill_after, manifest, started
from tests.runs.test_memory import every_type
from torch import Tensor

from fedgrove import methods, trees
from fedgrove.engines import Serial
from fedgrove.errors import EngineError, InputError, MethodError
from fedgrove.parts.one_model import OneModel
from fedgrove.runs.checkpoint import LEAST, TreeFiles, mark_tensor, state_from_json, state_to_json
from fedgrove.runs.folder import RunFolder
from fedgrove.runs.lockstep import Member, train_alone
from fedgrove.runs.memory import Memory, read_named_tree
from fedgrove.wire.known_state import KnownState

# ---- states as JSON -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Inner:
    scores: trees.Tree = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True)
class State:
    round: int
    groups: Any = None
    inner: Inner = Inner()


def there_and_back(value: Any, like: Any = None) -> Any:
    tensors: trees.Tree = {}
    return state_from_json(json.loads(json.dumps(state_to_json(value, tensors))), tensors, like)


def test_a_state_comes_back() -> None:
    models = {0: {"w": torch.ones(2, 2)}, 7: every_type()}
    groups = {
        "of": {3: 0, 4: 7},
        "models": models,
        "trace": (1, (2.5, None), ["x", True, [], ()]),
        "none": {},
    }
    state = State(4, groups, Inner({"w": torch.tensor(0.5)}, 2))
    back = there_and_back(state, State(0))
    assert isinstance(back, State)
    assert isinstance(back.inner, Inner)
    assert (back.round, back.inner.step) == (4, 2)
    assert back.groups["of"] == {3: 0, 4: 7}
    assert all(type(k) is int for k in back.groups["of"])
    assert back.groups["trace"] == groups["trace"]
    assert type(back.groups["trace"][2]) is list
    assert list(back.groups["models"]) == [0, 7]
    for k, model in models.items():
        assert trees.identical(back.groups["models"][k], model)
        assert [v.dtype for v in back.groups["models"][k].values()] == [
            v.dtype for v in model.values()
        ]
    assert trees.identical(back.inner.scores, state.inner.scores)


@pytest.mark.parametrize(
    "change", [lambda b: b.pop("groups"), lambda b: b.update(most=3)], ids=["fewer", "more"]
)
def test_a_state_of_another_version_is_refused(change: Any) -> None:
    frozen = state_to_json(State(4), {})
    change(frozen["fields"])
    with pytest.raises(
        InputError,
        match=r"a different version .* differ in (groups|most); resume it with the version",
    ):
        state_from_json(frozen, {}, State(0))


def test_an_optional_field_may_be_missing() -> None:
    """As in the checkpoints of a version that did not have it yet."""
    frozen = state_to_json(OneModel(4, {}), {})
    del frozen["fields"]["server"]
    assert state_from_json(frozen, {}, OneModel(0, {})) == OneModel(4, {})
    del frozen["fields"]["model"]
    with pytest.raises(InputError, match="the states differ in model;"):
        state_from_json(frozen, {}, OneModel(0, {}))


def test_a_part_of_another_type_is_refused() -> None:
    frozen = state_to_json(State(4), {})
    frozen["fields"]["inner"] = "x"
    with pytest.raises(ValueError, match="inner of the state has a different type"):
        state_from_json(frozen, {}, State(0))


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


@given(STATES)
def test_any_plain_state_comes_back_with_its_types(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert repr(back) == repr(value)  # tells 1 from True and 1.0, a tuple from a list


@pytest.mark.parametrize("bad", [object(), {1, 2}, b"bytes", lambda: 0, 1j])
def test_other_objects_are_refused_wherever_they_lie(bad: object) -> None:
    for state in (bad, State(0, {"deep": [bad]}), State(0, (1, bad))):
        with pytest.raises(
            MethodError,
            match=f"contains a {type(bad).__name__}; it may contain numbers, strings, tensors",
        ):
            state_to_json(state, {})


Point = namedtuple("Point", "x y")


def test_a_named_tuple_does_not_come_back_as_something_else() -> None:
    try:
        back = there_and_back(Point(1, 2))
    except MethodError:
        return
    assert isinstance(back, tuple)


def test_a_dataclass_inside_a_container_comes_back_or_is_refused_when_written() -> None:
    state = State(1, {0: Inner(step=3)})
    try:
        frozen = state_to_json(state, {})
    except MethodError:
        return
    assert state_from_json(frozen, {}, State(0)) == state


# ---- trees with their own files ------------------------------------------------------------------


def large(value: float) -> dict[str, Tensor]:
    return {"w": torch.full((LEAST // 4,), value), "b": torch.full((2,), value)}


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def file_of(files: TreeFiles, tree: Any, folder: Path) -> str | None:
    """The file of the only tree of a checkpoint."""
    files.start()
    stand_in = files.stand_in(tree)
    files.write(folder)
    name = None if stand_in is None else stand_in["file"]
    assert files.names == ([] if name is None else [name])
    return name


def test_a_tree_that_stays_is_written_once(tmp_path: Path) -> None:
    files = TreeFiles()
    tree = large(1.0)
    name = file_of(files, tree, tmp_path)
    assert name is not None
    assert written(tmp_path) == {name}
    (tmp_path / name).unlink()
    # The very tensors, in another mapping: it is not even looked at.
    assert file_of(files, dict(tree), tmp_path) == name
    assert written(tmp_path) == set()


def test_what_was_written_to_is_written_anew(tmp_path: Path) -> None:
    files = TreeFiles()
    tree = large(1.0)
    first = file_of(files, tree, tmp_path)
    tree["b"][0] = 7.0
    second = file_of(files, tree, tmp_path)
    assert first != second
    assert second is not None
    assert read_named_tree(tmp_path, second)["b"].tolist() == [7.0, 1.0]


def test_what_the_last_checkpoint_did_not_hold_is_written_anew(tmp_path: Path) -> None:
    files = TreeFiles()
    tree = large(1.0)
    name = file_of(files, tree, tmp_path)
    assert name is not None
    assert file_of(files, {}, tmp_path) is None
    # Deleted, since no manifest names it.
    (tmp_path / name).unlink()
    assert file_of(files, tree, tmp_path) == name
    assert written(tmp_path) == {name}


@pytest.mark.parametrize("way", ["numpy", "fused"])
def test_what_torch_does_not_count_is_noticed(way: str, tmp_path: Path) -> None:
    files = TreeFiles()
    tree = large(1.0)
    first = file_of(files, tree, tmp_path)
    if way == "numpy":
        tree["w"].numpy()[0] = 5.0
    else:
        zeros = [torch.zeros_like(tree["w"]) for _ in range(2)]
        torch._fused_adam_(
            [tree["w"]],
            [torch.ones_like(tree["w"])],
            zeros[:1],
            zeros[1:],
            [],
            [torch.tensor(1.0)],
            lr=0.1,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
    second = file_of(files, tree, tmp_path)
    assert second is not None
    assert second != first
    assert read_named_tree(tmp_path, second)["w"].tolist() == tree["w"].tolist()


def test_a_file_that_a_manifest_names_is_not_written_again(tmp_path: Path) -> None:
    """Not even by equal tensors: until the disk has it, the file of two checkpoints is in danger."""
    files = TreeFiles()
    name = file_of(files, large(1.0), tmp_path)
    assert name is not None
    before = (tmp_path / name).stat().st_ino
    files.forget()
    files.there = {name}
    assert file_of(files, large(1.0), tmp_path) == name
    assert (tmp_path / name).stat().st_ino == before


@pytest.mark.parametrize("threads", [1, 4])
def test_many_trees_at_once(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its own file, also one that changed; equal ones and the very same share one."""
    monkeypatch.setattr("fedgrove.runs.checkpoint.WRITERS", threads)
    files = TreeFiles()
    state = [large(float(i)) for i in range(6)]
    state += [large(5.0), dict(state[0])]

    def names() -> list[str]:
        files.start()
        stand_ins = [files.stand_in(tree) for tree in state]
        files.write(tmp_path)
        return [stand_in["file"] for stand_in in stand_ins if stand_in is not None]

    first = names()
    assert len(set(first)) == 6
    assert (first[6], first[7]) == (first[5], first[0])
    for name, tree in zip(first, state, strict=True):
        assert read_named_tree(tmp_path, name)["w"].tolist() == tree["w"].tolist()
    state[1]["w"].numpy()[0] = 7.0
    state[2:4] = [large(8.0), large(9.0)]
    second = names()
    changed = [i for i in range(8) if first[i] != second[i]]
    assert changed == [1, 2, 3]
    assert read_named_tree(tmp_path, second[1])["w"][0] == 7.0
    assert files.names == sorted(set(second))


def test_a_disk_that_is_full_is_told_from_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgrove.runs.checkpoint.WRITERS", 2)
    files = TreeFiles()
    files.start()
    stand_ins = [files.stand_in(large(float(i))) for i in range(3)]
    with pytest.raises(EngineError, match="could not be written"):
        files.write(tmp_path / "is not there")
    assert [stand_in and stand_in["file"] for stand_in in stand_ins] == ["", "", ""]


@pytest.mark.parametrize(
    "value",
    [
        {"w": torch.ones(LEAST // 4 - 1)},
        {"w": torch.ones(LEAST), "n": 1.0},
        {1: torch.ones(LEAST)},
        {},
    ],
    ids=["small", "other", "numbers", "empty"],
)
def test_what_is_small_or_no_tree_goes_elsewhere(value: Any, tmp_path: Path) -> None:
    assert file_of(TreeFiles(), value, tmp_path) is None
    assert written(tmp_path) == set()


def test_only_a_tree_among_others_is_apart(tmp_path: Path) -> None:
    files = TreeFiles()
    files.start()
    tensors: dict[str, Tensor] = {}
    state = {"models": {0: large(0.0), 1: large(1.0)}, "vector": torch.ones(2)}
    frozen = state_to_json(state, tensors, stand_in=files.stand_in)
    files.write(tmp_path)
    assert len(tensors) == 1
    assert len(files.names) == 2
    again = state_from_json(
        json.loads(json.dumps(frozen)), tensors, read=lambda n: read_named_tree(tmp_path, n)
    )
    assert again["models"][1]["w"].tolist() == state["models"][1]["w"].tolist()
    assert list(again["models"][0]) == ["w", "b"]


def test_a_run_that_was_cut_short_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedgrove.runs.checkpoint.LEAST", 1)
    whole, run = started(tmp_path / "whole", methods.IFCA(clusters=2))
    train_alone(Member(run, whole, 1), Serial())
    folder, run = started(tmp_path / "cut", methods.IFCA(clusters=2))
    with pytest.raises(Killed):
        train_alone(Member(run, folder, 1, kill_after(3)), Serial())
    names = manifest(folder, "latest.json")["trees"]
    assert names
    again = replace(run, memory=Memory(folder.path / "checkpoint"), known_state=KnownState())
    train_alone(Member(again, RunFolder.open(folder.path), 1), Serial())
    last = manifest(folder, "latest.json")
    assert last["trees"] == manifest(whole, "latest.json")["trees"]
    on_disk = {n for n in written(folder.path / "checkpoint") if n.startswith("tree.")}
    assert on_disk == {*last["trees"], *manifest(folder, "previous.json")["trees"]}


def test_trees_that_were_one_are_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgrove.runs.checkpoint.LEAST", 1)
    folder, run = started(tmp_path / "run", methods.IFCA(clusters=2))
    state = run.method.init(run.setup)
    state = replace(state, models=dict.fromkeys(state.models, state.models[0]))
    folder.log({"round": 1})
    folder.save(run, state)
    back, _ = folder.restore(run)
    first, second = back.models.values()
    assert first is not second
    assert all(first[name] is second[name] for name in first)


@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_a_mark_changes_with_any_number(dtype: torch.dtype, offset: int, count: int) -> None:
    """Wherever a leaf begins in a vector, and however long it is."""
    leaf = torch.arange(20).to(dtype)[offset : offset + count]
    _, before = mark_tensor(leaf)
    for place in range(count):
        # By numpy, which torch does not count.
        leaf.numpy()[place] += 1
        assert mark_tensor(leaf)[1] != before
        leaf.numpy()[place] -= 1
    assert mark_tensor(leaf)[1] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mark_changes_with_signs(dtype: torch.dtype) -> None:
    """Of an even number of them too: a sum of wide words would lose what overflows."""
    leaf = torch.arange(1, 1001).to(dtype)
    _, before = mark_tensor(leaf)
    # Torch does not count this write.
    leaf.data.neg_()
    assert mark_tensor(leaf)[1] != before
