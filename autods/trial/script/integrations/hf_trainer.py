"""The Hugging Face Trainer: TrainingArguments compares its arguments with its DeepSpeed config, long before the engine.

So the trial's config is put in there, with "auto" for each value that an argument holds.
"""

from __future__ import annotations

import functools
from typing import Any

from ....config.deepspeed import to_trainer_config
from ...patching import declare
from ..engine_config import LibraryConfig, read_config
from ..engine_hooks import skip_methods
from ..session import Session
from ..user_errors import find_caller, script_error

_CONFIG = declare(
    "transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig.__init__", "the Trainer gets the trial's config"
)
_ARGUMENTS = declare("transformers.TrainingArguments.__post_init__", "the Trainer's batch size is the trial's")
_TRAIN = declare("transformers.Trainer.train", "a trial begins with the first step, and with a DeepSpeed config")
_LOG = declare("transformers.Trainer._maybe_log_save_evaluate", "a trial only trains")


class Zeros(dict[str, float]):
    """The metrics of a skipped evaluation. Each is 0, so that a script can go on."""

    def __missing__(self, key: str) -> float:
        return 0.0


def install(session: Session) -> None:
    """Install the patches for the rest of this process."""
    config = session.config = LibraryConfig(session.job, convert=to_trainer_config)
    _CONFIG.install(_with_trials_config(config, _CONFIG.original()))
    _ARGUMENTS.install(_with_checked_arguments(session, _ARGUMENTS.original()))
    _TRAIN.install(_with_fresh_start(_TRAIN.original()))
    _LOG.install(lambda self, *args, **kwargs: None)
    skip_methods(session, "transformers.Trainer", "evaluate", "predict", phase="evaluate", returns=Zeros)
    skip_methods(
        session, "transformers.Trainer", "save_model", "save_state", "_save_checkpoint", "init_hf_repo", "push_to_hub",
        "_push_from_checkpoint", "create_model_card",
    )  # fmt: skip


def suggest_argument(argument: str, placeholder: str) -> str:
    """A hint to take an argument from the command line: how depends on where the script gets its arguments."""
    if _parses_arguments():
        return f"add --{argument} {{{placeholder}}} after --"
    return f"let `{argument}=` there take its value from the command line, given as {{{placeholder}}} after --"


def _parses_arguments() -> bool:
    """Whether the script's line, or a library's own script, parses the arguments instead of writing them down."""
    place = find_caller()
    return place is None or "parse" in place.code


def _with_trials_config(config: LibraryConfig, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, config_file_or_dict: Any) -> None:
        users = read_config(config_file_or_dict)
        if users is None:  # the original reports what is wrong with it
            original(self, config_file_or_dict)
        else:
            original(self, to_trainer_config(config.replace(users)))

    return init


def _with_checked_arguments(session: Session, original: Any) -> Any:
    """TrainingArguments that agree with the trial, or an error with the argument's line."""
    job = session.job

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.report_to, self.push_to_hub = "none", False
        self.auto_find_batch_size = False  # it catches an out-of-memory and goes on with half of the batch
        if not self.deepspeed:  # libraries make such arguments for default values: `train` checks those that it uses
            self._autods_made = find_caller(), suggest_argument("deepspeed", "ds_config")
            original(self, *args, **kwargs)
            return
        if job.device == "cpu" and not self.use_cpu:
            if _parses_arguments():
                raise script_error(
                    "its TrainingArguments look for a GPU, and --device cpu has none", hint="add --use_cpu after --"
                )
            self.use_cpu = True
            session.stand_ins.append(f"a GPU for its TrainingArguments ({find_caller()})")
        if job.device == "cuda" and self.use_cpu:
            raise script_error(
                "its TrainingArguments train on the CPU", hint="drop --use_cpu after --, or give --device cpu"
            )
        _check(self, "per_device_train_batch_size", job.micro_batch, "micro_batch_size")
        _check(self, "gradient_accumulation_steps", job.accumulation, "gradient_accumulation_steps")
        original(self, *args, **kwargs)

    return init


def _check(arguments: Any, name: str, needed: int, placeholder: str) -> None:
    if (value := getattr(arguments, name)) != needed:
        problem = f"its {name} is {value}, and the trial needs {needed}"
        raise script_error(problem, hint=suggest_argument(name, placeholder))


def _with_fresh_start(original: Any) -> Any:
    """Training from the first step on. Without a DeepSpeed config it is an error at the arguments that have none."""

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self.args.deepspeed:
            place, hint = getattr(self.args, "_autods_made", (None, "give its TrainingArguments deepspeed=…"))
            raise script_error("its TrainingArguments have no DeepSpeed config", hint=hint, at=place)
        return original(self, None, *args, **kwargs)

    return train
