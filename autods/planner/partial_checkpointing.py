"""Which share of a model's alike layers to recompute: no simulation of a share is needed to choose it.

Layers that are alike need alike memory and time. Both lie between those of all layers recomputed and of none.
A rung's time with a share lies on the line between the two. Its peak lies on that line or below: at each moment of a
step the bytes are on a line, and a peak is the largest of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..config.catalogue import Site
from ..config.checkpointing import PARTIAL
from ..forecast.largest_batch import Fills, find_largest
from ..forecast.simulation_cache import CachedEngine, move_engine
from .rung_forecasts import PlanRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One in `every` layers is recomputed, at the largest micro batch that fits so."""

    every: int
    micro_batch: int
    samples_per_second: float


@dataclass(slots=True, kw_only=True)
class ShareChooser:
    """Chooses between two engines of a rung: one recomputes `all_layers`, and the other `none`."""

    run: PlanRun
    site: Site
    all_layers: CachedEngine
    none: CachedEngine
    _fills: dict[int, tuple[Fills, Fills]] = field(default_factory=dict)

    def choose(self) -> Share | None:
        """Return the fastest share by its forecast; None where none fits or the times are not known."""
        shares = [share for every in PARTIAL.values() if (share := self._forecast(every)) is not None]
        return max(shares, key=lambda share: share.samples_per_second, default=None)

    def _forecast(self, every: int) -> Share | None:
        layers = self.run.facts.alike_layers
        if layers < every:
            return None
        part = math.ceil(layers / every) / layers

        def fill(micro_batch: int) -> Fills:
            whole, none = self._find_fills(micro_batch)
            names = whole.keys() | none.keys()
            return {name: part * whole.get(name, 0.0) + (1 - part) * none.get(name, 0.0) for name in names}

        size = find_largest(fill, self.run.list_sizes(self.site)).micro_batch
        if size is None:
            return None
        speeds = [self.run.forecast_speed(self.site, engine, size) for engine in (self.all_layers, self.none)]
        if speeds[0] is None or speeds[1] is None:
            return None
        seconds = part * speeds[0].step.seconds + (1 - part) * speeds[1].step.seconds
        rate = speeds[0].samples_per_second * speeds[0].step.seconds / seconds
        return Share(every=every, micro_batch=size, samples_per_second=rate)

    def _find_fills(self, micro_batch: int) -> tuple[Fills, Fills]:
        """Return the fills with all layers recomputed and with none; beyond all where two simulations do not tell."""
        if micro_batch not in self._fills:
            whole, none = (self._find_fill(engine, micro_batch) for engine in (self.all_layers, self.none))
            self._fills[micro_batch] = whole, none
        return self._fills[micro_batch]

    def _find_fill(self, engine: CachedEngine, micro_batch: int) -> Fills:
        simulation = engine.foresee(micro_batch)
        if simulation is None:
            return {"unknown": math.inf}
        spec = move_engine(engine.spec, self.site)
        return self.run.cache.judge(spec, simulation, advise=False, roughly=True).fills
