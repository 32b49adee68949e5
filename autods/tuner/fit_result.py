"""The result of a search, and the report that is written from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.settings import Settings
from ..forecast.values import RungForecast
from ..report import text
from ..report.results import ClosestRung, Report, Throughput
from ..report.serialize import rung_to_dict
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
    """A config that fits, with the result of each step. `ds_config` is the config as the user gets it."""

    facts: ModelFacts
    walked: WalkResult
    raced: RaceResult
    tuned: TuneResult
    certified: CertifyResult | None
    ds_config: Mapping[str, Any]

    @property
    def best(self) -> Record:
        """The deciding trial of the config that the fit returns."""
        return self.tuned.best if self.certified is None else self.certified.best


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """No rung fits, or a failure stopped the walk. `closest` is the rung that lacked least."""

    facts: ModelFacts
    walked: WalkResult
    closest: ClosestRung | None


Machine = tuple[Mapping[str, Any], Mapping[str, str]]  # hardware, versions


def fit_report(
    settings: Settings,
    result: FitResult,
    records: Sequence[Record],
    machine: Machine,
    seconds: float,
    forecasts: Iterable[RungForecast] = (),
) -> Report:
    """The report of a fit with a config that fits."""
    best = result.best
    outcome = best.outcome
    assert isinstance(outcome, Fit)
    certified = result.certified
    return Report(
        status="fit",
        rung=best.trial.rung,
        knobs=best.trial.knobs,
        ds_config=result.ds_config,
        throughput=Throughput(
            samples_per_second=outcome.samples_per_second, tokens_per_second=outcome.tokens_per_second
        ),
        memory=outcome.memory,
        largest_micro_batch=result.raced.grown.largest_micro_batch,
        certificate={} if certified is None else certificate_to_json(certified.certificate),
        importances=result.tuned.importances,
        reasons={
            **_walk_reasons(result.walked),
            **_reasons_not_tried(settings, result.facts, result.walked),
            **result.raced.reasons,
            "batch": _batch(settings, result.facts, best.trial.knobs),
            "grow": result.raced.grown.reason,
            "tune": result.tuned.reason,
            **({} if certified is None else {"certify": certified.reason}),
        },
        **_common(settings, result.facts, result.walked, records, machine, seconds),
        forecast=tuple(rung_to_dict(forecast, settings.gpus) for forecast in forecasts),
    )


def nothing_fits_report(
    settings: Settings,
    result: NothingFits,
    records: Sequence[Record],
    machine: Machine,
    seconds: float,
    forecasts: Iterable[RungForecast] = (),
) -> Report:
    """The report of a fit without one: the closest rung, and the memory that it lacks."""
    return Report(
        status="nothing_fits",
        closest=result.closest,
        reasons=_walk_reasons(result.walked),
        **_common(settings, result.facts, result.walked, records, machine, seconds),
        forecast=tuple(rung_to_dict(forecast, settings.gpus) for forecast in forecasts),
    )


def _batch(settings: Settings, facts: ModelFacts, knobs: Knobs) -> str:
    """The samples of an optimizer step, and who chose their number."""
    replicas = facts.replicas(settings.gpus)
    holders = "ranks" if not facts.pipeline_stages else "replica" if replicas == 1 else "replicas"
    batch = text.format_batch(knobs, replicas, holders)
    if settings.global_batch is not None:
        return f"{batch}, as requested"
    return f"{batch}, chosen for throughput: give --global-batch to keep yours"


def _walk_reasons(walked: WalkResult) -> dict[str, str]:
    """Rung → the outcome of its last trial, or the reason that it was skipped."""
    outcomes = {record.trial.rung: text.format_outcome(record.outcome) for record in walked.records}
    return {**outcomes, **{skipped.rung: skipped.reason for skipped in walked.skipped}}


def _reasons_not_tried(settings: Settings, facts: ModelFacts, walked: WalkResult) -> dict[str, str]:
    known = {record.trial.rung for record in walked.records} | {skipped.rung for skipped in walked.skipped}
    raced = settings.profile.race.stop == "fastest"
    leaner = f"not tried: {'its states would pass through NVMe, and ' if raced else ''}a rung above it fits"
    return {
        rung.name: refusal_reason(rung, facts, settings.gpus) or leaner
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
