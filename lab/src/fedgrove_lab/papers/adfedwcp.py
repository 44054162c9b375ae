"""AdFedWCP (anonymous, "Adaptive Weight Clustering Pruning"): Tables 1 to 11, Figures 2 and 3.

Rows, seeds and scoring are fixed here, before anything is run. Clients are scored after every round
with the model they would use, on their own held-out data. Rows of one name and one data set are the
same runs in all parts, so that a run folder may be copied from one to another.

Where the files of EMNIST are not found, Fashion-MNIST takes its place, and the table says so. Table
12 is ours: what clustering costs beside training, of which Appendices B and C have no table.
These stand in no table of the paper either: ``local``; layers weighed by magnitude and by gradient
(Table 5); the moving pull (Table 8); memory and speed as limits (Table 11); other methods by
bandwidth (Figure 3).
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedgrove.config.experiment import Experiment
from fedgrove.core import REFERENCE_GMACS, AnyMethod
from fedgrove.data import Federation
from fedgrove.data.sets import SETS
from fedgrove.engines.work import perform
from fedgrove.methods import (
    AdFedWCP,
    FedAvg,
    FedEM,
    FedKD,
    FedMask,
    FedWCP,
    Local,
    PFedGate,
    QFedCG,
)
from fedgrove.methods.adfedwcp import kmeans
from fedgrove.methods.adfedwcp.anneal import AnnealedPull
from fedgrove.methods.adfedwcp.centroids import Adaptive
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.run import Run
from fedgrove.runs.store import Memory

from .data_table import DataTable, Fact
from .studies import Paper, Part, Row, Setting, Study

# ---- what the paper reports ----------------------------------------------------------------------

ALPHAS = (0.1, 0.4, 1.0)
"""Of the Dirichlet distribution that shares out the classes."""
MIDDLE = 0.4
"""The alpha of all parts but Table 6."""
TABLES_1_AND_3 = {
    "cifar10": {
        "fedavg": 60.64,
        "fedem": 62.19,
        "qfedcg": 52.45,
        "fedmask": 48.05,
        "pfedgate": 60.36,
        "fedwcp-8": 60.56,
        "fedwcp-16": 61.96,
        "fedwcp-32": 63.38,
        "fedwcp-none": 63.66,
        "adfedwcp": 61.04,
    },
    "emnist": {
        "fedavg": 81.83,
        "fedem": 84.35,
        "qfedcg": 80.24,
        "fedmask": 63.33,
        "pfedgate": 82.11,
        "fedwcp-8": 83.89,
        "fedwcp-16": 85.46,
        "fedwcp-32": 85.93,
        "fedwcp-none": 85.99,
        "adfedwcp": 85.12,
    },
    "cifar100": {
        "fedavg": 18.75,
        "fedem": 22.39,
        "qfedcg": 13.50,
        "fedmask": 11.31,
        "pfedgate": 12.40,
        "fedwcp-8": 19.84,
        "fedwcp-16": 20.36,
        "fedwcp-32": 20.96,
        "fedwcp-none": 22.72,
        "adfedwcp": 20.44,
    },
}
"""Accuracy in %."""
TABLES_2_AND_4 = {
    "emnist": {
        "fedavg": 0.0,
        "qfedcg": 87.50,
        "fedmask": 50.00,
        "pfedgate": 23.42,
        "fedwcp-8": 90.53,
        "fedwcp-16": 87.41,
        "fedwcp-32": 84.29,
        "fedwcp-none": 0.0,
        "adfedwcp": 87.54,
        "fedkd": 73.18,
    },
    "cifar10": {
        "fedavg": 0.0,
        "qfedcg": 87.50,
        "fedmask": 50.00,
        "pfedgate": 23.18,
        "fedwcp-8": 90.50,
        "fedwcp-16": 87.36,
        "fedwcp-32": 84.21,
        "fedwcp-none": 0.0,
        "adfedwcp": 87.82,
    },
}
"""How much less than a dense uplink is counted, in % (FedKD's is Table 10's)."""
TABLE_5 = {"adfedwcp-alike": (85.02, 97.29), "adfedwcp": (85.12, 87.54)}
"""EMNIST: accuracy and reduction in %. The text calls the second reduction the higher one, so the
first is probably 87.29."""
TABLE_6 = {
    "cifar10": {
        "fedavg": (52.91, 60.64, 63.57),
        "fedem": (60.44, 62.19, 65.01),
        "qfedcg": (47.79, 52.45, 62.32),
        "fedmask": (40.07, 48.05, 70.13),
        "pfedgate": (53.39, 60.36, 70.42),
        "fedwcp-8": (52.97, 60.56, 67.71),
        "fedwcp-16": (55.16, 61.96, 69.88),
        "fedwcp-32": (58.09, 63.58, 71.57),
        "fedwcp-none": (59.16, 63.66, 71.54),
        "adfedwcp": (54.48, 61.04, 68.86),
    },
    "emnist": {
        "fedavg": (68.68, 81.83, 83.79),
        "fedem": (77.55, 84.35, 85.30),
        "qfedcg": (51.71, 80.24, 75.94),
        "fedmask": (55.51, 63.33, 78.92),
        "pfedgate": (81.12, 82.11, 84.08),
        "fedwcp-8": (79.37, 83.89, 89.79),
        "fedwcp-16": (82.37, 85.46, 91.61),
        "fedwcp-32": (83.01, 85.93, 92.08),
        "fedwcp-none": (84.73, 85.99, 93.29),
        "adfedwcp": (82.00, 85.12, 90.28),
    },
    "cifar100": {
        "fedavg": (12.36, 18.75, 26.48),
        "fedem": (20.92, 22.39, 28.58),
        "qfedcg": (9.64, 13.50, 15.92),
        "fedmask": (7.54, 11.31, 21.97),
        "pfedgate": (12.87, 13.50, 21.01),
        "fedwcp-8": (12.01, 19.84, 36.29),
        "fedwcp-16": (12.53, 20.36, 37.73),
        "fedwcp-32": (13.91, 20.96, 38.89),
        "fedwcp-none": (16.45, 22.72, 39.25),
        "adfedwcp": (13.10, 20.44, 39.19),
    },
}
"""Accuracy in % at the three alphas; two figures differ from Tables 1 and 3 (63.58, 13.50)."""
TABLE_7 = {
    "emnist": {
        "fedmask": 50.00,
        "pfedgate": 23.42,
        "fedwcp-8": 22.79,
        "fedwcp-16": 12.27,
        "fedwcp-32": 5.82,
        "adfedwcp": 39.56,
    },
    "cifar10": {
        "fedmask": 50.00,
        "pfedgate": 23.18,
        "fedwcp-8": 58.99,
        "fedwcp-16": 44.70,
        "fedwcp-32": 29.38,
        "adfedwcp": 54.19,
    },
}
"""Sparsity at the end, in %."""
TABLE_8 = {0.1: 82.36, 0.45: 70.26, 0.8: 64.70, None: 85.12}
"""EMNIST: accuracy in % by a fixed lambda; None: annealed."""
TABLE_9 = {
    (0.1, 1.5): (85.12, 87.54),
    (0.5, 1.5): (84.96, 87.47),
    (1.0, 1.5): (85.00, 87.30),
    (0.1, 1.0): (84.96, 87.55),
    (0.5, 1.0): (84.95, 87.60),
    (1.0, 1.0): (84.92, 87.59),
    (0.1, 0.5): (84.98, 87.61),
    (0.5, 0.5): (85.02, 87.65),
    (1.0, 0.5): (84.79, 87.66),
}
"""EMNIST: accuracy and reduction in % by xi and zeta."""
TABLE_10 = {"fedkd": (84.06, 73.18), "adfedwcp": (85.12, 87.54)}
"""EMNIST: accuracy and reduction in %."""
TABLE_11 = {
    "adfedwcp-without-lower": (78.27, 90.53),
    "adfedwcp-without-upper": (85.12, 87.37),
    "adfedwcp": (85.12, 87.54),
}
"""EMNIST: accuracy and reduction in %."""
LOWEST_BAND = 86.55
"""Figure 3, section E.7: accuracy in % of the clients with 5 to 24 Mbit/s; all groups are said to
lie less than 1.5 points apart."""
BANDS = ((5, 24), (24, 43), (43, 62), (62, 81), (81, 100))
"""Figure 3: groups of clients by bandwidth, Mbit/s."""
TRAINING_OVER_CLUSTERING = (20.38, 6.79)
"""Appendix B (by its formula: N 2174, E 1, T 10, k 32) and Appendix C (no setting given)."""

# ---- how it was run ------------------------------------------------------------------------------

COMPARED = ("local", "fedavg", "fedem", "qfedcg", "fedmask", "pfedgate", "adfedwcp")
"""Table 1, and ``local``."""
OURS = ("local", "fedavg", "fedwcp-8", "fedwcp-16", "fedwcp-32", "fedwcp-none", "adfedwcp")
"""Tables 3 and 4, and what they are laid against."""


@dataclass(frozen=True)
class Scale:
    """How much is run: the paper's setting (section 5.4) or, for ``--quick``, only a look."""

    rounds: int = 100
    batch: int = 64
    lr: float = 1e-3


