"""The commands and config files with which the user launches the winner."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.deepspeed import DEFAULT_OPTIMIZER, enabled_half_precision, get_key
from .results import Report

DS_CONFIG = "ds_config.json"
DS_CONFIG_HF = "ds_config_hf.json"  # the same with "auto" where the HF Trainer fills in
DS_CONFIG_LIGHTNING = "ds_config_lightning.json"  # the same without the accumulation steps
ACCELERATE = "accelerate.yaml"
# Where a kind of script takes its config, if not from its command line.
_TAKERS = {
    "deepspeed": "deepspeed.initialize(…, config",
    "hf_trainer": "TrainingArguments(…, deepspeed",
    "lightning": "DeepSpeedStrategy(config",
}
# What the libraries themselves make of CPU ranks, outside of a trial. accelerate: `PartialState._prepare_backend`.
_ON_CPU_RANKS = {
    "lightning": "on GPUs: Lightning's DeepSpeedStrategy takes no CPU ranks",
    "accelerate": "on CPU ranks accelerate does not share out the data: each rank trains on all of it; on GPUs it does",
}
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


def launch_commands(report: Report) -> dict[str, str]:
    """Launcher → the whole command line. `train.py` stands for the user's script where the workload is none.

    A script's own command line comes with its placeholders filled. DS_ACCELERATOR=cpu says that CPU ranks are meant
    where there are GPUs, too; OMP_NUM_THREADS gives each rank the threads that it had in trials.
    """
    script = _script(report)
    ranks, cpu = int(report.question.get("gpus", 1)), report.question.get("device") == "cpu"
    plain = () if script.get("takes_local_rank", True) else ("--no_local_rank",)
    nodes = int(report.question.get("nodes", 1))
    starts = {
        "torchrun": ("torchrun", *_meeting(nodes), "--nproc_per_node", str(ranks // nodes)),
        "deepspeed": ("deepspeed", *_hosts(report, ranks, nodes, cpu=cpu), *plain),
        "accelerate": ("accelerate", "launch", "--config_file", str(Path(report.out) / ACCELERATE)),
    }
    threads = report.question.get("threads")
    prefix = "DS_ACCELERATOR=cpu " * cpu + (f"OMP_NUM_THREADS={threads} " if threads else "")
    return {name: prefix + shlex.join((*start, *_program(report, name))) for name, start in starts.items()}


def _meeting(nodes: int) -> tuple[str, ...]:
    """torchrun's place where nodes meet; on several it is started on each of them."""
    if nodes == 1:
        return ("--standalone",)
    return ("--nnodes", str(nodes), "--rdzv_backend", "c10d", "--rdzv_endpoint", "FIRST_NODE:29500")


