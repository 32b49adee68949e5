"""What a search found, and the report of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..forecast.values import RungForecast
from ..report import text
from ..report.results import ClosestRung, Report, Throughput
from ..report.serialize import rung_to_dict
from ..settings import Settings
from ..system.host import threads_per_rank
from ..types import Fit, Knobs, ModelFacts, Record
from ..workload.script_source import describe_launch
from .candidates import refusal_reason
from .certificate import certificate_to_json
from .certify import CertifyResult
from .ladder_walk import WalkResult
from .optuna_search import TuneResult
from .race import RaceResult


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A config that fits, and how each step came to it. ds_config: as the user gets it."""

    facts: ModelFacts
    walked: WalkResult
    raced: RaceResult
    tuned: TuneResult
    certified: CertifyResult | None
    ds_config: Mapping[str, Any]

    @property
    def best(self) -> Record:
        """The trial whose config is taken."""
        return self.tuned.best if self.certified is None else self.certified.best


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """Nothing fits, or what stopped the walk says that nothing can be tried; the rung that came closest."""

    facts: ModelFacts
    walked: WalkResult
    closest: ClosestRung | None


Machine = tuple[Mapping[str, Any], Mapping[str, str]]  # hardware, versions


def fit_report(
    settings: Settings,
    found: FitResult,
    records: Sequence[Record],
    machine: Machine,
    seconds: float,
    forecasts: Iterable[RungForecast] = (),
) -> Report:
    """The report of a fit that found a config."""
    best = found.best
    outcome = best.outcome
    assert isinstance(outcome, Fit)
    certified = found.certified
    return Report(
        status="fit",
        rung=best.trial.rung,
        knobs=best.trial.knobs,
        ds_config=found.ds_config,
        throughput=Throughput(
            samples_per_second=outcome.samples_per_second, tokens_per_second=outcome.tokens_per_second
        ),
        memory=outcome.memory,
        largest_micro_batch=found.raced.grown.largest_micro_batch,
        certificate={} if certified is None else certificate_to_json(certified.certificate),
        importances=found.tuned.importances,
        reasons={
            **_why_left(found.walked),
            **_not_needed(settings, found.facts, found.walked),
            **found.raced.reasons,
            "batch": _batch(settings, found.facts, best.trial.knobs),
            "grow": found.raced.grown.reason,
            "tune": found.tuned.reason,
            **({} if certified is None else {"certify": certified.reason}),
        },
        **_common(settings, found.facts, found.walked, records, machine, seconds),
        forecast=tuple(rung_to_dict(forecast, settings.gpus) for forecast in forecasts),
    )


def nothing_fits_report(
    settings: Settings,
    found: NothingFits,
    records: Sequence[Record],
    machine: Machine,
    seconds: float,
    forecasts: Iterable[RungForecast] = (),
) -> Report:
    """The report of a fit that found none: the closest rung, and what it lacks."""
    return Report(
        status="nothing_fits",
        closest=found.closest,
        reasons=_why_left(found.walked),
        **_common(settings, found.facts, found.walked, records, machine, seconds),
        forecast=tuple(rung_to_dict(forecast, settings.gpus) for forecast in forecasts),
    )


def _batch(settings: Settings, facts: ModelFacts, knobs: Knobs) -> str:
    """What an optimizer step trains on: who changes it changes the training."""
    replicas = facts.replicas(settings.gpus)
    holders = "ranks" if not facts.pipeline_stages else "replica" if replicas == 1 else "replicas"
    said = text.format_batch(knobs, replicas, holders)
    if settings.global_batch is not None:
        return f"{said}, as asked"
    return f"{said}, chosen for throughput: give --global-batch to keep yours"


def _why_left(walked: WalkResult) -> dict[str, str]:
    """Each rung's last word."""
    tried = {record.trial.rung: text.format_outcome(record.outcome) for record in walked.records}
    return {**tried, **{skipped.rung: skipped.reason for skipped in walked.skipped}}


def _not_needed(settings: Settings, facts: ModelFacts, walked: WalkResult) -> dict[str, str]:
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    raced = settings.profile.race.stop == "fastest"
    spared = f"not tried: {'its states would pass through NVMe, and ' if raced else ''}a rung above it fits"
    return {
        rung.name: refusal_reason(rung, facts, settings.gpus) or spared
        for rung in settings.ladder
        if rung.name not in known
    }


def _common(
    settings: Settings,
    facts: ModelFacts,
    walked: WalkResult,
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
            "nodes": settings.nodes,
            "pipeline_stages": facts.pipeline_stages,
            "experts": facts.experts,
            "device": settings.device,
            "device_bytes": settings.device_bytes,
            "threads": settings.threads or threads_per_rank(settings.ranks_per_node),
            "global_batch": settings.global_batch,
            "profile": settings.profile.name,
            "objective": settings.objective,
            "stop": settings.profile.race.stop,
            "ladder": [rung.name for rung in settings.ladder],
            "lacks_nvme": [
                rung.name for rung in settings.ladder if rung.needs.nvme_path and settings.nvme_path is None
            ],
            "script": describe_launch(settings.source) if settings.source.kind == "script" else None,
        },
    }
