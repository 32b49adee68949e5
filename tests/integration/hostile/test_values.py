"""Values of options: far too large, not numbers, empty, repeated; and paths that no file has."""

from __future__ import annotations

from tests.support.hostile import Case, each

FIT = "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB"
PLAN = "plan model.py --gpus 2 --gpu-memory 16GiB"
PROBE = "probe model.py --device cpu --gpus 2 --gpu-memory 1GiB --vary micro_batch=1"
HUGE = 10**40
# Options that count something, with the command that has them.
COUNTS = {
    "--gpus": FIT.replace(" --gpus 2", ""),
    "--nodes": FIT,
    "--global-batch": FIT,
    "--seq-len": FIT,
    "--max-trials": FIT,
    "--micro-batch": PLAN,
    "--repeats": PROBE,
    "--steps": PROBE,
    "--parallel-trials": PROBE,
}
NO_COUNTS = {
    "0": "0", "-1": "-1", "10^40": str(HUGE), "nan": "nan", "inf": "inf", "1e308": "1e308", "nothing": "''",
    "hexadecimal": "0x10", "a fraction": "1.5", "5,000 digits": "9" * 5000, "two": "'1 2'", "a superscript": "²",
}  # fmt: skip
SIZES = {
    "--gpu-memory": FIT.replace(" --gpu-memory 1GiB", ""),
    "--host-memory": PLAN,
    "--nvme": PLAN,
    "--stall-limit": FIT,
    "--max-time": FIT,
}
NO_SIZES = {
    "an unknown unit": "10XB", "negative": "-1GiB", "an exponent": "1e30TiB", "nan": "nan", "inf": "inf",
    "nothing": "''", "0": "0", "400 digits": "9" * 400, "a unit alone": "GiB", "two": "'1 2'",
}  # fmt: skip

COUNTED = {
    f"{option} {name}": Case(f"{line} {option} {value}", 2, option)
    for option, line in COUNTS.items()
    for name, value in NO_COUNTS.items()
}
SIZED = {
    f"{option} {name}": Case(f"{line} {option}={value}", 2, option)
    for option, line in SIZES.items()
    for name, value in NO_SIZES.items()
}
LIMITS = {
    "a million GPUs": Case("plan model.py --gpus 1000000 --gpu-memory 16GiB", 2, "--gpus 1000000: 100,000 is the most"),
    "100,000 GPUs": Case("plan model.py --gpus 100000 --gpu-memory 16GiB", 0),
    "a million GPUs of 100,000 nodes": Case("plan model.py --nodes 100000 --on a100-80gb", 2, "100,000 ranks"),
    "a micro batch of 10^12": Case(f"{PLAN} --micro-batch 999999999999", 2, "1,000,000 is the most"),
    "a global batch of 10^40": Case(f"{PLAN} --global-batch {HUGE}", 2, "100,000,000 is the most"),
    "a million samples": Case(f"{PLAN} --global-batch 1000000", 0),
    "a seed of 10^40": Case(f"{FIT} --seed {HUGE}", 2, "--seed"),
    "a seed of -1": Case(f"{FIT} --seed -1", 2, "--seed -1: seeds are 0 to 4294967295"),
    "an exit code of 10^40": Case(f"diagnose --exit-code {HUGE}", 2, "--exit-code"),
    "an exit code of PBS": Case("diagnose --exit-code 271", 0),
    "digits of another script": Case(FIT.replace("--gpus 2", "--gpus ２"), 2, "'--gpus'"),
    "an underscore": Case(f"{PLAN} --micro-batch 1_000", 0),
    "a space before": Case(f"{PLAN} --micro-batch ' 5'", 0),
    "a rung that is a path": Case(f"{FIT} --ladder ../../x", 2, "there is no rung '../../x'"),
    "rungs with an empty one": Case(f"{FIT} --ladder ddp,,zero1", 2, "there is no rung ''"),
    "a rung twice": Case(f"{FIT} --ladder ddp,ddp", 0),
    "10,000 rungs": Case(f"{FIT} --ladder {'ddp,' * 9999}ddp", 0),
    "a rung of 100,000 letters": Case(f"{FIT} --ladder {'x' * 100_000}", 2, "there is no rung"),
    "a comma": Case(f"{FIT} --ladder ,", 2, "there is no rung ''"),
    "precisions with an empty one": Case(f"{FIT} --precision bf16,", 2, "there is no precision ''"),
    "a machine that is a path": Case("plan model.py --gpus 2 --on ../../x", 2, "no machine '../../x'"),
    "a machine of no name": Case("plan model.py --gpus 2 --on ,", 2, "no machine ''"),
    "an experiment that is a path": Case(f"{PROBE} --experiment ../x", 2, "there is no experiment '../x'"),
    "10^9 cells": Case(
        f"{PROBE} --vary seq_len={','.join(map(str, range(1, 1001)))} --vary env.A={','.join(map(str, range(1000)))} "
        f"--vary env.B={','.join(map(str, range(1000)))}",
        2,
        "cells",
    ),
    "10,000 values of an axis": Case(f"{PROBE} --vary env.A={','.join(map(str, range(10_000)))}", 2, "1,000 values"),
    "an axis of 10^40": Case(f"{PROBE} --vary accumulation={HUGE}", 2, "1,000,000,000 at most"),
    "an axis of 10^999": Case(f"{PROBE} --vary accumulation=1e999", 2, "--vary accumulation"),
    "an axis of brackets": Case(f"{PROBE} --vary accumulation={'[' * 50_000}", 2, "--vary accumulation"),
    "an axis of 5,000 digits": Case(f"{PROBE} --vary accumulation={'9' * 5000}", 2, "--vary accumulation"),
    "ranks of 10^40": Case(f"probe model.py --device cpu --gpu-memory 1GiB --gpus 1,{HUGE}", 2, "--gpus"),
    "ranks of 5,000 digits": Case(f"probe model.py --device cpu --gpu-memory 1GiB --gpus 1,{'9' * 5000}", 2, "--gpus"),
    "ranks that are none": Case("probe model.py --device cpu --gpu-memory 1GiB --gpus 1,,2", 2, "--gpus 1,,2"),
}  # fmt: skip

