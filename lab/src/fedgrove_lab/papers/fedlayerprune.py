"""FedLayerPrune (He, Cao, Zhang & Yang): Tables 3 to 8 and Figures 2 to 4.

Rows, seeds and scoring are fixed here, before anything is run. Each client is scored on its own
held-out data with the model it would use, after every round; the paper has one common test set.

The paper calls FixedPrune static and gives its own method two descriptions: both readings of each
are rows, and the paper's figure stands beside both. ``fedlayerprune`` is the preset ``reported``,
whose density is that of the paper's tables, ``fedlayerprune-literal`` has the rules as they are
printed. ``local`` stands in no table of the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fedgrove import nets
from fedgrove.config.experiment import Experiment
from fedgrove.core import AnyMethod
from fedgrove.methods import FedAvg, FedDST, FedLayerPrune, FedProx, FedPrune, FixedPrune, Local
from fedgrove.methods.fedlayerprune.hybrid import Hybrid
from fedgrove.methods.fedlayerprune.method import PRESETS
from fedgrove.methods.fedlayerprune.rates import Alike, LearnedSensitivity, Piecewise
from fedgrove.methods.fedlayerprune.vote import Vote
from fedgrove.nets.layout import Layout
from fedgrove.parts.local import SGD, LocalTraining
from fedgrove.parts.score import Magnitude
from fedgrove.wire.codec import Bitmap, Smallest

from .studies import Paper, Part, Row, Setting, Study

# ---- what the paper reports ----------------------------------------------------------------------

ALPHAS = (0.1, 0.5, 1.0)
"""Of the Dirichlet distribution that shares out the classes."""
MIDDLE = 0.5
"""The alpha of all parts that have one only, but for Table 7."""
MOST_UNLIKE = 0.1
"""The alpha of Table 7."""
TABLE_3 = {
    "cifar10": {
        "fedavg": (20.16, 0.0, 0.0),
        "fedprox": (20.16, 0.0, 0.0),
        "fixedprune-50": (10.08, 50.0, 0.5),
        "fixedprune-70": (6.05, 70.0, 0.7),
        "fedprune": (8.47, 58.0, 0.423),
        "feddst": (7.26, 64.0, 0.485),
        "fedlayerprune": (6.45, 68.3, 0.527),
    },
    "mnist": {
        "fedavg": (576.0, 0.0, 0.0),
        "fedprox": (576.0, 0.0, 0.0),
        "fixedprune-50": (288.0, 50.0, 0.5),
        "fixedprune-70": (172.8, 70.0, 0.7),
        "fedprune": (242.9, 57.8, 0.418),
        "feddst": (207.4, 64.0, 0.482),
        "fedlayerprune": (185.2, 67.8, 0.519),
    },
    "fashion-mnist": {
        "fedavg": (576.0, 0.0, 0.0),
        "fedprox": (576.0, 0.0, 0.0),
        "fixedprune-50": (288.0, 50.0, 0.5),
        "fixedprune-70": (172.8, 70.0, 0.7),
        "fedprune": (244.1, 57.6, 0.415),
        "feddst": (209.1, 63.7, 0.478),
        "fedlayerprune": (186.8, 67.6, 0.515),
    },
}
"""The total, in GB (CIFAR-10) and MB; its reduction against FedAvg in %; the average sparsity."""
GB = 1024.0
"""MiB of a GB: the paper divides by 1024."""
TABLE_4 = {
    "cifar10": {
        "fedavg": (0.892, 0.921, 0.935),
        "fedprox": (0.895, 0.918, 0.932),
        "fixedprune-50": (0.856, 0.889, 0.907),
        "fixedprune-70": (0.813, 0.852, 0.878),
        "fedprune": (0.871, 0.903, 0.918),
        "feddst": (0.875, 0.908, 0.922),
        "fedlayerprune": (0.887, 0.915, 0.929),
    },
    "mnist": {
        "fedavg": (0.968, 0.982, 0.987),
        "fedprox": (0.969, 0.980, 0.985),
        "fixedprune-50": (0.942, 0.965, 0.973),
        "fixedprune-70": (0.915, 0.941, 0.956),
        "fedprune": (0.956, 0.973, 0.979),
        "feddst": (0.959, 0.975, 0.981),
        "fedlayerprune": (0.964, 0.978, 0.984),
    },
    "fashion-mnist": {
        "fedavg": (0.873, 0.898, 0.912),
        "fedprox": (0.876, 0.895, 0.909),
        "fixedprune-50": (0.841, 0.872, 0.889),
        "fixedprune-70": (0.802, 0.843, 0.867),
        "fedprune": (0.857, 0.884, 0.901),
        "feddst": (0.860, 0.887, 0.904),
        "fedlayerprune": (0.868, 0.893, 0.908),
    },
}
"""Final accuracies at the three alphas."""
TABLE_5 = {
    "fedlayerprune": (0.915, 6.45),
    "without-layers": (0.898, 7.12),
    "without-dynamic": (0.902, 7.89),
    "without-heterogeneity": (0.906, 6.52),
    "without-all": (0.881, 8.47),
}
"""CIFAR-10, alpha .5: accuracy and total in GB."""
GAINS = {0.1: 0.018, 0.5: 0.009, 1.0: 0.003}
"""CIFAR-10, section 4.2.6: the accuracy that heterogeneity-aware aggregation adds, by alpha."""
TABLE_6 = {
    0.1: (0.912, 7.03, 0.481),
    0.3: (0.915, 6.45, 0.527),
    0.5: (0.913, 6.12, 0.553),
    0.7: (0.904, 5.68, 0.598),
}
"""CIFAR-10, alpha .5: accuracy, total in GB and average sparsity by the vote's threshold."""
TABLE_7 = {
    "fedavg": (0.892, 0.031, 0.835, 0.942),
    "fedprox": (0.895, 0.027, 0.848, 0.939),
    "fixedprune-70": (0.813, 0.058, 0.712, 0.891),
    "feddst": (0.875, 0.036, 0.813, 0.928),
    "fedlayerprune": (0.887, 0.029, 0.831, 0.935),
}
"""CIFAR-10, alpha .1: mean, deviation, worst and best client."""
TABLE_8 = {
    "fedavg": (0.908, 50.40, 0.0, 12),
    "fedprox": (0.911, 50.40, 0.0, 11),
    "fixedprune-70": (0.831, 15.12, 70.0, 28),
    "feddst": (0.892, 18.65, 63.0, 16),
    "fedlayerprune": (0.901, 16.13, 68.0, 14),
}
"""CIFAR-10, alpha .5, K = 50: accuracy, total in GB, its reduction in %, rounds to 85 %."""
FIGURE_2 = {
    "fixedprune-50": {20: 0.84},
    "fixedprune-70": {10: 0.71},
    "fedlayerprune": {10: 0.83, 20: 0.89},
}
"""CIFAR-10, alpha .5, section 4.2.2: accuracy after so many rounds, as its text rounds it."""
FIGURE_3 = {
    "conv1.weight": 0.325,
    "layer1.0.conv1.weight": 0.382,
    "layer1.1.conv2.weight": 0.487,
    "layer2.0.conv1.weight": 0.453,
    "layer3.1.conv2.weight": 0.612,
    "layer4.0.conv1.weight": 0.612,
    "layer4.1.conv2.weight": 0.649,
    "head.weight": 0.786,
}
"""CIFAR-10, section 4.2.4: the pruned share of layers. Its text gives the ends of each range, of
rates that rise with depth; the last is fc2, and fc1 (.723) has no counterpart in our network."""

