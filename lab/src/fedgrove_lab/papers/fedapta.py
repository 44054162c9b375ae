"""FedAPTA (Yu, Yuan, Wang, Cheng & Hu 2025): Tables 3 to 5, Figures 2 and 3, and tables of ours.

Rows, seeds and scoring are fixed here, before anything is run. The paper has ten devices for each
of five tasks; devices are scored with the model they would use, on their own held-out data, and a
figure of a task is the mean over its devices. Rows of one name and one data set are the same runs
in all parts, so that a run folder may be copied from one to another.

Where the files of SVHN are not found, digits (8 x 8, built in) take its place; EMNIST, of which
nothing here is like, is then left out. The paper's figures stand beside its own tasks alone.

These stand in no table of the paper: ``local``; ``fedrolex``; methods on all devices together;
FedAPTA with another importance or rule, and as it is by default here beside the literal one. Tables
6, 7 and 8 are ours: whether tasks are found, and what finding them is worth, at a scale that one
GPU runs in minutes. (The paper's own Table 6 lists related work.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedgrove import methods as library
from fedgrove.channels.find import groups_of
from fedgrove.channels.submodel import cut_out
from fedgrove.config.experiment import Experiment, with_settings
from fedgrove.core import AnyMethod
from fedgrove.data import Federation
from fedgrove.data.several import is_several, tasks_of
from fedgrove.methods import FedAPTA, FedAvg, FedLPS, FedRolex, Local
from fedgrove.methods.fedapta.channel_rules import (
    LayerwiseL1,
    RandomChannels,
    RollingWindow,
    UniformL1,
    kept_weights,
)
from fedgrove.methods.fedapta.layer_ratios import CONV_DIMENSIONS, candidates, weight_counts
from fedgrove.methods.fedapta.method import PRESETS
from fedgrove.methods.fedapta.task_groups import distances
from fedgrove.nets import Net, build
from fedgrove.nets.freeze import freeze
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.runs.run import Run

from .beside import ON_TASK
from .data_table import DataTable, Fact
from .studies import Matrix, Paper, Part, Row, Setting, Study

# ---- what the paper reports ----------------------------------------------------------------------

FIVE = ("mnist", "fashion-mnist", "svhn", "cifar10", "emnist")
"""The tasks, in the order of the columns below."""
TABLE_3 = {
    "iid": {
        "fedavg": (92.85, 87.72, 79.04, 70.79, 79.29, 81.94),
        "ditto": (93.06, 87.73, 79.21, 70.66, 79.30, 82.02),
        "fedprox": (93.01, 87.69, 79.29, 70.52, 79.26, 81.96),
        "fedgen": (92.94, 87.86, 79.27, 70.37, 79.18, 81.93),
        "moon": (92.93, 87.63, 79.32, 70.43, 79.32, 81.93),
        "fedbabu": (92.88, 87.54, 79.25, 70.45, 79.37, 81.90),
        "fedntd": (93.07, 87.55, 79.16, 70.66, 79.21, 81.93),
        "fedlc": (92.97, 87.63, 79.21, 70.66, 79.29, 81.95),
        "fedlps": (98.06, 89.18, 91.64, 80.10, 85.01, 88.80),
        "fedapta": (98.94, 91.16, 92.17, 80.40, 85.04, 89.54),
    },
    "a0.5": {
        "fedavg": (91.73, 86.46, 76.02, 65.35, 77.2, 79.35),
        "ditto": (91.82, 86.38, 75.89, 65.98, 77.19, 79.45),
        "fedprox": (91.73, 86.44, 76.04, 65.82, 77.2, 79.45),
        "fedgen": (91.9, 86.43, 75.99, 65.95, 77.03, 79.46),
        "moon": (91.75, 86.5, 75.92, 65.64, 77.23, 79.4),
        "fedbabu": (91.82, 86.62, 76.15, 66.35, 77.5, 79.69),
        "fedntd": (91.65, 86.5, 76.14, 65.55, 77.18, 79.4),
        "fedlc": (91.76, 86.26, 76, 65.81, 77.09, 79.38),
        "fedlps": (97.25, 84.24, 88.22, 67.49, 79.65, 83.37),
        "fedapta": (98.75, 89.13, 89.82, 68.22, 83.44, 85.87),
    },
}
"""ResNet-18: accuracy in % on the five tasks, and their average (Ditto's, IID, would be 81.99)."""
TABLE_4 = {
    "iid": {
        "fedavg": (88.21, 82.62, 66.76, 58.45, 75.48, 74.30),
        "ditto": (88.07, 82.61, 67.38, 57.99, 75.39, 74.29),
        "fedprox": (88.37, 82.59, 67.64, 58.82, 75.38, 74.56),
        "fedgen": (88.15, 82.65, 67.25, 58.15, 75.34, 74.31),
        "moon": (88.27, 82.61, 67.80, 57.91, 75.50, 74.42),
        "fedbabu": (88.16, 82.89, 67.89, 57.90, 75.75, 74.52),
        "fedntd": (87.74, 82.71, 67.53, 57.63, 75.47, 74.22),
        "fedlc": (88.14, 82.68, 67.60, 57.76, 75.43, 74.32),
        "fedlps": (84.57, 79.86, 71.99, 66.03, 83.50, 77.19),
        "fedapta": (94.84, 86.86, 73.20, 62.04, 82.87, 79.96),
    },
    "a0.5": {
        "fedavg": (85.13, 80.25, 63.06, 52.57, 72.65, 70.73),
        "ditto": (85.44, 80.06, 63.18, 53.49, 72.76, 70.99),
        "fedprox": (85.84, 79.92, 63.20, 52.58, 72.80, 70.87),
        "fedgen": (85.40, 79.91, 62.93, 52.56, 72.83, 70.72),
        "moon": (85.82, 79.86, 63.24, 52.40, 72.78, 70.82),
        "fedbabu": (85.35, 80.34, 62.92, 53.54, 73.21, 71.07),
        "fedntd": (85.48, 80.07, 62.98, 52.13, 72.76, 70.69),
        "fedlc": (85.31, 80.31, 63.62, 52.61, 72.81, 70.93),
        "fedlps": (78.49, 74.07, 65.09, 59.71, 77.55, 70.98),
        "fedapta": (91.33, 80.56, 66.15, 60.02, 78.44, 75.30),
    },
}
"""ShuffleNetV2: the same."""
TABLE_5 = {
    "resnet18": (11.01, 8.81, 6.61, 4.40, 2.20),
    "shufflenetv2": (1.21, 0.97, 0.72, 0.48, 0.24),
}
"""Millions of parameters at the five ratios."""
FIGURE_2 = ("svhn", "cifar10", "emnist")
"""The tasks that it is on; no numbers of it are printed, nor of Figure 3."""

# ---- how it was run ------------------------------------------------------------------------------

RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8)
"""Given to the devices in turn: two of each task's ten have the same."""
WIDTHS = tuple(round(1 - ratio, 6) for ratio in RATIOS)
"""Shares of channels that remove as much, as the paper counts it: a weight falls with the channel
that it makes."""
PER_TASK = 10
"""Devices of a task."""
FOUND_BY = 5
"""The round by which tasks should be found."""


