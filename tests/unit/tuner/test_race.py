"""The race: which rung wins at which micro batch, who enters, who drops out, and the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autods.config.checkpointing import PARTIAL, find_state
from autods.config.profiles import Budget
from autods.config.rungs import read_rungs
from autods.config.settings import Settings
from autods.forecast.largest_batch import Fills
from autods.forecast.values import RungForecast, TierForecast
from autods.journal import Journal, TrialStore, trial_key
from autods.report.answers.ladder import list_ladder
from autods.runner.testing import failed, fit, out_of_memory
from autods.tuner.fit import search
from autods.tuner.fit_report import FitResult, build_report
from autods.tuner.forecaster import NO_FORECASTER, Forecaster, StepForecast
from autods.tuner.trials import FitContext
from autods.types import Fit, ModelFacts, Outcome, Record, Tier, TierUse, Trial
from tests.support.contexts import make_context
from tests.support.walks import FACTS, SETTINGS, TOO_SMALL

GIB = 2**30
LIMIT = 16 * GIB
LAYERS = 12
ALIKE = replace(FACTS, alike_layers=LAYERS)
RUNGS = {rung.name: rung for rung in SETTINGS.ladder}
BF16_STATES = read_rungs()["zero3-bf16-states"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """GiB that a rank holds whatever the batch, seconds of a micro step whatever the batch and per sample.

    full: the tier that is too small for it from the micro batch `full_from` on, if one is; its pinned memory runs out
    where it pins any.
    """

    gib: float = 2.0
    fixed_s: float = 1.0
    sample_s: float = 0.1
    full: Tier | None = None
    full_from: int = 1


@dataclass
class Machine:
    """Rungs as one machine runs them. The rungs that are not named run out of memory at once.

    kept_gib: of a sample's activations without checkpointing; recomputing them keeps a quarter of it and takes a third
    more time. fp16: how many times as fast it is as bf16. Says where a measurement was flattered: trial → factor.
    least: the smallest micro batch that the model can be trained with. inputs_gib: of a sample's layers, while they
    recompute; on the host they take no memory of the device, and a hundredth more time.
    """

    rungs: Mapping[str, Rung]
    least: int = 1
    kept_gib: float = 2.0
    fp16: float = 1.0
    inputs_gib: float = 0.0
    flattery: Callable[[Trial], float] = lambda trial: 1.0
    wave: int = 1
    ran: list[Trial] = field(default_factory=list)

    def peak_gib(self, trial: Trial) -> float:
        knobs = trial.knobs
        sample_gib = self.kept_gib * (1 - 0.75 * recomputed_part(trial))
        sample_gib += self.inputs_gib if find_state(knobs) == "on" else 0.0
        return self.rungs[trial.rung].gib + sample_gib * knobs.micro_batch

    def step_s(self, trial: Trial) -> float:
        rung, knobs = self.rungs[trial.rung], trial.knobs
        sample_s = rung.sample_s * (0.75 + 0.25 * recomputed_part(trial))
        sample_s *= 1.01 if find_state(knobs) == "offload" else 1.0
        faster = self.fp16 if knobs.settings.get("fp16.enabled") else 1.0
        samples = self.wave * -(-knobs.micro_batch // self.wave)
        return knobs.accumulation * (rung.fixed_s + sample_s * samples) / faster

    def answer(self, trial: Trial) -> Outcome:
        if trial.knobs.micro_batch < self.least:
            return TOO_SMALL
        rung = self.rungs.get(trial.rung)
        if rung is None:
            return out_of_memory(missing_bytes=GIB)
        pinned = read_rungs()[trial.rung].places["optimizer"] == "host" and not unpinned(trial)
        if trial.knobs.micro_batch >= rung.full_from and (rung.full == "host" or (rung.full == "pinned" and pinned)):
            return out_of_memory(missing_bytes=GIB, tier=rung.full)
        peak = self.peak_gib(trial) * GIB
        if peak > LIMIT and trial.limited:
            return out_of_memory(missing_bytes=int(peak - LIMIT))
        step_s = self.step_s(trial) / self.flattery(trial)
        rate = trial.knobs.train_batch(SETTINGS.gpus) / step_s
        return fit(peak_bytes=int(peak), samples_per_second=rate, step_s=step_s, limit_bytes=LIMIT)

    def run(self, trial: Trial, *, id: int) -> Record:
        self.ran.append(trial)
        return Record(id=id, trial=trial, outcome=self.answer(trial), seconds=10.0)

    def sizes(self, rung: str) -> list[int]:
        """The micro batches that were tried of it, the last comparison left out."""
        return [trial.knobs.micro_batch for trial in self.ran if trial.rung == rung and trial.purpose in LOOKED]


LOOKED = ("walk", "grow")


def recomputed_part(trial: Trial) -> float:
    """Of twelve alike layers, that which is recomputed."""
    every = int(trial.knobs.checkpointing)
    return -(-LAYERS // every) / LAYERS if every else 0.0


class Foreseeing:
    """Forecasts a machine's device memory exactly."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.forecasts: dict[str, RungForecast] = {}
        self.own_batch: int | None = None

    def prepare(self, trials: Iterable[Trial]) -> None:
        list(trials)

    def forecast(self, trial: Trial) -> RungForecast | None:
        if trial.rung not in self.machine.rungs:
            return None
        peak = int(self.machine.peak_gib(trial) * GIB)
        use = TierForecast(peak_bytes=peak, low_bytes=peak, high_bytes=peak, limit_bytes=LIMIT)
        return RungForecast(
            rung=trial.rung, verdict="fits" if peak <= LIMIT else "cannot_fit", reason=f"needs {peak // GIB} GiB",
            micro_batch=trial.knobs.micro_batch, memory={"device": use},
        )  # fmt: skip

    def step_time(self, trial: Trial) -> StepForecast | None:
        return None

    def largest_calm(self, trial: Trial, sizes: Sequence[int]) -> int | None:
        return None

    def find_fills(self, trial: Trial, micro_batch: int, usable_bytes: float) -> Fills | None:
        sized = replace(trial, knobs=replace(trial.knobs, micro_batch=micro_batch))
        return {"device": self.machine.peak_gib(sized) * GIB / usable_bytes}

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        sized = [replace(trial, knobs=replace(trial.knobs, micro_batch=size)) for size in sizes[:1024]]
        fitting = [one for one in sized if self.machine.peak_gib(one) * GIB <= usable_bytes]
        return fitting[-1].knobs.micro_batch if fitting else None


def unpinned(trial: Trial) -> bool:
    return trial.knobs.settings.get("zero_optimization.offload_optimizer.pin_memory") is False