# ---- how it was run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How much is run: the paper's setting (section 4.1.4) or, for ``--quick``, only a look."""

    clients: int = 10
    epochs: int = 3
    batch: int = 32
    lr: float = 0.01
    every: int = 5
    """Rounds between two changes of a mask: FedLayerPrune's R, and ours for FedDST and FedPrune,
    of which the paper says nothing."""
    many: int = 50
    """Clients of Table 8, of which ``some`` take part in each of its rounds."""
    some: int = 15
    many_rounds: int = 50
    marks: tuple[int, ...] = (10, 20)
    """Rounds after which the table of Figure 2 has a column."""


FULL = Scale()
QUICK = Scale(
    clients=4,
    epochs=1,
    batch=32,
    lr=0.05,
    every=1,
    many=6,
    some=3,
    many_rounds=2,
    marks=(1,),
)
TARGET = 0.85
"""The accuracy that Table 8 counts rounds to."""


@dataclass(frozen=True)
class Place:
    """The network and the rounds on a data set (sections 4.1.2 and 4.1.4)."""

    net: str
    shape: tuple[int, ...]
    rounds: int


SMALL = Place("mnist-cnn", (1, 28, 28), 20)
LOOK = Place("bn-cnn2:width=16", (1, 8, 8), 2)
PLACES = {"cifar10": Place("resnet18", (3, 32, 32), 30)}
"""Data sets that are not run like MNIST and Fashion-MNIST."""


