"""Read the DeepSpeed config in a YAML file of `accelerate config`: a file that it names, or the plugin's own fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import LARGEST_CONFIG, read_text
from .deepspeed import merge, nest_key

# Fields of accelerate's DeepSpeedPlugin (utils/dataclasses.py) and the keys that it writes for them.
_KEYS = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_DEFAULTS = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_stage": 2}
_WORDS = {"true": True, "false": False}  # the questions of `accelerate config` are answered by text


def is_yaml(path: Path) -> bool:
    """Whether the file's name says so."""
    return path.suffix in (".yaml", ".yml")


def read_accelerate_config(path: Path, read_json: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the config that accelerate gives to DeepSpeed. `read_json` reads the file that the YAML may name.

    Raises InputError for a file that is not accelerate's, or that does not use DeepSpeed.
    """
    import yaml

    try:
        content = yaml.safe_load(read_text(path, most=LARGEST_CONFIG))
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)
        raise InputError(
            f"is not YAML: {getattr(error, 'problem', None) or type(error).__name__}", place=place
        ) from None
    plugin = content.get("deepspeed_config") if isinstance(content, dict) else None
    if not isinstance(plugin, Mapping):
        hint = "give accelerate's YAML with a deepspeed_config, or a DeepSpeed JSON file"
        raise InputError("has no deepspeed_config of accelerate", place=str(path), hint=hint)
    named = plugin.get("deepspeed_config_file")
    if named not in (None, "none"):
        if is_yaml(Path(str(named))):
            raise InputError("deepspeed_config_file: is YAML", place=str(path), hint="name a DeepSpeed JSON file")
        return read_json(Path(str(named)))
    config: dict[str, Any] = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    given = {**_DEFAULTS, **{name: value for name, value in plugin.items() if value is not None}}
    for name, key in _KEYS.items():
        value = given.get(name, "none")
        if value != "none" and not isinstance(value, Mapping | list):
            config = merge(config, nest_key(key, _WORDS.get(value, value) if isinstance(value, str) else value))
    if content.get("mixed_precision") in ("bf16", "fp16"):
        config[str(content["mixed_precision"])] = {"enabled": True}
    return config