FULL = Scale()
QUICK = Scale(rounds=2, batch=16, lr=5e-3)


@dataclass(frozen=True)
class Place:
    """The network and the number of clients, all of whom take part (section 5.4)."""

    net: str | None
    clients: int | None


LEAF = Place("leafcnn", 100)
PLACES = {
    "cifar10": Place("lenet", 100),
    "cifar100": Place("lenet", 50),
    "emnist": LEAF,
    "emnist:byclass": LEAF,
    "fashion-mnist": LEAF,
    "mnist": LEAF,
    "motion": Place("har-cnn", 24),
}
OWN = Place(None, None)
"""Other data are run as they are by default."""
LOOK = Place("mlp:hidden=16", 4)
STANDS_FOR = {"fashion-mnist": "emnist"}
"""Data in the place of others, whose figures stand beside."""
PRINTED_AS = {**STANDS_FOR, "emnist:byclass": "emnist"}
"""The paper says EMNIST and counts 47 classes; the authors' code loads byclass, with 62."""
PROFILE = "adfedwcp"
"""One bandwidth per client, normal around 52.5 Mbit/s, clipped to 5 and 100."""


def scale(setting: Setting) -> Scale:
    """The paper's, or a quick one; as many rounds as were asked for."""
    s = QUICK if setting.quick else FULL
    return s if setting.rounds is None else replace(s, rounds=setting.rounds)


