"""Small models of five architectures, and the bytes that DeepSpeed's engine really allocates for them on the CPU.

The engine runs as rank 0 of WORLD ranks on real tensors with a fake process group, in a process forked for each case.
The bytes are counted here, by a few lines that share nothing with the simulator's ledger.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autods.config.rungs import read_rungs
from autods.forecast.values import PHASES
from autods.types import Knobs, Scalar
from tests.support.composed import compose_config

WORLD = 8
ARCHITECTURES = ("gpt2", "llama", "t5", "bert", "opt")
_SIZES = {
    "gpt2": {
        "n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": {
        "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1000,
    },
    "t5": {"num_layers": 2, "d_model": 128, "d_ff": 256, "d_kv": 32, "num_heads": 4, "vocab_size": 1000,
           "decoder_start_token_id": 0},
    "bert": {
        "num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4,
        "vocab_size": 1000,
    },
    "opt": {
        "num_hidden_layers": 3, "hidden_size": 128, "ffn_dim": 512, "num_attention_heads": 4, "vocab_size": 1000,
        "word_embed_proj_dim": 128, "max_position_embeddings": 64,
    },
}  # fmt: skip
# Dropout and attention have other kernels on a GPU than on a CPU; these cases compare the engine, not kernels.
_PLAIN = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "llama": {}, "t5": {"dropout_rate": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "opt": {"dropout": 0.0},
}  # fmt: skip
_CLASSES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"), "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"), "bert": ("BertConfig", "BertForMaskedLM"),
    "opt": ("OPTConfig", "OPTForCausalLM"),
}  # fmt: skip
_SEQUENCE = 32


# Optimizers that a config names, and DeepSpeed builds.
_BY_CONFIG: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw-foreach": {"type": "AdamW", "params": {"torch_adam": True, "foreach": True}},
    "fused-adam": {"type": "AdamW", "params": {}},
    "sgd": {"type": "SGD", "params": {"momentum": 0.9}},
    "adagrad": {"type": "Adagrad", "params": {}},
    "lion": {"type": "Lion", "params": {}},
    "lamb": {"type": "Lamb", "params": {}},
    "muon": {"type": "Muon", "params": {}},
    "adafactor": {"type": "Adafactor", "params": {}},
    "rmsprop": {"type": "RMSprop", "params": {}},
}
# Optimizers that a workload's build_optimizer makes.
_OWN = {
    "own-sgd": "torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)",
    "own-adamw": "torch.optim.AdamW(parameters, lr=1e-3)",
    "own-adamw-foreach": "torch.optim.AdamW(parameters, lr=1e-3, foreach=True)",
    "own-adamw-fused": "torch.optim.AdamW(parameters, lr=1e-3, fused=True)",
    "own-sgd-fused": "torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, fused=True)",
    "own-adafactor": "torch.optim.Adafactor(parameters, lr=1e-3)",
    "own-transformers-adafactor": "transformers.Adafactor(parameters, lr=1e-3, relative_step=False)",
    "own-adam8bit": "bitsandbytes.optim.Adam8bit(parameters, lr=1e-3)",
}
OPTIMIZERS = (*_BY_CONFIG, *_OWN)


def own_optimizer(name: str, parameters: Any) -> Any:
    """The optimizer that a workload's build_optimizer returns."""
    import importlib

    expression = _OWN[name]
    module = expression.partition(".")[0]
    return eval(expression, {module: importlib.import_module(module), "parameters": parameters})


def model(architecture: str, *, plain: bool) -> Any:
    """A model with random weights. `plain` ones, without dropout and with eager attention, run the same operators on
    CPU and CUDA."""
    import transformers

    config, kind = (getattr(transformers, name) for name in _CLASSES[architecture])
    options = _SIZES[architecture] | {"use_cache": False} | (_PLAIN[architecture] if plain else {})
    configured = config(**options)
    if plain:
        configured._attn_implementation = "eager"
    return kind(configured)


def batch(micro_batch: int, *, padded: bool | None = None) -> dict[str, Any]:
    """Token ids and labels; with `padded` True or False also an attention mask with or without zeros."""
    import torch

    tokens = torch.zeros(micro_batch, _SEQUENCE, dtype=torch.long)
    if padded is None:
        return {"input_ids": tokens, "labels": tokens}
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, -_SEQUENCE // 4 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def workload_file(
    architecture: str, folder: Path, *, plain: bool, optimizer: str = "adamw", padded: bool | None = None
) -> Path:
    """Write a model.py of that architecture into the folder."""
    path = folder / f"{architecture}{'_plain' if plain else ''}.py"
    own = f"def build_optimizer(parameters):\n    return golden_cases.own_optimizer({optimizer!r}, parameters)\n"
    path.write_text(
        "from tests.support import golden_cases\n"
        f"def build_model():\n    return golden_cases.model({architecture!r}, plain={plain})\n"
        f"def build_batch(micro_batch):\n    return golden_cases.batch(micro_batch, padded={padded})\n"
        + (own if optimizer in _OWN else "")
    )
    return path


