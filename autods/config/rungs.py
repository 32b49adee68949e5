"""The ladder: rungs read from TOML, fastest first. A rung is a row of data; adding one means adding a file.

`unmet_need` says why a rung does not apply to a model at a site. A further need is a row of `NEEDS`.
A further value that files may leave open is a row of `PLACEHOLDERS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from ..devices import find_device
from ..errors import InputError
from ..schema import check_name, read_toml_as
from ..system.host import data_folder
from ..types import ModelFacts, Scalar, Tier
from .catalogue import Site

State = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How the first value of a key follows from the device or from the model, or which switch it is.

    Exactly one of `device_share`, `frozen_in_layer` and `switch` is set. `device_share` is a share of the device's
    memory, and the value counts elements of `bytes_each` bytes. `frozen_in_layer` is added to the number of a layer's
    frozen matrices. `most` is an upper bound in elements. `where_frozen` is the value for a model with frozen weights.
    """

    device_share: float | None = None
    bytes_each: int = 1
    frozen_in_layer: int | None = None
    most: int | None = None
    switch: bool | None = None
    where_frozen: int | None = None

    def is_required(self, facts: ModelFacts) -> bool:
        """Whether the model may not start, or not train, with DeepSpeed's default in place of this value."""
        return self.frozen_in_layer is not None or (self.where_frozen is not None and facts.has_frozen)

    def size(self, *, device_bytes: int, facts: ModelFacts) -> int:
        """Return the value. A number of elements is even, because ZeRO aligns its partitions to two, and at least 2."""
        if self.where_frozen is not None and facts.has_frozen:
            return self.where_frozen
        if self.frozen_in_layer is not None:
            return facts.frozen_in_layer + self.frozen_in_layer
        assert self.device_share is not None
        size = device_bytes * self.device_share / self.bytes_each
        bounded = min(size, self.most) if self.most else size
        return max(2, int(bounded) // 2 * 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """The search space of a key: either choices, or a range given as multiples of the start value.

    `usual` is DeepSpeed's default, which is worth a trial whatever the start value is. `least_nodes` is the number of
    nodes below which the key gains nothing. Choices may be placeholders, as in the rung's config.
    """

    choices: tuple[Scalar, ...] = ()
    low: float = 1.0
    high: float = 1.0
    most: int | None = None
    usual: bool | int | float | str | None = None
    least_nodes: int = 1


_SLOWNESS: Mapping[Tier, int] = {"device": 0, "pinned": 1, "shm": 1, "host": 1, "nvme": 2}
_OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One strategy of the ladder, as `strategies/*.toml` describes it.

    `order` is the position in the ladder; 10 is the fastest. `shards` are the states that are split over the ranks.
    `places` maps a state to the tier that holds it between steps. `needs` maps rows of `NEEDS` to what the rung asks
    of them. `start` maps a dotted DeepSpeed key to its first value, and `tune` maps it to its search space.
    `opt_in` is the reason that only who names the rung gets it; without one it is in the ladder that all walk.
    `lossy`: it trains with other numbers than the rungs of the ladder do. `eases` is what it takes off a step, such as
    communication: a plan that is bound by it says what the rung would give. A file with `variants` describes a family
    of rungs: one for each value of "{variant}" in its config, by the ending of its name, the fastest first.
    """

    name: str
    order: int
    title: str
    stage: Literal[0, 1, 2, 3]
    shards: tuple[State, ...]
    places: Mapping[State, Tier]
    ds_config: Mapping[str, Any]
    needs: Mapping[str, bool | int | str] = field(default_factory=dict)
    opt_in: str = ""
    lossy: bool = False
    eases: str = ""
    variants: Mapping[str, Scalar] = field(default_factory=dict)
    family: str = ""
    start: Mapping[str, Sizing] = field(default_factory=dict)
    tune: Mapping[str, Dimension] = field(default_factory=dict)

    @property
    def uses_nvme(self) -> bool:
        """Whether states lie on NVMe. They pass through it in every step, and the op for it takes minutes to build."""
        return "nvme" in self.places.values()

    def copies_beside(self, other: Rung) -> bool:
        """Whether this is the other rung with states on a slower tier: its steps do the same work, and copy besides."""
        pairs = [(_SLOWNESS[self.places[state]], _SLOWNESS[tier]) for state, tier in other.places.items()]
        is_slower = all(own >= others for own, others in pairs) and any(own > others for own, others in pairs)
        return is_slower and self._work == other._work

    @property
    def _work(self) -> tuple[object, ...]:
        """What its steps do, wherever its states lie."""
        zero = {
            key: value for key, value in self.ds_config.get("zero_optimization", {}).items() if key not in _OFFLOADS
        }
        return self.stage, set(self.shards), {**self.ds_config, "zero_optimization": zero}


def _lack_ranks(least: int, site: Site, facts: ModelFacts | None) -> str | None:
    replicas = site.world_size if facts is None else site.world_size // facts.replica_ranks
    if least <= replicas:
        return None
    if facts is not None and facts.pipeline_stages:
        return f"{replicas} replica{'s' if replicas > 1 else ''} of the pipeline: no sharding to gain"
    if site.world_size == 1:
        return "one rank: no sharding to gain"
    return f"{site.world_size} ranks: it needs {least} or more"


def _lack_nvme(wanted: bool, site: Site, facts: ModelFacts | None) -> str | None:
    return site.lacks_nvme if wanted and site.nvme_path is None else None


def _lack_precision(wanted: str, site: Site, facts: ModelFacts | None) -> str | None:
    return None if site.precision == wanted else f"the config trains in {site.precision}: it needs {wanted}"


def _lack_nodes(least: int, site: Site, facts: ModelFacts | None) -> str | None:
    nodes = f"{site.nodes} node{'s' if site.nodes > 1 else ''}"
    return None if least <= site.nodes else f"{nodes}: it saves traffic between nodes, so it needs {least} or more"


def _lack_cards(wanted: bool, site: Site, facts: ModelFacts | None) -> str | None:
    lacks = wanted and not find_device(site.device).has_cards
    return f"{site.device} ranks: its op is for cards" if lacks else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RungNeed:
    """A need that rungs may have. `value` is the type of what a rung asks for; every rung has to, if it is `required`.

    `find_lack` gets that, the site and the model's facts, or None before these are known. It returns the reason that
    the need is not met; None where it is.
    """

    value: type[bool] | type[int] | type[str]
    find_lack: Callable[[Any, Site, ModelFacts | None], str | None]
    required: bool = False


NEEDS: dict[str, RungNeed] = {
    "world_size": RungNeed(value=int, find_lack=_lack_ranks, required=True),  # with fewer replicas it gains nothing
    "nvme_path": RungNeed(value=bool, find_lack=_lack_nvme, required=True),
    "precision": RungNeed(value=str, find_lack=_lack_precision),
    "nodes": RungNeed(value=int, find_lack=_lack_nodes),
    "cards": RungNeed(value=bool, find_lack=_lack_cards),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A rung at a site, with the model's facts once they are known."""

    rung: Rung
    site: Site
    facts: ModelFacts | None

    def get(self, section: str, key: str) -> Any:
        """Return a key of a section: the rung's, else the user's; None where neither has it."""
        for config in (self.rung.ds_config, self.site.base):
            part = config.get(section)
            if isinstance(part, Mapping) and key in part:
                return part[key]
        return None

    @property
    def skips_norm(self) -> bool:
        return self.get("zero_optimization", "compute_grad_norm") is False

    @property
    def clips(self) -> bool:
        return self.site.base.get("gradient_clipping", 1.0) not in (0, "auto")  # 1.0 is DeepSpeed's default

    @property
    def offloads(self) -> bool:
        return self.rung.places["optimizer"] != "device"

    @property
    def accumulates_otherwise(self) -> bool:
        """Whether gradients are accumulated in another type than the model trains in."""
        given = self.get("data_types", "grad_accum_dtype")
        return given is not None and _TYPES.get(str(given).removeprefix("torch.")) != self.site.precision

    @property
    def halves_masters(self) -> bool:
        return any(self.get(half, f"{half}_master_weights_and_grads") for half in ("bf16", "fp16"))

    @property
    def needs_offload(self) -> bool:
        """Whether masters in half precision have to lie on the host; not with optimizer states in bf16, too."""
        in_fp16 = self.get("fp16", "fp16_master_weights_and_grads")
        return self.halves_masters and bool(in_fp16 or not self.get("bf16", "bf16_optimizer_states"))

    @property
    def sums(self) -> bool:
        return str(self.site.base.get("gradient_allreduce_op")).lower() == "sum"

    @property
    def scatters(self) -> bool:
        return self.get("zero_optimization", "reduce_scatter") is not False

    @property
    def trains_by_muon(self) -> bool:
        is_named = self.facts is None or not self.facts.has_optimizer  # a workload's own comes first
        return is_named and str(self.get("optimizer", "type")).lower() == "muon"

    @property
    def scales_first(self) -> bool:
        base = self.site.base
        return bool(base.get("prescale_gradients")) or base.get("gradient_predivide_factor") not in (None, 1)


_TYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32",
    "float32": "fp32", "float": "fp32",
}  # fmt: skip
# (the ZeRO stages under which DeepSpeed refuses it, what the rung, the config or the model has, the reason)
_REFUSALS: tuple[tuple[tuple[int, ...], Callable[[_Case], object], str], ...] = (
    (
        (2, 3),
        lambda case: case.facts is not None and case.facts.pipeline_stages,
        "a pipeline with ZeRO-{stage}: DeepSpeed refuses it, because a pipeline reduces its gradients once,"
        " after all micro batches, and ZeRO-{stage} splits them after each",
    ),
    (
        (3,),
        lambda case: case.facts is not None and case.facts.experts,
        "experts with ZeRO-3: DeepSpeed refuses its own MoE layers there, because their parameters are split"
        " over the ranks already; ZeRO-1 and ZeRO-2 take them",
    ),
    (
        (0, 3),
        lambda case: case.skips_norm,
        "compute_grad_norm is false: DeepSpeed takes that at ZeRO-1 and ZeRO-2 alone",
    ),
    (
        (1, 2),
        lambda case: case.skips_norm and case.clips,
        "compute_grad_norm is false: DeepSpeed refuses to clip without the norm; set gradient_clipping to 0",
    ),
    (
        (1, 2),
        lambda case: case.skips_norm and case.offloads,
        "compute_grad_norm is false: DeepSpeed refuses that with an offloaded optimizer",
    ),
    (
        (1,),
        lambda case: case.skips_norm and case.site.precision == "bf16" and case.accumulates_otherwise,
        "compute_grad_norm is false: DeepSpeed refuses that at ZeRO-1 in bf16 with gradients in fp32",
    ),
    (
        (0,),
        lambda case: case.accumulates_otherwise,
        "data_types.grad_accum_dtype is not the model's type: DeepSpeed refuses that without ZeRO",
    ),
    (
        (3,),
        lambda case: case.sums,
        "gradient_allreduce_op is sum: DeepSpeed refuses that at ZeRO-3",
    ),
    (
        (0,),
        lambda case: case.halves_masters,
        "master weights in half precision: DeepSpeed refuses them without ZeRO",
    ),
    (
        (1, 2, 3),
        lambda case: case.needs_offload and not case.offloads,
        "master weights in half precision: DeepSpeed refuses them where the optimizer is not offloaded",
    ),
    (
        (2, 3),
        lambda case: case.scales_first and case.scatters and not case.sums,
        "prescale_gradients or gradient_predivide_factor: DeepSpeed refuses them at ZeRO-{stage} with reduce_scatter",
    ),
    (
        (3,),
        lambda case: case.scatters and case.trains_by_muon,
        "Muon with reduce_scatter: DeepSpeed refuses it at ZeRO-3; set zero_optimization.reduce_scatter to false",
    ),
)


def unmet_need(rung: Rung, site: Site, facts: ModelFacts | None) -> str | None:
    """Return the reason that the rung does not apply at the site; None where it does.

    Before the model's facts are known (None) only the site can speak against it.
    """
    case = _Case(rung=rung, site=site, facts=facts)
    for stages, is_refused, reason in _REFUSALS:
        if rung.stage in stages and is_refused(case):
            return reason.format(stage=rung.stage)
    if (wrong := site.wrong_stages.get(rung.stage)) is not None:
        return wrong
    needs = rung.needs
    lacks = (need.find_lack(needs[name], site, facts) for name, need in NEEDS.items() if name in needs)
    return next((lack for lack in lacks if lack is not None), None)


# Text that stands for a value of the site in a rung's file: in its ds_config and among the choices of a tuned key.
PLACEHOLDERS: dict[str, Callable[[Site], Scalar]] = {
    "{nvme_path}": lambda site: str(site.nvme_path),
    "{ranks_per_node}": lambda site: site.ranks_per_node,
}
_VARIANT = "{variant}"  # stands for the value of a member in the file of a family
_LARGEST_PART = "{largest_part}"  # stands for the elements of a rank's part of the largest parameter, and a little more


def fill_in(rung: Rung, site: Site, largest_part: int) -> dict[str, Any]:
    """Return the DeepSpeed config of a rung's file, with values of the site and the model in place of placeholders."""
    return _replace_values(rung.ds_config, lambda value: largest_part if value == _LARGEST_PART else _fill(value, site))


def _replace_values(config: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        key: _replace_values(value, change) if isinstance(value, Mapping) else change(value)
        for key, value in config.items()
    }


def tune_at(rung: Rung, site: Site) -> dict[str, Dimension]:
    """Return the keys that are tuned at a site, with the site's values in place of placeholders."""
    return {
        key: replace(dimension, choices=tuple(_fill(choice, site) for choice in dimension.choices))
        for key, dimension in rung.tune.items()
        if site.nodes >= dimension.least_nodes
    }


def _fill(value: Any, site: Site) -> Any:
    return PLACEHOLDERS[value](site) if isinstance(value, str) and value in PLACEHOLDERS else value


_MOST_MULTIPLE = 1_000_000


def _check(rung: Rung) -> None:
    """Raises ValueError for values that the types alone allow."""
    for name in (rung.name, *(f"{rung.name}-{ending}" for ending in rung.variants)):
        check_name(name)  # of the folder of its logs, too
    if rung.variants and _replace_values(rung.ds_config, partial(_set_variant, 0)) == rung.ds_config:
        raise ValueError(f"variants needs a key of ds_config that is {_VARIANT!r}")
    for state in get_args(State):
        if state not in rung.places:
            raise ValueError(f"places lacks {state!r}")
    _check_needs(rung.needs)
    if rung.lossy and not rung.opt_in:
        raise ValueError("lossy needs opt_in, the reason that nobody gets it unasked")
    for key, sizing in rung.start.items():
        ways = (sizing.device_share, sizing.frozen_in_layer, sizing.switch)
        if ways.count(None) != len(ways) - 1:
            raise ValueError(f"start.{key} needs one of device_share, frozen_in_layer and switch")
        if not (0 <= (sizing.device_share or 0) <= 1 and sizing.bytes_each >= 1):
            raise ValueError(f"start.{key}: device_share is 0 to 1, bytes_each at least 1")
        if sizing.most is not None and sizing.most < 1:
            raise ValueError(f"start.{key}.most is {sizing.most}, not a number of elements")
    for key, dimension in rung.tune.items():
        choices, usual = dimension.choices, dimension.usual
        if not choices and key not in rung.start:
            raise ValueError(f"tune.{key} is a range, so it needs a start value in [start]")
        if not choices and not 0 < dimension.low < dimension.high:
            raise ValueError(f"tune.{key} needs choices, or 0 < low < high")
        if dimension.high > _MOST_MULTIPLE:
            raise ValueError(f"tune.{key}.high is a multiple of the start value, {_MOST_MULTIPLE:,} at most")
        if usual is not None and choices and (type(usual), usual) not in [(type(each), each) for each in choices]:
            raise ValueError(f"tune.{key}.usual is {usual!r}, not one of the choices")
        is_count = isinstance(usual, (int, float)) and not isinstance(usual, bool) and usual >= 2
        if usual is not None and not choices and not is_count:
            raise ValueError(f"tune.{key}.usual is {usual!r}, not a number of elements, at least 2")


_VALUE_WORDS = {bool: "true or false", int: "a whole number", str: "text"}


def _check_needs(needs: Mapping[str, bool | int | str]) -> None:
    for name, need in NEEDS.items():
        if name not in needs and need.required:
            raise ValueError(f"needs lacks {name!r}")
        if name in needs and type(needs[name]) is not need.value:
            raise ValueError(f"needs.{name} is {needs[name]!r}, not {_VALUE_WORDS[need.value]}")
    for name in needs:
        if name not in NEEDS:
            raise ValueError(f"needs has the unknown key {name!r}; it has {', '.join(NEEDS)}")


def read_rungs(folders: tuple[Path, ...] = ()) -> Mapping[str, Rung]:
    """Return every rung by name, fastest first, those for opting in, too.

    A rung of the user's folders replaces a shipped one of that name, or all of a family that has it.

    Raises InputError naming the key that is missing or of the wrong form.
    """
    rungs: dict[str, Rung] = {}
    for folder in (data_folder("strategies"), *folders):
        try:
            paths = sorted(folder / name for name in os.listdir(folder) if name.endswith(".toml"))
        except OSError as error:
            problem = f"is not a folder of rungs: {error.strerror}"
            raise InputError(problem, place=str(folder), hint="give --strategies a folder of .toml files") from None
        for path in paths:
            hint = "compare with strategies/zero3.toml"
            row = read_toml_as(Rung, path, name="rung", check=_check, hint=hint)
            others = {name: rung for name, rung in rungs.items() if row.name not in (name, rung.family)}
            rungs = others | {rung.name: rung for rung in _list_members(row)}
    return dict(sorted(rungs.items(), key=lambda item: item[1].order))


def _list_members(row: Rung) -> list[Rung]:
    """Return the rungs that a file describes: the one, or one for each of its variants, in the ladder's order."""
    if not row.variants:
        return [row]
    return [
        replace(
            row,
            name=f"{row.name}-{ending}",
            family=row.name,
            order=row.order + position,
            title=row.title.replace(_VARIANT, ending),
            ds_config=_replace_values(row.ds_config, partial(_set_variant, variant)),
            variants={},
        )
        for position, (ending, variant) in enumerate(row.variants.items())
    ]


def _set_variant(variant: Scalar, value: Any) -> Any:
    return variant if value == _VARIANT else value


def list_ladder(rungs: Mapping[str, Rung]) -> tuple[str, ...]:
    """Return the names of the rungs that are tried where nobody names any."""
    return tuple(name for name, rung in rungs.items() if not rung.opt_in)


def _list_family(name: str, rungs: Mapping[str, Rung]) -> tuple[str, ...]:
    """Return the names of the family's rungs, fastest first; none where no family has the name. "" names none."""
    return tuple(rung.name for rung in rungs.values() if name and rung.family == name)


def select_rungs(names: Iterable[str], rungs: Mapping[str, Rung]) -> tuple[Rung, ...]:
    """Return the named rungs and those of the named families, fastest first.

    Raises InputError for a name that neither a rung nor a family has.
    """
    wanted = [member for name in names for member in _list_family(name, rungs) or (name,)]
    for name in wanted:
        if name not in rungs:
            raise InputError(f"there is no rung {name!r} in the ladder", hint=f"the rungs are: {', '.join(rungs)}")
    if not wanted:
        raise InputError("the ladder is empty", hint=f"name at least one rung of: {', '.join(rungs)}")
    return tuple(sorted((rungs[name] for name in dict.fromkeys(wanted)), key=lambda rung: rung.order))
