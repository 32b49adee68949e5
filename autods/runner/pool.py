"""Several runners on one machine, which take turns where trials would disturb each other."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from ..events import Event, Note
from ..requests import Settings
from ..types import Fit, ModelFacts, Outcome, OutOfMemory, Record, Scalar, Trial
from ..units import format_bytes
from ..workload.conditions import apply_conditions, environment_variables
from .placement import NoRoom
from .ray_connect import is_connected, session
from .runner import RayRunner


@dataclass(slots=True, eq=False)
class Turn:
    """A trial under way, itself alone: two on the same machines are never one. others: how many ran on one of its
    machines meanwhile."""

    hosts: frozenset[str]
    others: int = 0


class Turns:
    """Shared by all who run trials; may be used from any thread. `beside` runs a trial as others do, `alone` waits for
    them to end and holds back those that come.

    Once it is stopped, every trial ends in KeyboardInterrupt: it was no fault of the trial.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._changed = threading.Condition()
        self._running: list[Turn] = []
        self._one_alone = False

    @contextmanager
    def beside(self, hosts: frozenset[str]) -> Iterator[Turn]:
        """A trial on these machines."""
        own = Turn(hosts)
        with self._changed:
            self._changed.wait_for(lambda: not self._one_alone or self.stopped)
            for other in self._running:
                if other.hosts & hosts:
                    other.others, own.others = other.others + 1, own.others + 1
            self._running.append(own)
        with self._until_stopped():
            try:
                yield own
            finally:
                with self._changed:
                    self._running.remove(own)
                    self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A trial with nothing beside it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._one_alone or self.stopped)
            self._one_alone = True
        with self._until_stopped():
            try:
                with self._changed:
                    self._changed.wait_for(lambda: not self._running or self.stopped)
                yield
            finally:
                with self._changed:
                    self._one_alone = False
                    self._changed.notify_all()

    def stop(self) -> None:
        """No trial begins any more, and what those that run still say does not count."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        try:
            self._check()
            yield
        except Exception:
            self._check()
            raise
        self._check()

    def _check(self) -> None:
        if self.stopped:
            raise KeyboardInterrupt


def may_be_theirs(outcome: Outcome) -> bool:
    """Whether trials on the same machine may be why it failed: they share the host's memory, its processors and its
    network. A device's memory is each one's own."""
    match outcome:
        case Fit():
            return False
        case OutOfMemory(tier=tier):
            return tier != "device"
        case _:
            return outcome.failure in ("memory_pressure", "infrastructure", "communication", "secondary", "unknown")


_MOST_ALIVE = 4  # each idle zygote holds some 300 MiB of the host


class RunnerPool:
    """A context manager. `run` answers a trial under its own `conditions`; ranks and arguments need no new zygote.

    Zygotes of CPU ranks stay for the next turn, the one that rested longest goes first; cards belong to one at a time.
    environments: how many different ones will be asked for. number, turns: see `another`.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        host_bytes: int | None = None,
        environments: int = 1,
        make: Callable[..., RayRunner] = RayRunner,
        number: int = 0,
        turns: Turns | None = None,
    ) -> None:
        self.settings, self.listen, self.host_bytes = settings, listen, host_bytes
        self.environments, self.make = environments, make
        self.number, self.turns = number, turns or Turns()
        self.others: list[RunnerPool] = []
        self.hosts: frozenset[str] = frozenset()  # machines that it holds
        self.has_room = not number
        self._counting = threading.Lock()
        self.most_alive = _MOST_ALIVE if settings.device == "cpu" and not number else 1
        self.alive: dict[str, RayRunner] = {}  # the one that was used last is the last
        self.exits = contextlib.ExitStack()
        self.ray_is_shared = bool(number)

    def __enter__(self) -> RunnerPool:
        return self  # Ray starts with the first trial that no journal can answer

    def __exit__(self, *exception: object) -> None:
        self.hosts = frozenset()
        with self.exits:
            for key in reversed(tuple(self.alive)):
                self.alive.pop(key).__exit__(*exception)

    def survey(self, conditions: Mapping[str, Scalar]) -> tuple[ModelFacts, Mapping[str, str]]:
        """What the workload is with these arguments; see `RayRunner.survey`."""
        return self._runner(conditions).turn_to(apply_conditions(self.settings, conditions))

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run the trial for real; once more and alone, where it may have failed of others that ran beside it."""
        runner = self._runner(trial.conditions)
        with self.turns.beside(runner.nodes.hosts) as turn:
            runner.turn_to(apply_conditions(self.settings, trial.conditions))
            record = runner.run(trial, id=id)
        if not turn.others or not may_be_theirs(record.outcome):
            return replace(record, beside=turn.others)
        self.listen(Note(text=f"trial {id} shared its machine with another when it failed: it runs again, alone"))
        with self.turns.alone():
            return runner.run(trial, id=id)

    def another(self, conditions: Mapping[str, Scalar]) -> AbstractContextManager[RunnerPool]:
        """One more, on processors or cards that are free now, for trials beside ours, which begin with these
        conditions. To be entered from the thread that runs them.

        Raises NoRoom where nothing is free. CPU ranks take their memory from the host: all budgets have to find room.
        """
        self._runner(conditions)  # whose Ray they share
        other = RunnerPool(
            self.settings, self.listen, host_bytes=self.host_bytes, environments=self.environments, make=self.make,
            number=len(self.others) + 1, turns=self.turns,
        )  # fmt: skip
        self.others.append(other)
        return self._beside(other, conditions)

    @contextlib.contextmanager
    def _beside(self, other: RunnerPool, conditions: Mapping[str, Scalar]) -> Iterator[RunnerPool]:
        with other:
            runner = other._runner(conditions)
            with self._counting:  # who comes counts those that have found room, in whichever order they come
                on = [pool.hosts for pool in (self, *self.others) if pool.has_room or pool is other]
                check_memory(self.settings, on, runner.nodes.host_free_bytes)
                other.has_room = True
            yield other

    def stop(self) -> None:
        """End all trials, from any thread: ours and those beside us, which end in KeyboardInterrupt."""
        self.turns.stop()
        for pool in (self, *self.others):
            for runner in tuple(pool.alive.values()):
                runner.nodes.dismiss()

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
            runner = self._started(environment_variables(conditions))
        self.alive[key], self.hosts = runner, runner.nodes.hosts
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
        runner = self.make(
            self.settings, self.listen, host_bytes=self.host_bytes, environment=environment, number=self.number
        )
        return runner.__enter__()


def check_memory(settings: Settings, hosts: Sequence[frozenset[str]], free_bytes: int) -> None:
    """Whether the last may run beside the others: a machine has all that all CPU ranks on it may take. Raises NoRoom.

    hosts: the machines of each. free_bytes: of the machine that had least left.
    """
    most = max(sum(host in one for one in hosts) for host in hosts[-1])
    need = most * settings.ranks_per_node * settings.device_bytes
    if settings.device == "cpu" and most > 1 and need > free_bytes:
        said = f"{most} trials on one machine may take {format_bytes(need)} of its memory"
        raise NoRoom(f"{said}, and {format_bytes(free_bytes)} are free")


def _key(conditions: Mapping[str, Scalar]) -> str:
    return json.dumps(environment_variables(conditions), sort_keys=True)
