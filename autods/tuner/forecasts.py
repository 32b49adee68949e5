"""The forecasts that a search uses: their protocol, and the forecaster that a fit opens."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, Protocol

from ..config.catalogue import describe_this_machine
from ..config.deepspeed import without_monitors
from ..config.settings import Settings
from ..devices import find_device
from ..events import Listener, Note
from ..forecast.forecaster import Forecaster as ForecastService
from ..forecast.forecaster import Limits, StepForecast, TrialForecaster, enough_accumulation
from ..forecast.predict.allocator import read_alloc_conf
from ..forecast.predict.calibration import Observation, StepFactors
from ..forecast.simulate.client import Simulator
from ..forecast.values import EngineSpec, RungForecast, StartSimulator
from ..journal import TrialStore, trial_key
from ..runner.cleanup import simulator_variables
from ..schema import read_as
from ..types import Fit, Record, Trial
from .step_factors import identify, keep_factors, open_factors


class Forecaster(Protocol):
    """Forecasts trials on this machine. `forecast.forecaster` has the real one; these defaults know nothing."""

    @property
    def forecasts(self) -> Mapping[str, RungForecast]:
        """The first forecast of each rung, by rung name."""
        return MappingProxyType({})

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Start to simulate these trials in the background, in this order."""

    def finish(self) -> None:
        """Drop simulations that have not begun and wait for the others, so that the next trial runs on an idle host."""

    def forecast(self, trial: Trial) -> RungForecast | None:
        """The memory that the trial will need; None when it cannot be simulated."""
        return None

    def largest(self, trial: Trial, sizes: Sequence[int], usable_bytes: float) -> int | None:
        """The largest of these micro batches (ascending) that should fit in `usable_bytes`; None when unknown."""
        return None

    def step_time(self, trial: Trial) -> StepForecast | None:
        """The seconds of the trial's optimizer step; None when they cannot be forecast."""
        return None


class NoForecaster(Forecaster):
    """Every forecast is None."""

    def prepare(self, trials: Iterable[Trial]) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


NO_FORECASTER = NoForecaster()


def why_impossible(forecast: RungForecast | None) -> str | None:
    """The reason to skip a trial whose forecast exceeds a limit even at its low end; None when it may fit."""
    if forecast is None or forecast.verdict != "cannot_fit":
        return None
    return f"cannot fit by the forecast: {forecast.reason}"


def lacking_bytes(forecast: RungForecast) -> int:
    """Bytes that the device lacks at the low end of the forecast; 0 where another tier is the limit."""
    device = forecast.memory.get("device")
    return 0 if device is None or device.limit_bytes is None else max(0, device.low_bytes - device.limit_bytes)


def engine_spec(settings: Settings, trial: Trial, ds_config: Mapping[str, Any]) -> EngineSpec:
    """The engine to simulate for a trial of these settings with this DeepSpeed config."""
    cards = settings.hardware.cards if find_device(settings.device).has_cards else ()
    return EngineSpec(
        rung=trial.rung,
        ds_config=without_monitors(ds_config),
        world_size=settings.gpus,
        ranks_per_node=settings.ranks_per_node,
        device_bytes=settings.device_bytes,
        device=settings.device,
        checkpointing=trial.knobs.checkpointing,
        zero_init=settings.source.zero_init and settings.rung(trial.rung).stage == 3,
        capability=min((card.capability for card in cards if card.capability is not None), default=None),
    )


def shorten_accumulation(settings: Settings, trial: Trial) -> Trial:
    """The trial with as many micro batches a step as a simulation needs."""
    accumulation = enough_accumulation(settings.rung(trial.rung), trial.knobs.accumulation)
    return replace(trial, knobs=replace(trial.knobs, accumulation=accumulation))


def start_processes(settings: Settings, listen: Listener) -> StartSimulator:
    """Return the start of a simulator that waits as long as the profile of these settings allows, and reports waits."""
    limit_s = settings.profile.limits.init_s
    return lambda source: Simulator(
        source,
        limit_s=limit_s,
        report=lambda text: listen(Note(text=text, passing=True)),
        variables=simulator_variables(),
    )


@contextmanager
def open_forecaster(
    settings: Settings,
    config_of: Callable[[Trial], dict[str, Any]],
    memory: TrialStore,
    listen: Listener,
    start: StartSimulator | None = None,
) -> Iterator[Forecaster]:
    """A forecaster of this fit's trials; one that knows nothing when the settings want no forecast.

    The simulator starts with the first forecast. Each trial's measured peak is stored in the journal with its
    forecast, and corrects later forecasts. A resumed fit learns it from there when the trial is answered again, and
    nothing before: so it decides as the first run did.
    """
    if not settings.forecast:
        yield NO_FORECASTER
        return
    device = find_device(settings.device)
    cards = settings.hardware.cards if device.has_cards else ()
    machine = describe_this_machine(cards, settings.hardware) if cards else None
    machine = None if machine is None or machine.rates is None else machine
    kept_as = None
    if machine is not None:
        kept_as = identify(machine, ranks_per_node=settings.ranks_per_node, nodes=settings.nodes)
    allocator = read_alloc_conf(os.environ, settings.device)
    if allocator.warning is not None:
        listen(Note(text=allocator.warning))

    past = memory.past

    def note(text: str) -> None:
        listen(Note(text=text))

    def spec_of(trial: Trial) -> EngineSpec:
        trial = shorten_accumulation(settings, trial)
        return engine_spec(settings, trial, config_of(trial))

    def learn(record: Record) -> Mapping[str, Any] | None:
        if (key := trial_key(record.trial)) in past.records:
            if key in past.forecasts:
                forecaster.observations[key] = read_as(Observation, past.forecasts[key])
            return None
        is_saved = isinstance(record.outcome, Fit) and record.outcome.examined is not None
        if is_saved and not device.shares_host_memory:  # there, a checkpoint passes beside the device's budget
            return None  # its peak includes saving a checkpoint, which is not forecast
        observation = forecaster.learn(record.trial, record.outcome)
        return None if observation is None else asdict(observation)

    with (start or start_processes(settings, listen))(settings.source) as simulator:
        forecaster = TrialForecaster(
            forecaster=ForecastService(simulator, allocator.expandable),
            spec_of=spec_of,
            key_of=trial_key,
            limits=Limits(
                device_bytes=settings.device_bytes,
                host_bytes=settings.hardware.host_bytes,
            ),
            report=lambda text: listen(Note(text=text, passing=True)),
            machine=machine,
            factors=StepFactors() if kept_as is None else open_factors(kept_as, settings.out, note),
        )
        memory.learn = learn
        try:
            yield forecaster
        finally:
            forecaster.close()
            if kept_as is not None and any(each.step for each in forecaster.observations.values()):
                keep_factors(kept_as, forecaster.step_factors())