@dataclass(frozen=True)
class Scale:
    """How much is run: the paper's setting (Table 2), ours, or, for ``--quick``, only a look."""

    rounds: int
    epochs: int = 5
    batch: int = 32
    """Ours: the paper gives none."""
    lr: float = 0.1
    devices: int = PER_TASK
    examples: int = 0
    """Of each class, dealt to all devices of a task; 0: all."""
    evaluate: int = 5


FULL = Scale(rounds=100)
OURS = Scale(rounds=30, examples=2000)
QUICK = Scale(rounds=2, epochs=1, batch=16, devices=4, evaluate=1)

NETS = {
    "resnet18": "resnet18:norm=group",
    "shufflenetv2": "shufflenetv2:norm=group",
    "cnn2": "bn-cnn2:norm=group",
}
"""With GroupNorm of two groups, as the paper has it; the last one is ours."""
LOOK = "bn-cnn2:norm=group,width=8"
FROZEN = 0.25
"""The share of the layers that stay as they are, where training starts from given weights."""
DEALS = {"iid": "iid", "a0.5": "dirichlet:0.5"}
"""By how a row's name ends."""
DEALT = {"iid": "IID", "a0.5": "Dirichlet 0.5"}


def scaled(setting: Setting, usual: Scale) -> Scale:
    """As it is usual for a part, or a quick one; with the rounds and examples asked for."""
    s = QUICK if setting.quick else usual
    if setting.rounds is not None:
        s = replace(s, rounds=setting.rounds)
    if setting.examples is not None:
        s = replace(s, examples=setting.examples)
    return s


