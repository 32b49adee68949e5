"""From what the search found to the report: values in, one value out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .forecast.values import RungForecast
from .report import Report, Throughput, words
from .report.plan_result import rung_to_dict
from .search.grow import Grown
from .search.shortfall import Closest
from .search.tune import Tuned
from .search.walk import Walked
from .settings import Settings
from .values import Fit, ModelFacts, Record

Machine = tuple[Mapping[str, Any], Mapping[str, str]]  # hardware, versions


def result_of(
    settings: Settings,
    facts: ModelFacts,
    walked: Walked,
    grown: Grown,
    tuned: Tuned,
    ds_config: Mapping[str, Any],
    records: Sequence[Record],
    machine: Machine,
    seconds: float,
    forecasts: Iterable[RungForecast] = (),
) -> Report:
    """The report of a fit that found a config."""
    outcome = tuned.best.outcome
    assert isinstance(outcome, Fit)
    return Report(
        status="fit",
        rung=tuned.best.trial.rung,
        knobs=tuned.best.trial.knobs,
        ds_config=ds_config,
        throughput=Throughput(
            samples_per_second=outcome.samples_per_second, tokens_per_second=outcome.tokens_per_second
        ),
        memory=outcome.memory,
        largest_micro_batch=grown.largest_micro_batch,
        reasons={
            **_why_left(walked),
            tuned.best.trial.rung: "the first rung of the ladder that fits",
            **_not_needed(settings, walked),
            "grow": grown.reason,
            "tune": tuned.reason,
        },
        **_common(settings, facts, walked, records, machine, seconds),
        forecast=tuple(rung_to_dict(forecast, settings.gpus) for forecast in forecasts),
    )


def nothing_fits(
    settings: Settings,
    facts: ModelFacts,
    walked: Walked,
    closest: Closest | None,
    records: Sequence[Record],
    machine: Machine,
    seconds: float,
    forecasts: Iterable[RungForecast] = (),
) -> Report:
    """The report of a fit that found none: the closest rung, and what it lacks."""
    lacks = None
    if closest is not None:
        lacks = {"rung": closest.rung, "missing_bytes": closest.missing_bytes, "exact": closest.exact}
    return Report(
        status="nothing_fits",
        closest=lacks,
        reasons=_why_left(walked),
        **_common(settings, facts, walked, records, machine, seconds),
        forecast=tuple(rung_to_dict(forecast, settings.gpus) for forecast in forecasts),
    )


def _why_left(walked: Walked) -> dict[str, str]:
    """Each rung's last word."""
    tried = {record.trial.rung: words.of_outcome(record.outcome) for record in walked.records}
    return {**tried, **{skipped.rung: skipped.reason for skipped in walked.skipped}}


def _not_needed(settings: Settings, walked: Walked) -> dict[str, str]:
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    return {rung.name: "not tried: a rung above it fits" for rung in settings.ladder if rung.name not in known}


def _common(
    settings: Settings,
    facts: ModelFacts,
    walked: Walked,
    records: Sequence[Record],
    machine: Machine,
    seconds: float,
) -> dict[str, Any]:
    hardware, versions = machine
    return {
        "trials": tuple(records),
        "skipped": walked.skipped,
        "hardware": hardware,
        "versions": versions,
        "seconds": seconds,
        "out": str(settings.out),
        "question": {
            "workload": settings.source.name,
            "parameters": facts.parameters,
            "gpus": settings.gpus,
            "device": settings.device,
            "device_bytes": settings.device_bytes,
            "global_batch": settings.global_batch,
            "profile": settings.profile.name,
            "ladder": [rung.name for rung in settings.ladder],
        },
    }
