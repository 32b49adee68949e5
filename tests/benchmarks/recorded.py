"""A grid of configs whose real trials were recorded: what is true of each, and a runner that answers by drawing."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autods.config.deepspeed import accumulation_for, micro_batches
from autods.config.settings import Settings
from autods.rank.step_recorder import is_enough, relative_error
from autods.runner.runner import RayRunner
from autods.tuner.candidates import Candidate, list_candidates
from autods.types import Failed, Fit, Knobs, ModelFacts, Outcome, OutOfMemory, Record, Steps, TierUse, Timing, Trial

_BESIDE, _ROUNDS = 6, 10  # neighbours on either side; rounds until the parts settle

FAILURES: Mapping[str, type[OutOfMemory | Failed]] = {"out_of_memory": OutOfMemory, "failed": Failed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One config of a grid, its rung's other settings as a fit starts with."""

    rung: str
    micro_batch: int
    accumulation: int
    checkpointing: bool

    def __str__(self) -> str:
        said = f"{self.rung} {self.micro_batch}×{self.accumulation}"
        return said if self.checkpointing else f"{said} without checkpointing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One real trial of a point. load: the machine's, when it began. peak_bytes: of the fullest rank's device."""

    point: Point
    turn: int
    at: str
    load: float
    seconds: float
    step_s: tuple[float, ...] = ()
    peak_bytes: int = 0
    failure: OutOfMemory | Failed | None = None

    @property
    def samples(self) -> int:
        """Of one rank, an optimizer step."""
        return self.point.micro_batch * self.point.accumulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All recordings of one workload. digest: of the question that they answer."""

    digest: str
    facts: ModelFacts
    op_problems: Mapping[str, str]
    recordings: tuple[Recording, ...]

    def by_point(self) -> dict[Point, list[Recording]]:
        """In the order of recording."""
        found: dict[Point, list[Recording]] = {}
        for one in self.recordings:
            found.setdefault(one.point, []).append(one)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the recordings say of a config. rate: samples a second of all ranks, by the median of every recorded step.

    spread: of the rates of its recordings, highest over lowest − 1. fits: most recordings ran, and the median peak
    leaves the headroom, which micro batch 1 need not.
    """

    point: Point
    rate: float
    spread: float
    fits: bool


