"""What the command line shows of each command: its request, its flags, examples. `commands` does the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .. import requests


@dataclass(frozen=True, slots=True)
class Synopsis:
    """A command of the command line: `commands.run_NAME(call, request, **flags)`.

    An option is made of each field of the request. `flags` are further ones, by the names of the function's arguments.
    Each line of `examples` is a command, and after six spaces what it is for.
    """

    request: type
    flags: Mapping[str, Any]
    examples: str
    exit_codes: str

    @property
    def epilog(self) -> str:
        """What stands below the options in help."""
        return "\n\n".join(("Examples:", *self.examples.splitlines(), f"Exit codes: {self.exit_codes}"))


def _flag(*spellings: str, help: str, metavar: str = "", panel: str = "Output") -> Any:
    return typer.Option(*spellings, help=help, metavar=metavar, rich_help_panel=panel)


_MODULE_HELP = "WORKLOAD is a module, package.module, and is started as with python -m."
# Of each command with a workload.
Module = Annotated[bool, _flag("--module", "-m", help=_MODULE_HELP, panel="Workload")]
AsJson = Annotated[bool, _flag("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, _flag("--quiet", "-q", help="No progress, only the result.")]
Verbose = Annotated[bool, _flag("--verbose", "-v", help="Also the reasons, the certificate, and all ways to launch.")]
VerboseFit = Annotated[
    bool, _flag("--verbose", "-v", help="Also what the ranks print, the reasons, the certificate, and all launchers.")
]
Markdown = Annotated[bool, _flag("--markdown", help="Print a Markdown table, for a pull request.")]
Html = Annotated[str | None, _flag("--html", metavar="FILE", help="Write the forecast there as a page, too.")]
VerbosePlan = Annotated[
    bool, _flag("--verbose", "-v", help="Also intervals, what fills the memory and the step, and alternatives.")
]
REQUIRED = "fits"  # the one value of --require
Require = Annotated[
    str | None, _flag("--require", metavar=REQUIRED, help="Exit with 1 unless something surely fits: a check for CI.")
]
Csv = Annotated[str | None, _flag("--csv", metavar="FILE", help="Write the table there as well; - prints it.")]


COMMANDS = {
    "fit": Synopsis(
        requests.FitRequest,
        {"as_json": AsJson, "quiet": Quiet, "verbose": VerboseFit},
        examples="""\
autods fit model.py --gpus 8
autods fit model.py --gpus 8 --gpu-memory 16GiB --global-batch 64 --config quick
autods fit model.py --gpus 8 --stop first-fit      the first rung that fits is enough
autods fit examples/gpt.py --device cpu --gpus 2 --gpu-memory 488MiB --precision fp32      without a GPU
autods fit model.py --gpus 8 --nodes 2 --address auto      on two nodes of a Ray cluster
autods fit train.py --gpus 8 -- --deepspeed_config {ds_config} --micro-batch {micro_batch_size}      your own script
""",
        exit_codes="0 done, 1 nothing fits, 2 wrong input, 3 broken environment, "
        "130 interrupted (the same command goes on).",
    ),
    "run": Synopsis(
        requests.RunRequest,
        {"as_json": AsJson, "quiet": Quiet},
        examples="""\
autods run model.py --gpus 8 --global-batch 64 --steps 10000
autods run model.py --gpus 8 --global-batch 64 --data corpus/ --checkpoint-every 500
autods run train.py --gpus 8 --global-batch 64 -- --deepspeed_config {ds_config}      your script, with autods.session
autods run examples/gpt.py --device cpu --gpus 2 --gpu-memory 488MiB --precision fp32 --global-batch 4 --steps 50
""",
        exit_codes="0 done, 1 no config is left that fits, 2 wrong input or code, 3 broken environment, "
        "130 interrupted, 143 ended by SIGTERM (the same command goes on).",
    ),
    "report": Synopsis(
        requests.ReportRequest,
        {"markdown": Markdown, "as_json": AsJson, "verbose": Verbose},
        examples="""\
autods report autods-out/model
autods report autods-out/model --markdown      a table for a pull request
autods report autods-out/before --compare autods-out/after
autods report autods-out/model-probe      a probe's table and page
autods report autods-out/model-run      a run's attempts
""",
        exit_codes="0 done, 2 the folder holds no report.",
    ),
    "plan": Synopsis(
        requests.PlanRequest,
        {"html": Html, "require": Require, "as_json": AsJson, "quiet": Quiet, "verbose": VerbosePlan},
        examples="""\
