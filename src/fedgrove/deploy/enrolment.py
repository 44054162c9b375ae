"""What a node reports when it enrols, and why it may be refused.

A node reports only what the server needs: its number of examples, their shape, the classes it knows
and its device. The examples, and how many it has of each class, stay on the node.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Annotated, Any, Literal

import tomli_w
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from .. import __version__
from ..core import ClientInfo
from ..data import ClientData, Defaults, Examples, Federation
from ..data.preparation import Preparation
from ..engines.flower.messages import Head, name_codec
from ..errors import InputError, clean_text, shown
from ..problems import CLASSES, LABELS, Problem, SquaredError, Unit, numbers
from ..runs.run import Run

LOG = logging.getLogger("fedgrove")


def show_log() -> None:
    """Write the log of a server or node to stderr, unless the app has set up its own log."""
    if LOG.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("fedgrove: %(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)


def check_version(other: Any, who: str) -> None:
    """Refuse a node with another version of fedgrove, whose messages may differ."""
    if other != __version__:
        raise InputError(
            f"{who} has fedgrove {clean_text(str(other), 40)}, and this side has {__version__}; "
            "install the same version on both."
        )


# ---- what a node reports -------------------------------------------------------------------------


def describe_client(federation: Federation, partition: int) -> Head:
    """Return what a node reports about its client and the kind of its data.

    Raises:
        InputError: The targets cannot be described over a network.
    """
    data = federation.client(partition)
    labels = None if data.labels is None else list(data.labels)
    return {
        "version": __version__,
        "partition": partition,
        "info": dataclasses.asdict(data.info),
        "own_labels": labels,
        "kind": {
            "shape": list(federation.shape),
            "outputs": federation.classes,
            "problem": _describe_problem(federation.problem),
        },
        "words": {
            "name": "own data" if _names_client(federation.name, federation) else federation.name,
            "labels": list(federation.labels),
            "defaults": dataclasses.asdict(federation.defaults),
            "notes": [note for note in federation.notes if not _names_client(note, federation)],
            **federation.division,
        },
    }


def _names_client(text: str, federation: Federation) -> bool:
    """Whether a text contains a client's name, which comes from its files and stays there."""
    return any(name in text for name in federation.names.values())


def _describe_problem(problem: Any) -> dict[str, Any]:
    if problem in (CLASSES, LABELS):
        return {"kind": problem.kind}
    if isinstance(problem, Problem) and isinstance(problem.loss, SquaredError):
        unit = problem.loss.unit
        said = {
            "kind": "numbers",
            "metric": problem.metric.name,
            "unit": {"mean": list(unit.mean), "scale": list(unit.scale)},
        }
        # A loss or metric of the user's own would not survive the network, and must not
        # be replaced silently.
        if problem == _make_problem(said):
            return said
    raise InputError(
        f"the targets of the data are {problem.name}; over a network they must be classes, labels "
        "or numbers, with the loss and metric of fedgrove."
    )


def _make_problem(said: Mapping[str, Any]) -> Problem:
    if said["kind"] == "classes":
        return CLASSES
    if said["kind"] == "labels":
        return LABELS
    unit = said["unit"]
    mean = tuple(map(float, unit["mean"]))
    scale = tuple(map(float, unit["scale"]))
    return numbers(Unit(mean, scale), str(said["metric"]))


# ---- what the server reads -----------------------------------------------------------------------

MOST_EXAMPLES = 10**8
"""The most training examples that a client may report."""
TIMES_USUAL = 100.0
"""How many times the median number of examples a client may report, unless the app sets another
bound.

A client's weight in an average is its number of examples, and nobody but the client can count them.
"""
MOST_OUTPUTS = 100_000
MOST_INPUTS = 1 << 28
"""The most numbers that one input of a network may have."""
MOST_NOTES = 64


def _check_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it must be printable text")
    return text


Name = Annotated[str, Field(max_length=200), AfterValidator(_check_printable)]
Sentence = Annotated[str, Field(max_length=1000), AfterValidator(_check_printable)]
Count = Annotated[int, Field(ge=1, le=10**7)]
Rate = Annotated[float, Field(ge=0, le=1e3)]
# A virtual clock divides by these, so they stay far from 0.
Speed = Annotated[float, Field(ge=1e-6, le=1e9)]
Scale = Annotated[float, Field(ge=1e-30, le=1e30)]
Output = Annotated[int, Field(ge=0, lt=MOST_OUTPUTS)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]


