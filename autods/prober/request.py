"""What a user asked of `autods probe`, checked against the machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from ..config.base_config import ConfigSource, check_ranks, load_base_config, parse_size, resolve_global_batch
from ..config.catalogue import ASKED, HERE, Machine, find_machines
from ..config.profiles import read_profile
from ..config.strategies import Rung, read_rungs, select_rungs
from ..errors import InputError
from ..requests import FitRequest, check_count
from ..settings import Settings, nvme_place, resolve_fit
from ..system.gpus import Card
from ..system.host import Hardware, data_folder
from ..types import Steps, WorkloadSource
from ..workload.conditions import ARGS, LENGTHS, argument_names
from ..workload.protocol import FUNCTIONS, Workload
from ..workload.script_source import has_placeholder
from .axes import Axis, Value, add_experiment, read_axes

_NO_LIMIT = 2**62


def choose_machine(
    here: Hardware,
    *,
    device: str,
    gpu_memory: str | int | None,
    host_memory: str | int | None,
    on: str | None,
) -> Machine:
    """The machine that was named or described; else this one's cards. Raises InputError."""
    asked, host = parse_size(gpu_memory, "--gpu-memory"), parse_size(host_memory, "--host-memory")
    if on is not None:
        if asked is not None or device == "cpu":
            raise InputError(
                "--on names a card, so --gpu-memory and --device cpu say nothing", hint="drop one of the two"
            )
        named = find_machines(on)
        if len(named) > 1:
            raise InputError(
                "--on names several machines", hint="a probe forecasts for one; `autods plan` compares them"
            )
        return replace(named[0], host_bytes=host or named[0].host_bytes)
    if asked is not None:
        return Machine(name=ASKED, title="as asked", device_bytes=asked, host_bytes=host)
    if not here.cards or device == "cpu":
        raise InputError("say which device to forecast for", hint="give --gpu-memory 80GiB, or --on a100-80gb")
    smallest = min(card.total_bytes for card in here.cards)
    return Machine(
        name=HERE, title=here.cards[0].name, device_bytes=smallest, gpus=len(here.cards), host_bytes=here.host_bytes
    )


def describe_hardware(machine: Machine, ranks: int, here: Hardware) -> Hardware:
    """The machine as `settings.resolve` looks at one: with as many cards as there are ranks."""
    cards = tuple(
        Card(index=index, name=machine.title, total_bytes=machine.device_bytes, free_bytes=machine.device_bytes)
        for index in range(ranks)
    )
    host = machine.host_bytes or _NO_LIMIT
    return replace(
        here, cards=cards, unusable=None, host_bytes=max(host, ranks * machine.device_bytes), host_free_bytes=host
    )


# The arguments of a function of the workload; None: any, or nobody knows.
Arguments = Callable[[str], Sequence[str] | None]


def check_contradictions(
    named: Mapping[str, Sequence[Value]], source: WorkloadSource, asked: Mapping[str, Any], *, capacity: bool
) -> None:
    """An axis and an option must not say the same thing differently."""
    options = {
        "precision": asked.get("precision", "auto") != "auto",
        "seq_len": source.seq_len is not None,
        "target_len": source.target_len is not None,
        "accumulation": asked.get("global_batch") is not None,
    }
    for name, said in options.items():
        if said and name in named:
            option = "--global-batch" if name == "accumulation" else f"--{name.replace('_', '-')}"
            raise InputError(f"--vary {name}=… and {option} contradict each other", hint="drop one of the two")
    if capacity and "micro_batch" in named:
        raise InputError(
            "--capacity looks for the largest micro batch itself", hint="drop --vary micro_batch=…, or --capacity"
        )
    if "," in str(asked.get("precision", "")):
        raise InputError(
            "--precision names one; several are an axis", hint=f"give --vary precision={asked['precision']}"
        )


def check_packed(ranks: int, settings: Settings) -> None:
    """Ranks of a cell fill whole nodes, or a part of one."""
    each = settings.ranks_per_node
    if ranks > each and ranks % each:
        raise InputError(
            f"--gpus {ranks}: {settings.nodes} nodes have {each} ranks each, and these fill no whole nodes",
            hint=f"give {each} or fewer, or a multiple of {each}",
        )


