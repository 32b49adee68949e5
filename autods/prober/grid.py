"""The cells of a probe, and the surveys of the workload that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from ..config.base_config import precision_name
from ..config.deepspeed import compose, get_key, merge, nest_key, required_ops, start_settings
from ..config.settings import Settings, apply_script_config
from ..config.strategies import Rung
from ..errors import InputError
from ..journal import History, Journal, trial_key
from ..report.text import format_value
from ..schema import read_as
from ..tuner.candidates import check_ranks, refusal_reason
from ..tuner.trials import accumulation_for
from ..types import Knobs, ModelFacts, Scalar, Trial, WorkloadSource
from ..workload.conditions import ENV, apply_conditions, apply_to_source, is_condition
from .axes import PINS, Value, why_ineffective
from .request import ProbeSettings

# From conditions to the model's facts, and to the DeepSpeed ops that cannot be built here with the reasons.
Survey = Callable[[Mapping[str, Scalar]], tuple[ModelFacts, Mapping[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of values. `number` counts from 1.

    `trial` measures it; None when it cannot be run, for the reason in `refused`.
    `unheeded` maps each axis that has no effect here to the reason.
    `same_as` is the number of an earlier cell that is the same in effect; the trial of that cell serves both.
    """

    number: int
    values: Mapping[str, Value]
    trial: Trial | None = None
    refused: str | None = None
    unheeded: Mapping[str, str] = field(default_factory=dict)
    same_as: int | None = None

    @property
    def rung(self) -> str:
        """The name of the rung."""
        return str(self.values["rung"])


def list_cells(question: ProbeSettings, survey: Survey) -> tuple[Cell, ...]:
    """Return every cell of the cross product. Raises InputError when the workload can be built in none."""
    rungs = {rung.name: rung for rung in question.settings.ladder}
    first: dict[str, int] = {}
    cells: list[Cell] = []
    errors: list[InputError] = []
    for number, values in enumerate(question.cells(), 1):
        try:
            cell = _cell(question, number, values, rungs[str(values["rung"])], survey)
        except InputError as error:  # other arguments may suit the workload
            errors.append(error)
            cell = Cell(number=number, values=values, refused=" ".join(str(error).split()))
        if cell.trial is not None:
            known = first.setdefault(trial_key(cell.trial), number)
            cell = replace(cell, same_as=known if known != number else None)
        cells.append(cell)
    if errors and len(errors) == len(cells):
        raise errors[0]
    return tuple(cells)


def select_conditions(values: Mapping[str, Value]) -> dict[str, Scalar]:
    """Return the values of conditions: axes that are neither rung nor knob. Variables that stay unset are left out."""
    return {name: value for name, value in values.items() if value is not None and is_condition(name)}


def count_environments(question: ProbeSettings) -> int:
    """Return how many different environments the cells need."""
    return prod(len(axis.values) for axis in question.axes if axis.name.startswith(ENV))


def _cell(question: ProbeSettings, number: int, values: Mapping[str, Value], rung: Rung, survey: Survey) -> Cell:
    conditions = select_conditions(values)
    facts, problems = survey(conditions)
    question = replace(question, settings=settings_under_conditions(question, conditions, facts))
    check_ranks(facts, question.settings.gpus)
    reasons = _unheeded(values, rung)
    settings = _settings(question, values, rung, facts, reasons)
    try:
        accumulation = _accumulation(question.settings, values, facts)
    except ValueError as error:
        return Cell(number=number, values=values, refused=str(error), unheeded=reasons)
    knobs = Knobs(
        micro_batch=_micro_batch(question.settings, values),
        accumulation=accumulation,
        checkpointing=bool(values.get("checkpointing", facts.checkpointing)),
        settings=settings,
    )
    trial = Trial(rung=rung.name, knobs=knobs, purpose="probe", steps=question.steps, conditions=conditions)
    refused = _why_not(question, trial, rung, facts, problems)
    return Cell(number=number, values=values, trial=None if refused else trial, refused=refused, unheeded=reasons)


def settings_under_conditions(question: ProbeSettings, conditions: Mapping[str, Scalar], facts: ModelFacts) -> Settings:
    """Return the settings under these conditions, with the config that a script brings."""
    return apply_script_config(apply_conditions(question.settings, conditions), facts)


def compose_cell_config(question: ProbeSettings, trial: Trial, facts: ModelFacts) -> dict[str, Any]:
    """Return the whole DeepSpeed config of a cell's trial."""
    settings = settings_under_conditions(question, trial.conditions, facts)
    return compose(
        next(rung for rung in settings.ladder if rung.name == trial.rung),
        trial.knobs,
        base=settings.base,
        world_size=facts.replicas(settings.gpus),
        own_optimizer=facts.has_optimizer,
        nvme_path=settings.nvme_path,
    )


def _unheeded(values: Mapping[str, Value], rung: Rung) -> dict[str, str]:
    """Return the axes that have no effect under this rung, with the reasons."""
    reasons = {}
    for name in values:
        if name == "pin_memory":
            pins = [why_ineffective(key, rung) for key in PINS]
            if all(pins):
                reasons[name] = "nothing is offloaded"
        elif "." in name and not is_condition(name) and (why := why_ineffective(name, rung)):
            reasons[name] = why
    return reasons