def place(setting: Setting) -> Place:
    """Where it is run."""
    return LOOK if setting.quick else PLACES.get(setting.data, OWN)


def printed_in(setting: Setting) -> str:
    """The data set whose figures the paper prints."""
    return PRINTED_AS.get(setting.data, setting.data)


def recipe(setting: Setting) -> LocalTraining:
    """Adam 1e-3, one epoch, batches of 64: the authors' code, where the paper says nothing."""
    s = scale(setting)
    return LocalTraining(1, s.batch, Adam(s.lr))


def methods(setting: Setting) -> dict[str, AnyMethod]:
    """The methods that are compared, by the name of their row."""
    local = recipe(setting)
    compared: dict[str, AnyMethod] = {"local": Local(local=local), "fedavg": FedAvg(local=local)}
    compared["fedem"] = FedEM(local=local)
    compared["qfedcg"] = QFedCG(local=local)
    compared["fedmask"] = FedMask(local=local)
    compared["pfedgate"] = PFedGate(local=local)
    # All clients take part in every round; so the authors score the models that stay with them.
    compared["fedkd"] = FedKD(use_mentor=True, local=local)
    for k in (8, 16, 32):
        compared[f"fedwcp-{k}"] = FedWCP(k=k, local=local)
        compared[f"fedwcp-{k}-zeroed"] = FedWCP(k=k, returns=False, local=local)
    compared["fedwcp-none"] = FedWCP(k=0, local=local)
    compared["adfedwcp"] = AdFedWCP(local=local)
    compared["adfedwcp-zeroed"] = AdFedWCP(returns=False, local=local)
    return compared


LABELS = {
    "fedwcp-8": "fedwcp, k = 8",
    "fedwcp-16": "fedwcp, k = 16",
    "fedwcp-32": "fedwcp, k = 32",
    "fedwcp-none": "fedwcp, no clustering",
    "fedwcp-8-zeroed": "fedwcp, k = 8, zeroed",
    "fedwcp-16-zeroed": "fedwcp, k = 16, zeroed",
    "fedwcp-32-zeroed": "fedwcp, k = 32, zeroed",
    "adfedwcp-zeroed": "adfedwcp, zeroed",
    "adfedwcp-alike": "adfedwcp, layers alike",
    "adfedwcp-magnitude": "adfedwcp, by magnitude",
    "adfedwcp-gradient": "adfedwcp, by gradient",
    "adfedwcp-moving": "adfedwcp, moving pull",
    "adfedwcp-without-lower": "adfedwcp, no lower bound",
    "adfedwcp-without-upper": "adfedwcp, no upper bound",
}


def is_natural(setting: Setting) -> bool:
    """Whether the clients are the data's own users, so that no alpha deals them."""
    known = SETS.get(setting.data)
    return known is not None and known.partition == "natural" and not setting.quick


