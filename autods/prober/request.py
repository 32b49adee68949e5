"""Check a request of `autods probe` against the workload and the machine, and resolve it to settings."""

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
from ..config.plan_settings import nvme_place
from ..config.profiles import read_profile
from ..config.settings import Settings, resolve_fit
from ..config.strategies import Rung, read_rungs, select_rungs
from ..errors import InputError
from ..requests import FitRequest, check_count
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
    """Return the machine that options name or describe, else this one. Raises InputError."""
    device_bytes, host_bytes = parse_size(gpu_memory, "--gpu-memory"), parse_size(host_memory, "--host-memory")
    if on is not None:
        if device_bytes is not None or device == "cpu":
            raise InputError(
                "--on names a card and contradicts --gpu-memory and --device cpu", hint="drop one of the two"
            )
        named = find_machines(on)
        if len(named) > 1:
            raise InputError(
                "--on names several machines", hint="a probe forecasts for one; `autods plan` compares them"
            )
        return replace(named[0], host_bytes=host_bytes or named[0].host_bytes)
    if device_bytes is not None:
        return Machine(name=ASKED, title="as asked", device_bytes=device_bytes, host_bytes=host_bytes)
    if not here.cards or device == "cpu":
        raise InputError("say which device to forecast for", hint="give --gpu-memory 80GiB, or --on a100-80gb")
    smallest = min(card.total_bytes for card in here.cards)
    return Machine(
        name=HERE, title=here.cards[0].name, device_bytes=smallest, gpus=len(here.cards), host_bytes=here.host_bytes
    )


def describe_hardware(machine: Machine, ranks: int, here: Hardware) -> Hardware:
    """Return hardware with as many cards of the machine as there are ranks."""
    cards = tuple(
        Card(index=index, name=machine.title, total_bytes=machine.device_bytes, free_bytes=machine.device_bytes)
        for index in range(ranks)
    )
    host = machine.host_bytes or _NO_LIMIT
    return replace(
        here, cards=cards, unusable=None, host_bytes=max(host, ranks * machine.device_bytes), host_free_bytes=host
    )


# From a function of the workload to its arguments; None where it takes any, or they are not known.
Arguments = Callable[[str], Sequence[str] | None]


def check_contradictions(
    named: Mapping[str, Sequence[Value]], source: WorkloadSource, options: Mapping[str, Any], *, capacity: bool
) -> None:
    """Raise InputError where an axis and an option contradict each other."""
    given = {
        "precision": options.get("precision", "auto") != "auto",
        "seq_len": source.seq_len is not None,
        "target_len": source.target_len is not None,
        "accumulation": options.get("global_batch") is not None,
    }
    for name, is_set in given.items():
        if is_set and name in named:
            option = "--global-batch" if name == "accumulation" else f"--{name.replace('_', '-')}"
            raise InputError(f"--vary {name}=… and {option} contradict each other", hint="drop one of the two")
    if capacity and "micro_batch" in named:
        raise InputError(
            "--capacity looks for the largest micro batch itself", hint="drop --vary micro_batch=…, or --capacity"
        )
    if "," in str(options.get("precision", "")):
        raise InputError(
            "--precision names one; several are an axis", hint=f"give --vary precision={options['precision']}"
        )


def check_packed(ranks: int, settings: Settings) -> None:
    """Raise InputError unless the ranks of a cell fill whole nodes or a part of one."""
    each = settings.ranks_per_node
    if ranks > each and ranks % each:
        raise InputError(
            f"--gpus {ranks}: {settings.nodes} nodes have {each} ranks each, and these fill no whole nodes",
            hint=f"give {each} or fewer, or a multiple of {each}",
        )


