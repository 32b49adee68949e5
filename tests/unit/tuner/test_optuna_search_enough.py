"""When a search has found enough."""

from __future__ import annotations

from autods.tuner.optuna_search import STARTUP, WAIT, has_converged


def test_a_search_goes_on_while_it_gains() -> None:
    scores = [100.0 * 1.02**number for number in range(4 * WAIT)]
    assert not any(has_converged(scores[:count], 0.01) for count in range(len(scores) + 1))


def test_it_ends_when_the_last_trials_gained_less_than_asked() -> None:
    scores = [100.0] * (STARTUP - 1) + [120.0] + [120.5] * WAIT
    assert has_converged(scores, 0.01)
    assert not has_converged(scores[:-1], 0.01)
    assert not has_converged(scores, 0.001)


def test_small_gains_add_up() -> None:
    assert not has_converged([100.0] * STARTUP + [100 + 1.5 * number / WAIT for number in range(1, WAIT + 1)], 0.01)


def test_the_first_trials_are_never_held_against_it() -> None:
    assert not any(has_converged([100.0] * count, 0.01) for count in range(STARTUP + WAIT))
    assert has_converged([100.0] * (STARTUP + WAIT), 0.01)


def test_what_does_not_fit_gains_nothing() -> None:
    assert has_converged([100.0] * STARTUP + [None] * WAIT, 0.01)
    assert not has_converged([None] * 3 * WAIT, 0.01)


def test_zero_never_ends_it() -> None:
    assert not has_converged([100.0] * 5 * WAIT, 0.0)
