"""The cells of a probe, and the surveys of the workload that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.checkpointing import find_state, read_state, set_state, why_impossible
from ..config.deepspeed import (
    PINS,
    accumulation_for,
    compose,
    count_replicas,
    find_broken_op,
    precision_name,
    start_settings,
)
from ..config.releases import set_precision
from ..config.rungs import Rung, unmet_need
from ..config.settings import Settings, apply_survey
from ..errors import InputError
from ..journal import trial_key
from ..types import Knobs, ModelFacts, Scalar, Trial
from ..workload.conditions import apply_conditions, is_condition
from .axes import AXES, Value, why_ineffective
from .probe_settings import ProbeSettings

# The model's facts, and the DeepSpeed ops that cannot be built here with the reasons.
Surveyed = tuple[ModelFacts, Mapping[str, str]]
Survey = Callable[[Mapping[str, Scalar]], Surveyed]


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
        return str(self.values["rung"])

    @property
    def conditions(self) -> dict[str, Scalar]:
        """The values of axes that are neither rung nor knob. Variables that stay unset are left out."""
        return {name: value for name, value in self.values.items() if value is not None and is_condition(name)}


def list_cells(question: ProbeSettings, survey: Survey) -> tuple[Cell, ...]:
    """Return every cell of the cross product. Raises InputError when the workload can be built in none."""
    first: dict[str, int] = {}
    cells: list[Cell] = []
    errors: list[InputError] = []
    for number, values in enumerate(question.cells(), 1):
        cell = Cell(number=number, values=values)
        try:
            cell = _fill_cell(question, cell, survey)
        except InputError as error:  # other arguments may suit the workload
            errors.append(error)
            cell = replace(cell, refused=" ".join(str(error).split()))
        if cell.trial is not None:
            known = first.setdefault(trial_key(cell.trial), number)
            cell = replace(cell, same_as=known if known != number else None)
        cells.append(cell)
    if errors and len(errors) == len(cells):
        raise errors[0]
    return tuple(cells)


def _fill_cell(question: ProbeSettings, cell: Cell, survey: Survey) -> Cell:
    """Return the cell with its trial, or with the reason why it cannot be run."""
    values, conditions = cell.values, cell.conditions
    facts, problems = survey(conditions)
    settings = settings_under_conditions(question, conditions, facts)
    rung, base = settings.rung(str(values["rung"])), settings.base
    unheeded = _unheeded(values, rung)
    given = values.get("micro_batch", base.get("train_micro_batch_size_per_gpu"))
    micro_batch = given if isinstance(given, int) else 1
    given = values.get("accumulation", base.get("gradient_accumulation_steps"))
    accumulation = given if isinstance(given, int) else settings.default_accumulation
    refused = None
    if settings.global_batch is not None:
        try:
            accumulation = accumulation_for(
                settings.global_batch, micro_batch, count_replicas(settings.base, settings.gpus, facts)
            )
        except ValueError as error:
            refused = str(error)
    # The first values are buckets with which a fit would start.
    keys = start_settings(
        rung, base=base, device_bytes=settings.device_bytes, facts=facts, as_written=question.as_written
    )
    if (precision := values.get("precision")) is not None:
        keys |= {f"{half}.enabled": half == precision for half in ("bf16", "fp16")}
    for name, value in values.items():
        if name == "pin_memory" and name not in unheeded and value is not None:
            keys |= {key: value for key in PINS if why_ineffective(key, rung) is None}
        elif name not in (*AXES, *unheeded) and not is_condition(name) and value is not None:
            keys[name] = value
    knobs = Knobs(
        micro_batch=micro_batch,
        accumulation=accumulation,
        settings=keys,
    )
    knobs = set_state(knobs, read_state(values.get("checkpointing", facts.checkpointing)) or "off")
    trial = Trial(rung=rung.name, knobs=knobs, purpose="probe", steps=question.steps, conditions=conditions)
    refused = refused or _why_not(question, settings, trial, facts, problems)
    return replace(cell, trial=None if refused else trial, refused=refused, unheeded=unheeded)


def _unheeded(values: Mapping[str, Value], rung: Rung) -> dict[str, str]:
    """Return the axes that have no effect under this rung, with the reasons."""
    reasons = {}
    for name in values:
        if name == "pin_memory" and all(why_ineffective(key, rung) for key in PINS):
            reasons[name] = "nothing is offloaded"
        elif "." in name and not is_condition(name) and (why := why_ineffective(name, rung)):
            reasons[name] = why
    return reasons


def _why_not(
    question: ProbeSettings, settings: Settings, trial: Trial, facts: ModelFacts, problems: Mapping[str, str]
) -> str | None:
    """Return why the trial cannot be run; None when it can."""
    rung, config = settings.rung(trial.rung), compose_cell_config(question, trial, facts)
    precision = precision_name(config)
    if (reason := unmet_need(rung, set_precision(settings.site, precision), facts)) is not None:
        return reason
    if (reason := why_impossible(find_state(trial.knobs), facts, question.settings.source.form)) is not None:
        return reason
    if precision == "fp16" and "fp16" in problems:
        return f"{problems['fp16']}: take bf16, or another device"
    if question.machine is not None and precision == "bf16" and not question.machine.bf16:
        return f"{question.machine.title} has no bf16"
    return find_broken_op(config, problems)


def settings_under_conditions(question: ProbeSettings, conditions: Mapping[str, Scalar], facts: ModelFacts) -> Settings:
    """Return the settings under these conditions, with all that the survey adds. A varied accumulation wins."""
    settings = apply_survey(apply_conditions(question.settings, conditions), facts)
    is_varied = any(axis.name == "accumulation" for axis in question.axes)
    return replace(settings, global_batch=None) if is_varied else settings


def compose_cell_config(question: ProbeSettings, trial: Trial, facts: ModelFacts) -> dict[str, Any]:
    """Return the whole DeepSpeed config of a cell's trial."""
    settings = settings_under_conditions(question, trial.conditions, facts)
    return compose(settings.rung(trial.rung), trial.knobs, settings.site, facts)
