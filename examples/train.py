"""A plain DeepSpeed training loop for a config that autods found; it knows nothing of autods.

deepspeed --num_gpus 2 examples/train.py --model model.py --deepspeed_config autods-out/model/ds_config.json
torchrun --nproc_per_node 2 examples/train.py --deepspeed_config autods-out/demo/ds_config.json --memory-budget 416MiB

The second line trains on CPU ranks where there is no GPU, each with a hard memory budget, like the trials of a fit.
--model is a model.py as autods reads it, or a Hugging Face config.json, whose model learns random tokens or images.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import random
import re
import resource
import statistics
import sys
import time
import warnings

# How the ranks of a trial run: one thread, freed memory goes back at once. malloc reads these when a process begins.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

# Imported at the first step otherwise. Code would not lie in a card's memory, so the budget leaves it out.
IMPORTED_LATE = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper",
    "torch.distributed.fsdp",
    "torch.utils.checkpoint",
    "transformers.integrations.deepspeed",
)

# The first class that has the config's own model makes it, else the first that has one; older transformers lack the
# second.
AUTO = {
    "causal-lm": ("AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoModelForImageTextToText"),
    "seq2seq": ("AutoModelForSeq2SeqLM",),
    "masked-lm": ("AutoModelForMaskedLM",),
    "image-classification": ("AutoModelForImageClassification",),
}


def main() -> None:
    asked = arguments()
    if asked.memory_budget and any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # DeepSpeed calls what torch renamed
    # The new name of transformers 5.23 fails on a model that overrides the old one.
    warnings.filterwarnings("ignore", "`gradient_checkpointing_enable`", FutureWarning)
    deepspeed = import_deepspeed()
    import torch

    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(torch.distributed.get_rank())
    random.seed(torch.distributed.get_rank())
    workload = load_model_py(asked) if asked.model.suffix == ".py" else load_hugging_face(asked)
    if asked.memory_budget:
        limit_memory(asked.memory_budget)
    config = json.loads(asked.deepspeed_config.read_text())
    in_parts = (asked.zero_init or asked.weights) and config.get("zero_optimization", {}).get("stage") == 3
    model = build_partitioned(workload, config) if in_parts else workload.build_model()
    if asked.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**asked.lora), autocast_adapter_dtype=False)
    if asked.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        recompute_some_layers(model, asked.gradient_checkpointing)
        if config.get("activation_checkpointing", {}).get("cpu_checkpointing"):
            keep_inputs_on_host(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = workload.build_optimizer(parameters) if hasattr(workload, "build_optimizer") else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, optimizer=optimizer, config=config)
    losses, ends = [], [time.perf_counter()]
    for _ in range(asked.steps):
        losses.append(train_step(engine, workload))  # the loss that it reads waits for the device
        ends.append(time.perf_counter())
    if torch.distributed.get_rank() == 0:
        step_s = statistics.median(end - begin for begin, end in itertools.pairwise(ends))
        rate = f"{engine.train_batch_size() / step_s:.3g} samples/s by the median step"
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps, {rate}", flush=True)
    if asked.memory_budget:
        limit_memory(None)  # training is over; taking gloo down starts threads
    torch.distributed.barrier()  # a rank that leaves early takes the others' connections with it
    torch.distributed.destroy_process_group()
    if asked.memory_budget:
        os._exit(0)  # gloo's threads may still run, and would end in std::terminate with the interpreter


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", type=pathlib.Path, required=True)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path(__file__).with_name("gpt.py"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--gradient-checkpointing", type=int, nargs="?", const=1, default=0, metavar="K", help="of one in K layers"
    )
    parser.add_argument(
        "--zero-init", action="store_true", help="stage 3 builds the model already divided over the ranks"
    )
    parser.add_argument("--seq-len", type=int, help="tokens of a sample, where they are not what the model says")
    parser.add_argument("--target-len", type=int, help="tokens of its target, of a seq2seq model")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="start from the safetensors beside config.json, which stage 3 loads in parts",
    )
    parser.add_argument("--task", choices=AUTO, default="causal-lm", help="of a config.json")
    parser.add_argument("--lora", type=json.loads, metavar="JSON", help="arguments of peft.LoraConfig")
    parser.add_argument("--memory-budget", type=size, help="of each CPU rank, such as 416MiB")
    parser.add_argument("--local_rank", type=int, help="the deepspeed launcher passes it; LOCAL_RANK says the same")
    return parser.parse_args()


def size(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG])iB", text)
    if found is None:
        raise argparse.ArgumentTypeError("give a size such as 416MiB")
    return int(found[1]) << {"K": 10, "M": 20, "G": 30}[found[2]]


def build_partitioned(workload, config: dict):
    """The model built already divided over the ranks; transformers, told of that, gathers each weight that it sets.

    transformers loads weights in parts with accelerate alone.
    """
    import deepspeed
    import transformers

    known = transformers.integrations.HfDeepSpeedConfig(config)  # transformers only has a weak reference
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = workload.build_model()
    del known
    return model


def recompute_some_layers(model, every: int) -> None:
    """One in so many layers of each stack recomputes its activations, beginning with the first."""
    import torch

    for stack in model.modules():
        if isinstance(stack, torch.nn.ModuleList):
            layers = (layer for layer in stack if getattr(layer, "gradient_checkpointing", False))
            for place, layer in enumerate(layers):
                layer.gradient_checkpointing = place % every == 0


def keep_inputs_on_host(model) -> None:
    """Each layer of transformers that recomputes its activations keeps its input in host memory until backward.

    DeepSpeed's cpu_checkpointing does so only where the model calls deepspeed.checkpointing.
    """
    import torch

    def on_host(checkpoint, function, *inputs, **named):
        hidden = next(each for each in inputs if torch.is_tensor(each) and each.is_floating_point())
        known = hidden.data_ptr(), hidden.shape

        def pack(tensor):
            if (tensor.data_ptr(), tensor.shape) != known:
                return tensor
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
            return tensor.device, copy.copy_(tensor, non_blocking=True)

        def unpack(packed):
            return packed[1].to(packed[0], non_blocking=True) if isinstance(packed, tuple) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return checkpoint(function, *inputs, **named)

    for layer in model.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer._gradient_checkpointing_func = functools.partial(on_host, layer._gradient_checkpointing_func)


def import_deepspeed():
    """On CPU ranks where there is no GPU; without the op that DeepSpeed would compile for them in the first run."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        for name in IMPORTED_LATE:
            with contextlib.suppress(ImportError):  # another version may lack it
                importlib.import_module(name)
    return deepspeed


