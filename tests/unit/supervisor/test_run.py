from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import replace

import pytest

from autods.config.rungs import read_rungs
from autods.config.settings import apply_survey
from autods.errors import DiskFull, EnvironmentBroken, InputError
from autods.journal import make_other_fit_error
from autods.rank.record import RunResult
from autods.rank.training_run.checkpoints import MARK
from autods.report import serialize
from autods.report.results.fit import FitReport, Throughput
from autods.report.serialize import read_run
from autods.runner.cluster_check import NoCluster
from autods.runner.environment import rank_environment
from autods.runner.testing import failed, out_of_memory
from autods.supervisor import room as room_module
from autods.supervisor.rescue import MOST_REPEATS
from autods.supervisor.run import run
from autods.supervisor.run_settings import RunSettings
from autods.types import Knobs
from tests.support.scripted_runs import ScriptedLauncher
from tests.support.walks import FACTS, SETTINGS

RUNGS = read_rungs()
LADDER = tuple(RUNGS[name] for name in ("zero2", "zero3"))
REPORT = FitReport(
    status="fit",
    rung="zero2",
    knobs=Knobs(micro_batch=2, accumulation=2),
    throughput=Throughput(samples_per_second=8.0),
)


def settings(folder, **more):
    base = {"bf16": {"enabled": True}}  # without sizes, which a script's would have to agree with
    fit = replace(SETTINGS, ladder=LADDER, nvme_path=None, out=folder / "fit", global_batch=8, base=base)
    return RunSettings(**{"fit": fit, "out": folder, "steps": 10, "checkpoint_every": 2, **more})


def supervise(folder, answer, events=None, report=REPORT, room=None, find_fit=None, **more):
    """`room` is the number of ranks that the machines hold; a function for one that changes."""
    launcher = ScriptedLauncher(answer, FACTS)
    result = run(
        settings(folder, **more),
        listen=(lambda event: None) if events is None else events.append,
        start=launcher.start,
        find_fit=find_fit or (lambda fit, listen: report),
        count_ranks=room if callable(room) else lambda fit: room,
    )
    return result, launcher


def finish(job):
    return job.order.steps, "done"


def test_a_run_without_a_failure_is_one_attempt(tmp_path):
    result, launcher = supervise(tmp_path, finish)
    assert (result.status, result.exit_code, result.step, result.rescues) == ("done", 0, 10, 0)
    (job,) = launcher.jobs
    assert (job.micro_batch, job.accumulation, job.train_batch) == (2, 2, 8)
    assert read_run(tmp_path) == result


def test_out_of_memory_goes_on_at_the_last_checkpoint(tmp_path):
    def answer(job):
        return (5, out_of_memory()) if job.micro_batch == 2 else finish(job)

    result, launcher = supervise(tmp_path, answer)
    assert result.status == "done"
    first, second = launcher.jobs
    assert (second.micro_batch, second.accumulation, second.train_batch) == (1, 4, first.train_batch)
    assert second.order.restore.endswith("step-00000004")
    assert [row.repeated for row in result.attempts] == [0, 1]
    assert result.attempts[0].changed.startswith("micro batch 1 instead of 2")


def test_a_run_that_never_fits_ends_with_exit_code_1(tmp_path):
    result, launcher = supervise(tmp_path, lambda job: (0, out_of_memory()))
    assert (result.status, result.exit_code) == ("failed", 1)
    tried = [(str(job.ds_config), job.micro_batch, job.checkpointing) for job in launcher.jobs]
    assert len(tried) == len(set(tried)) > 2


def test_the_end_of_a_run_that_never_fits_says_what_helps(tmp_path):
    result, _ = supervise(tmp_path, lambda job: (0, out_of_memory(missing_bytes=3 * 2**20)))
    assert result.reason.endswith("zero3, 1 × 4 × 2 lacked at least 3.0 MiB")
    assert "shorten the longest samples" in result.advice


