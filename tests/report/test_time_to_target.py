"""Time to an accuracy: two runs worked by hand, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from fedgrove.errors import InputError
from fedgrove.report.time_to_target import find_times, print_times, read_curve, write_time_report


def line(round: int, second: float, score: float | None, **more: Any) -> dict[str, Any]:
    """100 bytes up and 200 down in every exchange."""
    scored = {} if score is None else {"accuracy_mean": score}
    sent = {"bytes_up": 100, "bytes_down": 200}
    return {"round": round, **sent, "virtual_clock": second, **scored, **more}


QUICK = [line(1, 10.0, 0.5), line(2, 20.0, 0.7), line(3, 30.0, 0.6)]
GOOD = [line(1, 40.0, 0.6), line(2, 80.0, None), line(3, 120.0, 0.9)]


def test_two_runs_by_hand() -> None:
    """Quick reaches .7 at best, in round 2, at 20 s; the other first has as much in round 3."""
    found = find_times([read_curve("quick", "fedavg", QUICK), read_curve("good", "ditto", GOOD)])
    assert (found["metric"], found["to"], found["chosen"]) == (
        "accuracy",
        0.7,
        "the highest that all reach",
    )
    assert found["runs"] == [
        {
            "run": "quick",
            "method": "fedavg",
            "finished": True,
            "seconds_to": 20.0,
            "round": 2,
            "bytes_up": 200,
            "bytes_down": 400,
            "best": 0.7,
            "virtual_seconds": 30.0,
        },
        {
            "run": "good",
            "method": "ditto",
            "finished": True,
            "seconds_to": 120.0,
            "round": 3,
            # The bytes of the round that was not scored count too.
            "bytes_up": 300,
            "bytes_down": 600,
            "best": 0.9,
            "virtual_seconds": 120.0,
        },
    ]


def test_a_target_that_some_do_not_reach() -> None:
    curves = [
        read_curve("quick", "fedavg", QUICK),
        read_curve("good", "ditto", GOOD, finished=False),
    ]
    found = find_times(curves, 0.9)
    assert [run["seconds_to"] for run in found["runs"]] == [None, 120.0]
    assert found["runs"][0]["best"] == 0.7
    text = io.StringIO()
    print_times(curves, found, text)
    rows = [row.split() for row in text.getvalue().splitlines()]
    assert "accuracy 90.00 %" in text.getvalue()
    assert rows[2][:5] == ["quick", "fedavg", "not", "reached", "-"]
    assert rows[3][:6] == ["good", "(unfinished)", "ditto", "2", "min", "*"]


def test_over_seeds_there_is_a_mean_where_all_reach_it() -> None:
    """10 and 20 s: mean 15, sample deviation 7.07."""
    curves = [
        read_curve("sweep/fedavg-s0", "fedavg", [line(1, 10.0, 0.5)]),
        read_curve("sweep/fedavg-s1", "fedavg", [line(1, 10.0, 0.2), line(2, 20.0, 0.5)]),
        read_curve("sweep/local-s0", "local", [line(1, 1.0, 0.4), line(2, 2.0, 0.45)]),
    ]
    found = find_times(curves, 0.5)
    fedavg, local = found["groups"]
    assert (fedavg["group"], fedavg["runs"], fedavg["reached"]) == ("sweep/fedavg", 2, 2)
    assert fedavg["seconds_to_mean"] == 15.0
    assert fedavg["seconds_to_std"] == pytest.approx(7.0710678)
    assert (local["reached"], local["seconds_to_mean"], local["seconds_to_std"]) == (0, None, None)
    text = io.StringIO()
    print_times(curves, found, text)
    assert "15 s ± 7.07 s" in text.getvalue()


def test_of_an_error_less_is_better() -> None:
    words = {"metric": "mae", "more_is_better": False, "share": False}
    one = [{**line(k, 10.0 * k, None), **words, "mae_mean": 5.0 - k} for k in (1, 2, 3)]
    other = [{**line(k, 1.0 * k, None), **words, "mae_mean": 6.0 - k} for k in (1, 2)]
    found = find_times([read_curve("one", "fedavg", one), read_curve("other", "local", other)])
    assert (found["metric"], found["to"]) == ("mae", 4.0)
    assert [run["seconds_to"] for run in found["runs"]] == [10.0, 2.0]
    # No share: any number may be asked for.
    assert find_times([read_curve("one", "fedavg", one)], 2.5)["runs"][0]["seconds_to"] == 30.0


def test_the_page_has_a_plot_and_the_table(tmp_path: Path) -> None:
    curves = [read_curve("quick", "fedavg", QUICK), read_curve("good <b>", "ditto", GOOD)]
    write_time_report(curves, find_times(curves), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Virtual time to accuracy 70.00 %" in page
    assert "virtual seconds" in page
    assert "<td>good &lt;b&gt;</td>" in page
    assert '<script src="http' not in page


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match=r"^no client was scored during run; run it again with"):
        read_curve("run", "fedavg", [line(1, 1.0, None)])
    with pytest.raises(InputError, match=r"^no client was scored during"):
        read_curve("run", "fedavg", [])
    with pytest.raises(InputError, match=r"^run mixes data sets"):
        read_curve("run", "fedavg", [line(1, 1.0, None, tasks={})])
    old = line(1, 1.0, 0.5)
    del old["virtual_clock"]
    with pytest.raises(InputError, match=r"^run was trained by a version without a clock"):
        read_curve("run", "fedavg", [old])
    one = read_curve("one", "fedavg", QUICK)
    other = read_curve("two", "fedavg", [{**line(1, 1.0, None), "metric": "f1", "f1_mean": 0.5}])
    with pytest.raises(InputError, match=r"^one reports accuracy and two f1; compare runs of one"):
        find_times([one, other])
    for wanted in (0.0, 90.0, -1.0, float("nan")):
        with pytest.raises(
            InputError, match=r"^--to is .*; it must be a share, such as 0.9 for 90 % "
        ):
            find_times([one], wanted)
