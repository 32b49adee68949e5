"""What a user may ask of each command: one frozen dataclass a command, one field an option.

The options of the command line (`cli.main`) and the arguments of the Python API (`api`) are generated from the
fields: name, type, default and help. A request checks the types of its values only; `settings` checks it against the
machine.
"""
# ruff: noqa: RUF009 (`_option` and `_listener` make fields, as `dataclasses.field` does)

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

from .errors import InputError
from .files import check_path
from .types import MOST_RANKS

if TYPE_CHECKING:
    from .events import Listener
    from .workload.protocol import Workload


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that an argument accepts: their Python types, and the same in words for a message.

    `cli` is the type of the option on the command line. `items` are the values of a list, or the keys of a dict.
    """

    types: type | tuple[type, ...]
    words: str
    cli: Any = str
    items: Kind | None = None


MOST_COUNT = 10**9  # of any number that counts something
_MOST_ITEMS = 10_000  # of a list

Count = Annotated[int, Kind(Integral, "a whole number", int)]
Text = Annotated[str, Kind(str, "text")]
Switch = Annotated[bool, Kind(bool, "True or False", bool)]
Size = Annotated[str | int, Kind((str, Real), "a size such as '16GiB', or bytes")]
Duration = Annotated[str | float, Kind((str, Real), "a time such as '20m', or seconds")]
PathText = Annotated[str | os.PathLike[str], Kind((str, os.PathLike), "a path")]
ConfigSource = Annotated[
    str | os.PathLike[str] | Mapping[str, Any], Kind((str, os.PathLike, Mapping), "a path or a dict")
]
Texts = Annotated[Sequence[str], Kind(Iterable, "a list", list[str], items=Kind(str, "text"))]
Paths = Annotated[
    Sequence[str | os.PathLike[str]],
    Kind(Iterable, "a list", list[str], items=Kind((str, os.PathLike), "a path")),
]
Names = Annotated[str | Sequence[str], Kind((str, Iterable), "text such as 'a,b', or a list", items=Kind(str, "text"))]
Amount = Annotated[str | float, Kind((str, Real), "an amount such as '300B', or a number")]
Prices = Annotated[
    str | float | Mapping[str, float], Kind((str, Real, Mapping), "a price, or a dict of machines and prices")
]
OnOff = Annotated[str | bool, Kind((str, bool), "'on', 'off', True or False")]
Counts = Annotated[int | str | Sequence[int], Kind(object, "a number, or several")]
Axes = Annotated[
    Sequence[str] | Mapping[str, Iterable[Any]],
    Kind((Mapping, Iterable), "a list or a dict", list[str], items=Kind(str, "text")),
]


@dataclass(frozen=True, slots=True)
class Option:
    """How the command line spells a field, and its help text.

    `panel` is the group in which help shows the option; an option of the Python API alone has none. `default` is shown
    as the default where the real one depends on something. `flags` are spellings other than --name. `most` is the
    largest value of a number.
    """

    panel: str
    help: str
    metavar: str | None = None
    default: str | None = None
    flags: tuple[str, ...] = ()
    positional: bool = False
    most: int = MOST_COUNT


def _option(panel: str, help: str, metavar: str | None = None, *, value: Any = None, **more: Any) -> Any:
    """A field of this default value that is an option; see `Option`."""
    return field(default=value, metadata={"option": Option(panel, help, metavar, **more)})


def _argument(help: str, metavar: str) -> Mapping[str, Option]:
    """The metadata of a field that the command line takes by its position."""
    return {"option": Option("Workload", help, metavar, positional=True)}


def _listener(help: str) -> Any:
    """A field that only the Python API has."""
    return field(default=None, compare=False, repr=False, metadata={"option": Option("", help)})


@dataclass(frozen=True, kw_only=True)
class _Request:
    def __post_init__(self) -> None:
        """Raises InputError for a value of another type or size, and for empty text.

        Numbers become Python's own, numpy's too.
        """
        _refuse_empty_text(self)
        hints = field_types(type(self))
        for each in fields(self):
            option: Option = each.metadata["option"]
            name, hint, value = each.name, hints[each.name], getattr(self, each.name)
            if not option.panel and not (value is None or callable(value)):
                raise InputError(f"{name}={show_value(value)}: a function is needed, not {type(value).__name__}")
            if (kind := find_kind(hint)) is not None and (value is not None or type(None) not in get_args(hint)):
                value = check_value(name, value, kind)
                if kind.types is Integral and abs(value) > option.most:
                    raise InputError(f"{_spell(name)} {show_value(value)}: {option.most:,} is the most")
                object.__setattr__(self, name, value)


def _refuse_empty_text(request: _Request) -> None:
    """Raises InputError that names an option of empty text, which a shell makes of a variable that is not set.

    As a path it would mean the current folder. A script's own arguments may be empty.
    """
    for each in fields(request):
        value, option = getattr(request, each.name), each.metadata["option"]
        values = value if isinstance(value, list | tuple) and each.name != "script_args" else [value]
        if any(isinstance(item, str) and not item for item in values):
            name = option.metavar.rstrip(".") if option.positional else f"--{each.name.replace('_', '-')}"
            raise InputError(f"{name} is empty", hint="give it a value, or leave it out")


@dataclass(frozen=True, kw_only=True)
class DiagnoseRequest(_Request):
    """Say why a run died: from its LOGs (files, folders, - for standard input) and exit code."""

    logs: Paths = field(
        default=(), kw_only=False, metadata=_argument("Logs of one run, or folders of them; - reads a pipe.", "LOG...")
    )
    exit_code: Count | None = _option(
        "Workload",
        "Exit code of the run: 137, or -9 as Python says it.",
        "N",
        default="",
        flags=("--exit-code",),
        most=2**32,
    )


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest(_Request):
    """The options of every command about a workload."""

    def __post_init__(self) -> None:
        """Raises InputError as for every request, and for a workload whose path no file can have."""
        if isinstance(self.workload, str | os.PathLike):
            check_path(self.workload, "the workload's path")
        super().__post_init__()

    workload: str | Path | Workload = field(
        kw_only=False,
        metadata=_argument(
            "A model.py with build_model and build_batch, a Hugging Face config.json or its folder "
            "(hf:./DIR; random weights), or a training script.",
            "WORKLOAD",
        ),
    )
    script_args: Texts = field(
        default=(),
        metadata=_argument(
            "Arguments of a training script; {ds_config}, {micro_batch_size}, "
            "{gradient_accumulation_steps}, {train_batch_size} are filled in.",
            "-- ARGS...",
        ),
    )
    kind: Text | None = _option(
        "Workload",
        "model, script, deepspeed, hf_trainer, accelerate or lightning.",
        "NAME",
        default="by what the file defines and imports",
    )
    task: Text | None = _option(
        "Workload",
        "Task of a Hugging Face config: causal-lm, seq2seq, masked-lm or image-classification.",
        "NAME",
        default="by the config's architectures",
    )
    seq_len: Count | None = _option(
        "Workload", "Tokens of a sample; a model.py takes it as build_batch(…, seq_len).", "N"
    )
    target_len: Count | None = _option("Workload", "Tokens of a target, for seq2seq.", "N", default="--seq-len")
    zero_init: Switch = _option(
        "Workload", "Stage 3 builds the model under deepspeed.zero.Init, already split.", value=False
    )
    base_config: ConfigSource | None = _option(
        "Workload",
        "Your DeepSpeed JSON; what is not tuned stays. Also: --deepspeed-config.",
        "FILE",
        flags=("--base-config", "--deepspeed-config"),
    )
    global_batch: Count | None = _option("Workload", "Keep micro batch × accumulation × ranks at N.", "N", most=10**8)
    precision: Text = _option(
        "Workload",
        "auto (the base config's, else bf16; fp16 on V100 or T4), bf16, fp16 or fp32; bf16,fp32: either may win.",
        "NAME",
        value="auto",
    )
    device: Text = _option("Machine", "cpu: CPU ranks stand in for GPUs.", "cuda|cpu", value="cuda")
    ladder: Names = _option("Search", "Try these rungs only.", "A,B,C", value=())
    strategies: Paths = _option("Search", "A folder of your own rungs; may be repeated.", "DIR", value=())


@dataclass(frozen=True, kw_only=True)
class TrialRequest(WorkloadRequest):
    """The further options of a command that runs trials."""

    nodes: Count | None = _option(
        "Machine",
        "Nodes of the Ray cluster that the ranks are spread over; --gpus 8 --nodes 2 is a "
        "hostfile of two lines with slots=4. Needs --address.",
        "N",
        default="1",
        most=MOST_RANKS,
    )
    address: Text | None = _option(
        "Machine", "Run the ranks on this Ray cluster.", "auto|HOST:PORT", default="a Ray of its own on this machine"
    )
    export: Names = _option(
        "Machine",
        "Environment variables that the nodes of a cluster get from here, besides those of Python, torch, CUDA, NCCL "
        "and Hugging Face; WANDB_* is a pattern.",
        "A,B",
        value=(),
    )
    gpu_memory: Size | None = _option(
        "Machine", "Memory of a rank, such as 416MiB; less than the card has emulates a smaller one.", "SIZE"
    )
    nvme_path: PathText | None = _option("Machine", "A folder on NVMe; opens zero3-nvme.", "DIR")
    config: PathText = _option(
        "Search", "How hard to try: quick, default, thorough or a FILE.toml.", "NAME", value="default"
    )
    stall_limit: Duration | None = _option(
        "Search",
        "Silence of all ranks in a step that counts as a hang: 90s, 20m, 2h. A longer one lengthens the limits of "
        "building, checkpoints and the whole trial in proportion; large models have more by their bytes.",
        "TIME",
        default="the config's",
    )
    forecast: Switch = _option(
        "Search", "Forecast first; --no-forecast tries every rung, even those that cannot fit.", value=True
    )
    seed: Count = _option("Search", "Seed of weights and search.", "N", value=0, most=2**32)
    fresh: Switch = _option("Output", "Forget the finished trials of an earlier run.", value=False)
    out: PathText | None = _option("Output", "Folder for the results.", "DIR", default="autods-out/NAME")
    on_event: Listener | None = _listener("Called with each `events.Event` while it works.")


@dataclass(frozen=True, kw_only=True)
class SearchRequest(TrialRequest):
    """The further options of a command that searches for the fastest config."""

    gpus: Count | None = _option(
        "Machine", "Ranks, of all nodes together.", "N", default="all visible cards", most=MOST_RANKS
    )
    objective: Text = _option(
        "Search", "samples or tokens (the most a second), memory (the least of the device).", "NAME", value="samples"
    )
    stop: Text | None = _option(
        "Search",
        "Take the first rung that fits, or race all that could be faster.",
        "first-fit|fastest",
        default="the config's",
    )
    max_trials: Count | None = _option(
        "Search", "After N trials nothing more is raced or tuned.", "N", default="the config's"
    )
    max_time: Duration | None = _option(
        "Search", "The same after so much time in trials: 90s, 20m, 2h.", "TIME", default="none"
    )


@dataclass(frozen=True, kw_only=True)
class FitRequest(SearchRequest):
    """Find the fastest DeepSpeed config that fits WORKLOAD, and write it to ds_config.json.

    Finished trials are journaled: the same command goes on where a stopped one ended.
    """

    rehearse: Switch = _option(
        "Machine",
        "Run the whole search on the simulated GPUs of --on: no card, no ranks, nothing is proven.",
        value=False,
    )
    on: Text | None = _option("Machine", "With --rehearse: a machine of the catalogue, such as h100-80gb.", "NAME")


@dataclass(frozen=True, kw_only=True)
class RunRequest(SearchRequest):
    """Train WORKLOAD for real with the fastest config that fits, and keep the run alive when memory runs out.

    A finished fit is taken, else it is made first. On out of memory the run goes on from its last checkpoint with a
    leaner config, the same global batch and the same samples. The same command goes on where a stopped run ended.
    """

    steps: Count | None = _option(
        "Run",
        "Optimizer steps, after which the run ends.",
        "N",
        default="the script or the dataset decides",
    )
    checkpoint_every: Count | None = _option(
        "Run", "Optimizer steps between checkpoints.", "N", default="about ten minutes of steps"
    )
    data: PathText | None = _option("Run", "The dataset, for build_dataset(path) or a causal language model.", "PATH")
    max_rescues: Count = _option("Run", "How often a failed run goes on.", "N", value=10, most=10**4)
    fit: PathText | None = _option(
        "Run", "The folder of a fit to begin with.", "DIR", default="OUT/fit, or that of autods fit without --out"
    )
    fresh: Switch = _option("Output", "Forget the run in this folder, with its checkpoints.", value=False)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(WorkloadRequest):
    """Forecast what every rung of the ladder needs for WORKLOAD, on every tier. No GPU, no trial.

    DeepSpeed's own engine runs on a simulated GPU. A number is what a rank, or a node, must hold, with its interval.
    """

    gpus: Count | None = _option("Machine", "Ranks, of all nodes together.", "N", default="a node's", most=MOST_RANKS)
    nodes: Count | None = _option(
        "Machine",
        "Nodes that the ranks are spread over.",
        "N",
        default="1; nodes of 8 beyond 16 ranks",
        most=MOST_RANKS,
    )
    on: Text | None = _option(
        "Machine", "Machines of the catalogue, such as a100-80gb; all: which do I need?", "NAME,…|all"
    )
    gpu_memory: Size | None = _option("Machine", "Memory of a card, such as 80GiB, when not --on.", "SIZE")
    host_memory: Size | None = _option("Machine", "Memory of a node, such as 1TiB.", "SIZE")
    nvme: Size | None = _option("Machine", "NVMe of a node, such as 2TiB; opens zero3-nvme.", "SIZE")
    nvme_path: PathText | None = _option("Machine", "The same without a size; the folder need not be here.", "DIR")
    price_per_gpu_hour: Prices | None = _option(
        "Machine",
        "What an hour of a GPU costs, such as 2.5; for several machines a100-80gb=1.8,h100-80gb=2.5. With --tokens.",
        "PRICE",
    )
    micro_batch: Count | None = _option("Search", "Samples of a rank at a time.", "N", default="1", most=10**6)
    checkpointing: OnOff | None = _option("Search", "Recompute activations.", "on|off", default="on, if the model can")
    as_written: Switch = _option(
        "Search", "Buckets and limits of the base config, not as a fit would start them.", value=False
    )
    largest: Switch = _option("Search", "Look for the largest micro batch of each rung.", value=True)
    timeline: PathText | None = _option(
        "Output",
        "Write the recommended rung's step there as a trace for ui.perfetto.dev; NAME.json.gz packs it.",
        "FILE",
    )
    tokens: Amount | None = _option("Output", "Say how long training on so many tokens takes: 300B, 1.5T, 300e9.", "N")
    stall_limit: Duration | None = _option(
        "Search", "Silence of a simulation that counts as a hang: 90s, 20m, 2h.", "TIME", default="15m"
    )
    on_event: Callable[[Any], None] | None = _listener(
        "Called with each `forecast.values` event while it works, from any thread."
    )


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(TrialRequest):
    """Measure WORKLOAD under every combination of what is varied: throughput, memory on each tier, what runs out.

    Each cell is a real short trial, repeated in turns, so that noise is told from difference. Finished trials are
    journaled: the same command goes on where a stopped one ended.
    """

    vary: Axes = _option(
        "Search",
        "What is varied, may be repeated: rung, micro_batch, pin_memory, precision, gpus, "
        "seq_len, checkpointing, accumulation, any DeepSpeed key, env.NAME, build_model.NAME, build_batch.NAME.",
        "NAME=A,B,…",
        value=(),
    )
    experiment: PathText | None = _option("Search", "Axes of a file, such as stages or offload.", "NAME|FILE")
    gpus: Counts | None = _option("Machine", "Ranks; several are an axis.", "N,M,…", default="all visible cards")
    capacity: Switch = _option("Search", "Look for the largest micro batch of each cell.", value=False)
    parallel_trials: Count = _option(
        "Search",
        "With --capacity: search up to N cells side by side, as far as cards or processors are "
        "free. 1 by default: speeds of trials that share a machine cannot be compared.",
        "N",
        value=1,
        most=10**4,
    )
    forecast_only: Switch = _option(
        "Machine", "The same without a trial, for a machine that need not be here.", value=False
    )
    on: Text | None = _option("Machine", "With --forecast-only: a machine of the catalogue, such as a100-80gb.", "NAME")
    host_memory: Size | None = _option("Machine", "With --forecast-only: memory of a node, such as 1TiB.", "SIZE")
    repeats: Count | None = _option(
        "Search", "How often each cell is measured, in turns.", "N", default="3", most=10**4
    )
    steps: Count | None = _option("Search", "Timed steps of a trial.", "N", default="the config's", most=10**6)
    as_written: Switch = _option(
        "Search", "Buckets and limits of the base config, not as a fit would start them.", value=False
    )


@dataclass(frozen=True, kw_only=True)
class ReportRequest(_Request):
    """Show a finished fit, probe or run again, and write its page: FOLDER is its --out."""

    folder: PathText = field(
        kw_only=False, metadata=_argument("The folder of a finished fit or probe, or of a run.", "FOLDER")
    )
    compare: PathText | None = _option("Output", "Show a second fit beside it.", "FOLDER")


@dataclass(frozen=True, kw_only=True)
class DoctorRequest(_Request):
    """Check this machine: cards, driver, compiler, DeepSpeed's ops, memory, limits, disks and settings.

    Each line that is not ok names the command that mends it.
    """

    nvme_path: PathText | None = _option("Machine", "Measure this folder for NVMe offload.", "DIR")
    ray: Switch = _option("Machine", "Start Ray as a fit does, and run a task on it: some seconds.", value=False)
    fix: Switch = _option(
        "Machine", "Build the ops that are missing now, so that no trial waits for them.", value=False
    )
    on_event: Listener | None = _listener("Called with each `events.Event` while it works.")


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(_Request):
    """Say what each key of a DeepSpeed CONFIG means and costs, and what is wrong with it.

    With a WORKLOAD the config is simulated: the memory of a rank, and the bytes that its buckets and switches cost.
    """

    config: ConfigSource = field(kw_only=False, metadata=_argument("A DeepSpeed JSON file.", "CONFIG"))
    workload: PathText | None = field(
        default=None,
        kw_only=False,
        metadata=_argument("A model.py, a Hugging Face config or its folder, or a training script.", "WORKLOAD"),
    )
    script_args: Texts = field(default=(), metadata=_argument("Arguments of a training script.", "-- ARGS..."))
    kind: Text | None = _option(
        "Workload",
        "model, script, deepspeed, hf_trainer, accelerate or lightning.",
        "NAME",
        default="by what the file defines and imports",
    )
    task: Text | None = _option("Workload", "Task of a Hugging Face config.", "NAME", default="by its architectures")
    seq_len: Count | None = _option("Workload", "Tokens of a sample.", "N")
    target_len: Count | None = _option("Workload", "Tokens of a target, for seq2seq.", "N", default="--seq-len")
    micro_batch: Count | None = _option("Workload", "Samples of a rank at a time.", "N", default="the config's, else 1")
    device: Text = _option("Machine", "cpu: CPU ranks stand in for GPUs.", "cuda|cpu", value="cuda")
    gpus: Count | None = _option("Machine", "Ranks, of all nodes together.", "N", default="a node's")
    nodes: Count | None = _option("Machine", "Nodes that the ranks are spread over.", "N", default="1")
    on: Text | None = _option("Machine", "A machine of the catalogue, such as a100-80gb.", "NAME")
    gpu_memory: Size | None = _option("Machine", "Memory of a card, such as 80GiB, when not --on.", "SIZE")
    host_memory: Size | None = _option("Machine", "Memory of a node, such as 1TiB.", "SIZE")
    nvme: Size | None = _option("Machine", "NVMe of a node, such as 2TiB.", "SIZE")
    on_event: Callable[[Any], None] | None = _listener("Called with each `forecast.values` event while it works.")


def field_types(request: type) -> Mapping[str, Any]:
    """The type of each field, with its `Kind`; types of higher layers become Any."""
    above = {"Workload": Any, "Listener": Any}
    return get_type_hints(request, localns=above, include_extras=True)


def find_kind(hint: Any) -> Kind | None:
    """The `Kind` in a field's type, such as Count | None. None means that any value is accepted."""
    if get_origin(hint) is Annotated:
        return next((each for each in hint.__metadata__ if isinstance(each, Kind)), None)
    return next((kind for part in get_args(hint) if (kind := find_kind(part)) is not None), None)