class _Fields(BaseModel):
    """A part of an enrolment: no conversion of types, no other fields, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class _Info(_Fields):
    examples: Annotated[int, Field(ge=1, le=MOST_EXAMPLES)]
    bandwidth: Speed
    speed: Speed
    memory: Annotated[int, Field(ge=0, le=1 << 50)]
    task: Name
    downlink: Speed | None


class _Unit(_Fields):
    mean: Annotated[list[Number], Field(min_length=1, max_length=MOST_OUTPUTS)]
    scale: Annotated[list[Scale], Field(min_length=1, max_length=MOST_OUTPUTS)]


class _Problem(_Fields):
    kind: Literal["classes", "labels", "numbers"]
    metric: Literal["mae", "rmse", "mse"] | None = None
    unit: _Unit | None = None

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> _Problem:
        has_both = self.metric is not None and self.unit is not None
        has_any = self.metric is not None or self.unit is not None
        if has_both != (self.kind == "numbers") or has_any != has_both:
            raise ValueError("numbers, and nothing else, have a metric and a unit")
        return self


class _Kind(_Fields):
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1, max_length=8)]
    outputs: Annotated[int, Field(ge=1, le=MOST_OUTPUTS)]
    problem: _Problem

    @model_validator(mode="after")
    def _fits_together(self) -> _Kind:
        if math.prod(self.shape) > MOST_INPUTS:
            raise ValueError(f"an input may have at most {MOST_INPUTS} numbers")
        unit = self.problem.unit
        if unit is not None and not len(unit.mean) == len(unit.scale) == self.outputs:
            raise ValueError("mean and scale must have one number for each output")
        return self


class _Defaults(_Fields):
    net: Name
    cohort: Count
    rounds: Count
    epochs: Annotated[int, Field(ge=0, le=10**5)]
    batch: Count
    optimiser: Literal["SGD", "Adam"]
    lr: Rate
    momentum: Rate
    weight_decay: Rate


class _Words(_Fields):
    name: Name
    labels: Annotated[list[Name], Field(min_length=1, max_length=MOST_OUTPUTS)]
    defaults: _Defaults
    notes: Annotated[list[Sentence], Field(max_length=MOST_NOTES)]
    partition: Sentence
    scenario: Sentence
    split: Sentence
    validation: Annotated[float, Field(ge=0, lt=1)]


class _Enrolment(_Fields):
    """All that a node reports when it enrols, with bounds for every field."""

    version: Name
    time: Annotated[float, Field(ge=0, le=1e12)] | None = None
    partition: Annotated[int, Field(ge=0, lt=10**6)]
    info: _Info
    own_labels: Annotated[list[Output], Field(min_length=1, max_length=MOST_OUTPUTS)] | None
    kind: _Kind
    words: _Words

    @model_validator(mode="after")
    def _fits_together(self) -> _Enrolment:
        if len(self.words.labels) != self.kind.outputs:
            raise ValueError("words.labels must have one name for each output")
        if self.own_labels is not None:
            is_output = max(self.own_labels) < self.kind.outputs
            if not is_output or len(set(self.own_labels)) < len(self.own_labels):
                raise ValueError("own_labels must be different outputs")
        return self


@dataclass(frozen=True)
class EnrolledClient:
    """The client of a node, as the server knows it."""

    partition: int
    info: ClientInfo
    labels: tuple[int, ...] | None
    kind: str
    """Shape, outputs and problem of its data as one text; equal for all clients."""
    words: Mapping[str, Any]
    time: float | None = None
    """The node's clock when it answered, in seconds since 1970."""


def name_node(said: Head) -> str:
    """Return what a node is called in a sentence: its client, if it says which one it is."""
    partition = said.get("partition")
    # Not isinstance: True is an int too.
    if type(partition) is int and 0 <= partition < 10**6:
        return f"client {partition}"
    return "a node"


