"""The forecast at a fit's side: the simulated engine of each trial, and what the journal keeps of how right it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from ..config.deepspeed import without_monitors
from ..events import Listener, Note
from ..forecast.allocator import AllocConf, read_alloc_conf
from ..forecast.calibration import Pair
from ..forecast.forecaster import Foreseer
from ..forecast.values import Ask, Start
from ..journal import TrialStore, trial_key
from ..requests import Settings
from ..schema import read_as
from ..system.host import read_hardware
from ..types import Fit, Record, Tier, Trial
from .forecasts import BLIND, Foresight


@contextmanager
def foreseeing(
    settings: Settings,
    config_of: Callable[[Trial], dict[str, Any]],
    memory: TrialStore,
    listen: Listener,
    start: Start | None = None,
) -> Iterator[Foresight]:
    """Forecasts of this fit's trials while the block lasts; none when the settings want none.

    The simulator starts with the first that is needed. What a trial measured beside its forecast goes into the journal,
    and counts again when the fit is resumed.
    """
    if not settings.forecast:
        yield BLIND
        return

    allocator = read_alloc_conf(os.environ) if settings.device == "cuda" else AllocConf()
    if allocator.warning is not None:
        listen(Note(text=allocator.warning))

    with (start or _simulator)(settings.source) as simulator:
        foreseer = Foreseer(
            simulator=simulator,
            ask_of=_asking(settings, config_of),
            key_of=trial_key,
            limits=_limits(settings),
            emulated=settings.device == "cpu" or settings.device_bytes_asked,
            tell=lambda said: listen(Note(text=said)),
            pairs={key: read_as(Pair, row) for key, row in memory.past.forecasts.items()},
            expandable=allocator.expandable,
        )

        def learn(record: Record) -> Mapping[str, Any] | None:
            if settings.device == "cuda" and isinstance(record.outcome, Fit) and record.outcome.examined is not None:
                return None  # its peak is that of a checkpoint, too, which is not forecast
            pair = foreseer.learn(record.trial, record.outcome)
            return None if pair is None else asdict(pair)

        memory.learn = learn
        try:
            yield foreseer
        finally:
            foreseer.close()


def _asking(settings: Settings, config_of: Callable[[Trial], dict[str, Any]]) -> Callable[[Trial], Ask]:
    """From a trial to the engine that its forecast simulates."""
    stages = {rung.name: rung.stage for rung in settings.ladder}

    def ask_of(trial: Trial) -> Ask:
        return Ask(
            rung=trial.rung,
            ds_config=without_monitors(config_of(trial)),
            world_size=settings.gpus,
            ranks_per_node=settings.ranks_per_node,
            device_bytes=settings.device_bytes,
            device=settings.device,
            checkpointing=trial.knobs.checkpointing,
            zero_init=settings.source.zero_init and stages[trial.rung] == 3,
        )

    return ask_of


def _limits(settings: Settings) -> Mapping[Tier, int]:
    """A trial's own limits; of CPU ranks the budgets are all that is enforced."""
    limits: dict[Tier, int] = {"device": settings.device_bytes}
    if settings.device == "cuda":
        limits["host"] = read_hardware().host_bytes
    return limits


def _simulator(source: Any) -> Any:
    from ..forecast.simulator.client import Simulator

    return Simulator(source)
