"""The Hugging Face Trainer: TrainingArguments compares its arguments with its DeepSpeed config, long before the engine.

So the trial's config is put in there, with "auto" for each value that an argument holds.
"""

from __future__ import annotations

from typing import Any

from ....config.deepspeed import to_trainer_config
from ....devices import find_device
from ....system.stacks import find_caller
from ....workload.script_source import has_placeholder
from ...patching import declare
from ..engine_config import LibraryConfig, read_config
from ..engine_hooks import skip_methods
from ..session import Session
from ..user_errors import script_error

CONFIG = declare(
    "transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig.__init__", "the Trainer gets the trial's config"
)
ARGUMENTS = declare("transformers.TrainingArguments.__post_init__", "the Trainer's batch size is the trial's")
TRAIN = declare("transformers.Trainer.train", "a trial begins with the first step, and with a DeepSpeed config")
END_STEP = declare("transformers.Trainer._maybe_log_save_evaluate", "a trial only trains")


class Zeros(dict[str, float]):
    """The metrics of a skipped evaluation. Each is 0, so that a script can go on."""

    def __missing__(self, key: str) -> float:
        return 0.0


def install(session: Session) -> None:
    """Install the patches for the rest of this process."""
    config = session.config = LibraryConfig(session.job, convert=to_trainer_config)
    CONFIG.wrap(_replace_config, config)
    ARGUMENTS.wrap(_check_arguments, session)
    TRAIN.wrap(_train_from_start)
    END_STEP.install(lambda trainer, *args, **kwargs: None)
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


def _replace_config(config: LibraryConfig, original: Any, trainer_config: Any, /, config_file_or_dict: Any) -> None:
    users = read_config(config_file_or_dict)
    # The original reports what is wrong with a config that cannot be read.
    original(trainer_config, config_file_or_dict if users is None else to_trainer_config(config.replace(users)))


def _check_arguments(session: Session, original: Any, arguments: Any, /, *args: Any, **kwargs: Any) -> None:
    """TrainingArguments with the trial's sizes, or an error with the line that cannot be trained with."""
    job = session.job
    arguments.report_to, arguments.push_to_hub = "none", False
    arguments.auto_find_batch_size = False  # it catches an out-of-memory and goes on with half of the batch
    if not arguments.deepspeed:  # libraries make such arguments for default values: `train` checks those that it uses
        arguments._autods_made = find_caller(), suggest_argument("deepspeed", "ds_config")
        original(arguments, *args, **kwargs)
        return
    stands_in = find_device(job.device).stands_in
    if stands_in and not arguments.use_cpu:
        if _parses_arguments():
            problem = f"its TrainingArguments look for a GPU, and --device {job.device} has none"
            raise script_error(problem, hint="add --use_cpu after --")
        arguments.use_cpu = True
        session.stand_ins.append(f"a GPU for its TrainingArguments ({find_caller()})")
    if not stands_in and arguments.use_cpu:
        problem = "its TrainingArguments train on the CPU"
        raise script_error(problem, hint="drop --use_cpu after --, or give --device cpu")
    for name, needed, placeholder in (
        ("per_device_train_batch_size", job.micro_batch, "micro_batch_size"),
        ("gradient_accumulation_steps", job.accumulation, "gradient_accumulation_steps"),
    ):
        value = getattr(arguments, name)
        if value != needed and has_placeholder(job.source.argv, placeholder):  # it is given, and does not get there
            problem = f"its {name} is {value}, and the trial needs {needed}"
            raise script_error(problem, hint=f"let it take the value that {{{placeholder}}} stands for")
        setattr(arguments, name, needed)
    original(arguments, *args, **kwargs)


def _train_from_start(
    original: Any, trainer: Any, /, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Without a DeepSpeed config, training is an error at the arguments that have none."""
    if not trainer.args.deepspeed:
        place, hint = getattr(trainer.args, "_autods_made", (None, "give its TrainingArguments deepspeed=…"))
        raise script_error("its TrainingArguments have no DeepSpeed config", hint=hint, at=place)
    return original(trainer, None, *args, **kwargs)