def _hosts(report: Report, ranks: int, nodes: int, *, cpu: bool) -> tuple[str, ...]:
    """deepspeed's; a hostfile has a line 'NODE slots=N' for each node."""
    if nodes > 1:
        each = "--num_accelerators" if cpu else "--num_gpus"
        return ("--hostfile", "HOSTFILE", "--num_nodes", str(nodes), each, str(ranks // nodes))
    return ("--num_accelerators", str(ranks)) if cpu else _cards(report, ranks)


def _cards(report: Report, ranks: int) -> tuple[str, str]:
    """deepspeed's option for the cards of the fit: with a number it takes the first, whatever is visible."""
    cards = [card["index"] for card in report.hardware.get("cards", ())][:ranks]
    if len(cards) < ranks or cards == list(range(ranks)):
        return "--num_gpus", str(ranks)
    return "--include", f"localhost:{','.join(map(str, cards))}"


def fill_placeholders(arguments: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """'{micro_batch_size}' → '4'. Other braces, those of JSON say, stay as they are."""

    def value(found: re.Match[str]) -> str:
        return str(values.get(found[1], found[0]))

    return tuple(_PLACEHOLDER.sub(value, argument) for argument in arguments)


def launch_lines(report: Report) -> Iterator[tuple[str, str]]:
    """What to type now: a name and a whole line each, so that they can be copied."""
    assert report.knobs is not None
    folder, said, script = Path(report.out), launch_commands(report), _script(report)
    code = f"config={str(folder / DS_CONFIG)!r})"
    if not script:
        if report.knobs.checkpointing:
            yield "model", "model.gradient_checkpointing_enable()  # as it was measured"
        yield "code", f"deepspeed.initialize(model=model, {code}"
        yield "launch", said["deepspeed"]
        yield "Trainer", shlex.join(trainer_arguments(report, str(folder / DS_CONFIG_HF)))
        yield "accelerate", said["accelerate"]
        return
    given = any("{ds_config}" in argument for argument in script["argv"])
    if not given and script["kind"] in _TAKERS:
        yield "code", f"{_TAKERS[script['kind']]}={str(folder / _config_of(script['kind']))!r})"
    if script["kind"] == "accelerate" and not given:
        yield "launch", said["accelerate"]  # the only one that gives the script its config
    else:
        yield "launch", said["torchrun"]
        yield "or", said["deepspeed"]
        if script["kind"] in ("accelerate", "hf_trainer"):
            yield "or", said["accelerate"]
    if report.question.get("device") == "cpu" and script["kind"] in _ON_CPU_RANKS:
        yield "note", _ON_CPU_RANKS[script["kind"]]


def _config_of(kind: str) -> str:
    """The file that such a script is given."""
    return {"hf_trainer": DS_CONFIG_HF, "lightning": DS_CONFIG_LIGHTNING}.get(kind, DS_CONFIG)


def _program(report: Report, launcher: str) -> tuple[str, ...]:
    """The script and its arguments, filled. accelerate's own file names the config to a script that is not known."""
    script = _script(report)
    if script:
        module = ("--module" if launcher == "deepspeed" else "-m", str(script.get("module")))
        program = module if "module" in script else (str(script["path"]),)
        return (*program, *fill_placeholders(script["argv"], _values(report)))
    said = ("--deepspeed_config", str(Path(report.out) / DS_CONFIG))
    return ("train.py", *(said if launcher != "accelerate" else ()))


def _values(report: Report) -> dict[str, object]:
    """What the placeholders of a script's command line stand for."""
    assert report.knobs is not None
    return {
        "ds_config": str(Path(report.out) / _config_of(_script(report)["kind"])),
        "micro_batch_size": report.knobs.micro_batch,
        "gradient_accumulation_steps": report.knobs.accumulation,
        "train_batch_size": report.knobs.train_batch(int(report.question.get("gpus", 1))),
    }


def _script(report: Report) -> Mapping[str, Any]:
    """{"path", "argv", "kind", "takes_local_rank"} of a training script, and its "module" where it is started with -m;
    empty for any other workload."""
    return report.question.get("script") or {}


_ARGUMENTS = {
    "gradient_clipping": "--max_grad_norm",
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.eps": "--adam_epsilon",
    "optimizer.params.weight_decay": "--weight_decay",
    "scheduler.params.warmup_num_steps": "--warmup_steps",
}


def trainer_arguments(report: Report, config: str) -> tuple[str, ...]:
    """The `TrainingArguments` that go with the config at the path `config`, as a command line has them."""
    assert report.knobs is not None
    assert report.ds_config is not None
    half = enabled_half_precision(report.ds_config)
    return (
        "--deepspeed", config,
        "--per_device_train_batch_size", str(report.knobs.micro_batch),
        "--gradient_accumulation_steps", str(report.knobs.accumulation),
        *((f"--{half}",) if half else ()),
        *(("--gradient_checkpointing",) if report.knobs.checkpointing else ()),
        *(("--use_cpu",) if report.question.get("device") == "cpu" else ()),
        *_users_own(report.ds_config),
    )  # fmt: skip


def accelerate_yaml(report: Report, config: str) -> str:
    """For `accelerate launch --config_file`, over the config at the path `config`.

    Beside a deepspeed_config_file accelerate refuses what that file says already (`DeepSpeedPlugin.
    _deepspeed_config_checks`): stage, offload, accumulation, clipping, precision.
    """
    asked = report.question
    said = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": config},
        "num_machines": int(asked.get("nodes", 1)),
        "machine_rank": 0,
        "num_processes": int(asked.get("gpus", 1)),
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": asked.get("device") == "cpu",
    }
    return "\n".join((*_notes(report.ds_config or {}), *_yaml(said))) + "\n"


def _notes(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """What accelerate asks of a script, said where it is read."""
    micro_batch = ds_config.get("train_micro_batch_size_per_gpu")
    yield f"# The dataloader's batch_size is the config's micro batch: {micro_batch}"
    for section, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
        if section in ds_config:
            yield f"# The config has the {section}: give accelerator.prepare an accelerate.utils.{dummy}"


def _users_own(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """What the config says of training itself; our own default of an optimizer says nothing."""
    params = get_key(ds_config, "optimizer.params") or {}
    ours = {key: value for key, value in params.items() if key != "torch_adam"} == DEFAULT_OPTIMIZER["params"]
    for key, argument in _ARGUMENTS.items():
        value = get_key(ds_config, key)
        if value not in (None, "auto") and not (ours and key.startswith("optimizer.")):
            yield from (argument, str(value))
    betas = params.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2 and not ours:
        yield from ("--adam_beta1", str(betas[0]), "--adam_beta2", str(betas[1]))


def _yaml(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Maps of plain values; a JSON string is a YAML string."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            bare = isinstance(value, str) and value.replace("_", "").isalpha()
            yield f"{indent}{key}: {value if bare else json.dumps(value)}"
