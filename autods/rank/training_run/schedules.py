"""The learning-rate schedules that a script makes and steps by itself: a run saves and restores them.

DeepSpeed's checkpoint holds the schedule of its engine alone, and an optimizer does not know who sets its rate. So
schedules are noted where they are made. A script makes the same ones in the same order in each attempt.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..patching import declare_all, when_imported
from .states import param_groups, set_groups

# All others call the first one.
_MADE = declare_all(
    "torch.optim.lr_scheduler",
    (f"{name}.__init__" for name in ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")),
    "a schedule that the script steps by itself is saved and restored",
)

_made: list[weakref.ref[Any]] = []  # the schedules of this process
_listener: Callable[[], None] | None = None  # called when one is made


def watch() -> None:
    """Note each schedule that is made from now on in this process."""

    def init(original: Any, schedule: Any, /, *args: Any, **kwargs: Any) -> None:
        original(schedule, *args, **kwargs)
        _made.append(weakref.ref(schedule))
        if _listener is not None:
            _listener()

    def install() -> None:
        for patch in _MADE.values():
            patch.wrap(init)

    when_imported("torch.optim.lr_scheduler", install)


class Schedules:
    """The schedules of an engine's optimizer, without the one that DeepSpeed steps and saves."""

    def __init__(self, engine: Any, note: Callable[[str], None]) -> None:
        self.engine, self.note = engine, note
        self._noted = False

    def find(self) -> list[Any]:
        """The schedules that are alive, in the order in which they were made."""
        groups = param_groups(self.engine)
        schedules = [schedule for reference in _made if (schedule := reference()) is not None]
        return [
            schedule
            for schedule in schedules
            if schedule is not self.engine.lr_scheduler
            and getattr(getattr(schedule, "optimizer", None), "param_groups", None) is groups
        ]

    def states(self) -> list[Mapping[str, Any] | None]:
        """The state of each; None for one that cannot be saved, which is reported once."""
        return [self._read_state(schedule) for schedule in self.find()]

    def restore(self, saved: Sequence[Mapping[str, Any] | None], groups: Sequence[Mapping[str, Any]]) -> None:
        """Let the schedules go on, those too that the script makes later: their making sets the first rates.

        `groups` are the settings of the optimizer's groups when the schedules were saved.
        """
        global _listener
        restored = 0

        def go_on() -> None:
            nonlocal restored
            schedules = self.find()[: len(saved)]
            for schedule, state in zip(schedules[restored:], saved[restored:], strict=False):
                if state is not None:
                    schedule.load_state_dict(state)
            if restored < len(schedules):
                restored = len(schedules)
                set_groups(self.engine, groups)

        go_on()
        _listener = go_on

    def _read_state(self, schedule: Any) -> Mapping[str, Any] | None:
        try:
            state: Mapping[str, Any] = schedule.state_dict()
            pickle.dumps(state)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if not self._noted:
                self._noted = True
                self.note(
                    f"warning: its schedule {type(schedule).__name__} is not saved, and begins anew where the run goes "
                    f"on: {error}; keep its state in session.state"
                )
            return None
        return state