def check_value(name: str, value: Any, kind: Kind) -> Any:
    """Return the value as a request keeps it. Raises InputError that names an argument of another type.

    True and False are no numbers. Text is no list, although Python can iterate over it. No text has a NUL character.
    A path is one that a file can have.
    """
    types = kind.types if isinstance(kind.types, tuple) else (kind.types,)
    if isinstance(value, bool):
        right = bool in types or object in types
    elif Iterable in types and str not in types:
        right = isinstance(value, types) and not isinstance(value, str | bytes | os.PathLike)
    else:
        right = isinstance(value, types)
    if not right:
        raise InputError(f"{name}={show_value(value)}: {kind.words} is needed, not {type(value).__name__}")
    if Integral in types:
        return int(value)
    if os.PathLike in types and isinstance(value, str | os.PathLike):
        check_path(value, _spell(name))
    if isinstance(value, str) and "\0" in value:
        raise InputError(f"{_spell(name)} has a NUL character")
    if Iterable not in types or isinstance(value, str):
        return value
    values = tuple(islice(value, _MOST_ITEMS + 1))
    if len(values) > _MOST_ITEMS:
        raise InputError(f"{_spell(name)} has more than {_MOST_ITEMS:,} values")
    for number, item in enumerate(values if kind.items is not None else ()):
        check_value(f"{name}[{number}]", item, cast(Kind, kind.items))
    return value if isinstance(value, Mapping) else values


def show_value(value: Any) -> str:
    """A wrong value as a message repeats it: at most 80 characters, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # a number of thousands of digits, an object whose __repr__ raises
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name.isidentifier() and name not in ("workload", "logs") else name


def check_count(name: str, value: Any) -> int:
    """Return a whole number. Raises InputError for a value of another type."""
    return cast(int, check_value(name, value, Kind(Integral, "a whole number", int)))


def describe_arguments(request: Callable[..., Any]) -> str:
    """The docstring of a function of the Python API that takes these arguments."""
    lines = [f"{each.name}: {each.metadata['option'].help}" for each in fields(cast(Any, request))]
    return "\n".join([inspect.cleandoc(request.__doc__ or ""), "", *lines])
