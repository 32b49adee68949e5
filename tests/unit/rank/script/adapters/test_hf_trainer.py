"""The Trainer's arguments: where a script has to take a value from the command line."""

from __future__ import annotations

from autods.rank.script.adapters.hf_trainer import suggest_argument


def test_parsed_arguments_are_given_after_the_dashes():
    hints = [suggest_argument("deepspeed", "ds_config") for parsed in (True,)]
    assert hints == ["add --deepspeed {ds_config} after --"]


def test_written_arguments_are_changed_in_the_script():
    hint = suggest_argument("deepspeed", "ds_config")
    assert hint == "let `deepspeed=` there take its value from the command line, given as {ds_config} after --"
