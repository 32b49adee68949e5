"""The DeepSpeed config in a library's own file: YAML of `accelerate config`, or TrainingArguments of Hugging Face."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import LARGEST_CONFIG, read_text
from .deepspeed import BATCH_KEYS, get_key, merge, nest_key, read_known_keys

ReadConfig = Callable[[Path], dict[str, Any]]
# Fields of accelerate's DeepSpeedPlugin (utils/dataclasses.py) and the keys that it writes for them.
FIELDS_OF_ACCELERATE = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_DEFAULTS = {"gradient_accumulation_steps": "auto", "zero_stage": 2}
# What the plugin, which the Trainer uses too, writes for "auto" into a config of the user's own.
_DEFAULTS_IN_A_FILE = {
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_save_16bit_model": False,
}
# The other fields that accelerate reads in this section (commands/launch.py).
_OTHER_FIELDS = (
    "deepspeed_config_file", "deepspeed_exclusion_filter", "deepspeed_hostfile", "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names", "deepspeed_multinode_launcher", "zero3_init_flag",
)  # fmt: skip
# The fields beside that section that decide here (commands/config/config_args.py).
_TOP_FIELDS = ("deepspeed_config", "distributed_type", "mixed_precision", "num_machines", "num_processes")
_SPELLING = 0.8  # likeness of a misspelt field
_HALVES = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}  # FP8 is inside bf16's autocast (set_mixed_precision)
_PRECISIONS = ("no", *_HALVES)  # accelerate's PrecisionType
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")  # a number to OmegaConf, and in JSON
_WORDS = {"true": True, "false": False}  # the questions of `accelerate config` are answered by text
# Keys that the Trainer fills in, and refuses where they are another value than its argument, which has this default
# (transformers/integrations/deepspeed.py, training_args.py).
_ARGUMENTS: Mapping[str, tuple[str, Any]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
    "gradient_clipping": ("max_grad_norm", 1.0),
    "optimizer.params.lr": ("learning_rate", 5e-5),
    "optimizer.params.eps": ("adam_epsilon", 1e-8),
    "optimizer.params.weight_decay": ("weight_decay", 0.0),
    "scheduler.params.warmup_max_lr": ("learning_rate", 5e-5),
    "fp16.enabled": ("fp16", False),
    "bf16.enabled": ("bf16", False),
}
_OTHER_NAMES = {"micro_batch_size": "per_device_train_batch_size"}  # axolotl's
_ARGUMENT_NAMES = {
    "output_dir", "max_steps", "num_train_epochs", "warmup_steps", "warmup_ratio", "adam_beta1", "adam_beta2",
    *_OTHER_NAMES, *(name for name, _ in _ARGUMENTS.values()),
}  # fmt: skip
_OF_ARGUMENTS = ("deepspeed", "output_dir", "per_device_train_batch_size")  # no DeepSpeed config has them
_OF_DEEPSPEED = ("zero_optimization", *BATCH_KEYS[:2])  # no library's arguments have them
# ms-swift's names for files of its package, in a folder config, or ds_config in older ones (its sft_args.py).
_CONFIGS_OF_SWIFT = ("zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")


def is_yaml(path: Path) -> bool:
    """Whether the file's name says so."""
    return path.suffix in (".yaml", ".yml")


def read_yaml_config(path: Path, read_json: ReadConfig) -> dict[str, Any]:
    """Return the config that accelerate, or the Trainer, gives to DeepSpeed, or DeepSpeed's own as Hydra keeps it.

    `read_json` reads the file that is named. Raises InputError for a file of none of them, or without DeepSpeed.
    """
    content = _load_yaml(path)
    if isinstance(content, dict) and is_of_accelerate(content):
        return make_accelerates_config(content, path, read_json)
    if isinstance(content, dict) and are_training_arguments(content):
        content = _load_yaml(path, as_hydra=True) if _is_of_a_script(content) else content
        return fill_in_arguments(content, path, read_json)
    if isinstance(content, dict) and any(name in content for name in _OF_DEEPSPEED):
        config: dict[str, Any] = _load_yaml(path, as_hydra=True)
        return config
    hint = "give accelerate's YAML with a deepspeed_config, or DeepSpeed's config as JSON or YAML"
    raise InputError("has neither a deepspeed_config of accelerate nor keys of DeepSpeed", place=str(path), hint=hint)


def _load_yaml(path: Path, *, as_hydra: bool = False) -> Any:
    """Return the content of a YAML file as JSON has it. Raises InputError.

    PyYAML, which accelerate and the Trainer use, reads 5e8 as text; `as_hydra` reads it as a number.
    """
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {})  # a class of its own, which alone reads numbers so
    if as_hydra:
        loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
    try:
        read = yaml.load(read_text(path, most=LARGEST_CONFIG), loader)
        return json.loads(json.dumps(read, allow_nan=False, default=str))  # a date is text
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        raise InputError(
            f"is not YAML: {getattr(error, 'problem', None) or type(error).__name__}", place=place
        ) from None


