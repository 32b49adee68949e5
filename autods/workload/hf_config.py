"""A Hugging Face config as a workload: the model that a `config.json` describes.

Its weights are random, or with `--weights` those of the folder. Nothing is downloaded. The architecture comes from the
installed transformers; code that a config refers to is never run.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from ..errors import InputError
from ..files import read_text
from ..schema import parse_json
from ..types import Task, WorkloadSource
from .hf_weights import load_weights
from .long_sequences import share_sequences, tile_loss
from .lora import add_lora, import_packages, parse_lora
from .protocol import FETCH, Batch, Workload, WorkloadError

TASKS: tuple[Task, ...] = get_args(Task)
DEFAULT_LENGTH = 2048  # tokens; the longest sequence without --seq-len
# The first class that has the config's own model makes it, else the first that has one; older transformers lack the
# second.
_AUTO: Mapping[Task, tuple[str, ...]] = {
    "causal-lm": ("AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoModelForImageTextToText"),
    "seq2seq": ("AutoModelForSeq2SeqLM",),
    "masked-lm": ("AutoModelForMaskedLM",),
    "image-classification": ("AutoModelForImageClassification",),
}
_SENSE = re.compile(r"(vision|audio|speech|image|video)\w*_config")  # of a part that reads images or sounds
# Endings of class names by task. The first row that matches an architecture wins.
_ENDINGS: tuple[tuple[str, Task], ...] = (
    ("T5WithLMHeadModel", "seq2seq"),  # its name in old configs
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForMaskedLM", "masked-lm"),
    ("ForPreTraining", "masked-lm"),
    ("ForImageClassification", "image-classification"),
)
# A class for a certain use. ForConditionalGeneration is that of seq2seq, or of a language model with more senses.
_USE = re.compile(r"\w+For(?!ConditionalGeneration$)[A-Z]\w*")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_POSITIONS = re.compile(r"wpe|(?:.*_)?pos(?:ition)?s?(?:_.*)?")  # what models name their tables of learned positions
_PREFIX = "hf:"


def resolve_hf_path(path: Path) -> Path:
    """The folder or file that 'hf:./folder' names; any other path is returned unchanged.

    Raises InputError when it has no config.json: names of models on the Hub are not looked up.
    """
    text = str(path)
    if not text.startswith(_PREFIX):
        return path
    folder = Path(os.path.expanduser(text.removeprefix(_PREFIX)))
    config = find_config_file(folder)
    if config is not None and os.path.isfile(config):
        return folder
    problem = (
        "the folder has no config.json" if os.path.isdir(folder) else "there is no such folder or config.json here"
    )
    raise InputError(
        f"{problem}, and nothing is downloaded",
        place=text,
        hint=f"give hf:./FOLDER with the model's config.json in it; weights are not needed ({FETCH})",
    )


def find_config_file(path: Path) -> Path | None:
    """The `config.json` that a path means: a .json file, or the one in a folder; None when it is neither."""
    if path.suffix == ".json":
        return path
    return path / "config.json" if os.path.exists(path / "config.json") else None


def read_config(path: Path) -> dict[str, Any]:
    """Read the config. Raises InputError when it cannot be read or does not describe a model."""
    hint = "give the config.json of a Hugging Face model, or its folder"
    place = str(path)
    config = parse_json(read_text(path, hint=hint), place=place, hint=hint, object_hook=_decode_float)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError('is not a model config: it has no "model_type"', place=place, hint=hint)
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InputError('is not a model config: "architectures" is no list of names', place=place, hint=hint)
    return config


def _decode_float(item: dict[str, Any]) -> Any:
    """The number of {"__float__": "Infinity"}, which is how transformers saves what JSON has no number for."""
    return float(item["__float__"]) if item.keys() == {"__float__"} else item


def infer_task(config: Mapping[str, Any]) -> Task:
    """The task of the config's `architectures`: seq2seq for an encoder-decoder, causal-lm when nothing else matches."""
    names = config.get("architectures") or ()
    for ending, task in _ENDINGS:
        if any(str(name).endswith(ending) for name in names):
            return task
    return "seq2seq" if config.get("is_encoder_decoder") else "causal-lm"


def find_other_use(config: Mapping[str, Any]) -> str | None:
    """Return the class of the config's `architectures` that is for none of the tasks (LlamaForSequenceClassification).

    It is None where a class is for one of the tasks, or for no certain use.
    """
    names = config.get("architectures") or ()
    if any(name.endswith(ending) for ending, _ in _ENDINGS for name in names):
        return None
    return next((name for name in names if _USE.fullmatch(name)), None)


