"""Made-up rungs for the benchmark of samplers: speed and memory as buckets and switches change them, with noise."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from optuna.distributions import CategoricalDistribution

from autods.config.rungs import Rung, read_rungs
from autods.journal import trial_key
from autods.runner.testing import fit, out_of_memory
from autods.tuner.optuna_search import Space, space_of
from autods.types import Knobs, Outcome, Record, Scalar, Trial

LIMIT = 16 * 2**30
HEADROOM = 0.05
_LOOKS = 3000  # at random for the optimum, the best of which is then climbed from
_SHARE_THAT_MATTERS = 0.6


@dataclass(frozen=True)
class Surface:
    """One rung with 3 to 7 dimensions, of which about three in five matter for speed, and others for memory.

    A range rises and levels off, or has a peak; a switch is worth some percent either way; one range and one switch
    interact. Buckets cost memory: the start leaves 8 to 25 % free, and the largest of everything does not fit.
    """

    seed: int
    rung: Rung
    space: Space
    noise: float
    peaks: Mapping[str, tuple[float, float]]  # range → height, where
    switches: Mapping[tuple[str, Scalar], float]
    together: tuple[str, str, float]
    bytes_each: Mapping[str, float]
    base_bytes: float

    def speed(self, settings: Mapping[str, Scalar]) -> float:
        """Samples per second without noise; the start's is about 100."""
        gain = 0.0
        for key, (height, where) in self.peaks.items():
            off = self._place(key, settings[key]) - where
            gain -= height * (off / 0.5) ** 2 if off < 0 else height * (off / 1.5) ** 2
        for (key, option), worth in self.switches.items():
            gain += worth if settings[key] == option else 0
        ranged, switch, worth = self.together
        if settings[switch] != self.space.start[switch]:
            gain += worth * self._place(ranged, settings[ranged])
        return 100 * math.exp(gain)

    def peak_bytes(self, settings: Mapping[str, Scalar]) -> int:
        return int(self.base_bytes + sum(each * float(settings[key]) for key, each in self.bytes_each.items()))

    def answer(self, trial: Trial) -> Outcome:
        """The same for the same trial, whoever asks."""
        chance = random.Random(f"{self.seed} {trial_key(trial)}")
        settings = trial.knobs.settings
        peak = self.peak_bytes(settings)
        if peak > LIMIT:  # the allocation that failed lacked less than the trial does
            return out_of_memory(missing_bytes=max(1, int((peak - LIMIT) * chance.uniform(0.05, 1))))
        speed = self.speed(settings) * math.exp(chance.gauss(0, self.noise))
        return fit(peak_bytes=peak, samples_per_second=speed, limit_bytes=LIMIT)

    def run(self, trial: Trial) -> Record:
        return Record(id=1, trial=trial, outcome=self.answer(trial), seconds=1.0)

    def start(self) -> Record:
        return self.run(Trial(rung=self.rung.name, knobs=Knobs(settings=dict(self.space.start)), purpose="grow"))

    def optimum(self) -> float:
        """The best speed that leaves the headroom: of many at random, then climbed from the best five."""
        chance = random.Random(self.seed)
        looked = sorted((self._random(chance) for _ in range(_LOOKS)), key=self._worth)[-5:]
        return max(self._climbed(one, chance) for one in looked)

    def _climbed(self, point: dict[str, Scalar], chance: random.Random) -> float:
        for width in (0.3, 0.1, 0.03, 0.01):
            for _ in range(150):
                key = chance.choice(list(point))
                tried = {**point, key: self._moved(key, point[key], width, chance)}
                if self._worth(tried) > self._worth(point):
                    point = tried
        return self._worth(point)

    def _worth(self, settings: Mapping[str, Scalar]) -> float:
        return self.speed(settings) if self.peak_bytes(settings) <= LIMIT * (1 - HEADROOM) else 0.0

    def _random(self, chance: random.Random) -> dict[str, Scalar]:
        return {key: self._moved(key, self.space.start[key], 9.0, chance) for key in self.space.dimensions}

    def _moved(self, key: str, value: Scalar, width: float, chance: random.Random) -> Scalar:
        one = self.space.dimensions[key]
        if isinstance(one, CategoricalDistribution):
            return chance.choice(one.choices)
        place = chance.random() if width > 1 else min(1, max(0, self._place(key, value) + chance.gauss(0, width)))
        return one.low * (one.high / one.low) ** place

    def _place(self, key: str, value: Scalar) -> float:
        one = self.space.dimensions[key]
        assert not isinstance(one, CategoricalDistribution)
        return math.log(float(value) / one.low) / math.log(one.high / one.low)


_STARTS = {  # elements, as on a card of 16 GiB
    "zero_optimization.reduce_bucket_size": 40_000_000,
    "zero_optimization.stage3_prefetch_bucket_size": 10_000_000,
    "zero_optimization.stage3_param_persistence_threshold": 40_000,
    "zero_optimization.stage3_max_live_parameters": 80_000_000,
    "zero_optimization.stage3_max_reuse_distance": 80_000_000,
    "zero_optimization.sub_group_size": 160_000_000,
}


def surface(seed: int, noise: float) -> Surface:
    """The seed decides everything but the noise."""
    chance = random.Random(seed)
    rungs = read_rungs()
    rung = rungs[("zero2-offload", "zero3", "zero3")[seed % 3]]
    keys = list(rung.tune)
    if seed % 3 == 1:  # five of stage 3's seven, the switch among them
        keys = [*chance.sample(keys[:-1], 4), keys[-1]]
    rung = replace(rung, tune={key: rung.tune[key] for key in keys})
    space = space_of(rung, {key: size for key, size in _STARTS.items() if key in keys}, {})
    ranges = [key for key, one in space.dimensions.items() if not isinstance(one, CategoricalDistribution)]
    switches = [key for key in space.dimensions if key not in ranges]
    options = [(key, option) for key in switches for option in space.dimensions[key].choices[1:]]
    costly = {key: LIMIT * chance.uniform(0.1, 0.6) / space.dimensions[key].high for key in _mattering(ranges, chance)}
    made = Surface(
        seed=seed,
        rung=rung,
        space=space,
        noise=noise,
        peaks={key: (chance.uniform(0.05, 0.3), chance.uniform(0.2, 1.0)) for key in _mattering(ranges, chance)},
        switches={one: chance.gauss(0, 0.06) for one in options},
        together=(chance.choice(ranges), chance.choice(switches), chance.uniform(-0.1, 0.15)),
        bytes_each=costly,
        base_bytes=0.0,
    )
    return replace(made, base_bytes=LIMIT * chance.uniform(0.75, 0.92) - made.peak_bytes(space.start))


def _mattering(keys: list[str], chance: random.Random) -> list[str]:
    """Some of the keys, at least one."""
    return [key for key in keys if chance.random() < _SHARE_THAT_MATTERS] or [chance.choice(keys)]