def scale(setting: Setting) -> Scale:
    """The paper's, or a quick one."""
    return QUICK if setting.quick else FULL


def place(setting: Setting) -> Place:
    """Where it is run; data that the paper does not have are run like MNIST."""
    return LOOK if setting.quick else PLACES.get(setting.data, SMALL)


def recipe(setting: Setting) -> LocalTraining:
    """Section 4.1.4: SGD .01 with momentum .9 and weight decay 5e-4, batches of 32, 3 epochs."""
    s = scale(setting)
    return LocalTraining(s.epochs, s.batch, SGD(s.lr, momentum=0.9, weight_decay=5e-4))


def fedlayerprune(setting: Setting, preset: str = "reported") -> FedLayerPrune:
    """A preset of the method, trained as all others."""
    return replace(PRESETS[preset], every=scale(setting).every, local=recipe(setting))


def methods(setting: Setting) -> dict[str, AnyMethod]:
    """Section 4.1.3: the methods that are compared, by the name of their row.

    Of FedPrune and FedDST the paper gives the average sparsity only, in Table 3.
    """
    s = scale(setting)
    local = recipe(setting)
    printed = TABLE_3.get(setting.data, TABLE_3["mnist"])
    _, _, sparsity_of_fedprune = printed["fedprune"]
    _, _, sparsity_of_feddst = printed["feddst"]
    last = last_density(sparsity_of_fedprune, place(setting).rounds, s.every)
    return {
        "local": Local(local=local),
        "fedavg": FedAvg(local=local),
        "fedprox": FedProx(local=local),
        "fixedprune-50": FixedPrune(0.5, local=local),
        "fixedprune-50-static": FixedPrune(0.5, static=True, local=local),
        "fixedprune-70": FixedPrune(0.3, local=local),
        "fixedprune-70-static": FixedPrune(0.3, static=True, local=local),
        "fedprune": FedPrune(last, every=s.every, local=local),
        "feddst": FedDST(round(1 - sparsity_of_feddst, 6), every=s.every, local=local),
        "fedlayerprune-literal": fedlayerprune(setting, "literal"),
        "fedlayerprune": fedlayerprune(setting),
    }