LONG, DEEP_PATH = "x" * 300, "d/" * 2500 + "x"
PATHS = {
    "a workload of 5,000 characters": Case(f"plan {DEEP_PATH} --gpus 2 --gpu-memory 16GiB", 2, "3500 are the most"),
    "a workload of a long name": Case(f"plan {LONG}.py --gpus 2 --gpu-memory 16GiB", 2, "255 are the most"),
    "a workload of no name": Case("plan '' --gpus 2 --gpu-memory 16GiB", 2, "empty"),
    "--out of 5,000 characters": Case(f"{FIT} --out {DEEP_PATH}", 2, "--out is a path of"),
    "--out of 300 characters": Case(f"{FIT} --out {LONG}", 2, "--out has a name of 300 bytes"),
    "--out of 100 emoji": Case(f"{FIT} --out {'😀' * 100}", 2, "--out has a name of 400 bytes"),
    "--out of NUL": Case(f"{FIT} --out 'a\0b'", 2, "--out has a NUL character"),
    "--out of half a surrogate": Case(f"{FIT} --out 'a\ud800'", 2, "--out has characters that no file name has"),
    "--out of nothing": Case(f"{FIT} --out ''", 2, "--out is empty"),
    "--base-config of 5,000 characters": Case(f"{PLAN} --base-config {DEEP_PATH}", 2, "--base-config is a path of"),
    "--config of 300 characters": Case(f"{FIT} --config {LONG}", 2, "--config has a name of 300 bytes"),
    "--experiment of 300 characters": Case(f"{PROBE} --experiment {LONG}", 2, "--experiment has a name of 300 bytes"),
    "--strategies of 300 characters": Case(f"{FIT} --strategies {LONG}", 2, "300 bytes"),
    "--strategies of NUL": Case(f"{FIT} --strategies 'a\0'", 2, "NUL"),
    "--nvme-path of 300 characters": Case(f"{FIT} --nvme-path {LONG}", 2, "--nvme-path has a name of 300 bytes"),
    "--on of a long path": Case(f"plan model.py --gpus 2 --on {LONG}.toml", 2, "File name too long"),
    "--csv of 300 characters": Case(f"{PROBE} --csv {LONG}", 2, "--csv has a name of 300 bytes"),
    "--csv of 5,000 characters": Case(f"{PROBE} --csv {DEEP_PATH}", 2, "--csv is a path of"),
    "hf: of 300 characters": Case(f"plan hf:./{LONG} --gpus 2 --gpu-memory 16GiB", 2, "255 are the most"),
    "a log of 5,000 characters": Case(f"diagnose {DEEP_PATH}", 2, "3500 are the most"),
    "a log of 300 characters": Case(f"diagnose {LONG}", 2, "300 bytes"),
    "a log of no name": Case("diagnose ''", 2, "empty"),
    "-m with a path": Case("plan -m ../x --gpus 2 --gpu-memory 16GiB", 2, "is not a module name"),
    "-m of 100,000 letters": Case(f"plan -m {'x' * 200} --gpus 2 --gpu-memory 16GiB", 2, "there is no module"),
    "a script's argument of 5,000 characters": Case(f"{PLAN} -- {DEEP_PATH}", 2, "takes no arguments"),
    "a file name of a line end": Case(
        "plan 'a\nb.py' --gpus 2 --gpu-memory 16GiB", 2, "a b.py: is not a workload", files={"a\nb.py": "x = 1"}
    ),
    "a file name of quotes and braces": Case(
        """plan "it's {x} %s.py" --gpus 2 --gpu-memory 16GiB""", 2, "it's {x} %s.py:", files={"it's {x} %s.py": "x = 1"}
    ),
    "a file name of emoji": Case("plan 😀.py --gpus 2 --gpu-memory 16GiB", 2, "😀.py", files={"😀.py": "x = 1"}),
    "a file name of bytes that are no text": Case(
        "plan '\udcff.py' --gpus 2 --gpu-memory 16GiB", 2, "is not a workload", files={"\udcff.py": "x = 1"}
    ),
    "a folder of a space and a percent sign": Case(
        "plan 'a %20/c.json' --gpus 2 --gpu-memory 16GiB", 0, files={"a %20/c.json": '{"model_type": "gpt2"}'}
    ),
}  # fmt: skip


@each(COUNTED)
def test_a_number_that_makes_no_sense(meet, case):
    meet(case)


@each(SIZED)
def test_a_size_or_time_that_makes_no_sense(meet, case):
    meet(case)


@each(LIMITS)
def test_a_value_beyond_a_limit_and_below_it(meet, case):
    meet(case)


@each(PATHS)
def test_a_path_that_no_file_has(meet, case):
    meet(case)
