"""`autods run`: a fit, then attempts to train with its config, each from the last checkpoint, until the run is done.

Read this module first. `run` opens the folder, the fit and the journal; `Supervisor.run` has the loop.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.deepspeed import BATCH_KEYS, count_replicas
from ..config.settings import Settings, apply_survey, count_nodes
from ..errors import DiskFull, EnvironmentBroken, InputError
from ..events import AttemptStarted, Note, RunListener
from ..forecast.simulation_cache import read_alloc_conf
from ..journal import RUN_JOURNAL, check_disk_space, is_journal, record_warnings, workspace
from ..rank.job import JOB_FILE, RunOrder, read_job
from ..rank.record import RunResult
from ..rank.training_run.checkpoints import (
    Layout,
    SavedCheckpoint,
    find_damage,
    find_obstacle,
    list_checkpoints,
    remove_checkpoint,
    remove_torn,
)
from ..rank.training_run.session import NO_SESSION
from ..report.answers.remedies import describe_way_out
from ..report.answers.run import make_run_document
from ..report.render_html import RUN_PAGE, write_page
from ..report.results.fit import FitReport
from ..report.results.run import RunReport, parse_steps, read_steps, summarize_steps
from ..report.serialize import RUN, write_run
from ..report.text import format_outcome
from ..runner.cluster_check import NoCluster
from ..runner.placement import count_ranks
from ..runner.runner import RayRunner
from ..tuner.candidates import list_candidates
from ..tuner.fit import fit
from ..types import Failed, ModelFacts, OutOfMemory, may_have_lost_device
from ..workload.protocol import WorkloadError
from .attempt import (
    RunnerSession,
    StartRunner,
    StopRequest,
    judge_attempt,
)
from .known_rungs import gather_known_rungs
from .progress import AttemptProgress
from .rescue import NextConfig, RunFailure, Situation, decide
from .room import Room, await_cluster
from .run_journal import Attempt, AttemptEnd, Decision, Prepared, RunConfig, RunHistory, RunJournal, list_rows
from .run_settings import FindFit, RunSettings, read_save_s, read_step_s, take_fit

# What a run writes into its folder, the journal last: it tells whose the others are.
_FILES, _FOLDERS = (RUN, RUN_PAGE, RUN_JOURNAL), ("checkpoints", "attempts", "logs")
_STOP_WITHIN_S = 120.0  # beyond the steps and saves that a request to stop waits for
_STEPS_UNTIL_STOP = 3  # the ranks report a step, agree while the next one runs, and may be in one already
CountRanks = Callable[[Settings], int | None]


def run(
    settings: RunSettings,
    *,
    listen: RunListener,
    start: StartRunner = RayRunner,
    find_fit: FindFit | None = None,
    count_ranks: CountRanks = count_ranks,
) -> RunReport:
    """Train until the run is done, is stopped, or cannot go on; return its report. run.json and run.html hold it, too.

    `start`, `find_fit` and `count_ranks` replace Ray, the fit and the look at the machines. The ranks of the run come
    from the Ray and the zygotes of its fit, where that had to be made. Raises InputError for other options than those
    of the run in the folder, EnvironmentBroken where nothing can be started, and Interrupted for a signal before the
    first step.
    """
    with workspace(settings.out, fresh=False, user="run") as out:
        _check_not_foreign(out)
        if settings.fresh:
            _forget(out)
        journal = RunJournal(out)
        history = journal.open(settings.identity)
        (out / "stop").unlink(missing_ok=True)
        listen = record_warnings(listen, history.warnings, journal.warn)
        source = settings.fit.source
        if journal.note_workload(source.digest):
            text = f"{source.path} has changed since the last call: the run goes on with what it is now"
            listen(Note(text=f"{text}, and --fresh begins anew", warns=True))
        with contextlib.closing(RunnerSession(start, listen)) as session:
            fitting = find_fit or (lambda settings, listen: fit(settings, listen=listen, start=session.lend))
            settings, report = take_fit(settings, history, listen, fitting, keep=settings.is_done(history))
            if report.status != "fit":
                why = describe_way_out(report.partitioned) or "no config fits"
                reason = f"{why}: autods report {settings.fit.out} shows why"
                return RunReport(
                    status="nothing_fits", exit_code=1, reason=reason, fit=str(settings.fit.out), out=str(out)
                )
            stopping = StopRequest()
            room = Room(listen=listen, is_stopping=lambda: stopping.number is not None)
            journal.await_room = room.await_for
            supervisor = Supervisor(
                settings=settings,
                journal=journal,
                report=report,
                listen=listen,
                session=session,
                count_ranks=count_ranks,
                stopping=stopping,
                room=room,
            )
            with stopping.listen(), contextlib.closing(session):  # signals are heard until the ranks are gone
                result = supervisor.run()
                try:
                    room.await_for(lambda: write_run(result))
                    room.await_for(lambda: write_page(make_run_document(result, out), out / RUN_PAGE))
                except DiskFull as error:
                    if result.status != "stopped":
                        raise
                    listen(Note(text=f"{str(error).splitlines()[0]}: the run stops without a report", warns=True))
            return result


def _check_not_foreign(out: Path) -> None:
    """Raises InputError for a folder with files of the user's that a run would write over or remove."""
    held = [name for name in (*_FILES, *_FOLDERS) if os.path.lexists(out / name)]
    if held and not is_journal(out / RUN_JOURNAL):
        problem = f"holds {held[0]} and no journal of a run, so nothing is written over or removed"
        raise InputError(problem, place=str(out), hint="give another --out, such as a new folder in it")


