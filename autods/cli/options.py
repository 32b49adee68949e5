"""Every option of the command line, once. What a value means is checked by `settings` and `question`, not here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Workload = Annotated[
    str,
    Argument(
        metavar="WORKLOAD",
        help="A model.py with build_model and build_batch, a Hugging Face config (hf:./FOLDER), or a training script.",
    ),
]
ScriptArgs = Annotated[
    list[str] | None,
    Argument(
        metavar="-- ARGS...",
        help="Of a training script; {ds_config}, {micro_batch_size}, {gradient_accumulation_steps}, {train_batch_size} "
        "are filled in.",
    ),
]
Module = Annotated[
    bool, Option("--module", "-m", help="WORKLOAD is a module, package.module, and is started as with python -m.")
]
Kind = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="model, script, deepspeed, hf_trainer, accelerate or lightning.",
        show_default="by what the file defines and imports",
    ),
]
Gpus = Annotated[
    int | None, Option(metavar="N", help="Ranks, of all nodes together.", show_default="all visible cards")
]
FitNodes = Annotated[
    int | None,
    Option(
        "--nodes",
        metavar="N",
        help="Nodes of the Ray cluster that the ranks are spread over; --gpus 8 --nodes 2 is a hostfile of two lines "
        "with slots=4. Needs --address.",
        show_default="1",
    ),
]
Address = Annotated[
    str | None,
    Option(
        metavar="auto|HOST:PORT",
        help="Run the ranks on this Ray cluster.",
        show_default="a Ray of its own on this machine",
    ),
]
Device = Annotated[str, Option(metavar="cuda|cpu", help="cpu: CPU ranks stand in for GPUs.")]
GpuMemory = Annotated[
    str | None,
    Option(metavar="SIZE", help="Memory of a rank, such as 416MiB; less than the card has emulates a smaller one."),
]
GlobalBatch = Annotated[int | None, Option(metavar="N", help="Keep micro batch × accumulation × ranks at N.")]
Precision = Annotated[
    str,
    Option(metavar="NAME", help="auto (the base config's, else bf16), bf16, fp16 or fp32; bf16,fp32: either may win."),
]
Objective = Annotated[
    str, Option(metavar="NAME", help="samples or tokens (the most a second), memory (the least of the device).")
]
Stop = Annotated[
    str | None,
    Option(
        metavar="first-fit|fastest",
        help="Take the first rung that fits, or race all that could be faster.",
        show_default="the config's",
    ),
]
MaxTrials = Annotated[
    int | None, Option(metavar="N", help="After N trials nothing more is raced or tuned.", show_default="the config's")
]
MaxTime = Annotated[
    str | None, Option(metavar="TIME", help="The same after so much time in trials: 90s, 20m, 2h.", show_default="none")
]
BaseConfig = Annotated[
    str | None,
    Option(
        "--base-config",
        "--deepspeed-config",
        metavar="FILE",
        help="Your DeepSpeed JSON; what is not tuned stays. Also: --deepspeed-config.",
    ),
]
Config = Annotated[str, Option(metavar="NAME", help="How hard to try: quick, default, thorough or a FILE.toml.")]
Ladder = Annotated[str | None, Option(metavar="A,B,C", help="Try these rungs only.")]
Strategies = Annotated[list[Path] | None, Option(metavar="DIR", help="A folder of your own rungs; may be repeated.")]
NvmePath = Annotated[str | None, Option(metavar="DIR", help="A folder on NVMe; opens zero3-nvme.")]
Out = Annotated[str | None, Option(metavar="DIR", help="Where the results go.", show_default="autods-out/NAME")]
NoForecast = Annotated[
    bool, Option("--no-forecast", metavar="", help="Try every rung, even those that cannot fit by the forecast.")
]
Fresh = Annotated[bool, Option("--fresh", metavar="", help="Forget the finished trials of an earlier run.")]
Seed = Annotated[int, Option(metavar="N", help="Seed of weights and search.")]
Json = Annotated[bool, Option("--json", metavar="", help="Print report.json instead of a table.")]
Quiet = Annotated[bool, Option("--quiet", "-q", metavar="", help="No progress, only the result.")]
Logs = Annotated[
    list[Path] | None, Argument(metavar="LOG...", help="Logs of one run, or folders of them; - reads a pipe.")
]
ExitCode = Annotated[
    int | None, Option("--exit-code", metavar="N", help="Of the run: 137, or -9 as Python says it.", show_default=False)
]
# Of `plan`: it may be asked about machines that are not here.
AnyWorkload = Annotated[
    str,
    Argument(
        metavar="WORKLOAD",
        help="A model.py, a Hugging Face config.json or its folder (hf:./DIR; random weights), or a training script.",
    ),
]
ForecastGpus = Annotated[
    int | None, Option("--gpus", metavar="N", help="Ranks, of all nodes together.", show_default="a node's")
]
Nodes = Annotated[
    int | None,
    Option(metavar="N", help="Nodes that the ranks are spread over.", show_default="1; nodes of 8 beyond 16 ranks"),
]
On = Annotated[
    str | None, Option(metavar="NAME,…|all", help="Machines of the catalogue, such as a100-80gb; all: which do I need?")
]
ForecastMemory = Annotated[
    str | None, Option("--gpu-memory", metavar="SIZE", help="Memory of a card, such as 80GiB, when not --on.")
]
HostMemory = Annotated[str | None, Option(metavar="SIZE", help="Memory of a node, such as 1TiB.")]
Nvme = Annotated[str | None, Option(metavar="SIZE", help="NVMe of a node, such as 2TiB; opens zero3-nvme.")]
ForecastNvmePath = Annotated[
    str | None, Option("--nvme-path", metavar="DIR", help="The same without a size; the folder need not be here.")
]
Task = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="Of a Hugging Face config: causal-lm, seq2seq, masked-lm or image-classification.",
        show_default="by the config's architectures",
    ),
]
SeqLen = Annotated[
    int | None, Option(metavar="N", help="Tokens of a sample; a model.py takes it as build_batch(…, seq_len).")
]
TargetLen = Annotated[
    int | None, Option(metavar="N", help="Tokens of a target, for seq2seq.", show_default="--seq-len")
]
MicroBatch = Annotated[int | None, Option(metavar="N", help="Samples of a rank at a time.", show_default="1")]
Checkpointing = Annotated[
    str | None, Option(metavar="on|off", help="Recompute activations.", show_default="on, if the model can")
]
ZeroInit = Annotated[
    bool, Option("--zero-init", metavar="", help="Stage 3 builds the model under deepspeed.zero.Init, already split.")
]
AsWritten = Annotated[
    bool,
    Option("--as-written", metavar="", help="Buckets and limits of the base config, not as a fit would start them."),
]
Largest = Annotated[bool, Option("--largest/--no-largest", help="Look for the largest micro batch of each rung.")]
PlanJson = Annotated[bool, Option("--json", metavar="", help="Print JSON instead of a table.")]
# Of `probe`.
Vary = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=A,B,…",
        help="What is varied, may be repeated: rung, micro_batch, pin_memory, precision, gpus, seq_len, checkpointing, "
        "accumulation, any DeepSpeed key, env.NAME, build_model.NAME, build_batch.NAME.",
    ),
]
Experiment = Annotated[str | None, Option(metavar="NAME|FILE", help="Axes of a file, such as stages or offload.")]
SeveralGpus = Annotated[
    str | None, Option("--gpus", metavar="N,M,…", help="Ranks; several are an axis.", show_default="all visible cards")
]
Capacity = Annotated[bool, Option("--capacity", metavar="", help="Look for the largest micro batch of each cell.")]
ParallelTrials = Annotated[
    int,
    Option(
        metavar="N",
        help="With --capacity: search up to N cells side by side, as far as cards or processors are free. 1 by "
        "default: trials that share a machine tell no speeds.",
    ),
]
ForecastOnly = Annotated[
    bool, Option("--forecast-only", metavar="", help="The same without a trial, for a machine that need not be here.")
]
OnOne = Annotated[
    str | None, Option("--on", metavar="NAME", help="With --forecast-only: a machine of the catalogue, as a100-80gb.")
]
Repeats = Annotated[
    int | None, Option(metavar="N", help="How often each cell is measured, in turns.", show_default="3")
]
TimedSteps = Annotated[
    int | None, Option("--steps", metavar="N", help="Timed steps of a trial.", show_default="the config's")
]
Csv = Annotated[str | None, Option("--csv", metavar="FILE", help="Write the table there as well; - prints it.")]
