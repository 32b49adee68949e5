"""A launcher for tests of the supervisor: a function decides how each attempt ends, without Ray, ranks or memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Self

from ..config.settings import Settings
from ..rank.training_run.checkpoints import Layout, Manifest, checkpoint_folder, write_manifest
from ..rank.training_run.order import RunOrder
from ..types import Failed, ModelFacts, OutOfMemory, Trial

Answer = Callable[[RunOrder, Trial], tuple[int, OutOfMemory | Failed | Mapping[str, Any] | str]]


class ScriptedLauncher:
    """Trains by `answer(order, trial)`: the last step of an attempt, and 'done', 'stopped', rank 0's result or why
    its ranks failed.

    Steps are written to steps.jsonl, and checkpoints when they are due. `orders` lists the orders; a context manager,
    which may be entered again.
    """

    def __init__(self, answer: Answer, facts: ModelFacts) -> None:
        self.orders: list[RunOrder] = []
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

    def run_config(self, trial: Trial) -> dict[str, Any]:
        """A config that names the stage of the rung."""
        return {"zero_optimization": {"stage": int(trial.rung[4]) if trial.rung.startswith("zero") else 0}}

    def run_attempt(
        self, order: RunOrder, trial: Trial, on_progress: Callable[[Any], None]
    ) -> Mapping[str, Any] | OutOfMemory | Failed:
        """Do the steps of an attempt."""
        self.orders.append(order)
        first = 0 if order.restore is None else int(order.restore.rpartition("-")[2])
        last, end = self._answer(order, trial)
        for step in range(first + 1, last + 1):
            line = {"step": step, "loss": 1.0 / step, "seconds": 0.1, "device_peak_bytes": 100}
            with open(order.steps_file, "a") as file:
                file.write(json.dumps(line) + "\n")
            if step % order.checkpoint_every == 0 or step == order.steps:
                _write_checkpoint(order, step)
            on_progress(None)
        return {"ended": end, "step": last} if isinstance(end, str) else end


def _write_checkpoint(order: RunOrder, step: int) -> None:
    folder = checkpoint_folder(order.checkpoints, step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "states").write_text("states")
    manifest = Manifest(
        step=step,
        samples=step * order.global_batch,
        global_batch=order.global_batch,
        seed=order.seed,
        layout=Layout.from_config(order.ds_config, order.world_size),
        optimizer="Adam",
        files={"states": 6},
    )
    write_manifest(folder, manifest)
