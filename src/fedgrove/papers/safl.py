"""SAFL (Li, Wang, Du, Cai & Wang): Tables I to III and Figures 7 and 8, in 100 rounds of stage 2 where the paper runs
1000 (CIFAR-10) and 2000 (MNIST), and on 10,000 of CIFAR-10's images.

The paper's words are kept where its figures are typed (pruning rate, %); rows speak of density. ``local`` stands in no
table of the paper; nor does ``local-long``, which trains alone for as many epochs as SAFL takes in both stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..api import Experiment
from ..core import AnyMethod
from ..methods import SAFL, FedAvg, FedBN, Hermes, LGFedAvg, Local
from ..parts.local import SGD, LocalTraining
from .studies import Paper, Part, Row, Setting, Study

# ---- what the paper reports ----------------------------------------------------------------------------------------

COMPARED = {
    "cifar10": {"fedavg": 61.98, "lg-fedavg": 90.56, "fedbn": 92.61},
    "mnist": {"fedavg": 86.02, "lg-fedavg": 84.39, "fedbn": 70.13},
}
"""Tables I and II: accuracy in %."""
CLUSTERS = {
    "cifar10": {1: 93.02, 2: 93.04, 3: 93.16, 4: 93.26, 5: 93.29},
    "mnist": {1: 93.09, 2: 93.29},
}
"""Tables I and II: SAFL's accuracy in % at a pruning rate of .3, by the number of clusters."""
RATES = {
    "cifar10": {
        0.3: (93.29, 92.73), 0.4: (93.08, 92.58), 0.5: (92.32, 91.67), 0.6: (91.13, 82.12), 0.7: (89.85, 80.64),
    },
    "mnist": {0.3: (93.29, 90.65), 0.4: (92.45, 90.25), 0.6: (92.24, 89.35), 0.65: (91.54, 86.78)},
}  # fmt: skip
"""Table III: accuracy in % of SAFL and of Hermes by pruning rate, with 5 clusters (CIFAR-10) and 2 (MNIST)."""
SHARE = {"cifar10": (0.4, 40.06), "mnist": (0.6, 33.01)}
"""Figure 8: the pruning rate, and SAFL's communication in % of FedAvg's."""

# ---- how it was run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How much is run: the paper's setting in fewer rounds, or, for ``--quick``, enough to see that all parts work."""

    stage_2: int = 100
    guided: int = 50
    tune: int = 20
    curve: tuple[int, ...] = (10, 30, 100)
    lr: float = 0.005
    batch: int = 32


FULL = Scale()
QUICK = Scale(stage_2=2, guided=1, tune=1, curve=(1, 2), lr=0.05, batch=8)


@dataclass(frozen=True)
class Place:
    """The network and how a data set is dealt (section IV.B)."""

    net: str
    clients: int
    partition: str
    clusters: tuple[int, ...]
    rates: tuple[float, ...]


PLACES = {
    "cifar10": Place("bn-cnn4", 10, "shards:2:1000", (1, 5), (0.3, 0.5, 0.7)),
    "mnist": Place("bn-cnn2", 20, "classes:5:28", (1, 2), (0.3, 0.4, 0.6, 0.65)),
}
"""CIFAR-10: 1000 images of every class, two classes per client in unequal numbers. MNIST: 28 images of five classes, of
which 20 are for training."""
LOOK = Place("bn-cnn2", 4, "classes:3:12", (1, 2), (0.2, 0.5))


def scale(setting: Setting) -> Scale:
    """The paper's in fewer rounds, or a quick one."""
    return QUICK if setting.quick else FULL


def place(setting: Setting) -> Place:
    """Where it is run; other data are dealt as MNIST is."""
    return LOOK if setting.quick else PLACES.get(setting.data, PLACES["mnist"])


def recipe(setting: Setting) -> LocalTraining:
    """Section IV.C: SGD .005, 1 epoch; the paper gives no batch size."""
    s = scale(setting)
    return LocalTraining(1, s.batch, SGD(s.lr))


def hermes(setting: Setting, rate: float) -> Hermes:
    """Network slimming alone."""
    s = scale(setting)
    return Hermes(round(1 - rate, 6), guided=s.guided, tune=s.tune, local=recipe(setting))