def check_argument(name: str, source: WorkloadSource, arguments: Arguments) -> None:
    """Raise InputError, with the arguments that there are, when the workload has no such argument."""
    if source.kind == "script" or name.startswith(ARGS):
        _check_script(name, source)
        return
    function, _, argument = ("build_batch", "", name) if name in LENGTHS else name.partition(".")
    if function not in FUNCTIONS or (name in LENGTHS and source.kind == "hf_config"):
        if name in LENGTHS and (wrong := _wrong_length(name, source)) is not None:
            raise InputError(f"--vary {name}: {wrong}", place=source.path)
        return
    if name == "target_len":
        raise InputError(f"--vary {name}: it is for a Hugging Face config", hint="give --vary build_batch.target_len=…")
    known = arguments(function)
    if known is None or argument in known:
        return
    place = source.path if source.kind != "pickle" else source.name
    if source.kind == "hf_config":
        problem = f"the config has no {argument!r}" if function == "build_model" else "a config makes its own batches"
        hint = "give --vary seq_len=… for its batches, or build_model.KEY with a key of the config"
    else:
        problem = f"its {function} has no argument {argument!r}"
        hint = (
            f"it has {', '.join(known)}"
            if known
            else f"write def {function}({'…, ' * (function == 'build_batch')}{argument}=…)"
        )
    raise InputError(f"--vary {name}: {problem}", place=place, hint=hint)


