"""Whole searches of made-up machines: the answer holds, and a killed search resumes to the same one."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from autods.config.deepspeed import GATHER
from autods.config.profiles import Budget, read_profile
from autods.config.settings import Settings
from autods.errors import InputError
from autods.events import Event, Listener, Note, StageStarted, TrialFinished
from autods.journal import TrialStore, trial_key
from autods.report import read
from autods.report.answers.ladder import list_ladder
from autods.tuner.fit import fit
from autods.tuner.fit import search as run_search
from autods.tuner.fit_report import FitResult, NothingFits, build_report
from autods.tuner.forecaster import NO_FORECASTER
from autods.tuner.ladder_walk import WalkResult
from autods.tuner.trials import FitContext
from autods.types import Fit, Record, Trial
from autods.units import format_factor
from autods.workload import make_source
from tests.support.contexts import make_context
from tests.support.forecasters import ScriptedForecaster
from tests.support.machines import a_machine
from tests.support.surfaces import Surface, SurfaceForecaster, searching
from tests.support.true_answers import RoughSurface, contradictions, slower_than_measured
from tests.support.walks import FACTS, SETTINGS

SEEDS = (0, 3, 6, 16)  # of 3 and 16 several rungs climb


@pytest.fixture(autouse=True)
def no_power_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it wrote; waiting for the disk is most of a made-up search's time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@dataclass(slots=True)
class Killable:
    """Runs trials on a surface, and is stopped with Ctrl-C under one of them."""

    surface: Surface
    at: int | None = None
    ran: list[Trial] = field(default_factory=list)

    def run(self, trial: Trial, id: int) -> Record:
        if self.at is not None and len(self.ran) + 1 == self.at:
            raise KeyboardInterrupt
        self.ran.append(trial)
        return self.surface.run(trial, id=id)


@contextmanager
def folder(seed: int, **asked: Any) -> Iterator[FitContext]:
    """A search whose tuning stops before the Gaussian process begins: that one needs torch."""
    with searching(Surface(seed), **asked) as search:
        profile = search.settings.profile
        short = replace(profile, tune=replace(profile.tune, trials=2))
        yield replace(search, settings=replace(search.settings, profile=short))


def started(search: FitContext, runner: Killable) -> FitContext:
    """A new process in the same folder."""
    journal = search.memory.journal
    past = journal.open(fingerprint="surface")
    return replace(search, memory=TrialStore(journal, past, runner.run, lambda event: None))


def searched(search: FitContext, seed: int, at: int | None = None) -> tuple[FitResult, list[Trial]]:
    runner = Killable(Surface(seed), at)
    result = run_search(started(search, runner))
    assert isinstance(result, FitResult)
    return result, runner.ran


def answer(result: FitResult) -> tuple[object, ...]:
    """All that a report says of what was found."""
    assert result.certified is not None
    return (
        result.best, result.walked.skipped, result.raced.best, result.raced.others, result.raced.reasons,
        result.raced.growth.records, result.raced.growth.stop,
        result.tuned.reason, result.certified.certificate, result.certified.reason,
    )  # fmt: skip


def keys(trials: list[Trial]) -> list[str]:
    return [trial_key(trial) for trial in trials]


@pytest.mark.parametrize("seed", range(0, 30, 5))
def test_the_answer_fits_with_the_headroom_and_is_certified(seed: int) -> None:
    surface = Surface(seed)
    with folder(seed) as search:
        result, _ = searched(search, seed)
        assert isinstance(result.best.outcome, Fit)
        assert surface.peak_bytes(result.best.trial) <= search.usable_bytes
        assert result.certified is not None
        assert result.certified.certificate.passed
        rungs = [rung.name for rung in search.settings.ladder]
        best, _ = surface.optimum(search.usable_bytes, rungs)
        assert surface.rate(result.best.trial) >= 0.8 * best


@pytest.mark.parametrize("seed", SEEDS)
def test_the_best_config_is_saved_after_each_step(seed: int) -> None:
    surface = Surface(seed)
    with folder(seed) as search:
        told: list[Record] = []
        result, _ = searched(replace(search, save_best=told.append), seed)
        assert told == [result.walked.winner, result.raced.best, result.tuned.best]
        rates = [surface.rate(record.trial) for record in told]
        assert rates[0] <= 1.05 * rates[-1]


@pytest.mark.parametrize("seed", range(0, 30, 5))
def test_no_trial_runs_twice_in_a_search(seed: int) -> None:
    with folder(seed) as search:
        _, ran = searched(search, seed)
        assert [count for count in Counter(keys(ran)).values() if count > 1] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_script_s_own_micro_batch_is_that_of_the_whole_search(seed: int) -> None:
    with folder(seed) as search:
        fixed = replace(search, own_batch=2)
        result, trials = searched(fixed, seed)
        assert {trial.knobs.micro_batch for trial in trials} == {2}
        report = build_report(result, fixed, fingerprint="", seconds=1.0)
        assert report.reasons["batch"].endswith("the micro batch is the one that the script fixes")


@pytest.mark.parametrize("seed", SEEDS)
def test_listeners_hear_each_stage_and_about_its_trials(seed: int) -> None:
    heard: list[Event] = []
    with folder(seed) as search:
        search = started(search, Killable(Surface(seed)))
        search.memory.listen = heard.append
        run_search(search)
    begun = [event for event in heard if isinstance(event, StageStarted)]
    assert [event.stages[event.place].name for event in begun] == ["walk", "race", "tune", "certify"]
    trials = sum(isinstance(event, TrialFinished) for event in heard)
    planned = sum(stage.trials for stage in begun[1].stages)  # by what is known after the walk
    assert 0.4 <= planned / trials <= 2.5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_finished_search_is_read_back_without_a_trial(seed: int) -> None:
    with folder(seed) as search:
        first, _ = searched(search, seed)
        second, again = searched(search, seed)
        assert again == []
        assert answer(second) == answer(first)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.0, 0.35, 0.7, 1.0])
def test_a_killed_search_goes_on_where_it_stopped_to_the_same_answer(seed: int, share: float) -> None:
    with folder(seed) as search:
        whole, trials = searched(search, seed)
    at = 1 + round(share * (len(trials) - 1))
    with folder(seed) as search:
        killed = Killable(Surface(seed), at)
        with pytest.raises(KeyboardInterrupt):
            run_search(started(search, killed))
        resumed, rest = searched(search, seed)
    assert keys(killed.ran + rest) == keys(trials)
    assert answer(resumed) == answer(whole)


def test_a_search_killed_again_and_again_comes_to_the_same_answer() -> None:
    seed = 16
    ran: list[Trial] = []
    with folder(seed) as search:
        whole, trials = searched(search, seed)
    with folder(seed) as search:
        while len(ran) + 8 <= len(trials):
            killed = Killable(Surface(seed), 8)
            with pytest.raises(KeyboardInterrupt):
                run_search(started(search, killed))
            ran += killed.ran
        resumed, rest = searched(search, seed)
    assert keys(ran + rest) == keys(trials)
    assert answer(resumed) == answer(whole)


@pytest.mark.parametrize("seed", range(12))
def test_a_fit_ends_within_its_time_with_its_certificate(seed: int) -> None:
    surface = Surface(seed)
    with searching(surface, budget=Budget(seconds=200.0), forecaster=SurfaceForecaster(surface, 0.1)) as context:
        found = run_search(context)
    assert not isinstance(found, NothingFits)
    assert found.certified is not None
    assert sum(record.seconds for record in context.memory.records) <= 200


def test_a_first_peak_below_its_forecast_opens_the_next_size() -> None:
    surface, profile = Surface(70_656), read_profile("default")  # where 4 fits, of which the forecast knows 3
    profile = replace(profile, tune=replace(profile.tune, trials=0))
    with searching(surface, profile=profile, forecaster=SurfaceForecaster(surface, 0.1)) as context:
        found = run_search(context)
    assert isinstance(found, FitResult)
    best = found.best.trial
    grown = [record.trial for record in context.memory.records if record.trial.purpose == "grow"]
    sizes = [trial.knobs.micro_batch for trial in grown if trial.rung == best.rung and trial.knobs.checkpointing]
    assert (best.rung, best.knobs.micro_batch, sizes) == ("zero3-offload-optimizer", 4, [3, 4])


@pytest.mark.parametrize("seed", range(9000, 9004))
def test_a_rows_ratio_is_its_rate_over_the_answers(seed: int) -> None:
    with searching(RoughSurface(seed)) as context:
        found = run_search(context)
        assert isinstance(found, FitResult)
        report = build_report(found, context, fingerprint="", seconds=1.0)
    assert report.throughput is not None
    best = report.throughput.samples_per_second
    rows = {row.rung: row for row in list_ladder(report) if row.rate is not None}
    assert rows.pop(report.rung or "").rate == pytest.approx(best)
    assert rows
    for row in rows.values():
        assert row.rate is not None
        assert row.reason.startswith(f"{format_factor(row.rate / best)} times as fast as {report.rung}")


@pytest.mark.parametrize("budget", [Budget(trials=9), Budget(seconds=75.0)])
def test_a_resumed_search_keeps_to_the_spent_budget(
    budget: Budget,
) -> None:
    seed = 3
    with folder(seed) as search:
        _, unlimited = searched(search, seed)
    with folder(seed, budget=budget) as search:
        whole, trials = searched(search, seed)
    with folder(seed, budget=budget) as search:
        with pytest.raises(KeyboardInterrupt):
            searched(search, seed, at=len(trials) - 1)
        resumed, _ = searched(search, seed)
    assert len(trials) < len(unlimited)
    assert not budget.trials or len(trials) <= budget.trials
    assert "not tried: the budget is spent" in whole.raced.reasons.values()
    assert answer(resumed) == answer(whole)


def test_forecasts_save_trials_and_change_the_answer_by_noise_alone() -> None:
    rates, counts = [], []
    for blind in (False, True):
        with folder(3, blind=blind) as search:
            result, ran = searched(search, 3)
            rates.append(Surface(3).rate(result.best.trial))
            counts.append(len(ran))
    assert counts[0] < counts[1]
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reference_runs_at_its_largest_micro_batch(seed: int) -> None:
    """It trains on the winner's samples: at micro batch 1 that would take many times as long."""
    with folder(seed) as search:
        result, ran = searched(search, seed)
        usable = search.usable_bytes
    assert result.walked.winner is not None
    plain, surface = result.walked.winner.trial, Surface(seed)

    def is_plain(trial: Trial) -> bool:
        same = (trial.rung, trial.knobs.checkpointing, trial.knobs.settings)
        return same == (plain.rung, plain.knobs.checkpointing, plain.knobs.settings)

    usual = [one for one in ran if is_plain(one) and one.exam is None and surface.peak_bytes(one) <= usable]
    largest = max(one.knobs.micro_batch for one in usual)
    for trial in ran:
        if trial.exam == "parity" and is_plain(trial):
            samples = trial.knobs.micro_batch * trial.knobs.accumulation
            divisors = [size for size in range(1, samples + 1) if samples % size == 0]
            assert trial.knobs.micro_batch == max(size for size in divisors if size <= largest)


