"""Runners for trials under several conditions: one runner, and so one zygote, for each environment of the ranks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence

from ..events import Event, Note
from ..settings import Settings
from ..values import ModelFacts, Record, Scalar, Trial
from ..workload.conditions import environment_of, settings_under
from .ray_session import is_connected, session
from .runner import RayRunner

_MOST_ALIVE = 4  # each idle zygote holds some 300 MiB of the host


class RunnerPool:
    """A context manager. `run` answers a trial under its own `conditions`; ranks and arguments need no new zygote.

    Zygotes of CPU ranks stay for the next turn, the one that rested longest goes first; cards belong to one at a time.
    environments: how many different ones will be asked for.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        host_bytes: int | None = None,
        environments: int = 1,
        make: Callable[..., RayRunner] = RayRunner,
    ) -> None:
        self.settings, self.listen, self.host_bytes = settings, listen, host_bytes
        self.environments, self.make = environments, make
        self.most_alive = _MOST_ALIVE if settings.device == "cpu" else 1
        self.alive: dict[str, RayRunner] = {}  # the one that was used last is the last
        self.exits = contextlib.ExitStack()
        self.ray_is_shared = False

    def __enter__(self) -> RunnerPool:
        return self  # Ray starts with the first trial that no journal can answer

    def __exit__(self, *exception: object) -> None:
        with self.exits:
            for key in reversed(tuple(self.alive)):
                self.alive.pop(key).__exit__(*exception)

    def survey(self, conditions: Mapping[str, Scalar]) -> tuple[ModelFacts, Mapping[str, str]]:
        """What the workload is with these arguments; see `RayRunner.survey`."""
        return self._runner(conditions).turn_to(settings_under(self.settings, conditions))

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run the trial for real."""
        runner = self._runner(trial.conditions)
        runner.turn_to(settings_under(self.settings, trial.conditions))
        return runner.run(trial, id=id)

    def order(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials as they need the fewest new zygotes: as they are, where all environments stay alive."""
        if self.environments <= self.most_alive:
            return list(trials)
        last = next(reversed(self.alive), None)
        keys = list(dict.fromkeys(_key(trial.conditions) for trial in trials))
        keys.sort(key=lambda key: key != last)  # the one that is alive comes first
        return sorted(trials, key=lambda trial: keys.index(_key(trial.conditions)))

    def _runner(self, conditions: Mapping[str, Scalar]) -> RayRunner:
        key = _key(conditions)
        runner = self.alive.pop(key, None)
        if runner is None:
            self._share_ray()
            while len(self.alive) >= self.most_alive:
                self.alive.pop(next(iter(self.alive))).__exit__(None, None, None)
            runner = self._started(environment_of(conditions))
        self.alive[key] = runner
        return runner

    def _share_ray(self) -> None:
        """Ray has to outlive each of several runners, and have a processor for all that are alive."""
        if self.environments < 2 or self.ray_is_shared:
            return
        self.ray_is_shared = True
        if self.settings.address is not None or is_connected():
            self.most_alive = 1  # whose cluster it is says how many processors we may hold
        if not is_connected():
            cpus = max(2, os.cpu_count() or 2, self.most_alive)
            self.exits.enter_context(session(cpus=cpus, address=self.settings.address))

    def _started(self, environment: Mapping[str, str]) -> RayRunner:
        if environment:
            said = " ".join(f"{name}={value}" for name, value in environment.items())
            self.listen(Note(text=f"ranks with {said}"))
        runner = self.make(self.settings, self.listen, host_bytes=self.host_bytes, environment=environment)
        return runner.__enter__()


def _key(conditions: Mapping[str, Scalar]) -> str:
    return json.dumps(environment_of(conditions), sort_keys=True)
