"""A Hugging Face config that describes no model is named with the reason. Code that it refers to never runs."""

from __future__ import annotations

import json
from typing import Any

from tests.support.hostile import Case, Way, each

GPT = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 16}
EVIL = "from pathlib import Path\nPath('it-ran').touch()\nclass Model: ...\nclass Config: ...\n"


def config(message: str, options: str = "", *, way: Way = "ranks", **changes: Any) -> Case:
    text = json.dumps({name: value for name, value in {**GPT, **changes}.items() if value is not ...})
    files = {"config.json": text, "evil.py": EVIL}
    line = f"fit config.json --device cpu --gpus 2 --gpu-memory 1GiB --config quick --quiet --out out {options}"
    return Case(line, 2, message, way, files=files, leaves=("out",), seconds=400)


ON_SIGHT = {
    "no type": config('it has no "model_type"', model_type=..., way="here"),
    "a type that is a number": config('it has no "model_type"', model_type=5, way="here"),
    "architectures: a number": config('"architectures" is no list of names', architectures=5, way="here"),
    "architectures: text": config('"architectures" is no list of names', architectures="GPT2", way="here"),
    "architectures: null in a list": config('"architectures" is no list of names', architectures=[None], way="here"),
    "an unknown task": config("there is no task 'translate'", "--task translate", way="here"),
}
IN_THE_SURVEY = {
    "a path as a type": config("has no architecture '../evil'", model_type="../evil"),
    "a colour as a type": config(r"has no architecture '\x1b[31m'", model_type="\x1b[31m"),
    "code of its own": config(
        "its custom code (auto_map) is never run",
        model_type="evil",
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    ),
    "layers in words": config("config.json: ", n_layer="two"),
    "heads that do not divide": config("config.json: ValueError: `embed_dim` must be divisible by", n_head=3),
}


@each(ON_SIGHT | IN_THE_SURVEY)
def test_a_config_of_no_model(meet, case):
    meet(case)