def _check_script(name: str, source: WorkloadSource) -> None:
    """Check an axis of a script, where `args.NAME` stands for {NAME} in its command line."""
    if source.kind != "script":
        raise InputError(f"--vary {name}: it is for a training script's arguments", place=source.path)
    if name in LENGTHS or name.partition(".")[0] in FUNCTIONS or name == "checkpointing":
        raise InputError(
            f"--vary {name}: a training script decides that itself",
            place=source.path,
            hint="vary an argument of it: --vary args.length=128,256 -- --max_length {length}",
        )
    if name.startswith(ARGS) and not has_placeholder(source.argv, name.removeprefix(ARGS)):
        raise InputError(
            f"--vary {name}: its arguments hold no {{{name.removeprefix(ARGS)}}}",
            place=source.path,
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
    """The resolved request of a probe.

    `settings` are those of the most ranks; their ladder holds the rungs that are varied.
    `repeats` is the number of measurements of each cell.
    `capacity` asks for the largest micro batch of each cell, with `parallel` cells at a time.
    `forecast_only` means forecasts for `machine` instead of trials; None is this machine.
    `as_written` keeps the buckets of the base config or of DeepSpeed, instead of sizing them as a fit would.
    `assumed` has sentences about values that were not given.
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
        """Yield the values of each cell by axis; the last axis changes fastest."""
        for values in product(*(axis.values for axis in self.axes)):
            yield dict(zip((axis.name for axis in self.axes), values, strict=True))

    def fingerprint(self) -> str:
        """Return equal text for probes that can share trials. The number of repeats does not matter."""
        axes = [asdict(axis) for axis in self.axes]
        identity = [
            self.settings.fingerprint(),
            axes,
            asdict(self.steps),
            self.capacity,
            self.as_written,
            repr(self.machine),
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


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
    **options: Any,
) -> ProbeSettings:
    """Check and resolve a request. Raises InputError.

    `arguments` returns the arguments of the workload's functions.
    `ladder` has the rungs when no axis names them.
    `machine` is the one to forecast for, and `hardware` is then its hardware.
    `options` are the other fields of `FitRequest`.
    """
    capacity = capacity or machine is not None
    folders = (experiment_rungs(), *strategies)
    rungs = read_rungs(folders)
    axes = _with_gpus(read_axes(vary, rungs), gpus)
    if ladder and any(axis.name == "rung" for axis in axes):
        raise InputError("--ladder and an axis both name the rungs", hint="give them once: --vary rung=…")
    axes, assumed = _with_rung(axes, _rungs_of(ladder, rungs, config, capacity=capacity))
    named = {axis.name: axis.values for axis in axes}
    check_contradictions(named, source, options, capacity=capacity)
    for name in named:
        check_argument(name, source, arguments)
    counts = [count for count in named.get("gpus", gpus) if isinstance(count, int)]
    nvme_path = options.pop("nvme_path", None) if machine is not None else None  # it need not be here
    fit = FitRequest(
        source.path, gpus=max(counts, default=None), base_config=base_config, config=config, out=out,
        ladder=tuple(str(name) for name in named["rung"]), strategies=folders, **options,
    )  # fmt: skip
    settings = resolve_fit(fit, source, hardware=hardware)
    for count in counts:  # a base config, or a global batch, may suit some and not others
        base, _ = load_base_config(source.base_config if base_config is None else base_config, world_size=count)
        resolve_global_batch(options.get("global_batch"), base, count)
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
    """Return the folder of rungs that are not in the ladder; experiments compare them, and any probe may name them."""
    return data_folder("configs") / "experiments" / "strategies"


def _with_gpus(axes: tuple[Axis, ...], gpus: Sequence[int]) -> tuple[Axis, ...]:
    """Return the axes with one for several numbers of ranks."""
    if any(axis.name == "gpus" for axis in axes):
        if gpus:
            raise InputError("--vary gpus=… and --gpus both give the ranks", hint="drop one of the two")
        return axes
    for count in gpus:
        check_ranks(count)
    return (Axis(name="gpus", values=tuple(dict.fromkeys(gpus))), *axes) if len(set(gpus)) > 1 else axes


def _rungs_of(ladder: tuple[str, ...], rungs: Mapping[str, Rung], config: str, *, capacity: bool) -> tuple[str, ...]:
    """Return the rungs where no axis names any: a ladder's, or none for timed cells without a ladder."""
    if not ladder and not capacity:
        return ()
    return tuple(rung.name for rung in select_rungs(ladder or read_profile(config).ladder, rungs))


def _with_rung(axes: tuple[Axis, ...], names: tuple[str, ...]) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """Return the axes with one of rungs, and a sentence where a rung had to be assumed."""
    if any(axis.name == "rung" for axis in axes):
        return axes, ()
    assumed = () if names else (f"rung {PLAINEST} (--vary rung=…)",)
    return (Axis(name="rung", values=names or (PLAINEST,)), *axes), assumed


def _steps(settings: Settings, timed: int | None, *, capacity: bool) -> Steps:
    """Return the steps of a trial: those of the profile, or as many timed ones as were requested."""
    steps = settings.profile.walk if capacity else settings.profile.timed
    if timed is None:
        return steps
    count = _at_least_one(timed, "--steps", 1)
    return replace(steps, timed=count, most_timed=count)


def _parallel(trials: int, *, capacity: bool) -> int:
    """Return the number of trials at a time; timed trials run alone."""
    if trials > 1 and not capacity:
        raise InputError(
            f"--parallel-trials {trials}: trials of a probe are timed, and would slow each other down",
            hint="drop it, or ask for --capacity, whose trials only show what fits",
        )
    return _at_least_one(trials, "--parallel-trials", 1)


def _patient(settings: Settings) -> Settings:
    """Return settings without the limit on a stalled phase: the largest micro batch may take minutes for one."""
    limits = settings.profile.limits
    return replace(settings, profile=replace(settings.profile, limits=replace(limits, stall_s=limits.init_s)))


def _at_least_one(count: int | None, option: str, default: int) -> int:
    if count is not None and count < 1:
        raise InputError(f"{option} {count}: at least one is needed")
    return default if count is None else count


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
    **options: Any,
) -> ProbeSettings:
    """Check and resolve a request, given by the arguments of `api.probe`. Raises InputError."""
    workload = Path(workload) if isinstance(workload, str) else workload
    vary = add_experiment(experiment, vary)
    counts = _counts(gpus)
    machine = None
    if forecast_only and (options.get("nodes") is not None or options.get("address") is not None):
        raise InputError(
            "--forecast-only runs nothing on a cluster", hint="`autods plan --nodes` forecasts several nodes"
        )
    if forecast_only:
        machine = choose_machine(
            hardware,
            device=options.get("device", "cuda"),
            gpu_memory=options.get("gpu_memory"),
            host_memory=host_memory,
            on=on,
        )
        if options.get("device", "cuda") == "cuda":
            options = {**options, "gpu_memory": None}  # the machine's card is of that size
            hardware = describe_hardware(machine, max(_ranks(counts, vary)), hardware)
        if not options.get("forecast", True):
            raise InputError("--forecast-only and --no-forecast contradict each other", hint="drop one of the two")
    elif on is not None or host_memory is not None:
        option = "--on" if on is not None else "--host-memory"
        raise InputError(f"{option} describes another machine, and trials run on this one", hint="add --forecast-only")
    return build_probe_settings(
        source, lambda function: argument_names(workload, source, function), hardware=hardware, vary=vary, gpus=counts,
        machine=machine, **options,
    )  # fmt: skip


