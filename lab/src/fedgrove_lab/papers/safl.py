"""SAFL (Li, Wang, Du, Cai & Wang): Tables I to III and Figures 7 and 8, in fewer rounds.

Rows, seeds and scoring are fixed here, before anything is run. Stage 2 has 100 rounds where the
paper runs 1000 (CIFAR-10) and 2000 (MNIST), and CIFAR-10 has 10,000 of its images but for the rows
that say otherwise. Clients of one set hold the same classes (``:grouped``): our reading of the
paper's numbers of clusters, not a fact. Every row is scored as delivered and after one local
epoch, since the output of Alg. 2 is last assigned by local training; the paper's figure stands
beside both.

The paper's words are kept where its figures are typed (pruning rate, %); rows speak of density.
These stand in no table of the paper: ``local``; ``local-long``, which trains alone for as many
epochs as SAFL takes in both stages; Hermes without recovery; clients whose classes are not grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedgrove.config.experiment import Experiment
from fedgrove.core import AnyMethod
from fedgrove.methods import SAFL, FedAvg, FedBN, Hermes, LGFedAvg, Local
from fedgrove.parts.local import SGD, LocalTraining

from .studies import Paper, Part, Row, Setting, Study

# ---- what the paper reports ----------------------------------------------------------------------

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
        0.3: (93.29, 92.73),
        0.4: (93.08, 92.58),
        0.5: (92.32, 91.67),
        0.6: (91.13, 82.12),
        0.7: (89.85, 80.64),
    },
    "mnist": {
        0.3: (93.29, 90.65),
        0.4: (92.45, 90.25),
        0.6: (92.24, 89.35),
        0.65: (91.54, 86.78),
    },
}
"""Table III: accuracy in % of SAFL and of Hermes by pruning rate, with 5 clusters (CIFAR-10) and
2 (MNIST)."""
SIZES = {
    "cifar10": {0.3: 2.6, 0.4: 1.8, 0.5: 1.2, 0.6: 0.601, 0.7: 0.289},
    "mnist": {0.3: 0.509, 0.4: 0.384, 0.6: 0.164, 0.65: 0.101},
}
"""Table III: the size of a model in MB by pruning rate, one figure for both methods."""
SHARE = {"cifar10": (0.4, 40.06), "mnist": (0.6, 33.01)}
"""Figure 8: the pruning rate, and SAFL's communication in % of FedAvg's."""

# ---- how it was run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """How much is run: the paper's setting in fewer rounds, or, for ``--quick``, only a look."""

    stage_2: int = 100
    """Rounds after the last step of pruning."""
    guided: int = 50
    """Epochs before a step of pruning."""
    tune: int = 20
    """Epochs after it."""
    curve: tuple[int, ...] = (10, 30, 100)
    """Rounds of stage 2 in Figure 7."""
    lr: float = 0.005
    batch: int = 32


FULL = Scale()
QUICK = Scale(stage_2=2, guided=1, tune=1, curve=(1, 2), lr=0.05, batch=8)


SCORED = (0, 1)
"""Epochs of local training on what is delivered before a row is scored."""
GROUPED = ":grouped"
"""Ends the partition of all rows but those that say otherwise."""


@dataclass(frozen=True)
class Place:
    """The network and how a data set is shared out (section IV.B)."""

    net: str
    clients: int
    partition: str
    """As rows whose classes are not grouped have it."""
    clusters: tuple[int, ...]
    """The numbers of clusters of Tables I and II; Table III has the last one."""
    rates: tuple[float, ...]
    """The pruning rates of Table III."""
    whole: str = ""
    """The partition that deals all images, where the paper has more of them than ours."""


PLACES = {
    "cifar10": Place(
        "bn-cnn4", 10, "shards:2:1000", (1, 2, 3, 4, 5), (0.3, 0.4, 0.5, 0.6, 0.7), "shards:2"
    ),
    "mnist": Place("bn-cnn2", 20, "classes:5:25", (1, 2), (0.3, 0.4, 0.6, 0.65)),
}
"""CIFAR-10: 1000 images of each class, two classes per client in unequal numbers; five pairs of
classes with two clients each.
MNIST: 28 images of five classes, of which 20 are for training; two sets with ten clients each.
The numbers of clients are ours: the paper does not give them."""
LOOK = Place("bn-cnn2:width=16", 4, "classes:5:12", (1, 2), (0.1, 0.3), "classes:5:24")


