"""Grove, the method of this library: what it is worth, as tables that anybody can run again.

Rows, seeds and scoring are fixed here, before anything is run; nothing is chosen by test data.
There is no paper beside which the figures stand: the other methods of Table 1 are what Grove is
measured against. All rows of a table train on the same examples; a tenth of what is not test is
held out from all of them for validation, and only Grove looks at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedgrove.config.experiment import Experiment
from fedgrove.core import AnyMethod
from fedgrove.methods import CAAFP, STC, FedAvg, FedCHAR, FedPAQ, Grove, Local, PFed1BS
from fedgrove.parts.local import Adam, LocalTraining
from fedgrove.runs.run import with_recipe

from .studies import Paper, Part, Row, Setting, Study

SETS = ("motion", "uci-har", "wisdm")
COUNTED = ("kb_each", "share", "mib", "params")
"""What a device sends and gets, all that is sent in % of fedavg's and in MiB, and the model."""
MEASURES = ("accuracy_mean", "accuracy_std", "accuracy_worst10")


@dataclass(frozen=True)
class Scale:
    """How much is run, or, for ``--quick``, enough to see that it works."""

    rounds: int = 50
    cohort: int = 10
    clients: int | None = None
    lengths: tuple[int, ...] = (0, 3, 25)
    """Epochs of fine-tuning after which clients are scored."""
    local: LocalTraining | None = None
    """None: as the data set's own defaults have it."""
    seeds: int = 10


FULL = Scale()
QUICK = Scale(
    rounds=5,
    cohort=3,
    clients=6,
    lengths=(0, 1),
    local=LocalTraining(2, 16, Adam(lr=1e-3)),
    seeds=1,
)


def scale(setting: Setting) -> Scale:
    """The study's, or a quick one, in as many rounds as are asked for."""
    found = QUICK if setting.quick else FULL
    return found if setting.rounds is None else replace(found, rounds=setting.rounds)


def experiment(setting: Setting, method: AnyMethod) -> Experiment:
    """A run of a method; clients are scored at the end only."""
    s = scale(setting)
    return Experiment(
        method if s.local is None else with_recipe(method, s.local),
        setting.data,
        split=setting.split,
        clients=s.clients,
        cohort=s.cohort,
        rounds=s.rounds,
        finetune=s.lengths,
        evaluate=0,
    )


# ---- methods -------------------------------------------------------------------------------------


EQUAL_SHARES = {"motion": 0.06, "uci-har": 0.05, "wisdm": 0.045}
"""With these sparse ternary compression sends 2 % of fedavg's bytes in 50 rounds, cohorts of 10."""


