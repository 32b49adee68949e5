"""What follows the failure of an attempt: the config with which the run goes on, or the reason that it stops.

`decide` is a pure function. All of its choices keep the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..config.checkpointing import PARTIAL, find_state, is_as_lean, set_state
from ..config.settings import count_nodes
from ..devices.base import EXPANDABLE
from ..types import Failed, Fit, OutOfMemory, Tier, name_lack
from ..units import format_bytes
from .known_rungs import KnownRung
from .run_journal import RunConfig

MOST_REPEATS = 2  # of the same config in a row without a new checkpoint
_NODE_COPY = "zero_optimization.zero_hpz_partition_size"  # DeepSpeed wants a divisor of all ranks
NOTHING_LEFT, USERS_FAULT, MACHINES_FAULT = 1, 2, 3  # exit codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where the run stands after a failure.

    `failed` are the configs that ran out of memory. `rescues` counts those so far, and `repeats` how often the same
    config was started again in a row without a new checkpoint. `progressed` tells whether there is a new checkpoint
    since the last rescue. `ranks_left` is the number that the machines still have; None: all. They are those of whole
    nodes, of `ranks_per_node` each; None for a single machine.
    `growth_bytes` is by how much a sample needed more of the device than in the fit's trials, so far.
    `find_obstacle` returns why the last checkpoint cannot be loaded with a config. `find_damage` returns what of it is
    damaged, where the one before it is whole.
    """

    config: RunConfig
    known_rungs: tuple[KnownRung, ...] = ()
    failed: tuple[RunConfig, ...] = ()
    rescues: int = 0
    most_rescues: int = 10
    repeats: int = 0
    progressed: bool = False
    ranks_left: int | None = None
    ranks_per_node: int | None = None
    device_bytes: int | None = None
    growth_bytes: float = 0.0
    can_recompute: bool = False
    may_expand: bool = True  # the allocator could grow its segments, and the user has not decided whether
    last_hang: str | None = None  # the line of the user's code where the attempt before was stuck
    find_obstacle: Callable[[RunConfig], str | None] = lambda config: None
    find_damage: Callable[[], str | None] = lambda: None

    def known(self, rung: str) -> KnownRung:
        """What is known of a rung."""
        return next((each for each in self.known_rungs if each.rung == rung), KnownRung(rung=rung))

    def is_open(self, config: RunConfig) -> bool:
        """Whether a config did not run out of memory before, and can load the last checkpoint."""
        return config not in self.failed and config != self.config and self.find_obstacle(config) is None

    def find_fit(self, config: RunConfig) -> Fit | None:
        """The last trial that ran with the rung, micro batch and checkpointing of a config."""
        return self.known(config.rung).find_fit(config.knobs)

    def rate(self, config: RunConfig) -> float | None:
        """Samples a second with a config, by the trials of its rung; None without a measurement."""
        return self.known(config.rung).rate(config.knobs)

    def holds(self, config: RunConfig) -> bool:
        """Whether the device holds a config by its trial and the growth seen since; True where that is not known."""
        if self.known(config.rung).ran_out_at(config.knobs):
            return False
        outcome = self.find_fit(config)
        if outcome is None or self.device_bytes is None:
            return True
        return outcome.device_peak_bytes + self.growth_bytes * config.knobs.micro_batch <= self.device_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NextConfig:
    """Go on with this config. `changed` says what was changed, `is_leaner` whether it needs less memory.

    `damage` is that of the last checkpoint, where the run goes on from the one before; None where it does not.
    """

    config: RunConfig
    changed: str
    is_leaner: bool = True
    growth_bytes: float = 0.0
    damage: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFailure:
    """The run ends with this exit code. `advice` says what the user can change; '' where that is not known."""

    reason: str
    exit_code: int
    advice: str = ""


Cause: TypeAlias = OutOfMemory | Failed
Remedy: TypeAlias = Callable[[Situation, Cause], NextConfig | None]


