"""What a fit's report tells a run about the rungs that it may go on with: trials, forecasts, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config.checkpointing import find_state, is_as_lean
from ..report.results.fit import FitReport
from ..tuner.candidates import Candidate
from ..types import Fit, Knobs, OutOfMemory, Scalar, Tier
from .run_journal import RunConfig

_PRECISIONS = ("bf16.", "fp16.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRung:
    """What a fit has found out about one rung.

    `start` are the settings of its first trial, `pinned` the keys of its config that pin host memory. `needs_nvme`
    tells whether states go through NVMe. `forecast` is the verdict of its forecast. By it a rank needs
    `host_forecast_bytes` of the host. `refused` is the reason that the rung cannot run here. Each may be None.
    """

    rung: str
    start: Mapping[str, Scalar] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
    trials: tuple[tuple[Knobs, Fit | OutOfMemory], ...] = ()
    needs_nvme: bool = False
    forecast: str | None = None
    host_forecast_bytes: int | None = None
    refused: str | None = None

    def find_fit(self, like: Knobs) -> Fit | None:
        """The last trial of this size that ran."""
        size = (like.micro_batch, find_state(like))
        fits = [outcome for knobs, outcome in self.trials if (knobs.micro_batch, find_state(knobs)) == size]
        return next((outcome for outcome in reversed(fits) if isinstance(outcome, Fit)), None)

    def rate(self, like: Knobs) -> float | None:
        """Samples a second at the largest measured micro batch up to this one; None without a measurement."""
        measured = [
            (knobs.micro_batch, outcome.samples_per_second)
            for knobs, outcome in self.trials
            if isinstance(outcome, Fit)
            and find_state(knobs) == find_state(like)
            and knobs.micro_batch <= like.micro_batch
        ]
        return max(measured)[1] if measured else None

    def peak(self, tier: Tier) -> int | None:
        """The largest measured peak on a tier; None where no trial ran."""
        uses = [outcome.memory.get(tier) for _, outcome in self.trials if isinstance(outcome, Fit)]
        return max((use.peak_bytes for use in uses if use is not None), default=None)

    def needs_less_host(self, other: KnownRung) -> bool:
        """Whether it needs less host memory than the other rung: by trials of both, else by their forecasts."""
        pairs = ((self.peak("host"), other.peak("host")), (self.host_forecast_bytes, other.host_forecast_bytes))
        for size, others in pairs:
            if size is not None and others is not None:
                return size < others
        return False

    def ran_out_at(self, like: Knobs) -> bool:
        """Whether a trial of this size, or of a smaller one, ran out of memory."""
        return any(
            isinstance(outcome, OutOfMemory)
            and knobs.micro_batch <= like.micro_batch
            and is_as_lean(knobs, like)
            and (like.keeps_headroom or not knobs.keeps_headroom)
            for knobs, outcome in self.trials
        )

    def make_configs(self, current: RunConfig, *, unpinned: bool, can_recompute: bool) -> Iterator[RunConfig]:
        """Yield configs of this rung to go on with from `current`, largest micro batch first.

        They have the settings of the rung's trials, or else of its start. What decides the losses is that of the
        current config: the precision. With `unpinned` they pin no host memory.
        """
        kept: dict[str, Scalar] = {
            key: value for key, value in current.knobs.settings.items() if key.startswith(_PRECISIONS)
        }
        if unpinned:
            kept |= dict.fromkeys(self.pinned, False)
        untried = Knobs(checkpointing=can_recompute or current.knobs.checkpointing, settings=self.start)
        for size in current.micro_batches():
            trials = [knobs for knobs, outcome in self.trials if knobs.micro_batch == size and isinstance(outcome, Fit)]
            knobs = trials[-1] if trials else untried
            settings = {key: value for key, value in knobs.settings.items() if not key.startswith(_PRECISIONS)}
            chosen = replace(
                current.knobs,
                settings=settings | kept,
                checkpointing=knobs.checkpointing,
                expandable=current.knobs.expandable or knobs.expandable,
                keeps_headroom=knobs.keeps_headroom,
            )
            yield replace(current, rung=self.rung, knobs=chosen).with_micro_batch(size)


def gather_known_rungs(report: FitReport, ladder: Sequence[Candidate]) -> tuple[KnownRung, ...]:
    """Return what a fit's report knows of each rung, fastest first; `ladder` is how the fit would begin them."""
    verdicts = {forecast.rung: forecast.verdict for forecast in report.forecast}
    host_bytes = {
        forecast.rung: -(-forecast.memory["host"].peak_bytes // report.question.ranks_per_node)
        for forecast in report.forecast
        if "host" in forecast.memory
    }
    trials: dict[str, list[tuple[Knobs, Fit | OutOfMemory]]] = {}
    for record in report.trials:
        if isinstance(record.outcome, Fit | OutOfMemory) and record.trial.limited:
            trials.setdefault(record.trial.rung, []).append((record.trial.knobs, record.outcome))
    return tuple(
        KnownRung(
            rung=each.rung.name,
            start=each.knobs.settings,
            pinned=each.pinned,
            trials=tuple(trials.get(each.rung.name, ())),
            needs_nvme=each.rung.uses_nvme,
            forecast=verdicts.get(each.rung.name),
            host_forecast_bytes=host_bytes.get(each.rung.name),
            refused=each.skip,
        )
        for each in ladder
    )