def load_model_py(asked: argparse.Namespace):
    sys.path.insert(0, str(asked.model.parent))
    spec = importlib.util.spec_from_file_location("workload", asked.model)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if asked.seq_len is not None:
        module.build_batch = functools.partial(module.build_batch, seq_len=asked.seq_len)
    return module


def load_hugging_face(asked: argparse.Namespace):
    """The model of a config.json, with random weights or those of its folder, and random data of the longest shape."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(asked.model)
    text = config.get_text_config()
    config.use_cache = text.use_cache = False
    for name in ("pad_token_id", "decoder_start_token_id") if asked.task == "seq2seq" else ():
        if getattr(config, name, None) is None:
            setattr(config, name, 0)

    def build_model():
        autos = [getattr(transformers, name) for name in AUTO[asked.task] if hasattr(transformers, name)]
        found = [each for each in autos if type(config) in each._model_mapping] or autos[:1]
        named = config.architectures or ()
        own = (each for each in found if len(found) > 1 and each._model_mapping[type(config)].__name__ in named)
        auto = next(own, found[0])
        if not asked.weights:
            return auto.from_config(config, dtype=torch.float32)
        folder = asked.model if asked.model.is_dir() else asked.model.parent
        model = auto.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
        return model.train()

    def build_batch(size: int):
        if asked.task == "image-classification":
            side = getattr(config, "image_size", None) or 224
            sides = (side, side) if isinstance(side, int) else tuple(side)[-2:]
            images = torch.rand(size, getattr(config, "num_channels", 3), *sides)
            labels = torch.randint(config.num_labels, (size,))
            if config.problem_type == "multi_label_classification":
                labels = torch.randint(2, (size, config.num_labels)).float()
            elif config.problem_type == "regression" or config.num_labels == 1:
                labels = torch.rand(size, config.num_labels)
            return {"pixel_values": images, "labels": labels}
        tokens = torch.randint(text.vocab_size, (size, asked.seq_len or 2048))
        if asked.task == "seq2seq":
            labels = torch.randint(text.vocab_size, (size, asked.target_len or tokens.shape[1]))
            return {"input_ids": tokens, "labels": labels}
        return {"input_ids": tokens, "labels": tokens.clone()}

    return argparse.Namespace(build_model=build_model, build_batch=build_batch)


def limit_memory(budget_bytes: int | None) -> None:
    """From here on this process may add that much private memory, and no byte more. None: as much as it likes."""
    status = pathlib.Path("/proc/self/status").read_text()
    used_bytes = int(re.search(r"VmData:\s*(\d+) kB", status)[1]) * 1024
    most = resource.RLIM_INFINITY if budget_bytes is None else used_bytes + budget_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))


def train_step(engine, workload) -> float:
    """One optimizer step; the mean loss of its micro batches."""
    total = 0.0
    for _ in range(engine.gradient_accumulation_steps()):
        batch = workload.build_batch(engine.train_micro_batch_size_per_gpu())
        loss = forward(engine, workload, batch)
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    mean = total / engine.gradient_accumulation_steps()
    if engine.global_rank == 0:
        print(f"step {engine.global_steps}: loss {mean:.3f}", flush=True)
    return mean


def forward(engine, workload, batch):
    """The loss of a batch: what the model.py's own `loss` makes of it, or what the model returns."""
    if isinstance(batch, dict):
        batch = {name: placed(value, engine) for name, value in batch.items()}
    else:
        batch = tuple(placed(value, engine) for value in batch)
    if hasattr(workload, "loss"):
        return workload.loss(engine, batch)
    out = engine(**batch) if isinstance(batch, dict) else engine(*batch)
    return out["loss"] if isinstance(out, dict) else getattr(out, "loss", out)


def placed(tensor, engine):
    """On the engine's device; numbers with a fraction in the precision that the config says."""
    if not hasattr(tensor, "to"):
        return tensor
    dtype = next(engine.module.parameters()).dtype if tensor.is_floating_point() else None
    return tensor.to(engine.device, dtype)


if __name__ == "__main__":
    main()
