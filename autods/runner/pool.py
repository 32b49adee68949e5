"""Several runners that share the machines of one fit or probe, and take turns where trials would disturb each other."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from ..config.settings import Settings
from ..devices import find_device
from ..events import Event, Note
from ..types import Fit, Outcome, OutOfMemory, Record, Scalar, Trial
from ..units import format_bytes
from ..workload.conditions import apply_conditions, environment_variables
from .placement import NoRoom
from .ray_connect import session
from .runner import RayRunner, Survey


@dataclass(slots=True, eq=False)
class Turn:
    """A running trial. `neighbours` counts the other trials that ran on one of its machines meanwhile."""

    hosts: frozenset[str]
    neighbours: int = 0


class Turns:
    """Decides which trials run at the same time; used by all pools, from any thread.

    After `stop` every trial ends in KeyboardInterrupt: its outcome says nothing about the trial.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._changed = threading.Condition()
        self._running: list[Turn] = []
        self._one_is_alone = False

    @contextmanager
    def take(self, hosts: frozenset[str] = frozenset(), *, alone: bool = False) -> Iterator[Turn]:
        """Run a trial on these machines, while others run; or wait for them to end, and hold new ones back."""
        turn = Turn(hosts)
        with self._changed:
            self._changed.wait_for(lambda: not self._one_is_alone or self.stopped)
            self._one_is_alone = alone
            for other in self._running:
                if other.hosts & hosts:
                    other.neighbours, turn.neighbours = other.neighbours + 1, turn.neighbours + 1
            self._running.append(turn)
        try:
            with self._changed:
                self._changed.wait_for(lambda: not alone or self._running == [turn] or self.stopped)
            if self.stopped:
                raise KeyboardInterrupt
            yield turn
        finally:
            with self._changed:
                self._running.remove(turn)
                self._one_is_alone = self._one_is_alone and not alone
                self._changed.notify_all()
            if self.stopped:
                raise KeyboardInterrupt

    def stop(self) -> None:
        """Start no more trials, and let those that run end in KeyboardInterrupt."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


def neighbours_may_be_why(outcome: Outcome) -> bool:
    """Whether trials on the same machine can have caused the failure.

    They share the host's memory, its processors and its network, but no device memory.
    """
    match outcome:
        case Fit():
            return False
        case OutOfMemory(tier=tier):
            return tier != "device"
        case _:
            return outcome.failure in ("memory_pressure", "infrastructure", "communication", "secondary", "unknown")


class RunnerPool:
    """A context manager with a runner for the environment of the last trial. Ray starts with the first trial.

    `make` makes a runner.
    `number` and `turns` are explained in `another`.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        make: Callable[..., RayRunner] = RayRunner,
        number: int = 0,
        turns: Turns | None = None,
    ) -> None:
        self.settings, self.listen, self.make = settings, listen, make
        self.number, self.turns = number, turns or Turns()
        self.others: list[RunnerPool] = []
        self.hosts: frozenset[str] = frozenset()  # machines that it holds
        self.has_room = not number
        self.runner: RayRunner | None = None
        self.variables: Mapping[str, str] | None = None  # of the runner's environment
        self._counting = threading.Lock()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> RunnerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hosts = frozenset()
        with self._exits:
            self._end_runner()

    def survey(self, conditions: Mapping[str, Scalar]) -> Survey:
        """Return the facts of the workload under these conditions; see `RayRunner.survey`."""
        return self._choose_runner(conditions).switch_to(apply_conditions(self.settings, conditions))

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run the trial under its conditions; once more and alone, where neighbours can have made it fail."""
        runner = self._choose_runner(trial.conditions)
        with self.turns.take(runner.workers.hosts) as turn:
            runner.switch_to(apply_conditions(self.settings, trial.conditions))
            record = runner.run(trial, id=id)
        if not turn.neighbours or not neighbours_may_be_why(record.outcome):
            return replace(record, neighbours=turn.neighbours)
        self.listen(Note(text=f"trial {id} shared its machine with another when it failed: it runs again, alone"))
        with self.turns.take(alone=True):
            return runner.run(trial, id=id)

    def another(self, conditions: Mapping[str, Scalar]) -> AbstractContextManager[RunnerPool]:
        """A second pool on CPUs or GPUs that are free now, for trials at the same time as ours.

        `conditions` are those of its first trial. Enter it in the thread that runs its trials. Raises NoRoom when
        nothing is free, or when the memory budgets of CPU ranks do not fit together.
        """
        self._choose_runner(conditions)  # starts the Ray that both use
        number = len(self.others) + 1
        other = RunnerPool(self.settings, self.listen, make=self.make, number=number, turns=self.turns)
        self.others.append(other)
        return self._enter_other(other, conditions)

    @contextmanager
    def _enter_other(self, other: RunnerPool, conditions: Mapping[str, Scalar]) -> Iterator[RunnerPool]:
        with other:
            runner = other._choose_runner(conditions)
            with self._counting:  # pools may be entered in any order: each counts those that have found room
                pools = [pool for pool in (self, *self.others) if pool.has_room and pool is not other]
                check_memory(
                    self.settings, [pool.hosts for pool in (*pools, other)], runner.workers.host_memory.free_bytes
                )
                other.has_room = True
            yield other

    def stop(self) -> None:
        """End all trials of this pool and of those made by `another`, from any thread."""
        self.turns.stop()
        for pool in (self, *self.others):
            if (runner := pool.runner) is not None:
                runner.workers.stop()

    def order(self, trials: Sequence[Trial]) -> list[Trial]:
        """Group the trials by environment, because each change takes a new zygote. The current one comes first."""

        def environment(trial: Trial) -> Mapping[str, str]:
            return environment_variables(trial.conditions)

        environments = [self.variables, *map(environment, trials)]
        return sorted(trials, key=lambda trial: environments.index(environment(trial)))

    def _choose_runner(self, conditions: Mapping[str, Scalar]) -> RayRunner:
        """Return the runner with the environment of these conditions; start it where another one is alive, or none."""
        variables = environment_variables(conditions)
        if self.runner is None or variables != self.variables:
            self._end_runner()
            # Ray has to outlive each runner.
            self._exits.enter_context(session(cpus=max(2, os.cpu_count() or 2), address=self.settings.address))
            if variables:
                text = " ".join(f"{name}={value}" for name, value in variables.items())
                self.listen(Note(text=f"ranks with {text}"))
            runner = self.make(self.settings, self.listen, environment=variables, number=self.number)
            self.runner, self.variables = runner.__enter__(), variables
        self.hosts = self.runner.workers.hosts
        return self.runner

    def _end_runner(self) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.__exit__(None, None, None)


def check_memory(settings: Settings, hosts: Sequence[frozenset[str]], free_bytes: int) -> None:
    """Raise NoRoom when the budgets of the pools' CPU ranks do not fit together in memory.

    Each item of `hosts` has the machines of one pool; the last pool is the one to check.
    `free_bytes` is the free host memory of the machine that has the least.
    """
    most = max(sum(host in machines for machines in hosts) for host in hosts[-1])
    need_bytes = most * settings.ranks_per_node * settings.device_bytes
    if find_device(settings.device).shares_host_memory and most > 1 and need_bytes > free_bytes:
        raise NoRoom(
            f"{most} trials on one machine may take {format_bytes(need_bytes)} of its memory, and "
            f"{format_bytes(free_bytes)} are free"
        )
