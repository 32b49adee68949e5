"""How many times as fast, and whether that is more than noise: cells measured in turns, A B C A B C …"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log, sqrt
from statistics import mean, stdev

from ..report.probe_result import Ratio

# What is believed of the noise of one trial before any was repeated: 3 %, worth two degrees of freedom.
_PRIOR_NOISE, _PRIOR_FREEDOM = 0.03, 2

# Student's t, two-sided 95 %, by degrees of freedom from 1 on; the last one stands for more (Student 1908).
_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_MANY = 2.0


def spread_of(rates: Sequence[float]) -> float | None:
    """The relative standard deviation of a cell's repeats; None where it was measured once."""
    return stdev(rates) / mean(rates) if len(rates) > 1 else None


def ratios(
    rates: Mapping[int, Mapping[int, float]], reference: int, *, within: Mapping[int, float]
) -> dict[int, Ratio]:
    """Cell → ratio to the reference. rates: cell → turn → rate; within: cell → relative error inside its trials.

    What drifts (clocks, heat, neighbours) falls on all of a turn alike, so that cells are compared turn by turn. In
    logarithms a turn and a cell each add their part, and what neither explains is noise, the same for all cells. Where
    nothing was repeated, the noise is what is usual, or the spread of steps inside the trials where that is wider.
    """
    noise, freedom = _noise(rates, within)
    quantile = _QUANTILES[freedom - 1] if freedom <= len(_QUANTILES) else _MANY
    ours = rates[reference]
    found = {}
    for cell, theirs in rates.items():
        shared = [turn for turn in theirs if turn in ours]
        if cell == reference or not shared:
            continue
        difference = mean(log(theirs[turn] / ours[turn]) for turn in shared)
        margin = quantile * noise * sqrt(2 / len(shared))
        found[cell] = Ratio(times=exp(difference), low=exp(difference - margin), high=exp(difference + margin))
    return found


def _noise(rates: Mapping[int, Mapping[int, float]], within: Mapping[int, float]) -> tuple[float, int]:
    """Of one trial, relative, and the degrees of freedom of that estimate."""
    prior = max(_PRIOR_NOISE, *within.values()) if within else _PRIOR_NOISE
    turns = max((len(one) for one in rates.values()), default=0)
    whole = {cell: one for cell, one in rates.items() if len(one) == turns}
    squares, freedom = 0.0, 0
    if turns > 1 and len(whole) > 1:
        logs = {cell: {turn: log(rate) for turn, rate in one.items()} for cell, one in whole.items()}
        cells = {cell: mean(one.values()) for cell, one in logs.items()}
        middle = mean(cells.values())
        by_turn = {
            turn: mean(one[turn] for one in logs.values() if turn in one) for one in logs.values() for turn in one
        }
        rest = [
            value - cells[cell] - by_turn[turn] + middle for cell, one in logs.items() for turn, value in one.items()
        ]
        squares, freedom = sum(one**2 for one in rest), (len(whole) - 1) * (turns - 1)
    return sqrt((_PRIOR_FREEDOM * prior**2 + squares) / (_PRIOR_FREEDOM + freedom)), _PRIOR_FREEDOM + freedom
