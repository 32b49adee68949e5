"""The results of `autods fit`, `plan` and `probe` as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..config.plan_settings import Site
from ..config.profiles import Budget
from ..forecast.predict.step_time import Speed
from ..forecast.values import RungForecast
from ..system.host import Hardware
from ..types import Knobs, ModelFacts, Record, Scalar, Skipped, Steps, Tier, TierUse, WorkloadSource
from ..workload.script_source import ScriptLaunch


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The rate over whole optimizer steps, all ranks together. Tokens are None when a sample has no fixed length."""

    samples_per_second: float
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosestRung:
    """The rung that came nearest to fitting, when none does.

    missing_bytes is a lower bound unless `exact`, and None when it is not known.
    """

    rung: str
    missing_bytes: int | None
    exact: bool = False
    tier: Tier = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the whole engine; a part that was not done is None. See `types.Examined`."""

    bytes: int | None
    save_s: float | None
    load_s: float | None
    gathered: bool | None
    restored: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The losses compared with a plain config's on the same samples, step by step, and the sizes of the updates.

    `reference` is the plain config's rung.
    `largest_difference` is that of losses, relative; infinite when only one of two losses is finite.
    `update_difference` is that of the mean change of a weight in a step, relative; None where it is not known.
    `changed_by` are the knobs that changed them; setting back any of them is enough.
    `taken_back` is the one that was set back. The differences are then those of the config without it.
    """

    reference: str
    steps: int
    tolerance: float
    largest_difference: float
    within: bool
    update_difference: float | None = None
    update_tolerance: float | None = None
    changed_by: tuple[str, ...] = ()
    taken_back: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of all checks. `passed` means that everything was checked and nothing failed.

    `batch_shape` is the shape of the longest batch's largest tensor; empty when no such batch ran to its end.
    `draws` is the number of batches that it is the longest of; 0 when the workload names its longest batch.
    `skipped_steps` came on top of `optimizer_steps`; their gradients overflowed in fp16.
    `headroom_bytes` is limit less peak, for each tier with a limit.
    `headroom_kept` tells whether the longest batch left the search's headroom free on the device.
    `growth_bytes` is by how much the device's memory in use grew in each step. If it did, the device holds about
    `runs_out_after_steps` steps.
    `backed_off`, `failures` and `not_checked` are sentences.
    """

    passed: bool = False
    batch_shape: tuple[int, ...] = ()
    draws: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    evaluated: bool = False
    checkpoint: Checkpoint | None = None
    alloc_retries: int | None = None
    headroom_bytes: Mapping[Tier, int] = field(default_factory=dict)
    headroom_kept: bool | None = None
    growth_bytes: int | None = None
    runs_out_after_steps: int | None = None
    parity: Parity | None = None
    backed_off: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuestion:
    """What a fit was asked: the workload, the machine and the search.

    `gpus` are the ranks of all nodes, `threads` those of one rank. `ladder` has the names of its rungs in order.
    `lacks_nvme` are the rungs that need --nvme-path, which was not given. `script` tells how to start a training
    script; it is None for any other workload. `stood_in` and `writes_confined` are those of its `ModelFacts`.
    `ops_folder` is the folder in which trials built DeepSpeed's ops. `fingerprint` identifies the question, see
    `Settings.fingerprint`; `budget` and `forecast` are the parts of it that decide only which trials are run.
    `rehearsed_on` names the machine of the catalogue whose simulation answered the trials; None for a real fit.
    """

    workload: str = "workload"
    parameters: int | None = None
    gpus: int = 1
    nodes: int = 1
    pipeline_stages: int | None = None
    experts: int = 0
    device: str = "cuda"
    device_bytes: int | None = None
    threads: int | None = None
    global_batch: int | None = None
    profile: str = ""
    objective: str = ""
    stop: str = ""
    ladder: tuple[str, ...] = ()
    lacks_nvme: tuple[str, ...] = ()
    script: ScriptLaunch | None = None
    stood_in: tuple[str, ...] = ()
    writes_confined: bool | None = None
    ops_folder: str | None = None
    fingerprint: str = ""
    budget: Budget = field(default_factory=Budget)
    forecast: bool = True
    rehearsed_on: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a fit. `rung`, `knobs`, `ds_config` and `throughput` are None when nothing fits.

    `memory` has the winner's peaks; a tier that was not measured is absent. `certificate` is None
    where nothing was examined. `importances` maps a tuned key to its share of the variation in throughput.

    `reasons` maps a rung, or a variant of it, to why it was left or chosen. Its entries "grow", "tune" and "certify"
    say why these steps stopped. "batch" says how many samples an optimizer step trains on, and why.

    `real_fit_seconds` is what the trials of a rehearsal and the certificate would take on real ranks, by estimate; None
    for a real fit, which took `seconds`.
    """

    status: Literal["fit", "nothing_fits"]
    rung: str | None = None
    knobs: Knobs | None = None
    ds_config: Mapping[str, Any] | None = None
    throughput: Throughput | None = None
    memory: Mapping[Tier, TierUse] = field(default_factory=dict)
    certificate: Certificate | None = None
    forecast: tuple[Mapping[str, Any], ...] = ()
    trials: tuple[Record, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    importances: Mapping[str, float] = field(default_factory=dict)
    largest_micro_batch: int | None = None
    closest: ClosestRung | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Hardware | None = None
    question: FitQuestion = FitQuestion()
    seconds: float = 0.0
    real_fit_seconds: float | None = None
    out: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.question.device == "cpu"


Status = Literal["fits", "tight", "not_forecast", "nothing_fits"]  # the best first


_AS_FAST = 0.97  # of the fastest rate: the forecast cannot tell such rungs apart


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


def forecast_training(site: Site, speed: Speed, tokens: float) -> Training | None:
    """Return the training on so many tokens at this speed; None where the tokens of a sample are unknown."""
    if speed.tokens_per_second is None:
        return None
    days = tokens / speed.tokens_per_second / 86_400
    low, high = (bound / speed.step.seconds for bound in (speed.step.low_seconds, speed.step.high_seconds))
    gpu_hours = days * 24 * site.world_size
    cost = None if site.price_per_gpu_hour is None else gpu_hours * site.price_per_gpu_hour
    return Training(
        tokens=tokens,
        days=days,
        low_days=days * low,
        high_days=days * high,
        gpu_hours=gpu_hours,
        cost=cost,
        low_cost=None if cost is None else cost * low,
        high_cost=None if cost is None else cost * high,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another micro batch of the recommended rung, or its largest with checkpointing `switched`."""

    forecast: RungForecast
    checkpointing: bool
    switched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteForecast:
    """The forecasts of all rungs on one kind of machine, fastest rung first.

    `to_try` are the rungs that could not be forecast and may fit; a fit tries them.
    `lacks_nvme` are the rungs that need NVMe, which was not named.
    `alternatives` are other settings of the best rung; empty where several machines are compared.
    """

    site: Site
    rungs: tuple[RungForecast, ...]
    to_try: tuple[str, ...] = ()
    lacks_nvme: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def best(self) -> RungForecast | None:
        """The fastest rung that fits; if none fits, the fastest that may.

        The forecast of step time decides, if the first candidate of the ladder has one; a later one without counts as
        slower. Rungs that are as good as equal keep the order of the ladder.
        """
        candidates = [rung for rung in self.rungs if rung.verdict == "fits"]
        candidates = candidates or [rung for rung in self.rungs if rung.verdict == "tight"]
        if not candidates or candidates[0].speed is None:
            return next(iter(candidates), None)
        rates = [0.0 if rung.speed is None else rung.speed.samples_per_second for rung in candidates]
        return next(rung for rung, rate in zip(candidates, rates, strict=True) if rate >= _AS_FAST * max(rates))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The result of a plan, machine by machine, smallest device first.

    `assumed` holds sentences about values that the user left open and the result depends on. Each rung adds its own.
    `zero_init` is true if stage 3 was built under `deepspeed.zero.Init`.
    `tokens` are those of a training whose duration was asked for. `timeline` is the trace that was written.
    """

    sites: tuple[SiteForecast, ...]
    source: WorkloadSource
    facts: ModelFacts
    device: str = "cuda"
    checkpointing: bool = True
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
    def smallest_enough(self) -> SiteForecast | None:
        """The first machine, smallest device first, on which a rung surely fits."""
        return next((site for site in self.sites if site.status == "fits"), None)

    @property
    def ranked_sites(self) -> tuple[SiteForecast, ...]:
        """The machines by rate, fastest first: those on which a rung fits, those where one may, then the others."""
        order: dict[Status, int] = {"fits": 0, "tight": 1, "not_forecast": 2, "nothing_fits": 3}
        return tuple(sorted(self.sites, key=lambda site: (order[site.status], -site.rate)))

    @property
    def all_assumed(self) -> tuple[str, ...]:
        """Each assumption once: the plan's, the workload's, then those of the rungs."""
        source, facts = self.source, self.facts
        sentences = list(self.assumed)
        if source.seq_len is None and facts.seq_len is not None:
            why = (
                "as build_batch makes them" if not source.form.is_model_config else "the config's longest, at most 2048"
            )
            sentences.append(f"sequences of {facts.seq_len} tokens, {why} (--seq-len)")
        if source.form.is_model_config:
            sentences.append(f"task {source.task} (--task), random weights built in fp32")
        if not facts.checkpointing and not source.form.chooses_checkpointing:  # a script decides that by itself
            sentences.append("no gradient checkpointing: the model has no gradient_checkpointing_enable()")
        sentences += (sentence for site in self.sites for rung in site.rungs for sentence in rung.assumed)
        return tuple(dict.fromkeys(sentences))


PROBE = "probe.json"
PROBE_CSV = "probe.csv"
CellStatus = Literal["fit", "out_of_memory", "failed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The speed of a cell divided by that of the reference cell, with its 95 % interval."""

    times: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1: the two speeds differ by more than noise."""
        return not self.low <= 1 <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest micro batch of a cell.

    `forecast` is that of the simulated device. It is None when no size fits or the cell could not be simulated.
    `verified` is the largest size that fitted in a trial, `refused` the smallest that did not.
    `exact` is true if no size lies between the two. `explanation` compares the three in one sentence.
    """

    forecast: int | None = None
    verified: int | None = None
    refused: int | None = None
    exact: bool = False
    explanation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One combination of values and its measurements.

    `values` maps an axis to its value; None is a value that is not set. `reason` says why the cell did not fit or was
    not run. `unheeded` maps an axis that has no effect here to the reason. `same_as` is the cell whose trials are
    shared. The samples and tokens per second are medians of `repeats` trials, and `spread` is their relative standard
    deviation. `sent_bytes` counts what a rank sends in an optimizer step. `memory` has the highest peaks.
    `missing_bytes` is a lower bound, on `tier`. `trials` are ids.
    """

    number: int
    values: Mapping[str, Scalar | None]
    status: CellStatus
    reason: str = ""
    unheeded: Mapping[str, str] = field(default_factory=dict)
    same_as: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    spread: float | None = None
    ratio: Ratio | None = None
    repeats: int = 0
    step_s: float | None = None
    sent_bytes: int | None = None
    memory: Mapping[Tier, TierUse] = field(default_factory=dict)
    tier: Tier | None = None
    missing_bytes: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    checkpointing: bool | None = None
    capacity: Capacity | None = None
    trials: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeQuestion:
    """What a probe was asked, besides its axes. `machine` is the one that a probe without trials forecasts for."""

    workload: str
    gpus: int
    nodes: int
    device: str
    device_bytes: int
    global_batch: int | None
    precision: str
    repeats: int
    steps: Steps
    capacity: bool
    parallel_trials: int
    forecast_only: bool
    machine: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The result of a probe.

    `compared` is the number of the reference cell of all ratios, and their measure.
    `notes` are sentences that hold for all cells.
    """

    status: Literal["done", "nothing_fits"]
    axes: Mapping[str, tuple[Scalar | None, ...]]
    cells: tuple[CellResult, ...]
    compared: tuple[int, Literal["samples", "tokens"]] | None = None
    notes: tuple[str, ...] = ()
    trials: tuple[Record, ...] = ()
    question: ProbeQuestion
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Hardware | None = None
    seconds: float = 0.0
    out: str = ""
