"""A launcher for tests of the supervisor: a function decides how each attempt ends, without Ray, ranks or memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, Self

from autods.config.settings import Settings
from autods.events import RunListener
from autods.rank.job import RankJob, RunOrder
from autods.rank.record import RunResult
from autods.rank.training_run.checkpoints import Layout, Manifest, checkpoint_folder, write_manifest
from autods.runner.runner import RayRunner, Survey
from autods.types import Failed, ModelFacts, OutOfMemory

Answer = Callable[[RankJob], tuple[int, OutOfMemory | Failed | RunResult | Literal["done", "stopped"]]]


class ScriptedLauncher:
    """Starts runners that train by `answer(job)`: the last step of an attempt, and 'done', 'stopped', rank 0's result
    or why its ranks failed.

    Steps are written to steps.jsonl, and checkpoints when they are due. `jobs` lists the jobs.
    """

    def __init__(self, answer: Answer, facts: ModelFacts) -> None:
        self.jobs: list[RankJob] = []
        self.settings: list[Settings] = []  # those of each session
        self.answer, self.facts = answer, facts

    def start(self, settings: Settings, listen: RunListener) -> ScriptedRayRunner:
        """Begin a session."""
        self.settings.append(settings)
        return ScriptedRayRunner(self, settings, listen)


class ScriptedRayRunner(RayRunner):
    """A runner of real jobs without Ray, ranks or memory."""

    def __init__(self, launcher: ScriptedLauncher, settings: Settings, listen: RunListener) -> None:
        super().__init__(settings, listen)
        self._launcher = launcher

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def switch_to(self, settings: Settings) -> Survey:
        """The given facts."""
        self.settings = settings
        self.adopt(self._launcher.facts)
        return Survey(self._launcher.facts, {})

    def run_attempt(self, job: RankJob, on_progress: Callable[[Any], None]) -> RunResult | OutOfMemory | Failed:
        """Do the steps of an attempt."""
        self._launcher.jobs.append(job)
        order = job.order
        assert order is not None
        first = 0 if order.restore is None else int(order.restore.rpartition("-")[2])
        last, end = self._launcher.answer(job)
        for step in range(first + 1, last + 1):
            line = {"step": step, "loss": 1.0 / step, "seconds": 0.1, "device_peak_bytes": 100}
            with open(order.steps_file, "a") as file:
                file.write(json.dumps(line) + "\n")
            if step % order.checkpoint_every == 0 or step == order.steps:
                _write_checkpoint(job, order, step)
            on_progress(None)
        return RunResult(ended=end, step=last) if isinstance(end, str) else end


def _write_checkpoint(job: RankJob, order: RunOrder, step: int) -> None:
    folder = checkpoint_folder(order.checkpoints, step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "states").write_text("states")
    manifest = Manifest(
        step=step,
        samples=step * job.train_batch,
        global_batch=job.train_batch,
        seed=job.seed,
        layout=Layout.from_config(job.ds_config, job.world_size),
        optimizer="Adam",
        files={"states": 6},
    )
    write_manifest(folder, manifest)