@pytest.mark.parametrize("seed", range(9000, 9010))
@pytest.mark.parametrize("config", ["quick", "default"])
def test_the_answer_and_its_reasons_follow_from_the_trials(config: str, seed: int) -> None:
    surface, profile = RoughSurface(seed), read_profile(config)
    profile = replace(profile, tune=replace(profile.tune, trials=0))
    with searching(surface, profile=profile) as search:
        result = run_search(search)
        assert isinstance(result, FitResult)
        assert slower_than_measured(surface, search, result) <= profile.race.noise
        assert contradictions(surface, search, result) == []


def test_a_pipeline_is_not_forecast() -> None:
    forecaster = ScriptedForecaster(lambda trial: pytest.fail(f"{trial.rung} was forecast"))
    with folder(3, forecaster=forecaster) as search:
        pipeline = replace(search.facts, pipeline_stages=2, replica_ranks=2)
        result = run_search(replace(search, facts=pipeline))
    assert isinstance(result, FitResult)
    assert forecaster.prepared == []


def test_the_report_shows_hardware_and_threads_of_the_nodes() -> None:
    """They differ from those of the driver's machine, which may be a small head node."""
    node = a_machine(4, host_gib=2048)
    context = make_context(lambda trial: pytest.fail("no trial runs"), hardware=node, gpus=8, nodes=2)
    report = build_report(NothingFits(walked=WalkResult(), closest=None), context, fingerprint="", seconds=1.0)
    assert report.hardware == node
    assert report.question.threads == node.cores // 4