def test_a_run_that_never_fitted_is_tried_once_a_call(tmp_path):
    supervise(tmp_path, lambda job: (0, out_of_memory()))
    result, launcher = supervise(tmp_path, lambda job: (0, out_of_memory()))
    assert (result.exit_code, len(launcher.jobs)) == (1, 1)
    result, launcher = supervise(tmp_path, finish)
    assert (result.status, len(launcher.jobs)) == ("done", 1)


def test_a_bug_of_the_user_stops_at_once(tmp_path):
    bug = failed(failure="user_code", action="fix_code", evidence="model.py:3: NameError")
    result, launcher = supervise(tmp_path, lambda job: (3, bug))
    assert (result.status, result.exit_code, result.reason) == ("failed", 2, "model.py:3: NameError")
    assert len(launcher.jobs) == 1


def test_a_mended_bug_goes_on_at_the_checkpoint(tmp_path):
    bug = failed(failure="user_code", action="fix_code")
    supervise(tmp_path, lambda job: (3, bug))
    result, launcher = supervise(tmp_path, finish)
    assert result.status == "done"
    assert launcher.jobs[0].order.restore.endswith("step-00000002")


def test_a_script_without_a_session_is_named_and_runs_once(tmp_path):
    result, _ = supervise(tmp_path, lambda job: (0, RunResult(ended="done", step=None)))
    assert result.status == "done"
    assert "calls no autods.session(engine)" in result.warnings[0]
    assert "--steps does not end it" in result.warnings[0]
    assert [attempt.last_step for attempt in result.attempts] == [0]  # they are not counted
    result, launcher = supervise(tmp_path, finish)
    assert (result.status, launcher.jobs) == ("done", [])


def test_a_finished_run_is_not_run_again(tmp_path):
    supervise(tmp_path, finish)
    result, launcher = supervise(tmp_path, finish)
    assert result.status == "done"
    assert launcher.jobs == []


def test_an_end_before_the_steps_asked_for_is_a_warning(tmp_path):
    result, _ = supervise(tmp_path, lambda job: (6, "done"))
    assert (result.status, result.exit_code, result.step) == ("done", 0, 6)
    assert result.warnings == ("the training ended by itself at step 6, before step 10 of --steps",)


def test_more_steps_go_on_from_the_end(tmp_path):
    supervise(tmp_path, finish)
    result, launcher = supervise(tmp_path, finish, steps=14)
    assert result.step == 14
    assert launcher.jobs[0].order.restore.endswith("step-00000010")


def test_fewer_steps_than_were_done_are_done_already(tmp_path):
    supervise(tmp_path, lambda job: (8, "stopped"))
    result, launcher = supervise(tmp_path, finish, steps=6)
    assert (result.status, result.step, launcher.jobs) == ("done", 8, [])
    _, launcher = supervise(tmp_path, finish, steps=8)
    assert len(launcher.jobs) == 1  # the end of the workload has not run yet


def test_checkpoints_that_are_gone_are_reported_once(tmp_path):
    supervise(tmp_path, finish)
    shutil.rmtree(tmp_path / "checkpoints")
    result, launcher = supervise(tmp_path, lambda job: (4, "stopped"))
    assert launcher.jobs[0].order.restore is None
    warnings = ("the checkpoint of step 10 is gone or torn: the run goes on at step 0",)
    assert result.warnings == warnings
    again, launcher = supervise(tmp_path, finish)
    assert launcher.jobs[0].order.restore.endswith("step-00000004")
    assert again.warnings == warnings


def test_other_options_are_named_and_nothing_runs(tmp_path):
    supervise(tmp_path, finish)
    with pytest.raises(InputError, match=r"--seed: 0 → 5"):
        run(settings(tmp_path, fit=replace(settings(tmp_path).fit, seed=5)), listen=lambda event: None)


def test_another_precision_is_named_by_its_option(tmp_path):
    supervise(tmp_path, finish)
    fit = replace(settings(tmp_path).fit, base={"fp16": {"enabled": True}})
    with pytest.raises(InputError, match=r"--precision: bf16 → fp16"):
        supervise(tmp_path, finish, fit=fit)