def tasks(setting: Setting) -> list[str]:
    """The tasks by name; one where the data are one set."""
    return list(tasks_of(setting.data)) if is_several(setting.data) else [setting.data]


def recipe(s: Scale) -> LocalTraining:
    """Table 2 and the authors' code: SGD .1 x .998^round, weight decay 1e-3, clipped at 10."""
    return LocalTraining(s.epochs, s.batch, SGD(s.lr, weight_decay=1e-3), decay=0.998, clip=10.0)


BY_MEAN = LayerwiseL1(least=0.0)
BY_SUM = LayerwiseL1(importance="sum", least=0.0)
"""The paper's rule as it stands, of which no layer must lose anything, read in two ways."""


def methods(s: Scale) -> dict[str, AnyMethod]:
    """The methods that are compared, by the name of their row; FedAPTA's variants first."""
    local = recipe(s)
    whole = FedAPTA(ratios=RATIOS, local=local)
    compared: dict[str, AnyMethod] = {
        "fedapta": whole,
        "fedapta-mean": replace(whole, prune=BY_MEAN),
        "fedapta-sum": replace(whole, prune=BY_SUM),
        "fedapta-uniform": replace(whole, prune=UniformL1()),
        "fedapta-paper": replace(PRESETS["paper"], local=local),
        "local": Local(local=local),
        "fedavg": FedAvg(local=local),
        # What others have frozen is frozen before a method sees the net.
        "fedlps": FedLPS(encoder=0.0, widths=WIDTHS, local=local),
        "fedrolex": FedRolex(widths=WIDTHS, local=local),
    }
    for name in ("ditto", "fedprox", "fedgen", "moon", "fedbabu", "fedntd", "fedlc"):
        compared[name] = with_settings(library.make(name), {"local": local})
    return compared


LABELS = {
    "fedapta-mean": "fedapta, Eq. 1 alone, importance by mean",
    "fedapta-sum": "fedapta, Eq. 1 alone, importance by sum",
    "fedapta-uniform": "fedapta, layers alike (FedLPS' rule)",
    "fedapta-paper": "fedapta:paper, literal",
}
TASKS_APART = "-tasks"
"""Ends the names of methods that are run once for each true task."""


def row(
    setting: Setting,
    s: Scale,
    name: str,
    net: str,
    deal: str,
    reported: Mapping[str, float] | None = None,
) -> Row:
    """A line of a table; its name tells method, net and how data are dealt.

    A name that ends with ``-tasks`` is of a method run once for each true task.
    """
    method = name.removesuffix(TASKS_APART)
    apart = method != name
    label = LABELS.get(method, method)
    if apart:
        label += ", per true task"
    elif method in TOGETHER:
        label += ", all together"
    return Row(
        f"{name}-{net}-{deal}",
        label,
        experiment(setting, s, methods(s)[method], net, deal, apart),
        reported or {},
        panel=DEALT[deal],
        lead=name == "fedapta",
    )


TOGETHER = (
    "fedavg",
    "fedlps",
    "fedrolex",
    "ditto",
    "fedprox",
    "fedgen",
    "moon",
    "fedbabu",
    "fedntd",
    "fedlc",
)
"""Methods that know of no tasks."""


def experiment(
    setting: Setting, s: Scale, method: AnyMethod, net: str, deal: str, apart: bool = False
) -> Experiment:
    """A run in which all devices take part."""
    devices = s.devices * len(tasks(setting))
    partition = DEALS[deal]
    if s.examples:
        partition += f":{s.examples}"
    return Experiment(
        method,
        setting.data,
        net=LOOK if setting.quick else NETS[net],
        partition=partition,
        split=setting.split,
        validation=0,
        clients=devices,
        cohort=devices,
        rounds=s.rounds,
        evaluate=s.evaluate,
        init=setting.init,
        freeze=FROZEN if setting.init else 0.0,
        per_task=apart,
    )


