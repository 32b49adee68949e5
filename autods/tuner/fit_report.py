"""The result of a search, and the report that is made of it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import Version

from ..config.checkpointing import find_state
from ..config.deepspeed import ENOUGH_ACCUMULATION
from ..config.rungs import unmet_need
from ..config.settings import Settings
from ..devices import find_device
from ..devices.base import EXPANDABLE, MEMORY_SHARE
from ..forecast.values import PartitionedBuild
from ..rank.ops import ops_folder
from ..report import text
from ..report.results.fit import ClosestRung, FitQuestion, FitReport
from ..report.results.measured import Measured, find_measured
from ..runner.environment import GROUP_TIMEOUT
from ..runner.time_limits import choose_group_timeout
from ..system.host import installed_versions, threads_per_rank
from ..types import Fit, Knobs, Record
from ..workload.script_source import describe_launch, describe_trainer
from .certify import CertifyResult
from .ladder_walk import WalkResult
from .optuna_search import TuneResult
from .race import RaceResult
from .trials import FitContext

_FIRST_WITH_MEMORY_SHARE = Version("2.10")  # of torch


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """A config that fits, with the result of each step. `ds_config` is the config as the user gets it."""

    best: Record
    walked: WalkResult
    raced: RaceResult
    tuned: TuneResult
    certified: CertifyResult | None
    ds_config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingFits:
    """No rung fits, or a failure stopped the walk.

    `closest` is the rung that lacked least, and `partitioned` one that `--zero-init` would make fit.
    """

    walked: WalkResult
    closest: ClosestRung | None
    partitioned: PartitionedBuild | None = None


def build_report(
    result: FitResult | NothingFits, context: FitContext, *, fingerprint: str, seconds: float
) -> FitReport:
    """The report of a fit: the config that fits, or the closest rung and the memory that it lacks."""
    settings, walked = context.settings, result.walked
    outcomes = {record.trial.rung: text.format_outcome(record.outcome) for record in walked.records}
    reasons = {**outcomes, **{skipped.rung: skipped.reason for skipped in walked.skipped}}
    report = FitReport(
        status="nothing_fits",
        reasons=reasons,
        trials=tuple(context.memory.records),
        skipped=tuple(walked.skipped),
        forecast=tuple(context.forecaster.forecasts.values()),
        hardware=settings.hardware,
        versions=installed_versions(),
        seconds=seconds,
        out=str(settings.out),
        question=_make_question(context, fingerprint),
    )
    if isinstance(result, NothingFits):
        return replace(report, closest=result.closest, partitioned=result.partitioned)

    growth, certified, measured = result.raced.growth, result.certified, _measure(result.best, context)
    return replace(
        report.answer_with(measured, result.best.trial.knobs),
        ds_config=result.ds_config,
        variables=_list_variables(result, context),
        largest_micro_batch=_find_largest(result),
        certificate=None if certified is None else certified.certificate,
        importances=result.tuned.importances,
        reasons={
            **reasons,
            **_explain_untried(context, reasons),
            **result.raced.reasons,
            "batch": _explain_batch(result.best.trial.knobs, context, is_fixed=walked.own_batch is not None),
            "grow": growth.stop.reason if growth.stop is not None else "",
            "tune": result.tuned.reason,
            **({} if certified is None else {"certify": certified.reason}),
        },
    )


def _list_variables(result: FitResult, context: FitContext) -> dict[str, str]:
    """The environment variables that the config needs: the allocator's, and DeepSpeed's timeout for a long load."""
    settings, variables = context.settings, dict[str, str]()
    allocator = _list_allocator_settings(result.best, settings)
    variables |= find_device(settings.device).set_allocator(os.environ, *allocator)
    minutes = choose_group_timeout(context.facts, result.ds_config, nodes=settings.nodes)
    if minutes is not None:
        given = os.environ.get(GROUP_TIMEOUT, "")
        variables[GROUP_TIMEOUT] = given if given.isdigit() else str(minutes)
    return variables


def _list_allocator_settings(best: Record, settings: Settings) -> tuple[str, ...]:
    """The settings of torch's allocator that the config needs."""
    knobs, fit = best.trial.knobs, best.outcome
    chosen = (EXPANDABLE,) if knobs.expandable else ()
    is_known = Version(installed_versions()["torch"]) >= _FIRST_WITH_MEMORY_SHARE
    if not (knobs.keeps_headroom and is_known and isinstance(fit, Fit)):
        return chosen
    beside_bytes = 0 if fit.card is None else fit.memory["device"].peak_bytes - fit.card.reserved_bytes
    total_bytes = min((card.total_bytes for card in settings.hardware.cards), default=settings.device_bytes)
    share = (settings.usable_bytes - beside_bytes) / (settings.device_bytes if settings.rehearsed else total_bytes)
    return (*chosen, f"{MEMORY_SHARE}:{math.floor(1000 * share) / 1000}")