def test_another_length_of_samples_is_refused(tmp_path):
    fit = settings(tmp_path).fit
    shorter, longer = (replace(fit, source=replace(fit.source, seq_len=length)) for length in (32, 64))
    supervise(tmp_path, lambda job: (4, "stopped"), fit=shorter)
    for other, change in ((longer, "32 → 64"), (fit, "32 → None")):
        with pytest.raises(InputError, match=rf"holds a run with other options \(--seq-len: {change}\)"):
            supervise(tmp_path, finish, fit=other)


def test_a_rung_that_the_ladder_lost_is_named(tmp_path):
    supervise(tmp_path, lambda job: (4, "stopped"))
    fit = settings(tmp_path).fit
    without = replace(fit, ladder=tuple(rung for rung in fit.ladder if rung.name != REPORT.rung))
    with pytest.raises(InputError, match=rf"trains with {REPORT.rung}, .*\n  add --with {REPORT.rung} to go on"):
        supervise(tmp_path, finish, fit=without)


def test_a_changed_workload_is_named_and_goes_on(tmp_path):
    supervise(tmp_path, lambda job: (4, "stopped"))
    fit = settings(tmp_path).fit
    changed = replace(fit, source=replace(fit.source, digest="another"))
    result, launcher = supervise(tmp_path, finish, fit=changed)
    assert launcher.jobs[0].order.restore.endswith("step-00000004")
    assert [warning for warning in result.warnings if warning.startswith(f"{fit.source.path} has changed")]
    again, _ = supervise(tmp_path, finish, fit=changed, steps=12)
    assert again.warnings == result.warnings


def test_fresh_forgets_the_run_and_its_checkpoints(tmp_path):
    supervise(tmp_path, finish)
    result, launcher = supervise(tmp_path, finish, fresh=True)
    assert launcher.jobs[0].order.restore is None
    assert len(result.attempts) == 1


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("name", ["checkpoints/mine.pt", "attempts/1", "run.json", "run.jsonl"])
def test_what_is_not_a_runs_stays(tmp_path, name, fresh):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match="no journal of a run, so nothing is written over or removed"):
        supervise(tmp_path, finish, fresh=fresh)
    assert (tmp_path / name).read_text() == "mine"


def test_a_torn_checkpoint_is_removed_and_not_restored(tmp_path):
    def answer(job):
        if job.order.attempt > 1:
            return finish(job)
        (tmp_path / "checkpoints" / "step-00000006").mkdir(parents=True)
        return 5, failed()

    events = []
    result, launcher = supervise(tmp_path, answer, events)
    assert result.status == "done"
    assert launcher.jobs[1].order.restore.endswith("step-00000004")
    assert any("step-00000006 was removed" in getattr(event, "text", "") for event in events)


@pytest.mark.parametrize(
    ("damaged", "restored", "status"),
    [((8,), [8, 4], "done"), ((4, 8), [8], "failed")],  # without a whole one before it, the newest stays
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, monkeypatch, damaged, restored, status):
    unreadable = replace(failed(failure="user_code", action="fix_code"), phase="load")
    is_damaged = "autods.supervisor.run.find_damage"
    monkeypatch.setattr(is_damaged, lambda saved: "a.pt is cut" if saved.step in damaged else None)
    supervise(tmp_path, lambda job: (9, "stopped"), checkpoint_every=4)
    result, launcher = supervise(
        tmp_path,
        lambda job: (0, unreadable) if job.order.restore.endswith("8") else finish(job),
        checkpoint_every=4,
    )
    assert [int(job.order.restore[-8:]) for job in launcher.jobs] == restored
    assert result.status == status
    assert ["a.pt is cut" in text for text in result.warnings] == [True] * (len(restored) - 1)