def seeds(setting: Setting) -> int:
    """Three repeats (section 3.1.3)."""
    return 1 if setting.quick else 3


def measures(setting: Setting) -> tuple[str, ...]:
    """The accuracy on each task, and their mean."""
    return (*(f"{ON_TASK}{task}" for task in tasks(setting)), "accuracy_tasks")


def found(s: Scale) -> tuple[str, ...]:
    """How well the groups agree with the tasks: early, and at the end."""
    early = min(FOUND_BY, s.rounds)
    return (f"purity@{early}", f"groups@{early}", "purity", "groups")


def notes(setting: Setting, s: Scale, net: str) -> list[str]:
    """What each part on these data must say."""
    lines = []
    if setting.quick:
        lines.append(
            "Quick: a few rounds of a few devices. No figure here says anything about a method."
        )
    number = len(tasks(setting))
    dealt = f"{s.examples} examples of each class" if s.examples else "all examples"
    lines.append(
        f"{number} tasks of {s.devices} devices each, all in every round; rounds: {s.rounds}, "
        f"local epochs: {s.epochs}; SGD {s.lr:g} x .998^round, weight decay 1e-3, gradients "
        f"clipped at 10, batch {s.batch}; {LOOK if setting.quick else NETS[net]}; of each set "
        f"{dealt} are dealt."
    )
    if setting.init:
        lines.append(f"Started from {setting.init}; the first quarter of the layers is frozen.")
    else:
        lines.append(
            "From scratch, nothing frozen (the paper: weights of ImageNet, the first quarter "
            "frozen), and so fedlps without its frozen encoder."
        )
    return lines


SHARES = (
    "fedapta, fedlps and fedrolex: ratios 0, .2, .4, .6, .8 in turn (shares of channels that "
    "remove as much); the other methods train the whole net on all devices."
)
GROUPS = (
    "purity: the share of devices whose task is that of most of their group; no method is told the "
    "tasks, but for those per true task. A group of one is pure: see how many groups there are."
)
USED = (
    "Scored is what devices would use: of fedapta the model of their group cut to their own ratio, "
    "of fedlps their own narrow models, of all others a model of full width."
)
LITERAL = (
    "fedapta: our defaults, without FedDC's drift, importance by mean, every layer losing at least "
    ".9 of the device's ratio; fedapta:paper: layers' ratios by Eq. 1 alone, groups by this "
    "round's updates alone, and with the drift."
)


# ---- the paper's tables --------------------------------------------------------------------------

COMPARED = (
    "fedavg",
    "ditto",
    "fedprox",
    "fedgen",
    "moon",
    "fedbabu",
    "fedntd",
    "fedlc",
    "fedlps",
)
"""The paper's baselines, in its order."""
STAND_IN = "digits"
"""In the place of SVHN."""


def printed(setting: Setting, percents: Sequence[float]) -> dict[str, float]:
    """What the paper reports of the tasks that are run; their average where these are its own."""
    own = tasks(setting)
    reported = {}
    for task, percent in zip(FIVE, percents, strict=False):
        if task in own:
            # Rounded, because 92.85 / 100 is 0.9284999999999999.
            reported[f"{ON_TASK}{task}:0"] = round(percent / 100, 6)
    if set(own) == set(FIVE):
        reported["accuracy_tasks:0"] = round(percents[-1] / 100, 6)
    return reported


def replaced(setting: Setting) -> list[str]:
    """Which of the five tasks are not here."""
    own = tasks(setting)
    missing = [task for task in FIVE if task not in own]
    if setting.quick or not missing:
        return []
    lines = []
    for task in missing:
        if task == "svhn" and STAND_IN in own:
            lines.append(
                f"{STAND_IN} (8 x 8, 1,797 images) stand in the place of SVHN: a much easier task, "
                "beside which the paper's figures do not stand."
            )
        else:
            lines.append(f"{task} is left out: it is not among the data.")
    lines.append("The paper's average is over its five tasks, and so stands beside none of ours.")
    return lines


