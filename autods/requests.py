"""What a user may ask of each command: one frozen dataclass a command, one field an option.

The options of the command line (`cli.main`) and the arguments of the Python API (`api`) are generated from the
fields: name, type, default and help. A request checks the types of its values only; `settings` checks it against the
machine.
"""
# ruff: noqa: RUF009 (`option` and `listener` make fields, as `dataclasses.field` does)

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import (
    Amount,
    Axes,
    Checkpointing,
    ConfigSource,
    Count,
    Counts,
    Duration,
    Names,
    Paths,
    PathText,
    Prices,
    RankOfLora,
    Request,
    Size,
    Switch,
    Text,
    Texts,
    argument,
    listener,
    option,
)
from .config.trainers import SCRIPT_KINDS
from .devices import DEVICES
from .files import check_path
from .types import MOST_RANKS

if TYPE_CHECKING:
    from .events import Listener
    from .workload.protocol import Workload


@dataclass(frozen=True, kw_only=True)
class DiagnoseRequest(Request):
    """Say why a run died: from its LOGs (files, folders, - for standard input) and exit code."""

    logs: Paths = field(
        default=(), kw_only=False, metadata=argument("Logs of one run, or folders of them; - reads a pipe.", "LOG...")
    )
    exit_code: Count | None = option(
        "Workload",
        "Exit code of the run: 137, or -9 as Python says it.",
        "N",
        shown_default="",
        flags=("--exit-code",),
        most=2**32,
    )


@dataclass(frozen=True, kw_only=True)
class _WorkloadOptions(Request):
    """What describes a workload beside its path."""

    script_args: Texts = field(
        default=(),
        metadata=argument(
            "Arguments of a training script; {ds_config}, {micro_batch_size}, "
            "{gradient_accumulation_steps}, {train_batch_size} are filled in.",
            "-- ARGS...",
        ),
    )
    kind: Text | None = option(
        "Workload",
        f"model, script, or the script's library: {', '.join(SCRIPT_KINDS)}.",
        "NAME",
        shown_default="by what the file defines and imports",
    )
    task: Text | None = option(
        "Workload",
        "Task of a Hugging Face config: causal-lm, seq2seq, masked-lm or image-classification.",
        "NAME",
        shown_default="by the config's architectures",
    )
    seq_len: Count | None = option(
        "Workload", "Tokens of a sample; a model.py takes it as build_batch(…, seq_len).", "N"
    )
    target_len: Count | None = option("Workload", "Tokens of a target, for seq2seq.", "N", shown_default="--seq-len")
    lora: RankOfLora | None = option(
        "Workload",
        "Freeze a Hugging Face config's weights and train adapters of this rank, by peft; 16,q_proj,v_proj names the "
        "layers, and 4bit:16 holds the frozen ones in 4 bits, by bitsandbytes (QLoRA).",
        "[4bit:]RANK[,NAMES]",
        shown_default="all weights train; names: all-linear",
    )
    weights: Switch = option(
        "Workload",
        "Start from the safetensors beside a Hugging Face config, not from random weights; stage 3 loads them already "
        "split, as with --zero-init.",
        default=False,
    )
    device: Text = option("Machine", "cpu: CPU ranks stand in for GPUs.", "|".join(DEVICES), default="cuda")


@dataclass(frozen=True, kw_only=True)
class _MachineOptions(Request):
    """What describes a machine that need not be here."""

    gpus: Count | None = option(
        "Machine",
        "Ranks, of all nodes together.",
        "N",
        shown_default="a node's",
        most=MOST_RANKS,
        counts="rank",
    )
    nodes: Count | None = option(
        "Machine",
        "Nodes that the ranks are spread over.",
        "N",
        shown_default="1; nodes of 8 beyond 16 ranks",
        most=MOST_RANKS,
        counts="node",
    )
    on: Text | None = option(
        "Machine", "Machines of the catalogue, such as a100-80gb, or FILE.toml; all: which do I need?", "NAME,…|all"
    )
    gpu_memory: Size | None = option("Machine", "Memory of a card, such as 80GiB, when not --on.", "SIZE")
    host_memory: Size | None = option("Machine", "Memory of a node, such as 1TiB.", "SIZE")
    nvme: Size | None = option("Machine", "NVMe of a node, such as 2TiB; opens zero3-nvme.", "SIZE")
    on_event: Callable[[Any], None] | None = listener(
        "Called with each `forecast.values` event while it works, from any thread."
    )


