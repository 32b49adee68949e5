"""What a real trial teaches: the pair of what was forecast for it and what it measured."""

from __future__ import annotations

from collections.abc import Iterable

from ..outcomes import Fit, Outcome, OutOfMemory
from .caching import replay
from .calibration import Calibration, Pair, calibrated
from .constants import Constants, read_constants
from .need import need_of
from .values import Ask, Simulated


def pair_of(
    ask: Ask,
    simulated: Simulated,
    outcome: Outcome,
    *,
    constants: Constants | None = None,
    expandable: bool = False,
) -> Pair | None:
    """The device's pair, or None where the trial says nothing of it: it failed, or another tier ran out.

    `ask` and `simulated` are of the config that the trial ran: one with torch's optimizer in place of DeepSpeed's is
    another. On CUDA a trial measures what was reserved within its limit, which is more than it needed.
    """
    need = need_of(ask, simulated, constants or read_constants(), expandable=expandable)
    predicted = need.device.peak_bytes
    match outcome:
        case Fit():
            use = outcome.memory["device"]
            trace = simulated.traces.get("device")
            if ask.device == "cuda" and trace is not None:
                limit = use.limit_bytes or ask.device_bytes - need.beside.peak_bytes
                beside_tensors = predicted - need.tensors_bytes
                tried = replay(trace, expandable=expandable, limit_bytes=limit - beside_tensors)
                if tried.ran_out is None:
                    predicted = max(tried.peak_reserved_bytes, need.live_bytes) + beside_tensors
            return Pair(rung=ask.rung, predicted_bytes=predicted, measured_bytes=use.peak_bytes)
        case OutOfMemory(tier="device") if outcome.limit_bytes is not None:
            return Pair(rung=ask.rung, predicted_bytes=predicted, measured_bytes=outcome.limit_bytes, at_least=True)
        case _:
            return None


def learned(ask: Ask, pairs: Iterable[Pair], constants: Constants | None = None, *, exact: bool = True) -> Calibration:
    """The calibration of a machine with this kind of device after its trials."""
    rows = constants or read_constants()
    kind = ask.device if exact else "estimate"
    return calibrated(pairs, spread=rows.spread[kind], least=rows.least[kind])