def _beside_all(setting: Setting, net: str, figures: Mapping[str, Any], title: str) -> Study:
    """FedAPTA and the baselines, each on all devices together and per true task."""
    s = scaled(setting, FULL)
    rows = []
    for deal, by_row in figures.items():
        for name in ("fedapta", "fedapta-sum", "fedapta-paper"):
            # Three readings of one row of the paper.
            reported = printed(setting, by_row["fedapta"])
            rows.append(row(setting, s, name, net, deal, reported))
        rows.append(row(setting, s, "local", net, deal))
        for name in COMPARED:
            # "The global model from the same task": so the paper's baselines know the tasks.
            reported = printed(setting, by_row[name])
            rows.append(row(setting, s, f"{name}{TASKS_APART}", net, deal, reported))
            rows.append(row(setting, s, name, net, deal))
    return Study(
        title,
        f"Accuracy by task beside other methods, {net}.",
        tuple(rows),
        seeds(setting),
        measures=measures(setting),
        counted=(*found(s), "mib_up", "mib_down"),
        notes=(
            *notes(setting, s, net),
            *replaced(setting),
            SHARES,
            "local and the rows on all devices together stand in no table of the paper; its "
            "baselines have a model for each task.",
            GROUPS,
            LITERAL,
            USED,
        ),
    )


def table_3(setting: Setting) -> Study:
    """Beside other methods, with ResNet-18."""
    return _beside_all(setting, "resnet18", TABLE_3, "FedAPTA, Table 3")


def table_4(setting: Setting) -> Study:
    """Beside other methods, with ShuffleNetV2."""
    return _beside_all(setting, "shufflenetv2", TABLE_4, "FedAPTA, Table 4")


def parameters(name: str, federation: Federation) -> list[Fact]:
    """Weights at each ratio, as the paper counts them and in the net that is really trained.

    Of nets for 32 x 32 colour images; nothing of the data enters.
    """
    facts = []
    for net_name, millions in TABLE_5.items():
        module = build(NETS[net_name], (3, 32, 32), 10, seed=0)
        freeze(module, (3, 32, 32), FROZEN)
        net = Net(module, (3, 32, 32))
        model = net.params()
        layers = candidates(groups_of(net), net.layout.shapes)
        counts = weight_counts(layers, net.layout.shapes)
        convolutional = sum(w.numel() for w in model.values() if w.dim() >= CONV_DIMENSIONS)
        stays = convolutional - sum(counts.values())
        for ratio, paper in zip(RATIOS, millions, strict=True):
            kept = LayerwiseL1()(model, layers, ratio, round=0, client=0)
            counted = stays + kept_weights(layers, counts, kept)
            mask = cut_out(model, layers, kept).mask or {}
            lost = sum(int((~there).sum()) for there in mask.values())
            left = net.layout.size - lost
            word = f"{net_name}, ratio {ratio:g}"
            facts.append(Fact(f"{word}: M conv weights kept", counted / 1e6, paper, 2))
            facts.append(Fact(f"{word}: M parameters trained", left / 1e6, digits=2))
    return facts


# ---- figures -------------------------------------------------------------------------------------

Rule = LayerwiseL1 | UniformL1 | RandomChannels | RollingWindow
RULES: dict[str, tuple[Rule, str]] = {
    "least": (LayerwiseL1(), "ours: FedAPTA's, no layer below .9 of the ratio"),
    "mean": (BY_MEAN, "FedAPTA's, importance by mean"),
    "sum": (BY_SUM, "FedAPTA's, importance by sum"),
    "uniform": (UniformL1(), "FedLPS'"),
    "random": (RandomChannels(), "FedDrop's (Caldas et al.)"),
    "rolling": (RollingWindow(), "FedRolex'"),
}
"""By the word in a row's name: which channels go, and whose rule it is."""