def alphas(setting: Setting) -> tuple[float, ...]:
    """Those of Table 6; one where clients are users."""
    return (MIDDLE,) if is_natural(setting) else ALPHAS


def experiment(setting: Setting, method: AnyMethod, alpha: float, profile: str) -> Experiment:
    """A run in which all clients take part, scored after every round."""
    where = place(setting)
    return Experiment(
        method,
        setting.data,
        net=where.net,
        partition=None if is_natural(setting) else f"dirichlet:{alpha:g}",
        split=setting.split,
        validation=0,
        clients=where.clients,
        cohort=where.clients,
        rounds=scale(setting).rounds,
        profile=profile,
        evaluate=1,
    )


def row(
    setting: Setting,
    name: str,
    method: AnyMethod,
    reported: Mapping[str, float] | None = None,
    alpha: float = MIDDLE,
    profile: str = PROFILE,
) -> Row:
    """A line of a table; its name tells the alpha, so that all parts may share runs."""
    ending = "" if profile == PROFILE else f"-{profile}"
    return Row(
        f"{name}-a{alpha:g}{ending}",
        LABELS.get(name, name),
        experiment(setting, method, alpha, profile),
        reported or {},
        lead=name == "adfedwcp",
    )


def rows_of(
    setting: Setting, names: Sequence[str], reported: Mapping[str, Mapping[str, float]]
) -> list[Row]:
    """Lines of these methods, in this order."""
    known = methods(setting)
    return [row(setting, name, known[name], reported.get(name)) for name in names]


def accuracy(percent: float) -> dict[str, float]:
    """A reported accuracy, as a summary would have it."""
    # Rounded, because 85.12 / 100 is 0.8512000000000001.
    return {"accuracy_mean:0": round(percent / 100, 6)}


