"""The jobs that a trial becomes, and what ends a fit before its first trial."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.catalogue import read_catalogue
from autods.config.deepspeed import get_key
from autods.config.settings import Settings
from autods.devices import Finding, Health
from autods.diagnosis.evidence import HostUsage, RankError
from autods.errors import EnvironmentBroken, InputError
from autods.events import Event, Note
from autods.rank.job import RankJob, RunOrder
from autods.rank.ops import USUAL_BUILD_S
from autods.rank.record import PreflightResult, describe_error
from autods.runner.node_messages import LoadFailed, NodeReport, RankExit, Ready, ZygoteDied
from autods.runner.runner import RayRunner
from autods.types import Exam, Failed, Fit, Knobs, Steps, Trial
from tests.support.ends import JOB, rank_exit, report_of
from tests.support.walks import FACTS, SETTINGS

SWAP = "zero_optimization.offload_optimizer.nvme_path"


def a_runner(settings: Settings = SETTINGS, **options: Any) -> RayRunner:
    """A runner whose zygotes hold the workload of SETTINGS, after its survey."""
    runner = RayRunner(settings, lambda event: None, **options)
    runner.facts, runner.loaded, runner.swap_mark = FACTS, SETTINGS.source, "1-abc"
    return runner


def a_trial(rung: str = "zero2", **options: Any) -> Trial:
    knobs = Knobs(micro_batch=4, accumulation=2, checkpointing=False)
    return Trial(rung=rung, knobs=knobs, purpose="walk", **options)


def test_a_trial_is_a_job_for_all_ranks_with_its_knobs() -> None:
    job = a_runner().trial_job(a_trial(), 7)
    assert (job.job, job.world_size, job.local_ranks) == ("train", 2, (0, 1))
    assert (job.micro_batch, job.accumulation, job.checkpointing) == (4, 2, False)
    assert job.folder == "out/logs/007-zero2"
    assert get_key(job.ds_config, "zero_optimization.stage") == 2
    assert get_key(job.ds_config, "train_micro_batch_size_per_gpu") == 4


@pytest.mark.parametrize(
    ("rung", "accumulation", "timed", "exam", "warmup"),
    [
        ("zero3", 1, 2, None, 2),
        ("zero3-offload", 1, 2, None, 2),
        ("zero3", 2, 2, None, 1),  # the second micro batch is of the same step
        ("zero3", 1, 1, None, 1),  # it asks only whether the config fits
        ("zero3", 1, 2, "worst_case", 1),
        ("zero2", 1, 2, None, 1),
    ],
)
def test_zero_3_prefetches_before_its_steps_are_timed(
    rung: str, accumulation: int, timed: int, exam: Exam | None, warmup: int
) -> None:
    steps = Steps(warmup=1, timed=timed, most_timed=timed)
    trial = replace(a_trial(rung), knobs=Knobs(accumulation=accumulation), steps=steps, exam=exam)
    assert a_runner().trial_job(trial, 1).steps == replace(steps, warmup=warmup)


def test_the_device_is_limited_where_a_budget_was_given() -> None:
    whole_card = replace(SETTINGS, device="cuda", device_bytes_asked=False)
    assert a_runner().trial_job(a_trial(), 1).limit_bytes == SETTINGS.device_bytes
    assert a_runner().trial_job(a_trial(limited=False), 1).limit_bytes is None
    assert a_runner(whole_card).trial_job(a_trial(), 1).limit_bytes is None
    kept = replace(a_trial(), knobs=Knobs(keeps_headroom=True))
    assert a_runner(whole_card).trial_job(kept, 1).limit_bytes == int(whole_card.usable_bytes) < whole_card.device_bytes
    assert a_runner(whole_card).trial_job(replace(kept, limited=False), 1).limit_bytes is None


def test_a_trial_swaps_into_a_folder_of_its_driver() -> None:
    runner, trial = a_runner(), a_trial("zero3-nvme")
    job = runner.trial_job(trial, 1)
    assert job.swap == "/scratch/autods-1-abc"
    assert get_key(job.ds_config, SWAP) == job.swap
    assert get_key(runner.final_config(trial), SWAP) == "/scratch"
    assert runner.trial_job(a_trial(), 1).swap is None


def test_an_attempt_of_a_run_is_a_job_without_an_end() -> None:
    order = RunOrder(folder="/runs/a", attempt=2, steps=10, checkpoint_every=5)
    job = a_runner().run_job(order, "zero3-nvme", Knobs(micro_batch=4, accumulation=2))
    assert (job.job, job.order, job.folder, job.wall_s) == ("run", order, "/runs/a/attempts/2/ranks", math.inf)
    assert (job.micro_batch, job.train_batch, job.seed) == (4, 16, SETTINGS.seed)
    assert job.silence_s["load"] >= job.silence_s["init"]
    assert get_key(job.ds_config, SWAP) == job.swap == "/scratch/autods-1-abc"


def test_a_workload_is_bound_again_where_its_arguments_differ() -> None:
    other = replace(SETTINGS, source=replace(SETTINGS.source, digest="1", seq_len=128))
    assert not a_runner().trial_job(a_trial(), 1).rebind
    assert a_runner(other).trial_job(a_trial(), 1).rebind


def test_a_survey_checks_the_ops_of_the_rungs_that_can_run() -> None:
    assert "async_io" in a_runner().survey_job().ops
    without = a_runner(replace(SETTINGS, nvme_path=None)).survey_job().ops
    assert "async_io" not in without
    assert "cpu_adam" in without
    script = replace(SETTINGS, source=replace(SETTINGS.source, kind="script"))
    assert a_runner(script).survey_job().ops == tuple(USUAL_BUILD_S)  # its config may need any


def test_a_survey_is_on_one_rank_until_all_are_needed() -> None:
    survey, everywhere = a_runner().survey_job(), a_runner().survey_job(ranks=2)
    assert (survey.world_size, survey.local_ranks) == (1, (0,))
    assert (everywhere.world_size, everywhere.local_ranks, everywhere.ops) == (2, (0, 1), survey.ops)


def test_runners_side_by_side_write_different_logs() -> None:
    second = a_runner(number=1)
    assert Path(second.survey_job().folder).name == "survey-beside1"
    assert Path(second.building_job("cpu_adam").folder).name == "build-cpu_adam-beside1"
    assert Path(second.trial_job(a_trial(), 3).folder).name == "003-zero2"


def test_a_build_has_a_time_limit_of_its_own() -> None:
    job, limits = a_runner().building_job("cpu_adam"), SETTINGS.profile.limits
    assert (job.ops, set(job.silence_s.values()), job.wall_s) == (("cpu_adam",), {limits.build_s}, limits.build_s)


def test_a_trial_has_more_time_where_earlier_ones_were_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, small = a_runner(), a_trial()
    before = runner.trial_job(small, 1).silence_s
    seconds = {"step_s": [80.0], "steps_s": 80.0, "build_s": 0.1, "init_s": 0.1}  # 8 samples a rank: 10 s each
    peaks = {"device": 1, "host": 1, "pinned": None}
    slow = [rank_exit(rank, result={**seconds, "losses": [1.0], "peaks": peaks}) for rank in (0, 1)]
    monkeypatch.setattr(runner.workers, "run", lambda job, report, everywhere: [report_of(*slow)])
    assert isinstance(runner.run(small, id=1).outcome, Fit)
    after = runner.trial_job(small, 2).silence_s
    assert after["forward"] - before["forward"] == pytest.approx(10 * 10.0 * 4)  # ten times the micro batch's seconds
    assert after["save"] == before["save"]


@pytest.mark.parametrize("exam", [None, "worst_case"])
def test_a_full_host_beside_a_shared_model_is_tried_apart(monkeypatch: pytest.MonkeyPatch, exam: Exam | None) -> None:
    """The exam shares none, so that its verdict stands. After the first such end no trial shares one."""
    runner, jobs = a_runner(), list[RankJob]()
    result = {"step_s": [1.0], "steps_s": 1.0, "losses": [1.0], "peaks": {"device": 1, "host": 1, "pinned": None}}
    killed = HostUsage(limit_bytes=2**30, least_free_bytes=0, group_kills=1)

    def run(job: RankJob, report: object, everywhere: bool) -> list[NodeReport | ZygoteDied]:
        jobs.append(job)
        if job.shares_model or exam:
            return [ZygoteDied(how="killed by SIGKILL", host=killed)]
        return [report_of(*(rank_exit(rank, result=result) for rank in (0, 1)))]

    monkeypatch.setattr(runner.workers, "run", run)
    outcomes = [runner.run(a_trial(exam=exam), id=id).outcome for id in (1, 2)]
    if exam:
        assert [outcome.kind for outcome in outcomes] == ["out_of_memory", "out_of_memory"]
        assert [job.shares_model for job in jobs] == [False, False]
    else:
        assert [outcome.kind for outcome in outcomes] == ["fit", "fit"]
        assert [job.shares_model for job in jobs] == [True, False, False]


def preflight(monkeypatch: pytest.MonkeyPatch, *ranks: RankExit, health: Health | None = None) -> tuple[Any, list[str]]:
    """A runner before its first training, whose ranks end so, and its warnings."""
    warnings: list[str] = []
    runner = RayRunner(
        replace(SETTINGS, machine=read_catalogue()["h100-80gb"]), lambda event: warnings.append(str(event))
    )
    monkeypatch.setattr(runner.workers, "examine", lambda: [("", health or Health())])
    monkeypatch.setattr(runner.workers, "run", lambda job: [report_of(*ranks)])
    return runner, warnings


def meeting(gb_per_s: float) -> tuple[RankExit, ...]:
    result = PreflightResult(bytes_per_s=1e9 * gb_per_s)
    return tuple(replace(rank_exit(rank), exit_code=0, result=result) for rank in (0, 1))


def test_a_healthy_machine_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, warnings = preflight(monkeypatch, *meeting(350))
    runner.check_machine()
    monkeypatch.setattr(runner.workers, "examine", lambda: pytest.fail("once is enough"))
    runner.check_machine()
    assert warnings == []


@pytest.mark.parametrize(
    ("end", "looks"),
    [
        (ZygoteDied(how="killed by SIGKILL"), 2),
        (report_of(rank_exit(0, error={"types": ["KeyError"], "message": "'labels'"})), 1),
    ],
)
def test_a_machine_that_may_have_failed_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, end: NodeReport | ZygoteDied, looks: int
) -> None:
    runner, _ = preflight(monkeypatch, *meeting(350))
    looked: list[str] = []
    monkeypatch.setattr(runner.workers, "examine", lambda: looked.append("looked") or [("", Health())])
    monkeypatch.setattr(runner, "_build_ops", lambda job: None)
    monkeypatch.setattr(runner.workers, "run", lambda job, *rest: [report_of(*meeting(350)) if not rest else end])
    runner.check_machine()
    assert isinstance(runner.run_attempt(JOB, lambda beat: None), Failed)
    runner.check_machine()
    assert len(looked) == looks


def test_nodes_are_replaced_before_they_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = preflight(monkeypatch, *meeting(350))
    runner.check_machine()
    events: list[str] = []

    def replace_lost() -> None:
        events.append("replaced")
        runner.workers.nodes = []

    monkeypatch.setattr(runner.workers, "replace_lost", replace_lost)
    monkeypatch.setattr(runner.workers, "examine", lambda: events.append("looked at") or [("", Health())])
    runner.check_machine()
    assert events == ["replaced", "looked at"]


def test_what_slows_the_ranks_is_a_warning_before_they_train(monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = Finding(text="card 1 (H100) is throttled: too hot", remedy="look at the fans")
    runner, warnings = preflight(monkeypatch, *meeting(40), health=Health(findings=(throttled,)))
    runner.check_machine()
    hot, slow = warnings
    assert hot == "warning: card 1 (H100) is throttled: too hot (look at the fans)"
    assert slow.startswith("warning: an all-reduce of all ranks moves 40 GB/s, and NVIDIA H100 80 GB SXM usually gives")


def test_a_missing_card_ends_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Finding(text="8 ranks need a card each, and 7 are there", remedy="see nvidia-smi", is_fatal=True)
    runner, _ = preflight(monkeypatch, health=Health(findings=(gone,)))
    with pytest.raises(EnvironmentBroken, match="7 are there\n  see nvidia-smi"):
        runner.check_machine()


def test_ranks_that_do_not_reach_each_other_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"types": ["RuntimeError"], "message": "Connection refused"}
    runner, _ = preflight(monkeypatch, rank_exit(0, error=error), rank_exit(1, error=error))
    with pytest.raises(EnvironmentBroken, match=r"the ranks do not reach each other: .*Connection refused"):
        runner.check_machine()


def test_findings_stand_beside_ranks_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"types": ["RuntimeError"], "message": "Connection refused"}
    busy = Finding(text="card 1 (H100): something else keeps it busy", remedy="see who")
    runner, warnings = preflight(monkeypatch, rank_exit(0, error=error), health=Health(findings=(busy,)))
    with pytest.raises(EnvironmentBroken):
        runner.preflight()
    assert warnings == ["warning: card 1 (H100): something else keeps it busy (see who)"]


def caught(error: Exception) -> RankError:
    """The error as a rank or a zygote describes it."""
    try:
        raise error
    except Exception as raised:
        return describe_error(raised, JOB.source.path)


def checked(ready: Ready | LoadFailed | ZygoteDied) -> list[Event]:
    events: list[Event] = []
    RayRunner(replace(SETTINGS, source=JOB.source), events.append).check_ready(ready)
    return events


@pytest.mark.parametrize(
    ("error", "ends", "words"),
    [
        (NameError("name 'np' is not defined"), InputError, "/model.py: .*NameError"),
        (ModuleNotFoundError("No module named 'nothing'"), EnvironmentBroken, "pip install"),
    ],
)
def test_a_module_that_cannot_be_imported_ends_the_fit(error: Exception, ends: type[Exception], words: str) -> None:
    with pytest.raises(ends, match=words):
        checked(LoadFailed(error=caught(error)))


def test_a_zygote_that_died_while_loading_names_its_log() -> None:
    with pytest.raises(EnvironmentBroken, match=r"SIGKILL[^$]*see dmesg, and out/logs/zygote\.log"):
        checked(ZygoteDied(how="killed by SIGKILL"))


def test_ranks_that_cannot_be_forked_are_reported() -> None:
    (note,) = checked(Ready(pid=1, spawn_because="CUDA was initialised while importing"))
    assert isinstance(note, Note)
    assert "new processes" in note.text
    assert "CUDA was initialised" in note.text
    assert checked(Ready(pid=1)) == []