def scale(setting: Setting) -> Scale:
    """The paper's in fewer rounds, or a quick one."""
    return QUICK if setting.quick else FULL


def place(setting: Setting) -> Place:
    """Where it is run; other data are shared out as MNIST is."""
    if setting.quick:
        return LOOK
    return PLACES.get(setting.data, PLACES["mnist"])


def recipe(setting: Setting) -> LocalTraining:
    """Section IV.C: SGD .005, 1 epoch; the paper gives no batch size."""
    s = scale(setting)
    return LocalTraining(1, s.batch, SGD(s.lr))


def density_at(rate: float) -> float:
    """The density of a pruning rate."""
    # Rounded, because 1 - 0.7 is 0.30000000000000004.
    return round(1 - rate, 6)


def hermes(setting: Setting, rate: float, recover: bool = True) -> Hermes:
    """Network slimming alone."""
    s = scale(setting)
    return Hermes(
        density_at(rate), guided=s.guided, tune=s.tune, recover=recover, local=recipe(setting)
    )


def safl(setting: Setting, rate: float, clusters: int) -> SAFL:
    """Lambda 1e-4, mu .004, 50 epochs and then 20 (section IV.C)."""
    s = scale(setting)
    return SAFL(
        density_at(rate), clusters=clusters, guided=s.guided, tune=s.tune, local=recipe(setting)
    )


def others(setting: Setting) -> dict[str, AnyMethod]:
    """The methods that do not prune, by the name of their row."""
    local = recipe(setting)
    return {
        "fedavg": FedAvg(local=local),
        "lg-fedavg": LGFedAvg(shared=1, local=local),
        "fedbn": FedBN(local=local),
    }


def experiment(
    setting: Setting,
    method: AnyMethod,
    stage_2: int | None = None,
    partition: str | None = None,
) -> Experiment:
    """A run of a method in which all clients take part; they are scored at the end only."""
    where = place(setting)
    # FedAvg runs on the network without norm layers.
    net = where.net
    if type(method) is FedAvg:
        separator = "," if ":" in net else ":"
        net = f"{net}{separator}norm=none"
    # A run's rounds are those of both stages; stage 1 has one for each step of pruning.
    rounds = scale(setting).stage_2 if stage_2 is None else stage_2
    if isinstance(method, SAFL | Hermes):
        rounds += len(method.schedule)
    return Experiment(
        method,
        setting.data,
        net=net,
        partition=partition or f"{where.partition}{GROUPED}",
        split=setting.split,
        validation=0,
        clients=where.clients,
        cohort=where.clients,
        rounds=rounds,
        finetune=SCORED,
        evaluate=0,
    )


def accuracy(percent: float | None, lengths: Sequence[int] = SCORED) -> dict[str, float]:
    """A reported accuracy as a summary would have it; nothing where the paper reports none.

    The paper does not say whether local training comes before the score: it stands at each length.
    """
    if percent is None:
        return {}
    # Rounded, because 93.29 / 100 is 0.9329000000000001.
    return {f"accuracy_mean:{length}": round(percent / 100, 6) for length in lengths}


def printed_at(setting: Setting, rate: float) -> tuple[float | None, float | None]:
    """What Table III reports of SAFL and of Hermes at a rate, in %; None where it does not."""
    return RATES.get(setting.data, {}).get(rate, (None, None))


def size_at(setting: Setting, rate: float) -> dict[str, float]:
    """The size of a model that Table III reports at a rate."""
    megabytes = SIZES.get(setting.data, {}).get(rate)
    return {} if megabytes is None else {"model_mb": megabytes}