def decide(cause: Cause, situation: Situation) -> NextConfig | RunFailure:
    """Return how a run goes on after its attempt failed of `cause`."""
    if situation.rescues < situation.most_rescues and (earlier := _load_earlier(situation, cause)) is not None:
        return earlier
    if (stop := _find_stop(cause, situation)) is not None:
        return stop
    if situation.rescues >= situation.most_rescues:
        reason = f"{situation.rescues} rescues were not enough (--max-rescues)"
        return RunFailure(reason=reason, exit_code=NOTHING_LEFT, advice=cause.advice)
    ranks_left = situation.ranks_left
    if ranks_left is not None and ranks_left < situation.config.world_size:
        return _shrink(situation, ranks_left)
    if (tier := _find_tier(cause, situation)) is None:
        return _repeat(situation, cause)
    situation = replace(situation, growth_bytes=max(situation.growth_bytes, measure_growth(cause, situation)))
    for remedy in _REMEDIES[tier]:
        if (chosen := remedy(situation, cause)) is not None:
            return replace(chosen, growth_bytes=situation.growth_bytes)
    # Other programs take host memory, too, so the same config may have room later.
    if situation.progressed or (tier == "host" and situation.repeats < MOST_REPEATS):
        return _repeat(situation, cause)
    return _give_up(situation, cause, tier)


def measure_growth(cause: Cause, situation: Situation) -> float:
    """Return the least bytes that a sample needed beyond the trial of the same config; 0 where that is not known.

    What was in use when the allocation failed, and the allocation itself, are a lower bound of the need.
    """
    if not isinstance(cause, OutOfMemory) or cause.tier != "device" or cause.wanted_bytes is None:
        return 0.0
    knobs, limit = situation.config.knobs, cause.limit_bytes or situation.device_bytes
    outcome = situation.find_fit(situation.config)
    if outcome is None or limit is None:
        return 0.0
    needed = limit - (cause.free_bytes or 0) + cause.wanted_bytes
    return max(0.0, needed - outcome.device_peak_bytes) / knobs.micro_batch


# Who has to act: the user, or somebody at the machine.

_EXIT_CODES: Mapping[str, int] = {
    "fix_code": USERS_FAULT,
    "fix_config": USERS_FAULT,
    "nothing": USERS_FAULT,
    "fix_environment": MACHINES_FAULT,
}


def _load_earlier(situation: Situation, cause: Cause) -> NextConfig | None:
    """The same from the checkpoint before a damaged one. Its files are asked: each library words this differently."""
    if isinstance(cause, OutOfMemory) or cause.phase != "load" or (damage := situation.find_damage()) is None:
        return None
    return NextConfig(config=situation.config, changed="an earlier checkpoint", is_leaner=False, damage=damage)


def _find_stop(cause: Cause, situation: Situation) -> RunFailure | None:
    if isinstance(cause, OutOfMemory):
        return None
    if cause.hung_at is not None and cause.hung_at == situation.last_hang:
        return RunFailure(reason=f"it hangs at {cause.hung_at} again", exit_code=USERS_FAULT, advice=cause.advice)
    code = _EXIT_CODES.get(cause.action)
    is_lost = situation.ranks_left is not None and situation.ranks_left < situation.config.world_size
    if code is None or (code == MACHINES_FAULT and (is_lost or _is_failed_save(cause))):
        return None
    return RunFailure(reason=cause.evidence, exit_code=code, advice=cause.advice)


# What the user can do where no config is left.
_ADVICE: Mapping[Tier, str] = {
    "device": "shorten the longest samples, free the device of other processes, or allow leaner rungs (--ladder)",
    "host": "free host memory, or raise the container's limit",
    "pinned": "raise the limit of locked memory (ulimit -l), or free host memory",
    "shm": "give the container more of /dev/shm (docker run --shm-size)",
    "nvme": "free space below --nvme-path, or name a larger disk",
}


