"""What of FedAPTA's tables is not data: tasks, parameters left, and how similar devices are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgrove.channels.find_groups import find_groups
from fedgrove.channels.submodel import extract_submodel
from fedgrove.data import Federation
from fedgrove.data.mix import names_several, split_names
from fedgrove.methods.fedapta.channel_rules import LayerwiseL1, kept_weights
from fedgrove.methods.fedapta.layer_ratios import CONV_DIMENSIONS, candidates, weight_counts
from fedgrove.methods.fedapta.task_groups import distances
from fedgrove.nets import Net, build
from fedgrove.nets.freeze import freeze
from fedgrove.runs.run import Run

from .definition import load_definition
from .measures import ON_TASK
from .scope import Scope
from .study import Fact, Matrix, StudyRow

AT_ROUNDS = (1, 2, 3, 4, 5, 10, 20, 30)
"""Rounds of the columns of study 7."""
IMAGE = (3, 32, 32)
"""The inputs of the networks whose parameters Table 5 counts."""
SIMILARITIES = {"cosine": "cosine", "inner": "inner product", "l1": "L1", "l2": "L2"}


def values(scope: Scope) -> dict[str, Any]:
    """Return what follows from the tasks, the number of examples and the weights to start from."""
    tasks = _tasks(scope)
    rounds = scope["rounds"]
    early = min(scope["found_by"], rounds)
    at = [done for done in AT_ROUNDS if done <= rounds]
    examples = scope["examples"]
    own: dict[str, Any] = {
        "tasks_in_words": _describe_tasks(len(tasks), scope["devices"]),
        "augmentation": "augmented images" if scope["augment"] else "images as they are",
        "clients": scope["devices"] * len(tasks),
        "task_measures": [*(f"{ON_TASK}{task}" for task in tasks), "accuracy_tasks"],
        # How well the groups agree with the tasks: early, and at the end.
        "found": [f"purity@{early}", f"groups@{early}", "purity", "groups"],
        "found_over_rounds": [*(f"purity@{done}" for done in at), f"groups@{at[-1]}"],
        "replaced": [] if scope["is_quick"] else list_replaced(scope),
        "dealt_examples": "",
        "examples_in_words": "all examples",
        "freeze": 0.0,
        "start_note": "From scratch, nothing frozen (the paper: weights of ImageNet, the first "
        "quarter frozen), and so fedlps without its frozen encoder.",
    }
    if examples:
        own["dealt_examples"] = f":{examples}"
        own["examples_in_words"] = f"{examples} examples of each class"
    if scope["init"]:
        own["freeze"] = scope["frozen"]
        own["start_note"] = "Started from {init}; the first quarter of the layers is frozen."
    if "tasks_of_figure" in scope:
        # The tasks of the figure, with what replaces them; all where none is there.
        wanted = (*scope["tasks_of_figure"], scope["stand_in"])
        drawn = [task for task in tasks if task in wanted] or tasks
        own["drawn_tasks"] = [f"{ON_TASK}{task}" for task in drawn]
    return own


def _describe_tasks(count: int, devices: int) -> str:
    """Say how many tasks there are, and how many devices each has."""
    if count == 1:
        return f"One task of {devices} devices"
    return f"{count} tasks of {devices} devices each"


def _tasks(scope: Scope) -> list[str]:
    """The tasks by name; one where the data are one set."""
    data = scope["data"]
    return list(split_names(data)) if names_several(data) else [data]


def list_replaced(scope: Scope) -> list[str]:
    """Say which of the paper's tasks are not here."""
    tasks = _tasks(scope)
    stand_in = scope["stand_in"]
    missing = [task for task in scope["tasks_of_paper"] if task not in tasks]
    notes = []
    for task in missing:
        if task == "svhn" and stand_in in tasks:
            notes.append(
                f"{stand_in} (8 x 8, 1,797 images) replace SVHN: a much easier task, "
                "with which the paper's numbers are not compared."
            )
        else:
            notes.append(f"{task} is left out: it is not among the data.")
    if missing:
        notes.append(
            "The paper's average is over its five tasks, and so is compared with none of ours."
        )
    return notes