def _forget(out: Path) -> None:
    """Remove the run of this folder; the fit stays."""
    for name in _FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    for name in _FILES:
        (out / name).unlink(missing_ok=True)


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """One call of the command. `stopping` is the request to stop, by a signal. `room` waits while the disk is full."""

    settings: RunSettings
    journal: RunJournal
    report: FitReport
    listen: RunListener
    session: RunnerSession
    count_ranks: CountRanks
    stopping: StopRequest
    room: Room
    last_hang: str | None = None
    earlier: int = 0  # attempts before this call
    _ranks_left: int | None = None

    @property
    def history(self) -> RunHistory:
        """What the journal says."""
        return self.journal.history

    def run(self) -> RunReport:
        """Attempt after attempt, until one ends well or none can."""
        self._close_interrupted()
        self.earlier = len(self.history.attempts)
        if self.settings.is_done(self.history):
            self.listen(Note(text=f"this run is done (--fresh forgets it): {self.settings.out}"))
            return self._summarize("done", 0)
        self._report_lost_checkpoints()
        try:
            self._prepare()
            while True:
                config = self._choose_config()
                if isinstance(config, RunFailure):
                    return self._summarize("failed", config.exit_code, config.reason, config.advice)
                self._check_ladder(config.rung)
                end = self._attempt(config)
                if end.ending == "done":
                    self._report_early_end(end)
                    return self._summarize("done", 0)
                # One that failed while it was to stop has left its last checkpoint.
                if end.ending == "stopped" or self.stopping.number is not None:
                    return self._summarize("stopped", 128 + (self.stopping.number or signal.SIGINT))
        except (KeyboardInterrupt, DiskFull) as ended:
            if isinstance(ended, DiskFull) and self.stopping.number is None:
                raise
            with contextlib.suppress(DiskFull):  # the next call closes the attempt
                self._close_interrupted()
            return self._summarize("stopped", 128 + (self.stopping.number or signal.SIGINT))

    def _close_interrupted(self) -> None:
        """Write down the end of an attempt during which the driver was killed or interrupted."""
        if self.history.attempts and (last := self.history.attempts[-1]).ending is None:
            file, step, seconds = self._attempt_folder(last.number) / "steps.jsonl", last.first_step, 0.0
            with contextlib.suppress(OSError):
                seconds = max(0.0, file.stat().st_mtime - last.began)
                steps = parse_steps(file.read_text(errors="replace").splitlines())
                step = max((done.step for done in steps), default=step)
            self.journal.end_attempt(AttemptEnd(ending="interrupted", last_step=step, seconds=seconds))

    def _report_lost_checkpoints(self) -> None:
        """Warn where checkpoints are gone that the last attempt still had: its steps are done once more."""
        history, step = self.history, self._saved_step
        known = max(history.saved_steps, default=0)
        if history.attempts and step < known <= history.attempts[-1].last_step:
            text = f"the checkpoint of step {known} is gone or torn: the run goes on at step {step}"
            self.listen(Note(text=text, warns=True))

    def _report_early_end(self, end: AttemptEnd) -> None:
        """Warn where the training ended by itself before the steps that were asked for: they stay undone."""
        steps = self.settings.steps
        if steps is not None and 0 < end.last_step < steps:
            text = f"the training ended by itself at step {end.last_step:,}, before step {steps:,} of --steps"
            self.listen(Note(text=text, warns=True))

    def _check_ladder(self, rung: str) -> None:
        """Raises InputError where the ladder that was asked for lacks the rung to train."""
        if rung not in [each.name for each in self.settings.fit.ladder]:
            problem = f"trains with {rung}, which is not in the ladder of this command"
            hint = f"add --with {rung} to go on, or --fresh to begin anew"
            raise InputError(problem, place=str(self.settings.out), hint=hint)

    def _prepare(self) -> None:
        """The survey of the workload, once in a run, and the config of the fit as the first decision."""
        fit, report = self.settings.fit, self.report
        assert report.rung is not None
        assert report.knobs is not None
        if self.history.prepared is None:
            settings = replace(fit, out=self.settings.out)
            facts, problems = self.session.open(settings).switch_to(settings)
            self.journal.prepare(Prepared(facts=facts, op_problems=problems, fit=str(fit.out)))
        elif self.history.prepared.fit != str(fit.out):
            self.journal.prepare(replace(self.history.prepared, fit=str(fit.out)))
        replicas = count_replicas(apply_survey(fit, self._facts).base, fit.gpus, self._facts)
        config = RunConfig(
            rung=report.rung, knobs=report.knobs, world_size=fit.gpus, replica_ranks=fit.gpus // replicas
        )
        if not self.history.decisions:
            self.journal.decide(Decision(config=config, changed="the config of the fit"))
        elif self._may_have_ranks(fit.gpus):
            self._change_ranks(config)

    def _may_have_ranks(self, ranks: int) -> bool:
        """Whether the run is to go on with this number of ranks: wanted now, or lost before and back again."""
        history = self.history
        if ranks != history.ranks_asked:
            return True
        if history.decisions[-1].config.world_size == ranks:
            return False
        room = self.count_ranks(self.settings.fit)
        return room is None or room >= ranks

    def _change_ranks(self, config: RunConfig) -> None:
        """Go on with the fit's config, or with the last that these ranks had where it ran out of memory before."""
        history, last = self.history, self.history.decisions[-1]
        if config in history.failed:
            used = [each.config for each in history.decisions if each.config.world_size == config.world_size]
            config = used[-1]
        decision = Decision(
            config=config,
            changed=f"world size {config.world_size} instead of {last.config.world_size}",
            after_attempt=len(history.attempts),
            step=self._saved_step,
            growth_bytes=last.growth_bytes,
        )
        self.journal.decide(decision)
        self.listen(Note(text=f"{decision.changed}; the run goes on at step {decision.step}"))

    def _choose_config(self) -> RunConfig | RunFailure:
        """The last decided config, or what follows the failure after which nothing was decided yet."""
        history, decision = self.history, self.history.decisions[-1]
        last = history.attempts[-1] if history.attempts else None
        if last is None or last.cause is None or decision.after_attempt == last.number:
            return decision.config
        may_be_mended = last.number <= self.earlier  # since the command ended with it
        if isinstance(last.cause, Failed) and may_be_mended:
            return decision.config
        saved, saved_step = self._latest(), self._saved_step
        before = max((each.step for each in history.decisions), default=0)
        assert history.prepared is not None
        fit = apply_survey(self.settings.fit, self._facts)
        ladder = list_candidates(fit, self._facts, history.prepared.op_problems)
        situation = Situation(
            config=decision.config,
            known_rungs=gather_known_rungs(self.report, ladder),
            failed=history.failed,
            rescues=len(history.rescues),
            most_rescues=self.settings.most_rescues,
            repeats=decision.repeats,
            progressed=saved_step > before,
            ranks_left=self._ranks_left,
            ranks_per_node=self.settings.fit.ranks_per_node if self.settings.fit.nodes > 1 else None,
            device_bytes=self.settings.fit.device_bytes,
            growth_bytes=decision.growth_bytes,
            can_recompute=self._facts.checkpointing,
            may_expand=read_alloc_conf(os.environ, fit.device).expandable is None,
            last_hang=self.last_hang,
            find_obstacle=lambda config: self._find_obstacle(config, saved),
            find_damage=self._find_damage,
        )
        chosen = decide(last.cause, situation)
        self.last_hang = last.cause.hung_at if isinstance(last.cause, Failed) else None
        if isinstance(chosen, RunFailure):
            # Somebody may have made room since: shorter samples, or a device without other processes.
            may_retry = may_be_mended and situation.rescues < situation.most_rescues
            return decision.config if may_retry else chosen
        if chosen.damage is not None:
            self._drop_damaged(chosen.damage)
        self._adopt(chosen, situation, after=last.number, step=self._saved_step)
        return chosen.config

    def _find_damage(self) -> str | None:
        """What is damaged of the last checkpoint, where the one before it is whole."""
        saved = list_checkpoints(self.settings.out / "checkpoints").complete
        if len(saved) < 2 or (damage := find_damage(saved[-1])) is None:
            return None
        return damage if find_damage(saved[-2]) is None else None

    def _drop_damaged(self, damage: str) -> None:
        """Remove the last checkpoint, as torn ones are."""
        saved = self._latest()
        assert saved is not None
        remove_checkpoint(saved.path)
        self.listen(Note(text=f"{saved.path.name} was removed, for it is damaged: {damage}", warns=True))

    def _adopt(self, chosen: NextConfig, situation: Situation, *, after: int, step: int) -> None:
        repeats = 0 if chosen.is_leaner else (1 if situation.progressed else situation.repeats + 1)
        self.journal.decide(
            Decision(
                config=chosen.config,
                changed=chosen.changed,
                after_attempt=after,
                step=step,
                growth_bytes=max(chosen.growth_bytes, situation.growth_bytes),
                repeats=repeats,
                is_rescue=True,
            )
        )
        self.listen(Note(text=f"rescue {len(self.history.rescues)}: {chosen.changed}; the run goes on at step {step}"))

    # One attempt.

    def _attempt(self, config: RunConfig) -> AttemptEnd:
        """Train with this config until it ends, and write down how it did."""
        for torn in remove_torn(self.settings.out / "checkpoints"):
            self.listen(Note(text=f"{torn.path.name} was removed: {torn.reason}"))
        self.room.await_for(lambda: check_disk_space(self.settings.out))
        number, first_step, began = len(self.history.attempts) + 1, self._saved_step, time.monotonic()
        self.journal.start_attempt(
            Attempt(number=number, config=config, first_step=first_step, began=time.time(), last_step=first_step)
        )
        progress = AttemptProgress(
            self._attempt_folder(number),
            first_step,
            settings=self.settings,
            device_bytes=self.settings.fit.find_limit(config.knobs),
            journal=self.journal,
            listen=self.listen,
        )
        try:
            result = self._train(config, number, progress)
        except (EnvironmentBroken, NoCluster) as error:
            if isinstance(error, DiskFull) and self.session.runner is not None:  # the wait for room is over
                raise
            result = self._lose_session(error)
        progress.finish()
        end = judge_attempt(result, seen_step=progress.step, seconds=time.monotonic() - began)
        self.journal.end_attempt(end)
        if end.cause is not None:
            self.listen(Note(text=f"attempt {number} ended at step {end.last_step}: {format_outcome(end.cause)}"))
            self._ranks_left = self._count_ranks_left(end.cause, config)
        return end

    def _train(self, config: RunConfig, number: int, progress: AttemptProgress) -> RunResult | OutOfMemory | Failed:
        """Start the ranks and wait for their end. Raises EnvironmentBroken where they cannot be started."""
        runner = self.session.open(self._settings_for(config), facts=self._facts)
        saved = self._latest()
        order = RunOrder(
            folder=str(self.settings.out),
            attempt=number,
            steps=self.settings.steps,
            checkpoint_every=self.settings.choose_interval(self.report),
            loads_in_ranks=config.loads_in_ranks,
            restore=None if saved is None else str(saved.path),
            data=self.settings.data,
        )
        job = runner.run_job(order, config.rung, config.knobs)
        self.room.await_for(job.write)
        batch = f"{config.knobs.micro_batch} × {config.knobs.accumulation} × {config.world_size}"
        batch = f"{batch} = {config.global_batch}, from step {progress.step}"
        self.listen(Note(text=f"attempt {number}: {config.rung}, {batch}"))
        self.listen(AttemptStarted(number=number, first_step=progress.step, steps=self.settings.steps))
        with self.stopping.during(order, lambda: self._limit_stop(progress)):
            result = runner.run_attempt(job, progress.look)
        if isinstance(result, RunResult) and result.step is None:
            self.journal.warn(NO_SESSION)  # the rank has said so when it began
        return result

    def _limit_stop(self, progress: AttemptProgress) -> float:
        """Return the seconds until ranks that were asked to stop are ended without a checkpoint."""
        saved = self._latest()
        save_s = max(read_save_s(self.report), saved.manifest.save_s if saved is not None else 0.0)
        step_s = max(read_step_s(self.report), progress.slowest_step_s)
        return _STOP_WITHIN_S + _STEPS_UNTIL_STOP * step_s + 2 * save_s

    def _lose_session(self, error: EnvironmentBroken | NoCluster) -> Failed:
        """The failure of an attempt whose Ray or nodes are gone. Raises the error where none of them ever ran."""
        if self.session.runner is None and not any(each.last_step > each.first_step for each in self.history.attempts):
            first_step = self.history.attempts[-1].first_step
            self.journal.end_attempt(AttemptEnd(ending="interrupted", last_step=first_step, seconds=0.0))
            raise error
        with contextlib.suppress(Exception):  # what is gone cannot be ended well; its guard ends the rest
            self.session.close()
        evidence, _, remedy = str(error).partition("\n")
        return Failed(
            failure="infrastructure", rank=-1, phase="start", evidence=evidence, action="retry",
            advice=remedy.strip() or "the same command goes on",
        )  # fmt: skip

    def _settings_for(self, config: RunConfig) -> Settings:
        """The fit's settings with this number of ranks, in the run's folder."""
        fit = self.settings.fit
        nodes, base = count_nodes(config.world_size, fit.ranks_per_node), fit.base
        if config.world_size != fit.gpus and not self._facts.pipeline_stages:  # the user's sizes are for other ranks
            sizes = (config.global_batch, config.knobs.micro_batch, config.knobs.accumulation)
            base = {**base, **dict(zip(BATCH_KEYS, sizes, strict=True))}
        return replace(fit, gpus=config.world_size, nodes=nodes, base=base, out=self.settings.out)

    def _count_ranks_left(self, cause: OutOfMemory | Failed, config: RunConfig) -> int | None:
        """The ranks that the machines still hold after a failure that a lost card or node could explain; None: all."""
        if not may_have_lost_device(cause):
            return None
        fit = self.settings.fit
        room = self.count_ranks(fit)
        if room is None and fit.address is not None and self.session.runner is None:
            room = await_cluster(lambda: self.count_ranks(fit), config.world_size, listen=self.listen)
        return room if room is not None and room < config.world_size else None

    # What is known.

    @property
    def _facts(self) -> ModelFacts:
        assert self.history.prepared is not None
        return self.history.prepared.facts

    def _latest(self) -> SavedCheckpoint | None:
        return list_checkpoints(self.settings.out / "checkpoints").latest

    @property
    def _saved_step(self) -> int:
        """The optimizer step of the last checkpoint; 0 without one."""
        saved = self._latest()
        return saved.step if saved is not None else 0

    def _attempt_folder(self, number: int) -> Path:
        return self.settings.out / "attempts" / str(number)

    def _find_obstacle(self, config: RunConfig, saved: SavedCheckpoint | None) -> str | None:
        if saved is None:
            return None
        layout = replace(saved.layout, world_size=config.world_size)  # all that is known where the session is lost
        if self.session.runner is not None:
            ds_config = self.session.runner.run_config(config.rung, config.knobs)
            layout = Layout.from_config(ds_config, config.world_size, divided=saved.layout.divided)
        return find_obstacle(saved, layout)

    def _summarize(self, status: Any, exit_code: int, reason: str = "", advice: str = "") -> RunReport:
        history, saved, of_config = self.history, self._latest(), dict[str, Any]()
        if history.attempts:
            config = history.attempts[-1].config
            of_config = {
                "global_batch": config.global_batch, "rung": config.rung, "knobs": config.knobs,
                "world_size": config.world_size,
            }  # fmt: skip
        with contextlib.suppress(WorkloadError):
            of_config["ds_config"] = read_job(self._attempt_folder(len(history.attempts)) / JOB_FILE).ds_config
        attempts = list_rows(history)
        return RunReport(
            status=status,
            exit_code=exit_code,
            reason=reason,
            advice=advice,
            step=self._saved_step,
            steps=self.settings.steps,
            workload=self.settings.fit.source.name,
            parameters=self.report.question.parameters,
            device_bytes=self.settings.fit.device_bytes,
            attempts=attempts,
            **summarize_steps(read_steps(self.settings.out), attempts),
            rescues=len(history.rescues),
            warnings=tuple(history.warnings),
            checkpoint=str(saved.path) if saved is not None else None,
            fit=str(self.settings.fit.out),
            out=str(self.settings.out),
            **of_config,
        )