def safl(setting: Setting, rate: float, clusters: int) -> SAFL:
    """Lambda 1e-4, mu .004, 50 epochs and then 20 (section IV.C)."""
    s = scale(setting)
    density = round(1 - rate, 6)
    return SAFL(density, clusters=clusters, guided=s.guided, tune=s.tune, local=recipe(setting))


def others(setting: Setting) -> dict[str, AnyMethod]:
    """The methods that do not prune, by the name of their row."""
    local = recipe(setting)
    return {
        "fedavg": FedAvg(local=local),
        "lg-fedavg": LGFedAvg(shared=1, local=local),
        "fedbn": FedBN(local=local),
    }


def experiment(setting: Setting, method: AnyMethod, stage_2: int | None = None) -> Experiment:
    """All clients take part; they are scored at the end only. FedAvg runs on the network without norm layers."""
    s, where = scale(setting), place(setting)
    pruning = len(method.schedule) if isinstance(method, SAFL | Hermes) else 0
    return Experiment(
        method,
        setting.data,
        net=f"{where.net}{',' if ':' in where.net else ':'}norm=none"
        if isinstance(method, FedAvg)
        else where.net,
        partition=where.partition,
        split=setting.split,
        clients=where.clients,
        cohort=where.clients,
        rounds=pruning + (s.stage_2 if stage_2 is None else stage_2),
        evaluate=0,
    )


def accuracy(percent: float | None) -> dict[str, float]:
    """A reported figure as a summary would have it."""
    return {} if percent is None else {"accuracy_mean:0": round(percent / 100, 6)}


def notes(setting: Setting) -> tuple[str, ...]:
    """What every table on these data must say."""
    s, where = scale(setting), place(setting)
    paper = {"cifar10": "1000 rounds on all images", "mnist": "2000 rounds"}.get(setting.data)
    told = (
        [f"{setting.data}: {s.stage_2} rounds of stage 2 where the paper runs {paper}."]
        if paper
        else []
    )
    quick = ["Quick: a few rounds of a few clients. No figure here says anything about a method."]
    pruning = len(safl(setting, where.rates[0], 1).schedule)
    epochs = f"{pruning} x {s.guided + s.tune} epochs of stage 1"
    return (
        *(quick if setting.quick else told),
        f"SAFL and Hermes train {epochs} at the first rate (more at higher ones) before the {s.stage_2} rounds of one "
        "epoch that the others train; local-long trains as long alone.",
        "The paper gives no batch size (ours is 32) and no widths; fedavg runs on the network without norm layers.",
    )


# ---- tables --------------------------------------------------------------------------------------------------------


def table_1(setting: Setting) -> Study:
    """All methods at the first rate; SAFL by its number of clusters."""
    where, printed = place(setting), CLUSTERS.get(setting.data, {})
    rate = where.rates[0]
    rows = [*_alone(setting, rate), *_dense(setting), _hermes(setting, rate)]
    for k in where.clusters:
        name, method = f"safl-k{k}", safl(setting, rate, k)
        label = f"safl, K = {k}"
        rows.append(
            Row(name, label, experiment(setting, method), accuracy(printed.get(k)), lead=True)
        )
    number = "II" if setting.data == "mnist" else "I"
    return Study(
        f"SAFL, Table {number}",
        f"Accuracy of all methods, {scale(setting).stage_2} rounds of stage 2, density {1 - rate:g} where a method "
        "prunes; K clusters.",
        tuple(rows),
        seeds(setting),
        notes=(*notes(setting), "local and local-long stand in no row of the paper's table."),
    )


def _alone(setting: Setting, rate: float) -> Iterator[Row]:
    """Training alone, and for as many epochs as SAFL trains in both stages."""
    s, method = scale(setting), Local(local=recipe(setting))
    yield Row("local", "local", experiment(setting, method))
    longer = s.stage_2 + len(safl(setting, rate, 1).schedule) * (s.guided + s.tune)
    yield Row("local-long", f"local, {longer} epochs", experiment(setting, method, longer))


def _dense(setting: Setting) -> Iterator[Row]:
    printed = COMPARED.get(setting.data, {})
    for name, method in others(setting).items():
        yield Row(name, name, experiment(setting, method), accuracy(printed.get(name)))


