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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w
import torch

from .. import __version__
from ..core import ClientInfo
from ..data import ClientData, Defaults, Examples, Federation
from ..data.preparation import Preparation
from ..engines.flower.messages import Head, name_codec
from ..errors import FedgroveError, InputError
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
            f"{who} has fedgrove {other}, and this side has {__version__}; install the same "
            "version on both."
        )


# ---- what a node reports -------------------------------------------------------------------------


def describe_client(federation: Federation, partition: int) -> Head:
    """Return what a node reports about its client and the kind of its data.

    Raises:
        InputError: The targets cannot be described over a network.
    """
    data = federation.client(partition)
    labels = None
    if data.labels is not None:
        labels = list(data.labels)
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
            "name": federation.name,
            "labels": list(federation.labels),
            "defaults": dataclasses.asdict(federation.defaults),
            "notes": list(federation.notes),
            "partition": federation.partition,
            "scenario": federation.scenario,
            "split": federation.split,
            "validation": federation.validation,
        },
    }


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


@dataclass(frozen=True)
class EnrolledClient:
    """The client of a node, as the server knows it."""

    partition: int
    info: ClientInfo
    labels: tuple[int, ...] | None
    kind: str
    """Shape, outputs and problem of its data as one text; equal for all clients."""
    words: Mapping[str, Any]


def read_enrolment(said: Head) -> EnrolledClient:
    """Check and read what a node reported.

    Raises:
        InputError: The report is wrong, or comes from another version.
    """
    check_version(said.get("version"), "the node")
    try:
        partition = said["partition"]
        # Not isinstance: True is an int too.
        if type(partition) is not int or partition < 0:
            raise ValueError(f"its partition is {partition!r}")
        info = ClientInfo(**said["info"])
        if type(info.examples) is not int or info.examples < 1:
            raise ValueError(f"it has {info.examples!r} examples")
        own = said["own_labels"]
        labels = None
        if own is not None:
            labels = tuple(map(int, own))
        # Made once here, so that an invalid problem is refused now.
        _make_problem(said["kind"]["problem"])
        # As text with sorted keys, so that kinds can be counted and compared.
        kind = json.dumps(said["kind"], sort_keys=True)
        words = said["words"]
        # Only tried here: the server makes the federation after all nodes have enrolled.
        Defaults(**words["defaults"])
    except FedgroveError:
        raise
    # A node is not trusted: whatever it sends ends in a refusal of this node, not of the
    # server.
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"what the node reports about itself cannot be used: {error}.") from None
    return EnrolledClient(partition, info, labels, kind, words)


def find_usual_kind(nodes: Mapping[int, EnrolledClient]) -> str:
    """Return the kind of data that most enrolled nodes have; in a tie, the lowest partition's."""
    # Counter keeps the order of insertion for equal counts.
    in_order = sorted(nodes.values(), key=lambda each: each.partition)
    return Counter(each.kind for each in in_order).most_common(1)[0][0]


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
        return f"{text}, unit {problem['unit']})"
    return f"{text})"


def make_federation(nodes: Mapping[int, EnrolledClient], kind: str) -> Federation:
    """Make the federation as a deployed server knows it: clients without examples."""
    said = json.loads(kind)
    shape = tuple(map(int, said["shape"]))
    problem = _make_problem(said["problem"])
    # Any node would do; the lowest partition is the same after a restart.
    first = nodes[min(nodes)].words
    labels = tuple(map(str, first["labels"]))
    no_examples = _no_examples(shape, said["outputs"], problem)
    clients = {}
    for partition in sorted(nodes):
        node = nodes[partition]
        clients[partition] = ClientData(
            no_examples, no_examples, no_examples, node.info, node.labels
        )
    return Federation(
        name=str(first["name"]),
        clients=clients,
        classes=int(said["outputs"]),
        labels=labels,
        shape=shape,
        defaults=Defaults(**first["defaults"]),
        notes=tuple(map(str, first["notes"])),
        partition=str(first["partition"]),
        scenario=str(first["scenario"]),
        split=str(first["split"]),
        validation=float(first["validation"]),
        problem=problem,
        # How nodes prepare their inputs depends on their data, and stays on the nodes.
        preparation=Preparation(labels=labels, shape=shape),
        elsewhere=True,
    )


def _no_examples(shape: tuple[int, ...], outputs: int, problem: Problem) -> Examples:
    x = torch.zeros(0, *shape)
    if problem.kind == "classes":
        return Examples(x, torch.zeros(0, dtype=torch.int64))
    return Examples(x, torch.zeros(0, outputs))


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


def describe_half(run: Run, config: str) -> Head:
    """Return a summary of the run that server or node has built, to compare both."""
    leaves = {}
    for name, leaf in run.params.items():
        leaves[name] = list(leaf.shape)
    # A sum, and not a hash: weights may differ in the last digits between processors.
    total = math.fsum(float(leaf.double().abs().sum()) for leaf in run.params.values())
    method = tomllib.loads(config).get("method", {})
    return {
        "net": hashlib.sha256(json.dumps(leaves).encode()).hexdigest()[:16],
        "weights": total,
        "codec": name_codec(run.method.codec),
        "method": hashlib.sha256(json.dumps(method, sort_keys=True).encode()).hexdigest()[:16],
    }


def check_half(said: Head, own: Head) -> None:
    """Refuse a node that has built another run than the server.

    Raises:
        InputError: Method, network, codec or initial weights differ.
    """
    words = {
        "method": "another method, or other settings of it",
        "net": "another network",
        "codec": "another codec",
    }
    for key, what in words.items():
        if said.get(key) != own[key]:
            raise InputError(
                f"the node has built {what} than the server; give both the same files and the "
                "same version of fedgrove."
            )
    weights = said.get("weights")
    # Another kind of processor may round differently.
    if not isinstance(weights, float) or not math.isclose(weights, own["weights"], rel_tol=1e-4):
        raise InputError(
            "the node draws other initial weights than the server; give both the same network, "
            "the same file of weights and the same version of torch."
        )