def test_a_variable_that_a_script_sets_in_vain_is_said(tmp_path: Path) -> None:
    lines = (
        "import os",
        "os.environ['OMP_NUM_THREADS'] = os.environ['CUDA_VISIBLE_DEVICES'] = '1'",
        "import deepspeed",
    )
    (tmp_path / "train.py").write_text("\n".join((*lines, "deepspeed.initialize()")))
    said: list[Any] = []

    def refuse(settings: Settings, listen: Listener) -> NoReturn:
        raise InputError("no runner is needed")

    settings = replace(SETTINGS, source=make_source(tmp_path / "train.py"), out=tmp_path / "out")
    with pytest.raises(InputError, match="no runner"):
        fit(settings, listen=said.append, start=refuse)
    notes = [event.text for event in said if isinstance(event, Note)]
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        assert f"train.py:2 sets {name}, which has no effect in a rank: set it for autods itself" in notes


@pytest.mark.parametrize(
    ("zero", "said"),
    [({"stage": 3}, {"stage": 3, GATHER: True}), ({"stage": 3, GATHER: False},) * 2, ({"stage": 2},) * 2],
)
def test_a_config_of_stage_3_lets_scripts_save_the_model(tmp_path: Path, zero: Any, said: Any) -> None:
    """accelerate raises without it when it is asked for the weights, and a Trainer saves shards (accelerator.py)."""
    final = {"zero_optimization": zero}

    @contextmanager
    def start(settings: Settings, listen: Listener) -> Iterator[Any]:
        yield SimpleNamespace(survey=lambda: (FACTS, {}), run=Surface(0).run, final_config=lambda trial: final)

    with folder(0) as search:
        settings = replace(search.settings, out=tmp_path)
    report = fit(settings, listen=lambda event: None, start=start, forecaster=lambda *given: nullcontext(NO_FORECASTER))
    written = json.loads((tmp_path / "ds_config.json").read_text())
    assert report.ds_config is not None
    for config in (report.ds_config, written):
        assert {key: config["zero_optimization"].get(key) for key in said} == said
        assert (GATHER in config["zero_optimization"]) is (GATHER in said)


def test_a_warning_stays_with_a_fit_that_goes_on(tmp_path: Path) -> None:
    """Its trials come from the journal, and the machine is quiet by then."""
    notes = [Note(text="card 1 is throttled", warns=True), Note(text="starting Ray")]

    @contextmanager
    def start(settings: Settings, listen: Listener) -> Iterator[Any]:
        while notes:
            listen(notes.pop(0))
        yield SimpleNamespace(survey=lambda: (FACTS, {}), run=Surface(0).run, final_config=lambda trial: {})

    with folder(0) as search:
        settings = replace(search.settings, out=tmp_path)
    for _ in range(2):
        report = fit(
            settings,
            listen=lambda event: None,
            start=start,
            forecaster=lambda *given: nullcontext(NO_FORECASTER),
        )
        assert report.warnings == ("card 1 is throttled",)
        assert read(tmp_path).warnings == report.warnings
        (tmp_path / "report.json").unlink()