def test_a_run_whose_last_step_has_no_room_is_not_done(tmp_path):
    full = RunResult(ended="done", step=9, unsaved="about 2 GiB of disk are needed and 1 GiB are free")
    result, launcher = supervise(tmp_path, lambda job: (9, full))
    assert (result.status, result.exit_code, result.step, len(launcher.jobs)) == ("failed", 3, 8, 1)
    assert "about 2 GiB of disk are needed" in result.reason
    result, launcher = supervise(tmp_path, finish)
    assert result.status == "done"
    assert launcher.jobs[0].order.restore.endswith("step-00000008")


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_run_waits_for_room_on_a_full_disk(small_disk, number):
    ballast, events = small_disk / "ballast", []

    def hear(event):
        events.append(str(event))
        if "waits for room" in str(event):
            make_room = ballast.unlink if number is None else lambda: os.kill(os.getpid(), number)
            threading.Timer(0.3, make_room).start()

    def answer(job):
        if job.order.attempt > 1:
            return finish(job)
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return 0, failed(evidence="OSError: [Errno 28] No space left on device")

    def supervise_in_it():
        launcher = ScriptedLauncher(answer, FACTS)
        return run(settings(small_disk), listen=hear, start=launcher.start, find_fit=lambda fit, listen: REPORT)

    if number is None:
        result = supervise_in_it()
        assert (result.status, result.step, len(result.attempts)) == ("done", 10, 2)
        assert any("there is room on the disk again" in text for text in events)
        return
    result = supervise_in_it()
    assert (result.status, result.exit_code) == ("stopped", 143)  # a scheduler asked for it: no fault of the machine
    assert any("the run stops without a report" in text for text in events)
    ballast.unlink()
    assert supervise_in_it().status == "done"


def test_host_memory_may_have_room_later(tmp_path):
    result, launcher = supervise(tmp_path, lambda job: (1, out_of_memory(tier="host")))
    assert (result.status, result.exit_code, len(launcher.jobs)) == ("failed", 1, 1 + MOST_REPEATS)
    result, launcher = supervise(tmp_path, finish)
    assert (result.status, len(launcher.jobs)) == ("done", 1)


def test_a_run_without_a_leaner_config_is_tried_once_more(tmp_path):
    supervise(tmp_path, lambda job: (0, out_of_memory()))
    result, launcher = supervise(tmp_path, lambda job: (0, out_of_memory()))
    assert (result.status, result.exit_code, len(launcher.jobs)) == ("failed", 1, 1)
    assert supervise(tmp_path, finish)[0].status == "done"


def test_a_driver_that_dies_goes_on_with_the_last_decision(tmp_path):
    class Killed(BaseException):
        pass

    def answer(job):
        if job.order.attempt == 1:
            return 5, out_of_memory()
        raise Killed

    with pytest.raises(Killed):
        supervise(tmp_path, answer)
    result, launcher = supervise(tmp_path, finish)
    assert result.status == "done"
    assert launcher.jobs[0].micro_batch == 1
    assert [row.ending for row in result.attempts] == ["failed", "interrupted", "done"]


def test_rescues_are_bounded_over_all_calls(tmp_path):
    result, _ = supervise(tmp_path, lambda job: (0, out_of_memory()), most_rescues=1)
    assert result.rescues == 1
    assert "--max-rescues" in result.reason
    again, launcher = supervise(tmp_path, finish, most_rescues=1)
    assert again.exit_code == 1
    assert launcher.jobs == []


def test_ray_that_dies_is_started_again(tmp_path):
    def answer(job):
        if job.order.attempt == 1:
            raise EnvironmentBroken("Ray's server on this machine is gone")
        return finish(job)

    result, launcher = supervise(tmp_path, answer)
    assert result.status == "done"
    assert len(launcher.settings) == 2


def test_a_disk_that_stays_full_is_no_lost_session(tmp_path):
    def answer(job):
        raise DiskFull("/out: the disk is full")

    with pytest.raises(DiskFull):
        supervise(tmp_path, answer)
    result, launcher = supervise(tmp_path, finish)
    assert [row.ending for row in result.attempts] == ["interrupted", "done"]
    assert len(launcher.settings) == 1


def on_nodes(folder, nodes, gpus):
    return replace(settings(folder).fit, gpus=gpus, nodes=nodes, address="10.0.0.1:6379")


LOST = failed(failure="infrastructure", action="retry", evidence="node 10.0.0.2 was lost")


