"""Does `autods explain` refuse exactly the configs that DeepSpeed refuses? Generated configs, judged by both.

python tests/benchmarks/explain_agreement.py [--configs 300] [--seed 0] [--ranks 8] [--each-key] [--json]. No GPU and no
Ray.

A config is a usual one with one to three changes: values of every accepted and of wrong types for the keys that
DeepSpeed reads, by field name and by alias, optimizers, schedules, sizes of the batch, offloads, precisions, ranks that
share a sample, misspelt and misplaced keys. DeepSpeed's verdict is that of its real engine, in a process of its own on
CPU: it is built with a small model, and trains two optimizer steps; collectives of the other ranks do nothing.
explain's is whether it shows an error. A row is a disagreement: `false error` or `unnoticed`. Exit code 1 if there is
one. With --each-key the configs are a usual one with each key at each value, as far as DeepSpeedConfig takes it and a
rule of explain does not: only then may the error be false.

Left out, because this machine or the model decides it and not the config: monitors whose package is missing, NVMe,
quantized communication, tensor parallelism, and that CPUs have no fp16. "auto" is a library's to fill in. Elasticity
and DeepSpeed Autotuning are launchers, not engines.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0"}

Config = dict[str, Any]
LIMIT_S = 1200  # of wall time: other programs may have the cores
STEPS = (
    "multi_tensor_adam",
    "multi_tensor_lion",
    "create_adam",
    "create_lion",
    "create_adagrad",
    "adam_update",
    "lamb",
)
LEFT_OUT = (
    "tensorboard", "wandb", "comet", "csv_monitor", "nebula", "datastates_ckpt", "elasticity", "autotuning", "aio",
    "compile", "amp", "hybrid_engine", "compression_training", "data_efficiency", "curriculum_learning",
    "tensor_parallel",
)  # fmt: skip
NEED_OPS = ("nvme", "zenflow", "zero_quantized")
VALUES: tuple[Any, ...] = (
    True,
    False,
    0,
    1,
    2,
    16,
    1000,
    -1,
    0.5,
    1e6,
    5e8,
    "true",
    "16",
    "1e6",
    "x",
    None,
    [],
    {},
)
OPTIMIZERS = (
    "Adam", "AdamW", "adamw", "adam", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam", "Lamb", "FusedLamb", "OneBitAdam",
    "ZeroOneAdam", "OneBitLamb", "Lion", "SGD", "sgd", "Adagrad", "RMSprop", "Muon", "Nadam", "Adamax", "LBFGS",
)  # fmt: skip
ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "lr": (1e-3, 0, "1e-3", None, -1), "betas": ([0.9, 0.99], [0.9], 0.9, "x"), "eps": (1e-8, "1e-8"),
    "weight_decay": (0.0, 0.1, "0"), "max_grad_norm": (1.0, 0), "torch_adam": (True, False), "adam_w_mode": (True,),
    "momentum": (0.9,), "freeze_step": (10,), "bias_correction": (True, False), "fused": (True, False), "lrr": (1e-3,),
}  # fmt: skip
SCHEDULES: Mapping[str, Config] = {
    "WarmupLR": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10},
    "WarmupDecayLR": {"total_num_steps": 100, "warmup_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 100, "warmup_num_steps": 10},
    "OneCycle": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-4},
    "CosineAnnealingLR": {"T_max": 10},
    "None": {},
}


# ------------------------------------------------------------------------------------------------------- the generator


def usual(chance: random.Random) -> Config:
    config: Config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    if half := chance.choice(("bf16", "bf16", "fp16", "")):
        config[half] = {"enabled": True}
    stage = chance.choice((0, 1, 2, 2, 3, 3, 3))
    if stage:
        config["zero_optimization"] = {"stage": stage}
    return config


def change_value(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    """Give a key that DeepSpeed reads some value, mostly one of its default's type."""
    name = chance.choice(list(keys))
    alike = [value for value in VALUES if type(value) is type(keys[name])]
    put(config, name, chance.choice(alike if alike and chance.random() < 0.6 else VALUES))


