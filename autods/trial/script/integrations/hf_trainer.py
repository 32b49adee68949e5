"""The Hugging Face Trainer. Its arguments are compared with its config long before the engine, in TrainingArguments: so
the trial's config goes in there, with "auto" wherever an argument says the value, and nothing is replaced later."""

from __future__ import annotations

import functools
from typing import Any

from ....config.deepspeed import to_trainer_config
from ..callsite import caller, refusal
from ..session import Session
from . import config


def install(session: Session) -> None:
    """For the rest of this process."""
    from transformers import Trainer, TrainingArguments
    from transformers.integrations import deepspeed as theirs

    session.file = to_trainer_config(config.trials_config(session))
    session.merge, session.own = config.as_filled(session), config.own_of(session)
    ours = _with_our_config(session, theirs.HfTrainerDeepSpeedConfig.__init__)
    theirs.HfTrainerDeepSpeedConfig.__init__ = ours
    TrainingArguments.__post_init__ = _checked(session, TrainingArguments.__post_init__)
    Trainer.train = _from_the_start(_with_deepspeed(Trainer.train))
    config.does_nothing(session, Trainer, "evaluate", "predict", told="evaluate", gives=config.Zeros)
    config.does_nothing(
        session, Trainer, "save_model", "save_state", "_save_checkpoint", "init_hf_repo", "push_to_hub",
        "_push_from_checkpoint", "create_model_card",
    )  # fmt: skip
    Trainer._maybe_log_save_evaluate = lambda self, *args, **kwargs: None


def _with_our_config(session: Session, real: Any) -> Any:
    from ..engine_hooks import config_given

    @functools.wraps(real)
    def init(self: Any, config_file_or_dict: Any) -> None:
        users = config_given(config_file_or_dict)
        if users is None:  # it says itself what is wrong with it
            real(self, config_file_or_dict)
        else:
            real(self, to_trainer_config(config.in_place_of(session, users)))

    return init


def _checked(session: Session, real: Any) -> Any:
    """TrainingArguments, held to the trial's."""
    job = session.job

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.report_to, self.push_to_hub = "none", False
        self.auto_find_batch_size = False  # it catches an out-of-memory and goes on with half of the batch
        if not self.deepspeed:  # libraries make such ones too, for the default values: it counts what is trained with
            self._autods_made = caller(), _way_out("deepspeed", "ds_config")
            real(self, *args, **kwargs)
            return
        if job.device == "cpu" and not self.use_cpu:
            if _of_command_line():
                raise refusal(
                    "its TrainingArguments look for a GPU, and --device cpu has none", hint="add --use_cpu after --"
                )
            self.use_cpu = True  # no argument of the script's says it
            session.stood_in.append(f"a GPU for its TrainingArguments ({caller()})")
        if job.device == "cuda" and self.use_cpu:
            raise refusal(
                "its TrainingArguments train on the CPU", hint="drop --use_cpu after --, or give --device cpu"
            )
        _check(self.per_device_train_batch_size, job.micro_batch, "per_device_train_batch_size", "micro_batch_size")
        _check(self.gradient_accumulation_steps, job.accumulation, *["gradient_accumulation_steps"] * 2)
        real(self, *args, **kwargs)

    return init


def _with_deepspeed(real: Any) -> Any:
    """Training without a DeepSpeed config is refused, at the arguments that have none."""

    @functools.wraps(real)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.args.deepspeed:
            place, hint = getattr(self.args, "_autods_made", (None, "give its TrainingArguments deepspeed=…"))
            raise refusal("its TrainingArguments have no DeepSpeed config", hint=hint, at=place)
        return real(self, *args, **kwargs)

    return train


def _check(found: int, asked: int, argument: str, placeholder: str) -> None:
    if found != asked:
        raise refusal(
            f"its {argument} is {found}, where the trial asks for {asked}",
            hint=_way_out(argument, placeholder),
        )


def _way_out(argument: str, placeholder: str) -> str:
    if _of_command_line():
        return f"add --{argument} {{{placeholder}}} after --"
    return f"let `{argument}=` there take its value from the command line, given as {{{placeholder}}} after --"


def _of_command_line() -> bool:
    """Whether the arguments are being parsed, in the user's file or in a library's own script, and not written down."""
    place = caller()
    return place is None or "parse" in place.code


def _from_the_start(real: Any) -> Any:
    @functools.wraps(real)
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real(self, None, *args, **kwargs)

    return train
