"""What the supervisor sees of an attempt while it runs: steps, checkpoints, memory, and what rank 0 prints."""

from __future__ import annotations

import time
from pathlib import Path

from ..events import Note, RankPrinted, RunListener, StepDone
from ..rank.training_run.checkpoints import list_marked_steps
from ..report.rank_logs import LogTail, is_library_warning
from ..report.results.run import parse_steps
from ..runner.node_messages import Heartbeat, TierLevel
from ..types import Tier
from .memory_trend import TierReading, WatchedTier
from .run_journal import RunJournal
from .run_settings import RunSettings

_LOOK_EVERY_S = 0.5  # for lines of the ranks and new checkpoints
_WATCH_EVERY_S = 1.0


class AttemptProgress:
    """Follows the attempt in `folder` from `first_step` on. `step` is the last optimizer step that was seen.

    `slowest_step_s` are the seconds of the slowest one. `device_bytes` are those that a rank's device may hold.

    Heartbeats tell of a step at once, its line comes about a second later.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        *,
        settings: RunSettings,
        device_bytes: int,
        journal: RunJournal,
        listen: RunListener,
    ) -> None:
        self.step, self.slowest_step_s = first_step, 0.0
        self._settings, self._device_bytes = settings, device_bytes
        self._journal, self._listen = journal, listen
        self._steps = LogTail(folder / "steps.jsonl")
        self._log = LogTail(folder / "ranks" / "rank0.log")
        self._has_warned = False
        self._looked_s = self._watched_s = 0.0
        self._watched: dict[tuple[Tier, str], WatchedTier] = {}  # by tier and node
        self._uses: tuple[TierLevel, ...] = ()

    def look(self, beat: Heartbeat | None = None) -> None:
        """Look at everything, unless that was just done."""
        if beat is not None:
            self.step, self._uses = max(self.step, beat.step), beat.tiers
        if time.monotonic() - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            self._read()

    def finish(self) -> None:
        """Look once more, at the end of the attempt."""
        self._read(ended=True)

    def _read(self, *, ended: bool = False) -> None:
        for text in self._log.read(ended=ended):
            if not is_library_warning(text):
                self._listen(RankPrinted(text=text))
            elif not self._has_warned:
                self._has_warned = True
                self._listen(Note(text=f"warnings of libraries are in {self._log.path}"))
        done: StepDone | None = None
        for done in parse_steps(self._steps.read(ended=ended)):
            self.slowest_step_s = max(self.slowest_step_s, done.seconds)
            self._listen(done)
        if done is not None:
            self.step = max(self.step, done.step)
            if time.monotonic() - self._watched_s >= _WATCH_EVERY_S:
                self._watched_s = time.monotonic()
                self._watch(done)
        for step in list_marked_steps(self._settings.out / "checkpoints"):
            self._journal.note_checkpoint(step)

    def _watch(self, done: StepDone) -> None:
        uses = list(self._uses)
        if done.device_peak_bytes is not None:
            uses.append(TierLevel(tier="device", used_bytes=done.device_peak_bytes, total_bytes=self._device_bytes))
        for use in uses:
            new = WatchedTier(tier=use.tier, node=use.node, limit_bytes=use.total_bytes)
            watched = self._watched.setdefault((use.tier, use.node), new)
            if (text := watched.add(TierReading(done.step, use.used_bytes), last_step=done.steps)) is not None:
                self._listen(Note(text=text, warns=True))
