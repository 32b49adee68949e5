"""The rungs of a machine in a plan: what each needs, and how fast it is.

A row is a `PlanRow`. A column is one entry of `list_columns`, `RUNGS` or `list_speed_columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...forecast.predict.step_time import Speed
from ...forecast.values import PHASES, ForecastPhase, RungForecast
from ...types import TIERS, Tier
from ...units import choose_unit, format_in
from .. import document as doc
from ..document import Cell, Column, Medium, Words, line, tabulate
from ..results.plan import PlanReport, SiteForecast, Training
from ..text import MARKS, Mark, TimeUnit, format_predicted, format_rate
from .plan_figures import (
    MAY_FIT,
    choose_unit_of_training,
    convert_days,
    format_cost,
    format_spent,
    format_step,
    format_training_time,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The forecast of a rung. `training` is that of the plan's tokens, None without."""

    rung: RungForecast
    is_best: bool = False
    training: Training | None = None


def _name_rung(row: PlanRow) -> Words:
    return line((row.rung.rung, "bold" if row.is_best else ""))


def list_columns(unit: str, factor: int, time_unit: TimeUnit) -> tuple[Column[PlanRow], ...]:
    """The columns of the table below the answer, bytes in one unit and the time of a training in another.

    A rung that does not fit has no speed there, nor the time of a training at it.
    """

    def read_peak(tier: Tier) -> Callable[[PlanRow], Cell]:
        return lambda row: format_in(row.rung.memory[tier].peak_bytes, factor) if tier in row.rung.memory else ""

    def read_speed(read: Callable[[Speed], str]) -> Callable[[PlanRow], Cell]:
        read_cell = _read_speed(read)
        return lambda row: read_cell(row) if row.rung.verdict in MAY_FIT else "–"

    def read_time(row: PlanRow) -> Cell:
        trains = row.rung.verdict in MAY_FIT
        return format_rate(convert_days(row.training.days, time_unit)) if trains and row.training is not None else "–"

    def mark(row: PlanRow) -> Mark:
        return MARKS[row.rung.verdict]

    spare: Mapping[Tier, int] = {"device": 0, "host": 2, "pinned": 4, "nvme": 3}
    memory = (
        Column(name=f"{tier}\n{unit}", read=read_peak(tier), right=True, spare=spare[tier])
        for tier in TIERS
        if tier in spare
    )
    return (
        Column(name="rung", read=lambda row: line(mark(row)[::2], " ", _name_rung(row))),
        Column(name="verdict", read=lambda row: mark(row).word, spare=5),
        *memory,
        Column(name="largest\nbatch", read=lambda row: str(row.rung.largest_micro_batch or ""), right=True),
        Column(name="step\n(s)", read=read_speed(lambda speed: format_rate(speed.step.seconds)), right=True),
        Column(
            name="samples/s", read=read_speed(lambda speed: format_rate(speed.samples_per_second)), right=True, spare=6
        ),
        Column(name="tokens/s", read=read_speed(_format_tokens), right=True),
        Column(name=time_unit.name, read=read_time, right=True),
        Column(name="bound by", read=read_speed(lambda speed: speed.step.bound), spare=1),
    )


def _list_peaks(row: PlanRow) -> tuple[Words, ...]:
    memory = [(tier, row.rung.memory[tier]) for tier in TIERS if tier in row.rung.memory]
    return tuple(line((f"{tier:<7}", "dim"), format_predicted(predicted)) for tier, predicted in memory)


def tabulate_phases(
    rungs: Sequence[RungForecast], read: Callable[[RungForecast], Mapping[ForecastPhase, int]]
) -> doc.Table:
    """The peak of each phase, a row for each rung; `read` gives a rung's bytes by phase."""
    sizes = (size for rung in rungs for size in read(rung).values())
    unit, factor = choose_unit(max(sizes, default=1))

    def read_phase(phase: ForecastPhase) -> Callable[[RungForecast], Cell]:
        return lambda rung: format_in(read(rung)[phase], factor) if phase in read(rung) else ""

    rung_name: Column[RungForecast] = Column(name="rung", read=lambda rung: rung.rung)
    phases = (Column(name=f"{phase}\n{unit}", read=read_phase(phase), right=True) for phase in PHASES)
    return tabulate((rung_name, *phases), [rung for rung in rungs if read(rung)])