def figure_2(setting: Setting) -> Study:
    """The rule of pruning, inside the method."""
    s = scaled(setting, FULL)
    rows = []
    for word, (rule, label) in RULES.items():
        for ratio in RATIOS[1:]:
            # As their papers do: no device keeps the part that it happens to have in a round.
            use = "whole" if isinstance(rule, RandomChannels | RollingWindow) else "cut"
            method = FedAPTA(ratios=(ratio,), prune=rule, use=use, local=recipe(s))
            made = Row(
                f"fedapta-{word}-r{ratio:g}-resnet18-a0.5",
                f"{label}, ratio {ratio:g}",
                experiment(setting, s, method, "resnet18", "a0.5"),
                panel="pruning ratio of all devices",
                x=ratio,
                series=label,
            )
            rows.append(made)
    own = tasks(setting)
    # The tasks of the figure, with what stands in for them; all where none is there.
    drawn = [task for task in own if task in (*FIGURE_2, STAND_IN)] or own
    return Study(
        "FedAPTA, Figure 2",
        "Accuracy by the pruning ratio of all devices and the rule by which channels go, at "
        "Dirichlet 0.5.",
        tuple(rows),
        seeds(setting),
        measures=measures(setting),
        counted=("purity", "groups", "mib_up", "mib_down"),
        drawn=tuple(f"{ON_TASK}{task}" for task in drawn),
        lines=True,
        notes=(
            *notes(setting, s, "resnet18"),
            *replaced(setting),
            "Here all devices have the ratio of the row. The paper prints no numbers of this "
            "figure.",
            "FedDrop is federated dropout (Caldas et al. 2018): as many channels of every layer at "
            "random, anew for each device and round. With one ratio for all devices the rule of "
            "Wen et al. (2022), called so too, is the same.",
            GROUPS,
            "Scored is the model of a device's group: cut to the ratio with FedAPTA's and FedLPS' "
            "rules, whole with the others, whose parts change from round to round.",
        ),
    )


SIMILARITIES = {
    "cosine": "cosine",
    "inner": "inner product",
    "l1": "L1",
    "l2": "L2",
}