def test_a_lost_node_leaves_a_smaller_world(tmp_path):
    def answer(job):
        return (5, LOST) if job.world_size == 4 else finish(job)

    result, launcher = supervise(tmp_path, answer, room=2, fit=on_nodes(tmp_path, 2, 4))
    first, second = launcher.jobs
    assert (result.status, first.train_batch, second.train_batch) == ("done", 16, 16)
    assert (second.world_size, second.micro_batch, second.accumulation) == (2, 2, 4)
    assert second.order.restore.endswith("step-00000004")
    assert [(fit.gpus, fit.nodes) for fit in launcher.settings] == [(4, 2), (2, 1)]
    assert result.attempts[0].changed.startswith("world size 2 instead of 4")


def test_users_batch_sizes_do_not_bind_a_smaller_world(tmp_path):
    def answer(job):
        return (5, LOST) if job.world_size == 4 else finish(job)

    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    _, launcher = supervise(tmp_path, answer, room=2, fit=on_nodes(tmp_path, 2, 4))
    whole, smaller = (apply_survey(each, replace(FACTS, config=sizes)) for each in launcher.settings)
    assert [whole.base[key] for key in sizes] == [16, 2, 2]
    assert [smaller.base[key] for key in sizes] == [16, 2, 4]


def test_a_checkpoint_that_binds_the_ranks_ends_a_lost_session(tmp_path):
    rooms = [4, 2]

    def answer(job):
        if job.order.attempt == 1:
            return 5, LOST
        mark = tmp_path / "checkpoints" / "step-00000004" / MARK
        manifest = json.loads(mark.read_text())
        manifest["layout"]["offload_optimizer"] = "nvme"
        mark.write_text(json.dumps(manifest))
        raise EnvironmentBroken("the ranks need 2 CPUs on each of 2 nodes")

    result, launcher = supervise(tmp_path, answer, room=lambda fit: rooms.pop(0), fit=on_nodes(tmp_path, 2, 4))
    assert (result.exit_code, len(launcher.jobs)) == (3, 2)
    assert "its optimizer was on NVMe" in result.reason


def test_a_node_that_ray_misses_later_is_followed_then(tmp_path):
    """The ranks end first; the cluster knows of the loss when it is asked to hold them again."""
    rooms = [4, 2]

    def answer(job):
        if job.order.attempt == 2:
            raise EnvironmentBroken("the ranks need 2 CPUs on each of 2 nodes")
        return (5, LOST) if job.order.attempt == 1 else finish(job)

    result, launcher = supervise(tmp_path, answer, room=lambda fit: rooms.pop(0), fit=on_nodes(tmp_path, 2, 4))
    assert [job.world_size for job in launcher.jobs] == [4, 4, 2]
    assert (result.status, result.rescues) == ("done", 2)


@pytest.mark.parametrize("is_back", [True, False])
def test_a_cluster_that_is_started_again_is_waited_for(tmp_path, monkeypatch, is_back):
    events, rooms = [], [None, None, 0, 2, 4]  # its nodes come back after its head
    monkeypatch.setattr(room_module, "_CLUSTER_EVERY_S", 0.01)
    monkeypatch.setattr(room_module, "_CLUSTER_BACK_S", 60.0 if is_back else 0.0)

    def answer(job):
        if job.order.attempt == 1:
            return 5, LOST
        if job.order.attempt == 2:
            raise EnvironmentBroken("the head of the Ray cluster at 10.0.0.1:6379 is gone")
        return finish(job)

    def count_ranks(fit):
        if not is_back:
            return None
        return rooms.pop(0) if (tmp_path / "attempts" / "2").exists() else 4

    result, launcher = supervise(tmp_path, answer, events, room=count_ranks, fit=on_nodes(tmp_path, 2, 4))
    assert (result.status, [job.world_size for job in launcher.jobs]) == ("done", [4, 4, 4])
    assert rooms == ([] if is_back else [None, None, 0, 2, 4])
    assert sum("no Ray cluster answers; the run waits" in str(event) for event in events) == 1