@dataclass(frozen=True, kw_only=True)
class _LongSequenceOptions(Request):
    """How a Hugging Face causal language model gets by with long sequences."""

    sequence_parallel: Count | None = option(
        "Workload",
        "So many ranks share each sequence of a Hugging Face causal language model, by DeepSpeed's Ulysses attention; "
        "sequence_parallel_size in the config.",
        "N",
        shown_default="the base config's",
        most=MOST_RANKS,
    )
    tiled_loss: Switch = option(
        "Workload",
        "Compute such a model's logits and loss in tiles, by DeepSpeed's sequence_tiled_compute: never all logits.",
        default=False,
    )


_PRECISION = "auto (the base config's, else bf16; fp16 on V100 or T4), bf16, fp16 or fp32"


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest(_WorkloadOptions):
    """The options of every command about a workload."""

    def __post_init__(self) -> None:
        """Raises InputError as for every request, and for a workload whose path no file can have."""
        if isinstance(self.workload, str | os.PathLike):
            check_path(self.workload, "the workload's path")
        super().__post_init__()

    workload: str | Path | Workload = field(
        kw_only=False,
        metadata=argument(
            "A model.py with build_model and build_batch, a Hugging Face config.json or its folder "
            "(hf:./DIR), or a training script.",
            "WORKLOAD",
        ),
    )
    zero_init: Switch = option(
        "Workload", "Stage 3 builds the model under deepspeed.zero.Init, already split.", default=False
    )
    keep_checkpointing: Switch = option(
        "Workload",
        "A script's model recomputes activations where the script says so, not where it pays.",
        default=False,
    )
    base_config: ConfigSource | None = option(
        "Workload",
        "Your DeepSpeed JSON; what is not tuned stays. Also: --deepspeed-config.",
        "FILE",
        flags=("--base-config", "--deepspeed-config"),
    )
    global_batch: Count | None = option("Workload", "Keep micro batch × accumulation × ranks at N.", "N", most=10**8)
    precision: Text = option("Workload", f"{_PRECISION}.", "NAME", default="auto")
    ladder: Names = option("Search", "Try these rungs only.", "A,B,C", default=())
    with_rungs: Names = option(
        "Search", "Try these rungs, too, which are not in the ladder.", "A,B", default=(), flags=("--with",)
    )
    lossy: Switch = option(
        "Search", "Try the rungs that change the numbers, too: bf16 states, quantized weights.", default=False
    )
    strategies: Paths = option("Search", "A folder of your own rungs; may be repeated.", "DIR", default=())


@dataclass(frozen=True, kw_only=True)
class TrialRequest(WorkloadRequest):
    """The further options of a command that runs trials."""

    nodes: Count | None = option(
        "Machine",
        "Nodes of the Ray cluster that the ranks are spread over; --gpus 8 --nodes 2 is a "
        "hostfile of two lines with slots=4. Needs --address.",
        "N",
        shown_default="1",
        most=MOST_RANKS,
        counts="node",
    )
    address: Text | None = option(
        "Machine",
        "Run the ranks on this Ray cluster.",
        "auto|HOST:PORT",
        shown_default="a Ray of its own on this machine",
    )
    export: Names = option(
        "Machine",
        "Environment variables that the nodes of a cluster get from here, besides those of Python, torch, CUDA, NCCL "
        "and Hugging Face; WANDB_* is a pattern.",
        "A,B",
        default=(),
    )
    gpu_memory: Size | None = option(
        "Machine", "Memory of a rank, such as 416MiB; less than the card has emulates a smaller one.", "SIZE"
    )
    nvme_path: PathText | None = option("Machine", "A folder on NVMe; opens zero3-nvme.", "DIR")
    config: PathText = option(
        "Search", "How hard to try: quick, default, thorough or a FILE.toml.", "NAME", default="default"
    )
    stall_limit: Duration | None = option(
        "Search",
        "Silence of all ranks in a step that counts as a hang: 90s, 20m, 2h. A longer one lengthens the limits of "
        "building, checkpoints and the whole trial in proportion; large models have more by their bytes.",
        "TIME",
        shown_default="the config's",
    )
    forecast: Switch = option(
        "Search", "Forecast first; --no-forecast tries every rung, even those that cannot fit.", default=True
    )
    seed: Count = option("Search", "Seed of weights and search.", "N", default=0, most=2**32)
    fresh: Switch = option("Output", "Forget the finished trials of an earlier run.", default=False)
    out: PathText | None = option("Output", "Folder for the results.", "DIR", shown_default="autods-out/NAME")
    on_event: Listener | None = listener("Called with each `events.Event` while it works.")