def similarity(vectors: Tensor, present: Tensor, metric: str) -> Tensor:
    """How alike every two devices' updates are, divided by device 0's likeness to itself.

    cosine: over the weights that both have; inner: the product; l1, l2: 1 / (1 + distance), since
    the paper does not say how it makes likeness of a distance.

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


def matrices(run: Run, state: Any) -> list[Matrix]:
    """The likeness of all devices by each metric, from what the server remembers of them."""
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


def _middle(values: Tensor) -> str:
    """Median and range of some numbers."""
    if not len(values):
        return "none"
    median, low, high = (float(v) for v in (values.median(), values.min(), values.max()))
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def figure_3(setting: Setting) -> Study:
    """How alike devices are by each metric, after the first round."""
    s = scaled(setting, FULL)
    if setting.rounds is None:
        s = replace(s, rounds=1)
    rows = []
    for deal in ("a0.5", "iid"):
        method = FedAPTA(ratios=RATIOS, local=recipe(s))
        made = Row(
            f"fedapta-first-resnet18-{deal}",
            "fedapta",
            experiment(setting, s, method, "resnet18", deal),
            panel=DEALT[deal],
        )
        rows.append(made)
    return Study(
        "FedAPTA, Figure 3",
        "How alike the updates of devices' last layers are, by four metrics.",
        tuple(rows),
        1,
        measures=("accuracy_tasks",),
        counted=("purity", "groups"),
        matrices=matrices,
        notes=(
            *notes(setting, s, "resnet18"),
            *replaced(setting),
            "Each matrix is divided by device 0's likeness to itself, as in the paper, which "
            "prints no numbers; L1 and L2 as 1 / (1 + distance): it does not say how. With more "
            "rounds (--rounds) the updates are the sums that fedapta compares.",
            GROUPS,
        ),
    )


# ---- tables of ours ------------------------------------------------------------------------------

MUST_SHOW = (
    "fedapta",
    "fedapta-mean",
    "fedapta-sum",
    "fedapta-uniform",
    "fedapta-paper",
    "local",
    "fedavg",
    "fedavg-tasks",
    "fedlps-tasks",
    "fedrolex-tasks",
)


def _ours(setting: Setting, names: Sequence[str], net: str) -> tuple[Scale, list[Row]]:
    s = scaled(setting, OURS)
    return s, [row(setting, s, name, net, "a0.5") for name in names]


def table_6(setting: Setting) -> Study:
    """What it is worth to find the tasks, with a small net."""
    s, rows = _ours(setting, MUST_SHOW, "cnn2")
    return Study(
        "FedAPTA, Table 6 (ours)",
        "Accuracy by task where the server must find the tasks, beside being told them, at "
        "Dirichlet 0.5.",
        tuple(rows),
        seeds(setting),
        measures=(*measures(setting), "accuracy_least"),
        counted=(*found(s), "mib_up", "mib_down"),
        notes=(
            *notes(setting, s, "cnn2"),
            "Ours: the paper's Table 6 lists related work.",
            SHARES,
            GROUPS,
            LITERAL,
            USED,
        ),
    )


def table_7(setting: Setting) -> Study:
    """How soon tasks are found."""
    s = scaled(setting, OURS)
    rows = []
    for deal in DEALS:
        for name in ("fedapta", "fedapta-sum", "fedapta-uniform", "fedapta-paper"):
            made = row(setting, s, name, "cnn2", deal)
            rows.append(replace(made, series=made.label, lead=False))
    at = [done for done in (1, 2, 3, 4, 5, 10, 20, 30) if done <= s.rounds]
    return Study(
        "FedAPTA, Table 7 (ours)",
        "Purity of the groups after each round.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_tasks",),
        counted=(*(f"purity@{done}" for done in at), f"groups@{at[-1]}"),
        drawn=("purity", "groups"),
        over_rounds=True,
        lines=True,
        notes=(
            *notes(setting, s, "cnn2"),
            "Ours. Rows of Table 6 are the same runs. Ratios 0, .2, .4, .6, .8 in turn.",
            GROUPS,
            LITERAL,
            USED,
        ),
    )


def table_8(setting: Setting) -> Study:
    """Table 6 with ResNet-18, one seed."""
    names = ("fedapta", "fedapta-sum", "local", "fedavg", "fedavg-tasks", "fedlps-tasks")
    s, rows = _ours(setting, (*names, "fedrolex-tasks"), "resnet18")
    return Study(
        "FedAPTA, Table 8 (ours)",
        "Table 6 with ResNet-18, one seed.",
        tuple(rows),
        1,
        measures=(*measures(setting), "accuracy_least"),
        counted=(*found(s), "mib_up", "mib_down"),
        notes=(*notes(setting, s, "resnet18"), "Ours.", SHARES, GROUPS, LITERAL, USED),
    )


THREE = "mnist+fashion-mnist+digits"
"""The tasks of our tables: all can be had here."""
ALL = "+".join(FIVE)
IN_ITS_PLACE = {
    ALL: "mnist+fashion-mnist+digits+cifar10+emnist",
    "mnist+fashion-mnist+digits+cifar10+emnist": "mnist+fashion-mnist+svhn+cifar10",
    "mnist+fashion-mnist+svhn+cifar10": "mnist+fashion-mnist+digits+cifar10",
}
"""Without SVHN, without EMNIST, without both."""


def _part(study: Callable[[Setting], Study], data: str) -> Part:
    return Part(
        (data,), study, "digits+digits:turned", IN_ITS_PLACE, any_length=True, any_start=True
    )


PAPER = Paper(
    "Z. Yu, Y. Yuan, J. Wang, Z. Cheng, J. Hu, FedAPTA: Federated Multi-task Learning for "
    "Heterogeneous Devices with Adaptive Layer-wise Pruning and Task-aware Aggregation (2025)",
    tables={
        3: _part(table_3, ALL),
        4: _part(table_4, ALL),
        5: DataTable(
            ("digits",),
            "FedAPTA, Table 5",
            "Parameters at each pruning ratio, the first quarter of the layers frozen.",
            parameters,
            notes=(
                "Counted as the paper does: weights of the trained convolutions, each with the "
                "channel that it makes. The net that is trained is smaller: a lost channel is not "
                "read either. Importance by mean, of initial weights. Nothing of the data enters.",
                "shufflenetv2: channels that are shuffled cannot be removed here (a third of the "
                "weights), and the ratio is of the others; the paper's are of all.",
            ),
            look="digits",
        ),
        6: _part(table_6, THREE),
        7: _part(table_7, THREE),
        8: _part(table_8, THREE),
    },
    figures={
        2: _part(figure_2, ALL),
        3: _part(figure_3, ALL),
    },
)
