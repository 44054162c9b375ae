"""The rows are what SAFL's section IV says, in fewer rounds; its figures are typed as printed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fedgrove import papers
from fedgrove.data.partition import parse
from fedgrove.methods import SAFL, Hermes, name_of
from fedgrove.papers import Row, Setting, Study
from fedgrove.papers.safl import CLUSTERS, PAPER, RATES

PARTS = [*PAPER.tables.values(), *PAPER.figures.values()]


def table(n: int, data: str = "cifar10", quick: bool = False) -> Study:
    return PAPER.tables[n].study(Setting(data, quick=quick))


def rows(study: Study) -> Mapping[str, Row]:
    return {row.name: row for row in study.rows}


@pytest.mark.parametrize(
    ("n", "data", "clients", "net"), [(1, "cifar10", 10, "bn-cnn4"), (2, "mnist", 20, "bn-cnn2")]
)
def test_tables_1_and_2_are_run_as_section_4_says(
    n: int, data: str, clients: int, net: str
) -> None:
    found = rows(table(n, data))
    assert [name_of(row.experiment.method) for row in found.values()] == [
        "local", "local", "fedavg", "lg-fedavg", "fedbn", "hermes", "safl", "safl",
    ]  # fmt: skip
    for name, row in found.items():
        asked, local = row.experiment, row.experiment.method.local
        assert (asked.data, asked.clients, asked.cohort, asked.evaluate) == (
            data,
            clients,
            clients,
            0,
        )
        assert asked.net == (f"{net}:norm=none" if name == "fedavg" else net)
        assert local is not None
        assert (local.epochs, type(local.optimiser).__name__, local.optimiser.lr) == (
            1,
            "SGD",
            0.005,
        )
        assert asked.rounds == {"local-long": 380, "hermes": 104, "safl-k1": 104}.get(
            name, asked.rounds
        )
    lead = [row for row in found.values() if row.lead]
    assert [row.experiment.method.clusters for row in lead] == ([1, 5] if n == 1 else [1, 2])  # type: ignore[attr-defined]
    for row in lead:
        method = row.experiment.method
        assert isinstance(method, SAFL)
        assert (method.density, method.guided, method.tune) == (0.7, 50, 20)
        assert (method.sparse.weight, method.pull.weight) == (1e-4, 0.004)
    assert (parse(table(1).rows[0].experiment.partition or "").kind, table(1).seeds) == (
        "shards",
        3,
    )


def test_figures_are_as_printed() -> None:
    first, second = rows(table(1)), rows(table(2, "mnist"))
    assert {n: r.reported["accuracy_mean:0"] for n, r in first.items() if r.reported} == {
        "fedavg": 0.6198, "lg-fedavg": 0.9056, "fedbn": 0.9261, "hermes": 0.9273, "safl-k1": 0.9302, "safl-k5": 0.9329,
    }  # fmt: skip
    assert {n: r.reported["accuracy_mean:0"] for n, r in second.items() if r.reported} == {
        "fedavg": 0.8602, "lg-fedavg": 0.8439, "fedbn": 0.7013, "hermes": 0.9065, "safl-k1": 0.9309, "safl-k2": 0.9329,
    }  # fmt: skip
    # Table III repeats the best of Tables I and II; the sums of its two columns
    for data, k in (("cifar10", 5), ("mnist", 2)):
        assert RATES[data][0.3][0] == CLUSTERS[data][k]
    ours, theirs = (
        round(sum(v[i] for some in RATES.values() for v in some.values()), 2) for i in (0, 1)
    )
    assert (ours, theirs) == (829.19, 796.77)
    assert not any(row.reported for row in table(1, "fashion-mnist").rows)


def test_table_3_by_rate() -> None:
    """The paper has one number of clusters; we run the smallest and largest of Tables I and II."""
    for data, rates, (few, many) in (
        ("cifar10", (0.3, 0.5, 0.7), (1, 5)),
        ("mnist", (0.3, 0.4, 0.6, 0.65), (1, 2)),
    ):
        found = rows(table(3, data))
        kinds = {"hermes": (Hermes, 1), f"safl-k{few}": (SAFL, None), f"safl-k{many}": (SAFL, 0)}
        assert list(found) == [f"{name}-{rate:g}" for rate in rates for name in kinds]
        for rate in rates:
            for name, (kind, printed) in kinds.items():
                row = found[f"{name}-{rate:g}"]
                method = row.experiment.method
                assert isinstance(method, kind)
                assert method.schedule[-1] == round(1 - rate, 6)
                assert row.experiment.rounds == 100 + len(method.schedule)
                expected = (
                    {} if printed is None else {"accuracy_mean:0": RATES[data][rate][printed] / 100}
                )
                assert row.reported == pytest.approx(expected)
        assert [row.experiment.method.clusters for row in found.values() if row.lead] == [
            few,
            many,
        ] * len(rates)  # type: ignore[attr-defined]


def test_figures_7_and_8() -> None:
    seven, eight = (PAPER.figures[n].study(Setting("mnist")) for n in (7, 8))
    assert {(row.series, row.x) for row in seven.rows} == {
        (m, x) for m in ("fedavg", "lg-fedavg", "fedbn", "hermes", "safl") for x in (10, 30, 100)
    }
    assert seven.lines
    method = rows(eight)["safl"].experiment.method
    assert isinstance(method, SAFL)
    assert (method.density, method.clusters, rows(eight)["safl"].reported) == (
        0.4,
        2,
        {"accuracy_mean:0": 0.9224},
    )


@pytest.mark.parametrize("part", PARTS)
def test_a_quick_study_is_small_and_runs_on_built_in_images(part: papers.Part) -> None:
    study = part.study(Setting(part.look, quick=True))
    assert part.look == "digits"
    for row in study.rows:
        asked = row.experiment
        assert asked.clients is not None
        # Clients train on all that is not test.
        assert asked.validation == 0
        assert (asked.rounds or 0) * asked.clients < 50
        assert len(asked.federation().clients) == asked.clients
    assert study.notes[0].startswith("Quick")
    assert len(papers.experiments(study, (0,))) == len(study.rows)