@pytest.fixture
def raced(tmp_path: Path) -> Callable[..., FitResult]:
    """Searches a machine as a fit does, without tuning and certifying."""

    def race(
        machine: Machine,
        *,
        checkpointing: bool = False,
        stop: str = "fastest",
        turns: int = 2,
        tune: int = 0,
        certify: int = 0,
        forecaster: Forecaster | None = None,
        facts: ModelFacts = FACTS,
        **asked: Any,
    ) -> FitResult:
        profile = SETTINGS.profile
        profile = replace(
            profile,
            race=replace(profile.race, checkpointing=checkpointing, stop=stop, turns=turns),  # type: ignore[arg-type]
            tune=replace(profile.tune, trials=tune),
            certify=replace(profile.certify, most_trials=certify, parity=None),
        )
        journal = Journal(tmp_path / "journal.jsonl")
        memory = TrialStore(
            journal, journal.open(fingerprint="race"), lambda trial, id: machine.run(trial, id=id), lambda event: None
        )
        settings = replace(SETTINGS, device_bytes=LIMIT, profile=profile, **asked)
        context = FitContext(
            settings=settings, facts=facts, memory=memory, forecaster=forecaster or Foreseeing(machine),
            study=tmp_path / "study.jsonl", final_config=lambda trial: {},
        )  # fmt: skip
        result = search(context)
        assert isinstance(result, FitResult)
        assert {one.knobs.accumulation for one in machine.ran if one.purpose != "walk"} == {1} or settings.global_batch
        return result

    return race


def won(result: FitResult) -> tuple[str, int]:
    return result.raced.best.trial.rung, result.raced.best.trial.knobs.micro_batch


def reasons_in_report(result: FitResult, machine: Machine, settings: Settings = SETTINGS) -> Mapping[str, str]:
    """What the report says of each config, and what the ladder's rows make of it."""
    seen = [machine.run(trial, id=id) for id, trial in enumerate(tuple(machine.ran))]
    context = replace(make_context(machine.run, seen=seen), settings=settings)
    report = build_report(result, context, fingerprint="", seconds=1.0)
    return {**report.reasons, **{row.rung: row.reason for row in list_ladder(report)}}


def test_a_leaner_rung_wins_by_its_larger_batch(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=13), "zero3": Rung(gib=3, fixed_s=1.5)})  # room for 4 samples, and for 24
    result = raced(machine)
    assert won(result) == ("zero3", 24)
    assert result.raced.growth.curve.fits == 24
    assert result.raced.reasons["zero3"].startswith("fastest of 2 that fit: zero3 with micro batch 24")
    assert "ddp" in reasons_in_report(result, machine)


def test_the_same_is_found_without_forecasts(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=13), "zero3": Rung(gib=3, fixed_s=1.5)})
    rung, size = won(raced(machine, forecaster=NO_FORECASTER))
    assert rung == "zero3"
    assert size >= 20


def test_a_rung_that_ran_out_keeps_no_other_from_racing(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=13), "zero2": Rung(gib=40), "zero3": Rung(gib=3)})
    result = raced(machine, forecaster=NO_FORECASTER)
    assert won(result)[0] == "zero3"
    assert result.raced.reasons["zero2"] == "ran out of device memory in forward, at least 24.5 GiB short"


def test_a_rival_that_cannot_win_by_its_steps_is_tried_once_or_twice(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3), "zero1": Rung(gib=2, sample_s=0.5), "zero3": Rung(gib=2, sample_s=0.4)})
    result = raced(machine)
    assert won(result)[0] == "ddp"
    assert 1 <= len(machine.sizes("zero1")) <= 2
    assert 1 <= len(machine.sizes("zero3")) <= 2
    reason = "0.32 times as fast as ddp; no micro batch up to 26 makes it as fast by its step times, give or take 8%"
    assert reasons_in_report(result, machine)["zero3"] == reason


def test_a_smaller_size_that_was_measured_faster_wins(raced: Callable[..., FitResult]) -> None:
    """52 samples take four waves of 16, and 32 take two."""
    machine = Machine(
        {"ddp": Rung(gib=9, fixed_s=2.0), "zero3": Rung(fixed_s=0.1, sample_s=0.09)}, kept_gib=1.0, wave=16
    )
    result = raced(machine, forecaster=NO_FORECASTER)
    assert max(machine.sizes("zero3")) == 52
    assert won(result) == ("zero3", 32)


def test_repeats_that_differ_keep_a_rival_in(raced: Callable[..., FitResult]) -> None:
    def slow_at_first(trial: Trial) -> float:
        return 0.6 if (trial.rung, trial.repeat) == ("ddp", 0) and trial.knobs.micro_batch >= 8 else 1.0

    machine = Machine({"ddp": Rung(gib=3), "zero3": Rung(sample_s=0.2)}, flattery=slow_at_first)
    reason = reasons_in_report(raced(machine, forecaster=NO_FORECASTER), machine)["zero3"]
    assert reason == "0.56 times as fast as ddp; raced to the end"


def test_a_rival_that_cannot_fit_by_its_forecast_is_skipped(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3), "zero3": Rung(gib=40)})
    result = raced(machine)
    assert machine.sizes("zero3") == []
    assert result.raced.reasons["zero3"] == "cannot fit by the forecast: needs 40 GiB"


def test_a_rival_enters_at_the_leaders_batch_or_smaller(
    raced: Callable[..., FitResult],
) -> None:
    class Hopeful(Foreseeing):
        def forecast(self, trial: Trial) -> RungForecast | None:
            fits = TierForecast(peak_bytes=1, low_bytes=1, high_bytes=1, limit_bytes=LIMIT)
            return RungForecast(rung=trial.rung, verdict="fits", reason="", memory={"device": fits}, micro_batch=1)

    machine = Machine({"ddp": Rung(gib=3), "zero3": Rung(gib=7, sample_s=0.05)})  # room for 24 samples, and for 16
    result = raced(machine, forecaster=Hopeful(machine))
    entry, smaller, *_ = machine.sizes("zero3")
    assert entry == 2 * 24  # memory is what ended the leader's climb
    assert smaller == 24
    assert won(result) == ("zero3", 16)


@pytest.mark.parametrize("tier", ["host", "pinned"])
def test_a_full_host_rules_out_rivals_with_as_much_on_it(raced: Callable[..., FitResult], tier: Tier) -> None:
    offloading = Rung(full="host")
    machine = Machine({"ddp": Rung(gib=3), "zero2-offload": offloading, "zero3": Rung(gib=3), "zero3-offload": Rung()})
    result = raced(machine)
    assert result.raced.reasons["zero2-offload"] == "ran out of host memory in forward, at least 1.0 GiB short"
    assert machine.sizes("zero3-offload") == []
    said = "it needs as much host memory as zero2-offload, which ran out of it"
    assert result.raced.reasons["zero3-offload"] == said
    assert machine.sizes("zero3") != []