def complete(row: StudyRow, scope: Scope) -> StudyRow:
    """Keep what the paper reports of the tasks that are run, and its average of all five."""
    tasks = _tasks(scope)
    kept = {f"{ON_TASK}{task}:0" for task in tasks}
    if set(tasks) == set(scope["tasks_of_paper"]):
        kept.add("accuracy_tasks:0")
    reported = {key: value for key, value in row.reported.items() if key in kept}
    if len(tasks) == 1:
        # A run of one data set has no tasks by name: its accuracy is the task's.
        on_task = f"{ON_TASK}{tasks[0]}:0"
        reported = {"accuracy_mean:0": reported[on_task]} if on_task in reported else {}
    return replace(row, reported=reported)


# ---- Table 5 -------------------------------------------------------------------------------------


def count_parameters(
    name: str, federation: Federation, numbers: Mapping[str, Mapping[str, Any]]
) -> list[Fact]:
    """Count weights at each ratio, as the paper does and in the net that is really trained.

    Of nets for 32 x 32 colour images; nothing of the data enters.
    """
    scale = load_definition("fedapta").full
    facts = []
    for net_name, millions in numbers["all"].items():
        module = build(f"{net_name}:norm=group", IMAGE, 10, seed=0)
        freeze(module, IMAGE, scale["frozen"])
        net = Net(module, IMAGE)
        model = net.params()
        layers = candidates(find_groups(net), net.layout.shapes)
        counts = weight_counts(layers, net.layout.shapes)
        convolutional = sum(w.numel() for w in model.values() if w.dim() >= CONV_DIMENSIONS)
        stays = convolutional - sum(counts.values())
        for ratio, paper in zip(scale["ratios"], millions, strict=True):
            kept = LayerwiseL1()(model, layers, ratio, round=0, client=0)
            counted = stays + kept_weights(layers, counts, kept)
            mask = extract_submodel(model, layers, kept).mask or {}
            lost = sum(int((~there).sum()) for there in mask.values())
            left = net.layout.size - lost
            at = f"{net_name}, ratio {ratio:g}"
            facts.append(Fact(f"{at}: M conv weights kept", counted / 1e6, paper, 2))
            facts.append(Fact(f"{at}: M parameters trained", left / 1e6, digits=2))
    return facts


# ---- Figure 3 ------------------------------------------------------------------------------------


def compare_devices(run: Run, state: Any) -> list[Matrix]:
    """Return how similar all devices are by each metric, from what the server remembers of them."""
    devices = sorted(state.traces)
    task_of = [run.task_of(k, max(0, state.round - 1)) for k in devices]
    vectors = torch.stack([state.traces[k][0] for k in devices])
    present = torch.stack([state.traces[k][1] for k in devices])
    same = torch.tensor([[one == other for other in task_of] for one in task_of])
    off_diagonal = ~torch.eye(len(devices), dtype=torch.bool)
    labels = tuple(f"{k} {task}" for k, task in zip(devices, task_of, strict=True))
    found = []
    for metric, title in SIMILARITIES.items():
        alike = similarity(vectors, present, metric)
        within = alike[same & off_diagonal]
        across = alike[~same]
        about = f"devices of one task {_middle(within)}, of different tasks {_middle(across)}"
        rows = tuple(tuple(round(value, 6) for value in line) for line in alike.tolist())
        found.append(Matrix(title, labels, rows, about))
    return found


def similarity(vectors: Tensor, present: Tensor, metric: str) -> Tensor:
    """Return how similar every two devices' updates are, relative to device 0 and itself.

    cosine: over the weights that both have; inner: the product; l1, l2: 1 / (1 + distance), since
    the paper does not say how it makes a similarity of a distance.

    >>> rows = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    >>> [similarity(rows, torch.ones(2, 2).bool(), m)[0, 1].item() for m in ("inner", "l1")]
    [0.5, 0.5]
    """
    if metric == "inner":
        x = vectors.double()
        alike = x @ x.T
    elif metric == "cosine":
        alike = 1 - distances(vectors, present, metric)
    else:
        alike = 1 / (1 + distances(vectors, present, metric))
    # A device that did not move at all would be divided by 0.
    return alike / alike[0, 0].clamp_min(torch.finfo(torch.float64).tiny)


def _middle(values: Tensor) -> str:
    """Median and range of some numbers."""
    if not len(values):
        return "none"
    median, low, high = (float(v) for v in (values.median(), values.min(), values.max()))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"