def change_zero(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    change_value(config, chance, {name: value for name, value in keys.items() if name.startswith("zero_optimization.")})


def change_optimizer(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    names = chance.sample(list(ARGUMENTS), chance.randint(0, 2))
    params = {"lr": 1e-3} | {name: chance.choice(ARGUMENTS[name]) for name in names}
    config["optimizer"] = {"type": chance.choice(OPTIMIZERS), "params": params}
    if chance.random() < 0.3:
        config["zero_allow_untested_optimizer"] = True
    if chance.random() < 0.1:
        config["zero_force_ds_cpu_optimizer"] = False


def change_schedule(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    name = chance.choice(list(SCHEDULES))
    params = copy.copy(SCHEDULES[name])
    if params and chance.random() < 0.3:
        del params[chance.choice(list(params))]
    if chance.random() < 0.2:
        params["warmup_steps"] = 10
    config["scheduler"] = {"type": None if name == "None" else name, "params": params}


def change_batch(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        config.pop(name, None)
    for name in chance.sample(names, chance.randint(0, 3)):
        config[name] = chance.choice((1, 2, 4, 8, 16, 32, 64, 0, -2, "2", 2.0, None))


def change_offload(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    part = chance.choice(("param", "optimizer"))
    value: Any = {"device": chance.choice(("cpu", "cpu", "none", "gpu", None))}
    if chance.random() < 0.3:
        value |= {
            chance.choice(("pin_memory", "buffer_count", "ratio", "fast_init", "max_in_cpu")): chance.choice(VALUES)
        }
    if chance.random() < 0.15:
        value = chance.choice((True, "cpu", None, []))
    if not isinstance(config.get("zero_optimization"), dict):
        config["zero_optimization"] = {"stage": 3}
    config["zero_optimization"][f"offload_{part}"] = value


def change_precision(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    for name in ("bf16", "fp16", "bfloat16"):
        config.pop(name, None)
    for name in chance.sample(("bf16", "fp16", "bfloat16", "torch_autocast", "data_types"), chance.randint(0, 2)):
        config[name] = {"enabled": chance.choice((True, True, False, "true"))}
        if name == "data_types":
            config[name] = {"grad_accum_dtype": chance.choice(("fp32", "bf16", "fp16", "x", None))}
        elif chance.random() < 0.3:
            config[name]["loss_scale" if name == "fp16" else "immediate_grad_update"] = chance.choice(
                (0, 128, "x", True)
            )


def change_groups(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    """Ranks that share a sample or a shard."""
    name = chance.choice(("sequence_parallel_size", "zero_optimization.zero_hpz_partition_size"))
    put(config, name, chance.choice((0, 1, 2, 3, 4, 8, 16, "2", None)))


def change_name(config: Config, chance: random.Random, keys: Mapping[str, Any]) -> None:
    """A misspelt, misplaced or made-up key, or a field by its other name."""
    name = chance.choice(list(keys))
    section, _, last = name.rpartition(".")
    kind = chance.randrange(4)
    if kind == 0:
        name = f"{section}.{last[:-1]}_{last[-1]}".lstrip(".")
    elif kind == 1:
        name = f"zero_optimization.{last}" if not section else last
    elif kind == 2:
        name = f"{section}._comment".lstrip(".")
    else:
        name = f"{section}.{last.removeprefix('stage3_')}".lstrip(".")
    put(config, name, keys.get(name, 1) if keys.get(name) is not None else 1)


def put(config: Config, dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        if not isinstance(config.get(section), dict):
            config[section] = {}
        config = config[section]
    config[last] = value


CHANGES: tuple[Callable[[Config, random.Random, Mapping[str, Any]], None], ...] = (
    change_value, change_value, change_zero, change_zero, change_optimizer, change_optimizer, change_schedule,
    change_batch, change_offload, change_precision, change_groups, change_name,
)  # fmt: skip


def walk_keys(keys: Mapping[str, Any], ranks: int) -> Iterator[Config]:
    """Yield configs with one value each that DeepSpeedConfig takes and a rule of explain refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    os.environ["WORLD_SIZE"] = str(ranks)
    logging.disable()  # DeepSpeed prints its advice
    for name, value in itertools.product(keys, (*VALUES, 2.0, 3, "false", "cpu", "fp32")):
        config = usual(random.Random(0))
        put(config, name, value)
        if find_errors(config, ranks):
            with contextlib.suppress(Exception):  # its checks raise anything
                DeepSpeedConfig(copy.deepcopy(config))
                yield config


def make_config(number: int, seed: int, keys: Mapping[str, Any]) -> Config:
    chance = random.Random(f"{seed} {number}")
    config = usual(chance)
    for change in chance.sample(CHANGES, chance.choice((1, 1, 2, 3))):
        change(config, chance, keys)
    return config


# -------------------------------------------------------------------------------------------------------- the verdicts


def refuse_text(*arguments: Any) -> None:
    """Refuse what a compiled function refuses."""
    if any(isinstance(each, str) for each in arguments):
        raise TypeError("incompatible function arguments")


def replace_ops() -> None:
    """Let no op be built: each call into one does nothing but refuse text for a number. Let CPUs take fp16."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.ops.op_builder.cpu.no_impl import NotImplementedBuilder

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for each in (OpBuilder, NotImplementedBuilder):
        each.load = lambda self, verbose=True: MagicMock(**{f"{name}.side_effect": refuse_text for name in STEPS})
    type(get_accelerator()).is_fp16_supported = lambda self: True


def ask_engine(config: Config, ranks: int) -> str:
    """Build DeepSpeed's engine with this config and train two steps; return what it says against it."""
    import deepspeed
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ["WORLD_SIZE"] = str(ranks)
    torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    torch.manual_seed(0)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
        # Training brings an optimizer where the config has none.
        named = config.get("optimizer", {}).get("type") if isinstance(config.get("optimizer", {}), dict) else True
        optimizer = None if named else torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=list(model.parameters()),
            config=copy.deepcopy(config),
        )
        dtype = next(engine.module.parameters()).dtype
        for _ in range(2 * int(engine.gradient_accumulation_steps())):
            loss = engine(torch.ones(2, 16, dtype=dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        return f"{type(error).__name__}: {str(error).strip()[:300]} ({frames[-1].filename[-40:]}:{frames[-1].lineno})"
    return ""


def find_errors(config: Config, ranks: int) -> list[Any]:
    """The errors that explain's rules find."""
    from autods.config.problems import Question, find_problems
    from autods.config.validator import EXPLAIN_RULES
    from autods.explainer.installed import describe

    question = Question(config=config, installed=describe(config), ranks=ranks)
    return [each for each in find_problems(question, EXPLAIN_RULES) if each.severity == "error"]


def ask_explain(simulator: Any, config: Config, ranks: int) -> list[str]:
    """The errors that explain shows."""
    from autods.explainer.toy_engine import ask_engine as ask_toy

    errors = find_errors(config, ranks)
    if not errors and (refusal := ask_toy(simulator, config, ranks)) is not None:
        errors = [refusal]
    return [f"{each.key}: {each.problem}" for each in errors]


def in_child(ask: Callable[[], Any]) -> Any:
    """Return what it returns, from a fork of this process; a sentence where the fork ends otherwise."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT_S)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            os.write(writer, json.dumps(ask()).encode())
        except BaseException as error:
            os.write(writer, json.dumps(f"broke: {error!r}").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(answer) if answer else f"ended with status {status}"


def judge(configs: Mapping[int, Config], ranks: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each config."""
    from autods.explainer.toy_engine import start_toy

    with start_toy() as simulator:
        for number, config in configs.items():
            said = in_child(lambda config=config: ask_engine(config, ranks))
            errors = ask_explain(simulator, config, ranks)
            kind = "" if bool(said) == bool(errors) else "unnoticed" if said else "false error"
            yield {"number": number, "kind": kind, "engine": said, "explain": errors, "config": config}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--each-key", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    import deepspeed

    from autods.explainer.installed import describe

    replace_ops()
    described = describe({}).defaults
    keys = {name: default for name, default in described.items() if name.split(".")[0] not in LEFT_OUT}
    keys = {name: default for name, default in keys.items() if not any(word in name for word in NEED_OPS)}
    numbers = range(options.first, options.first + options.configs)
    if options.each_key:
        configs = dict(enumerate(walk_keys(keys, options.ranks)))
    else:
        configs = {number: make_config(number, options.seed, keys) for number in numbers}
    rows = []
    for row in judge(configs, options.ranks):
        rows.append(row)
        if row["kind"] and not options.json:
            print(f"{row['number']:4} {row['kind']}: {json.dumps(row['config'])}")
            print(
                f"     engine: {row['engine'] or 'trains'}\n     explain: {'; '.join(row['explain']) or 'no error'}",
                flush=True,
            )
    refused = sum(bool(row["engine"]) for row in rows)
    wrong = [row for row in rows if row["kind"]]
    if options.json:
        print(json.dumps({"seed": options.seed, "ranks": options.ranks, "rows": rows}, indent=1))
    else:
        print(
            f"{len(rows)} configs, {refused} refused by DeepSpeed {deepspeed.__version__}; {len(wrong)} disagreements"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