def check_argument(name: str, source: WorkloadSource, arguments: Arguments) -> None:
    """Raises InputError when the workload has no such argument, and lists those that it has."""
    if source.kind == "script" or name.startswith(ARGS):
        _check_script(name, source)
        return
    function, _, argument = ("build_batch", "", name) if name in LENGTHS else name.partition(".")
    if function not in FUNCTIONS or (name in LENGTHS and source.kind == "hf_config"):
        if name in LENGTHS and (wrong := _wrong_length(name, source)) is not None:
            raise InputError(f"--vary {name}: {wrong}", where=source.path)
        return
    if name == "target_len":
        raise InputError(f"--vary {name}: it is for a Hugging Face config", hint="give --vary build_batch.target_len=…")
    known = arguments(function)
    if known is None or argument in known:
        return
    where = source.path if source.kind != "pickle" else source.name
    if source.kind == "hf_config":
        what = f"the config has no {argument!r}" if function == "build_model" else "a config makes its own batches"
        hint = "give --vary seq_len=… for its batches, or build_model.KEY with a key of the config"
    else:
        what = f"its {function} has no argument {argument!r}"
        hint = (
            f"it has {', '.join(known)}"
            if known
            else f"write def {function}({'…, ' * (function == 'build_batch')}{argument}=…)"
        )
    raise InputError(f"--vary {name}: {what}", where=where, hint=hint)


def _check_script(name: str, source: WorkloadSource) -> None:
    """A script is called by its command line, and `args.NAME` stands for {NAME} there."""
    if source.kind != "script":
        raise InputError(f"--vary {name}: it is for a training script's arguments", where=source.path)
    if name in LENGTHS or name.partition(".")[0] in FUNCTIONS or name == "checkpointing":
        raise InputError(
            f"--vary {name}: a training script decides that itself",
            where=source.path,
            hint="vary an argument of it: --vary args.length=128,256 -- --max_length {length}",
        )
    if name.startswith(ARGS) and not has_placeholder(source.argv, name.removeprefix(ARGS)):
        raise InputError(
            f"--vary {name}: its arguments hold no {{{name.removeprefix(ARGS)}}}",
            where=source.path,
            hint=f"write it where the value belongs: -- --option {{{name.removeprefix(ARGS)}}}",
        )


def _wrong_length(name: str, source: WorkloadSource) -> str | None:
    if source.task == "image-classification":
        return "images have no length in tokens"
    return f"it is for seq2seq, this is {source.task}" if name == "target_len" and source.task != "seq2seq" else None