def test_a_host_full_at_a_large_batch_rules_out_no_rival(
    raced: Callable[..., FitResult],
) -> None:
    full = Rung(gib=3, full="host", full_from=4)
    result = raced(machine := Machine({"ddp": Rung(gib=3), "zero2-offload": full, "zero3-offload": full}))
    assert machine.sizes("zero3-offload") != []
    assert "times as fast as ddp" in reasons_in_report(result, machine)["zero3-offload"]


def test_a_broken_op_rules_out_the_rivals_that_need_it(raced: Callable[..., FitResult]) -> None:
    lacking = ("zero2-offload", "zero3-offload")
    machine = Machine({name: Rung(gib=3) for name in ("ddp", "zero1", *lacking)})
    broken = failed(failure="toolchain", action="fix_environment", evidence="ninja: not found", op="cpu_adam")
    answer = machine.answer
    machine.answer = lambda trial: broken if trial.rung in lacking else answer(trial)  # type: ignore[method-assign]
    result = raced(machine)
    assert result.best.trial.rung in ("ddp", "zero1")
    assert "zero3-offload" not in {trial.rung for trial in machine.ran}
    assert result.raced.reasons["zero3-offload"] == "it needs cpu_adam: ninja: not found"


def test_a_rival_that_fits_unpinned_rules_out_no_other(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=12), "zero2-offload": Rung(full="pinned"), "zero3-offload": Rung(full="pinned")})
    result = raced(machine)
    assert won(result)[0] == "zero2-offload"
    assert unpinned(result.best.trial)
    assert machine.sizes("zero3-offload") != []


def test_no_checkpointing_wins_where_memory_allows(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3, fixed_s=0.05), "zero3": Rung(gib=3, fixed_s=0.1)}, kept_gib=0.5)
    result = raced(machine, checkpointing=True)
    assert result.best.trial.rung == "ddp"
    assert not result.best.trial.knobs.checkpointing
    assert result.raced.reasons["ddp without checkpointing"].startswith("fastest of ")
    assert "checkpointing" not in reasons_in_report(result, machine)["ddp"]  # its row has the config that won


def test_a_rung_that_leads_only_without_checkpointing_wins(raced: Callable[..., FitResult]) -> None:
    """The leader has no room for its activations; the rival has, and is a tenth slower as long as it recomputes."""
    machine = Machine(
        {"ddp": Rung(gib=14, fixed_s=0.01), "zero3": Rung(gib=3, fixed_s=0.05, sample_s=0.116)}, kept_gib=2.1
    )
    result = raced(machine, checkpointing=True)
    assert won(result)[0] == "zero3"
    assert not result.best.trial.knobs.checkpointing


def test_no_checkpointing_loses_where_the_batch_gets_small(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=10, fixed_s=1.0)}, kept_gib=2.0)  # room for 10 samples, and for 2
    result = raced(machine, checkpointing=True)
    assert won(result) == ("ddp", 10)
    assert result.best.trial.knobs.checkpointing
    reason = reasons_in_report(result, machine)["ddp without checkpointing"]
    assert reason.startswith("no micro batch up to 2, the most that its memory allows, makes it as fast ")


@pytest.mark.parametrize(("fixed_s", "state"), [(2.0, "offload"), (0.01, "off")], ids=["large batches", "any batch"])
def test_inputs_go_to_the_host_where_larger_batches_pay(
    raced: Callable[..., FitResult], fixed_s: float, state: str
) -> None:
    machine = Machine({"zero3-offload": Rung(gib=10, fixed_s=fixed_s)}, inputs_gib=0.5)
    result = raced(machine, forecaster=Timing(machine), checkpointing=True, device="cuda")
    assert find_state(result.best.trial.knobs) == state
    assert ("zero3-offload with inputs on the host" in result.raced.reasons) == (state == "offload")


@pytest.mark.parametrize("knows_times", [True, False])
def test_a_share_of_layers_wins_between_all_and_none(raced: Callable[..., FitResult], knows_times: bool) -> None:
    """A rank has 8 samples of a batch: all fit while one in two layers recomputes, and half of them while none does."""
    machine = Machine({"zero3": Rung(gib=4.5, fixed_s=0.5)})
    forecaster = Timing(machine) if knows_times else Foreseeing(machine)
    result = raced(machine, forecaster=forecaster, facts=ALIKE, checkpointing=True, global_batch=16)
    assert find_state(result.best.trial.knobs) == "every-2"
    assert result.raced.reasons["zero3 with checkpointing every-2"].startswith("fastest of ")
    states = {find_state(trial.knobs) for trial in machine.ran}
    assert not states & {"every-3", "every-4"}


def test_after_a_share_that_runs_full_the_next_is_raced(raced: Callable[..., FitResult]) -> None:
    class Full(Timing):
        def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
            full = find_state(trial.knobs) == "every-4"
            return super().largest(trial, sizes[:1] if full else sizes, usable_bytes)

    machine = Machine({"zero3": Rung(gib=2.5, fixed_s=0.5)}, kept_gib=1.9)  # 8 samples at once by either
    raced(machine, forecaster=Full(machine), facts=ALIKE, checkpointing=True, global_batch=16)
    states = {find_state(trial.knobs) for trial in machine.ran}
    assert states - {"on", "off"} == {"every-3"}


def flushed(trial: Trial, outcome: Outcome) -> Outcome:
    """The outcome of a trial whose allocator runs full on the whole card, and lacks memory without the headroom."""
    if not isinstance(outcome, Fit):
        return outcome
    return out_of_memory() if trial.knobs.keeps_headroom else replace(outcome, alloc_retries=2)


def test_no_share_is_tried_where_recomputing_itself_fails(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=13, fixed_s=0.02), "zero3": Rung(gib=9, fixed_s=0.05)})
    answer, broken = machine.answer, failed(failure="user_code", action="fix_code")

    def fail_recomputing(trial: Trial) -> Outcome:
        return broken if trial.rung == "zero3" and trial.knobs.checkpointing else answer(trial)

    machine.answer = fail_recomputing  # type: ignore[method-assign]
    assert won(raced(machine, checkpointing=True, facts=ALIKE)) == ("zero3", 3)
    assert {trial.knobs.checkpointing for trial in machine.ran} == {True, False}