def notes(setting: Setting) -> tuple[str, ...]:
    """What each table on these data must say."""
    s = scale(setting)
    lines = []
    in_the_paper = {"cifar10": "1000 rounds on all images", "mnist": "2000 rounds"}
    if setting.quick:
        lines.append(
            "Quick: a few rounds of a few clients. No figure here says anything about a method."
        )
    elif setting.data in in_the_paper:
        lines.append(
            f"{setting.data}: {s.stage_2} rounds of stage 2 "
            f"where the paper runs {in_the_paper[setting.data]}."
        )
    first_rate = place(setting).rates[0]
    steps = len(safl(setting, first_rate, 1).schedule)
    lines.append(
        "Clients of one set hold the same classes: our reading of the paper's numbers of clusters, "
        "not a fact."
    )
    lines.append(
        "fine-tuned 0: as delivered; 1: after one local epoch. The paper does not say which it "
        "scores; its figure stands beside both, FedAvg's beside the first, which is its one model."
    )
    lines.append(
        f"SAFL and Hermes train {steps} x {s.guided + s.tune} epochs of stage 1 at the first rate "
        f"(more at higher ones) before the {s.stage_2} rounds of one epoch that the others train; "
        "local-long trains as long alone."
    )
    lines.append(
        "The paper gives no number of clients, no batch size (ours is 32) and no widths; "
        "fedavg runs on the network without norm layers."
    )
    return tuple(lines)


def seeds(setting: Setting) -> int:
    """Three, as the differences of the table ask for at least."""
    return 1 if setting.quick else 3


# ---- tables --------------------------------------------------------------------------------------


COUNTED = ("params", "model_mb", "mib_paper", "mib")
"""What the tables count beside accuracies."""


def table_1(setting: Setting) -> Study:
    """All methods at the first rate; SAFL by its number of clusters."""
    where = place(setting)
    printed = CLUSTERS.get(setting.data, {})
    rate = where.rates[0]
    rows = [*_alone(setting, rate), *_dense(setting), _hermes(setting, rate)]
    for k in where.clusters:
        row = Row(
            f"safl-k{k}",
            f"safl, K = {k}",
            experiment(setting, safl(setting, rate, k)),
            accuracy(printed.get(k)),
            lead=True,
        )
        rows.append(row)
    # Tables I and II are one table on two data sets.
    number = "II" if setting.data == "mnist" else "I"
    return Study(
        f"SAFL, Table {number}",
        f"Accuracy of all methods, {scale(setting).stage_2} rounds of stage 2, "
        f"density {density_at(rate):g} where a method prunes; K clusters.",
        tuple(rows),
        seeds(setting),
        counted=COUNTED,
        notes=(*notes(setting), "local and local-long stand in no row of the paper's table."),
    )


def _alone(setting: Setting, rate: float) -> list[Row]:
    """Training alone, and for as many epochs as SAFL trains in both stages."""
    s = scale(setting)
    method = Local(local=recipe(setting))
    steps = len(safl(setting, rate, 1).schedule)
    longer = s.stage_2 + steps * (s.guided + s.tune)
    return [
        Row("local", "local", experiment(setting, method)),
        Row("local-long", f"local, {longer} epochs", experiment(setting, method, longer)),
    ]


def _dense(setting: Setting) -> list[Row]:
    """The methods that do not prune."""
    printed = COMPARED.get(setting.data, {})
    rows = []
    for name, method in others(setting).items():
        # Section IV.D: personal models are scored, but of FedAvg its one model.
        lengths = SCORED[:1] if name == "fedavg" else SCORED
        reported = accuracy(printed.get(name), lengths)
        rows.append(Row(name, name, experiment(setting, method), reported))
    return rows


def _hermes(setting: Setting, rate: float) -> Row:
    _, reported = printed_at(setting, rate)
    run = experiment(setting, hermes(setting, rate))
    return Row("hermes", "hermes", run, accuracy(reported))


def table_3(setting: Setting) -> Study:
    """SAFL and Hermes by rate, and what of it depends on recovery, grouping and images."""
    where = place(setting)
    # Where the paper's two methods are closest and furthest apart.
    ends = (where.rates[0], where.rates[-1])
    rows: list[Row] = []
    for rate in where.rates:
        rows += _both(setting, rate)
        if rate in ends:
            run = experiment(setting, hermes(setting, rate, recover=False))
            name = f"hermes-without-recovery-{rate:g}"
            rows.append(Row(name, "hermes, no recovery", run, panel=_panel(rate)))
    for rate in ends:
        rows += _both(setting, rate, "not grouped", where.partition)
    if where.whole:
        # One seed: six times the images take six times as long.
        rows += _both(setting, ends[1], "all images", f"{where.whole}{GROUPED}", 1)
    return Study(
        "SAFL, Table III",
        f"SAFL beside Hermes, by density; K clusters, {scale(setting).stage_2} rounds of stage 2.",
        tuple(rows),
        seeds(setting),
        counted=COUNTED,
        notes=(
            *notes(setting),
            "Hermes without recovery, and classes that are not grouped, stand in no row of the "
            "paper's table.",
            "model MB: parameters left, four bytes each; the paper has one size for both methods.",
        ),
    )