def _give_up(situation: Situation, cause: Cause, tier: Tier) -> RunFailure:
    """The end of a run that no config holds: what was lacking, which rungs were passed over, and what helps."""
    reason = f"out of {name_lack(tier)}, and no leaner config is left"
    missing = cause.missing_bytes if isinstance(cause, OutOfMemory) else None
    if missing is not None:
        reason += f": {_describe(situation.config)} lacked at least {format_bytes(missing)}"
    failed_rungs = {each.rung for each in situation.failed} | {situation.config.rung}
    advice = _ADVICE[tier]
    if tier == "host" and not any(situation.known(rung).needs_nvme for rung in failed_rungs):
        advice += "; or name a fast disk for the states (--nvme-path), and a rung that uses it (--ladder)"
    passed_over = [
        f"{each.rung} ({each.refused or 'its forecast is that it cannot fit'})"
        for each in situation.known_rungs
        if each.rung not in failed_rungs and (each.refused is not None or each.forecast == "cannot_fit")
    ]
    reason += f"; not tried: {', '.join(passed_over)}" if passed_over else ""
    return RunFailure(reason=reason, exit_code=NOTHING_LEFT, advice=advice)


def _is_failed_save(cause: Cause) -> bool:
    """A disk that fills up while a checkpoint is written: the run goes on, and saves when there is room."""
    if isinstance(cause, OutOfMemory):
        return cause.phase == "save" and cause.tier == "nvme"
    return cause.phase == "save" and cause.failure == "infrastructure"


def _find_tier(cause: Cause, situation: Situation) -> Tier | None:
    """The tier that has to need less; None where the config does not decide about it."""
    if isinstance(cause, OutOfMemory):
        uses_disk = situation.known(situation.config.rung).needs_nvme
        is_disk = cause.tier == "nvme" and (not uses_disk or _is_failed_save(cause))
        return None if is_disk else cause.tier
    return {"leaner_rung": "device", "less_host_memory": "host"}.get(cause.action)  # type: ignore[return-value]


def _repeat(situation: Situation, cause: Cause) -> NextConfig | RunFailure:
    repeats = 0 if situation.progressed else situation.repeats
    if repeats >= MOST_REPEATS:
        reason = f"it failed {repeats + 1} times in a row without a new checkpoint, at last: {cause.evidence}"
        return RunFailure(reason=reason, exit_code=MACHINES_FAULT, advice=cause.advice)
    return NextConfig(config=situation.config, changed="the same again", is_leaner=False)