def last_density(sparsity: float, rounds: int, every: int) -> float:
    """FedPrune's density at the end: its rate grows from 0 in even steps to a mean that is given.

    >>> last_density(0.33, rounds=20, every=5)
    0.4
    """
    steps = (rounds - 1) // every
    taken = sum(min(done // every, steps) for done in range(1, rounds + 1))
    return round(1 - sparsity * steps * rounds / taken, 6)


def ablations(setting: Setting) -> dict[str, FedLayerPrune]:
    """Table 5: the whole method, without one part, and without all three.

    Clients keep the same share on average throughout: p_base follows from it, whatever the rates
    are. What the vote makes of it differs.
    """
    whole = fedlayerprune(setting)
    layers = Alike()
    level = Piecewise(rise=0)
    # Whatever anybody keeps stays, and what a client pruned counts as 0 in the mean.
    nobody = Vote(0.0)
    return {
        "fedlayerprune": whole,
        "without-layers": replace(whole, rates=layers),
        "without-dynamic": replace(whole, schedule=level),
        "without-heterogeneity": replace(whole, vote=nobody, renormalise=False),
        "without-all": replace(whole, rates=layers, schedule=level, vote=nobody, renormalise=False),
    }


def changes(setting: Setting) -> dict[str, FedLayerPrune]:
    """Of ours, beside Table 5: one choice changed at a time."""
    whole = fedlayerprune(setting)
    return {
        "without-vote": replace(whole, vote=Vote(0.0)),
        "without-dividing": replace(whole, renormalise=False),
        "without-regrowth": replace(whole, regrow=0.0),
        "without-channels": replace(whole, hybrid=Hybrid(0.0)),
        "by-magnitude": replace(whole, score=Magnitude()),
        "by-learned-rates": replace(whole, rates=LearnedSensitivity()),
    }


LABELS = {
    "fixedprune-50-static": "fixedprune-50, static",
    "fixedprune-70-static": "fixedprune-70, static",
    "fedlayerprune-literal": "fedlayerprune, literal",
    "fedavg-smallest": "fedavg, smallest code",
    "fedlayerprune-bitmap": "fedlayerprune, bitmap",
    "without-layers": "without layer-adaptive",
    "without-dynamic": "without dynamic",
    "without-heterogeneity": "without heterogeneity-aware",
    "without-all": "without all three",
    "without-vote": "ours: all that anybody keeps",
    "without-dividing": "ours: mean as printed",
    "without-regrowth": "ours: nothing comes back",
    "without-channels": "ours: single weights only",
    "by-magnitude": "ours: scored by magnitude",
    "by-learned-rates": "ours: learned rates",
}
"""How a row is called where that is not its name."""
READINGS = {
    "fixedprune-50-static": "fixedprune-50",
    "fixedprune-70-static": "fixedprune-70",
    "fedlayerprune-literal": "fedlayerprune",
}
"""Rows that are another reading of a method, and the row whose figures stand beside them too."""
FEW = (
    "local",
    "fedavg",
    "fedprox",
    "fixedprune-70",
    "fixedprune-70-static",
    "feddst",
    "fedlayerprune-literal",
    "fedlayerprune",
)
"""The methods of Tables 7 and 8."""


def experiment(setting: Setting, method: AnyMethod, alpha: float) -> Experiment:
    """A run in which all clients take part, scored after every round."""
    s = scale(setting)
    where = place(setting)
    return Experiment(
        method,
        setting.data,
        net=where.net,
        partition=f"dirichlet:{alpha:g}",
        split=setting.split,
        validation=0,
        clients=s.clients,
        cohort=s.clients,
        rounds=where.rounds,
        finetune=(0,),
        # Densities and accuracies over the rounds are of these scores.
        evaluate=1,
    )


def row(
    setting: Setting,
    name: str,
    method: AnyMethod,
    alpha: float = MIDDLE,
    reported: Mapping[str, float] | None = None,
    panel: str = "",
) -> Row:
    """A row of a table; rows of one method and alpha are the same runs in all tables."""
    return Row(
        f"{name}-a{alpha:g}",
        LABELS.get(name, name),
        experiment(setting, method, alpha),
        reported or {},
        panel=panel,
        lead=name == "fedlayerprune",
    )


def printed_in(setting: Setting) -> str:
    """The data set whose figures stand beside ours; empty for one that the paper does not have."""
    return setting.data if not setting.quick and setting.data in TABLE_4 else ""


def final_accuracy(setting: Setting, name: str, alpha: float) -> dict[str, float]:
    """What Table 4 reports of a row."""
    printed = TABLE_4.get(printed_in(setting), {}).get(READINGS.get(name, name))
    return {} if printed is None else {"accuracy_mean:0": printed[ALPHAS.index(alpha)]}


def on_cifar(setting: Setting) -> bool:
    """Whether the paper has figures of the parts that are on CIFAR-10 alone."""
    return printed_in(setting) == "cifar10"


def seeds(setting: Setting) -> int:
    """Section 4.1.4: three."""
    return 1 if setting.quick else 3


def notes(setting: Setting, clients: int | None = None, rounds: int | None = None) -> list[str]:
    """What each part on these data must say."""
    s = scale(setting)
    where = place(setting)
    lines = []
    if setting.quick:
        lines.append(
            "Quick: a few rounds of a few clients. No figure here says anything about a method."
        )
    lines.append(
        f"{setting.data}: {clients or s.clients} clients, {rounds or where.rounds} rounds, "
        f"epochs per round: {s.epochs}; {where.net}."
    )
    lines.append(
        "Every client is scored on its own held-out data and counts alike; the paper scores the "
        "global model on one common test set."
    )
    if where.net == SMALL.net:
        lines.append(
            "mnist-cnn follows the paper's text, which gives .46 M parameters and not 1.2 M."
        )
    return lines


READ_TWICE = (
    "fixedprune prunes anew in every round; static keeps the mask of the initial model, and is the "
    "paper's word. fedlayerprune has the density of the paper's tables, literal the rules as "
    "printed. The paper's figure stands beside both readings."
)
BASELINES = (
    "The paper gives no setting of fedprune and feddst but the average sparsity: feddst has it "
    "throughout, fedprune in the mean over the rounds of a rate that grows from 0."
)
TOTALS = (
    "The paper's totals do not follow from its sizes: 89.6 MB a round for 10 clients and 30 rounds "
    "are 26.25 GB and not 20.16, and 576 MB are of .36 M parameters."
)

NOMINAL = (
    "The bytes counted of fedlayerprune are those of the rates asked for; the model that the vote "
    "makes is denser, and the first broadcast is dense: see what was really sent."
)


# ---- tables --------------------------------------------------------------------------------------


def table_3(setting: Setting) -> Study:
    """Bytes, and the density that they come from."""
    rows = []
    for name, method in methods(setting).items():
        reported = cost(setting, name)
        # No row is tested against others: the table is not about accuracy.
        rows.append(replace(row(setting, name, method, reported=reported), lead=False))
    # The same models in another code each: how much of the saving is the code's.
    plain = FedAvg(local=recipe(setting), codec=Smallest())
    bitmap = replace(fedlayerprune(setting), codec=Bitmap())
    rows.append(row(setting, "fedavg-smallest", plain))
    rows.append(row(setting, "fedlayerprune-bitmap", bitmap))
    return Study(
        "FedLayerPrune, Table 3",
        f"Bytes of a whole run at Dirichlet {MIDDLE:g}: by each method's own formula and really "
        "sent, and how much less than fedavg that is; the density of the model that clients use, "
        "averaged over the rounds.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=("mib_paper", "reduction_paper", "mib", "reduction", "density_run"),
        base=f"fedavg-a{MIDDLE:g}",
        notes=(
            *notes(setting),
            READ_TWICE,
            BASELINES,
            TOTALS,
            NOMINAL,
            "Its own formula, 2 (4 r d + d / 8) bytes, gives 49.6 % less at CIFAR-10's 52.7 % "
            "sparsity, and 48.4 % at Fashion-MNIST's 51.5 %.",
            "fedavg sends plain floats and the pruning methods the smallest code; the last two "
            "rows have it the other way round, bitmap being the paper's code.",
        ),
    )


def cost(setting: Setting, name: str) -> dict[str, float]:
    """What Table 3 reports of a row."""
    data = printed_in(setting)
    printed = TABLE_3.get(data, {}).get(READINGS.get(name, name))
    if printed is None:
        return {}
    total, reduction, sparsity = printed
    unit = GB if data == "cifar10" else 1.0
    return {
        "mib_paper": total * unit,
        "reduction_paper": reduction,
        "density_run": round(1 - sparsity, 6),
    }


def table_4(setting: Setting) -> Study:
    """Final accuracies of all methods at three degrees of heterogeneity."""
    rows = []
    for alpha in ALPHAS:
        for name, method in methods(setting).items():
            reported = final_accuracy(setting, name, alpha)
            rows.append(row(setting, name, method, alpha, reported, at(alpha)))
    return Study(
        "FedLayerPrune, Table 4",
        "Final accuracy of all methods; a smaller alpha of the Dirichlet distribution makes "
        "clients less alike.",
        tuple(rows),
        seeds(setting),
        counted=("density_run", "density_end", "mib"),
        notes=(*notes(setting), READ_TWICE, BASELINES),
    )


def at(alpha: float) -> str:
    """A panel's title."""
    return f"Dirichlet {alpha:g}"


def table_5(setting: Setting) -> Study:
    """The parts of the method, one left out at a time."""
    alone = methods(setting)["local"]
    variants = ablations(setting)
    rows = []
    # The middle one first: it is the paper's table.
    for alpha in (MIDDLE, *(other for other in ALPHAS if other != MIDDLE)):
        rows.append(row(setting, "local", alone, alpha, panel=at(alpha)))
        for name, method in variants.items():
            is_in_the_text = name in ("fedlayerprune", "without-heterogeneity")
            if alpha == MIDDLE or is_in_the_text:
                reported = without(setting, name, alpha)
                rows.append(row(setting, name, method, alpha, reported, at(alpha)))
        if alpha == MIDDLE:
            for name, method in changes(setting).items():
                rows.append(row(setting, name, method, alpha, panel=at(alpha)))
    return Study(
        "FedLayerPrune, Table 5",
        "FedLayerPrune without one of its parts, and without all three; clients keep the same "
        "share on average throughout, and the vote decides how dense the model is. At Dirichlet "
        "0.1 and 1 the gain of heterogeneity-aware aggregation.",
        tuple(rows),
        seeds(setting),
        counted=("mib_paper", "mib", "density_run"),
        notes=(
            *notes(setting),
            TOTALS,
            NOMINAL,
            "without layer-adaptive: all layers alike; without dynamic: one rate in all rounds; "
            "without heterogeneity-aware: no vote, and what a client pruned counts as 0 in the "
            "mean.",
            "The paper gives the gain of the last in points: 1.8, 0.9 and 0.3 at Dirichlet 0.1, "
            "0.5 and 1; at 0.1 and 1 its figure here is that of Table 4 less the gain.",
        ),
    )


def without(setting: Setting, name: str, alpha: float) -> dict[str, float]:
    """What Table 5 and section 4.2.6 report of an ablation."""
    if not on_cifar(setting):
        return final_accuracy(setting, name, alpha)
    if alpha == MIDDLE:
        accuracy, total = TABLE_5[name]
        return {"accuracy_mean:0": accuracy, "mib_paper": total * GB}
    whole = final_accuracy(setting, "fedlayerprune", alpha)["accuracy_mean:0"]
    if name == "fedlayerprune":
        return {"accuracy_mean:0": whole}
    return {"accuracy_mean:0": round(whole - GAINS[alpha], 6)}


def table_6(setting: Setting) -> Study:
    """The threshold of the vote."""
    whole = fedlayerprune(setting)
    rows = [row(setting, "local", methods(setting)["local"])]
    for tau, (accuracy, total, sparsity) in TABLE_6.items():
        reported = {}
        if on_cifar(setting):
            reported = {
                "accuracy_mean:0": accuracy,
                "mib_paper": total * GB,
                "density_run": round(1 - sparsity, 6),
            }
        name = f"fedlayerprune-tau{tau:g}"
        made = row(setting, name, replace(whole, vote=Vote(tau)), reported=reported)
        is_default = tau == whole.vote.threshold
        rows.append(replace(made, label=f"tau = {tau:g}", lead=is_default))
    return Study(
        "FedLayerPrune, Table 6",
        f"The threshold tau of the vote on the mask, at Dirichlet {MIDDLE:g}; mask stability is "
        "the share of mask bits that a round leaves as they were, averaged over the rounds.",
        tuple(rows),
        seeds(setting),
        counted=("density_run", "mask_stability", "mib_paper", "mib"),
        notes=(
            *notes(setting),
            TOTALS,
            "The paper has words for mask stability: low, moderate, high and very high.",
            NOMINAL,
        ),
    )


def table_7(setting: Setting) -> Study:
    """How alike clients are served."""
    rows = []
    every_method = methods(setting)
    keys = ("accuracy_mean:0", "accuracy_std:0", "accuracy_worst:0", "accuracy_best:0")
    for name in FEW:
        reported: dict[str, float] = {}
        printed = TABLE_7.get(READINGS.get(name, name))
        if on_cifar(setting) and printed is not None:
            reported = dict(zip(keys, printed, strict=True))
        rows.append(row(setting, name, every_method[name], MOST_UNLIKE, reported))
    return Study(
        "FedLayerPrune, Table 7",
        f"Accuracy over clients at Dirichlet {MOST_UNLIKE:g}: mean, deviation, worst and best.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_mean", "accuracy_std", "accuracy_worst", "accuracy_best"),
        counted=(),
        notes=(*notes(setting), READ_TWICE, BASELINES),
    )


def table_8(setting: Setting) -> Study:
    """More clients, of which some take part."""
    s = scale(setting)
    reached = f"rounds_to@{TARGET:g}"
    rows = []
    every_method = methods(setting)
    for name in FEW:
        reported: dict[str, float] = {}
        printed = TABLE_8.get(READINGS.get(name, name))
        if on_cifar(setting) and printed is not None:
            accuracy, total, reduction, rounds = printed
            reported = {
                "accuracy_mean:0": accuracy,
                reached: rounds,
                "mib_paper": total * GB,
                "reduction_paper": reduction,
            }
        made = row(setting, name, every_method[name], reported=reported)
        larger = replace(made.experiment, clients=s.many, cohort=s.some, rounds=s.many_rounds)
        rows.append(replace(made, name=f"{name}-k{s.many}", experiment=larger))
    return Study(
        "FedLayerPrune, Table 8",
        f"{s.many} clients, of which {s.some} take part in each of {s.many_rounds} rounds, at "
        f"Dirichlet {MIDDLE:g}.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=(reached, "mib_paper", "reduction_paper", "mib", "reduction"),
        base=f"fedavg-k{s.many}",
        notes=(*notes(setting, s.many, s.many_rounds), READ_TWICE, BASELINES, TOTALS, NOMINAL),
    )


# ---- figures -------------------------------------------------------------------------------------


def figure_2(setting: Setting) -> Study:
    """Accuracy after each round."""
    marks = scale(setting).marks
    rows = []
    for name, method in methods(setting).items():
        reported = final_accuracy(setting, name, MIDDLE)
        if on_cifar(setting):
            for done, accuracy in FIGURE_2.get(READINGS.get(name, name), {}).items():
                reported[f"accuracy_mean@{done}"] = accuracy
            # The last point of the curve is the figure of Table 4.
            if reported:
                reported[f"accuracy_mean@{place(setting).rounds}"] = reported["accuracy_mean:0"]
        made = row(setting, name, method, reported=reported, panel="rounds")
        rows.append(replace(made, series=made.label))
    return Study(
        "FedLayerPrune, Figure 2",
        f"Accuracy after each round at Dirichlet {MIDDLE:g}.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_mean",),
        counted=tuple(f"accuracy_mean@{done}" for done in marks),
        drawn=("accuracy_mean",),
        over_rounds=True,
        lines=True,
        notes=(
            *notes(setting),
            READ_TWICE,
            BASELINES,
            "The paper's points are those of its text, rounded there; its last ones are Table 4's. "
            "Of FixedPrune-70 it says that it never passes 82 %, and 85.2 % in Table 4.",
        ),
    )


