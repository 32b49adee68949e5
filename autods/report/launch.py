"""The commands and config files with which a user launches the winning config."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..config.checkpointing import PARTIAL, find_state
from ..config.deepspeed import (
    count_replicas,
    enabled_half_precision,
    find_offloads,
    get_key,
    is_default_optimizer,
    required_ops,
)
from ..config.releases import find_mended
from ..config.trainers import DS_CONFIG, DS_CONFIG_HF, SCRIPT_KINDS
from ..runner.environment import GROUP_TIMEOUT
from ..workload.lora import FOUR_BITS, parse_lora
from ..workload.script_source import ScriptLaunch, has_option, has_placeholder
from .results.fit import FitReport

DS_CONFIG_REHEARSED = "ds_config_rehearsed.json"  # of a rehearsal: no launcher takes it for a proven one
ACCELERATE = "accelerate.yaml"
LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
LINES_BESIDE = ("model", "code", "settings", "note")  # of `launch_lines`: what the commands need besides
_OWN_SCRIPT = "YOUR_SCRIPT.py"
_PLAIN_TEXT = re.compile(r"[\w./][\w./-]*")
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", None: "float32"}
_TRAINER_SIZES = {
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_TRAINER_ARGUMENTS = {
    "gradient_clipping": "--max_grad_norm",
    "scheduler.params.warmup_max_lr": "--learning_rate",  # it sets the optimizer's rate in each step
    "optimizer.params.lr": "--learning_rate",
    "optimizer.params.eps": "--adam_epsilon",
    "optimizer.params.weight_decay": "--weight_decay",
    "scheduler.params.warmup_num_steps": "--warmup_steps",
}


_NO_NUMACTL = (
    "trials bound each rank to its cores: install numactl, and add --numa-binding exclusive (torchrun) or"
    " --bind_cores_to_rank (deepspeed)"
)
_FIRST_WITH_ACTIVATION_CHECKPOINTING = Version("5.23")  # of transformers
_USUAL_CLIPPING = 1.0  # the Trainer's default


def launch_lines(report: FitReport) -> Iterator[tuple[str, str]]:
    """The lines with which a user starts the training, each with a name. A line is whole, so that it can be copied."""
    assert report.knobs is not None
    if report.question.rehearsed_on is not None:
        yield "launch", "the same command without --rehearse and --on, on such a machine: it proves the config"
        yield "config", str(Path(report.out) / DS_CONFIG_REHEARSED)
        return
    folder, commands, script = Path(report.out), launch_commands(report), report.question.script
    for fault in find_mended(report.ds_config or {}):
        yield "note", f"train by autods run: in other launches {fault.symptom}"
    if _binds_cores(report) and "torchrun" in commands and "--numa-binding" not in commands["torchrun"]:
        yield "note", _NO_NUMACTL
    if script is None:
        if report.question.lora is not None:
            lora = parse_lora(report.question.lora)
            if lora.quantized:
                values = {
                    **FOUR_BITS,
                    "bnb_4bit_compute_dtype": _DTYPES[enabled_half_precision(report.ds_config or {})],
                }
                yield "model", f"from_pretrained(…, quantization_config=BitsAndBytesConfig({_as_arguments(values)}))"
            arguments = _as_arguments(lora.config)
            yield "model", f"import peft; model = peft.get_peft_model(model, peft.LoraConfig({arguments}))"
        if report.knobs.checkpointing:
            yield "model", "model.gradient_checkpointing_enable()  # as it was measured"
        if report.knobs.checkpointing > 1:
            yield (
                "model",
                f"recompute_some_layers(model, {report.knobs.checkpointing})  # the function of examples/train.py",
            )
        if find_state(report.knobs) == "offload":
            yield "model", "keep_inputs_on_host(model)  # the function of examples/train.py; then deepspeed.initialize"
        yield "code", f"deepspeed.initialize(model=model, config={str(folder / DS_CONFIG)!r})"
        yield "launch", commands["torchrun"]
        yield "or", commands["deepspeed"]
        yield "Trainer", shlex.join(trainer_arguments(report, str(folder / DS_CONFIG_HF)))
        yield "accelerate", commands["accelerate"]
        return
    takes_config = _takes_config(script)
    library, settings_file = SCRIPT_KINDS[script.kind], _find_settings_file(script)
    sizes = [each for each in _lacking_sizes(script) if not _parses_trainer_arguments(script)]
    values = _placeholder_values(report)
    set_there: dict[str, object] = {_TRAINER_SIZES[each]: values[each] for each in sizes}
    switches = _switches_checkpointing(report) and not _parses_trainer_arguments(script)
    if switches and library.sets_sizes:
        set_there[_name_checkpointing(report)] = report.knobs.checkpointing
    if library.sets_sizes and not _parses_trainer_arguments(script):
        set_there |= _trainer_timeout(report)
    if settings_file is not None:
        if not takes_config:
            set_there = {"deepspeed": values["ds_config"], **set_there}
        for name, value in set_there.items():
            yield "settings", f"{name}: {_as_yaml(value)}  # in {settings_file}, as the Trainer names it"
    else:
        if not takes_config and library.config_place is not None:
            yield "code", f"{library.config_place}={values['ds_config']!r})"
        if set_there:
            yield "code", f"TrainingArguments(…, {_as_arguments(set_there)})"
    if library.timeout_place is not None and (minutes := report.variables.get(GROUP_TIMEOUT)):
        yield "code", library.timeout_place.format(minutes=minutes)
    if switches and not library.sets_sizes:
        action = "enable" if report.knobs.checkpointing else "disable"
        yield "code", f"model.gradient_checkpointing_{action}()  # before deepspeed.initialize, as it was measured"
    for number, command in enumerate(commands.values()):
        yield "or" if number else "launch", command
    if report.device.stands_in and library.note_on_cpu is not None:
        yield "note", library.note_on_cpu
    if report.device.stands_in and report.question.stood_in:
        yield "note", f"on CPU ranks it fails at {', '.join(report.question.stood_in)}; trials did without"


def _as_arguments(values: Mapping[str, Any]) -> str:
    """'r=16, lora_alpha=32': the values as keyword arguments of a call."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _as_yaml(value: object, *, quoted: bool = False) -> str:
    """The value as YAML reads it. Text of plain letters needs no quotes."""
    if isinstance(value, str) and not quoted and _PLAIN_TEXT.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)  # YAML makes two characters of JSON's pairs, as of an emoji


