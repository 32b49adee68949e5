"""Failures of users' own code that use the words of other causes, generated from the phrases of the rules themselves.

Each is a log with a traceback whose innermost frame raises in a user's file. The right verdict is always `user_code`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autods.diagnosis.signatures import read_signatures

_SENTENCES = (
    "{0} should be set before the first epoch",
    "could not parse entry '{0}' of the manifest",
    "{0}: expected a mapping, got list",
    "field {0} is missing in row {1}",
    "{0} config missing",
    "'{0}' failed validation in shard {1}",
    "unexpected value: {0}",
    "cannot use {0} with {1} workers in this experiment",
    "sample {1} has the label '{0}', which is unknown",
    "error in annotation {1}: {0}",
    "{0} must be larger than {1}",
    "unable to map \"{0}\" to an id",
    "the reward table has no column for {0}",
    "{0}",
)  # fmt: skip
_TYPES = (
    "ValueError", "RuntimeError", "KeyError", "AssertionError", "TypeError", "NotImplementedError", "Exception",
    "OSError", "IndexError", "StoreError", "PipelineError", "errors.ManifestError",
    "project.data.CollectorError", "LookupError",
)  # fmt: skip
_FILES = (
    "/home/ana/project/train.py", "/work/nccl_utils/store.py", "/work/my_deepspeed/config.py", "train.py",
    "/srv/torch_tools/pinned.py", "/home/li/oom_killer/watch.py", "/workspace/ray_jobs/worker.py",
    "/data/cuda_kernels/launch.py",
    "/fsx/exp/slurm/scheduler.py", "/home/kim/gloo_store.py", "/mnt/proj/deepspeed_train.py",
    "src/data/shm_loader.py",
)  # fmt: skip
_FUNCTIONS = (
    "main", "check_row", "build_loader", "forward", "init_process_group", "pin_memory", "allocate", "step", "<module>",
)  # fmt: skip
# Library code above the user's frame: it called back.
_PACKAGES = "/opt/venv/lib/python3.11/site-packages"
_CALLERS = (
    (f"{_PACKAGES}/torch/nn/modules/module.py", 1773, "_call_impl", "return forward_call(*args, **kwargs)"),
    (f"{_PACKAGES}/deepspeed/runtime/engine.py", 2054, "forward", "loss = self.module(*inputs, **kwargs)"),
    (f"{_PACKAGES}/torch/utils/data/_utils/fetch.py", 54, "fetch", "return self.collate_fn(data)"),
    (f"{_PACKAGES}/transformers/trainer.py", 2548, "_inner_training_loop", "self.callback_handler.on_step_end(args)"),
)
_BEFORE = (
    "[2026-01-05 10:11:12,131] [INFO] [config.py:1003:print] DeepSpeedEngine configuration:",
    "step 12 loss 2.311 lr 3e-4",
    "node-1:812:812 [0] NCCL INFO Using network Socket",
    "{'loss': 1.93, 'grad_norm': 0.8, 'epoch': 0.02}",
)
# What torchrun and DeepSpeed's launcher say of a rank that failed.
_TORCHRUN = "E0105 10:11:14.000000 812 torch/distributed/elastic/multiprocessing/api.py:869]"
_LAUNCHER = "[2026-01-05 10:11:14,131] [{}] [launch.py:318:sigkill_handler]"
_AFTER = (
    (),
    (
        f"{_TORCHRUN} failed (exitcode: 1) local_rank: 0 (pid: 4121) of binary: /opt/venv/bin/python",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ),
    (
        f"{_LAUNCHER.format('INFO')} Killing subprocess 143001",
        f"{_LAUNCHER.format('ERROR')} ['/opt/venv/bin/python', '-u', 'train.py'] exits with return code = 1",
    ),
)


@dataclass(frozen=True, slots=True)
class UserError:
    """A log, the number of the line that names the exception (from 1), and the rule whose phrase it uses."""

    log: str
    line: int
    rule: str


def generate_user_errors(count: int, seed: int) -> Iterator[UserError]:
    """Yield `count` logs. One seed yields the same logs as long as the rules keep their phrases."""
    choice = random.Random(seed)
    rows = [(f"{row.file}/{row.name}", words) for row in read_signatures() if (words := (*row.phrases, *row.words))]
    for _ in range(count):
        rule, phrases = choice.choice(rows)
        text = choice.choice(_SENTENCES).format(choice.choice(phrases), choice.randrange(2, 4000))
        yield _write_log(choice, rule, text.strip())


def _write_log(choice: random.Random, rule: str, text: str) -> UserError:
    type = choice.choice(_TYPES)
    shown = repr(text) if type == "KeyError" else text
    lines = ["Traceback (most recent call last):"]
    has_code = choice.random() > 0.1 or type not in _TYPES[:1]
    lines += _frame("/home/ana/project/train.py", choice.randrange(90, 400), "main", "trainer.train()")
    if choice.random() < 0.4:
        lines += _frame(*choice.choice(_CALLERS))
    statement = _statement(choice, type, text) if has_code else ""
    lines += _frame(choice.choice(_FILES), choice.randrange(3, 90), choice.choice(_FUNCTIONS), statement)
    lines.append(f"{type}: {shown}")
    prefix = choice.choice(("", "", "[rank0]: ", "2026-01-05 10:11:13,120 - "))
    before = choice.sample(_BEFORE, choice.randrange(len(_BEFORE)))
    after: Sequence[str] = choice.choice(_AFTER)
    if choice.random() < 0.25:  # the script logs what it raises
        after = (f"[ERROR] training failed: {text}", *after)
    log = [*before, *(prefix + line for line in lines), *after]
    return UserError("\n".join(log) + "\n", len(before) + len(lines), rule)


def _frame(file: str, line: int, function: str, code: str) -> list[str]:
    return [f'  File "{file}", line {line}, in {function}', *(f"    {each}" for each in code.splitlines())]


def _statement(choice: random.Random, type: str, text: str) -> str:
    """A statement that raises. Python itself fails at some of them: a missing key, a text that is no number."""
    name = type.rpartition(".")[2]
    if type == "KeyError" and choice.random() < 0.5:
        return "return self.columns[name]"
    if type == "AssertionError":
        return f"assert index in table, {text!r}\n       ^^^^^^^^^^^^^^"
    return choice.choice((f"raise {name}({text!r})", f"raise {name}(", f"if not found: raise {name}(message)"))