def figure_3(setting: Setting) -> Study:
    """How much of each layer is gone at the end."""
    rows = []
    for name in ("fedlayerprune", "fedlayerprune-literal"):
        made = row(setting, name, methods(setting)[name], panel=LABELS.get(name, name))
        for layer in layers(place(setting)):
            reported = {}
            if on_cifar(setting) and layer in FIGURE_3:
                reported = {"pruned:0": FIGURE_3[layer]}
            label = layer.removesuffix(".weight")
            rows.append(replace(made, label=label, layer=layer, reported=reported, lead=False))
    return Study(
        "FedLayerPrune, Figure 3",
        f"The pruned share of each layer at the end, at Dirichlet {MIDDLE:g}; fixedprune-50 and "
        "fixedprune-70 prune 50 and 70 % of every layer.",
        tuple(rows),
        seeds(setting),
        measures=("pruned",),
        counted=(),
        notes=(
            *notes(setting),
            "The paper gives conv1, the first and last rate of layer1, of layer2 and layer3 "
            "together, and of layer4, and fc2; its fc1 (72.3 %) is not in our network, nor in "
            "ResNet-18. Its p_max is .6, which these rates exceed from the end of layer3 on.",
        ),
    )


@cache
def layers(where: Place) -> tuple[str, ...]:
    """The weight tensors of a network that can be pruned, in order of execution."""
    module = nets.build(where.net, where.shape, 10, seed=0)
    return Layout.of(module, where.shape).prunable