def test_a_share_without_headroom_never_wins(raced: Callable[..., FitResult]) -> None:
    """Its allocator runs full at any micro batch, also at the smallest. All layers recomputed leave the headroom."""
    machine = Machine({"zero3": Rung(gib=9, fixed_s=0.01)}, kept_gib=8.0)  # one sample by a share, two by all layers
    answer = machine.answer

    def run_full(trial: Trial) -> Outcome:
        outcome, is_share = answer(trial), find_state(trial.knobs) in PARTIAL
        return flushed(trial, outcome) if is_share else outcome

    machine.answer = run_full  # type: ignore[method-assign]
    result = raced(machine, forecaster=Timing(machine), facts=ALIKE, checkpointing=True, global_batch=4)
    (share,) = {find_state(trial.knobs) for trial in machine.ran} - {"on", "off"}
    assert find_state(result.best.trial.knobs) == "on"
    reason = result.raced.reasons[f"zero3 with checkpointing {share}"]
    assert reason.endswith("its allocator ran full 2 times in the steps"), reason


@pytest.mark.parametrize(
    ("rung", "kept_gib", "more"),
    [
        (Rung(fixed_s=0.01), 0.1, {}),
        (Rung(gib=13, fixed_s=0.5), 4.0, {}),
        (Rung(gib=4.5, fixed_s=0.5), 2.0, {"facts": FACTS}),
        (Rung(gib=4.5, fixed_s=0.5), 2.0, {"objective": "memory"}),
        (Rung(gib=4.5, fixed_s=0.5), 2.0, {"forecaster": NO_FORECASTER}),
        (Rung(gib=4.5, fixed_s=0.5), 2.0, {"checkpointing": False}),
    ],
    ids=["none fits", "all is needed", "unlike layers", "memory counts", "no forecast", "checkpointing is fixed"],
)
def test_no_share_is_tried_where_it_cannot_lead(
    raced: Callable[..., FitResult], rung: Rung, kept_gib: float, more: dict[str, Any]
) -> None:
    machine = Machine({"zero3": rung}, kept_gib=kept_gib)
    raced(machine, **{"facts": ALIKE, "checkpointing": True, "global_batch": 16, **more})
    assert {find_state(trial.knobs) for trial in machine.ran} <= {"off", "on"}


def test_another_precision_wins_only_where_it_is_allowed(raced: Callable[..., FitResult], tmp_path: Path) -> None:
    result = raced(Machine({"ddp": Rung(gib=3)}, fp16=1.5), precisions=("fp16",))
    assert result.best.trial.knobs.settings["fp16.enabled"] is True
    assert result.raced.reasons["ddp in fp16"].startswith("fastest of 2 that fit")
    (tmp_path / "journal.jsonl").unlink()
    machine = Machine({"ddp": Rung(gib=3)}, fp16=1.5)
    assert "fp16.enabled" not in raced(machine).best.trial.knobs.settings


def test_leaders_that_differ_in_precision_enter_the_next_once(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3)}, fp16=1.02)
    raced(machine, precisions=("fp16", "fp32"))
    assert [key for key, count in Counter(map(trial_key, machine.ran)).items() if count > 1] == []
    assert any(trial.knobs.settings.get("fp16.enabled") is False for trial in machine.ran)


def test_states_in_bf16_are_not_raced_in_another_precision(raced: Callable[..., FitResult]) -> None:
    machine = Machine({BF16_STATES.name: Rung(gib=3)}, fp16=1.5)
    asked = {"ladder": (BF16_STATES,), "base": SETTINGS.base | {"bf16": {"enabled": True}}, "precisions": ("fp16",)}
    result = raced(machine, **asked)
    assert result.best.trial.rung == BF16_STATES.name
    assert "fp16.enabled" not in result.best.trial.knobs.settings


def test_of_equal_rungs_the_earlier_of_the_ladder_wins(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(), "zero1": Rung(), "zero3": Rung()})
    result = raced(machine)
    assert won(result) == ("ddp", 26)
    assert result.best.trial.rung == "ddp"
    assert "1.00 times as fast" in reasons_in_report(result, machine)["zero1"]


def test_the_leaders_are_measured_again_and_the_flattered_one_loses(raced: Callable[..., FitResult]) -> None:
    def flattered(trial: Trial) -> float:
        return 1.2 if (trial.rung, trial.purpose) == ("zero1", "grow") else 1.0

    machine = Machine({"ddp": Rung(sample_s=0.1), "zero1": Rung(sample_s=0.12)}, flattery=flattered)
    result = raced(machine)
    assert won(result)[0] == "ddp"
    final = [trial for trial in machine.ran if trial.purpose == "race"]
    assert {"ddp", "zero1"} <= {trial.rung for trial in final}
    finals = SETTINGS.profile.race.finals
    assert {(trial.steps.most_timed, trial.steps.spread) for trial in final} == {(finals.most_timed, finals.spread)}
    assert all(2 <= trial.steps.timed < finals.timed for trial in final)  # each takes seconds
    assert "measured again" in result.raced.reasons["ddp"]
    flattered_one = reasons_in_report(result, machine)["zero1"]  # its first timing was above the winner's
    assert float(flattered_one.partition(" times as fast as ddp")[0]) < 1
    assert result.best.outcome == machine.answer(result.best.trial)


def test_trials_that_were_as_long_as_the_finals_are_not_repeated(raced: Callable[..., FitResult]) -> None:
    """A step of a 70B takes a minute of all its cards."""
    machine = Machine({"ddp": Rung(fixed_s=30), "zero1": Rung(fixed_s=30.5), "zero2": Rung(fixed_s=32)})
    result = raced(machine)
    assert result.best.trial.rung == "ddp"
    assert not [trial for trial in machine.ran if trial.purpose == "race"]
    assert result.raced.reasons["ddp"].endswith("was the fastest, and none was measured again")


def test_a_long_trial_is_not_repeated_beside_one_far_behind(raced: Callable[..., FitResult]) -> None:
    """A rival that has memory for few samples has shorter steps, which alone would be repeated."""
    machine = Machine({"ddp": Rung(fixed_s=30), "zero1": Rung(fixed_s=9, gib=15)})
    result = raced(machine)
    assert result.best.trial.rung == "ddp"
    assert not [trial for trial in machine.ran if trial.purpose == "race"]


def test_a_rival_that_was_slowed_down_is_measured_again_and_wins(raced: Callable[..., FitResult]) -> None:
    def slowed(trial: Trial) -> float:
        return 0.4 if (trial.rung, trial.purpose) == ("zero1", "grow") else 1.0

    machine = Machine({"ddp": Rung(sample_s=0.15), "zero1": Rung(sample_s=0.1), "zero3": Rung(sample_s=0.5)})
    result = raced(replace(machine, flattery=slowed))
    assert won(result)[0] == "zero1"
    assert "0." in reasons_in_report(result, machine)["ddp"].partition("times as fast as zero1")[0]