def others(setting: Setting) -> dict[str, AnyMethod]:
    """What Grove is measured against, by the name of the row.

    Sparse ternary compression sends about as many bytes as Grove, of the whole model as its paper
    has it; a sketch of .6 bits for each parameter is as many bytes.
    """
    share = EQUAL_SHARES.get(setting.data, 0.05)
    # A fifth of the rounds: 10 of 50, as FedCHAR's own table has it.
    warmup = max(1, scale(setting).rounds // 5)
    return {
        "local": Local(),
        "fedavg": FedAvg(),
        "fedchar": FedCHAR(warmup=warmup),
        # 15, 15 and 20 rounds of 50.
        "ca-afp": CAAFP(phases=(0.3, 0.3, 0.4)),
        "stc": STC(up=share, down=share),
        "stc-home": STC(up=share, down=share, head="home"),
        "fedpaq": FedPAQ(),
        "pfed1bs": PFed1BS(share=0.6),
    }


def parts_off() -> dict[str, Grove]:
    """Grove with one part off or another way, by the name of the row."""
    grove = Grove()
    return {
        "grove-one-group": replace(grove, finding=replace(grove.finding, most=1)),
        "grove-head-shared": replace(grove, home=False),
        "grove-no-own": replace(grove, own="none"),
        "grove-offset": replace(grove, own="offset"),
        "grove-pulled": replace(grove, own="pulled"),
        "grove-step-1": replace(grove, step=1.0),
        "grove-dense-up": replace(grove, up=1.0),
        "grove-dense-down": replace(grove, down=1.0),
        "grove-thin": replace(grove, density=0.75),
    }


SHARES = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Of an update, that sparse ternary compression sends in Figure 1, both ways."""
BUDGETS = ("0.5%", "1%", "2%", "3%", "5%")
"""Of fedavg's bytes, that Grove may send in Figure 1."""
SKETCHES = (0.1, 0.3, 0.6, 1.0)
"""Bits for each parameter in Figure 1."""


def by_share() -> dict[str, dict[str, AnyMethod]]:
    """The methods of Figure 1 that can send more or less, by the name of the line and the row."""
    lines: dict[str, dict[str, AnyMethod]] = {"stc": {}, "stc-home": {}, "pfed1bs": {}, "grove": {}}
    for share in SHARES:
        stc = STC(up=share, down=share, scope="layer")
        lines["stc"][f"stc-{share:g}"] = stc
        lines["stc-home"][f"stc-home-{share:g}"] = replace(stc, head="home")
    for share in SKETCHES:
        lines["pfed1bs"][f"pfed1bs-{share:g}"] = PFed1BS(share=share)
    for budget in BUDGETS:
        lines["grove"][f"grove-{budget}"] = Grove(bytes=budget)
    return lines


# ---- what every table says -----------------------------------------------------------------------


def about(setting: Setting) -> str:
    """The setting in a few words."""
    s = scale(setting)
    return f"{s.rounds} rounds, a cohort of {s.cohort}"


def notes(setting: Setting) -> tuple[str, ...]:
    """What each table must say."""
    lines = []
    if setting.quick:
        lines.append(
            "Quick: a few rounds of a few clients. No figure here says anything about a method."
        )
    lines.append(
        "All rows train on the same examples; a tenth of what is not test is held out from all of "
        "them, and only grove looks at it, to choose what its clients use."
    )
    lines.append("% sent: of fedavg's bytes; real messages, both ways, all exchanges of a run.")
    return tuple(lines)


# ---- tables and the figure -----------------------------------------------------------------------


def table_1(setting: Setting) -> Study:
    """Grove beside the methods it is measured against."""
    ours = {"grove": Grove(), "grove-1%": Grove(bytes="1%")}
    rows = _rows(setting, {**others(setting), **ours}, "grove")
    return Study(
        "Grove, Table 1",
        f"Grove beside other methods: accuracy, its spread over clients and what a device sends; "
        f"{about(setting)}.",
        tuple(rows),
        scale(setting).seeds,
        measures=MEASURES,
        counted=COUNTED,
        base="fedavg",
        notes=(
            *notes(setting),
            "fedpaq sends whole models down: its bytes cannot come near the others'.",
        ),
    )


def table_2(setting: Setting) -> Study:
    """What each part of Grove is worth: the same without it."""
    rows = _rows(setting, {"fedavg": FedAvg(), "grove": Grove(), **parts_off()}, "grove")
    return Study(
        "Grove, Table 2",
        f"Grove with one part off or another way; {about(setting)}. "
        "A positive difference under the table: the part is worth that much.",
        tuple(rows),
        scale(setting).seeds,
        measures=MEASURES,
        counted=COUNTED,
        base="fedavg",
        notes=notes(setting),
    )


KINDS = "users of several kinds"
NO_KINDS = "users without kinds"
NO_KIND_DATA = "digits"


def table_3(setting: Setting) -> Study:
    """Groups that are found, against the true kinds, and where there are none."""
    rows = []
    for name, method in {
        "fedchar": others(setting)["fedchar"],
        "ca-afp": others(setting)["ca-afp"],
        "grove": Grove(),
    }.items():
        rows.append(Row(name, name, experiment(setting, method), panel=KINDS, lead=name == "grove"))
        run = experiment(replace(setting, data=NO_KIND_DATA, split=None), method)
        even = replace(run, partition="iid")
        rows.append(Row(f"{name}-even", f"{name}, dealt evenly", even, panel=NO_KINDS))
    return Study(
        "Grove, Table 3",
        f"Groups that are found, beside the true kinds of users, which no method sees, and where "
        f"there are none; {about(setting)}.",
        tuple(sorted(rows, key=lambda row: row.panel != KINDS)),
        scale(setting).seeds,
        measures=("accuracy_mean",),
        counted=("group_count", "purity", "divided_in_round"),
        notes=(
            *notes(setting),
            "purity: the share of clients that are what most of their group are, mean over the "
            "seeds on which there are groups; known where data are made for kinds of users.",
            "fedchar and ca-afp are told that there are three groups.",
        ),
    )


def figure_1(setting: Setting) -> Study:
    """Accuracy against bytes, of methods that can send more or less as lines."""
    lines = by_share()
    rows = []
    for name, method in others(setting).items():
        if name not in lines:
            rows.append(Row(name, name, experiment(setting, method), series=name))
    for series, methods in lines.items():
        for name, method in methods.items():
            rows.append(Row(name, name, experiment(setting, method), series=series))
    return Study(
        "Grove, Figure 1",
        f"Accuracy against bytes, in % of fedavg's; {about(setting)}. Lines: one method with "
        "shares of an update from small to large.",
        tuple(rows),
        3 if scale(setting).seeds > 1 else 1,
        measures=MEASURES,
        counted=COUNTED,
        base="fedavg",
        against="share",
        lines=True,
        notes=notes(setting),
    )


def _rows(setting: Setting, methods: Mapping[str, AnyMethod], lead: str) -> list[Row]:
    rows = []
    for name, method in methods.items():
        rows.append(Row(name, name, experiment(setting, method), series=name, lead=name == lead))
    return rows


PAPER = Paper(
    "Grove is ours: see docs/grove.md",
    tables={
        1: Part(SETS, table_1, any_length=True),
        2: Part(SETS[:2], table_2, any_length=True),
        3: Part(SETS[:1], table_3, any_length=True),
    },
    figures={1: Part(SETS, figure_1, any_length=True)},
)