autods plan model.py --gpus 8 --gpu-memory 80GiB --host-memory 1TiB
autods plan Llama-2-7b/config.json --gpus 8 --on a100-80gb --seq-len 4096
autods plan t5-3b --task seq2seq --gpus 1 --gpu-memory 16GiB --host-memory 64GiB --nvme 1TiB
autods plan train.py --gpus 8 --on a100-80gb -- --deepspeed_config {ds_config} --micro-batch {micro_batch_size}
autods plan model.py --gpus 8 --on all      which machine do I need?
autods plan model.py --gpus 8 --on a100-80gb --html plan.html      a page to send to somebody
autods plan model.py --gpus 8 --on a100-80gb --tokens 300B      days of a training
autods plan model.py --gpus 8 --on a100-80gb --base-config ds.json --as-written --require fits      a check for CI
autods plan model.py --gpus 8 --on a100-80gb --timeline step.json      a step for ui.perfetto.dev
""",
        exit_codes="0 something fits or may (tight, not forecast), 1 nothing fits, or not surely with --require fits, "
        "2 wrong input, 3 broken environment, 130 interrupted.",
    ),
    "probe": Synopsis(
        requests.ProbeRequest,
        {"csv": Csv, "as_json": AsJson, "quiet": Quiet},
        examples="""\
autods probe model.py --gpus 8 --vary rung=zero1,zero2,zero3 --vary micro_batch=1,2,4
autods probe model.py --gpus 8 --vary rung=zero3-offload --vary pin_memory=true,false --vary env.NCCL_P2P_DISABLE=0,1
autods probe model.py --gpus 1,2,4,8 --vary seq_len=1024,2048 --capacity      the largest micro batch of each
autods probe model.py --gpus 2 --vary rung=ddp,zero2,zero3 --capacity --parallel-trials 4      8 cards: four at a time
autods probe model.py --gpus 4,8 --nodes 2 --address auto --vary rung=zero2,zero3      one node, and two
autods probe model.py --gpus 8 --on a100-80gb --forecast-only      the same for a machine that is not here
autods probe train.py --gpus 8 --vary args.length=128,256 -- --deepspeed {ds_config} --max_length {length}
autods probe model.py --gpus 2 --device cpu --gpu-memory 1GiB --experiment stages      see configs/experiments
""",
        exit_codes="0 done, 1 no cell fits, 2 wrong input, 3 broken environment, "
        "130 interrupted (the same command goes on).",
    ),
    "explain": Synopsis(
        requests.ExplainRequest,
        {"as_json": AsJson, "quiet": Quiet},
        examples="""\
autods explain ds_config.json
autods explain ds_config.json --gpus 8      does the batch go together?
autods explain ds_config.json model.py --gpus 8 --gpu-memory 16GiB      what does each key cost here?
autods explain ds_config.json Llama-2-7b/config.json --gpus 8 --on a100-80gb --seq-len 4096
""",
        exit_codes="0 nothing is wrong, 1 the config has errors, 2 wrong input, 3 broken environment, 130 interrupted.",
    ),
    "doctor": Synopsis(
        requests.DoctorRequest,
        {"as_json": AsJson, "quiet": Quiet},
        examples="""\
autods doctor
autods doctor --fix      build DeepSpeed's ops now, some minutes
autods doctor --nvme-path /local_nvme      how fast is this disk?
autods doctor --gpus      are cards and links healthy?
autods doctor --ray      does Ray start?
autods doctor --measure --machine-file mine.toml      for autods plan model.py --on mine.toml anywhere
""",
        exit_codes="0 nothing is broken (there may be warnings), 2 wrong input, 3 something is broken, "
        "130 interrupted.",
    ),
    "diagnose": Synopsis(
        requests.DiagnoseRequest,
        {"as_json": AsJson},
        examples="""\
autods diagnose train.log
autods diagnose slurm-1234.out --exit-code 137
autods diagnose rank_0.log rank_1.log        one file a rank; a folder of logs works too
dmesg -T | autods diagnose train.log -        - is what the pipe holds
zstdcat train.log.zst | autods diagnose -        gzip is read as it is
""",
        exit_codes="0 diagnosed, 2 wrong input.",
    ),
}
