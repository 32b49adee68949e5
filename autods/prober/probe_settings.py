"""The settings of a probe: a `ProbeRequest` checked against the workload and the machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice, product
from math import prod
from numbers import Integral
from pathlib import Path
from typing import cast

from ..arguments import check_count, show_value
from ..config.base_config import check_ranks, resolve_base_config, resolve_global_batch
from ..config.catalogue import Machine, make_hardware
from ..config.deepspeed import count_replicas
from ..config.plan_settings import choose_machines, nvme_place
from ..config.profiles import read_profile
from ..config.rungs import Rung, read_rungs
from ..config.settings import Settings, choose_folder, resolve_fit, select_ladder
from ..devices import find_device
from ..errors import InputError
from ..files import as_folder_name
from ..requests import FitRequest, ProbeRequest, TrialRequest
from ..system.host import Hardware
from ..types import Steps, WorkloadSource
from ..workload.conditions import ARGS, LENGTHS, argument_names
from ..workload.protocol import FUNCTIONS
from ..workload.script_source import has_placeholder
from .axes import Axis, Value, read_axes

MOST_CELLS = 1000
_REPEATS = 3
_PLAINEST = "ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """The resolved request of a probe.

    `settings` are those of the most ranks; their ladder holds the rungs that are varied.
    `repeats` is the number of measurements of each cell.
    `capacity` asks for the largest micro batch of each cell, with `parallel` cells at a time.
    `machine` gets forecasts instead of trials; None means trials on this machine.
    `as_written` keeps the buckets of the base config or of DeepSpeed, instead of sizing them as a fit would.
    `assumed` has sentences about values that were not given.
    """

    settings: Settings
    axes: tuple[Axis, ...]
    repeats: int
    steps: Steps
    capacity: bool = False
    parallel: int = 1
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


def resolve_probe(request: ProbeRequest, source: WorkloadSource, *, hardware: Hardware) -> ProbeSettings:
    """Check and resolve a request about this workload. Raises InputError."""
    rungs = read_rungs(tuple(map(Path, request.strategies)))
    axes, ranks = _read_axes(request, rungs)
    capacity = request.capacity or request.forecast_only
    machine = _choose_machine(request, hardware, ranks)
    axes, assumed = _with_rung(request, axes, capacity=capacity)
    named = {axis.name: axis.values for axis in axes}
    _check_contradictions(request, named, source, capacity=capacity)
    for name in named:
        _check_argument(name, request, source)

    shared = {option.name: getattr(request, option.name) for option in fields(TrialRequest)}
    if machine is not None:
        shared["nvme_path"] = None  # the folder need not be here
        if find_device(request.device).has_cards:
            shared["gpu_memory"] = None  # the machine's card is of that size
            hardware = make_hardware(machine, max(ranks))
    shared |= {"ladder": named["rung"], "with_rungs": (), "lossy": False}
    fit = FitRequest(**{**shared, "gpus": max(ranks, default=None)})
    settings = resolve_fit(fit, source, hardware=hardware)
    for count in ranks:  # a base config, or a global batch, may suit some and not others
        base = resolve_base_config(source, request.base_config, request.precision, world_size=count, bf16=True)
        if not source.form.brings_config:
            resolve_global_batch(request.global_batch, base, count_replicas(base, count))
        each = settings.ranks_per_node
        if count > each and count % each:
            raise InputError(
                f"--gpus {count}: {settings.nodes} nodes have {each} ranks each, and these fill no whole nodes",
                hint=f"give {each} or fewer, or a multiple of {each}",
            )
    if machine is not None:
        settings = replace(settings, machine=machine, nvme_path=nvme_place(request.nvme_path, machine))

    profile = settings.profile
    steps = profile.walk if capacity else profile.timed
    if request.steps is not None:
        steps = replace(steps, timed=request.steps, most_timed=request.steps)
    if capacity:  # the largest micro batch may take minutes for a phase, so none counts as stalled
        limits = replace(profile.limits, stall_s=profile.limits.init_s)
        settings = replace(settings, profile=replace(profile, limits=limits))
    resolved = ProbeSettings(
        settings=settings,
        axes=axes,
        repeats=request.repeats or (1 if capacity else _REPEATS),
        steps=steps,
        capacity=capacity,
        parallel=request.parallel_trials,
        as_written=request.as_written,
        machine=machine,
        assumed=assumed,
    )
    name = f"{as_folder_name(source.name)}-probe-{resolved.fingerprint()[:6]}"
    return replace(resolved, settings=replace(settings, out=choose_folder(request, name)))


def count_most_ranks(request: ProbeRequest) -> int | None:
    """Return the most ranks of any cell; None where none are given. Raises InputError."""
    return max(_read_axes(request, read_rungs(tuple(map(Path, request.strategies))))[1], default=None)


def _read_axes(request: ProbeRequest, rungs: Mapping[str, Rung]) -> tuple[tuple[Axis, ...], tuple[int, ...]]:
    """Return the axes, and the numbers of ranks; several of these are an axis, too."""
    experiment = None if request.experiment is None else os.fspath(request.experiment)
    axes = read_axes(request.vary, rungs, experiment)
    gpus, counts = request.gpus, tuple[int, ...]()
    try:
        if isinstance(gpus, str):
            counts = tuple(int(part) for part in gpus.split(","))
        elif gpus is not None:
            given: Iterable[object] = (gpus,) if isinstance(gpus, Integral) else cast(Iterable[object], gpus)
            counts = tuple(check_count("gpus", part) for part in islice(given, MOST_CELLS + 1))
    except (ValueError, TypeError):
        raise InputError(
            f"--gpus {gpus if isinstance(gpus, str) else show_value(gpus)}: this is not a list of numbers",
            hint="give --gpus 8, or --gpus 1,2,4,8",
        ) from None
    varied = next((axis.values for axis in axes if axis.name == "gpus"), ())
    if varied and counts:
        raise InputError("--vary gpus=… and --gpus both give the ranks", hint="drop one of the two")
    for count in counts:
        check_ranks(count)
    if len(counts) > MOST_CELLS:
        raise InputError(f"--gpus: more than {MOST_CELLS:,} numbers")
    if len(set(counts)) > 1:
        axes = (Axis(name="gpus", values=tuple(dict.fromkeys(counts))), *axes)
    return axes, counts or tuple(count for count in varied if isinstance(count, int))


def _choose_machine(request: ProbeRequest, hardware: Hardware, ranks: tuple[int, ...]) -> Machine | None:
    """Return the machine to forecast for; None for trials on this one."""
    if not request.forecast_only:
        for option, value in {"--on": request.on, "--host-memory": request.host_memory}.items():
            if value is not None:
                problem = f"{option} describes another machine, and trials run on this one"
                raise InputError(problem, hint="add --forecast-only")
        return None
    if request.nodes is not None or request.address is not None:
        raise InputError(
            "--forecast-only runs nothing on a cluster", hint="`autods plan --nodes` forecasts several nodes"
        )
    if not request.forecast:
        raise InputError("--forecast-only and --no-forecast contradict each other", hint="drop one of the two")
    device = find_device(request.device)
    machines = choose_machines(request, device, hardware)
    if len(machines) > 1:
        raise InputError("--on names several machines", hint="a probe forecasts for one; `autods plan` compares them")
    if not ranks and device.has_cards:
        raise InputError("say how many ranks to forecast for", hint="give --gpus 8, or --gpus 1,2,4,8")
    return machines[0]


def _with_rung(
    request: ProbeRequest, axes: tuple[Axis, ...], *, capacity: bool
) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """Return the axes with one of rungs, and a sentence where a rung had to be assumed."""
    given = {"--ladder": request.ladder, "--with": request.with_rungs, "--lossy": request.lossy}
    option = next((name for name, value in given.items() if value), None)
    if any(axis.name == "rung" for axis in axes):
        if option is not None:
            raise InputError(f"{option} and an axis both name the rungs", hint="give them once: --vary rung=…")
        return axes, ()
    if not (option or capacity):
        return (Axis(name="rung", values=(_PLAINEST,)), *axes), (f"rung {_PLAINEST} (--vary rung=…)",)
    profile = read_profile(os.fspath(request.config))
    ladder = select_ladder(request, profile.ladder)
    return (Axis(name="rung", values=tuple(rung.name for rung in ladder)), *axes), ()


def _check_contradictions(
    request: ProbeRequest, named: Mapping[str, tuple[Value, ...]], source: WorkloadSource, *, capacity: bool
) -> None:
    """Raise InputError where options, or an option and an axis, contradict each other."""
    for axis, option, is_set in (
        ("precision", "--precision", request.precision != "auto"),
        ("seq_len", "--seq-len", source.seq_len is not None),
        ("target_len", "--target-len", source.target_len is not None),
        ("accumulation", "--global-batch", request.global_batch is not None),
    ):
        if is_set and axis in named:
            raise InputError(f"--vary {axis}=… and {option} contradict each other", hint="drop one of the two")
    if capacity and "micro_batch" in named:
        option = "--capacity" if request.capacity else "--forecast-only"
        other = "drop --capacity" if request.capacity else "forecast one size by `autods plan --micro-batch`"
        problem = f"{option} looks for the largest micro batch itself"
        raise InputError(problem, hint=f"drop --vary micro_batch=…, or {other}")
    if "," in request.precision:
        raise InputError(
            "--precision names one; several are an axis", hint=f"give --vary precision={request.precision}"
        )
    trials = request.parallel_trials
    if trials > 1 and (not capacity or request.forecast_only):
        raise InputError(
            f"--parallel-trials {trials}: trials of a probe are timed, and would slow each other down",
            hint="drop it, or ask for --capacity, whose trials only show what fits",
        )
    for option, count in {"--repeats": request.repeats, "--steps": request.steps, "--parallel-trials": trials}.items():
        if count is not None and count < 1:
            raise InputError(f"{option} {count}: at least one is needed")
    if (cells := prod(map(len, named.values()))) > MOST_CELLS:
        raise InputError(
            f"--vary asks for {cells:,} cells", hint=f"give fewer values; {MOST_CELLS:,} cells are the most"
        )


def _check_argument(name: str, request: ProbeRequest, source: WorkloadSource) -> None:
    """Raise InputError, with the arguments that there are, when the workload has no such argument."""
    first, _, argument = name.partition(".")
    problem, hint = None, None
    if source.form.runs_as_main:
        if name in LENGTHS or first in FUNCTIONS:
            problem = "a training script decides that itself"
            hint = "vary an argument of it: --vary args.length=128,256 -- `--max_length {length}`"
        elif name == "checkpointing" and source.keeps_checkpointing:
            problem, hint = "--keep-checkpointing keeps what the script does", "drop one of the two"
        elif name.startswith(ARGS) and not has_placeholder(source.argv, argument):
            problem = f"its arguments hold no {{{argument}}}"
            hint = f"write it where the value belongs: -- `--option {{{argument}}}`"
    elif name.startswith(ARGS):
        problem = "it is for a training script's arguments"
    elif name in LENGTHS and source.form.is_model_config:
        if source.task == "image-classification":
            problem = "images have no length in tokens"
        elif name == "target_len" and source.task != "seq2seq":
            problem = f"it is for seq2seq, this is {source.task}"
    elif name == "target_len":
        problem, hint = "it is for a Hugging Face config", "give --vary build_batch.target_len=…"
    elif name == "seq_len" or first in FUNCTIONS:
        function, argument = ("build_batch", name) if name == "seq_len" else (first, argument)
        workload = Path(request.workload) if isinstance(request.workload, str) else request.workload
        known = argument_names(workload, source, function)
        if known is None or argument in known:
            return
        if source.form.is_model_config:
            has_none = f"the config has no {argument!r}"
            problem = has_none if function == "build_model" else "a config makes its own batches"
            hint = "give --vary seq_len=… for its batches, or build_model.KEY with a key of the config"
        else:
            problem = f"its {function} has no argument {argument!r}"
            first_ones = "…, " if function == "build_batch" else ""
            hint = f"it has {', '.join(known)}" if known else f"write def {function}({first_ones}{argument}=…)"
    if problem is not None:
        place = source.place
        raise InputError(f"--vary {name}: {problem}", place=place, hint=hint)


def list_notes(question: ProbeSettings) -> tuple[str, ...]:
    """Return sentences about assumptions and about effects that this device cannot show."""
    names = [axis.name for axis in question.axes]
    notes = [f"assumed: {assumption}" for assumption in question.assumed]
    if not question.capacity and "micro_batch" not in names:
        micro_batch = question.settings.base.get("train_micro_batch_size_per_gpu")
        notes += [] if isinstance(micro_batch, int) else ["assumed: micro batch 1 (--vary micro_batch=…)"]
    device = find_device(question.settings.device)
    if question.machine is not None:
        return tuple(notes)
    if any(name.startswith("env.NCCL_") for name in names) and "NCCL_" in device.idle_variables:
        notes.append("CPU ranks talk through gloo: NCCL's variables change nothing here")
    if any("pin_memory" in name for name in names) and not device.has_cards:
        notes.append("on CPU ranks no memory is pinned for the CPU's Adam: pin_memory shows on GPUs")
    if any("host" in rung.places.values() for rung in question.settings.ladder) and device.shares_host_memory:
        notes.append("on CPU ranks the device's memory is host memory: offloading to the CPU saves nothing here")
    return tuple(notes)