def _panel(rate: float, what: str = "") -> str:
    density = f"density {density_at(rate):g}"
    return f"{density}, {what}" if what else density


def _both(
    setting: Setting,
    rate: float,
    what: str = "",
    partition: str | None = None,
    seeds: int | None = None,
) -> list[Row]:
    """Hermes and SAFL at a rate; the paper's figures beside the rows that are its own."""
    k = place(setting).clusters[-1]
    in_the_paper = what != "not grouped"
    reported_safl, reported_hermes = printed_at(setting, rate) if in_the_paper else (None, None)
    size = size_at(setting, rate) if in_the_paper else {}
    prefix = f"{what.replace(' ', '-')}-" if what else ""
    return [
        Row(
            f"{prefix}hermes-{rate:g}",
            "hermes",
            experiment(setting, hermes(setting, rate), partition=partition),
            {**accuracy(reported_hermes), **size},
            panel=_panel(rate, what),
            seeds=seeds,
        ),
        Row(
            f"{prefix}safl-k{k}-{rate:g}",
            f"safl, K = {k}",
            experiment(setting, safl(setting, rate, k), partition=partition),
            {**accuracy(reported_safl), **size},
            panel=_panel(rate, what),
            lead=True,
            seeds=seeds,
        ),
    ]


# ---- figures -------------------------------------------------------------------------------------


def figure_7(setting: Setting) -> Study:
    """Training curves: a run of its own for each length."""
    where = place(setting)
    rate = where.rates[0]
    k = where.clusters[-1]
    methods = {**others(setting), "hermes": hermes(setting, rate), "safl": safl(setting, rate, k)}
    rows = []
    for name, method in methods.items():
        # A shorter run is the beginning of the longer ones, so the points lie on one curve.
        for length in scale(setting).curve:
            row = Row(
                f"{name}-{length}",
                f"{name}, {length} rounds",
                experiment(setting, method, length),
                panel="rounds of stage 2",
                x=length,
                series=name,
            )
            rows.append(row)
    return Study(
        "SAFL, Figure 7",
        f"Accuracy by rounds of stage 2; "
        f"density {density_at(rate):g} and {k} clusters where a method has these.",
        tuple(rows),
        1,
        drawn=("accuracy_mean",),
        lines=True,
        notes=(*notes(setting), "The paper prints no numbers of this figure."),
    )


def figure_8(setting: Setting) -> Study:
    """Accuracy against what is sent, as a share of FedAvg's."""
    where = place(setting)
    rate = where.rates[-1]
    note = "Neither reading of its sizes reproduces the paper's share."
    counted_share = {}
    if setting.data in SHARE:
        rate, share = SHARE[setting.data]
        counted_share["share_paper"] = share
        note += f" The paper counts {share} % of FedAvg's bytes for SAFL, in its number of rounds."
    reported, _ = printed_at(setting, rate)
    k = where.clusters[-1]
    ours = Row(
        "safl",
        f"safl, K = {k}",
        experiment(setting, safl(setting, rate, k)),
        {**accuracy(reported), **counted_share},
        lead=True,
    )
    return Study(
        "SAFL, Figure 8",
        f"Accuracy beside bytes at density {density_at(rate):g}, in % of fedavg's; "
        "counted: SAFL's own formula with the size of an evenly slimmed network.",
        (*_dense(setting), _hermes(setting, rate), ours),
        seeds(setting),
        counted=("mib_paper", "share_paper", "mib", "share"),
        base="fedavg",
        notes=(*notes(setting), note),
    )


PAPER = Paper(
    "Li, Wang, Du, Cai & Wang, SAFL: Structure-Aware Personalized Federated Learning via "
    "Client-Specific Clustering and SCSI-Guided Model Pruning",
    tables={
        1: Part(("cifar10",), table_1, "digits"),
        2: Part(("mnist",), table_1, "digits"),
        3: Part(("cifar10", "mnist"), table_3, "digits"),
    },
    figures={
        7: Part(("cifar10", "mnist"), figure_7, "digits"),
        8: Part(("cifar10", "mnist"), figure_8, "digits"),
    },
)
