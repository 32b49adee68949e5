"""The result of `autods plan`: the forecasts of every rung, machine by machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ...config.catalogue import Site
from ...forecast.values import ForecastEvent, PartitionedBuild, RungForecast
from ...types import ModelFacts, WorkloadSource
from .shown import Shown

WORTH_NAMING = 0.1  # of a limit: what building takes beyond a step, and what is left of a tier that is nearly full
Status = Literal["fits", "tight", "not_forecast", "nothing_fits"]  # the best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How long a training takes and what it costs, with the bounds of the step's time.

    Costs have the currency of the price; they are None without one.
    """

    tokens: float
    days: float
    low_days: float
    high_days: float
    gpu_hours: float
    cost: float | None = None
    low_cost: float | None = None
    high_cost: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another micro batch of the recommended rung, or its largest with checkpointing `switched`.

    With `opt_in` it is a rung that nobody gets unasked, for that reason.
    """

    forecast: RungForecast
    checkpointing: bool | int
    switched: bool = False
    opt_in: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingPeak:
    """The host of a node with a rung of this stage, which is fullest before the first step.

    `build_bytes` is its peak while `ranks` ranks build or load the model, `init_bytes` that while their engines start,
    and `later_bytes` that of all steps. Each rank builds the model `whole`, or at least as large `in_fp32`.
    """

    stage: int
    ranks: int
    build_bytes: int
    init_bytes: int
    later_bytes: int
    whole: bool
    in_fp32: bool


def find_closest(rungs: Iterable[RungForecast]) -> RungForecast | None:
    """Return the forecast that exceeds its limits least; None where no rung was forecast."""
    return min((rung for rung in rungs if rung.memory), key=lambda rung: max(1.0, rung.fill), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteForecast:
    """The forecasts of all rungs on one kind of machine, in the order of the ladder.

    `best` is the rung to take: see `planner.plan.choose_best`. It is None where no rung fits or may fit.
    `to_try` are the rungs that could not be forecast and may fit; a fit tries them.
    `lacks_nvme` are the rungs that need NVMe, which was not named.
    `built_whole` are rungs of stage 3 whose device or host is short, or nearly full, only while each rank builds the
    whole model. They are the best rung and those that may not fit; there are none where no rung may fit.
    `loading` is about the best rung, or the one that comes closest; None where its host is fullest in a step.
    `alternatives` are other settings of the best rung, and `partitioned` is a rung that `--zero-init` would make fit;
    there are none where several machines are compared. `unaccumulated` is the best rung with one micro batch a step;
    None also where the user says how many there are. `runs_full` says that the best rung's allocator should give its
    cache back in each step.
    """

    site: Site
    rungs: tuple[RungForecast, ...]
    best: RungForecast | None = None
    to_try: tuple[str, ...] = ()
    lacks_nvme: tuple[str, ...] = ()
    built_whole: tuple[str, ...] = ()
    loading: LoadingPeak | None = None
    alternatives: tuple[Alternative, ...] = ()
    partitioned: PartitionedBuild | None = None
    unaccumulated: RungForecast | None = None
    runs_full: bool = False

    @property
    def rate(self) -> float:
        """The best rung's samples a second; 0 where its time is not known or none fits."""
        return 0.0 if self.best is None or self.best.speed is None else self.best.speed.samples_per_second

    @property
    def best_rung(self) -> str | None:
        return self.best.rung if self.best else None

    @property
    def status(self) -> Status:
        if self.best is None:
            return "not_forecast" if self.to_try else "nothing_fits"
        return "fits" if self.best.verdict == "fits" else "tight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The file with a rung's step as a trace."""

    path: str
    rung: str
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanReport(Shown):
    """The result of a plan, machine by machine, smallest device first.

    `assumed` holds sentences about values that the user left open and the result depends on.
    `zero_init` is true if stage 3 was built under `deepspeed.zero.Init`.
    `tokens` are those of a training whose duration was asked for. `timeline` is the trace that was written.
    """

    sites: tuple[SiteForecast, ...]
    source: WorkloadSource
    facts: ModelFacts
    device: str = "cuda"
    checkpointing: bool | int = True
    zero_init: bool = False
    tokens: float | None = None
    timeline: Timeline | None = None
    assumed: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def status(self) -> Status:
        """The best status of all machines."""
        return min((site.status for site in self.sites), key=get_args(Status).index)

    @property
    def best(self) -> RungForecast | None:
        """The forecast of the fastest rung that fits, on the fastest of the machines; None where none fits."""
        return self.ranked_sites[0].best

    @property
    def smallest_enough(self) -> SiteForecast | None:
        """The first machine, smallest device first, on which a rung surely fits."""
        return next((site for site in self.sites if site.status == "fits"), None)

    @property
    def ranked_sites(self) -> tuple[SiteForecast, ...]:
        """The machines by rate, fastest first: those on which a rung fits, those where one may, then the others."""
        order: dict[Status, int] = {"fits": 0, "tight": 1, "not_forecast": 2, "nothing_fits": 3}
        return tuple(sorted(self.sites, key=lambda site: (order[site.status], -site.rate)))

    def forecast_training(self, site: SiteForecast, rung: RungForecast | None) -> Training | None:
        """The training on the plan's tokens with this rung; None without tokens, a rung or its time."""
        if self.tokens is None or rung is None or rung.speed is None or rung.speed.tokens_per_second is None:
            return None
        step, price = rung.speed.step, site.site.price_per_gpu_hour
        days = self.tokens / rung.speed.tokens_per_second / 86_400
        low, high = step.low_seconds / step.seconds, step.high_seconds / step.seconds
        gpu_hours = days * 24 * site.site.world_size
        cost = None if price is None else gpu_hours * price
        return Training(
            tokens=self.tokens,
            days=days,
            low_days=days * low,
            high_days=days * high,
            gpu_hours=gpu_hours,
            cost=cost,
            low_cost=None if cost is None else cost * low,
            high_cost=None if cost is None else cost * high,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSoFar:
    """The rungs of one machine that are done give another answer than before; those of `left` are still to come."""

    report: PlanReport
    left: int


PlanEvent = ForecastEvent | AnswerSoFar
PlanListener = Callable[[PlanEvent], None]
