"""Nodes that are silent, late, lie or are damaged: they cost their own reports, never the run."""

from __future__ import annotations

import copy
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.deploy.test_deploy import all_data, alone, experiment, grid_of, rest
from tests.engines.loopback import Loopback

import fedgrove
from fedgrove.config.toml import to_toml
from fedgrove.deploy import client_app, enrolment, roster, serve
from fedgrove.deploy.keys import DeclaredKey, make_keys, read_declared_keys
from fedgrove.deploy.node import Node
from fedgrove.deploy.roster import Roster
from fedgrove.engines.flower import messages
from fedgrove.errors import EngineError, InputError

VALID = json.loads(json.dumps(enrolment.describe_client(all_data(), 0)))


def node_that(home: Path, change: Any) -> Any:
    """A node whose answers to questions are changed: change(question, answer) gives the answer."""
    half = Node(alone, str(home))

    def answer(question: dict[str, Any], config: Any) -> dict[str, Any]:
        # A copy: the node's own answer may be shared.
        return change(question, copy.deepcopy(half.answer_question(question, config)))

    return messages.client_app(answer, half.do_task)


def put(said: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Change one field of an answer."""
    inner = said
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return said


def served(grid: Loopback, out: Path, **words: Any) -> Any:
    """A run for clients 0, 1 and 2 that starts with two of them, and invites all."""
    shape = {"rounds": words.pop("rounds", 3), "cohort": 3, "evaluate": 0}
    wanted = experiment(words.pop("name", "fedavg"), **shape)
    given = {"clients": 3, "quorum": 2, "grace": 0.0, "wait": 5.0} | words
    return serve(grid, wanted, out=out, **given)


def with_odd(home: Path, change: Any) -> Loopback:
    """Two good nodes, and client 1 whose answers are changed."""
    grid = grid_of(home, partitions=(0, 2))
    grid.add(77, 1, node_that(home, change))
    return grid


# ---- fields of an enrolment ----------------------------------------------------------------------

WRONG = [
    (("words", "labels"), None),
    (("words", "labels"), ["a"]),
    (("words", "labels"), ["a", "b", "\ud800"]),
    (("words", "labels"), ["a", "b", "\x1b[2J"]),
    (("words", "validation"), "much"),
    (("words", "validation"), float("nan")),
    (("words", "name"), "x" * 1_000_000),
    (("words", "defaults", "lr"), 1e300),
    (("words", "defaults", "rounds"), 10**30),
    (("words", "defaults", "optimiser"), "AdaGrad"),
    (("words", "notes"), [["nested"]]),
    (("own_labels",), [10**400]),
    (("own_labels",), [0, 3]),
    (("own_labels",), ["a"]),
    (("info", "bandwidth"), 10**400),
    (("info", "bandwidth"), float("inf")),
    (("info", "bandwidth"), "5"),
    (("info", "downlink"), -1.0),
    (("info", "speed"), 1e-300),
    (("info", "memory"), -5),
    (("info", "examples"), True),
    (("info", "examples"), 10**9),
    (("kind", "shape"), [10**10, 10**10]),
    (("kind", "shape"), []),
    (("kind", "outputs"), 10**12),
    (("kind", "problem"), {"kind": "numbers"}),
    (
        ("kind", "problem"),
        {"kind": "numbers", "metric": "mae", "unit": {"mean": [0.0], "scale": [0.0]}},
    ),
    (("partition",), 10**30),
    (("partition",), [1]),
    (("extra",), 1),
]


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_each_field_of_an_enrolment_has_bounds(path: tuple[str, ...], value: Any) -> None:
    enrolment.read_enrolment(copy.deepcopy(VALID))
    with pytest.raises(InputError) as caught:
        enrolment.read_enrolment(put(copy.deepcopy(VALID), path, value))
    assert len(str(caught.value)) < 600
    assert str(caught.value).isprintable()
    if path != ("partition",):
        assert str(caught.value).startswith("client 0 cannot enrol: ")
    if path != ("extra",):
        assert path[0] in str(caught.value)


def paths(said: Any, start: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in an answer."""
    found = [start] if start else []
    pairs: list[tuple[Any, Any]] = []
    if isinstance(said, dict):
        pairs = list(said.items())
    elif isinstance(said, list):
        pairs = list(enumerate(said))
    for key, value in pairs:
        found += paths(value, (*start, key))
    return found


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, 2**31, 0, 1, -1])
    | st.floats()
    | st.text(alphabet=st.characters(), max_size=30)
    | st.sampled_from(["\ud800", "\x1b[31m", "x" * 100_000, "", "1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(paths(VALID)), anything, st.booleans())
def test_no_enrolment_does_more_than_refuse_its_node(
    path: tuple[Any, ...], value: Any, drop: bool
) -> None:
    """What is accepted makes a federation and a config; everything else is an InputError."""
    said = copy.deepcopy(VALID)
    inner: Any = said
    for key in path[:-1]:
        inner = inner[key]
    if drop:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    refusal = ""
    try:
        known = enrolment.read_enrolment(said)
    except InputError as error:
        refusal = str(error)
    if refusal:
        assert refusal.isprintable()
        assert len(refusal) < 1100
        return
    made = enrolment.make_federation({known.partition: known}, known.kind)
    json.dumps([made.labels, made.notes, made.name]).encode()
    experiment().on(made)
    assert made.info(known.partition).examples <= enrolment.MOST_EXAMPLES


@pytest.mark.parametrize(("path", "value"), WRONG[:6] + WRONG[10:12] + WRONG[13:14])
def test_a_wrong_field_refuses_its_node_and_not_the_run(
    path: tuple[str, ...], value: Any, tmp_path: Path
) -> None:
    def change(question: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        return put(said, path, value) if question["ask"] == "who" else said

    result = served(with_odd(tmp_path / "home", change), tmp_path / "run", rounds=1)
    notes = " ".join(result.summary["notes"])
    assert "client 1 cannot enrol: " in notes
    assert "the run began without clients 1" in notes
    assert result.summary["lost"] == {"unsent": 1}
    for file in ("summary.json", "metrics.jsonl"):
        (tmp_path / "run" / file).read_bytes().decode()


@pytest.mark.parametrize("how", ["silent", "nonsense", "refuses", "weights"])
def test_a_node_that_enrols_and_does_not_join_is_lost(how: str, tmp_path: Path) -> None:
    def change(question: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] != "join":
            return said
        if how == "refuses":
            return {"refused": "\x1b[2J" + "x" * 100_000, "partition": [[]]}
        return {"nonsense": [1]} if how == "nonsense" else said | {"weights": "x"}

    grid = with_odd(tmp_path / "home", change)
    if how == "silent":
        grid.fate = lambda message: "silence" if _is_join(message, 77) else ""
    begun = time.monotonic()
    result = served(grid, tmp_path / "run", rounds=2)
    assert time.monotonic() - begun < 20
    assert result.summary["lost"] == {"unsent": 2}
    [why] = [n for n in result.summary["notes"] if n.startswith("unsent: client 1 ")]
    assert why.isprintable()
    assert len(why) < 1100


def _is_join(message: Any, node: int) -> bool:
    if message.metadata.dst_node_id != node or message.metadata.message_type != "query":
        return False
    return bool(messages.read_head(message)["ask"] == "join")


def test_one_node_does_not_decide_how_all_train(tmp_path: Path) -> None:
    """Defaults and names are what most nodes report, although client 0 is the first."""
    nodes = {}
    for k in range(3):
        said = put(copy.deepcopy(VALID), ("partition",), k)
        if k == 0:
            put(said, ("words", "defaults", "lr"), 900.0)
            put(said, ("words", "labels"), ["x", "y", "z"])
        nodes[k] = enrolment.read_enrolment(said)
    made = enrolment.make_federation(nodes, nodes[1].kind)
    assert made.defaults == all_data().defaults
    assert made.labels == all_data().labels


# ---- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [10**9, 10**8, 2500])
def test_weight_cannot_be_bought(claimed: int, tmp_path: Path) -> None:
    """The clients have 20, 13 and 24 examples. The liar is named, and the others train as without it."""

    def change(question: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        return put(said, ("info", "examples"), claimed) if question["ask"] == "who" else said

    honest = grid_of(tmp_path / "a", partitions=(0, 2))
    without = served(honest, tmp_path / "without")
    result = served(with_odd(tmp_path / "b", change), tmp_path / "run")
    notes = " ".join(result.summary["notes"])
    assert "client 1 " in notes
    assert f"{claimed}" in notes
    assert result.summary["lost"] == {"unsent": 3}
    assert result.summary["accuracy_clients"] == without.summary["accuracy_clients"]


def test_the_bound_on_examples_is_an_option(tmp_path: Path) -> None:
    """Client 0 has 20 examples, 1.5 times the 13 of client 1; of two the lower one is usual."""
    grid = grid_of(tmp_path / "home", partitions=(0, 1))
    result = served(grid, tmp_path / "run", quorum=1, clients=3, rounds=1, most_examples=1.5)
    notes = " ".join(result.summary["notes"])
    assert "client 0 reports 20 examples, more than 1.5 times the median" in notes
    assert "most_examples" in notes


# ---- silence -------------------------------------------------------------------------------------


def test_a_silent_node_delays_nobody(tmp_path: Path) -> None:
    """It is registered and never answers: neither the start nor a round waits for it."""
    grid = grid_of(tmp_path / "home", partitions=(0, 2))
    grid.add(77, 1, None)
    grid.fate = lambda message: "silence" if message.metadata.dst_node_id == 77 else ""
    grid.apps[77] = lambda message, context: None
    begun = time.monotonic()
    result = served(grid, tmp_path / "run", rounds=4)
    assert time.monotonic() - begun < 20
    assert result.summary["lost"] == {"unsent": 4}
    assert "client 1 has no node" in " ".join(result.summary["notes"])


def test_all_are_waited_for_if_no_quorum_is_given(tmp_path: Path) -> None:
    grid = grid_of(tmp_path / "home", partitions=(0, 2))
    with pytest.raises(EngineError, match=r"2 of 3 clients take part within 0\.3 s"):
        served(grid, tmp_path / "run", quorum=None, wait=0.3)


def test_a_node_that_never_does_its_tasks_is_asked_less_and_less(tmp_path: Path) -> None:
    """It answers every question. Two rounds wait for it; then it pauses for a minute, and for longer."""
    grid = grid_of(tmp_path / "home")
    [odd] = [n for n, c in grid.contexts.items() if c.node_config["partition-id"] == 1]

    def fate(message: Any) -> str:
        is_task = message.metadata.message_type == "train"
        return "silence" if is_task and message.metadata.dst_node_id == odd else ""

    grid.fate = fate
    result = served(grid, tmp_path / "run", rounds=6, timeout=0.3, quorum=3)
    assert result.summary["lost"] == {"late": 2, "unsent": 4}


def test_pauses_double_and_have_an_end() -> None:
    assert [roster._grow(n) for n in (1, 2, 3, 7, 100)] == [60.0, 120.0, 240.0, 3600.0, 3600.0]


def test_a_client_that_comes_late_takes_part_from_the_next_round_on(tmp_path: Path) -> None:
    """The run knows that it has three clients; the third one enrols after the second round."""
    grid = grid_of(tmp_path / "home", partitions=(0, 2))
    app = next(iter(grid.apps.values()))

    def watch(line: Mapping[str, Any]) -> None:
        if line["round"] == 2 and 4711 not in grid.apps:
            grid.add(4711, 1, app)

    out = tmp_path / "run"
    result = served(grid, out, name="ditto", rounds=4, watch=watch)
    lost = [line.get("lost", {}) for line in rest(out)["lines"]]
    assert lost == [{"unsent": [1]}, {"unsent": [1]}, {}, {}]
    assert result.summary["scored"] == 3
    assert "refused" not in result.summary or not result.summary["refused"]


def test_a_late_client_has_bounds_too(tmp_path: Path) -> None:
    def change(question: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        return put(said, ("info", "examples"), 5000) if question["ask"] == "who" else said

    grid = grid_of(tmp_path / "home", partitions=(0, 2))

    def watch(line: Mapping[str, Any]) -> None:
        if line["round"] == 1 and 77 not in grid.apps:
            grid.add(77, 1, node_that(tmp_path / "home", change))
            grid.add(78, 9, next(iter(grid.apps.values())))

    out = tmp_path / "run"
    served(grid, out, rounds=2, watch=watch)
    second = rest(out)["lines"][1]
    assert second["lost"] == {"unsent": [1]}
    assert "client 1 reports 5000 examples" in second["why"]["unsent"]


def test_a_run_waits_if_nobody_is_left(tmp_path: Path) -> None:
    """All nodes are gone after round 1, as behind a line that is down, and come back a second later."""
    grid = grid_of(tmp_path / "home")
    apps = dict(grid.apps)
    back: list[float] = []
    real = grid.get_node_ids

    def nodes() -> Any:
        if back and time.monotonic() > back[0]:
            grid.apps.update(apps)
        return real()

    grid.get_node_ids = nodes  # type: ignore[method-assign]

    def watch(line: Mapping[str, Any]) -> None:
        if line["round"] == 1 and not back:
            grid.apps.clear()
            back.append(time.monotonic() + 1.0)

    result = served(grid, tmp_path / "run", watch=watch)
    assert result.summary["lost"] == {}


def test_many_nodes_are_looked_through_once() -> None:
    """Among 100,000 known nodes the new ones are found in the time of one look at each."""
    known = enrolment.read_enrolment(copy.deepcopy(VALID))
    infos = [SimpleNamespace(node_id=n, public_key=b"") for n in range(100_000)]
    made = Roster(SimpleNamespace(get_nodes=lambda: infos), 100_000)
    for node in range(100_000):
        made._known[node] = known
        made._node_of[node] = node
        made._joined.add(node)
    begun = time.process_time()
    assert len(made.nodes()) == 100_000
    assert time.process_time() - begun < 5


def test_a_large_run_begins_without_many_clients_in_one_look_at_each() -> None:
    """10,000 clients have enrolled, with 1 to 10,000 examples; 30,000 have not, and get the median."""
    known = enrolment.read_enrolment(copy.deepcopy(VALID))
    nodes = {}
    for k in range(10_000):
        # 7919 is prime: each number once, in no order.
        info = replace(known.info, examples=1 + 7919 * k % 10_000)
        nodes[k] = replace(known, partition=k, info=info)
    begun = time.process_time()
    made = enrolment.make_federation(nodes, known.kind, absent=range(10_000, 40_000))
    assert time.process_time() - begun < 10
    assert len(made.clients) == 40_000
    assert made.info(39_999).examples == 5000
    assert made.client(39_999).labels is None


# ---- who is who ----------------------------------------------------------------------------------


class Keyed(Loopback):
    """Nodes with public keys, as a SuperLink reports them."""

    keys: dict[int, bytes]

    def get_nodes(self) -> Any:
        return [SimpleNamespace(node_id=n, public_key=self.keys.get(n, b"")) for n in self.apps]


def keyed(home: Path, partitions: list[int], keys: list[bytes]) -> Keyed:
    app = client_app(alone, home=home)
    grid = Keyed({})
    grid.keys = {}
    for number, (partition, key) in enumerate(zip(partitions, keys, strict=True), start=1):
        grid.add(number, partition, app)
        grid.keys[number] = key
    return grid


def test_a_key_is_bound_to_its_clients(tmp_path: Path) -> None:
    """Node 2 has the key of client 1 and comes first as client 0; node 4 has a key that nobody declared."""
    make_keys(tmp_path / "keys", 3)
    declared = read_declared_keys(tmp_path / "keys")
    assert [(d.name, d.partitions) for d in declared.values()] == [
        ("node-0", (0,)),
        ("node-1", (1,)),
        ("node-2", (2,)),
    ]
    first, second, third = declared
    grid = keyed(tmp_path / "home", [0, 1, 2, 0], [second, b"other", third, first])
    result = served(grid, tmp_path / "run", rounds=2, keys=tmp_path / "keys")
    notes = " ".join(result.summary["notes"])
    assert "the node with the key node-1 reports that it is client 0" in notes
    assert "client 1, and its public key is not in the folder" in notes
    # The true client 0 takes part.
    assert result.summary["lost"] == {"unsent": 2}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("node-0 = 0", "a list of clients"),
        ("node-0 = [-1]", "a list of clients"),
        ("node-9 = [9]", "not the public key"),
        ("node-0 [", "not TOML"),
        (None, "cannot be read"),
    ],
)
def test_wrong_declarations_are_refused(text: str | None, sentence: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", 1)
    path = tmp_path / "keys" / "partitions.toml"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_declared_keys(tmp_path / "keys")


def test_one_key_may_be_several_clients() -> None:
    made = Roster(SimpleNamespace(), 3, keys={b"k": DeclaredKey("gateway", (0, 2))})
    made._public_keys = {5: b"k"}
    made._check_key(5, 2)
    with pytest.raises(InputError, match=r"key gateway .* client 1, .* allows it 0, 2"):
        made._check_key(5, 1)


# ---- words ---------------------------------------------------------------------------------------


def test_another_version_is_refused_by_name(tmp_path: Path) -> None:
    def older(question: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        return said | {"version": "0.0.1"}

    result = served(with_odd(tmp_path / "home", older), tmp_path / "run", rounds=1)
    assert f"client 1 has fedgrove 0.0.1, and this side has {fedgrove.__version__}" in " ".join(
        result.summary["notes"]
    )


@pytest.mark.parametrize(("shift", "which"), [(3600, "3600 s ahead of"), (-7200, "7200 s behind")])
def test_a_clock_that_is_off_gets_a_sentence(
    shift: float, which: str, tmp_path: Path, caplog: Any
) -> None:
    def change(question: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        return said | {"time": said["time"] + shift} if question["ask"] == "who" else said

    caplog.set_level(logging.WARNING, "fedgrove")
    served(with_odd(tmp_path / "home", change), tmp_path / "run", quorum=3, rounds=1)
    [said] = [r.message for r in caplog.records if "clock" in r.message]
    assert f"the clock of client 1 is {which} the server's" in said


def test_a_refusal_has_no_traceback(tmp_path: Path, caplog: Any) -> None:
    """Flower logs the error of an app with its traceback; ours is a sentence, which was logged."""
    app = fedgrove.deploy.server_app(experiment(), out=tmp_path / "run", clients=3, wait=0.0)
    log = logging.getLogger("flwr")
    with pytest.raises(EngineError) as caught:
        app(Loopback({}), SimpleNamespace(run_config={}))
    caplog.set_level(logging.ERROR)
    log.addHandler(caplog.handler)
    log.error("%s raised an exception", "ServerApp", exc_info=caught.value)
    log.error("%s raised an exception", "ServerApp", exc_info=ZeroDivisionError("of its own"))
    log.removeHandler(caplog.handler)
    ours, *_, other = [r for r in caplog.records if r.name == "flwr"]
    assert ours.exc_info is None
    assert other.exc_info is not None


def test_a_cohort_above_the_number_of_nodes_says_where_to_change_it(tmp_path: Path) -> None:
    path = tmp_path / "fedgrove_app" / "config.toml"
    path.parent.mkdir()
    path.write_text(to_toml(replace(experiment(), data="digits", cohort=10)))
    sentence = r"cohort is 10, and the app is for 3 clients; change cohort in fedgrove_app/config"
    with pytest.raises(InputError, match=sentence):
        serve(Loopback({}), path, out=tmp_path / "run", clients=3, wait=0.0)


@pytest.mark.parametrize(("before", "after"), [((0, 2), (0, 1, 2)), ((0, 1, 2), (0, 2))])
def test_a_run_is_resumed_with_other_nodes_than_it_began_with(
    before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path
) -> None:
    """The clients of the run are the same; only who has enrolled differs."""

    def kill(line: Mapping[str, Any]) -> None:
        if line["round"] == 2:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    words = {"name": "ditto", "rounds": 4}
    with pytest.raises(KeyboardInterrupt):
        served(grid_of(tmp_path / "home", partitions=before), out, watch=kill, **words)
    result = served(grid_of(tmp_path / "home", partitions=after), out, **words)
    lost = [line.get("lost", {}) for line in rest(out)["lines"]]
    absent = [{} if 1 in nodes else {"unsent": [1]} for nodes in (before, after)]
    assert lost == [absent[0], absent[0], absent[1], absent[1]]
    assert result.summary["scored"] == len(after)
