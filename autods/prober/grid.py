"""The cells of a probe, and the surveys that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from ..config.base_config import precision_name
from ..config.deepspeed import compose, get_key, merge, nest_key, required_ops, start_settings
from ..config.strategies import Rung
from ..errors import InputError
from ..journal import History, Journal, trial_key
from ..report.text import format_value
from ..schema import read_as
from ..settings import Settings, apply_script_config
from ..tuner.candidates import check_ranks, refusal_reason
from ..tuner.trials import accumulation_for
from ..types import Knobs, ModelFacts, Scalar, Trial, WorkloadSource
from ..workload.conditions import ENV, apply_conditions, apply_to_source, is_condition
from .axes import PINS, Value, why_ineffective
from .request import ProbeSettings

# What the workload is under these conditions, and DeepSpeed op → why it cannot be built here.
Survey = Callable[[Mapping[str, Scalar]], tuple[ModelFacts, Mapping[str, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of values. `number` counts from 1.

    trial: what measures it; None: nothing can, and `refused` says why. unheeded: axes that mean nothing here, and why.
    same_as: the number of an earlier cell that is the same in effect, and is measured for this one too.
    """

    number: int
    values: Mapping[str, Value]
    trial: Trial | None = None
    refused: str | None = None
    unheeded: Mapping[str, str] = field(default_factory=dict)
    same_as: int | None = None

    @property
    def rung(self) -> str:
        """Its name."""
        return str(self.values["rung"])


def list_cells(question: ProbeSettings, survey: Survey) -> tuple[Cell, ...]:
    """Every cell of the cross product, in order. Raises InputError when the workload cannot be built in any."""
    rungs = {rung.name: rung for rung in question.settings.ladder}
    first: dict[str, int] = {}
    cells: list[Cell] = []
    wrong: list[InputError] = []
    for number, values in enumerate(question.cells(), 1):
        try:
            cell = _cell(question, number, values, rungs[str(values["rung"])], survey)
        except InputError as error:  # the workload cannot be built with these arguments, and may with others
            wrong.append(error)
            cell = Cell(number=number, values=values, refused=" ".join(str(error).split()))
        if cell.trial is not None:
            known = first.setdefault(trial_key(cell.trial), number)
            cell = replace(cell, same_as=known if known != number else None)
        cells.append(cell)
    if wrong and len(wrong) == len(cells):
        raise wrong[0]
    return tuple(cells)


def select_conditions(values: Mapping[str, Value]) -> dict[str, Scalar]:
    """Those of the axes that are neither rung nor knob; a variable that shall not be set is left out."""
    return {name: value for name, value in values.items() if value is not None and is_condition(name)}


def count_environments(question: ProbeSettings) -> int:
    """How many different environments the cells ask for."""
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
    """The settings under these conditions, with the config that a script brings."""
    return apply_script_config(apply_conditions(question.settings, conditions), facts)


def compose_cell_config(question: ProbeSettings, trial: Trial, facts: ModelFacts) -> dict[str, Any]:
    """The whole DeepSpeed config of a cell's trial."""
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
    """Axes that mean nothing under this rung → why."""
    said = {}
    for name in values:
        if name == "pin_memory":
            pins = [why_ineffective(key, rung) for key in PINS]
            if all(pins):
                said[name] = "nothing is offloaded"
        elif "." in name and not is_condition(name) and (why := why_ineffective(name, rung)):
            said[name] = why
    return said


def _settings(
    question: ProbeSettings, values: Mapping[str, Value], rung: Rung, facts: ModelFacts, unheard: Mapping[str, str]
) -> dict[str, Scalar]:
    """DeepSpeed keys of the cell: buckets as a fit would start with, then what is varied."""
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
    """As written: only what the rung needs to start at all, where the base config does not say it."""
    settings = question.settings
    sized = start_settings(rung, base=settings.base, device_bytes=settings.device_bytes, facts=facts)
    if not question.as_written:
        return sized
    needed = [key for key, sizing in rung.start.items() if sizing.device_share is None]
    return {key: sized[key] for key in needed if get_key(settings.base, key) is None}


def _micro_batch(settings: Settings, values: Mapping[str, Value]) -> int:
    asked = values.get("micro_batch", settings.base.get("train_micro_batch_size_per_gpu"))
    return asked if isinstance(asked, int) else 1


def _accumulation(settings: Settings, values: Mapping[str, Value], facts: ModelFacts) -> int:
    if settings.global_batch is not None and "accumulation" not in values:
        replicas = facts.replicas(settings.gpus)
        return accumulation_for(settings.global_batch, _micro_batch(settings, values), replicas)
    asked = values.get("accumulation", settings.base.get("gradient_accumulation_steps"))
    return asked if isinstance(asked, int) else 1


def _why_not(
    question: ProbeSettings, trial: Trial, rung: Rung, facts: ModelFacts, problems: Mapping[str, str]
) -> str | None:
    """Why it cannot be run; None: it can."""
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


_SHOWN = ("rung", "micro_batch", "accumulation")  # a line of progress has these anyway


def format_trial_label(question: ProbeSettings, trial: Trial) -> str:
    """'pin_memory off, env.NCCL_P2P_DISABLE 1'; what is the same in all cells is left out."""
    named = [axis.name for axis in question.axes if len(axis.values) > 1 and axis.name not in _SHOWN]
    said = [(name, _value_in(trial, name)) for name in named]
    return ", ".join(f"{name.rpartition('.')[2]} {format_value(value)}" for name, value in said if value is not None)


def _value_in(trial: Trial, name: str) -> Value:
    """The axis' value; None where it means nothing to the trial."""
    settings = trial.knobs.settings
    if name == "checkpointing":
        return trial.knobs.checkpointing
    if name == "precision":
        return next((half for half in ("bf16", "fp16") if settings.get(f"{half}.enabled")), "fp32")
    if name == "pin_memory":
        return next((settings[key] for key in PINS if key in settings), None)
    return trial.conditions.get(name, settings.get(name))


# DeepSpeed op → why it cannot be built here, beside the facts.
Surveyed = tuple[ModelFacts, Mapping[str, str]]


@dataclass(slots=True, kw_only=True)
class SurveyStore:
    """look: what finds it, where no earlier run of the probe has. known: what was found, by the source's digest."""

    source: WorkloadSource
    journal: Journal
    past: History
    look: Callable[[Mapping[str, Scalar]], Surveyed]
    known: dict[str, Surveyed] = field(default_factory=dict)

    def of(self, conditions: Mapping[str, Scalar]) -> Surveyed:
        """See `cells.Survey`."""
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
        """Without the ops."""
        return self.of(conditions)[0]
