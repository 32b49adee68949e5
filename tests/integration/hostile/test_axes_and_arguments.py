"""What a probe varies, and a script's arguments: names and values that do not exist, twice, or in another place."""

from __future__ import annotations

from tests.support.bad_scripts import GOOD as SCRIPT
from tests.support.hostile import Case, each

PROBE = "probe model.py --device cpu --gpus 2 --gpu-memory 1GiB"
OF_SCRIPT = "probe train.py --device cpu --gpus 2 --gpu-memory 1GiB --vary"


def refused(line: str, message: str) -> Case:
    return Case(line, 2, message, files={"train.py": SCRIPT})


def vary(axis: str, message: str) -> Case:
    return refused(f"{PROBE} --vary {axis}", message)


AXES = {
    **{
        f"syntax: {axis}": vary(f"'{axis}'", "it is NAME=A,B,C")
        for axis in ("=", "rung", "rung=", "=zero1", " = ", "rung zero1", "rung:zero1")
    },
    "an unknown name": vary("bogus=1", "--vary bogus: there is nothing of that name to vary"),
    "capitals": vary("RUNG=zero1", "--vary RUNG: there is nothing of that name to vary"),
    "a near name": vary("micro_batches=1", "did you mean micro_batch"),
    "a dot": vary(".=1", "there is nothing of that name to vary"),
    "a section": vary("zero_optimization=1", "there is nothing of that name to vary"),
    "an unknown key of a section": vary("zero_optimization.gone=1", "there is nothing of that name to vary"),
    "two dots": vary("zero_optimization..x=1", "there is nothing of that name to vary"),
    "a name of nothing": vary("env.=1", "there is nothing of that name to vary"),
    "a rung's stage": vary("zero_optimization.stage=1", "a rung or another axis decides it"),
    "a switch of precision": vary("fp16.enabled=true", "give --vary precision=bf16,fp16,fp32"),
    "the whole batch": vary("train_batch_size=8", "give --vary micro_batch=… or accumulation=…"),
    "the same twice": vary("rung=zero1 --vary rung=zero2", "--vary rung was given twice"),
    "the same by another name": vary(
        "train_micro_batch_size_per_gpu=2 --vary micro_batch=4", "--vary micro_batch was given twice"
    ),
    "an unknown rung": vary("rung=zero1,zero9", "--vary rung: there is no 'zero9'"),
    "a rung of nothing": vary("rung=zero1,,zero2", "--vary rung: there is no ''"),
    "an unknown precision": vary("precision=int8", "--vary precision: there is no 'int8'"),
    "no samples": vary("micro_batch=0", "--vary micro_batch: 0 is not a whole number above 0"),
    "half a sample": vary("micro_batch=1.5", "1.5 is not a whole number above 0"),
    "samples in words": vary("micro_batch=one", "'one' is not a whole number above 0"),
    "true samples": vary("micro_batch=true", "True is not a whole number above 0"),
    "endless samples": vary("micro_batch=1e400", "is not a whole number above 0"),
    "no ranks": refused("probe model.py --device cpu --vary gpus=0", "--vary gpus: 0 is not a whole number above 0"),
    "a switch in words": vary("checkpointing=maybe", "--vary checkpointing: 'maybe' is none of off, every-4"),
    "a switch as a number": vary("pin_memory=1", "--vary pin_memory: 1 is neither on nor off"),
    "a number that is none": vary("gradient_clipping=NaN", "is not a number that a config can hold"),
    "a number without an end": vary("gradient_clipping=Infinity", "is not a number that a config can hold"),
    "nothing as a value": vary("gradient_clipping=null", "None is not a number, true, false or text"),
    "a variable that autods sets": vary("env.RANK=1", "--vary env.RANK: autods sets RANK itself"),
    "the path of programs": vary("env.PATH=x", "--vary env.PATH: autods sets PATH itself"),
    "a variable of two words": vary("'env.A B=1'", "'A B' is not the name of an environment variable"),
    "an argument that build_model lacks": vary("build_model.x=1", "its build_model has no argument 'x'"),
    "an argument that build_batch lacks": vary("build_batch.x=1", "its build_batch has no argument 'x'"),
    "a length that build_batch lacks": vary("seq_len=5", "its build_batch has no argument 'seq_len'"),
    "a target of a model.py": vary("target_len=5", "--vary target_len: it is for a Hugging Face config"),
    "an argument of no script": vary("args.x=1", "--vary args.x: it is for a training script's arguments"),
    "a million cells": vary(
        f"micro_batch={','.join(map(str, range(1, 1001)))} --vary accumulation={','.join(map(str, range(1, 1001)))}",
        "--vary asks for 1,000,000 cells",
    ),
    "an unknown experiment": refused(f"{PROBE} --experiment gone", "there is no experiment 'gone'"),
    "a profile as an experiment": refused(f"{PROBE} --experiment ../default", "experiment"),
    "what a batch cannot be split by": refused(
        "probe model.py --device cpu --gpus 1,3 --gpu-memory 1GiB --global-batch 8", "cannot be split over 3 ranks"
    ),
}
ARGUMENTS = {
    "a placeholder that is not there": refused(f"{OF_SCRIPT} args.x=1 -- {{micro_batch_size}}", "hold no {x}"),
    "a placeholder of nothing": refused(f"{OF_SCRIPT} args.=1 -- {{}}", "there is nothing of that name to vary"),
    "a placeholder that autods fills": refused(
        f"{OF_SCRIPT} args.micro_batch_size=1 -- {{micro_batch_size}}", "give --vary micro_batch=…"
    ),
    "the config as a placeholder": refused(f"{OF_SCRIPT} args.ds_config=1 -- {{ds_config}}", "autods fills in {ds_con"),
    "no value": refused(f"{OF_SCRIPT} args.x= -- {{x}}", "it is NAME=A,B,C"),
    "nothing as a value": refused(f"{OF_SCRIPT} args.x=null -- {{x}}", "None is not a number, true, false or text"),
    "what a script decides": refused(
        f"{OF_SCRIPT} checkpointing=on --keep-checkpointing -- x", "--keep-checkpointing keeps what the script does"
    ),
    "a length of a script": refused(f"{OF_SCRIPT} seq_len=5 -- x", "a training script decides that itself"),
    "a model's argument of a script": refused(f"{OF_SCRIPT} build_model.x=1 -- x", "decides that itself"),
    "a script as a model": refused("fit train.py --kind model -- {micro_batch_size}", "takes no arguments"),
    "a module that there is not": refused("fit -m pkg.train", "-m pkg.train: there is no module pkg"),
    "a module above the folder": refused("fit -m ..train", "-m ..train: is not a module name"),
    "a module of two words": refused("fit -m 'a b'", "-m a b: is not a module name"),
    "a module by its file": refused("fit -m train.py", "-m train.py: is a file, and -m takes a module name"),
    **{
        f"accepted: {words}": Case(
            f"fit train.py --device cpu --gpus 2 --gpu-memory 1GiB -- {words}", 0, files={"train.py": SCRIPT}, lines=1
        )
        for words in (
            "{micro_batch_size} {micro_batch_size}", "'{\"a\": 1}'", "{0} {micro_batch_size!r}", "-- --gpus 8 --json",
            "'' ''", "{{micro_batch_size}}",
        )
    },
}  # fmt: skip


@each(AXES)
def test_an_axis_that_makes_no_sense(meet, case):
    meet(case)


@each(ARGUMENTS)
def test_arguments_of_a_script(meet, case):
    meet(case)