def count_most_ranks(
    gpus: int | str | Sequence[int] | None, vary: Sequence[str] | Mapping[str, Iterable[Any]]
) -> int | None:
    """Return the most ranks of any cell; None where none are given. Raises InputError."""
    return max(_given_ranks(_counts(gpus), vary), default=None)


def _counts(gpus: int | str | Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers in text such as '1,2,4'."""
    if gpus is None or isinstance(gpus, int):
        return () if gpus is None else (gpus,)
    try:
        if isinstance(gpus, str):
            return tuple(int(part) for part in gpus.split(","))
        return tuple(check_count("gpus", part) for part in gpus)
    except (ValueError, TypeError):
        raise InputError(
            f"--gpus {gpus}: this is not a list of numbers", hint="give --gpus 8, or --gpus 1,2,4,8"
        ) from None


def _ranks(counts: Sequence[int], vary: Sequence[str] | Mapping[str, Iterable[Any]]) -> list[int]:
    """Return the ranks of all cells. Raises InputError where none are given."""
    if not (ranks := _given_ranks(counts, vary)):
        raise InputError("say how many ranks to forecast for", hint="give --gpus 8, or --gpus 1,2,4,8")
    return ranks


def _given_ranks(counts: Sequence[int], vary: Sequence[str] | Mapping[str, Iterable[Any]]) -> list[int]:
    lines = vary.items() if isinstance(vary, Mapping) else (line.partition("=")[::2] for line in vary)
    named = [values for name, values in lines if name.strip() == "gpus"]
    parts = [part for values in named for part in (values.split(",") if isinstance(values, str) else values)]
    return [*counts, *(int(part) for part in parts if str(part).strip().isdigit())]


def list_notes(question: ProbeSettings) -> tuple[str, ...]:
    """Return sentences about assumptions and about effects that this device cannot show."""
    names = [axis.name for axis in question.axes]
    notes = [f"assumed: {assumption}" for assumption in question.assumed]
    if not question.capacity and "micro_batch" not in names:
        micro_batch = question.settings.base.get("train_micro_batch_size_per_gpu")
        notes += [] if isinstance(micro_batch, int) else ["assumed: micro batch 1 (--vary micro_batch=…)"]
    if question.settings.device != "cpu" or question.forecast_only:
        return tuple(notes)
    if any(name.startswith("env.NCCL_") for name in names):
        notes.append("CPU ranks talk through gloo: NCCL's variables change nothing here")
    if any("pin_memory" in name for name in names):
        notes.append("on CPU ranks no memory is pinned for the CPU's Adam: pin_memory shows on GPUs")
    rungs = {rung.name: rung for rung in question.settings.ladder}
    if any("host" in rung.places.values() for rung in rungs.values()):
        notes.append("on CPU ranks the device's memory is host memory: offloading to the CPU saves nothing here")
    return tuple(notes)