def config_of(
    rung: str,
    *,
    accumulation: int,
    pinned: bool = True,
    precision: str = "bf16",
    world: int = WORLD,
    optimizer: str = "adamw",
) -> dict[str, Any]:
    """The rung's config with buckets that suit these sizes, and an AdamW that needs no compiled op.

    With `pinned` memory is pinned as the rung says: on a GPU that makes a copy, without one it does nothing.
    `optimizer` is one of OPTIMIZERS.
    """
    strategy = read_rungs()[rung]
    small: dict[str, Any] = {
        "reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 50_000, "sub_group_size": 300_000,
        "stage3_param_persistence_threshold": 500, "stage3_max_live_parameters": 200_000,
        "stage3_max_reuse_distance": 200_000,
    }  # fmt: skip
    base: dict[str, Any] = {precision: {"enabled": True}} if precision != "fp32" else {}
    base |= {"steps_per_print": 10**9, "zero_optimization": small}
    if optimizer != "adamw":
        base |= {"zero_allow_untested_optimizer": True}
        if optimizer == "muon":
            small["reduce_scatter"] = False  # stage 3 refuses Muon with it
        if named := _BY_CONFIG.get(optimizer):
            base["optimizer"] = {"type": named["type"], "params": {"lr": 1e-3, **named["params"]}}
    sized: dict[str, Scalar] = {"optimizer.params.torch_adam": True} if optimizer == "adamw" else {}
    for part in ("offload_param", "offload_optimizer"):
        if not pinned and part in strategy.ds_config["zero_optimization"]:
            sized[f"zero_optimization.{part}.pin_memory"] = False
    if strategy.uses_nvme:
        sized["zero_optimization.offload_param.buffer_size"] = 150_000
    return compose_config(
        strategy, Knobs(micro_batch=2, accumulation=accumulation, settings=sized), base=base, world_size=world,
        own_optimizer=optimizer in _OWN, nvme_path=Path("/nvme"),
    )  # fmt: skip


def allocate_on_cpu(
    architecture: str,
    config: Mapping[str, Any],
    *,
    checkpointing: bool,
    plain: bool,
    micro_batch: int = 2,
    optimizer: str = "adamw",
    padded: bool | None = None,
) -> dict[str, int]:
    """Peak bytes of real CPU tensors by phase, of init and two steps. Raises Refused.

    It runs in a forked process: call it where DeepSpeed is imported for the CPU.
    """
    from autods.workload import Workload

    workload = Workload(
        build_model=lambda: model(architecture, plain=plain),
        build_batch=lambda size: batch(size, padded=padded),
        build_optimizer=(lambda parameters: own_optimizer(optimizer, parameters)) if optimizer in _OWN else None,
    )
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        try:
            if plain and "offload_optimizer" not in config["zero_optimization"]:
                _choose_as_on_cuda()
            result = _run(workload, config, checkpointing, micro_batch, plain)
        except BaseException as error:
            result = {"error": traceback.format_exc(), "what": f"{type(error).__name__}: {error}"}
        with os.fdopen(theirs, "w") as out:
            json.dump(result, out)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as lines:
        result = json.load(lines)
    os.waitpid(pid, 0)
    if "error" in result:
        raise Refused(result["what"], result["error"])
    return result


def _choose_as_on_cuda() -> None:
    """Let torch's optimizers take their foreach form, which is the default on a GPU only."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    for module in (optimizer, _foreach_utils):
        module._get_foreach_kernels_supported_devices = lambda: ["cpu"]


def _compute_as_on_cuda() -> None:
    """Let DeepSpeed use FusedLion and FusedLamb, which it has for GPUs only, and Muon in fp16."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu import NotImplementedBuilder

    NotImplementedBuilder.load = OpBuilder.load
    get_accelerator().is_fp16_supported = lambda: True


class Refused(RuntimeError):
    """The real engine raised an error: its exception in a line, and the traceback."""


def _run(
    workload: Any, config: Mapping[str, Any], checkpointing: bool, micro_batch: int, plain: bool
) -> dict[str, int]:
    import tempfile

    import torch

    from autods.forecast.simulate import deepspeed_patches
    from autods.forecast.simulate.dispatch import join_world
    from autods.forecast.simulate.engine import swap_into
    from autods.forecast.simulate.ledger import Ledger
    from autods.rank.model_facts import place
    from autods.rank.model_trial import build, initialize, optimizer_step

    with tempfile.TemporaryDirectory() as scratch, count_bytes() as (begin, peaks):
        os.chdir(scratch)
        config = swap_into(scratch, config)
        torch.compiler.set_stance("force_eager")  # Muon's update
        deepspeed_patches.install(Ledger(one_memory=True))  # swap files and compiled ops allocate nothing
        if plain:
            _compute_as_on_cuda()
        join_world(WORLD, WORLD)
        begin("build")
        module = build(workload, config, checkpointing=checkpointing)
        begin("init")
        samples = workload.build_batch(micro_batch)
        engine = initialize(workload, module, config)
        samples = place(samples, engine)
        for index in range(2):
            accumulation = int(config["gradient_accumulation_steps"])
            optimizer_step(workload, engine, samples, accumulation, index, lambda phase, step: begin(phase))
        begin("end")
    return {name: peaks[name] for name in PHASES}


@contextlib.contextmanager
def count_bytes() -> Iterator[tuple[Callable[[str], None], dict[str, int]]]:
    """Count the storages that operators return, until each dies: a function that begins a phase, and peaks by phase."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    live: dict[int, int] = {}
    peaks: dict[str, int] = {}
    count = {"bytes": 0, "peak": 0}
    current = ["start"]

    def forget(key: int) -> None:
        count["bytes"] -= live.pop(key)

    def begin(phase: str) -> None:
        peaks[current[0]] = max(peaks.get(current[0], 0), count["peak"])
        current[0], count["peak"] = phase, count["bytes"]

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in tree_iter(out):
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    key, size = storage._cdata, storage.nbytes()
                    if key not in live:
                        weakref.finalize(storage, forget, key)
                    count["bytes"] += size - live.get(key, 0)
                    live[key] = size
                    count["peak"] = max(count["peak"], count["bytes"])
            return out

    with Counter():
        yield begin, peaks