def launch_commands(report: FitReport) -> dict[str, str]:
    """The whole command line of each launcher that trains with the config, the first choice first.

    Where the workload is no script, `examples/train.py` trains it, or else a script that the user has to write.

    The placeholders of a script's command line are filled. DS_ACCELERATOR=cpu keeps DeepSpeed on CPU ranks where there
    are GPUs. OMP_NUM_THREADS gives each rank as many threads as it had in trials. TORCH_EXTENSIONS_DIR names the folder
    of the ops that trials built, which would take minutes again. The allocator's settings are those of the config.
    """
    script, nodes = report.question.script, report.question.nodes
    per_node, rendezvous, place = str(report.question.ranks_per_node), ["--standalone"], list[str]()
    if nodes > 1:  # torchrun and accelerate are started on each node
        rendezvous = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500".split()
        place = ["--machine_rank", "NODE_NUMBER", "--main_process_ip", "FIRST_NODE", "--main_process_port", "29500"]
    local_rank = [] if script is None or script.takes_local_rank else ["--no_local_rank"]
    binds = _binds_cores(report) and report.hardware is not None and report.hardware.numactl
    bound = ["--numa-binding", "exclusive"] if binds else []
    launchers = {
        "torchrun": ["torchrun", *rendezvous, "--nproc_per_node", per_node, *bound],
        "deepspeed": [
            "deepspeed",
            *_deepspeed_resources(report, per_node),
            *(["--bind_cores_to_rank"] if binds else []),
            *local_rank,
        ],
        "accelerate": [
            *("accelerate", "launch", "--config_file", str(Path(report.out) / ACCELERATE), *place),
            *(["--enable_cpu_affinity"] if _binds_cores(report) else []),  # it overrules the file, given or not
        ],
    }
    threads = report.question.threads
    variables = {
        **report.device.launch_variables,
        **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        **report.variables,
    }
    environment = "".join(f"{name}={shlex.quote(value)} " for name, value in variables.items())
    if report.question.ops_folder and required_ops(report.ds_config or {}):
        environment += f"TORCH_EXTENSIONS_DIR={shlex.quote(report.question.ops_folder)} "
    chosen = _list_launchers(script)
    return {name: environment + shlex.join((*launchers[name], *_program(report, name))) for name in chosen}


def _list_launchers(script: ScriptLaunch | None) -> tuple[str, ...]:
    """The launchers with which the config reaches the script."""
    if script is None:
        return LAUNCHERS
    library = SCRIPT_KINDS[script.kind]
    if library.config_place is None and not _takes_config(script):
        return ("accelerate",)  # its file names the config
    return tuple(name for name in LAUNCHERS if name != "accelerate" or library.by_accelerate)


def _takes_config(script: ScriptLaunch) -> bool:
    """Whether the command line of the script names its config."""
    return any("{ds_config}" in argument for argument in script.argv)