def figure_4(setting: Setting) -> Study:
    """Accuracy over heterogeneity: the runs of Table 4."""
    rows = []
    for name, method in methods(setting).items():
        for alpha in ALPHAS:
            reported = final_accuracy(setting, name, alpha)
            made = row(setting, name, method, alpha, reported, "alpha")
            label = f"{made.label}, alpha {alpha:g}"
            rows.append(replace(made, label=label, x=alpha, series=made.label))
    return Study(
        "FedLayerPrune, Figure 4",
        "Accuracy by alpha of the Dirichlet distribution; clients are less alike on the left.",
        tuple(rows),
        seeds(setting),
        measures=("accuracy_mean",),
        drawn=("accuracy_mean",),
        lines=True,
        notes=(*notes(setting), READ_TWICE, BASELINES),
    )


ALL = ("cifar10", "mnist", "fashion-mnist")
PAPER = Paper(
    "He, Cao, Zhang & Yang, Efficient Federated Learning Method FedLayerPrune Based on Layer "
    "Adaptive Pruning, Electronics 15(5), 2026",
    tables={
        3: Part(ALL, table_3, "digits"),
        4: Part(ALL, table_4, "digits"),
        5: Part(("cifar10",), table_5, "digits"),
        6: Part(("cifar10",), table_6, "digits"),
        7: Part(("cifar10",), table_7, "digits"),
        8: Part(("cifar10",), table_8, "digits"),
    },
    figures={
        2: Part(("cifar10",), figure_2, "digits"),
        3: Part(("cifar10",), figure_3, "digits"),
        4: Part(("cifar10",), figure_4, "digits"),
    },
)