def is_of_accelerate(content: Mapping[str, Any]) -> bool:
    """Whether this is a file of `accelerate config`, YAML or JSON, that uses DeepSpeed."""
    return isinstance(content.get("deepspeed_config"), Mapping) or content.get("distributed_type") == "DEEPSPEED"


def make_accelerates_config(content: Mapping[str, Any], path: Path, read_json: ReadConfig) -> dict[str, Any]:
    """Return the config that accelerate makes of its file. Raises InputError where accelerate refuses the file."""
    plugin = content.get("deepspeed_config") or {}
    if not isinstance(plugin, Mapping):
        hint = "name DeepSpeed's file in a field of that section: deepspeed_config_file: ds_config.json"
        raise InputError(
            "accelerate reads fields there, and these are none", place=f"{path}: deepspeed_config", hint=hint
        )
    _refuse_misplaced(content, plugin, path)
    if unread := [name for name in plugin if name in read_known_keys().top and name not in FIELDS_OF_ACCELERATE]:
        hint = "write DeepSpeed's keys into a JSON file, and name it: deepspeed_config_file"
        raise InputError(
            f"accelerate does not read {', '.join(unread)} there", place=f"{path}: deepspeed_config", hint=hint
        )
    named = plugin.get("deepspeed_config_file")
    if named not in (None, "none"):
        return _read_file_of_accelerate(named, content, path, read_json)
    config: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    given = {**_DEFAULTS, **{name: value for name, value in plugin.items() if value is not None}}
    for name, key in FIELDS_OF_ACCELERATE.items():
        value = given.get(name, "none")
        if isinstance(value, str):  # as `accelerate launch` writes it into the environment
            value = value if name.endswith("path") else _WORDS.get(value.lower(), _as_number(value.lower()))
        if value != "none" and not isinstance(value, Mapping | list):
            config = merge(config, nest_key(key, value))
    if config.get("gradient_clipping", "auto") == "auto":
        config["gradient_clipping"] = 1.0  # accelerate's own, and the Trainer's default
    elif config["gradient_clipping"] == 0:
        del config["gradient_clipping"]  # the plugin drops a 0, and DeepSpeed's own default decides
    if half := _HALVES.get(_read_precision(content, path)):
        config[half] = {"enabled": True}
    return config


def _read_precision(content: Mapping[str, Any], path: Path) -> str:
    """Return the precision that accelerate trains in. Raises InputError for a name that it does not know."""
    given = content.get("mixed_precision", "fp16" if content.get("fp16") else None)  # accelerate's older files
    precision = "no" if given in (None, False) else str(given).lower()  # YAML reads a bare no as false
    if precision not in _PRECISIONS:
        names = ", ".join(_PRECISIONS)
        raise InputError(f"accelerate knows no {given}", place=f"{path}: mixed_precision", hint=f"one of {names}")
    return precision


def _refuse_misplaced(content: Mapping[str, Any], plugin: Mapping[str, Any], path: Path) -> None:
    """Refuse a field of the DeepSpeed section at the top, and misspelt ones: accelerate ignores those of the section.

    Raises InputError.
    """
    fields = (*FIELDS_OF_ACCELERATE, *_OTHER_FIELDS)
    if outside := [name for name in fields if name in content]:
        hint = "write it below deepspeed_config" if len(outside) == 1 else "write them below deepspeed_config"
        raise InputError(f"accelerate refuses {', '.join(outside)} at the top", place=str(path), hint=hint)
    for part, known, verb, place in (
        (content, _TOP_FIELDS, "refuses", str(path)),
        (plugin, fields, "ignores", f"{path}: deepspeed_config"),
    ):
        if meant := _find_misspelt(part, known):
            hint = f"did you mean {', '.join(meant.values())}?"
            raise InputError(f"accelerate {verb} {', '.join(meant)}", place=place, hint=hint)