def test_a_cluster_that_left_its_address_is_no_wrong_input(tmp_path):
    class Launcher(ScriptedLauncher):
        def start(self, settings, listen):
            runner = super().start(settings, listen)
            if len(self.settings) == 2:  # for the ranks that are left
                raise NoCluster("no Ray cluster answers there (Connection refused)", place="--address 10.0.0.1:6379")
            return runner

    launcher = Launcher(lambda job: (5, LOST) if job.world_size == 4 else finish(job), FACTS)
    result = run(
        settings(tmp_path, fit=on_nodes(tmp_path, 2, 4)),
        listen=lambda event: None,
        start=launcher.start,
        find_fit=lambda fit, listen: REPORT,
        count_ranks=lambda fit: 2,
    )
    assert (result.status, [each.ending for each in result.attempts]) == ("done", ["failed", "failed", "done"])


def test_a_cluster_without_a_node_ends_the_run(tmp_path):
    result, launcher = supervise(tmp_path, lambda job: (5, LOST), room=0, fit=on_nodes(tmp_path, 2, 4))
    assert (result.status, result.exit_code, len(launcher.jobs)) == ("failed", 3, 1)
    assert result.reason == "the machines hold 0 ranks now, and a replica of the model takes 1"


@pytest.mark.parametrize(("room", "world_size"), [(4, 4), (2, 2), (None, 4)])
def test_the_next_call_takes_the_nodes_that_are_back(tmp_path, room, world_size):
    def answer(job):
        return (5, LOST) if job.world_size == 4 else (6, "stopped")

    fit = on_nodes(tmp_path, 2, 4)
    supervise(tmp_path, answer, room=2, fit=fit)
    result, launcher = supervise(tmp_path, finish, room=room, fit=fit)
    (job,) = launcher.jobs
    assert (job.world_size, job.train_batch, result.status) == (world_size, 16, "done")
    assert job.order.restore.endswith("step-00000006")