def _binds_cores(report: FitReport) -> bool:
    """Whether the ranks of the config's trials were bound to their share of a node's cores, see `choose_cores`."""
    has_nodes = report.device.has_cards and report.hardware is not None and report.hardware.numa_nodes > 1
    return has_nodes and report.question.ranks_per_node > 1 and bool(find_offloads(report.ds_config or {}))


def _deepspeed_resources(report: FitReport, per_node: str) -> tuple[str, ...]:
    """The deepspeed launcher's options. HOSTFILE has a line 'NODE slots=N' for each node."""
    option = "--num_gpus" if report.device.has_cards else "--num_accelerators"
    if report.question.nodes > 1:
        return ("--hostfile", "HOSTFILE", "--num_nodes", str(report.question.nodes), option, per_node)
    cards = [card.index for card in (report.hardware.cards if report.hardware else ())][: report.question.gpus]
    if not report.device.has_cards or len(cards) < report.question.gpus or cards == list(range(report.question.gpus)):
        return (option, str(report.question.gpus))
    # Given a number, the launcher takes the first cards, whatever CUDA_VISIBLE_DEVICES says.
    return ("--include", f"localhost:{','.join(map(str, cards))}")


def _program(report: FitReport, launcher: str) -> tuple[str, ...]:
    """The script with its arguments filled in."""
    script, values = report.question.script, _placeholder_values(report)
    if script is None:
        trainer = report.question.trainer
        if trainer is None:  # accelerate's own file names the config
            config = () if launcher == "accelerate" else ("--deepspeed_config", str(values["ds_config"]))
            return (_OWN_SCRIPT, *config)
        every = report.knobs.checkpointing if report.knobs else False
        checkpointing = ["--gradient-checkpointing", *([str(every)] if every > 1 else [])] if every else []
        return (trainer.path, *fill_placeholders(trainer.argv, values), *checkpointing)
    module_option = "--module" if launcher == "deepspeed" else "-m"
    program = (module_option, script.module) if script.module else (script.path,)
    sizes: list[str] = []
    if _parses_trainer_arguments(script):  # of an option that is there twice, the last one counts
        for name in _lacking_sizes(script):
            sizes += [f"--{_TRAINER_SIZES[name]}", str(values[name])]
        if _switches_checkpointing(report):
            assert report.knobs is not None
            sizes += [f"--{_name_checkpointing(report)}", str(report.knobs.checkpointing)]
        for name, seconds in _trainer_timeout(report).items():
            sizes += [f"--{name}", str(seconds)]
    return (*program, *fill_placeholders(script.argv, values), *sizes)


def _placeholder_values(report: FitReport) -> dict[str, object]:
    """What the placeholders of a script's command line stand for in the fastest config."""
    assert report.knobs is not None
    script, config = report.question.script, report.ds_config or {}
    replicas = count_replicas(config, report.question.gpus)
    return {
        "ds_config": str(Path(report.out) / (DS_CONFIG if script is None else SCRIPT_KINDS[script.kind].config_file)),
        "micro_batch_size": report.knobs.micro_batch,
        "gradient_accumulation_steps": report.knobs.accumulation,
        # Where ranks split the layers, the config has no total: see `compose`.
        "train_batch_size": config.get("train_batch_size", report.knobs.train_batch(replicas)),
    }


def _switches_checkpointing(report: FitReport) -> bool:
    """Whether the config was measured with another recomputation of activations than the script itself asks for."""
    return report.question.recomputes not in (None, report.knobs and report.knobs.checkpointing)


def _name_checkpointing(report: FitReport) -> str:
    """The Trainer's argument of recomputation. The newer of its two names wins, whichever the script gives."""
    version = report.versions.get("transformers")
    is_new = version is not None and Version(version) >= _FIRST_WITH_ACTIVATION_CHECKPOINTING
    return "activation_checkpointing" if is_new else "gradient_checkpointing"


def _checkpointing_arguments(report: FitReport) -> tuple[str, ...]:
    """The Trainer's arguments of recomputation. Those of older versions know all layers, with inputs on the device."""
    assert report.knobs is not None
    name, state = _name_checkpointing(report), find_state(report.knobs)
    if state in PARTIAL and name == "activation_checkpointing":
        return f"--{name}", f"--{name}_kwargs", json.dumps({"every_n_layers": PARTIAL[state]})
    return (f"--{name}",) if state == "on" else ()


def _trainer_timeout(report: FitReport) -> dict[str, int]:
    """The argument with the seconds that a Trainer's groups wait, which take no notice of DeepSpeed's variable.

    It is empty where the usual ones are enough, or where the script's command line has its own.
    """
    minutes, script = report.variables.get(GROUP_TIMEOUT), report.question.script
    given = script is not None and has_option(script.argv, "--ddp_timeout")
    return {"ddp_timeout": 60 * int(minutes)} if minutes and not given else {}