def accuracies(printed: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Reported accuracies by row."""
    return {name: accuracy(percent) for name, percent in printed.items()}


def both(printed: Mapping[str, tuple[float, float]]) -> dict[str, dict[str, float]]:
    """Reported accuracies and reductions by row."""
    found = {}
    for name, (percent, reduction) in printed.items():
        found[name] = {**accuracy(percent), "less_counted": reduction}
    return found


def seeds(setting: Setting) -> int:
    """Three; the paper names no number."""
    return 1 if setting.quick else 3


MEASURES = ("accuracy_mean", "accuracy_std", "accuracy_worst")
SENT = ("less_counted", "less_up", "less_down", "mib_up", "mib_down")
"""The uplink by the paper's formula; what was really sent, each way."""
COUNTED = (*SENT, "density_end", "virtual_seconds", "seconds_to_all")


def notes(setting: Setting) -> list[str]:
    """What each part on these data must say."""
    s = scale(setting)
    where = place(setting)
    lines = []
    if setting.quick:
        lines.append(
            "Quick: a few rounds of a few clients. No figure here says anything about a method."
        )
    elif setting.data in STANDS_FOR:
        stands_for = STANDS_FOR[setting.data].upper()
        lines.append(
            f"{setting.data} stands in the place of {stands_for}: the paper's figures beside it "
            f"are of {stands_for}. Compare the order of the rows and the gaps between them."
        )
    clients = where.clients or "all"
    lines.append(
        f"{setting.data}: {clients} clients, all in every round; {s.rounds} rounds (authors' code: "
        f"{FULL.rounds}) of one epoch; {where.net or 'its default net'}. Bandwidths are normal "
        "around 52.5 Mbit/s, from 5 to 100."
    )
    return lines


COUNTS = (
    "less up, counted: by the paper's formula, one direction, at the centroids that each client "
    "had; sent: real messages with entropy coding, each against 4 bytes per parameter."
)
PERSONAL = (
    "local and fedwcp without clustering show what of the accuracy is the personal models' own."
)

# ---- tables --------------------------------------------------------------------------------------


def table_1(setting: Setting) -> Study:
    """Accuracy beside the methods of other papers."""
    printed = TABLES_1_AND_3.get(printed_in(setting), {})
    return Study(
        "AdFedWCP, Table 1",
        f"Accuracy beside other methods at Dirichlet {MIDDLE:g}.",
        tuple(rows_of(setting, COMPARED, accuracies(printed))),
        seeds(setting),
        measures=MEASURES,
        counted=COUNTED,
        notes=(*notes(setting), "local stands in no row of the paper's table.", COUNTS),
    )


def table_2(setting: Setting) -> Study:
    """What the methods of Table 1 send."""
    names = [name for name in COMPARED if name != "local"]
    return Study(
        "AdFedWCP, Table 2",
        f"How much less is sent than by fedavg, at Dirichlet {MIDDLE:g}.",
        tuple(rows_of(setting, names, _reductions(setting))),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=(*SENT, "virtual_seconds"),
        notes=(*notes(setting), COUNTS),
    )


def _reductions(setting: Setting) -> dict[str, dict[str, float]]:
    printed = TABLES_2_AND_4.get(printed_in(setting), {})
    return {name: {"less_counted": percent} for name, percent in printed.items()}


def table_3(setting: Setting) -> Study:
    """Fixed numbers of centroids, none, and adaptive ones."""
    printed = TABLES_1_AND_3.get(printed_in(setting), {})
    return Study(
        "AdFedWCP, Table 3",
        f"Accuracy by the number of centroids at Dirichlet {MIDDLE:g}.",
        tuple(rows_of(setting, OURS, accuracies(printed))),
        seeds(setting),
        measures=MEASURES,
        counted=COUNTED,
        notes=(
            *notes(setting),
            "local and fedavg stand in no row of the paper's table.",
            PERSONAL,
            COUNTS,
        ),
    )


def table_4(setting: Setting) -> Study:
    """What the rows of Table 3 send, and how long a round takes here."""
    names = [name for name in OURS if name not in ("local", "fedavg")]
    return Study(
        "AdFedWCP, Table 4",
        f"How much less is sent by the number of centroids, at Dirichlet {MIDDLE:g}.",
        tuple(rows_of(setting, names, _reductions(setting))),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=(*SENT, "centroids", "virtual_seconds", "seconds_round"),
        notes=(
            *notes(setting),
            COUNTS,
            "s a round, here: real time on this machine for all clients together, with clustering, "
            "coding and scoring, which runs in lockstep share; Table 12 has the clustering of one "
            "client alone.",
        ),
    )


def table_5(setting: Setting) -> Study:
    """What layers are weighed by."""
    whole = AdFedWCP(local=recipe(setting))
    ways = {
        "adfedwcp-alike": replace(whole, importance="alike"),
        "adfedwcp-magnitude": replace(whole, importance="magnitude"),
        "adfedwcp-gradient": replace(whole, importance="gradient"),
        "adfedwcp": whole,
    }
    reported = both(TABLE_5) if printed_in(setting) == "emnist" else {}
    rows = [row(setting, name, method, reported.get(name)) for name, method in ways.items()]
    return Study(
        "AdFedWCP, Table 5",
        f"What layers are weighed by, at Dirichlet {MIDDLE:g}: nothing, their weights, weight "
        "times gradient, imprinting (adfedwcp).",
        tuple(rows),
        seeds(setting),
        measures=MEASURES,
        counted=(*SENT, "centroids", "density_end", "virtual_seconds"),
        notes=(
            *notes(setting),
            "magnitude and gradient are ours. The paper prints a reduction of 97.29 % for layers "
            "alike and calls it the lower one: probably 87.29.",
            COUNTS,
        ),
    )


def table_6(setting: Setting) -> Study:
    """All methods at three degrees of heterogeneity."""
    printed = TABLE_6.get(printed_in(setting), {})
    names = list(dict.fromkeys([*COMPARED[:-1], *OURS]))
    known = methods(setting)
    rows = []
    for alpha in alphas(setting):
        for name in names:
            reported = {}
            if name in printed:
                reported = accuracy(printed[name][ALPHAS.index(alpha)])
            made = row(setting, name, known[name], reported, alpha)
            panel = "users" if is_natural(setting) else f"Dirichlet {alpha:g}"
            rows.append(replace(made, panel=panel))
    return Study(
        "AdFedWCP, Table 6",
        "Accuracy of all methods; a smaller alpha of the Dirichlet distribution makes clients less "
        "alike.",
        tuple(rows),
        seeds(setting),
        measures=MEASURES,
        counted=COUNTED,
        notes=(*notes(setting), "local stands in no row of the paper's table.", PERSONAL, COUNTS),
    )


def table_7(setting: Setting) -> Study:
    """How sparse the models are that clients use at the end."""
    printed = TABLE_7.get(printed_in(setting), {})
    reported = {}
    for name, percent in printed.items():
        reported[name] = {"density_end": round(1 - percent / 100, 6)}
    for name in ("fedwcp-8", "fedwcp-16", "fedwcp-32", "adfedwcp"):
        if name in reported:
            reported[f"{name}-zeroed"] = reported[name]
    names = (
        *("fedmask", "pfedgate", "fedwcp-8", "fedwcp-16", "fedwcp-32", "adfedwcp"),
        *("fedwcp-8-zeroed", "fedwcp-16-zeroed", "fedwcp-32-zeroed", "adfedwcp-zeroed"),
    )
    return Study(
        "AdFedWCP, Table 7",
        f"The kept share of the weights at the end, at Dirichlet {MIDDLE:g}.",
        tuple(rows_of(setting, names, reported)),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=("density_end", "density_run", "mib_up", "mib_down", "virtual_seconds"),
        notes=(
            *notes(setting),
            "The paper prints sparsities, 100 % less the density. Its clients zero pruned weights "
            "before every batch, so that they stay near 0, and it took the mean over layers "
            "(authors' code); ours keep their values, as its Algorithm 1 says. zeroed: they begin "
            "at 0 in the next round. Of pFedGate it prints the same figure as a reduction.",
        ),
    )


def table_8(setting: Setting) -> Study:
    """The weight of the pull."""
    whole = AdFedWCP(local=recipe(setting))
    on_emnist = printed_in(setting) == "emnist"
    rows = []
    for weight, percent in TABLE_8.items():
        reported = accuracy(percent) if on_emnist else {}
        name = "adfedwcp"
        label = "annealed"
        if weight is not None:
            name = f"adfedwcp-pull{weight:g}"
            label = f"lambda = {weight:g}"
        made = row(setting, name, replace(whole, pull=AnnealedPull(fixed=weight)), reported)
        rows.append(replace(made, label=label))
    moving = replace(whole, pull=AnnealedPull(pull="moving"))
    rows.append(replace(row(setting, "adfedwcp-moving", moving), label="annealed, moving"))
    return Study(
        "AdFedWCP, Table 8",
        f"The weight lambda of the pull to the shared model, at Dirichlet {MIDDLE:g}.",
        tuple(rows),
        seeds(setting),
        measures=MEASURES,
        counted=("density_end", "mib_up", "mib_down", "virtual_seconds"),
        notes=(
            *notes(setting),
            "moving: towards the shared model from where the model is now (its Appendix D.1); the "
            "others pull along a vector that is fixed in a round. It stands in no row of the "
            "paper's table.",
        ),
    )


def table_9(setting: Setting) -> Study:
    """How fast the lower bound follows the accuracy."""
    whole = AdFedWCP(local=recipe(setting))
    default = Adaptive()
    on_emnist = printed_in(setting) == "emnist"
    rows = []
    for (xi, zeta), (percent, reduction) in TABLE_9.items():
        reported = {**accuracy(percent), "less_counted": reduction} if on_emnist else {}
        is_default = (xi, zeta) == (default.xi, default.zeta)
        name = "adfedwcp" if is_default else f"adfedwcp-xi{xi:g}-zeta{zeta:g}"
        method = replace(whole, allocation=Adaptive(xi=xi, zeta=zeta))
        made = row(setting, name, method, reported)
        rows.append(replace(made, label=f"xi = {xi:g}, zeta = {zeta:g}"))
    return Study(
        "AdFedWCP, Table 9",
        f"How the numbers of centroids follow the accuracy, at Dirichlet {MIDDLE:g}: xi where it "
        "rises, zeta where it falls.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=(*SENT, "centroids", "virtual_seconds"),
        notes=(*notes(setting), COUNTS),
    )


def table_10(setting: Setting) -> Study:
    """Beside FedKD."""
    reported = both(TABLE_10) if printed_in(setting) == "emnist" else {}
    return Study(
        "AdFedWCP, Table 10",
        f"Beside FedKD, at Dirichlet {MIDDLE:g}.",
        tuple(rows_of(setting, ("local", "fedkd", "adfedwcp"), reported)),
        seeds(setting),
        measures=MEASURES,
        counted=COUNTED,
        notes=(*notes(setting), "local stands in no row of the paper's table.", COUNTS),
    )


def table_11(setting: Setting) -> Study:
    """The bounds of the numbers of centroids, and ours on devices that differ in all."""
    whole = AdFedWCP(local=recipe(setting))
    reported = both(TABLE_11) if printed_in(setting) == "emnist" else {}
    bounds = {
        "adfedwcp-without-lower": Adaptive(lower=False),
        "adfedwcp-without-upper": Adaptive(upper=False),
        "adfedwcp": Adaptive(),
    }
    rows = []
    for name, bound in bounds.items():
        made = row(setting, name, replace(whole, allocation=bound), reported.get(name))
        rows.append(replace(made, panel="bandwidths of the paper"))
    limits = {
        "adfedwcp": ("bandwidth", Adaptive()),
        "adfedwcp-memory": ("bandwidth and memory", Adaptive(memory=True)),
        "adfedwcp-speed": ("bandwidth and speed", Adaptive(speed=True)),
        "adfedwcp-all": ("bandwidth, memory and speed", Adaptive(memory=True, speed=True)),
    }
    for name, (label, bound) in limits.items():
        method = replace(whole, allocation=bound)
        made = row(setting, name, method, profile="phones")
        rows.append(replace(made, label=label, panel="phones"))
    return Study(
        "AdFedWCP, Table 11",
        f"Without one of the bounds of the numbers of centroids, at Dirichlet {MIDDLE:g}; on "
        "phones, what limits them from above.",
        tuple(rows),
        seeds(setting),
        measures=MEASURES,
        counted=(*SENT, "centroids", "density_end", "virtual_seconds"),
        notes=(
            *notes(setting),
            "phones: devices that differ in bandwidth, memory and speed alike (three kinds); the "
            "paper names memory and compute as what it leaves out, and has no such rows.",
            COUNTS,
        ),
    )


# ---- what clustering costs -----------------------------------------------------------------------

TIMED_CLIENTS = 5
TIMES = 3
K = 32
"""The paper's worst case."""


def clustering(name: str, federation: Federation) -> list[Fact]:
    """One client after another on this machine's CPU: its round without clustering, and with."""
    where = PLACES.get(name, LOOK)
    local = LocalTraining(1, FULL.batch, Adam(FULL.lr))
    timed: list[AnyMethod] = [
        FedWCP(k=0, local=local),
        FedWCP(k=K, local=local),
        AdFedWCP(local=local),
    ]
    clients = list(federation.ids)[:TIMED_CLIENTS]
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for i, method in enumerate(timed):
            asked = Experiment(method, federation, net=where.net, rounds=1)
            runs.append(asked.build(federation, Memory(Path(folder) / str(i))))
        training, with_clusters, with_imprinting = _best_times(runs, clients)
    spent = [both - alone for both, alone in zip(with_clusters, training, strict=True)]
    weighing = [all_ - some for all_, some in zip(with_imprinting, with_clusters, strict=True)]
    examples = statistics.mean(federation.infos[client].examples for client in clients)
    layout = runs[0].net.layout
    macs = 3 * layout.macs * examples
    sizes = [layout.count((weight,)) for weight in layout.prunable]
    steps = sum(kmeans.operations(size, K) for size in sizes)
    giga = REFERENCE_GMACS * 1e9
    by_formula, in_words = TRAINING_OVER_CLUSTERING
    total = sum(training) + sum(spent)
    return [
        Fact("examples of a client", examples, digits=0),
        Fact("training one epoch, ms", 1000 * statistics.mean(training), digits=1),
        Fact(f"clustering at k = {K}, ms", 1000 * statistics.mean(spent), digits=1),
        Fact("imprinting, ms", 1000 * statistics.mean(weighing), digits=1),
        Fact("clustering, % of both", 100 * sum(spent) / total, 100 / (1 + by_formula), 2),
        Fact("training over clustering", sum(training) / sum(spent), in_words, 2),
        Fact("the same by the paper's formula", 3 * examples / (10 * K), by_formula, 2),
        Fact("virtual s of training, speed 1", macs / giga, digits=4),
        Fact("virtual s of clustering, each step as a MAC", steps / giga, digits=4),
        Fact("clustering, % of both on the virtual clock", 100 * steps / (macs + steps), digits=2),
    ]


def _best_times(runs: Sequence[Run], clients: Sequence[int]) -> list[list[float]]:
    """By run, the seconds of each client's second round, which has no beginning of its own.

    The best of some: what else a machine does only adds. Runs take turns, so that it adds to all.
    """
    prepared = []
    for run in runs:
        state = run.method.init(run.start)
        if not state.asked:
            # Importances that nobody was asked for: all alike.
            state = replace(state, asked=True)
        for task in run.method.plan(state, clients):
            _, memory = perform(run, task, {})
            prepared.append((run, task, memory))
    best = [math.inf] * len(prepared)
    for _ in range(TIMES):
        for i, (run, task, memory) in enumerate(prepared):
            begin = time.perf_counter()
            perform(run, task, memory)
            best[i] = min(best[i], time.perf_counter() - begin)
    count = len(clients)
    return [best[i : i + count] for i in range(0, len(best), count)]


# ---- figures -------------------------------------------------------------------------------------


def figure_2(setting: Setting) -> Study:
    """Accuracy after each round."""
    printed = TABLES_1_AND_3.get(printed_in(setting), {})
    rows = []
    for made in rows_of(setting, COMPARED, accuracies(printed)):
        rows.append(replace(made, panel="rounds", series=made.label))
    return Study(
        "AdFedWCP, Figure 2",
        f"Accuracy after each round at Dirichlet {MIDDLE:g}.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=("mib_up", "mib_down", "virtual_seconds", "seconds_to_all"),
        drawn=("accuracy_mean",),
        over_rounds=True,
        lines=True,
        notes=(
            *notes(setting),
            "The paper prints no numbers of this figure; those beside are Table 1's.",
        ),
    )


def figure_3(setting: Setting) -> Study:
    """Accuracy of the clients of each bandwidth."""
    known = methods(setting)
    on_emnist = printed_in(setting) == "emnist"
    rows = []
    for name in ("local", "fedavg", "fedwcp-none", "adfedwcp"):
        made = row(setting, name, known[name])
        for low, high in BANDS:
            reported = {}
            if on_emnist and name == "adfedwcp" and (low, high) == BANDS[0]:
                reported = {"accuracy_band:0": round(LOWEST_BAND / 100, 6)}
            banded = replace(
                made,
                label=f"{made.label}, {low}-{high} Mbit/s",
                reported=reported,
                panel="Mbit/s",
                x=(low + high) / 2,
                series=made.label,
                band=(low, high),
                # Tests are of all clients; Table 3 has them.
                lead=False,
            )
            rows.append(banded)
    return Study(
        "AdFedWCP, Figure 3",
        f"Accuracy of the clients of each group of bandwidths, at Dirichlet {MIDDLE:g}.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_band",),
        counted=("clients_band",),
        drawn=("accuracy_band",),
        lines=True,
        notes=(
            *notes(setting),
            "Of the figure the paper prints the lowest group's accuracy, and that groups lie less "
            "than 1.5 points apart; bandwidths are drawn apart from data, so that methods which "
            "do not know them differ by chance alone.",
            "A normal distribution leaves few clients in the outer groups; clients is their mean "
            "over seeds, and a seed without any does not count in the accuracy.",
        ),
    )


