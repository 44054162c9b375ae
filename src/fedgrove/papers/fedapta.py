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

from .. import methods as library
from ..config.experiment import Experiment, with_settings
from ..core import AnyMethod
from ..data.several import is_several, tasks_of
from ..methods import FedAPTA, FedAvg, FedLPS, FedRolex, Local
from ..methods.fedapta import PRESETS
from ..parts.channel_rules import LayerwiseL1, UniformL1
from ..parts.local import SGD, LocalTraining
from .beside import ON_TASK
from .studies import Paper, Part, Row, Setting, Study

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


def methods(s: Scale) -> dict[str, AnyMethod]:
    """The methods that are compared, by the name of their row; FedAPTA's variants first."""
    local = recipe(s)
    whole = FedAPTA(ratios=RATIOS, local=local)
    compared: dict[str, AnyMethod] = {
        "fedapta": whole,
        "fedapta-sum": replace(whole, prune=LayerwiseL1(importance="sum")),
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
    "fedapta-sum": "fedapta, importance by sum",
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
        f"{number} tasks of {s.devices} devices each, all in every round; {s.rounds} rounds of "
        f"{s.epochs} epochs, SGD {s.lr:g} x .998^round, weight decay 1e-3, gradients clipped at "
        f"10, batch {s.batch}; {LOOK if setting.quick else NETS[net]}; {dealt} of a set are dealt."
    )
    ratios = ", ".join(f"{ratio:g}" for ratio in RATIOS)
    lines.append(
        f"fedapta, fedlps and fedrolex: ratios {ratios} in turn; the other methods train the "
        "whole net on all devices."
    )
    if setting.init:
        lines.append(f"Started from {setting.init}; the first quarter of the layers is frozen.")
    else:
        lines.append(
            "From scratch, nothing frozen (the paper: weights of ImageNet, the first quarter "
            "frozen), and so fedlps without its frozen encoder."
        )
    return lines


GROUPS = (
    "purity: the share of devices whose task is that of most of their group; no method is told the "
    "tasks, but for those per true task. A group of one is pure: see how many groups there are."
)
USED = (
    "Devices are scored with what they would use: of fedlps their own narrow models, of fedapta "
    "and fedrolex the whole model of their group."
)
LITERAL = (
    "fedapta: our defaults, without FedDC's drift, importance by mean; fedapta:paper: this "
    "round's updates alone and with the drift."
)


# ---- tables of ours ------------------------------------------------------------------------------

MUST_SHOW = (
    "fedapta",
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
            "Ours. Rows of Table 6 are the same runs.",
            GROUPS,
            LITERAL,
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
        notes=(*notes(setting, s, "resnet18"), "Ours.", GROUPS, LITERAL, USED),
    )


THREE = "mnist+fashion-mnist+digits"
"""The tasks of our tables: all can be had here."""


def _part(study: Callable[[Setting], Study], *data: str) -> Part:
    return Part(data, study, "digits+digits:turned", any_length=True)


PAPER = Paper(
    "Z. Yu, Y. Yuan, J. Wang, Z. Cheng, J. Hu, FedAPTA: Federated Multi-task Learning for "
    "Heterogeneous Devices with Adaptive Layer-wise Pruning and Task-aware Aggregation (2025)",
    tables={
        6: _part(table_6, THREE),
        7: _part(table_7, THREE),
        8: _part(table_8, THREE),
    },
    figures={},
)
