"""Walk the ladder from the rung that should be fastest to the slowest until one fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.rungs import Rung
from ..forecast.predict.verdict import find_deciding_tier
from ..forecast.values import PartitionedBuild
from ..report.results.fit import ClosestRung
from ..report.results.plan import find_closest
from ..types import Failed, Fit, Outcome, OutOfMemory, Record, Skipped, Tier, first_line, is_machines_fault
from .candidates import Candidate, first_trial, without_checkpointing
from .contestant import Contestant, make_contestant
from .forecaster import lacking_bytes, why_impossible
from .prospects import favours, has_choice, order_by_time
from .trials import FitContext, fits_well


@dataclass(slots=True, kw_only=True)
class WalkResult:
    """The records of a walk, and how it ended.

    `entrants` are the configs that were tried, in order.
    `winner` is the first rung that fits well. If none does, it is the first one that fits although its allocator had to
    flush its cache in the steps, or None. `stopped` is a failure that every rung would share.
    `least_micro_batch` and `own_batch` are those of the `FitContext` at its end.
    """

    records: list[Record] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    lessons: Lessons = field(default_factory=lambda: Lessons())
    winner: Record | None = None
    stopped: Record | None = None
    entrants: list[Contestant] = field(default_factory=list)
    least_micro_batch: int = 1
    own_batch: int | None = None

    def find_entrant(self) -> Contestant:
        """The config of the winner."""
        return next(entrant for entrant in self.entrants if self.winner in entrant.all_records)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """Reasons against rungs that have not run yet, from the outcomes of others.

    `host_full` lists rungs under which the host ran out of memory. `broken_ops` maps a DeepSpeed op to the error.
    `refused` has the rungs whose config was refused, each with the error.
    """

    host_full: tuple[Rung, ...] = ()
    broken_ops: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[tuple[Rung, str], ...] = ()

    def add(self, rung: Rung, outcome: Outcome) -> Lessons:
        """These lessons and that of one outcome. A full device teaches nothing: a leaner rung can need more of it."""
        match outcome:
            case OutOfMemory(tier="host" | "pinned"):
                return replace(self, host_full=(*self.host_full, rung))
            case Failed(op=str(op), evidence=evidence):
                return replace(self, broken_ops={**self.broken_ops, op: evidence})
            case Failed(action="fix_config", evidence=evidence):
                return replace(self, refused=(*self.refused, (rung, evidence)))
            case _:
                return self

    def reason_to_skip(self, rung: Rung, ops: tuple[str, ...]) -> str | None:
        """The reason to skip a rung that needs these ops; None when there is none."""
        for full in self.host_full:
            if (states := _states_on_host(full)) and states <= _states_on_host(rung):
                return f"it needs as much host memory as {full.name}, which ran out of it"
        for refused, evidence in self.refused:
            if refused.name != rung.name and _includes(rung.ds_config, refused.ds_config):
                return f"it sets all that {refused.name} does, whose config is refused: {first_line(evidence)}"
        return next((f"it needs {op}: {why}" for op, why in self.broken_ops.items() if op in ops), None)

    def rules_out(self, candidate: Candidate) -> bool:
        """Whether the rung's config was refused, or needs an op that is broken."""
        is_refused = any(refused.name == candidate.rung.name for refused, _ in self.refused)
        return is_refused or any(op in self.broken_ops for op in candidate.ops)

    def is_refused_at_two_stages(self) -> bool:
        """Whether rungs of two ZeRO stages were refused with the same error, so that no rung brings its cause."""
        stages: dict[str, set[int]] = {}
        for rung, evidence in self.refused:
            stages.setdefault(evidence, set()).add(rung.stage)
        return any(len(each) > 1 for each in stages.values())


