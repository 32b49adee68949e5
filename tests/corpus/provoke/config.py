"""Configurations that DeepSpeed or the Trainer refuses."""

from __future__ import annotations

from collections.abc import Callable

from tests.corpus.provoke.cases import CONFIG, case
from tests.corpus.provoke.scripts import engine, trainer, zero
from tests.corpus.provoke.workbench import Workbench

ADAMW = {"type": "AdamW", "params": {"lr": 3e-4}}
NVME = {"device": "nvme", "nvme_path": "swap", "pin_memory": False}

# name → what is wrong, ranks, the configuration
REFUSED: dict[str, tuple[str, int, dict[str, object]]] = {
    "ds-train-batch-size-does-not-multiply": (
        "train_batch_size is not micro batch × accumulation × ranks",
        2,
        zero(1, train_batch_size=48, gradient_accumulation_steps=4),
    ),
    "ds-no-batch-size-given": (
        "no batch size at all",
        1,
        {
            k: v
            for k, v in zero(1).items()
            if k not in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        },
    ),
    "ds-unknown-optimizer": (
        "an optimizer that torch does not have",
        1,
        zero(1, optimizer={"type": "AdamWW", "params": {"lr": 1e-3}}),
    ),
    "ds-optimizer-unexpected-argument": (
        "a parameter that the optimizer does not take",
        1,
        zero(1, optimizer={"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "warmup_ratio": 0.1}}),
    ),
    "ds-zero-stage-7": ("a ZeRO stage that does not exist", 1, zero(7)),
    "ds-zero-bucket-size-is-a-word": (
        "a bucket size that is not a number",
        1,
        zero(2, zero={"reduce_bucket_size": "five hundred million"}),
    ),
    "ds-offload-device-misspelt": (
        "an offload device that does not exist",
        1,
        zero(3, zero={"offload_param": {"device": "cpuu"}}),
    ),
    "ds-zero-extra-key-refused": (
        "a key that ZeRO does not know",
        1,
        zero(3, zero={"stage3_prefetch_bukcet_size": 1000000}),
    ),
    "ds-fp16-and-bf16-both-enabled": ("fp16 and bf16 at once", 1, zero(2, fp16={"enabled": True})),
    "ds-unknown-scheduler": (
        "a learning-rate schedule that does not exist",
        1,
        zero(1, scheduler={"type": "WarmupCosineRestartLR", "params": {}}),
    ),
    "ds-zero1-with-sgd-not-tested": (
        "ZeRO with an optimizer that it was not tested with",
        1,
        zero(2, zero={"offload_optimizer": {"device": "cpu"}}, optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    ),
    "ds-nvme-path-left-out": (
        "NVMe offload without a path",
        1,
        zero(3, optimizer=ADAMW, zero={"offload_optimizer": {"device": "nvme", "pin_memory": False}}),
    ),
    "ds-nvme-with-zero-2": (
        "NVMe offload with ZeRO-2",
        1,
        zero(2, optimizer=ADAMW, zero={"offload_optimizer": NVME, "offload_param": NVME}),
    ),
    "ds-swap-buffer-smaller-than-a-parameter": (
        "the parameter swap's buffers are smaller than the largest parameter",
        1,
        zero(
            3,
            optimizer=ADAMW,
            zero={
                "stage3_param_persistence_threshold": 0,
                "offload_param": NVME | {"buffer_size": 1000, "buffer_count": 5},
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
        ),
    ),
    "ds-not-enough-swap-buffers": (
        "the parameter swap has fewer buffers than a forward needs",
        1,
        zero(
            3,
            optimizer=ADAMW,
            zero={
                "stage3_param_persistence_threshold": 0,
                "offload_param": NVME | {"buffer_size": 200000, "buffer_count": 1},
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
            },
        ),
    ),
}


def _refuse(name: str, doc: str, ranks: int, config: dict[str, object]) -> Callable[[Workbench], None]:
    def refuse(bench: Workbench) -> None:
        bench.json("ds_config.json", **config)
        bench.script("train.py", engine())
        bench.deepspeed("train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", ranks=ranks)

    refuse.__doc__ = f"{doc} ({name})"
    return refuse


for _name, (_doc, _ranks, _config) in REFUSED.items():
    case(_name, CONFIG)(_refuse(_name, _doc, _ranks, _config))


@case("ds-config-file-missing", CONFIG)
def no_file(bench: Workbench) -> None:
    """The configuration's file does not exist"""
    bench.script("train.py", engine())
    bench.deepspeed("train.py", "--deepspeed", "--deepspeed_config", "configs/ds_zero3.json", ranks=1)


@case("ds-config-trailing-comma", CONFIG)
def not_json(bench: Workbench) -> None:
    """The configuration is not JSON: a comma too many"""
    bench.script("ds_config.json", '{\n  "train_batch_size": 8,\n  "zero_optimization": {"stage": 2,},\n}\n')
    bench.script("train.py", engine())
    bench.deepspeed("train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", ranks=1)


@case("ds-config-duplicate-key", CONFIG)
def twice(bench: Workbench) -> None:
    """The configuration names a key twice"""
    bench.script(
        "ds_config.json", '{\n  "train_batch_size": 8,\n  "bf16": {"enabled": true},\n  "train_batch_size": 16\n}\n'
    )
    bench.script("train.py", engine())
    bench.deepspeed("train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", ranks=1)


@case("ds-config-given-twice", CONFIG)
def two_configs(bench: Workbench) -> None:
    """A configuration on the command line and another in the call"""
    bench.json("ds_config.json", **zero(1))
    text = engine().replace("args=args, model=model", 'args=args, config={"train_batch_size": 4}, model=model')
    bench.script("train.py", text)
    bench.deepspeed("train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", ranks=1)


def _trainer(bench: Workbench, config: dict[str, object], arguments: str) -> None:
    bench.json("ds_config.json", **config)
    bench.script("run_clm.py", trainer(f'deepspeed="ds_config.json",\n{arguments}'))
    bench.deepspeed("run_clm.py", ranks=1)


@case("trainer-mismatches-deepspeed-config", CONFIG)
def mismatch(bench: Workbench) -> None:
    """Batch size and learning rate differ between TrainingArguments and the DeepSpeed configuration"""
    _trainer(bench, zero(2, train_micro_batch_size_per_gpu=8), "learning_rate=1e-4,\nbf16=True,")


@case("trainer-optimizer-without-scheduler", CONFIG)
def scheduler_clash(bench: Workbench) -> None:
    """The configuration brings a scheduler but no optimizer"""
    config = zero(
        2, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}}, train_micro_batch_size_per_gpu="auto"
    )
    del config["optimizer"]
    _trainer(
        bench,
        config | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "bf16=True,\noptim='adafactor',",
    )


@case("trainer-bf16-only-in-deepspeed-config", CONFIG)
def precision_clash(bench: Workbench) -> None:
    """fp16 in the configuration, bf16 in TrainingArguments"""
    config = zero(2, fp16={"enabled": True}, bf16={"enabled": False}, train_micro_batch_size_per_gpu="auto")
    _trainer(bench, config, "bf16=True,\nlearning_rate=3e-4,")


@case("trainer-best-model-needs-equal-strategies", CONFIG)
def strategies(bench: Workbench) -> None:
    """load_best_model_at_end with other save and evaluation strategies"""
    bench.script("run_clm.py", trainer("use_cpu=True,\nload_best_model_at_end=True,\neval_strategy='epoch',"))
    bench.python("run_clm.py")


@case("trainer-fp16-on-cpu-refused", CONFIG)
def fp16_on_cpu(bench: Workbench) -> None:
    """fp16 where the device has none"""
    _trainer(
        bench,
        zero(2, fp16={"enabled": True}, bf16={"enabled": False}, train_micro_batch_size_per_gpu="auto"),
        "fp16=True,\nlearning_rate=3e-4,",
    )