def _settings(
    question: ProbeSettings, values: Mapping[str, Value], rung: Rung, facts: ModelFacts, unheard: Mapping[str, str]
) -> dict[str, Scalar]:
    """Return DeepSpeed keys of the cell: buckets with which a fit would start, then the varied values."""
    settings = _sized(question, rung, facts)
    if (precision := values.get("precision")) is not None:
        settings |= {f"{half}.enabled": half == precision for half in ("bf16", "fp16")}
    for name, value in values.items():
        if value is None or name in unheard or name in _KNOBS or is_condition(name):
            continue
        keys = [key for key in PINS if why_ineffective(key, rung) is None] if name == "pin_memory" else [name]
        settings |= dict.fromkeys(keys, value)
    return settings


_KNOBS = ("rung", "precision", "micro_batch", "accumulation", "checkpointing")


def _sized(question: ProbeSettings, rung: Rung, facts: ModelFacts) -> dict[str, Scalar]:
    """Return buckets and limits; with --as-written those without which the rung does not start."""
    settings = question.settings
    sized = start_settings(rung, base=settings.base, device_bytes=settings.device_bytes, facts=facts)
    if not question.as_written:
        return sized
    needed = [key for key, sizing in rung.start.items() if sizing.device_share is None]
    return {key: sized[key] for key in needed if get_key(settings.base, key) is None}


def _micro_batch(settings: Settings, values: Mapping[str, Value]) -> int:
    given = values.get("micro_batch", settings.base.get("train_micro_batch_size_per_gpu"))
    return given if isinstance(given, int) else 1


def _accumulation(settings: Settings, values: Mapping[str, Value], facts: ModelFacts) -> int:
    if settings.global_batch is not None and "accumulation" not in values:
        replicas = facts.replicas(settings.gpus)
        return accumulation_for(settings.global_batch, _micro_batch(settings, values), replicas)
    given = values.get("accumulation", settings.base.get("gradient_accumulation_steps"))
    return given if isinstance(given, int) else 1


def _why_not(
    question: ProbeSettings, trial: Trial, rung: Rung, facts: ModelFacts, problems: Mapping[str, str]
) -> str | None:
    """Return why the trial cannot be run; None when it can."""
    settings = question.settings
    if (reason := refusal_reason(rung, facts, settings.gpus)) is not None:
        return reason
    if rung.needs.nvme_path and settings.nvme_path is None:
        return "no --nvme-path was given"
    if trial.knobs.checkpointing and not facts.checkpointing:
        return "the model has no gradient_checkpointing_enable()"
    base: Mapping[str, Any] = settings.base
    for key, value in trial.knobs.settings.items():
        base = merge(base, nest_key(key, value))
    precision = precision_name(base)
    if precision == "fp16" and "fp16" in problems:
        return f"{problems['fp16']}: take bf16, or another device"
    if question.machine is not None and precision == "bf16" and not question.machine.bf16:
        return f"{question.machine.title} has no bf16"
    for op in required_ops(compose_cell_config(question, trial, facts)):
        if op in problems:
            return f"its op {op} cannot be built: {problems[op]}"
    return None


_IN_EVERY_LINE = ("rung", "micro_batch", "accumulation")  # of progress


def format_trial_label(question: ProbeSettings, trial: Trial) -> str:
    """Return text such as 'pin_memory off, env.NCCL_P2P_DISABLE 1', without values that all cells share."""
    named = [axis.name for axis in question.axes if len(axis.values) > 1 and axis.name not in _IN_EVERY_LINE]
    values = [(name, _value_in(trial, name)) for name in named]
    return ", ".join(f"{name.rpartition('.')[2]} {format_value(value)}" for name, value in values if value is not None)


def _value_in(trial: Trial, name: str) -> Value:
    """Return the value of an axis; None where it has no effect on the trial."""
    settings = trial.knobs.settings
    if name == "checkpointing":
        return trial.knobs.checkpointing
    if name == "precision":
        return next((half for half in ("bf16", "fp16") if settings.get(f"{half}.enabled")), "fp32")
    if name == "pin_memory":
        return next((settings[key] for key in PINS if key in settings), None)
    return trial.conditions.get(name, settings.get(name))


# The model's facts, and the DeepSpeed ops that cannot be built here with the reasons.
Surveyed = tuple[ModelFacts, Mapping[str, str]]


@dataclass(slots=True, kw_only=True)
class SurveyStore:
    """Surveys of the workload by the digest of its source. `look` makes one that the journal does not have."""

    source: WorkloadSource
    journal: Journal
    past: History
    look: Callable[[Mapping[str, Scalar]], Surveyed]
    known: dict[str, Surveyed] = field(default_factory=dict)

    def get(self, conditions: Mapping[str, Scalar]) -> Surveyed:
        """Return the survey under these conditions."""
        digest = apply_to_source(self.source, conditions).digest
        if digest not in self.known:
            before = self.past.surveys.get(digest)
            if before is not None:
                self.known[digest] = read_as(ModelFacts, before["facts"]), before["op_problems"]
            else:
                facts, problems = self.known[digest] = self.look(conditions)
                self.journal.write_survey(digest, {"facts": asdict(facts), "op_problems": dict(problems)})
        return self.known[digest]

    def facts(self, conditions: Mapping[str, Scalar]) -> ModelFacts:
        """Return the model's facts under these conditions."""
        return self.get(conditions)[0]