def _lacking_sizes(script: ScriptLaunch) -> list[str]:
    """The placeholders of a Trainer's sizes that the command line lacks: its trials set them in TrainingArguments."""
    if not SCRIPT_KINDS[script.kind].sets_sizes:
        return []
    return [name for name in _TRAINER_SIZES if not has_placeholder(script.argv, name)]


def _parses_trainer_arguments(script: ScriptLaunch) -> bool:
    """Whether TrainingArguments come from the command line: then its config does, by their option.

    Parsers of other scripts may have an option of this name, such as that of `deepspeed.add_config_arguments`. A
    Trainer's script with its own parser has one, too, and exits at an option that it does not know.
    """
    is_trainers = SCRIPT_KINDS[script.kind].sets_sizes and not script.has_own_parser
    return is_trainers and has_option(script.argv, "--deepspeed")


def _find_settings_file(script: ScriptLaunch) -> str | None:
    """The YAML file that has a Trainer's arguments, as LLaMA-Factory, TRL and others take one."""
    if not SCRIPT_KINDS[script.kind].sets_sizes or has_option(script.argv, "--deepspeed"):
        return None
    return next((word for word in script.argv if word.endswith((".yaml", ".yml"))), None)


def fill_placeholders(arguments: Sequence[str], values: Mapping[str, object]) -> tuple[str, ...]:
    """'{micro_batch_size}' → '4'. Other braces, such as those of JSON, stay as they are."""
    return tuple(
        _PLACEHOLDER.sub(lambda match: str(values.get(match[1], match[0])), argument) for argument in arguments
    )


def trainer_arguments(report: FitReport, config_path: str) -> tuple[str, ...]:
    """The `TrainingArguments` that go with the config, as a command line has them."""
    assert report.knobs is not None
    assert report.ds_config is not None
    half = enabled_half_precision(report.ds_config)
    return (
        "--deepspeed", config_path,
        "--per_device_train_batch_size", str(report.knobs.micro_batch),
        "--gradient_accumulation_steps", str(report.knobs.accumulation),
        *((f"--{half}",) if half else ()),
        *_checkpointing_arguments(report),
        *(("--use_cpu",) if report.device.stands_in else ()),
        *_user_settings(report.ds_config),
        *(word for name, seconds in _trainer_timeout(report).items() for word in (f"--{name}", str(seconds))),
    )  # fmt: skip


def _user_settings(ds_config: Mapping[str, Any]) -> Iterator[str]:
    """The user's optimizer, scheduler and clipping as Trainer arguments; autods's default optimizer is left out."""
    params = get_key(ds_config, "optimizer.params") or {}
    is_default = is_default_optimizer(ds_config.get("optimizer"))
    given: dict[str, str] = {}
    for key, argument in _TRAINER_ARGUMENTS.items():
        value = get_key(ds_config, key)
        is_usual = value == _USUAL_CLIPPING and argument == "--max_grad_norm"
        if value not in (None, "auto") and not is_usual and not (is_default and key.startswith("optimizer.")):
            given.setdefault(argument, str(value))
    for argument, text in given.items():
        yield from (argument, text)
    betas = params.get("betas")
    if isinstance(betas, list | tuple) and len(betas) == 2 and not is_default:
        yield from ("--adam_beta1", str(betas[0]), "--adam_beta2", str(betas[1]))


def accelerate_yaml(report: FitReport, config_path: str) -> str:
    """The file for `accelerate launch --config_file`, which points to the config.

    With a deepspeed_config_file accelerate refuses settings that the config already has: stage, offload, accumulation,
    clipping and precision (`DeepSpeedPlugin._deepspeed_config_checks`). So they are left out here.
    """
    ds_config = report.ds_config or {}
    micro_batch = ds_config.get("train_micro_batch_size_per_gpu")
    # By default one node starts the others, by a hostfile: without one, each would train alone on its own cards.
    launcher = "  deepspeed_multinode_launcher: standard\n" if report.question.nodes > 1 else ""
    comments = [f"# The dataloader's batch_size is the config's micro batch: {micro_batch}"]
    for section, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
        if section in ds_config:
            comments.append(f"# The config has the {section}: give accelerator.prepare an accelerate.utils.{dummy}")
    return (
        "\n".join(comments)
        + f"""
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {_as_yaml(config_path, quoted=True)}
{launcher}num_machines: {report.question.nodes}
machine_rank: 0
num_processes: {report.question.gpus}
main_training_function: main
rdzv_backend: static
same_network: true
use_cpu: {json.dumps(report.device.stands_in)}
"""
        + ("enable_cpu_affinity: true\n" if _binds_cores(report) else "")
    )
