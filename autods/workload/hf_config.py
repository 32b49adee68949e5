"""A Hugging Face config: the model that its `config.json` describes, with random weights. No weights are ever loaded.

Nothing is downloaded either: the architecture is the installed transformers' own, never code that a config brings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from ..errors import InputError
from ..types import Task, WorkloadSource
from .protocol import Batch, Workload, WorkloadError

TASKS: tuple[Task, ...] = get_args(Task)
LONGEST = 2048  # tokens: a sequence that nobody asked for is no longer than this
_AUTO: Mapping[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "masked-lm": "AutoModelForMaskedLM",
    "image-classification": "AutoModelForImageClassification",
}
# How the names of a task's classes end; in this order, the first that an architecture has.
_ENDINGS: tuple[tuple[str, Task], ...] = (
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForMaskedLM", "masked-lm"),
    ("ForPreTraining", "masked-lm"),
    ("ForImageClassification", "image-classification"),
)

_PREFIX = "hf:"


def local_path(path: Path) -> Path:
    """What 'hf:./folder' names: a folder with a config.json, or such a file; any other path is passed on.

    Raises InputError where it is neither: a model's name on the Hub is not looked up, and nothing is downloaded.
    """
    said = str(path)
    if not said.startswith(_PREFIX):
        return path
    found = Path(said.removeprefix(_PREFIX)).expanduser()
    config = config_file(found)
    if config is not None and config.is_file():
        return found
    what = "the folder has no config.json" if found.is_dir() else "there is no such folder or config.json here"
    raise InputError(
        f"{what}, and nothing is downloaded",
        where=said,
        hint="give hf:./FOLDER with the model's config.json in it; weights are not needed",
    )


def config_file(path: Path) -> Path | None:
    """The `config.json` that a path means: a .json file, or a folder that has one; None when it is neither."""
    if path.suffix == ".json":
        return path
    return path / "config.json" if (path / "config.json").is_file() else None


def read_config(path: Path) -> dict[str, Any]:
    """The config as a dict. Raises InputError when it cannot be read or describes no model."""
    hint = "give the config.json of a Hugging Face model, or its folder"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    except UnicodeDecodeError:
        raise InputError("is not text", where=str(path), hint=hint) from None
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}", hint=hint) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError('is no model\'s config: it has no "model_type"', where=str(path), hint=hint)
    return config


def task_of(config: Mapping[str, Any]) -> Task:
    """The task of the config's `architectures`, else causal-lm; what encodes and decodes is seq2seq."""
    names = config.get("architectures") or ()
    for ending, task in _ENDINGS:
        if any(str(name).endswith(ending) for name in names):
            return task
    return "seq2seq" if config.get("is_encoder_decoder") else "causal-lm"


def load_config(source: WorkloadSource) -> Workload:
    """The workload of a config. Raises WorkloadError when transformers has no such model for the task."""
    assert source.task is not None
    path = Path(source.path)
    said = {name.removeprefix("build_model."): value for name, value in source.arguments.items()}
    config = _settled(_config({**read_config(path), **said}, path), source)
    auto = _auto_class(config, source.task, path)
    # Imports the model's code (600 modules, 70 MiB) here, once, and not in every rank under its budget.
    auto._model_mapping[type(config)]

    def build_model() -> Any:
        import torch

        return auto.from_config(config, dtype=torch.float32)

    return Workload(build_model=build_model, build_batch=_batches(config, source))


class _Zero3:
    """What transformers asks of `HfDeepSpeedConfig`, which needs accelerate to be installed."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.config = dict(ds_config)

    def is_zero3(self) -> bool:
        return True


def partitioned(workload: Workload, ds_config: Mapping[str, Any]) -> Workload:
    """The workload whose model is split over the ranks while it is built, as stage 3 will have it.

    transformers has to know of stage 3 for that: it suppresses its initialisation under `deepspeed.zero.Init` and then
    gathers each module's weights to initialise them. Under zero.Init alone a model would start from wrong weights.
    """

    def build_model() -> Any:
        from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

        said = _Zero3(ds_config)  # transformers keeps a weak reference
        set_hf_deepspeed_config(said)
        try:
            return workload.build_model()
        finally:
            unset_hf_deepspeed_config()

    return replace(workload, build_model=build_model)


def _config(data: Mapping[str, Any], path: Path) -> Any:
    from transformers import CONFIG_MAPPING

    name = data["model_type"]
    if name not in CONFIG_MAPPING:
        from transformers import __version__ as version

        own = "; code that a config brings (auto_map) is never run" if "auto_map" in data else ""
        raise WorkloadError(
            f"transformers {version} has no architecture {name!r}{own}",
            where=str(path),
            hint="install a transformers that has it, or write a model.py with build_model and build_batch",
        )
    try:
        return CONFIG_MAPPING[name].from_dict(dict(data))
    except Exception as error:  # each architecture checks its config in its own way
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise WorkloadError(f"is not a config of {name}: {said:.200}", where=str(path)) from None


def _settled(config: Any, source: WorkloadSource) -> Any:
    """The config as a training run has it."""
    config.use_cache = False  # the cache is for generation
    if source.task == "seq2seq":  # labels are shifted right with these
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    return config


def _auto_class(config: Any, task: Task, path: Path) -> Any:
    import transformers

    autos = {name: getattr(transformers, auto) for name, auto in _AUTO.items()}
    if type(config) in autos[task]._model_mapping:
        autos[task]._model_mapping[type(config)]  # imports the model's code now, before processes are forked
        return autos[task]
    able = [name for name, auto in autos.items() if type(config) in auto._model_mapping]
    hint = f"give --task {' or '.join(able)}" if able else "write a model.py with build_model and build_batch"
    raise WorkloadError(f"{config.model_type} has no model for --task {task}", where=str(path), hint=hint)


def _batches(config: Any, source: WorkloadSource) -> Callable[[int], Batch]:
    """build_batch of the worst shape: the longest sequences, no padding."""
    if source.task == "image-classification":
        return _images(config)
    text = config.get_text_config()
    vocabulary = int(text.vocab_size)
    length = source.seq_len or min(_longest(text), LONGEST)
    target = source.target_len or length

    def build_batch(micro_batch_size: int) -> Batch:
        import torch

        tokens = torch.randint(vocabulary, (micro_batch_size, length))
        if source.task == "seq2seq":
            return {"input_ids": tokens, "labels": torch.randint(vocabulary, (micro_batch_size, target))}
        return {"input_ids": tokens, "labels": tokens.clone()}

    return build_batch


def _images(config: Any) -> Callable[[int], Batch]:
    size = getattr(config, "image_size", None) or 224  # convolutional networks take any size; 224 is ImageNet's
    height, width = (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))
    channels = int(getattr(config, "num_channels", 3))

    def build_batch(micro_batch_size: int) -> Batch:
        import torch

        images = torch.rand(micro_batch_size, channels, height, width)
        return {"pixel_values": images, "labels": torch.randint(config.num_labels, (micro_batch_size,))}

    return build_batch


def _longest(text: Any) -> int:
    """The longest sequence by the config; models without a bound (T5's and ALiBi's distances) have none."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 1:
            return value
    return LONGEST