def test_a_finalist_without_headroom_leaves_the_race_to_its_next_size(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3), "zero1": Rung(gib=3, sample_s=0.2)})
    answer = machine.answer

    def fuller(trial: Trial) -> Outcome:
        outcome = answer(trial)
        if trial.purpose == "race" and trial.knobs.micro_batch == 24 and isinstance(outcome, Fit):
            return replace(outcome, memory={"device": TierUse(peak_bytes=LIMIT, limit_bytes=LIMIT)})
        return outcome

    machine.answer = fuller  # type: ignore[method-assign]
    assert won(raced(machine)) == ("ddp", 23)  # not 7, the next that was measured


def test_a_leader_dropped_twice_falls_to_a_measured_size(raced: Callable[..., FitResult]) -> None:
    """In longer trials ddp holds more than the headroom allows from micro batch 20 on, in short ones from 25 on."""
    machine = Machine({"ddp": Rung(gib=3), "zero1": Rung(gib=3, sample_s=0.3)})
    answer = machine.answer

    def fuller(trial: Trial) -> Outcome:
        outcome, knobs = answer(trial), trial.knobs
        if trial.purpose == "race" and trial.rung == "ddp" and knobs.micro_batch >= 20 and isinstance(outcome, Fit):
            return replace(outcome, memory={"device": TierUse(peak_bytes=LIMIT, limit_bytes=LIMIT)})
        return outcome

    machine.answer = fuller  # type: ignore[method-assign]
    rung, size = won(raced(machine))
    assert (rung, size in machine.sizes("ddp")) == ("ddp", True)  # and not zero1, which is a third slower


@pytest.mark.parametrize("budget", [Budget(trials=4), Budget(seconds=40.0)])
def test_a_spent_budget_ends_the_race_and_the_reasons_say_so(raced: Callable[..., FitResult], budget: Budget) -> None:
    machine = Machine({name: Rung(gib=3) for name in ("ddp", "zero1", "zero2", "zero3")})
    result = raced(machine, budget=budget, checkpointing=True)
    assert len(machine.ran) <= 5  # what is under way is not cut short
    assert result.best.trial.rung == "ddp"
    assert result.raced.reasons["zero3"] == "not tried: the budget is spent"
    assert result.raced.reasons["ddp"].endswith("was the fastest, and none was measured again") or (
        "had no other that came close" in result.raced.reasons["ddp"]
    )


def test_every_rival_keeps_the_global_batch(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=13), "zero1": Rung(gib=9), "zero3": Rung(gib=3)}, fp16=1.1)
    result = raced(machine, global_batch=48, checkpointing=True, precisions=("fp16",))
    timed = [trial for trial in machine.ran if trial.purpose != "walk"]
    assert {trial.rung for trial in timed} == {"ddp", "zero1", "zero3"}
    assert {trial.knobs.train_batch(SETTINGS.gpus) for trial in timed} == {48}
    assert result.best.trial.rung == "zero3"


def test_for_memory_the_smallest_peak_wins(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=9), "zero1": Rung(gib=5), "zero3": Rung(gib=3, fixed_s=9.0)})
    result = raced(machine, objective="memory")
    assert won(result) == ("zero3", 1)
    assert {size for name in machine.rungs for size in machine.sizes(name)} == {1}
    assert "fast" not in " ".join(result.raced.reasons.values())


def test_first_fit_takes_the_first_that_fits_and_tries_nothing_else(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"zero1": Rung(gib=13), "zero3": Rung(gib=3)})
    result = raced(machine, stop="first-fit")
    assert result.best.trial.rung == "zero1"
    assert set(machine.sizes("zero3") + machine.sizes("zero2")) == set()
    assert result.raced.reasons == {"zero1": "the first rung tried that fits"}


def take_first_fit(raced: Callable[..., FitResult], machine: Machine, **asked: Any) -> FitResult:
    return raced(machine, stop="first-fit", checkpointing=True, **asked)


def test_first_fit_drops_checkpointing_where_memory_is_ample(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"zero1": Rung(fixed_s=0.01)}, kept_gib=0.1)
    result = take_first_fit(raced, machine)
    assert not result.best.trial.knobs.checkpointing
    assert result.raced.reasons["zero1 without checkpointing"] == "the first rung tried that fits"


def test_first_fit_keeps_checkpointing_that_pays(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"zero1": Rung(gib=9, fixed_s=2.0)})  # room for 3 samples without, for 13 with
    result = take_first_fit(raced, machine)
    assert result.best.trial.knobs.checkpointing
    assert result.best.trial.knobs.micro_batch > 3
    assert result.raced.reasons["zero1"] == "the first rung tried that fits"
    assert reasons_in_report(result, machine)["zero1 without checkpointing"].startswith("no micro batch up to ")


def test_first_fit_drops_checkpointing_that_does_not_pay(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"zero1": Rung(gib=6, fixed_s=0.01)})
    result = take_first_fit(raced, machine)
    assert not result.best.trial.knobs.checkpointing
    assert reasons_in_report(result, machine)["zero1 without checkpointing"] == "the first rung tried that fits"


@pytest.mark.parametrize("forecaster", [None, NO_FORECASTER])
def test_first_fit_recomputes_where_nothing_fits_without(
    raced: Callable[..., FitResult], forecaster: Forecaster | None
) -> None:
    machine = Machine({"zero1": Rung(gib=14)})  # 14.5 GiB for a sample that is recomputed, 16 and no headroom without
    result = take_first_fit(raced, replace(machine, kept_gib=4.0), forecaster=forecaster)
    assert result.best.trial.knobs.checkpointing
    reason = result.raced.reasons["zero1 without checkpointing"]
    assert "cannot fit by the forecast" in reason if forecaster is None else "ran out of device memory" in reason


def test_what_first_fit_did_not_recompute_may_back_off_to_recomputing(raced: Callable[..., FitResult]) -> None:
    result = take_first_fit(raced, Machine({"zero1": Rung(fixed_s=0.01)}, kept_gib=0.1))
    assert [one.trial.knobs.checkpointing for one in result.raced.others] == [True]


def test_no_rung_passes_through_nvme_while_another_fits(raced: Callable[..., FitResult]) -> None:
    machine = Machine({name: Rung() for name in RUNGS})
    result = raced(machine)
    assert machine.sizes("zero3-nvme") == []
    assert "NVMe" in reasons_in_report(result, machine)["zero3-nvme"]


def test_of_two_close_sizes_only_the_larger_is_remeasured(raced: Callable[..., FitResult]) -> None:
    """Its speed is the higher one but for the noise."""
    machine = Machine({"ddp": Rung(gib=2, fixed_s=3.0), "zero1": Rung(gib=2, fixed_s=3.0)})
    raced(machine)
    final = {(trial.rung, trial.knobs.micro_batch) for trial in machine.ran if trial.purpose == "race"}
    sizes = sorted(size for rung, size in final if rung == "ddp")
    assert all(larger >= 1.25 * smaller for smaller, larger in pairwise(sizes))