def read_enrolment(said: Head) -> EnrolledClient:
    """Check and read what a node reported.

    Raises:
        InputError: A field is missing, wrong or out of bounds, or the node has another version.
    """
    who = name_node(said)
    # First: other versions may report other fields.
    check_version(said.get("version"), who)
    try:
        read = _Enrolment.model_validate(said)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "its answer"
        given = f" is {clean_text(shown(first['input']), 100)}" if first["loc"] else ""
        allowed = first["msg"].removeprefix("Value error, ").replace("Input should", "it must")
        sentence = f"{who} cannot enrol: {field}{given}; {allowed}; correct its own_data."
        raise InputError(clean_text(sentence)) from None
    own = read.own_labels
    return EnrolledClient(
        partition=read.partition,
        info=ClientInfo(**read.info.model_dump()),
        labels=None if own is None else tuple(own),
        # As text with sorted keys, so that kinds can be counted and compared.
        kind=json.dumps(read.kind.model_dump(exclude_none=True), sort_keys=True),
        words=read.words.model_dump(),
        time=read.time,
    )


def find_usual_kind(nodes: Mapping[int, EnrolledClient]) -> str:
    """Return the kind of data that most enrolled nodes have; in a tie, the lowest partition's."""
    return _find_usual([each.kind for each in _in_order(nodes)])


def _in_order(nodes: Mapping[int, EnrolledClient]) -> list[EnrolledClient]:
    """Return enrolled clients in the order of their partitions."""
    return sorted(nodes.values(), key=lambda each: each.partition)


def _find_usual(texts: Sequence[str]) -> str:
    # Counter keeps the order of insertion for equal counts.
    return Counter(texts).most_common(1)[0][0]


def check_kind(node: EnrolledClient, kind: str) -> None:
    """Refuse to enrol a node whose data are of another kind than those of the others."""
    if node.kind != kind:
        raise InputError(
            f"client {node.partition} has data of {_describe_kind(node.kind)}, and the others have "
            f"{_describe_kind(kind)}; give it data of the same kind."
        )


def _describe_kind(kind: str) -> str:
    said = json.loads(kind)
    problem = said["problem"]
    text = f"shape {tuple(said['shape'])} with {said['outputs']} outputs ({problem['kind']}"
    if "unit" in problem:
        return f"{text}, unit {clean_text(str(problem['unit']), 200)})"
    return f"{text})"


def find_usual_examples(nodes: Mapping[int, EnrolledClient]) -> int:
    """Return the median number of examples of enrolled clients; of two, the lower one."""
    return median_low(node.info.examples for node in nodes.values())


def check_examples(node: EnrolledClient, usual: int, times: float) -> None:
    """Refuse to enrol a client that reports far more examples than is usual.

    Its weight would be too large. It is refused, and its number not reduced, because a client that
    lies about its number should have no weight at all.
    """
    if node.info.examples > times * usual:
        raise InputError(
            f"client {node.partition} reports {node.info.examples} examples, more than {times:g} "
            f"times the median of the enrolled clients, {usual}; if that is right, give the app a "
            "larger most_examples."
        )


CLOCKS = 60.0
"""Seconds that the clocks of a node and the server may differ before a sentence says so."""


def describe_clock(node: EnrolledClient, asked: float, answered: float) -> str:
    """Return a sentence about a node's clock that differs from the server's; "" if it is right.

    Args:
        node: What the node reported.
        asked: The server's clock when it sent the question.
        answered: The server's clock when it read the answer.
    """
    if node.time is None:
        return ""
    ahead = node.time - answered
    behind = asked - node.time
    if max(ahead, behind) <= CLOCKS:
        return ""
    which = f"{behind:.0f} s behind" if behind > ahead else f"{ahead:.0f} s ahead of"
    return (
        f"the clock of client {node.partition} is {which} the server's; set it, for example with "
        "NTP, because Flower drops messages by their time."
    )