MOST_CELLS = 1000
REPEATS = 3
PLAINEST = "ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """One probe. `settings` are those of the most ranks; its ladder holds the rungs that are varied.

    repeats: how often each cell is measured. capacity: look for the largest micro batch of each cell. parallel: cells
    that are searched for it at a time. forecast_only: without a trial, for `machine`. as_written: buckets are the base
    config's, or DeepSpeed's own, and not sized as a fit would start. machine: what is forecast for; None: this one.
    assumed: what nobody said, in sentences.
    """

    settings: Settings
    axes: tuple[Axis, ...]
    repeats: int
    steps: Steps
    capacity: bool = False
    parallel: int = 1
    forecast_only: bool = False
    as_written: bool = False
    machine: Machine | None = None
    assumed: tuple[str, ...] = ()

    def cells(self) -> Iterable[dict[str, Value]]:
        """Axis → value of each cell; the last axis changes fastest."""
        for values in product(*(axis.values for axis in self.axes)):
            yield dict(zip((axis.name for axis in self.axes), values, strict=True))

    def fingerprint(self) -> str:
        """Equal for probes whose trials answer each other's; more repeats go on with those that are there."""
        axes = [asdict(axis) for axis in self.axes]
        said = [
            self.settings.fingerprint(),
            axes,
            asdict(self.steps),
            self.capacity,
            self.as_written,
            repr(self.machine),
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def build_probe_settings(
    source: WorkloadSource,
    arguments: Arguments,
    *,
    hardware: Hardware,
    vary: Sequence[str] | Mapping[str, Iterable[Any]] = (),
    gpus: Sequence[int] = (),
    repeats: int | None = None,
    steps: int | None = None,
    capacity: bool = False,
    parallel_trials: int = 1,
    machine: Machine | None = None,
    as_written: bool = False,
    base_config: ConfigSource = None,
    config: str = "default",
    ladder: tuple[str, ...] = (),
    strategies: tuple[Path, ...] = (),
    out: str | Path | None = None,
    **asked: Any,
) -> ProbeSettings:
    """Check what was asked. `asked`: the rest, as `settings.resolve` takes it. Raises InputError.

    arguments: what the workload's functions take. ladder: the rungs, where no axis names them. machine: one that need
    not be here; it is forecast for, and `hardware` has to be its own.
    """
    capacity = capacity or machine is not None
    folders = (experiment_rungs(), *strategies)
    rungs = read_rungs(folders)
    axes = _with_gpus(read_axes(vary, rungs), gpus)
    if ladder and any(axis.name == "rung" for axis in axes):
        raise InputError("--ladder and an axis both say the rungs", hint="give them once: --vary rung=…")
    axes, assumed = _with_rung(axes, _rungs_of(ladder, rungs, config, capacity=capacity))
    named = {axis.name: axis.values for axis in axes}
    check_contradictions(named, source, asked, capacity=capacity)
    for name in named:
        check_argument(name, source, arguments)
    counts = [count for count in named.get("gpus", gpus) if isinstance(count, int)]
    nvme_path = asked.pop("nvme_path", None) if machine is not None else None  # it need not be here
    fit = FitRequest(
        source.path, gpus=max(counts, default=None), base_config=base_config, config=config, out=out,
        ladder=tuple(str(name) for name in named["rung"]), strategies=folders, **asked,
    )  # fmt: skip
    settings = resolve_fit(fit, source, hardware=hardware)
    for count in counts:  # a base config, or a global batch, may suit some and not others
        base, _ = load_base_config(source.base_config if base_config is None else base_config, world_size=count)
        resolve_global_batch(asked.get("global_batch"), base, count)
        check_packed(count, settings)
    if machine is not None:
        settings = replace(settings, nvme_path=nvme_place(nvme_path, machine))
    question = ProbeSettings(
        settings=_patient(settings) if capacity else settings,
        axes=axes,
        repeats=_at_least_one(repeats, "--repeats", 1 if capacity else REPEATS),
        steps=_steps(settings, steps, capacity=capacity),
        capacity=capacity,
        parallel=_parallel(parallel_trials, capacity=capacity and machine is None),
        forecast_only=machine is not None,
        as_written=as_written,
        machine=machine,
        assumed=assumed,
    )
    if (count := prod(len(axis.values) for axis in axes)) > MOST_CELLS:
        raise InputError(
            f"--vary asks for {count:,} cells", hint=f"give fewer values; {MOST_CELLS:,} cells are the most"
        )
    name = f"{source.name}-probe-{question.fingerprint()[:6]}"
    folder = (Path(out) if out is not None else Path("autods-out") / name).absolute()
    return replace(question, settings=replace(question.settings, out=folder))


def experiment_rungs() -> Path:
    """Rungs beside the ladder that experiments compare; any probe may name them."""
    return data_folder("configs") / "experiments" / "strategies"


def _with_gpus(axes: tuple[Axis, ...], gpus: Sequence[int]) -> tuple[Axis, ...]:
    """Several numbers of ranks are an axis, however they are given."""
    if any(axis.name == "gpus" for axis in axes):
        if gpus:
            raise InputError("--vary gpus=… and --gpus both say the ranks", hint="drop one of the two")
        return axes
    for count in gpus:
        check_ranks(count)
    return (Axis(name="gpus", values=tuple(dict.fromkeys(gpus))), *axes) if len(set(gpus)) > 1 else axes


def _rungs_of(ladder: tuple[str, ...], rungs: Mapping[str, Rung], config: str, *, capacity: bool) -> tuple[str, ...]:
    """The rungs where no axis names any; of an experiment, where nobody named any, the plainest."""
    if not ladder and not capacity:
        return ()
    return tuple(rung.name for rung in select_rungs(ladder or read_profile(config).ladder, rungs))


def _with_rung(axes: tuple[Axis, ...], names: tuple[str, ...]) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """Every cell has a rung; what was assumed for it."""
    if any(axis.name == "rung" for axis in axes):
        return axes, ()
    assumed = () if names else (f"rung {PLAINEST} (--vary rung=…)",)
    return (Axis(name="rung", values=names or (PLAINEST,)), *axes), assumed


def _steps(settings: Settings, asked: int | None, *, capacity: bool) -> Steps:
    """How long a trial is: the config's, or so many timed steps."""
    steps = settings.profile.walk if capacity else settings.profile.timed
    if asked is None:
        return steps
    count = _at_least_one(asked, "--steps", 1)
    return replace(steps, timed=count, most_timed=count)


def _parallel(trials: int, *, capacity: bool) -> int:
    """Only trials that are not timed may run side by side."""
    if trials > 1 and not capacity:
        raise InputError(
            f"--parallel-trials {trials}: trials of a probe are timed, and would slow each other down",
            hint="drop it, or ask for --capacity, whose trials only show what fits",
        )
    return _at_least_one(trials, "--parallel-trials", 1)


def _patient(settings: Settings) -> Settings:
    """The largest micro batch may take minutes for one phase: that alone is no hang."""
    limits = settings.profile.limits
    return replace(settings, profile=replace(settings.profile, limits=replace(limits, stall_s=limits.init_s)))


def _at_least_one(asked: int | None, option: str, otherwise: int) -> int:
    if asked is not None and asked < 1:
        raise InputError(f"{option} {asked}: at least one is needed")
    return otherwise if asked is None else asked


def resolve_probe(
    workload: str | Path | Workload,
    source: WorkloadSource,
    *,
    hardware: Hardware,
    vary: Sequence[str] | Mapping[str, Iterable[Any]] = (),
    experiment: str | Path | None = None,
    gpus: int | str | Sequence[int] | None = None,
    forecast_only: bool = False,
    on: str | None = None,
    host_memory: str | int | None = None,
    **asked: Any,
) -> ProbeSettings:
    """Check what was asked, by the names of `api.probe`. Raises InputError."""
    said = Path(workload) if isinstance(workload, str) else workload
    vary = add_experiment(experiment, vary)
    counts = _counts(gpus)
    machine = None
    if forecast_only and (asked.get("nodes") is not None or asked.get("address") is not None):
        raise InputError(
            "--forecast-only runs nothing on a cluster", hint="`autods plan --nodes` forecasts several nodes"
        )
    if forecast_only:
        machine = choose_machine(
            hardware,
            device=asked.get("device", "cuda"),
            gpu_memory=asked.get("gpu_memory"),
            host_memory=host_memory,
            on=on,
        )
        if asked.get("device", "cuda") == "cuda":
            asked = {**asked, "gpu_memory": None}  # the machine's card is of that size
            hardware = describe_hardware(machine, max(_ranks(counts, vary)), hardware)
        if not asked.get("forecast", True):
            raise InputError("--forecast-only and --no-forecast contradict each other", hint="drop one of the two")
    elif on is not None or host_memory is not None:
        option = "--on" if on is not None else "--host-memory"
        raise InputError(f"{option} is of another machine: trials run on this one", hint="add --forecast-only")
    return build_probe_settings(
        source, lambda function: argument_names(said, source, function), hardware=hardware, vary=vary, gpus=counts,
        machine=machine, **asked,
    )  # fmt: skip


def count_most_ranks(
    gpus: int | str | Sequence[int] | None, vary: Sequence[str] | Mapping[str, Iterable[Any]]
) -> int | None:
    """The most ranks of any cell, as far as they are said. Raises InputError."""
    return max(_said(_counts(gpus), vary), default=None)


def _counts(gpus: int | str | Sequence[int] | None) -> tuple[int, ...]:
    """'1,2,4' → three numbers."""
    if gpus is None or isinstance(gpus, int):
        return () if gpus is None else (gpus,)
    try:
        if isinstance(gpus, str):
            return tuple(int(part) for part in gpus.split(","))
        return tuple(check_count("gpus", part) for part in gpus)
    except (ValueError, TypeError):
        raise InputError(f"--gpus {gpus}: these are no numbers", hint="give --gpus 8, or --gpus 1,2,4,8") from None


def _ranks(counts: Sequence[int], vary: Sequence[str] | Mapping[str, Iterable[Any]]) -> list[int]:
    """How many cards the machine that is forecast for must show: all that any cell asks for."""
    if not (found := _said(counts, vary)):
        raise InputError("say how many ranks to forecast for", hint="give --gpus 8, or --gpus 1,2,4,8")
    return found


def _said(counts: Sequence[int], vary: Sequence[str] | Mapping[str, Iterable[Any]]) -> list[int]:
    lines = vary.items() if isinstance(vary, Mapping) else (line.partition("=")[::2] for line in vary)
    named = [values for name, values in lines if name.strip() == "gpus"]
    parts = [part for values in named for part in (values.split(",") if isinstance(values, str) else values)]
    return [*counts, *(int(part) for part in parts if str(part).strip().isdigit())]


def list_notes(question: ProbeSettings) -> tuple[str, ...]:
    """Sentences: what was assumed, and what this device cannot show."""
    names = [axis.name for axis in question.axes]
    said = [f"assumed: {one}" for one in question.assumed]
    if not question.capacity and "micro_batch" not in names:
        micro_batch = question.settings.base.get("train_micro_batch_size_per_gpu")
        said += [] if isinstance(micro_batch, int) else ["assumed: micro batch 1 (--vary micro_batch=…)"]
    if question.settings.device != "cpu" or question.forecast_only:
        return tuple(said)
    if any(name.startswith("env.NCCL_") for name in names):
        said.append("CPU ranks talk through gloo: NCCL's variables change nothing here")
    if any("pin_memory" in name for name in names):
        said.append("on CPU ranks no memory is pinned for the CPU's Adam: pin_memory shows on GPUs")
    rungs = {rung.name: rung for rung in question.settings.ladder}
    if any("host" in rung.places.values() for rung in rungs.values()):
        said.append("on CPU ranks the device's memory is host memory: offloading to the CPU saves nothing here")
    return tuple(said)