def _find_largest(result: FitResult) -> int | None:
    """The largest micro batch that fits; None where the certificate took another config or batch than the race."""
    taken, raced = (
        (trial.rung, trial.knobs.micro_batch, find_state(trial.knobs))
        for trial in (result.best.trial, result.raced.best.trial)
    )
    largest = result.raced.growth.curve.fits
    return largest if taken == raced and largest >= result.best.trial.knobs.micro_batch else None


def _measure(config: Record, context: FitContext) -> Measured:
    """What the record's config measured in all its trials."""
    trial, outcome = config.trial, config.outcome
    assert isinstance(outcome, Fit)
    measured = find_measured(context.memory.records, trial.rung, trial.knobs)
    return measured or Measured(trial=trial, fits=(outcome,))  # the walk's trial, at the fit's global batch


def _explain_untried(context: FitContext, reasons: Mapping[str, str]) -> dict[str, str]:
    """Why each rung without a reason was not tried, by its name. The certificate may have tried some since."""
    settings, tried = context.settings, {record.trial.rung for record in context.memory.records}
    through_nvme = "its states would pass through NVMe, and " if settings.profile.race.stop == "fastest" else ""
    return {
        rung.name: unmet_need(rung, settings.site, context.facts) or f"not tried: {through_nvme}a rung before it fits"
        for rung in settings.ladder
        if rung.name not in reasons and rung.name not in tried
    }


def _explain_batch(knobs: Knobs, context: FitContext, *, is_fixed: bool) -> str:
    """How the batch is made up, and why it has that size; a micro batch that `is_fixed` is the script's own."""
    holder = "replica" if context.facts.pipeline_stages else "rank"
    longer = ", with the memory of any longer accumulation" if knobs.accumulation >= ENOUGH_ACCUMULATION else ""
    chosen = f"chosen for throughput{longer}: give --global-batch to keep yours"
    if is_fixed:
        chosen = "the micro batch is the one that the script fixes"
    if context.settings.global_batch is not None:
        chosen = "as requested"
    return f"{text.format_batch(knobs, context.world_size, holder)}, {chosen}"


def _make_question(context: FitContext, fingerprint: str) -> FitQuestion:
    """What was asked: the model, the machine and the options."""
    settings, facts = context.settings, context.facts
    return FitQuestion(
        workload=settings.source.name,
        parameters=facts.parameters,
        weights=settings.source.weights,
        lora=settings.source.lora,
        gpus=settings.gpus,
        nodes=settings.nodes,
        pipeline_stages=facts.pipeline_stages,
        experts=facts.experts,
        device=settings.device,
        device_bytes=settings.device_bytes,
        usable_bytes=int(context.usable_bytes),
        threads=settings.threads or threads_per_rank(settings.ranks_per_node, settings.hardware.cores),
        global_batch=settings.global_batch,
        profile=settings.profile.name,
        objective=settings.objective,
        stop=settings.profile.race.stop,
        ladder=tuple(rung.name for rung in settings.ladder),
        lacks_nvme=tuple(rung.name for rung in settings.ladder if rung.uses_nvme and settings.nvme_path is None),
        script=describe_launch(settings.source) if settings.source.form.runs_as_main else None,
        trainer=describe_trainer(settings.source, facts.seq_len),
        checkpointing=facts.checkpointing,
        recomputes=facts.recomputes if settings.source.form.runs_as_main and facts.checkpointing else None,
        stood_in=facts.stood_in,
        writes_confined=facts.writes_confined,
        ops_folder=str(ops_folder()),
        fingerprint=fingerprint,
        budget=settings.budget,
        forecast=settings.forecast,
        rehearsed_on=settings.machine.name if settings.rehearsed else None,
    )
