"""The append-only record of a run, `run.jsonl`: what was decided, started and ended, so that the same command goes on.

A decision is written before it is carried out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import EnvironmentBroken, InputError
from ..journal import RUN_JOURNAL, Journal
from ..report.results.run import AttemptRow
from ..report.text import format_outcome
from ..schema import read_as, read_known
from ..types import Failed, Knobs, ModelFacts, OutOfMemory

VERSION = 2
Ending = Literal["done", "stopped", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What the ranks of an attempt train with.

    With `loads_in_ranks` they load their data themselves: workers of a loader hand it over in shared memory.
    """

    rung: str
    knobs: Knobs
    world_size: int
    replica_ranks: int = 1  # that count as one in the batch, see `count_replicas`
    loads_in_ranks: bool = False

    @property
    def replicas(self) -> int:
        """The ranks among which a global batch is dealt out."""
        return self.world_size // self.replica_ranks

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return self.knobs.train_batch(self.replicas)

    def with_micro_batch(self, micro_batch: int) -> RunConfig:
        """The same with another micro batch, and the accumulation that keeps the global batch."""
        accumulation = self.global_batch // (micro_batch * self.replicas)
        return replace(self, knobs=replace(self.knobs, micro_batch=micro_batch, accumulation=accumulation))

    def micro_batches(self) -> list[int]:
        """The micro batches that keep the global batch, largest first."""
        share = self.global_batch // self.replicas
        return [size for size in range(share, 0, -1) if share % size == 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended after the optimizer step `last_step`. `cause` is why its ranks failed, if they did."""

    ending: Ending
    last_step: int
    seconds: float
    cause: OutOfMemory | Failed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the ranks. `first_step` is that of the checkpoint it went on from, `last_step` the last it did.

    `ending` is None while it runs, and 'interrupted' where the driver was killed meanwhile. Times are seconds; `began`
    is that of the calendar's clock.
    """

    number: int
    config: RunConfig
    first_step: int
    began: float
    ending: Ending | None = None
    last_step: int = 0
    seconds: float = 0.0
    cause: OutOfMemory | Failed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The config of the attempts from now on, and why. The first one comes from the fit and follows no attempt.

    `step` is that of the last checkpoint when it was made, 0 without one. `growth_bytes` is what a sample has needed
    beyond the fit's trials. `repeats` counts the same config in a row without a new checkpoint.
    """

    config: RunConfig
    changed: str
    after_attempt: int = 0
    step: int = 0
    growth_bytes: float = 0.0
    repeats: int = 0
    is_rescue: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a run needs besides the fit's report: the model's facts, ops that cannot be built, where the fit is."""

    facts: ModelFacts
    op_problems: Mapping[str, str] = field(default_factory=dict)
    fit: str = ""


@dataclass(slots=True)
class RunHistory:
    """The content of a run's journal. `workload` is the digest of the user's code at the last call."""

    prepared: Prepared | None = None
    decisions: list[Decision] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    saved_steps: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    workload: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last attempt trained to the end."""
        return bool(self.attempts) and self.attempts[-1].ending == "done"

    @property
    def rescues(self) -> list[Decision]:
        """The decisions after a failure."""
        return [decision for decision in self.decisions if decision.is_rescue]

    @property
    def ranks_asked(self) -> int | None:
        """The ranks that the user wanted last. A run that lost some has fewer. None before the first decision."""
        wanted = [decision.config.world_size for decision in self.decisions if not decision.is_rescue]
        return wanted[-1] if wanted else None

    @property
    def failed(self) -> tuple[RunConfig, ...]:
        """The configs that ran out of memory."""
        return tuple(each.config for each in self.attempts if isinstance(each.cause, OutOfMemory))


class RunJournal:
    """Writes and replays `run.jsonl`. `history` is what the file says, or will say once its disk has room.

    `await_room` is called with what writes: a decision waits there for room, a warning for the next line.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / RUN_JOURNAL
        self.history = RunHistory()
        self.await_room: Callable[[Callable[[], None]], None] = lambda write: write()
        self._journal = Journal(self.path, "start over with --fresh, which forgets its checkpoints, too")
        self._unwritten: list[dict[str, Any]] = []

    def open(self, identity: Mapping[str, Any]) -> RunHistory:
        """Start a journal, or read the existing one. `identity` has the options that a run may not change.

        The options of a run that has started no attempt may change. Raises InputError where the journal is of another
        run, which names the options that differ, or is damaged.
        """
        mine = {"kind": "header", "version": VERSION, "identity": dict(identity)}
        header, *rows = self._journal.begin(mine, lambda rows: any(row.get("kind") == "started" for row in rows))
        if header.get("kind") != "header" or header.get("version") != VERSION:
            raise self._journal.make_damage_error(1, "it is of another version")
        known = {**identity, **(header.get("identity") or {})}  # journals of older releases name fewer options
        if differing := [name for name, value in identity.items() if known[name] != value]:
            changes = "; ".join(f"{name}: {known[name]} → {identity[name]}" for name in differing)
            raise InputError(
                f"holds a run with other options ({changes})",
                place=str(self.path.parent),
                hint="give the same options to go on, another --out, or --fresh to forget that run",
            )
        for number, row in enumerate(rows, 2):
            try:
                self._replay(row)
            except (ValueError, KeyError, IndexError) as error:
                raise self._journal.make_damage_error(number, str(error)) from None
        return self.history

    def note_workload(self, digest: str) -> bool:
        """Write down the digest of the user's code; return whether it differs from that of the last call."""
        before = self.history.workload
        if before != digest:
            self._write({"kind": "workload", "digest": digest, "at": time.time()})
        return before not in (None, digest)

    def prepare(self, prepared: Prepared) -> None:
        """Write down what the run begins with."""
        self._write({"kind": "prepared", "prepared": asdict(prepared)})

    def decide(self, decision: Decision) -> None:
        """Write down the config of the next attempts."""
        self._write({"kind": "decided", "decision": asdict(decision), "at": time.time()})

    def start_attempt(self, attempt: Attempt) -> None:
        """Write down that the ranks are about to start."""
        self._write({"kind": "started", "attempt": asdict(attempt)})

    def end_attempt(self, end: AttemptEnd) -> None:
        """Write down how the last attempt ended."""
        self._write({"kind": "ended", **asdict(end), "at": time.time()})

    def note_checkpoint(self, step: int) -> None:
        """Write down that a checkpoint is complete."""
        if step not in self.history.saved_steps:
            self._note({"kind": "saved", "step": step, "at": time.time()})

    def warn(self, text: str) -> None:
        """Write down a warning that was shown."""
        self._note({"kind": "warned", "text": text, "at": time.time()})

    def _write(self, row: dict[str, Any]) -> None:
        """Write a row down before anything else happens."""
        self._add(row)
        self.await_room(self._flush)

    def _note(self, row: dict[str, Any]) -> None:
        """Write a row down, now or with the next one: a disk that fails for a moment ends no training."""
        self._add(row)
        with contextlib.suppress(EnvironmentBroken):
            self._flush()

    def _add(self, row: dict[str, Any]) -> None:
        self._replay(row)
        self._unwritten.append(row)

    def _flush(self) -> None:
        while self._unwritten:
            self._journal.append(self._unwritten[0])
            del self._unwritten[0]

    def _replay(self, row: Mapping[str, Any]) -> None:
        history = self.history
        match row:
            case {"kind": "prepared", "prepared": prepared}:
                history.prepared = read_as(Prepared, prepared)
            case {"kind": "decided", "decision": decision}:
                history.decisions.append(read_as(Decision, decision))
            case {"kind": "started", "attempt": attempt}:
                history.attempts.append(read_as(Attempt, attempt))
            case {"kind": "ended"}:
                end = read_known(AttemptEnd, row)
                attempt = history.attempts.pop()
                history.attempts.append(
                    replace(attempt, ending=end.ending, last_step=end.last_step, seconds=end.seconds, cause=end.cause)
                )
            case {"kind": "saved", "step": int(step)}:
                history.saved_steps.append(step)
            case {"kind": "workload", "digest": str(digest)}:
                history.workload = digest
            case {"kind": "warned", "text": str(text)}:
                history.warnings.append(text)
            case _:
                raise ValueError("this line is no entry of a run's journal")


def list_rows(history: RunHistory) -> tuple[AttemptRow, ...]:
    """The attempts as a report shows them. Each did again what the one before it had done since its checkpoint."""
    before = [0, *(each.last_step for each in history.attempts)]
    changes = {each.after_attempt: each.changed for each in history.decisions}
    return tuple(
        AttemptRow(
            number=each.number,
            began=each.began,
            rung=each.config.rung,
            micro_batch=each.config.knobs.micro_batch,
            accumulation=each.config.knobs.accumulation,
            world_size=each.config.world_size,
            checkpointing=each.config.knobs.checkpointing,
            first_step=each.first_step,
            last_step=each.last_step,
            repeated=max(0, last_step - each.first_step),
            seconds=each.seconds,
            ending=each.ending or "interrupted",
            evidence=None if each.cause is None else format_outcome(each.cause),
            changed=changes.get(each.number),
        )
        for each, last_step in zip(history.attempts, before, strict=False)
    )