def _hermes(setting: Setting, rate: float) -> Row:
    printed = RATES.get(setting.data, {}).get(rate)
    return Row(
        "hermes",
        "hermes",
        experiment(setting, hermes(setting, rate)),
        accuracy(printed and printed[1]),
    )


def table_3(setting: Setting) -> Study:
    """SAFL and Hermes by rate; the paper has SAFL with its largest number of clusters only."""
    where, rows = place(setting), list[Row]()
    for rate in where.rates:
        printed = RATES.get(setting.data, {}).get(rate)
        panel = f"density {1 - rate:g}"
        asked = experiment(setting, hermes(setting, rate))
        rows.append(
            Row(f"hermes-{rate:g}", "hermes", asked, accuracy(printed and printed[1]), panel=panel)
        )
        for k in where.clusters:
            asked = experiment(setting, safl(setting, rate, k))
            reported = accuracy(printed and printed[0]) if k == where.clusters[-1] else {}
            rows.append(
                Row(
                    f"safl-k{k}-{rate:g}", f"safl, K = {k}", asked, reported, panel=panel, lead=True
                )
            )
    return Study(
        "SAFL, Table III",
        f"SAFL beside Hermes, by density; K clusters, {scale(setting).stage_2} rounds of stage 2.",
        tuple(rows),
        seeds(setting),
        notes=notes(setting),
    )


def seeds(setting: Setting) -> int:
    """Three, as the differences of the table ask for at least."""
    return 1 if setting.quick else 3


# ---- figures -------------------------------------------------------------------------------------------------------


def figure_7(setting: Setting) -> Study:
    """Training curves: a run of its own for each length, which is the beginning of the longer ones."""
    where, rows = place(setting), list[Row]()
    rate, k = where.rates[0], where.clusters[-1]
    methods = {**others(setting), "hermes": hermes(setting, rate), "safl": safl(setting, rate, k)}
    for name, method in methods.items():
        for x in scale(setting).curve:
            asked = experiment(setting, method, x)
            rows.append(
                Row(
                    f"{name}-{x}",
                    f"{name}, {x} rounds",
                    asked,
                    panel="rounds of stage 2",
                    x=x,
                    series=name,
                )
            )
    return Study(
        "SAFL, Figure 7",
        f"Accuracy by rounds of stage 2; density {1 - rate:g} and {k} clusters where a method has these.",
        tuple(rows),
        1,
        drawn=("accuracy_mean",),
        lines=True,
        notes=(*notes(setting), "The paper prints no numbers of this figure."),
    )


def figure_8(setting: Setting) -> Study:
    """Accuracy against what is sent."""
    where = place(setting)
    rate, share = SHARE.get(setting.data, (where.rates[-1], None))
    printed = RATES.get(setting.data, {}).get(rate)
    method = safl(setting, rate, where.clusters[-1])
    ours = Row(
        "safl", "safl", experiment(setting, method), accuracy(printed and printed[0]), lead=True
    )
    said = (
        ""
        if share is None
        else f" The paper counts {share} % of FedAvg's bytes for SAFL, in its number of rounds."
    )
    return Study(
        "SAFL, Figure 8",
        f"Accuracy beside bytes at density {1 - rate:g}; counted: SAFL's own formula with the size of an "
        "evenly slimmed network.",
        (*_dense(setting), _hermes(setting, rate), ours),
        seeds(setting),
        notes=(
            *notes(setting),
            f"Neither reading of its sizes reproduces the paper's share.{said}",
        ),
    )


PAPER = Paper(
    "Li, Wang, Du, Cai & Wang, SAFL: Structure-Aware Personalized Federated Learning via Client-Specific Clustering "
    "and SCSI-Guided Model Pruning",
    {
        1: Part(("cifar10",), table_1, "digits"),
        2: Part(("mnist",), table_1, "digits"),
        3: Part(("cifar10", "mnist"), table_3, "digits"),
    },
    {
        7: Part(("cifar10", "mnist"), figure_7, "digits"),
        8: Part(("cifar10", "mnist"), figure_8, "digits"),
    },
)