@dataclass(frozen=True, kw_only=True)
class SearchRequest(TrialRequest):
    """The further options of a command that searches for the fastest config."""

    gpus: Count | None = option(
        "Machine",
        "Ranks, of all nodes together.",
        "N",
        shown_default="all visible cards",
        most=MOST_RANKS,
        counts="rank",
    )
    precision: Text = option("Workload", f"{_PRECISION}; bf16,fp32: either may win.", "NAME", default="auto")
    objective: Text = option(
        "Search", "samples or tokens (the most a second), memory (the least of the device).", "NAME", default="samples"
    )
    stop: Text | None = option(
        "Search",
        "Take the first rung that fits, or race all that could be faster.",
        "first-fit|fastest",
        shown_default="the config's",
    )
    max_trials: Count | None = option(
        "Search",
        "End within N trials, with those of the certificate; an answer takes 3.",
        "N",
        shown_default="the config's",
        counts="trial",
    )
    max_time: Duration | None = option(
        "Search", "End within so much time, with what was found and proven: 90s, 20m, 2h.", "TIME", shown_default="none"
    )


@dataclass(frozen=True, kw_only=True)
class FitRequest(SearchRequest):
    """Find the fastest DeepSpeed config that fits WORKLOAD, and write it to ds_config.json.

    Finished trials are journaled: the same command goes on where a stopped one ended.
    """

    rehearse: Switch = option(
        "Machine",
        "Run the whole search on the simulated GPUs of --on: no card, no ranks, nothing is proven.",
        default=False,
    )
    on: Text | None = option("Machine", "With --rehearse: a machine, such as h100-80gb or FILE.toml.", "NAME")


@dataclass(frozen=True, kw_only=True)
class RunRequest(SearchRequest):
    """Train WORKLOAD for real with the fastest config that fits, and keep the run alive when memory runs out.

    A finished fit is taken, else it is made first. On out of memory the run goes on from its last checkpoint with a
    leaner config, the same global batch and the same samples. The same command goes on where a stopped run ended.
    """

    steps: Count | None = option(
        "Run", "Optimizer steps, after which the run ends.", "N", shown_default="the script or the dataset decides"
    )
    checkpoint_every: Count | None = option(
        "Run", "Optimizer steps between checkpoints.", "N", shown_default="about ten minutes of steps"
    )
    data: PathText | None = option("Run", "The dataset, for build_dataset(path) or a causal language model.", "PATH")
    max_rescues: Count = option("Run", "How often a failed run goes on.", "N", default=10, most=10**4)
    fit: PathText | None = option(
        "Run", "The folder of a fit to begin with.", "DIR", shown_default="OUT/fit, or that of autods fit without --out"
    )
    fresh: Switch = option("Output", "Forget the run in this folder, with its checkpoints.", default=False)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(_MachineOptions, _LongSequenceOptions, WorkloadRequest):
    """Forecast what every rung of the ladder needs for WORKLOAD, on every tier. No GPU, no trial.

    DeepSpeed's own engine runs on a simulated GPU. A number is what a rank, or a node, must hold, with its interval.
    """

    nvme_path: PathText | None = option("Machine", "As --nvme, without a size: a folder that need not be here.", "DIR")
    price_per_gpu_hour: Prices | None = option(
        "Machine",
        "What an hour of a GPU costs, such as 2.5; for several machines a100-80gb=1.8,h100-80gb=2.5. With --tokens.",
        "PRICE",
    )
    micro_batch: Count | None = option(
        "Search", "Samples of a rank at a time.", "N", shown_default="1", most=10**6, counts="sample"
    )
    checkpointing: Checkpointing | None = option(
        "Search",
        "Recompute activations; every-2 of one in 2 layers; offload also keeps the inputs of layers on the host.",
        "on|off|every-2|every-3|every-4|offload",
        shown_default="on, if the model can",
    )
    as_written: Switch = option(
        "Search", "Buckets and limits of the base config, not as a fit would start them.", default=False
    )
    largest: Switch = option("Search", "Look for the largest micro batch of each rung.", default=True)
    timeline: PathText | None = option(
        "Output",
        "Write the recommended rung's step there as a trace for ui.perfetto.dev; NAME.json.gz packs it.",
        "FILE",
    )
    fresh: Switch = option("Output", "Simulate what an earlier command has simulated, too.", default=False)
    tokens: Amount | None = option("Output", "Say how long training on so many tokens takes: 300B, 1.5T, 300e9.", "N")
    stall_limit: Duration | None = option(
        "Search", "Silence of a simulation that counts as a hang: 90s, 20m, 2h.", "TIME", shown_default="15m"
    )


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(_LongSequenceOptions, TrialRequest):
    """Measure WORKLOAD under every combination of what is varied: throughput, memory on each tier, what runs out.

    Each cell is a real short trial, repeated in turns, so that noise is told from difference. Finished trials are
    journaled: the same command goes on where a stopped one ended.
    """

    precision: Text = option("Workload", f"{_PRECISION}; several: --vary precision=bf16,fp32.", "NAME", default="auto")
    vary: Axes = option(
        "Search",
        "What is varied, may be repeated: rung, micro_batch, pin_memory, precision, gpus, "
        "seq_len, checkpointing, accumulation, any DeepSpeed key, env.NAME, build_model.NAME, build_batch.NAME.",
        "NAME=A,B,…",
        default=(),
    )
    experiment: PathText | None = option("Search", "Axes of a file, such as stages or offload.", "NAME|FILE")
    gpus: Counts | None = option("Machine", "Ranks; several are an axis.", "N,M,…", shown_default="all visible cards")
    capacity: Switch = option("Search", "Look for the largest micro batch of each cell.", default=False)
    parallel_trials: Count = option(
        "Search",
        "With --capacity: search up to N cells side by side, as far as cards or processors are "
        "free. 1 by default: speeds of trials that share a machine cannot be compared.",
        "N",
        default=1,
        most=10**4,
    )
    forecast_only: Switch = option(
        "Machine", "The same without a trial, for a machine that need not be here.", default=False
    )
    on: Text | None = option("Machine", "With --forecast-only: a machine, such as a100-80gb or FILE.toml.", "NAME")
    host_memory: Size | None = option("Machine", "With --forecast-only: memory of a node, such as 1TiB.", "SIZE")
    repeats: Count | None = option(
        "Search", "How often each cell is measured, in turns.", "N", shown_default="3", most=10**4
    )
    steps: Count | None = option("Search", "Timed steps of a trial.", "N", shown_default="the config's", most=10**6)
    as_written: Switch = option(
        "Search", "Buckets and limits of the base config, not as a fit would start them.", default=False
    )