def fits(asked):
    """A fit whose micro batch tells the number of ranks; it notes its settings in `asked`."""

    def find_fit(fit, listen):
        asked.append(fit)
        knobs = Knobs(micro_batch=1, accumulation=2) if fit.gpus == 4 else Knobs(micro_batch=8 // fit.gpus)
        return replace(REPORT, knobs=knobs)

    return find_fit


def test_another_number_of_ranks_takes_the_config_of_its_fit(tmp_path):
    supervise(tmp_path, lambda job: (5, "stopped"))
    asked, fit = [], replace(settings(tmp_path).fit, gpus=4)
    result, launcher = supervise(tmp_path, finish, find_fit=fits(asked), fit=fit)
    (job,) = launcher.jobs
    assert (job.world_size, job.micro_batch, job.accumulation, job.train_batch) == (4, 1, 2, 8)
    assert job.order.restore.endswith("step-00000004")
    assert [(fit.gpus, fit.global_batch) for fit in asked] == [(4, 8)]
    assert result.world_size == 4


def test_a_fit_for_other_ranks_may_have_other_options(tmp_path):
    """One that found nothing is not in the way of the next."""
    supervise(tmp_path, lambda job: (5, "stopped"))
    asked, fit = [], replace(settings(tmp_path).fit, gpus=4)

    def find_nothing(fit, listen):
        asked.append(fit)
        return FitReport(status="nothing_fits")

    result, _ = supervise(tmp_path, finish, find_fit=find_nothing, fit=replace(fit, ladder=LADDER[:1]))
    assert (result.status, result.exit_code) == ("nothing_fits", 1)
    result, _ = supervise(tmp_path, finish, find_fit=fits(asked), fit=fit)
    assert (result.status, result.world_size) == ("done", 4)
    assert len({fit.out for fit in asked}) == 2


def test_ranks_that_cannot_share_the_batch_are_refused(tmp_path):
    supervise(tmp_path, lambda job: (5, "stopped"))
    with pytest.raises(InputError, match="global batch of 8 cannot be split over 3 ranks") as error:
        supervise(tmp_path, finish, fit=replace(settings(tmp_path).fit, gpus=3))
    assert "give --gpus 2 as before" in str(error.value)


def test_a_fit_with_another_global_batch_is_refused(tmp_path):
    supervise(tmp_path, lambda job: (5, "stopped"))
    with pytest.raises(InputError, match="its global batch is 16, and that of the run is 8"):
        supervise(tmp_path, finish, fit=replace(settings(tmp_path).fit, gpus=4))


def test_a_folder_of_another_fit_is_refused_with_what_helps(tmp_path):
    def find_fit(fit, listen):
        raise make_other_fit_error(fit.out / "report.json")

    with pytest.raises(InputError, match=r"report.json: belongs to another fit .*\n  name a fit .* by --fit"):
        supervise(tmp_path, finish, find_fit=find_fit)


def test_a_finished_run_makes_no_fit_for_other_ranks(tmp_path):
    supervise(tmp_path, finish)
    (tmp_path / "fit").mkdir()
    serialize.write(REPORT, tmp_path / "fit")
    asked = []
    result, _ = supervise(tmp_path, finish, find_fit=fits(asked), fit=replace(settings(tmp_path).fit, gpus=4))
    assert (result.status, asked) == ("done", [])


@pytest.mark.parametrize(
    ("given", "then"),
    [
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        (
            {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:True"},
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {}),
    ],
)
def test_the_allocator_grows_beside_the_users_settings(tmp_path, monkeypatch, given, then):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def answer(job):
        return (2, replace(out_of_memory(), fragmented=True)) if job.order.attempt == 1 else finish(job)

    fit = replace(settings(tmp_path).fit, device="cuda")
    _, launcher = supervise(tmp_path, answer, fit=fit)
    environments = [rank_environment(job, 0, 29500) for job in launcher.jobs]
    assert [{name: each[name] for name in given | then if name in each} for each in environments] == [
        given,
        given | then,
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_asks_the_ranks_to_save_and_to_stop(tmp_path, number, code):
    def answer(job):
        job.order.steps_file.touch()
        os.kill(os.getpid(), number)
        assert job.order.stop_file.exists()
        return 4, "stopped"

    result, _ = supervise(tmp_path, answer)
    assert (result.status, result.exit_code, result.step) == ("stopped", code, 4)
    result, launcher = supervise(tmp_path, finish)
    assert result.status == "done"
    assert launcher.jobs[0].order.restore.endswith("step-00000004")
    assert not (tmp_path / "stop").exists()


def test_a_signal_before_the_first_step_ends_at_once(tmp_path):
    def answer(job):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    result, _ = supervise(tmp_path, answer)
    assert (result.status, result.exit_code) == ("stopped", 143)
    assert result.attempts[0].ending == "interrupted"


def test_the_journal_has_a_line_for_each_event(tmp_path):
    supervise(tmp_path, lambda job: (3, out_of_memory()) if job.order.attempt == 1 else finish(job))
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    kinds = [row["kind"] for row in rows]
    expected = ["header", "workload", "prepared", "decided", "started", "saved", "ended", "decided", "started"]
    assert kinds[: len(expected)] == expected
    assert kinds[-1] == "ended"
    assert [row["step"] for row in rows if row["kind"] == "saved"] == [2, 4, 6, 8, 10]


def test_nothing_is_trained_where_nothing_fits(tmp_path):
    result, launcher = supervise(tmp_path, finish, report=FitReport(status="nothing_fits"))
    assert (result.status, result.exit_code) == ("nothing_fits", 1)
    assert launcher.jobs == []


def test_a_checkpoint_is_due_about_every_ten_minutes(tmp_path):
    assert settings(tmp_path, checkpoint_every=None).choose_interval(REPORT) == 600 // (4 / 8)


@pytest.mark.parametrize(
    "ds_config",
    [
        {"train_batch_size": 4},  # a pipeline of four stages
        {"tensor_parallel": {"autotp_size": 4}},  # which gets no total
    ],
)
def test_ranks_of_one_replica_count_once_in_the_time_of_a_step(tmp_path, ds_config):
    report = replace(REPORT, ds_config=ds_config, question=replace(REPORT.question, gpus=4))
    assert settings(tmp_path, checkpoint_every=None).choose_interval(report) == 600 // (4 / 8)