def _stack(row: PlanRow) -> Cell:
    return (doc.MemoryStack(forecast=row.rung),) if "device" in row.rung.memory else ""


_ELSEWHERE = Medium.TERMINAL | Medium.MARKDOWN  # a page has the table of the answer above, and draws the device
RUNGS: tuple[Column[PlanRow], ...] = (
    Column(name="rung", read=_name_rung),
    Column(name="peak (low to high) / limit", read=_list_peaks, on=_ELSEWHERE),
    Column(name="largest\nbatch", read=lambda row: str(row.rung.largest_micro_batch or ""), right=True, on=_ELSEWHERE),
    Column(name="made of", read=_stack, spare=2, below=True),
    Column(name="verdict", read=lambda row: MARKS[row.rung.verdict].words, spare=1, below=True, on=_ELSEWHERE),
    Column(name="decides", read=lambda row: row.rung.decides or "", spare=3),
    Column(name="other memory (low to high) / limit", read=lambda row: _list_peaks(row)[1:], on=Medium.PAGE),
    Column(
        name="why", read=lambda row: row.rung.reason, wraps=True, least_width=24, spare=4, below=True, on=_ELSEWHERE
    ),
    Column(name="why", read=lambda row: "" if row.rung.verdict == "fits" else row.rung.reason, on=Medium.PAGE),
)


def _read_speed(read: Callable[[Speed], str]) -> Callable[[PlanRow], Cell]:
    """What a cell reads from the rung's speed; '–' without one."""
    return lambda row: "–" if row.rung.speed is None else read(row.rung.speed)


def _format_tokens(speed: Speed) -> str:
    return "–" if speed.tokens_per_second is None else format_rate(speed.tokens_per_second)


def list_speed_columns(time_unit: TimeUnit) -> tuple[Column[PlanRow], ...]:
    """The columns of the step times, the time of a training in one unit."""

    def read_time(row: PlanRow) -> Cell:
        return "–" if row.training is None else format_training_time(row.training, time_unit)

    return (
        Column(name="rung", read=_name_rung),
        Column(name="micro\nbatch", read=_read_speed(lambda speed: str(speed.micro_batch)), right=True),
        Column(name="step (low to high)", read=_read_speed(lambda speed: format_step(speed.step)), right=True),
        Column(
            name="samples/s", read=_read_speed(lambda speed: format_rate(speed.samples_per_second)), right=True, spare=2
        ),
        Column(name="tokens/s", read=_read_speed(_format_tokens), right=True),
        Column(name=time_unit.name, read=read_time, right=True),
        Column(name="cost", read=lambda row: "–" if row.training is None else format_cost(row.training), right=True),
        Column(
            name="spent on", read=_read_speed(lambda speed: format_spent(speed.step)), wraps=True, spare=1, below=True
        ),
    )


def tabulate_rungs(rungs: Iterable[RungForecast], *, best: str | None = None) -> doc.Table:
    """The verdict and the memory of each rung."""
    return tabulate(RUNGS, (PlanRow(rung=rung, is_best=rung.rung == best) for rung in rungs))


def tabulate_answer(plan: PlanReport, site: SiteForecast) -> doc.Table:
    """The memory of each rung, and the speed of those that may fit."""
    peaks_bytes = (rung.memory["device"].peak_bytes for rung in site.rungs if "device" in rung.memory)
    unit, factor = choose_unit(max(peaks_bytes, default=1))
    rows = _list_rows(plan, site)
    return tabulate(list_columns(unit, factor, _choose_time_unit(rows)), rows)


def tabulate_speeds(plan: PlanReport, site: SiteForecast) -> doc.Table:
    """The step time of each rung, or why there is none."""
    rows = [row for row in _list_rows(plan, site) if row.rung.memory]
    return tabulate(list_speed_columns(_choose_time_unit(rows)), rows)


def _list_rows(plan: PlanReport, site: SiteForecast) -> list[PlanRow]:
    return [
        PlanRow(rung=rung, is_best=rung is site.best, training=plan.forecast_training(site, rung))
        for rung in site.rungs
    ]


def _choose_time_unit(rows: Sequence[PlanRow]) -> TimeUnit:
    """The unit of the best rung's training, with which the sentences agree."""
    return choose_unit_of_training(row.training for row in sorted(rows, key=lambda row: not row.is_best))