@pytest.mark.parametrize("asked", [{}, {"stop": "first-fit"}, {"objective": "memory"}, {"global_batch": 32}])
@pytest.mark.parametrize("gib", [3.0, 13.6])  # the second leaves no headroom at micro batch 4
def test_a_model_that_needs_several_samples_is_searched(
    raced: Callable[..., FitResult], asked: Mapping[str, Any], gib: float
) -> None:
    machine = Machine({"ddp": Rung(gib=gib), "zero3": Rung(gib=gib, fixed_s=2.0)}, least=3)
    result = raced(machine, checkpointing=True, **asked)
    walked = result.walked.winner
    assert walked is not None
    assert walked.trial.knobs.micro_batch == 4
    assert (won(result)[1] == 4) is (gib > 13 or asked.get("objective") == "memory")


def test_a_rung_that_the_certificate_tried_is_not_called_untried(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=4), "zero3": Rung(gib=3)})
    result = raced(machine, stop="first-fit")
    assert "not tried" in reasons_in_report(result, machine)["zero3"]
    machine.run(replace(result.raced.best.trial, rung="zero3", purpose="walk"), id=99)
    assert "not tried" not in reasons_in_report(result, machine)["zero3"]


def test_no_larger_batch_is_reported_than_one_backed_off_to(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=4, sample_s=1.0)})
    result = raced(machine)
    context = replace(make_context(machine.run), settings=SETTINGS)
    report = build_report(result, context, fingerprint="", seconds=1.0)
    assert report.largest_micro_batch == result.raced.growth.curve.fits
    smaller = next(each for each in result.raced.growth.all_records if each.trial.knobs.micro_batch < won(result)[1])
    report = build_report(replace(result, best=smaller), context, fingerprint="", seconds=1.0)
    assert report.largest_micro_batch is None


CROWD = Machine({"ddp": Rung(gib=40), "zero2": Rung(gib=9), "zero2-offload": Rung(full="host"), "zero3": Rung(gib=3)})


@pytest.mark.parametrize("stop", ["fastest", "first-fit"])
@pytest.mark.parametrize("budget", [Budget(), Budget(trials=5)])
def test_every_rung_of_the_ladder_has_a_reason_in_the_report(
    raced: Callable[..., FitResult], stop: str, budget: Budget
) -> None:
    machine = replace(CROWD, ran=[])
    result = raced(machine, stop=stop, budget=budget, checkpointing=True, precisions=("fp16",))
    profile = replace(SETTINGS.profile, race=replace(SETTINGS.profile.race, stop=stop))  # type: ignore[arg-type]
    reasons = reasons_in_report(result, machine, replace(SETTINGS, profile=profile))
    assert set(RUNGS) <= set(reasons)
    assert all(reasons.values())
    if stop == "fastest":
        assert sum(one.startswith("fastest of ") for one in reasons.values()) == 1


@pytest.mark.parametrize("forecaster", [None, NO_FORECASTER])
@pytest.mark.parametrize(
    "machine",
    [
        CROWD,
        Machine({"ddp": Rung(), "zero1": Rung(), "zero2": Rung(), "zero3": Rung(gib=1.5)}),
        Machine({"zero1": Rung(gib=14.5), "zero3": Rung(gib=14), "zero3-offload": Rung(full="pinned")}),
    ],
)
def test_no_trial_is_run_twice(
    raced: Callable[..., FitResult], machine: Machine, forecaster: Forecaster | None
) -> None:
    machine = replace(machine, ran=[])
    raced(machine, forecaster=forecaster, checkpointing=True, precisions=("fp16",))
    assert [key for key, count in Counter(map(trial_key, machine.ran)).items() if count > 1] == []


class Timing(Foreseeing):
    """Forecasts a machine's memory, and its step times wrongly by a factor a rung, at best half the true time."""

    def __init__(self, machine: Machine, wrong: Mapping[str, float] | None = None) -> None:
        super().__init__(machine)
        self.wrong = wrong or {}

    def step_time(self, trial: Trial) -> StepForecast | None:
        if trial.rung not in self.machine.rungs:
            return None
        step_s = self.machine.step_s(trial)
        seconds = step_s * self.wrong.get(trial.rung, 1.0)
        return StepForecast(seconds=seconds, low_seconds=step_s / 2, computed_seconds=0.0)


def test_the_rung_that_should_be_fastest_runs_first(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=13), "zero3": Rung(gib=3, fixed_s=1.5)})
    assert won(raced(machine, forecaster=Timing(machine))) == ("zero3", 24)
    assert machine.ran[0].rung == "zero3"
    assert machine.sizes("zero3") == [24]  # its forecast's, and no other gains enough


def test_leaders_without_headroom_when_repeated_get_smaller(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=4), "zero1": Rung(gib=4)})
    answer = machine.answer

    def fuller(trial: Trial) -> Outcome:
        """Longer trials at the micro batch of the first one hold a little more."""
        outcome = answer(trial)
        if trial.purpose == "race" and trial.knobs.micro_batch == machine.ran[0].knobs.micro_batch:
            return fit(peak_bytes=LIMIT, limit_bytes=LIMIT)
        return outcome

    machine.answer = fuller  # type: ignore[method-assign]
    result = raced(machine, forecaster=Timing(machine))
    first, (rung, size) = machine.ran[0].knobs.micro_batch, won(result)
    assert (rung, 3 / 4 * first <= size < first) == ("ddp", True)
    assert result.raced.reasons["zero1"] == "left no headroom when it was measured again"


def test_leaders_that_all_run_out_when_repeated_end_no_race(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=4), "zero1": Rung(gib=4)})
    answer = machine.answer
    machine.answer = lambda trial: out_of_memory() if trial.purpose == "race" else answer(trial)  # type: ignore[method-assign]
    result = raced(machine, forecaster=Timing(machine))
    first, (rung, size) = machine.ran[0].knobs.micro_batch, won(result)
    assert (rung, 3 / 4 * first <= size < first) == ("ddp", True)  # one that was not measured again


def test_a_rung_too_slow_at_its_forecasts_best_is_not_tried(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3), "zero3-offload": Rung(gib=2, sample_s=0.5)})
    result = raced(machine, forecaster=Timing(machine))
    assert won(result)[0] == "ddp"
    assert machine.sizes("zero3-offload") == []
    reason = "not tried: the forecast allows at most 7.43 samples/s, with micro batch 26, and ddp is faster"
    assert result.raced.reasons["zero3-offload"] == reason