def make_federation(
    nodes: Mapping[int, EnrolledClient], kind: str, absent: Iterable[int] = (), notes: Any = ()
) -> Federation:
    """Make the federation as a deployed server knows it: clients without examples.

    Args:
        nodes: The enrolled clients by partition.
        kind: The kind of data that they have.
        absent: Partitions of clients that have not enrolled yet. They get the median number of
            examples until :func:`make_client` replaces them.
        notes: Notes of the server for the summary of the run.
    """
    said = json.loads(kind)
    words = {}
    # For each of them what most nodes report, so that no single node decides it.
    for key in nodes[min(nodes)].words:
        texts = [json.dumps(each.words[key]) for each in _in_order(nodes)]
        words[key] = json.loads(_find_usual(texts))
    labels = tuple(words["labels"])
    # Made once: the clients of a large run that are absent are alike.
    info = ClientInfo(find_usual_examples(nodes))
    absent_client = replace(make_client(nodes[min(nodes)]), info=info, labels=None)
    clients = {}
    for partition in sorted({*nodes, *absent}):
        if partition in nodes:
            clients[partition] = make_client(nodes[partition])
        else:
            clients[partition] = absent_client
    shape = tuple(said["shape"])
    return Federation(
        name=words["name"],
        clients=clients,
        classes=said["outputs"],
        labels=labels,
        shape=shape,
        defaults=Defaults(**words["defaults"]),
        notes=(*words["notes"], *notes),
        partition=words["partition"],
        scenario=words["scenario"],
        split=words["split"],
        validation=words["validation"],
        problem=_make_problem(said["problem"]),
        # How nodes prepare their inputs depends on their data, and stays on the nodes.
        preparation=Preparation(labels=labels, shape=shape),
        elsewhere=True,
    )


def make_client(node: EnrolledClient) -> ClientData:
    """Return the client of a node as a deployed server knows it: without examples."""
    said = json.loads(node.kind)
    x = torch.zeros(0, *said["shape"])
    y = torch.zeros(0, said["outputs"])
    if said["problem"]["kind"] == "classes":
        y = torch.zeros(0, dtype=torch.int64)
    no_examples = Examples(x, y)
    return ClientData(no_examples, no_examples, no_examples, node.info, node.labels)


# ---- the run that both sides build ---------------------------------------------------------------


def config_for_nodes(config: str) -> str:
    """Return a run's config.toml as it is sent to nodes."""
    # A node has one client, and does not need to know how many others there are.
    document = tomllib.loads(config)
    document.get("data", {}).pop("clients", None)
    return tomli_w.dumps(document)


def name_run(config: str) -> str:
    """Return the name of a deployed run on server and nodes: a hash of its config."""
    # Both sides compute it, so that no name has to be agreed on; 64 bits do for the runs of
    # one node.
    return hashlib.sha256(config.encode()).hexdigest()[:16]


def describe_built_run(run: Run, config: str) -> Head:
    """Return a summary of the run that a server or a node has built, to compare both."""
    leaves = {name: list(leaf.shape) for name, leaf in run.params.items()}
    # A sum, and not a hash: weights may differ in the last digits between processors.
    total = math.fsum(float(leaf.double().abs().sum()) for leaf in run.params.values())
    method = tomllib.loads(config).get("method", {})
    return {
        "net": hashlib.sha256(json.dumps(leaves).encode()).hexdigest()[:16],
        "weights": total,
        "codec": name_codec(run.method.codec),
        "method": hashlib.sha256(json.dumps(method, sort_keys=True).encode()).hexdigest()[:16],
    }


def check_built_run(said: Head, own: Head, who: str = "the node") -> None:
    """Refuse a node that has built a run that differs from the server's.

    Raises:
        InputError: Method, network, codec or initial weights differ.
    """
    words = {
        "method": "a different method, or different settings of it",
        "net": "a different network",
        "codec": "a different codec",
    }
    for key, what in words.items():
        if said.get(key) != own[key]:
            raise InputError(
                f"{who} has built {what} from the server; give both the same files and the "
                "same version of fedgrove."
            )
    weights = said.get("weights")
    # A different kind of processor may round differently.
    if not isinstance(weights, float) or not math.isclose(weights, own["weights"], rel_tol=1e-4):
        raise InputError(
            f"{who} draws initial weights that differ from the server's; give both the same "
            "network, the same file of weights and the same version of torch."
        )
