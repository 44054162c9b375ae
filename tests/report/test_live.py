"""How a run that trains is shown: lines, a table, a page on which names stay text."""

from __future__ import annotations

import io
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from fedgrove.report.live import ROWS, Look, ending, in_terminal, line_of, page_of, thinned, total

LOOK = Look("runs/a", "ditto", "digits", "training", 3, 10, 3 << 20, "accuracy 90.0 %", 6.0, 14.0)


def in_text(looks: list[Look], height: int = 20) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(in_terminal(looks, height))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)


def test_a_line_says_what_is_left_only_of_a_run_that_goes_on() -> None:
    assert line_of(LOOK).endswith("accuracy 90.0 %, 3.0 MiB, 6 s, about 14 s left")
    assert line_of(replace(LOOK, state="finished")).endswith("3.0 MiB, 6 s")
    assert (
        line_of(replace(LOOK, score="", left=None)) == "runs/a: training, round 3/10, 3.0 MiB, 6 s"
    )


def test_the_last_sentence_says_how_it_ended() -> None:
    assert ending(replace(LOOK, state="finished", why="accuracy 95.0 %")) == (
        "runs/a is finished. accuracy 95.0 %. Its table: fedgrove compare runs/a"
    )
    assert "fedgrove resume runs/a" in ending(replace(LOOK, state="stopped"))
    assert ending(replace(LOOK, state="failed", why="no.")) == "runs/a failed after 3 rounds: no."


def test_a_table_shows_those_that_train_first_and_says_how_many_more() -> None:
    looks = [replace(LOOK, path=f"r{i}", state="finished") for i in range(5)]
    text = in_text([*looks, replace(LOOK, path="[red]x")], height=2)
    lines = text.splitlines()
    assert lines[1].startswith("[red]x")
    assert lines[2].startswith("r0")
    assert lines[3] == "... and 4 more"


def test_of_a_sweep_the_time_left_is_that_of_all() -> None:
    # 6 s for 3 of 20 rounds, and 10 + 7 are ahead.
    text = in_text([LOOK, replace(LOOK, path="b", state="waiting", round=0, spent=0.0)])
    assert text.splitlines()[-1] == "2 runs: 3 of 20 rounds, 6.0 MiB, 6 s, about 34 s left"
    assert "left" not in text.splitlines()[0]
    over = replace(LOOK, state="failed")
    assert "2 failed" in page_of("x", [over, over])
    assert "left" not in total([over, over])


@pytest.mark.parametrize("several", [False, True])
def test_names_stay_text_on_a_page(several: bool) -> None:
    bad = "<script>alert(1)</script>"
    look = replace(LOOK, path=bad, method=bad, data=bad, score=bad, state="failed", why=bad)
    page = page_of(bad, [look] * (2 if several else 1))
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in page


def test_a_page_refreshes_until_all_is_over() -> None:
    over = replace(LOOK, state="finished")
    assert "http-equiv" in page_of("x", [LOOK, over])
    assert "http-equiv" not in page_of("x", [over])


def test_a_page_without_rounds_and_one_of_many_runs_open() -> None:
    assert "<svg" not in page_of("x", [Look("a", "m", "d", "waiting")])
    assert "no longer" not in page_of("x", [])
    long = tuple((i, float(i % 7)) for i in range(100_000))
    many = page_of("x", [replace(LOOK, scores=long, traffic=long)] * 10_000)
    assert "and 9800 more" in many
    assert many.count("<tr>") == ROWS + 1
    one = page_of("x", [replace(LOOK, scores=long, traffic=long)])
    assert len(one) < 100_000


def test_a_curve_ends_with_the_last_point() -> None:
    points = [(i, float(i)) for i in range(1001)]
    assert thinned(points)[-1] == (1000, 1000.0)
    # 1001 points at most 300: every fourth.
    assert thinned(points)[1] == (4, 4.0)