def _shrink(situation: Situation, ranks: int) -> NextConfig | RunFailure:
    """The largest smaller number of ranks that divides the global batch, and that the nodes share evenly."""
    config, total = situation.config, situation.config.global_batch
    most = situation.ranks_per_node or config.world_size
    obstacle = None
    for world_size in range(ranks // config.replica_ranks * config.replica_ranks, 0, -config.replica_ranks):
        replicas = world_size // config.replica_ranks
        if total % replicas or count_nodes(world_size, most) > max(1, ranks // most):
            continue
        share = total // replicas
        micro_batch = max(size for size in range(1, config.knobs.micro_batch + 1) if share % size == 0)
        settings = dict(config.knobs.settings)
        if world_size % min(int(settings.get(_NODE_COPY, 1)), world_size):
            del settings[_NODE_COPY]  # the node's copy of the parameters saves time alone
        knobs = replace(config.knobs, micro_batch=micro_batch, accumulation=share // micro_batch, settings=settings)
        smaller = replace(config, world_size=world_size, knobs=knobs)
        obstacle = situation.find_obstacle(smaller)
        if obstacle is None:
            changed = f"world size {world_size} instead of {config.world_size}: micro batch {micro_batch}"
            return NextConfig(config=smaller, changed=f"{changed}, accumulation {knobs.accumulation}")
    reason = obstacle or f"a global batch of {total} cannot be dealt out to {ranks} ranks or fewer"
    if ranks < config.replica_ranks:
        reason = f"the machines hold {ranks} ranks now, and a replica of the model takes {config.replica_ranks}"
    return RunFailure(reason=reason, exit_code=MACHINES_FAULT, advice="give the same command again once they are back")


# The remedies.


def _defragment(situation: Situation, cause: Cause) -> NextConfig | None:
    """Let the caching allocator grow its segments, once: what it reserved would have been enough, but in pieces."""
    config = situation.config
    if not situation.may_expand or config.knobs.expandable or not isinstance(cause, OutOfMemory):
        return None
    if not cause.fragmented:
        return None
    grown = replace(config, knobs=replace(config.knobs, expandable=True))
    return NextConfig(config=grown, changed=f"the allocator grows its segments ({EXPANDABLE})")


def _use_headroom(situation: Situation, cause: Cause) -> NextConfig | None:
    """Let an allocator that was kept out of the headroom reserve it."""
    config = situation.config
    if not config.knobs.keeps_headroom or not isinstance(cause, OutOfMemory):
        return None
    whole = replace(config, knobs=replace(config.knobs, keeps_headroom=False))
    return NextConfig(config=whole, changed="the allocator may reserve the headroom, too")


def _reduce_micro_batch(situation: Situation, cause: Cause) -> NextConfig | None:
    """Half the micro batch or less: as much as the trials and the growth allow.

    The first time that a rung runs out it may always. After that, recomputation or a leaner rung comes before it if
    that rung is faster. They come before it, too, where no size holds; if they cannot help, the least size is tried.
    """
    config = situation.config
    options = [size for size in config.micro_batches() if size <= config.knobs.micro_batch // 2]
    smaller = [each for size in options if situation.is_open(each := config.with_micro_batch(size))]
    if not smaller:
        return None
    holding = next((each for each in smaller if situation.holds(each)), None)
    ran_out_before = any(each.rung == config.rung for each in situation.failed)
    leaner = _reduce_rung(situation, cause) if ran_out_before or holding is None else None
    if leaner is not None and (holding is None or _is_faster(situation, leaner.config, holding)):
        return _recompute(situation, cause) or leaner
    chosen = holding or smaller[-1]
    return NextConfig(config=chosen, changed=_describe_batch(chosen, config))


def _is_faster(situation: Situation, config: RunConfig, other: RunConfig) -> bool:
    """Whether a config is faster than another one by the trials of both."""
    rate, other_rate = situation.rate(config), situation.rate(other)
    return rate is not None and other_rate is not None and rate > other_rate


def _recompute(situation: Situation, cause: Cause) -> NextConfig | None:
    """Recompute the activations of all layers, if the model can and does not yet."""
    config = situation.config
    leaner = replace(config, knobs=set_state(config.knobs, "on"))
    if is_as_lean(config.knobs, leaner.knobs) or not situation.can_recompute or not situation.is_open(leaner):
        return None
    layers = "of all layers " if config.knobs.checkpointing else ""
    return NextConfig(config=leaner, changed=f"activations {layers}are recomputed")


def _recompute_the_rest(situation: Situation, cause: Cause) -> NextConfig | None:
    """Recompute all layers where a share of them is, if that should hold: it costs less time than a smaller batch."""
    leaner = _recompute(situation, cause) if find_state(situation.config.knobs) in PARTIAL else None
    return leaner if leaner is not None and situation.holds(leaner.config) else None


def _reduce_rung(situation: Situation, cause: Cause) -> NextConfig | None:
    """The fastest leaner rung that holds the need by its trials; else the next one that nothing speaks against.

    A rung without a trial is tried by the relaunch itself: it costs no more than a trial, and trains where it fits.
    """
    names = [each.rung for each in situation.known_rungs]
    if situation.config.rung not in names:
        return None
    later = situation.known_rungs[names.index(situation.config.rung) + 1 :]
    return _choose_rung(situation, [each for each in later if each.forecast != "cannot_fit"])


def _reduce_host(situation: Situation, cause: Cause) -> NextConfig | None:
    """A rung that needs less host memory by trials or forecasts, or one that keeps its states on NVMe."""
    current = situation.known(situation.config.rung)
    others = [each for each in situation.known_rungs if each.rung != current.rung and each.forecast != "cannot_fit"]
    return _choose_rung(situation, [each for each in others if each.needs_nvme or each.needs_less_host(current)])


def _reduce_nvme(situation: Situation, cause: Cause) -> NextConfig | None:
    """A rung that writes nothing to NVMe and whose trials ran."""
    others = [each for each in situation.known_rungs if not each.needs_nvme and each.peak("device") is not None]
    return _choose_rung(situation, others)


def _unpin(situation: Situation, cause: Cause) -> NextConfig | None:
    """Host memory that is not pinned: torch rounds each pinned block up to a power of two."""
    config = situation.config
    pinned = [key for key in situation.known(config.rung).pinned if config.knobs.settings.get(key, True)]
    if not pinned:
        return None
    settings = {**config.knobs.settings, **dict.fromkeys(pinned, False)}
    leaner = replace(config, knobs=replace(config.knobs, settings=settings))
    return NextConfig(config=leaner, changed="host memory is not pinned") if situation.is_open(leaner) else None


def _load_in_ranks(situation: Situation, cause: Cause) -> NextConfig | None:
    """A loader without workers, which would hand over each batch in shared memory."""
    leaner = replace(situation.config, loads_in_ranks=True)
    if situation.config.loads_in_ranks or not situation.is_open(leaner):
        return None
    return NextConfig(config=leaner, changed="the ranks load their data without workers")


# The first remedy that has a config is chosen.
_REMEDIES: Mapping[Tier, tuple[Remedy, ...]] = {
    "device": (_defragment, _use_headroom, _recompute_the_rest, _reduce_micro_batch, _recompute, _reduce_rung),
    "host": (_unpin, _reduce_host),
    "pinned": (_unpin, _reduce_host),
    "shm": (_load_in_ranks, _unpin),
    "nvme": (_reduce_nvme,),
}


def _choose_rung(situation: Situation, rungs: list[KnownRung]) -> NextConfig | None:
    """The fastest of those that hold the need by a trial, at the largest micro batch; else the first without trials."""
    proven: list[tuple[float, RunConfig]] = []
    unproven: list[RunConfig] = []
    current = situation.config
    unpinned = any(current.knobs.settings.get(key) is False for key in situation.known(current.rung).pinned)
    for rung in rungs:
        if rung.refused is not None:
            continue
        configs = rung.make_configs(current, unpinned=unpinned, can_recompute=situation.can_recompute)
        fitting = [each for each in configs if situation.is_open(each) and situation.holds(each)]
        measured = [each for each in fitting if situation.find_fit(each) is not None]
        if measured:
            proven.append((situation.rate(measured[0]) or 0.0, measured[0]))
        elif fitting:
            within = [each for each in fitting if each.knobs.micro_batch <= current.knobs.micro_batch]
            unproven.append((within or fitting[-1:])[0])
    chosen = max(proven, key=lambda each: each[0])[1] if proven else next(iter(unproven), None)
    if chosen is None:
        return None
    changed = f"{chosen.rung} instead of {current.rung}"
    if chosen.knobs.micro_batch != current.knobs.micro_batch:
        changed += f", {_describe_batch(chosen, current)}"
    return NextConfig(config=chosen, changed=changed)


def _describe(config: RunConfig) -> str:
    knobs = config.knobs
    return f"{config.rung}, {knobs.micro_batch} × {knobs.accumulation} × {config.world_size}"


def _describe_batch(config: RunConfig, before: RunConfig) -> str:
    knobs = config.knobs
    return f"micro batch {knobs.micro_batch} instead of {before.knobs.micro_batch}, accumulation {knobs.accumulation}"
