"""A rehearsal: the whole search, answered by a scripted simulation of another machine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.plan_settings import resolve_rehearsal
from autods.errors import InputError
from autods.forecast.predict.prices import Work
from autods.forecast.predict.step_time import BITS, RUN, Schedule
from autods.forecast.testing import Script, ScriptedSimulator, fail_with, simulate_peaks
from autods.forecast.values import EngineSpec, ForecastPhase, Simulation, Trace
from autods.journal import workspace
from autods.report import serialize
from autods.report.answers.fit import make_comparison, make_fit_document
from autods.report.render_html import to_page
from autods.report.render_markdown import to_markdown
from autods.report.results.fit import FitReport
from autods.report.serialize import to_dict
from autods.requests import FitRequest
from autods.tuner.rehearsal import rehearse
from autods.types import Fit, ModelFacts, OutOfMemory, WorkloadSource

GIB = 2**30
SOURCE = WorkloadSource(kind="file", path="/model.py", name="model", digest="0")
FACTS = ModelFacts(
    parameters=10**9, largest_parameter=10**6, checkpointing=False, tokens_per_sample=128, has_optimizer=False
)
STATES_GIB = {"ddp": 90, "zero1": 40, "zero2": 36, "zero3": 10}
KERNEL = Work(kind="kernel", bytes=2 * 10**9)


def simulate(spec: EngineSpec, micro_batch: int) -> Simulation:
    """ddp does not fit in 80 GiB; a sample takes 2 GiB, and each rung below is slower by a kernel a step."""
    states = STATES_GIB.get(spec.rung, 8)
    kernels = 10 * micro_batch + 10 * list(STATES_GIB).index(spec.rung) if spec.rung in STATES_GIB else 10_000
    schedule = Schedule(events=[0 << BITS | RUN] * kernels, works=(KERNEL,))
    simulation = simulate_peaks(micro_batch, host=GIB, init=states * GIB, backward=(states + 2 * micro_batch) * GIB)
    return replace(simulation, schedule=schedule)


def ask(folder: Path, **options: Any) -> FitRequest:
    return FitRequest(
        "/model.py",
        **{
            "rehearse": True,
            "on": "a100-80gb",
            "gpus": 8,
            "out": folder,
            "config": "quick",
            "stop": "fastest",
            **options,
        },
    )


def run(folder: Path, script: Script = simulate, **options: Any) -> tuple[FitReport, ScriptedSimulator]:
    settings = resolve_rehearsal(ask(folder, **options), SOURCE)
    simulator = ScriptedSimulator(FACTS, script)
    start: Any = lambda source: nullcontext(simulator)  # noqa: E731
    return rehearse(settings, listen=lambda event: None, start=start), simulator


def test_it_ends_with_the_config_that_is_fastest_there(tmp_path: Path) -> None:
    report, _ = run(tmp_path)
    assert report.rung == "zero1"
    assert report.knobs is not None
    assert report.knobs.micro_batch == 16  # 72 GiB, and the CUDA context; 5 % of the 79.1 stay free
    assert isinstance(report.trials[0].outcome, Fit)
    assert report.throughput is not None
    assert report.throughput.tokens_per_second == pytest.approx(128 * report.throughput.samples_per_second)


def test_nothing_of_it_is_proven(tmp_path: Path) -> None:
    report, _ = run(tmp_path)
    row = json.loads((tmp_path / serialize.REPORT).read_text())
    assert (row["rehearsed"], row["certificate"], row["launch"]) == (True, {}, None)
    assert row["question"]["rehearsed_on"] == "a100-80gb"
    assert [path.name for path in tmp_path.glob("ds_config*")] == ["ds_config_rehearsed.json"]
    assert "Not proven: a rehearsal." in to_page(make_fit_document(report))


def test_it_runs_out_of_memory_at_the_machines_limit(tmp_path: Path) -> None:
    report, _ = run(tmp_path, ladder="ddp")
    assert report.status == "nothing_fits"
    outcome = report.trials[0].outcome
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.phase) == ("device", "init")
    assert outcome.missing_bytes is not None
    assert outcome.missing_bytes > 10 * GIB


def test_a_trial_meets_the_allocator_at_the_limit(tmp_path: Path) -> None:
    # Two streams have 45 GiB in turn: each step gives back the segment of the other, as on a real card of 79 GiB.
    def alternate(spec: EngineSpec, micro_batch: int) -> Simulation:
        events = [size * GIB if size >= 0 else size for size in (45, -1, 45, -2, 45, -3, 45, -4)]
        marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "forward"), (4, "step"), (4, "forward"), (8, "step"))
        made = simulate(spec, micro_batch)
        return replace(made, live_bytes={}, traces={"device": Trace(events=events, marks=marks, streams=(0, 1, 0, 1))})

    report, _ = run(tmp_path, alternate, ladder="zero1", stop="first-fit")
    outcome = report.trials[0].outcome
    assert isinstance(outcome, Fit)
    assert outcome.alloc_retries > 0
    assert outcome.device_peak_bytes <= 79.2 * GIB


@pytest.mark.parametrize(
    ("ladder", "first_s", "later_s"),
    [("zero1,zero2", 0.0, 10 / 3), ("zero3", -3.0, 1 / 3)],  # stage 3 is built on the cards
)
def test_the_first_trial_alone_pays_for_a_shared_model(
    tmp_path: Path, ladder: str, first_s: float, later_s: float
) -> None:
    """FACTS has 1e9 parameters, which take 3.3 s. With --zero-init each trial builds its parts."""

    def count_seconds(zero_init: bool) -> list[float]:
        request = ask(tmp_path / str(zero_init), ladder=ladder)
        settings = resolve_rehearsal(request, replace(SOURCE, zero_init=zero_init))
        start: Any = lambda source: nullcontext(ScriptedSimulator(FACTS, simulate))  # noqa: E731
        report = rehearse(settings, listen=lambda event: None, start=start)
        return [record.seconds for record in report.trials]

    shared, apart = count_seconds(False), count_seconds(True)
    saved = [more - less for more, less in zip(apart, shared, strict=True)]
    assert saved == pytest.approx([first_s] + [later_s] * (len(saved) - 1))
    assert len(saved) > 1


def test_a_trial_counts_the_seconds_of_a_real_one(tmp_path: Path) -> None:
    report, _ = run(tmp_path)
    for record in report.trials:
        assert isinstance(record.outcome, Fit)
        assert record.seconds > 8 + sum(record.outcome.step_s)


def test_a_fit_accumulates_unless_the_user_asks_for_none(tmp_path: Path) -> None:
    for accumulation, said in ((2, {}), *((number, {"gradient_accumulation_steps": number}) for number in (1, 4))):
        report, _ = run(tmp_path / str(accumulation), ladder="zero2", base_config=said)
        assert report.knobs is not None
        assert report.knobs.accumulation == accumulation
        assert report.ds_config is not None
        assert report.ds_config["gradient_accumulation_steps"] == accumulation
        assert ("memory of any longer accumulation" in report.reasons["batch"]) == (accumulation > 1)


def test_stage_3_warms_up_for_longer_as_on_real_ranks(tmp_path: Path) -> None:
    report, _ = run(tmp_path, ladder="zero3", base_config={"gradient_accumulation_steps": 1})
    record = [record for record in report.trials if record.trial.steps.timed > 1][1]
    assert isinstance(record.outcome, Fit)
    assert (record.trial.steps.warmup, record.trial.knobs.accumulation) == (1, 1)
    started_s = 8  # an earlier trial has built the model
    steps = 2 + record.trial.steps.timed  # and no time for one that times the collectives
    assert record.seconds == pytest.approx(started_s + steps * record.outcome.step_s[0])


def test_the_time_of_the_real_fit_has_its_certificate(tmp_path: Path) -> None:
    report, _ = run(tmp_path)
    row = json.loads((tmp_path / serialize.REPORT).read_text())
    assert report.real_fit_seconds == row["real_fit_seconds"]
    assert report.real_fit_seconds is not None
    rank_bytes = (2 + 12 / 8) * FACTS.parameters  # rank 0 saves the halves of all
    checkpoint_s = rank_bytes / 5e8 + rank_bytes / 1.2e9
    assert report.real_fit_seconds > sum(record.seconds for record in report.trials) + 8 + checkpoint_s
    assert "a real fit and its certificate would take about" in to_page(make_fit_document(report))


def test_a_comparison_before_the_exam_builds_no_model_again(tmp_path: Path) -> None:
    """Where the longest batch is longer, the exam comes first, and its ranks leave no model to share: 3.3 s."""

    def certify_s(longest_ratio: float) -> float:
        settings = resolve_rehearsal(ask(tmp_path / str(longest_ratio), config="default", ladder="zero1"), SOURCE)
        facts = replace(FACTS, longest_ratio=longest_ratio, checkpointing=True)
        start: Any = lambda source: nullcontext(ScriptedSimulator(facts, simulate))  # noqa: E731
        report = rehearse(settings, listen=lambda event: None, start=start)
        assert report.real_fit_seconds is not None
        return report.real_fit_seconds - sum(record.seconds for record in report.trials)

    exam_s = certify_s(1.1) - certify_s(1.0)
    assert 10 / 3 < exam_s < 10 / 3 + 2  # and a tenth of the exam's steps


def test_a_budget_without_time_to_compare_losses_is_kept(tmp_path: Path) -> None:
    """25 s of trials and 27 s of the exam leave 18 of 70 s; a comparison takes 23."""
    settings = resolve_rehearsal(ask(tmp_path, config="default", ladder="zero1", max_time="70s"), SOURCE)
    start: Any = lambda source: nullcontext(ScriptedSimulator(replace(FACTS, checkpointing=True), simulate))  # noqa: E731
    report = rehearse(settings, listen=lambda event: None, start=start)
    assert report.real_fit_seconds is not None
    assert report.real_fit_seconds <= 70


def test_nothing_that_fits_is_not_proven_either(tmp_path: Path) -> None:
    report, _ = run(tmp_path, ladder="ddp")
    assert "not proven: a rehearsal" in to_page(make_fit_document(report))
    assert "not proven: a rehearsal" in to_markdown(make_comparison([report]))


def test_a_finished_rehearsal_answers_again_without_simulations(tmp_path: Path) -> None:
    first, _ = run(tmp_path)
    again, simulator = run(tmp_path)
    assert to_dict(again) == to_dict(first)
    assert simulator.measured == []


def test_a_fit_takes_no_rehearsal_for_its_trials(tmp_path: Path) -> None:
    rehearsed = resolve_rehearsal(ask(tmp_path), SOURCE)
    assert replace(rehearsed, rehearsed=False).fingerprint() != rehearsed.fingerprint()


def test_a_workload_that_cannot_be_simulated_ends_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be rehearsed: no such kernel"):
        run(tmp_path, fail_with("workload", "no such kernel"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"on": None}, "--rehearse needs a machine"),
        ({"on": "all"}, "a rehearsal is on one machine"),
        ({"on": "a100-80gb,h100-80gb"}, "a rehearsal is on one machine"),
        ({"on": "abacus"}, "the catalogue has no machine 'abacus'"),
        ({"device": "cpu"}, "--device cpu has no effect"),
        ({"address": "auto"}, "--address has no effect"),
        ({"forecast": False}, "--no-forecast leaves it without answers"),
        ({"gpus": 12, "nodes": 5}, "12"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_rehearsal(ask(tmp_path, **options), SOURCE)
    assert problem in str(caught.value)


def test_more_ranks_than_a_node_has_cards_take_several_nodes(tmp_path: Path) -> None:
    settings = resolve_rehearsal(ask(tmp_path, gpus=64), SOURCE)
    assert (settings.nodes, settings.ranks_per_node) == (8, 8)


def test_its_folder_is_named_after_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = resolve_rehearsal(FitRequest("/model.py", rehearse=True, on="h100-80gb", gpus=8), SOURCE)
    assert settings.out.name.startswith("model-8xh100-80gb-rehearsal-")


def test_a_table_for_a_pull_request_says_not_proven(tmp_path: Path) -> None:
    report, _ = run(tmp_path)
    assert "not proven" in to_markdown(make_comparison([report]))


def test_a_killed_one_goes_on_and_counts_no_simulated_second(tmp_path: Path) -> None:
    whole, _ = run(tmp_path)
    (tmp_path / "report.json").unlink()
    again, _ = run(tmp_path)
    assert (again.rung, again.knobs, again.trials) == (whole.rung, whole.knobs, whole.trials)
    assert again.seconds < sum(record.seconds for record in whole.trials)


def test_a_fresh_fit_leaves_no_config_of_a_rehearsal(tmp_path: Path) -> None:
    run(tmp_path)
    assert (tmp_path / "ds_config_rehearsed.json").exists()
    with workspace(tmp_path, fresh=True):
        assert not (tmp_path / "ds_config_rehearsed.json").exists()


def leave_fragments(spec: EngineSpec, micro_batch: int) -> Simulation:
    """As `simulate`, but a step holds two buffers, and after them one nearly as large as both."""
    simulation, half = simulate(spec, micro_batch), micro_batch * GIB
    events, marks = [STATES_GIB.get(spec.rung, 8) * GIB], list[tuple[int, ForecastPhase]]([(0, "init")])
    for block in (1, 4):
        marks.append((len(events), "forward"))
        events += [half, half, ~block, ~(block + 1), 2 * half - 10 * 2**20, ~(block + 2)]
        marks.append((len(events), "step"))
    return replace(simulation, traces={"device": Trace(events=events, marks=tuple(marks))})


@pytest.mark.parametrize(("users", "micro_batch"), [(None, 16), ("expandable_segments:False", 11)])
def test_segments_that_grow_are_part_of_the_config_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None, micro_batch: int
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if users is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", users)
    report, _ = run(tmp_path, leave_fragments)
    assert report.knobs is not None
    assert (report.rung, report.knobs.micro_batch) == ("zero1", micro_batch)
    assert report.knobs.expandable is (users is None)
    assert report.variables == ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if users is None else {})
    assert not any(trial.trial.knobs.expandable for trial in report.trials if trial.trial.knobs.micro_batch < 8)
    (tmp_path / serialize.REPORT).unlink()
    assert run(tmp_path, leave_fragments)[0].trials == report.trials  # a resumed fit chooses the same
