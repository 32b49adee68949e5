"""A launcher for tests of the supervisor: a function decides how each attempt ends, without Ray, ranks or memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from ..config.settings import Settings
from ..rank.job import RankJob, RunOrder
from ..rank.result import RunResult
from ..rank.training_run.checkpoints import Layout, Manifest, checkpoint_folder, write_manifest
from ..types import Failed, Knobs, ModelFacts, OutOfMemory

Answer = Callable[[RankJob], tuple[int, OutOfMemory | Failed | RunResult | Literal["done", "stopped"]]]


class ScriptedLauncher:
    """Trains by `answer(job)`: the last step of an attempt, and 'done', 'stopped', rank 0's result or why its ranks
    failed.

    Steps are written to steps.jsonl, and checkpoints when they are due. `jobs` lists the jobs; a context manager, which
    may be entered again.
    """

    def __init__(self, answer: Answer, facts: ModelFacts) -> None:
        self.jobs: list[RankJob] = []
        self.starts: list[Mapping[str, str]] = []  # the environment of each session
        self.settings: list[Settings] = []  # those of each session
        self._answer, self._facts = answer, facts

    def start(self, settings: Settings, environment: Mapping[str, str], listen: Any) -> Self:
        """Begin a session."""
        self.starts.append(environment)
        self.settings.append(settings)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        """The given facts."""
        return self._facts, {}

    def adopt(self, facts: ModelFacts) -> None:
        """The facts are known."""

    def run_config(self, rung: str, knobs: Knobs) -> dict[str, Any]:
        """A config that names the stage of the rung."""
        return {"zero_optimization": {"stage": int(rung[4]) if rung.startswith("zero") else 0}}

    def run_job(self, order: RunOrder, rung: str, knobs: Knobs) -> RankJob:
        """The job of the last session's ranks."""
        settings, folder = self.settings[-1], order.attempt_folder / "ranks"
        return RankJob(
            job="run",
            source=settings.source,
            device=settings.device,
            folder=str(folder),
            scratch=str(folder / "scratch"),
            world_size=settings.gpus,
            replica_ranks=self._facts.replica_ranks,
            ds_config=self.run_config(rung, knobs),
            micro_batch=knobs.micro_batch,
            accumulation=knobs.accumulation,
            checkpointing=knobs.checkpointing,
            seed=settings.seed,
            order=order,
        )

    def run_attempt(self, job: RankJob, on_progress: Callable[[Any], None]) -> RunResult | OutOfMemory | Failed:
        """Do the steps of an attempt."""
        self.jobs.append(job)
        order = job.order
        assert order is not None
        first = 0 if order.restore is None else int(order.restore.rpartition("-")[2])
        last, end = self._answer(job)
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