def find_idle_senses(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a language model reads beside text ("vision"); samples of text leave those parts of it idle."""
    parts = {name: part for name, part in config.items() if isinstance(part, Mapping)}
    senses = {match[1] for name in parts if (match := _SENSE.fullmatch(name))}
    return tuple(sorted(senses.union(*map(find_idle_senses, parts.values()))))


def find_quantization(config: Mapping[str, Any]) -> str | None:
    """Return the method that the config's weights were quantized with ("fp8", "gptq"); None for whole weights."""
    section = config.get("quantization_config") or config.get("compression_config")  # the second: compressed-tensors
    if not isinstance(section, Mapping):
        text = config.get("text_config")  # of a model with more senses, whose other parts stay whole
        return find_quantization(text) if isinstance(text, Mapping) else None
    packed = any(section.get(name) for name in ("load_in_4bit", "load_in_8bit"))  # bitsandbytes alone, once unnamed
    return str(section.get("quant_method") or ("bitsandbytes" if packed else "unnamed"))


def describe_omissions(source: WorkloadSource) -> Iterator[str]:
    """Say what is left out of the config's model: a head for another use, idle parts, and quantized weights."""
    if source.other_use is not None:
        yield f"{source.other_use} is for none of the tasks, so its {source.task} model is taken (or write a model.py)"
    if source.idle:
        senses, have = " and ".join(source.idle), "part has" if len(source.idle) == 1 else "parts have"
        yield f"samples of text alone: the {senses} {have} weights and no activations (a model.py makes other samples)"
    if source.quantization is not None:
        left = f"the config's quantization ({source.quantization}) is left out: the model is built of whole weights"
        packs = source.lora is not None and parse_lora(source.lora).quantized
        yield left if packs else f"{left} (--lora 4bit:RANK freezes them and holds them in 4 bits)"


def load_config(source: WorkloadSource) -> Workload:
    """Load the workload of a config. Raises WorkloadError when transformers has no model of it for the task."""
    assert source.task is not None
    path = Path(source.path)
    changes = {name.removeprefix("build_model."): value for name, value in source.arguments.items()}
    config = _make_config({**read_config(path), **changes}, path)
    for each in (config, config.get_text_config()):  # that of a model with more senses makes one by itself
        each.use_cache = False  # the cache serves generation
    if source.task == "seq2seq":  # labels are shifted right with these tokens
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    auto = _auto_class(config, source.task, path)
    _check_inputs(auto._model_mapping[type(config)], source.task, path)
    lora = None if source.lora is None else parse_lora(source.lora)
    if lora is not None:
        import_packages(lora)

    def build_model() -> Any:
        import torch

        return auto.from_config(config, dtype=torch.float32)

    def adapt_model(model: Any) -> Any:
        model = tile_loss(model, place=str(path)) if source.tiled_loss else model
        return model if lora is None else add_lora(model, lora=lora, place=str(path))

    share = functools.partial(share_sequences, config=config, place=str(path))
    return Workload(
        build_model=build_model,
        build_batch=_batch_builder(config, source, auto),
        load_model=functools.partial(load_weights, auto, config, path.parent) if source.weights else None,
        adapt_model=adapt_model if source.tiled_loss or lora is not None else None,
        share_sequences=share if source.task == "causal-lm" else None,
    )


def _make_config(data: Mapping[str, Any], path: Path) -> Any:
    from transformers import CONFIG_MAPPING

    name = data["model_type"]
    if name not in CONFIG_MAPPING:
        from transformers import __version__ as version

        custom_code = "; its custom code (auto_map) is never run" if "auto_map" in data else ""
        raise WorkloadError(
            f"transformers {version} has no architecture {name!r}{custom_code}",
            place=str(path),
            hint="install a transformers that has it, or write a model.py with build_model and build_batch",
        )
    try:
        return CONFIG_MAPPING[name].from_dict(dict(data))
    except Exception as error:  # each architecture checks its config in its own way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise WorkloadError(f"is not a config of {name}: {reason:.200}", place=str(path)) from None


def _auto_class(config: Any, task: Task, path: Path) -> Any:
    """The Auto class of the task. Raises WorkloadError when it has no model for the config."""
    if (auto := _find_auto_class(config, task)) is not None:
        # Import the model's code (600 modules, 70 MiB) once, before ranks are forked, not in each under its budget.
        auto._model_mapping[type(config)]
        return auto
    supported = [each for each in _AUTO if _find_auto_class(config, each) is not None]
    if config.is_encoder_decoder and "causal-lm" in supported:
        supported.remove("causal-lm")  # its decoder alone
    hint = f"give --task {' or '.join(supported)}" if supported else "write a model.py with build_model and build_batch"
    raise WorkloadError(f"{config.model_type} has no model for --task {task}", place=str(path), hint=hint)


def _check_inputs(model: Any, task: Task, path: Path) -> None:
    """Raises WorkloadError where the class of the model, or the first of several, needs inputs that samples lack."""
    model = model[0] if isinstance(model, (list, tuple)) else model
    given = ("self", "pixel_values" if task == "image-classification" else "input_ids", "labels")
    needed = [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and name not in given
    ]
    if needed:
        problem = f"{model.__name__} cannot train without {', '.join(needed)}, which samples of {task} lack"
        raise WorkloadError(problem, place=str(path), hint="write a model.py with build_model and build_batch")


def _find_auto_class(config: Any, task: Task) -> Any:
    """The Auto class of the task that has the config's own model, else the first that has one for it, or None.

    The first may have the language model alone of a config that also has other senses.
    """
    import transformers

    autos = [auto for name in _AUTO[task] if (auto := getattr(transformers, name, None)) is not None]
    knowing = [auto for auto in autos if type(config) in auto._model_mapping]
    if len(knowing) > 1:
        named = (auto for auto in knowing if _names_model(config, auto._model_mapping[type(config)]))
        return next(named, knowing[0])
    return next(iter(knowing), None)


def _names_model(config: Any, model: Any) -> bool:
    """Whether the config's `architectures` name this class, or one of several."""
    classes = model if isinstance(model, (list, tuple)) else (model,)
    return any(each.__name__ in (config.architectures or ()) for each in classes)


def _count_positions(auto: Any, config: Any, longest: int) -> int | None:
    """The tokens that the model's tables of learned positions have room for; None for a model without any.

    RoBERTa's first position is the one after that of padding, and OPT's comes after an offset, so that a table of
    `longest` rows is none of `longest` tokens. A smaller table is that of another part, such as image patches.
    """
    import torch

    if getattr(config.get_text_config(), "rope_parameters", None):  # rotary positions
        return None
    try:
        with torch.device("meta"):
            model = auto.from_config(config)
    except Exception:  # whatever is wrong with the model, build_model raises it where it is reported
        return None
    rooms = [
        table.num_embeddings - (getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1)
        for name, table in model.named_modules()
        if isinstance(table, torch.nn.Embedding)
        and table.num_embeddings >= longest
        and _POSITIONS.fullmatch(name.rpartition(".")[2])
    ]
    return min(rooms, default=None)


def _batch_builder(config: Any, source: WorkloadSource, auto: Any) -> Callable[[int], Batch]:
    """build_batch for the worst shape: the longest sequences, without padding.

    Raises WorkloadError for sequences that are longer than the model's learned positions.
    """
    import torch

    if source.task == "image-classification":
        size = getattr(config, "image_size", None) or 224  # convolutional networks take any size; 224 is ImageNet's
        height, width = (size, size) if isinstance(size, int) else (int(size[-2]), int(size[-1]))
        channels = int(getattr(config, "num_channels", 3))

        def build_images(micro_batch_size: int) -> Batch:
            images = torch.rand(micro_batch_size, channels, height, width)
            return {"pixel_values": images, "labels": _draw_labels(config, micro_batch_size)}

        return build_images
    text = config.get_text_config()
    vocabulary = int(text.vocab_size)
    # The longest sequence that the config allows. Models with relative positions (T5, ALiBi) have no limit.
    lengths = [getattr(text, name, None) for name in _LENGTHS]
    longest = next((length for length in lengths if isinstance(length, int) and length > 1), None)
    room = None if longest is None else _count_positions(auto, config, longest)
    length = source.seq_len or min(room or longest or DEFAULT_LENGTH, DEFAULT_LENGTH)
    target = source.target_len or length
    for option, tokens in (("--seq-len", length), ("--target-len", target)):
        if room is not None and tokens > room:
            problem = f"{option} {tokens}: the model has learned positions for {room} tokens"
            raise WorkloadError(problem, place=source.path, hint=f"give {option} {room}, or less")

    def build_tokens(micro_batch_size: int) -> Batch:
        tokens = torch.randint(vocabulary, (micro_batch_size, length))
        if source.task == "seq2seq":
            return {"input_ids": tokens, "labels": torch.randint(vocabulary, (micro_batch_size, target))}
        return {"input_ids": tokens, "labels": tokens.clone()}

    return build_tokens


def _draw_labels(config: Any, samples: int) -> Any:
    """Return random labels as the loss of the config's `problem_type` takes them: a class, many of them, or numbers."""
    import torch

    if config.problem_type == "multi_label_classification":
        return torch.randint(2, (samples, config.num_labels)).float()
    if config.problem_type == "regression" or config.num_labels == 1:
        return torch.rand(samples, config.num_labels)
    return torch.randint(config.num_labels, (samples,))