@dataclass(frozen=True, kw_only=True)
class ReportRequest(Request):
    """Show a finished fit, probe or run again, and write its page: FOLDER is its --out."""

    folder: PathText = field(
        kw_only=False, metadata=argument("The folder of a finished fit or probe, or of a run.", "FOLDER")
    )
    compare: PathText | None = option("Output", "Show a second fit beside it.", "FOLDER")


@dataclass(frozen=True, kw_only=True)
class DoctorRequest(Request):
    """Check this machine: cards, driver, compiler, DeepSpeed's ops, memory, limits, disks and settings.

    Each line that is not ok names the command that mends it.
    """

    nvme_path: PathText | None = option("Machine", "Measure this folder for NVMe offload.", "DIR")
    gpus: Switch = option(
        "Machine",
        "Start a rank on each card, look at its health, and measure an all-reduce: half a minute.",
        default=False,
    )
    ray: Switch = option("Machine", "Start Ray as a fit does, and run a task on it: some seconds.", default=False)
    fix: Switch = option(
        "Machine", "Build the ops that are missing now, so that no trial waits for them.", default=False
    )
    measure: Switch = option(
        "Machine",
        "Measure what this machine reaches, for the step times that later commands forecast: up to a minute.",
        default=False,
    )
    machine_file: PathText | None = option(
        "Machine", "With --measure: write the machine to a file, too, for --on FILE.toml anywhere.", "FILE.toml"
    )
    on_event: Listener | None = listener("Called with each `events.Event` while it works.")


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(_MachineOptions, _WorkloadOptions):
    """Say what each key of a DeepSpeed CONFIG means and costs, and what is wrong with it.

    With a WORKLOAD the config is simulated: the memory of a rank, and the bytes that its buckets and switches cost.
    """

    config: ConfigSource = field(
        kw_only=False,
        metadata=argument("DeepSpeed's config (JSON or YAML), accelerate's, or TrainingArguments.", "CONFIG"),
    )
    workload: PathText | None = field(
        default=None,
        kw_only=False,
        metadata=argument("A model.py, a Hugging Face config or its folder, or a training script.", "WORKLOAD"),
    )
    on: Text | None = option("Machine", "A machine of the catalogue, such as a100-80gb, or FILE.toml.", "NAME")
    micro_batch: Count | None = option(
        "Workload",
        "Samples of a rank at a time.",
        "N",
        shown_default="the config's, else 1",
        most=10**6,
        counts="sample",
    )
