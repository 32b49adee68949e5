"""When a search has found enough: by what was told so far alone, so that a killed search stops where it would have.

By tests/benchmarks/samplers.py, at a noise of 2 % and 5 %: of 16 trials a wait of 8 saves one and loses nothing, of 24
it saves 4 to 8 and loses 1 to 2 %. Shorter waits lose 2 to 3 %, and 5 to 7 % when they count from the first trial on; a
wait of 10 hardly ends anything. Neither does Optuna's RegretBoundEvaluator; its EMMREvaluator ends about as well as a
wait does, for two more fits of the GP per trial. Neither knows of the memory constraint.
"""

from __future__ import annotations

from collections.abc import Sequence

STARTUP = 5  # trials before it counts: the start, the usual settings, one at random, and the sampler's first two
WAIT = 8  # trials in a row that may gain nothing


def enough(scores: Sequence[float | None], gain: float) -> bool:
    """Whether the last WAIT trials together gained less than the share `gain`. None: it did not fit; 0: go on."""
    before = [one for one in scores[:-WAIT] if one is not None]
    if len(scores) < STARTUP + WAIT or not before or gain <= 0:
        return False
    return max(one for one in scores if one is not None) < max(before) * (1 + gain)