def points(settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> tuple[list[Point], list[Point]]:
    """The grid, all with the global batch; and the shorter steps with which a search looks whether a rung fits."""
    grid, looks = [], []
    for one in runnable(settings, facts, op_problems):
        for checkpointing in (True, False) if facts.checkpointing else (False,):
            base = Point(
                rung=one.rung.name, micro_batch=1, accumulation=one.knobs.accumulation, checkpointing=checkpointing
            )
            looks.append(base)
            for size in micro_batches(settings.global_batch, settings.gpus, settings.profile.grow.most_micro_batch):
                steps = accumulation_for(settings.global_batch, size, settings.gpus)
                grid.append(replace(base, micro_batch=size, accumulation=steps))
    return grid, [one for one in looks if one not in grid]


def runnable(settings: Settings, facts: ModelFacts, op_problems: Mapping[str, str]) -> list[Candidate]:
    """The rungs that this machine has everything for."""
    return [one for one in list_candidates(settings, facts, op_problems) if one.skip is None]


def trial_of(point: Point, starts: Iterable[Candidate], steps: Steps) -> Trial:
    """The trial that is recorded."""
    start = next(one.knobs for one in starts if one.rung.name == point.rung)
    knobs = replace(
        start, micro_batch=point.micro_batch, accumulation=point.accumulation, checkpointing=point.checkpointing
    )
    return Trial(rung=point.rung, knobs=knobs, purpose="grow", steps=steps)


def truths(recorded: Recorded, grid: Iterable[Point], *, world_size: int, usable_bytes: float) -> dict[Point, Truth]:
    """Of each config of the grid that was recorded; it raises KeyError for one that was not."""
    of = recorded.by_point()
    return {point: _truth(point, of[point], world_size, usable_bytes) for point in grid}


def _truth(point: Point, recordings: Sequence[Recording], world_size: int, usable_bytes: float) -> Truth:
    ran = [one for one in recordings if one.failure is None]
    if 2 * len(ran) <= len(recordings):
        return Truth(point=point, rate=0.0, spread=0.0, fits=False)
    middles = [statistics.median(one.step_s) for one in ran]
    peak = statistics.median(one.peak_bytes for one in ran)
    return Truth(
        point=point,
        rate=world_size * ran[0].samples / statistics.median(time for one in ran for time in one.step_s),
        spread=max(middles) / min(middles) - 1,
        fits=point.micro_batch == 1 or peak <= usable_bytes,
    )


def without_drift(recorded: Recorded) -> Recorded:
    """The same with the machine's slow drift (who else computes) taken out of the step times.

    In logarithms a time is its config's part, the machine's at that moment, and noise. The machine's is the median of
    what the neighbours in time are off their configs, where these were recorded more than once; a recording has no say
    in its own.
    """
    ran = [place for place, one in enumerate(recorded.recordings) if one.failure is None]
    times = {place: math.log(statistics.median(recorded.recordings[place].step_s)) for place in ran}
    drift = dict.fromkeys(ran, 0.0)
    for _ in range(_ROUNDS):
        of: dict[Point, list[float]] = {}
        for place in ran:
            of.setdefault(recorded.recordings[place].point, []).append(times[place] - drift[place])
        off = {place: times[place] - statistics.median(of[recorded.recordings[place].point]) for place in ran}
        again = [place for place in ran if len(of[recorded.recordings[place].point]) > 1]
        for place in ran:
            before = [one for one in again if one < place][-_BESIDE:]
            after = [one for one in again if one > place][:_BESIDE]
            beside = [off[one] for one in (*before, *after)]
            drift[place] = statistics.median(beside) if beside else 0.0
    steady = tuple(
        replace(one, step_s=tuple(time / math.exp(drift.get(place, 0.0)) for time in one.step_s))
        for place, one in enumerate(recorded.recordings)
    )
    return replace(recorded, recordings=steady)


def repeatable(recorded: Recorded) -> Recorded:
    """The same as if two trials of a config never differed by more than their steps do: on one median per config."""
    logs: dict[Point, list[float]] = {}
    for one in recorded.recordings:
        if one.failure is None:
            logs.setdefault(one.point, []).append(math.log(statistics.median(one.step_s)))
    common = {point: math.exp(statistics.median(of)) for point, of in logs.items()}
    return replace(recorded, recordings=tuple(_scaled(one, common) for one in recorded.recordings))


def _scaled(one: Recording, common: Mapping[Point, float]) -> Recording:
    if one.failure is not None:
        return one
    factor = common[one.point] / statistics.median(one.step_s)
    return replace(one, step_s=tuple(time * factor for time in one.step_s))


@dataclass(slots=True)
class RecordedRunner:
    """Answers a trial by one of the recorded trials of its config, drawn by the seed: noise is the machine's own.

    The steps follow each other as they did, from a drawn one on, until the trial's own rule of how many are enough.
    """

    settings: Settings
    recorded: Recorded
    seed: int
    of: Mapping[Point, list[Recording]] = field(init=False)
    starts: list[Candidate] = field(init=False)
    draw: random.Random = field(init=False)
    composer: RayRunner = field(init=False)

    def __post_init__(self) -> None:
        self.of, self.draw = self.recorded.by_point(), random.Random(self.seed)
        self.starts = runnable(self.settings, self.recorded.facts, self.recorded.op_problems)
        self.composer = RayRunner(self.settings, lambda event: None)  # never entered: it only composes configs
        self.composer.facts = self.recorded.facts

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        return self.recorded.facts, self.recorded.op_problems

    def final_config(self, trial: Trial) -> dict[str, Any]:
        return self.composer.final_config(trial)

    def run(self, trial: Trial, *, id: int) -> Record:
        """Raises LookupError for what was not recorded: other settings, an exam, no budget."""
        point = point_of(trial)
        expected = trial_of(point, self.starts, trial.steps).knobs
        if trial.exam or not trial.limited or trial.knobs != expected or point not in self.of:
            raise LookupError(f"was not recorded: {trial}")
        one = self.draw.choice(self.of[point])
        outcome = one.failure or self._fit(one, trial.steps)
        return Record(id=id, trial=trial, outcome=outcome, seconds=one.seconds)

    def _fit(self, one: Recording, steps: Steps) -> Outcome:
        first = self.draw.randrange(len(one.step_s))
        elapsed_s, times = steps.warmup * statistics.median(one.step_s), []
        while len(times) < steps.most_timed:
            times.append(one.step_s[(first + len(times)) % len(one.step_s)])
            elapsed_s += times[-1]
            if len(times) >= steps.timed and is_enough(times, steps, elapsed_s=elapsed_s):
                break
        rate = one.samples * self.settings.gpus / statistics.median(times)
        tokens = self.recorded.facts.tokens_per_sample
        return Fit(
            memory={"device": TierUse(peak_bytes=one.peak_bytes, limit_bytes=self.settings.device_bytes)},
            samples_per_second=rate,
            tokens_per_second=rate * tokens if tokens else None,
            step_s=tuple(times),
            spread=relative_error(times),
            losses=(),
            timing=Timing(wall_s=one.seconds, steps_s=elapsed_s),
        )


def point_of(trial: Trial) -> Point:
    """Where a trial lies in the grid."""
    knobs: Knobs = trial.knobs
    return Point(
        rung=trial.rung, micro_batch=knobs.micro_batch, accumulation=knobs.accumulation,
        checkpointing=knobs.checkpointing,
    )  # fmt: skip


# ---- on disk: a header, then a line a recording, so that a grid that was stopped goes on


def header(digest: str, facts: ModelFacts, op_problems: Mapping[str, str], **more: Any) -> str:
    """The first line."""
    return json.dumps({"digest": digest, "facts": asdict(facts), "op_problems": dict(op_problems), **more}) + "\n"


def line(one: Recording) -> str:
    """Of one recording; what is empty is left out."""
    row = asdict(one) | {"step_s": [round(time, 5) for time in one.step_s]}
    return json.dumps({name: value for name, value in row.items() if value or name == "load"}) + "\n"


def read(path: Path) -> Recorded:
    """The inverse; a last line that was torn is left out."""
    whole, _, _ = path.read_text().rpartition("\n")
    first, *rows = (json.loads(text) for text in whole.split("\n"))
    return Recorded(
        digest=first["digest"],
        facts=ModelFacts(**first["facts"]),
        op_problems=first["op_problems"],
        recordings=tuple(_recordings(rows)),
    )


def _recordings(rows: Iterable[Mapping[str, Any]]) -> Iterator[Recording]:
    for row in rows:
        failure = row.get("failure")
        said = {
            **row,
            "point": Point(**row["point"]),
            "step_s": tuple(row.get("step_s", ())),
            "failure": failure and FAILURES[failure["kind"]](**failure),
        }
        yield Recording(**said)