IN_ITS_PLACE = {"emnist": "fashion-mnist"}


def _part(study: Callable[[Setting], Study], *data: str) -> Part:
    return Part(data, study, "digits", IN_ITS_PLACE, any_length=True)


PAPER = Paper(
    "Anonymous, Efficient Personalized Federated Learning via Adaptive Weight Clustering Pruning "
    "(under review)",
    tables={
        1: _part(table_1, "cifar10", "emnist", "cifar100"),
        2: _part(table_2, "emnist", "cifar10"),
        3: _part(table_3, "cifar10", "emnist", "cifar100"),
        4: _part(table_4, "emnist", "cifar10"),
        5: _part(table_5, "emnist"),
        6: _part(table_6, "cifar10", "emnist", "cifar100"),
        7: _part(table_7, "emnist", "cifar10"),
        8: _part(table_8, "emnist"),
        9: _part(table_9, "emnist"),
        10: _part(table_10, "emnist"),
        11: _part(table_11, "emnist"),
        12: DataTable(
            ("cifar10",),
            "AdFedWCP, Appendices B and C",
            "What clustering costs a client beside training, one client at a time on this "
            "machine's CPU.",
            clustering,
            notes=(
                f"The best of {TIMES} rounds of each of {TIMED_CLIENTS} clients, then their mean. "
                "Clustering also makes the mask; its time is the difference of two rounds.",
                "The paper's formula is 3 N E / (T k), one step per weight and example, T = 10: a "
                "twentieth of training with N = 2174. Elsewhere it says 6.79 times, a seventh, of "
                "no setting. Its formula leaves out that a convolution uses a weight many times.",
                "The virtual clock counts what networks multiply, and no clustering; the last "
                "lines say what it would be.",
            ),
            look="digits",
        ),
    },
    figures={
        2: _part(figure_2, "emnist", "cifar10", "cifar100"),
        3: _part(figure_3, "emnist"),
    },
)