class Copying(Timing):
    """What a micro step on the host takes beyond `device_s` are copies."""

    def __init__(self, machine: Machine, device_s: float) -> None:
        super().__init__(machine)
        self.device_s = device_s

    def step_time(self, trial: Trial) -> StepForecast | None:
        step = super().step_time(trial)
        if step is None:
            return None
        copied_s = self.machine.rungs[trial.rung].fixed_s - self.device_s
        return replace(step, copied_seconds=trial.knobs.accumulation * copied_s)


@pytest.mark.parametrize(
    ("gib", "copying_s", "unit_s", "tried"),
    [(8, 1, 1.0, False), (8, 1, 0.01, True), (14, 9, 1.0, True)],
    ids=["long", "short", "much-larger"],
)
def test_a_long_trial_that_copies_more_needs_a_larger_batch(
    raced: Callable[..., FitResult], gib: float, copying_s: float, unit_s: float, tried: bool
) -> None:
    """The same rung on the host gains by its micro batch alone, which shares what is constant."""
    zero3 = Rung(gib=gib, fixed_s=unit_s, sample_s=3 * unit_s)
    offload = replace(zero3, gib=2, fixed_s=(1 + copying_s) * unit_s)
    result = raced(machine := Machine({"zero3": zero3, "zero3-offload": offload}), forecaster=Copying(machine, unit_s))
    assert bool(machine.sizes("zero3-offload")) is tried
    assert tried or result.raced.reasons["zero3-offload"].endswith("and zero3 is about as fast")


@pytest.mark.parametrize(
    ("retries", "slower", "winner", "tried"),
    [(0, 1, "zero3", False), (3, 3, "zero3-offload", True), (3, 1.01, "zero3", False)],
)
def test_copies_may_pay_where_the_device_runs_full(
    raced: Callable[..., FitResult], retries: int, slower: float, winner: str, tried: bool
) -> None:
    """Time that an allocator takes to give memory back says nothing of a form that has memory; a calm trial does."""
    machine = Machine(
        {"zero3": Rung(gib=11, fixed_s=0.1, sample_s=9.9), "zero3-offload": Rung(gib=2, fixed_s=1, sample_s=9.9)}
    )
    answer = machine.answer

    def answer_with_retries(trial: Trial) -> Outcome:
        outcome = answer(trial)
        if trial.rung != "zero3" or not retries or not isinstance(outcome, Fit):
            return outcome
        if slower < 3 and trial.knobs.micro_batch < 8:
            return outcome
        rate, step_s = outcome.samples_per_second / slower, slower * outcome.step_s[0]
        return replace(outcome, alloc_retries=retries, samples_per_second=rate, step_s=(step_s,))

    machine.answer = answer_with_retries  # type: ignore[method-assign]
    result = raced(machine, forecaster=Copying(machine, 0.1))
    assert won(result)[0] == winner
    assert bool(machine.sizes("zero3-offload")) is tried


@pytest.mark.parametrize("kept_gib", [0.6, 2.0])
def test_what_cannot_lead_recomputing_may_lead_without(raced: Callable[..., FitResult], kept_gib: float) -> None:
    """It has the memory for all activations that the leader lacks."""
    machine = Machine(
        {"zero3": Rung(gib=14.8, fixed_s=6, sample_s=30), "zero3-offload": Rung(gib=2, fixed_s=12, sample_s=30)},
        kept_gib=kept_gib,
    )
    result = raced(machine, forecaster=Copying(machine, 6), checkpointing=True)
    assert won(result)[0] == "zero3-offload"
    assert result.best.trial.knobs.checkpointing is False


@pytest.mark.parametrize(("sample_s", "tried"), [(0.13, False), (0.128, True)])
def test_a_rung_that_gains_too_little_at_best_is_not_tried(
    raced: Callable[..., FitResult], sample_s: float, tried: bool
) -> None:
    """Its interval ends 2 % above the leader's rate, or 3 % and more."""
    rungs = {"ddp": Rung(gib=3, fixed_s=0.0), "zero3-offload": Rung(gib=3, fixed_s=0.0, sample_s=sample_s)}
    result = raced(machine := Machine(rungs), forecaster=Narrow(machine))
    assert won(result)[0] == "ddp"
    assert bool(machine.sizes("zero3-offload")) is tried
    assert tried or result.raced.reasons["zero3-offload"].endswith("and ddp is about as fast")


def test_a_rung_whose_time_is_forecast_too_long_wins_still(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3), "zero2": Rung(gib=3, sample_s=0.2), "zero3": Rung(gib=3, sample_s=0.07)})
    assert won(raced(machine, forecaster=Timing(machine, {"zero3": 3.0, "zero2": 0.5})))[0] == "zero3"


class Narrow(Timing):
    """With an interval as narrow as a real forecast's."""

    def step_time(self, trial: Trial) -> StepForecast | None:
        said = super().step_time(trial)
        return None if said is None else replace(said, low_seconds=0.75 * said.seconds)


@pytest.mark.parametrize(
    ("wrong", "tried"), [({"zero3": 3.0}, False), ({"ddp": 0.6, "zero1": 1.25, "zero3": 3.0}, True)]
)
def test_forecasts_that_erred_rule_no_rung_out(
    raced: Callable[..., FitResult], wrong: Mapping[str, float], tried: bool
) -> None:
    machine = Machine({"ddp": Rung(), "zero1": Rung(), "zero3": Rung(sample_s=0.07)})
    raced(machine, forecaster=Narrow(machine, wrong))
    assert bool(machine.sizes("zero3")) is tried


def test_what_does_without_checkpointing_begins_the_walk(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3)}, kept_gib=0.1)
    result = raced(machine, forecaster=Timing(machine), checkpointing=True)
    assert won(result)[0] == "ddp"
    assert {trial.knobs.checkpointing for trial in machine.ran if trial.rung == "ddp"} == {False}


def test_a_rung_is_tried_one_way_where_the_forecast_tells(raced: Callable[..., FitResult]) -> None:
    """Without checkpointing ddp has little memory for a batch, and is faster still."""
    rungs = {"ddp": Rung(gib=10, fixed_s=0.1), "zero3": Rung(gib=3, fixed_s=0.1)}
    machine = Machine(rungs, kept_gib=0.6)
    result = raced(machine, forecaster=Timing(machine), checkpointing=True)
    tried = {(trial.rung, trial.knobs.checkpointing) for trial in machine.ran if trial.purpose == "grow"}
    assert tried == {("ddp", False), ("zero3", False)}
    assert won(result)[0] == "zero3"