def _find_misspelt(given: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """Return the field that is meant by each name that is nearly one; a field that is given already is not meant."""
    free = [field for field in known if field not in given]
    near = {str(name): get_close_matches(str(name), free, n=1, cutoff=_SPELLING) for name in given if name not in known}
    return {name: fields[0] for name, fields in near.items() if fields}


def _read_file_of_accelerate(
    named: Any, content: Mapping[str, Any], path: Path, read_json: ReadConfig
) -> dict[str, Any]:
    """Read the file that accelerate's YAML names. Raises InputError where the YAML decides what the file has to."""
    given = [name for name in FIELDS_OF_ACCELERATE if name in content["deepspeed_config"]]
    if content.get("mixed_precision") is not None:
        given.append("mixed_precision")
    if given:
        problem = f"accelerate refuses {', '.join(given)} beside deepspeed_config_file"
        hint = f"leave {'them' if len(given) > 1 else 'it'} out: the DeepSpeed file decides"
        raise InputError(problem, place=str(path), hint=hint)
    config = _fill_in_plugin(_read_named("deepspeed_config_file", named, path, read_json))
    return {"gradient_accumulation_steps": 1, **config}


def _fill_in_plugin(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with "auto" as accelerate's DeepSpeedPlugin fills it in."""
    for field, value in _DEFAULTS_IN_A_FILE.items():
        if get_key(config, key := FIELDS_OF_ACCELERATE[field]) == "auto":
            config = merge(config, nest_key(key, value))
    return config


def are_training_arguments(content: Mapping[str, Any]) -> bool:
    """Whether these are the Trainer's arguments, as its scripts read them from a file."""
    return any(name in content for name in _OF_ARGUMENTS)


def _is_of_a_script(content: Mapping[str, Any]) -> bool:
    """Whether `deepspeed` is a section of a script's own file, beside no argument of the Trainer's."""
    return isinstance(content.get("deepspeed"), Mapping) and not _ARGUMENT_NAMES & set(content)


def fill_in_arguments(content: Mapping[str, Any], path: Path, read_json: ReadConfig) -> dict[str, Any]:
    """Return the DeepSpeed config that the arguments name or hold, with "auto" as the Trainer fills it in.

    What it computes of the model and the data stays "auto". Raises InputError where there is none, and where the
    Trainer refuses it because a value differs from its argument.
    """
    named = content.get("deepspeed")
    if isinstance(named, str) and named.lstrip().startswith("{"):
        with suppress(ValueError):
            named = json.loads(named)
    if not named:
        hint = 'add "deepspeed": "ds_config.json" to them, or give that file'
        raise InputError("are TrainingArguments that name no DeepSpeed config", place=str(path), hint=hint)
    if isinstance(named, Mapping) and _is_of_a_script(content):
        return dict(named)
    config = dict(named) if isinstance(named, Mapping) else _read_named("deepspeed", named, path, read_json)
    config = _fill_in_plugin(config)
    arguments = {_OTHER_NAMES.get(name, name): _as_number(value) for name, value in content.items()}
    unequal = []
    for key, name, value in _resolve_arguments(arguments):
        given = get_key(config, key)
        if value is None or (key in BATCH_KEYS and arguments.get("auto_find_batch_size") and given != "auto"):
            continue
        if given == "auto":
            config = merge(config, nest_key(key, value))
        elif name and given is not None and "auto" != value != given:
            source = "" if any(each in arguments for each in name.split(" and ")) else ", its default"
            unequal.append(f"{key} is {json.dumps(given)}, but {name} {json.dumps(value)}{source}")
    if unequal:
        hint = 'write "auto" for them in the DeepSpeed config'
        raise InputError(f"the Trainer refuses it: {'; '.join(unequal)}", place=str(path), hint=hint)
    for half in ("bf16", "fp16"):
        if arguments.get(half) is True and half not in config:
            config[half] = {"enabled": True}
    if config.get(BATCH_KEYS[0]) == "auto":
        del config[BATCH_KEYS[0]]  # the product of the others and the ranks
    return config


def _resolve_arguments(arguments: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield each (key of DeepSpeed's, argument that it has to equal, value); no value where the Trainer computes it."""
    for key, (name, default) in _ARGUMENTS.items():
        yield key, name, arguments.get(name, default)
    betas = [arguments.get(f"adam_beta{number}", usual) for number, usual in ((1, 0.9), (2, 0.999))]
    yield "optimizer.params.betas", "adam_beta1 and adam_beta2", betas
    yield "scheduler.params.warmup_min_lr", "", 0
    steps, warm = arguments.get("max_steps", -1), arguments.get("warmup_steps") or arguments.get("warmup_ratio") or 0
    yield "scheduler.params.total_num_steps", "max_steps", steps if steps != -1 else None
    if isinstance(warm, int | float) and not 0 < warm < 1:
        yield "scheduler.params.warmup_num_steps", "warmup_steps", max(1, int(warm))


def _as_number(value: Any) -> Any:
    """The number that a text holds, such as 1e-5, which YAML reads as text; other values as they are."""
    for read in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return read(value)
    return value


def _read_named(field: str, named: Any, path: Path, read_json: ReadConfig) -> dict[str, Any]:
    """Read the DeepSpeed file that a field of `path` names: from here, as the library does, or beside that file."""
    file = Path(str(named))
    if is_yaml(file):
        raise InputError(f"{field}: is YAML", place=str(path), hint="name a DeepSpeed JSON file")
    files = [each for each in (file, path.parent / file) if os.path.exists(each)]
    if not files and named in _CONFIGS_OF_SWIFT:
        files = _find_configs_of_swift(named)
        hint = f"it is ms-swift's own name: install that here, or name its file, config/{named}.json"
    else:
        hint = "give its path from here, or from the folder of that file"
    if not files:
        raise InputError(f"there is no file {file}", place=f"{path}: {field}", hint=hint)
    return read_json(files[0])


def _find_configs_of_swift(name: str) -> list[Path]:
    """Return the files that ms-swift means by this name; none where it is not installed."""
    spec = importlib.util.find_spec("swift")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return [file for folder in folders for file in sorted(Path(folder).rglob(f"*config/{name}.json"))]