def _includes(config: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether the config has all keys of the other one, with the same values."""
    return all(
        _includes(config.get(key) or {}, value) if isinstance(value, Mapping) else config.get(key) == value
        for key, value in part.items()
    )


def _states_on_host(rung: Rung) -> set[str]:
    return {state for state, tier in rung.places.items() if tier == "host"}


def walk_ladder(rungs: Sequence[Candidate], context: FitContext) -> WalkResult:
    """Try rungs until one fits, in the order of forecast time.

    Each starts at the micro batch of its forecast, without checkpointing where that should be faster, and falls back to
    smaller ones. Where no time can be forecast, it starts at the smallest, and the order is the ladder's. A rung is
    skipped when its forecast cannot fit, or by `Lessons`. A full device does not skip the rungs below: a leaner rung
    can need more device memory (ZeRO-2 with CPU offload more than ZeRO-1). When no rung fits,
    the one whose forecast lacks least of the device still runs, so that its verdict is measured. One that would
    overfill the node's memory or disk does not.

    A refused config leaves out the rungs that set as much and more. It ends the walk once a rung of another stage is
    refused alike, or no rung fits.
    """
    memory, profile = context.memory, context.settings.profile
    walked = WalkResult(least_micro_batch=context.least_micro_batch)
    impossible: dict[str, tuple[int, Candidate]] = {}

    def try_config(candidate: Candidate) -> bool:
        """Run the config's trials; True when that ends the walk."""
        nonlocal context
        entrant = make_contestant(candidate, context, profile.grow.most_trials, profile.timed)
        before = len(memory.records)
        entrant.walk(context.try_trial)
        walked.entrants.append(entrant)
        walked.records += memory.records[before:]
        last, context = (entrant.entry or entrant.records)[-1], entrant.context
        walked.least_micro_batch = context.least_micro_batch
        walked.own_batch = context.fixed_batch
        walked.winner = last if fits_well(last) else None
        walked.lessons = walked.lessons.add(candidate.rung, last.outcome)
        walked.stopped = last if _stops_walk(last, walked.lessons) else None
        return walked.winner is not None or walked.stopped is not None

    def try_candidate(candidate: Candidate) -> bool:
        """Try the rung's configs, the faster one first; True when that ends the walk."""
        plain = without_checkpointing(candidate)
        is_faster = has_choice(candidate, context) and favours(plain, candidate, context)
        if is_faster and try_config(plain):
            return True
        return not walked.lessons.rules_out(candidate) and try_config(candidate)

    for candidate in order_by_time(rungs, context):
        reason = candidate.skip or walked.lessons.reason_to_skip(candidate.rung, candidate.ops)
        if reason is None:
            forecast = context.forecast(first_trial(candidate, profile.walk, context.sizes[0]))
            reason = why_impossible(forecast)
            missing_bytes = None if reason is None or forecast is None else lacking_bytes(forecast)
            if missing_bytes is not None:
                impossible[candidate.rung.name] = missing_bytes, candidate
        if reason is not None:
            walked.skipped.append(Skipped(rung=candidate.rung.name, reason=reason))
            memory.listen(walked.skipped[-1])
            continue
        if try_candidate(candidate):
            break
    else:
        if impossible and not any(isinstance(record.outcome, Fit) for record in walked.records):
            closest = min(impossible, key=lambda name: impossible[name][0])
            walked.skipped = [skipped for skipped in walked.skipped if skipped.rung != closest]
            try_candidate(impossible[closest][1])
    if walked.stopped is None and walked.winner is None:
        walked.winner = next((entrant.walked for entrant in walked.entrants if entrant.walked is not None), None)
    if walked.stopped is None and walked.winner is None:  # with the config mended, a rung that was refused may fit
        walked.stopped = next((record for record in walked.records if _is_refused(record.outcome)), None)
    return walked


def _is_refused(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed) and outcome.action == "fix_config"


def _stops_walk(record: Record, lessons: Lessons) -> bool:
    """Whether every rung would fail alike: the user has to repair the code, the config or the machine first."""
    match record.outcome:
        case Failed(op=str()):
            return False  # only the rungs that need this op fail
        case Failed(action="fix_code"):
            return True
        case Failed(action="fix_config"):  # it may name what this rung's stage or offloading brings
            return lessons.is_refused_at_two_stages()
        case outcome:
            return is_machines_fault(outcome)


def find_closest_rung(walked: WalkResult, context: FitContext) -> ClosestRung | None:
    """The rung that lacked least device memory; None when the walk was stopped or the amount is unknown.

    Where the limit is a budget below the card's memory, a trial without it measures the amount, if the fit's budget has
    room for it. Where no rung was tried, the forecasts that refused them tell the rung and the tier that it lacks.
    """
    if walked.stopped:
        return None
    if not walked.records:
        return _find_closest_by_forecast(context)
    settings = context.settings
    lacking: list[tuple[bool, ClosestRung]] = []
    for record in {record.trial.rung: record for record in walked.records}.values():
        if not isinstance(record.outcome, OutOfMemory) or record.outcome.tier != "device":
            continue
        rung, missing, ran = record.trial.rung, record.outcome.missing_bytes, False
        closest = None if missing is None else ClosestRung(rung=rung, missing_bytes=missing)
        if settings.is_limited and context.may_run(1):
            steps = settings.profile.walk
            unlimited = replace(record.trial, limited=False, purpose="shortfall", steps=steps, repeat=0)
            if isinstance(free := context.memory.run(unlimited).outcome, Fit):
                ran, missing = True, free.device_peak_bytes - settings.device_bytes
                if missing > 0:  # otherwise its peak fits the limit: fragmentation took the rest
                    closest = ClosestRung(rung=rung, missing_bytes=missing, exact=True)
        if closest is not None:
            lacking.append((ran, closest))
    # A lower bound counts the allocation that failed, not those after it. So a rung that ran without the limit goes
    # before one that did not.
    return min(lacking, key=lambda item: (not item[0], item[1].missing_bytes))[1] if lacking else None


def _find_closest_by_forecast(context: FitContext) -> ClosestRung | None:
    """The rung that exceeds its limits least; the low end of its forecast gives a lower bound. None without one."""
    refused = (forecast for forecast in context.forecaster.forecasts.values() if why_impossible(forecast) is not None)
    forecast = find_closest(refused)
    if forecast is None:
        return None
    tier = find_deciding_tier(forecast.memory)
    missing_bytes = forecast.memory[tier].low_bytes - (forecast.memory[tier].limit_bytes or 0)
    return ClosestRung(rung=forecast.rung, missing_bytes=missing_bytes, tier=tier)


def propose_partitioned_build(
    rungs: Sequence[Candidate], walked: WalkResult, context: FitContext
) -> PartitionedBuild | None:
    """What `--zero-init` gives rungs that lack memory to build, by forecasts and trials; None where it helps none."""
    steps = context.settings.profile.walk
    trials = [first_trial(rung, steps, context.sizes[0]) for rung in rungs if rung.skip is None]
    outcomes = ((record.trial.rung, record.outcome) for record in walked.records)
    ran_out: dict[str, Tier] = {
        rung: outcome.tier
        for rung, outcome in outcomes
        if isinstance(outcome, OutOfMemory) and outcome.tier != "pinned" and outcome.phase in ("build", "init")
    }
    return context.forecaster.propose_partitioned_build(trials, ran_out)


def untried_rungs(rungs: Sequence[Candidate], walked: WalkResult) -> tuple[Candidate, ...]:
    """The rungs that the walk neither tried nor skipped, without those that keep states on NVMe.

    NVMe rungs move their states in each step, and their op takes minutes to build: they run only where nothing else
    fits.
    """
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    return tuple(
        candidate
        for candidate in rungs
        if candidate.skip is None and candidate.rung.name not in known and not candidate.rung.uses_nvme
    )