@pytest.mark.parametrize("fixed_s", [0.6, 1.0, 2.0])
def test_a_rung_that_needs_a_large_batch_is_not_ruled_out(raced: Callable[..., FitResult], fixed_s: float) -> None:
    """Beyond the 64 samples of a first trial; its fixed costs are those of an offload."""
    rungs = {
        "zero2": Rung(gib=14, fixed_s=0.005, sample_s=0.01),
        "zero3-offload": Rung(gib=1, fixed_s=fixed_s, sample_s=0.005),
    }
    machine = Machine(rungs, kept_gib=0.02)
    result = raced(machine, forecaster=Timing(machine))
    assert won(result)[0] == "zero3-offload"


CLOSE_BEHIND = {"ddp": Rung(gib=3), "zero1": Rung(gib=3, sample_s=0.125)}  # by a sixth


@pytest.mark.parametrize("sample_s", [0.125, 0.107])  # by a sixth, and by a twentieth: half the noise is less
def test_a_runner_up_forecast_to_be_slower_is_timed_once(raced: Callable[..., FitResult], sample_s: float) -> None:
    machine = Machine({**CLOSE_BEHIND, "zero1": Rung(gib=3, sample_s=sample_s)})
    result = raced(machine, forecaster=Timing(machine))
    assert machine.sizes("zero1") == [24]
    assert not any(trial.purpose == "race" for trial in machine.ran)
    assert result.raced.reasons["ddp"].endswith("had no other that came close")


def test_it_is_measured_again_where_the_forecast_was_wrong(raced: Callable[..., FitResult]) -> None:
    machine = Machine(CLOSE_BEHIND)
    raced(machine, forecaster=Timing(machine, {"ddp": 1.1, "zero1": 0.8}))
    assert {trial.rung for trial in machine.ran if trial.purpose == "race"} == {"ddp", "zero1"}


class TooHopeful(Timing):
    """Takes one sample more to fit than leaves the headroom."""

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        found = super().largest(trial, sizes, usable_bytes)
        return None if found is None else found + 1


def test_a_slow_rival_without_headroom_is_not_tried_smaller(raced: Callable[..., FitResult]) -> None:
    machine = Machine(CLOSE_BEHIND)
    result = raced(machine, forecaster=TooHopeful(machine))
    assert machine.sizes("zero1") == [25]
    assert result.raced.reasons["zero1"] == "micro batch 25 does not leave the headroom, and is too slow"


def test_after_an_allocator_ran_full_a_quarter_less_is_tried(raced: Callable[..., FitResult]) -> None:
    """What it holds after it gave memory back does not show how much less is enough."""
    machine = Machine({"ddp": Rung(gib=3)})
    answer = machine.answer

    def run_full(trial: Trial) -> Outcome:
        outcome = answer(trial)
        return flushed(trial, outcome) if trial.knobs.micro_batch > 20 else outcome

    machine.answer = run_full  # type: ignore[method-assign]
    assert won(raced(machine, forecaster=Timing(machine))) == ("ddp", 20)
    assert machine.sizes("ddp")[:3] == [24, 24, 18]


def test_an_allocator_that_ran_full_runs_without_the_headroom(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3)})
    answer = machine.answer

    def run_full(trial: Trial) -> Outcome:
        outcome = answer(trial)
        return replace(outcome, alloc_retries=2) if isinstance(outcome, Fit) else outcome

    machine.answer = run_full  # type: ignore[method-assign]
    result = raced(machine, forecaster=Timing(machine))
    assert won(result) == ("ddp", 24)
    assert result.best.trial.knobs.keeps_headroom
    assert [trial.knobs.keeps_headroom for trial in machine.ran][:2] == [False, True]


class FullAbove12(Timing):
    """Forecasts that allocators run full with more than 12 samples, and that this makes a step longer by `flush_s`."""

    def __init__(self, machine: Machine, flush_s: float) -> None:
        super().__init__(machine)
        self.flush_s = flush_s

    def largest_calm(self, trial: Trial, sizes: Sequence[int]) -> int | None:
        return max((size for size in sizes if size <= 12), default=None)

    def step_time(self, trial: Trial) -> StepForecast | None:
        step = super().step_time(trial)
        more_s = self.flush_s if trial.knobs.micro_batch > 12 else 0.0
        return None if step is None else replace(step, seconds=step.seconds + more_s)


@pytest.mark.parametrize(
    ("forecast_s", "flush_s", "tried"),
    [(0.0, 0.0, [24, 24]), (0.0, 9.0, [24, 24, 12]), (9.0, 9.0, [12])],
    ids=["no cost", "a cost that no forecast knew", "a known cost"],
)
def test_a_full_allocator_counts_by_what_it_costs(
    raced: Callable[..., FitResult], forecast_s: float, flush_s: float, tried: list[int]
) -> None:
    machine = Machine({"ddp": Rung(gib=3, fixed_s=0.5)})  # room for 24
    answer = machine.answer

    def run_full(trial: Trial) -> Outcome:
        outcome = answer(trial)
        if not isinstance(outcome, Fit) or trial.knobs.micro_batch <= 12:
            return outcome
        step_s = outcome.step_s[0] + flush_s
        rate = trial.knobs.train_batch(SETTINGS.gpus) / step_s
        return replace(outcome, alloc_retries=2, samples_per_second=rate, step_s=(step_s,))

    machine.answer = run_full  # type: ignore[method-assign]
    result = raced(machine, forecaster=FullAbove12(machine, forecast_s))
    assert machine.sizes("ddp") == tried
    assert won(result) == ("ddp", tried[-1])


@pytest.mark.parametrize(("sample_s", "tried"), [(0.1, [24]), (4.0, [4])])
def test_a_slower_rival_with_long_steps_enters_small(
    raced: Callable[..., FitResult], sample_s: float, tried: list[int]
) -> None:
    """At twice the leader's micro batch, where a step at the one for its memory exceeds the budget of a trial."""
    leader = Rung(gib=11, fixed_s=0.1 * sample_s, sample_s=sample_s)
    machine = Machine({"ddp": leader, "zero1": Rung(gib=3, fixed_s=5 * sample_s, sample_s=sample_s)})
    assert won(raced(machine, forecaster=Timing(machine)))[0] == "ddp"
    assert machine.sizes("zero1")[:1] == tried


def test_growth_tries_no_size_without_a_forecast_gain(raced: Callable[..., FitResult]) -> None:
    machine = Machine({"ddp": Rung(gib=3, fixed_s=0.02)}, kept_gib=0.1)  # room for 488
    result = raced(machine, forecaster=Timing(machine))
    assert machine.sizes("ddp") == [64]
    assert result.raced.growth.stop is not None
    assert "is only 1.00 times as fast as 64" in result.raced.growth.stop.reason
