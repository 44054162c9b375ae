"""The rule by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgrove.choosing.decision import (
    Trial,
    measure_margin,
    predict_full_score,
    rank_trials,
    select_promising,
)


def trial(method: str, score: float, at_half: float | None = None, **others: object) -> Trial:
    """Two clients of one seed, a tenth apart; a score in the middle where it is given."""
    made = Trial(
        method,
        rounds=10,
        epochs=0,
        clients={(0, 0): score - 0.05, (0, 1): score + 0.05},
        untuned=score,
        half=5 if at_half is not None else 0,
        untuned_at_half=at_half or 0.0,
    )
    return replace(made, **others)  # type: ignore[arg-type]


def test_scores_are_means_over_clients_then_seeds() -> None:
    # Seed 0: (.2 + .4) / 2 = .3; seed 1, of which one client answered: .9; so .6. The worst tenth
    # of two clients, and of one, is the worst client: (.2 + .9) / 2 = .55.
    made = trial("a", 0, clients={(0, 0): 0.2, (0, 1): 0.4, (1, 0): 0.9})
    assert made.score == pytest.approx(0.6)
    assert made.worst_tenth == pytest.approx(0.55)
    # Of errors the largest is the worst: (.4 + .9) / 2.
    assert replace(made, more_is_better=False).worst_tenth == pytest.approx(0.65)


def test_heading_by_hand() -> None:
    # From .4 in round 5 to .5 in round 10: .1 with a doubling. From 10 to 40 rounds are two
    # doublings: .5 + 2 * .1.
    rising = trial("a", 0.5, at_half=0.4)
    assert predict_full_score(rising, 40) == pytest.approx(0.7)
    # One that falls is not expected to fall further than it has.
    assert predict_full_score(trial("a", 0.5, at_half=0.6), 40) == pytest.approx(0.5)
    # Without a score in the middle there is nothing to go by; nor without rounds to come.
    assert predict_full_score(trial("a", 0.5), 40) == pytest.approx(0.5)
    assert predict_full_score(rising, 10) == pytest.approx(0.5)
    # Fine-tuned it is at .8 already: it will not be worse, and the gain is of the untuned.
    assert predict_full_score(replace(rising, clients={(0, 0): 0.8}), 40) == pytest.approx(0.8)
    # An error that fell from .6 to .5: .5 - 2 * .1.
    assert predict_full_score(trial("a", 0.5, 0.6, more_is_better=False), 40) == pytest.approx(0.3)


def test_a_slow_starter_goes_on() -> None:
    # Five methods: a quarter is ceil(5 / 4) = 2 by score, a and b; 2 by heading: of e, which gained
    # .2 with the last doubling and has two to come (.3 + .4 = .7), and a (.6).
    trials = [
        trial("a", 0.60, 0.60),
        trial("b", 0.55, 0.54),
        trial("c", 0.50, 0.50),
        trial("d", 0.40, 0.40),
        trial("e", 0.30, 0.10),
    ]
    assert select_promising(trials, 40) == ["a", "b", "e"]
    # With no rounds to come where it is heading is where it is.
    assert select_promising(trials, 10) == ["a", "b"]


def test_of_nine_at_most_six_go_on_and_at_least_three() -> None:
    same = [trial(name, 0.5) for name in "abcdefghi"]
    assert select_promising(same, 40) == ["a", "b", "c"]


def test_the_best_is_first_and_of_equals_the_cheaper() -> None:
    trials = [trial("a", 0.5, bytes_each=9), trial("b", 0.6), trial("c", 0.5, bytes_each=3)]
    assert [each.method for each in rank_trials(trials)] == ["b", "c", "a"]
    errors = [replace(each, more_is_better=False) for each in trials]
    assert [each.method for each in rank_trials(errors)] == ["c", "a", "b"]


def test_margin_by_hand() -> None:
    # Gaps .1, .3 (seed 0), .2, .2 (seed 1): mean .2; squared deviations .01 + .01 + 0 + 0, divided
    # by 3: sd .0816, and .0816 / sqrt(4) = .0408.
    a = trial("a", 0, clients={(0, 0): 0.5, (0, 1): 0.7, (1, 0): 0.6, (1, 1): 0.8})
    b = trial("b", 0, clients={(0, 0): 0.4, (0, 1): 0.4, (1, 0): 0.4, (1, 1): 0.6})
    found = measure_margin(a, b)
    assert found.lead == pytest.approx(0.2)
    assert found.error == pytest.approx(0.040825, abs=1e-6)
    assert (found.clients, found.seeds, found.seeds_ahead) == (4, 2, 2)
    assert found.is_clear
    assert not found.is_noise
    # The other way round, and of errors the other way round again.
    assert measure_margin(b, a).lead == pytest.approx(-0.2)
    assert measure_margin(b, a).is_noise
    down = [replace(each, more_is_better=False) for each in (b, a)]
    assert measure_margin(*down).lead == pytest.approx(0.2)


def test_a_lead_on_one_seed_of_two_is_not_clear() -> None:
    # Gaps .4, .4, .4 and, on the other seed, -.01: mean .2975, error .1025: three of them.
    a = trial("a", 0, clients={(0, 0): 0.9, (0, 1): 0.9, (0, 2): 0.9, (1, 0): 0.49})
    b = trial("b", 0, clients={(0, 0): 0.5, (0, 1): 0.5, (0, 2): 0.5, (1, 0): 0.50})
    found = measure_margin(a, b)
    assert found.error is not None
    assert found.lead > 2 * found.error
    assert found.seeds_ahead == 1
    assert not found.is_clear
    # On half of the seeds it is behind: not even likely.
    assert found.is_noise


def test_one_seed_is_never_clear() -> None:
    found = measure_margin(trial("a", 0.9), trial("b", 0.5))
    assert (found.seeds, found.seeds_ahead) == (1, 1)
    assert found.is_one_seed
    assert not found.is_clear
    assert not found.is_noise


def test_one_client_in_common_says_nothing_of_how_sure() -> None:
    a = trial("a", 0, clients={(0, 0): 0.9, (0, 1): 0.9})
    found = measure_margin(a, trial("b", 0, clients={(0, 1): 0.5}))
    assert (found.clients, found.error) == (1, None)
    assert found.is_noise


@given(
    scores=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    gains=st.lists(st.floats(-0.5, 0.5), min_size=12, max_size=12),
)
def test_the_best_so_far_always_goes_on(scores: list[float], gains: list[float]) -> None:
    trials = []
    for i, (score, gain) in enumerate(zip(scores, gains, strict=False)):
        trials.append(trial(str(i), score, score - gain))
    chosen = select_promising(trials, 50)
    assert rank_trials(trials)[0].score == max(t.score for t in trials if t.method in chosen)
    assert len(chosen) <= max(4, 2 * -(-len(trials) // 4))
