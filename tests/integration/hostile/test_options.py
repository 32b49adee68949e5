"""Options that make no sense, or no sense together, are refused by name before anything starts."""

from __future__ import annotations

from tests.support.bad_scripts import GOOD as SCRIPT
from tests.support.hostile import Case, each

FIT = "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB"
PLAN = "plan model.py --gpus 2 --gpu-memory 16GiB"
PROBE = "probe model.py --device cpu --gpus 2 --gpu-memory 1GiB"
GPT = '{"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16}'
FILES = {"train.py": SCRIPT, "config.json": GPT, "run.log": "Traceback (most recent call last):\nKeyError: 1\n"}
NOTES = 1  # a fit or probe that is accepted says where it writes


def refused(line: str, message: str) -> Case:
    return Case(line, 2, message, files=FILES)


def accepted(line: str) -> Case:
    return Case(line, 0, files=FILES, lines=NOTES)


VALUES = {
    "all is well": accepted(FIT),
    "ranks: none": refused(f"{FIT} --gpus 0", "--gpus 0: at least one rank is needed"),
    "ranks: negative": refused(f"{FIT} --gpus -1", "--gpus -1: at least one rank is needed"),
    "ranks: a word": refused(f"{FIT} --gpus many", "Invalid value for '--gpus'"),
    "ranks: a fraction": refused(f"{FIT} --gpus 1.5", "Invalid value for '--gpus'"),
    "ranks: digits of another script": refused(f"{FIT} --gpus ２", "Invalid value for '--gpus'"),
    "ranks: more than memory has room for": refused(f"{FIT} --gpus 99999", "give fewer --gpus"),
    "ranks: more than anybody has": refused(f"{FIT} --gpus 1000000", "100,000 is the most"),
    "ranks: more than there are cards": refused("fit model.py --gpus 8", "no CUDA GPU is visible"),
    "memory: a word": refused(f"{FIT} --gpu-memory banana", "--gpu-memory 'banana' is not a size"),
    "memory: none": refused(f"{FIT} --gpu-memory 0", "'0' is not a size"),
    "memory: negative": refused(f"{FIT} --gpu-memory -1GiB", "'-1GiB' is not a size"),
    "memory: two units": refused(f"{FIT} --gpu-memory 1GiB2", "'1GiB2' is not a size"),
    "memory: not a number": refused(f"{FIT} --gpu-memory nan", "'nan' is not a size"),
    "memory: more than is here": refused(f"{FIT} --gpu-memory 900TiB", "this machine has"),
    "memory: 400 digits": refused(f"{FIT} --gpu-memory {'9' * 400}", "is more than a machine can address"),
    "host memory: 400 digits": refused(f"{PLAN} --host-memory {'9' * 400}GiB", "is more than a machine can address"),
    "NVMe: none": refused(f"{PLAN} --nvme 0", "--nvme '0' is not a size"),
    "time: none": refused(f"{FIT} --stall-limit 0s", "--stall-limit '0s' is not a time"),
    "time: negative": refused(f"{FIT} --max-time -5m", "--max-time '-5m' is not a time"),
    "time: a word": refused(f"{FIT} --max-time forever", "--max-time 'forever' is not a time"),
    "time: longer than a year": refused(f"{FIT} --stall-limit 99999999999h", "is longer than a year"),
    "time: 400 digits": refused(f"{FIT} --max-time {'9' * 400}", "is longer than a year"),
    "trials: none": refused(f"{FIT} --max-trials 0", "--max-trials 0: at least one trial is needed"),
    "batch: none": refused(f"{FIT} --global-batch 0", "at least one sample is needed"),
    "batch: one too many": refused(f"{FIT} --global-batch 7", "--global-batch 7 cannot be split over 2 ranks"),
    "precision: unknown": refused(f"{FIT} --precision int3", "there is no precision 'int3'"),
    "precision: capitals": refused(f"{FIT} --precision BF16", "there is no precision 'BF16'"),
    "precision: auto and another": refused(f"{FIT} --precision auto,bf16", "there is no precision 'auto'"),
    "precision: a comma too many": refused(f"{FIT} --precision bf16,", "there is no precision ''"),
    "device: unknown": refused(f"{FIT} --device tpu", "there is no device 'tpu'"),
    "device: one of several": refused(f"{FIT} --device cuda:0", "there is no device 'cuda:0'"),
    "ladder: an unknown rung": refused(f"{FIT} --ladder ddp,zero9", "there is no rung 'zero9'"),
    "ladder: a comma too many": refused(f"{FIT} --ladder ddp,,zero1", "there is no rung ''"),
    "ladder: capitals": refused(f"{FIT} --ladder DDP", "there is no rung 'DDP'"),
    "ladder: a control character": refused(f"{FIT} --ladder zero1\a", r"there is no rung 'zero1\x07'"),
    "profile: unknown": refused(f"{FIT} --config fastest", "there is no config 'fastest'"),
    "profile: a file that is none": refused(f"{FIT} --config gone.toml", "there is no config 'gone.toml'"),
    "profile: a way out": refused(f"{FIT} --config ../../etc/passwd", "there is no config"),
    "rungs: no folder": refused(f"{FIT} --strategies gone", "gone: is not a folder of rungs"),
    "rungs: a file": refused(f"{FIT} --strategies model.py", "model.py: is not a folder of rungs"),
    "stop: unknown": refused(f"{FIT} --stop never", "--stop 'never' is neither first-fit nor fastest"),
    "objective: unknown": refused(f"{FIT} --objective fun", "there is no objective 'fun'"),
    "seed: negative": refused(f"{FIT} --seed -1", "--seed -1: seeds are 0 to 4294967295"),
    "seed: too large": refused(f"{FIT} --seed 4294967296", "seeds are 0 to 4294967295"),
    "NVMe: no folder": refused(f"{FIT} --nvme-path gone", "--nvme-path gone: is not a folder that can be written"),
    "NVMe: a file": refused(f"{FIT} --nvme-path model.py", "is not a folder that can be written"),
    "micro batch: none": refused(f"{PLAN} --micro-batch 0", "--micro-batch 0: at least one sample is needed"),
    "checkpointing: a word": refused(
        f"{PLAN} --checkpointing maybe", "--checkpointing 'maybe': it is one of off, every-4"
    ),
    "machine: unknown": refused("plan model.py --gpus 2 --on a100", "the catalogue has no machine 'a100'"),
    "machine: all and another": refused("plan model.py --gpus 2 --on all,a100-80gb", "give --on all, without other"),
    "machine: no file": refused("plan model.py --gpus 2 --on gone.toml", "gone.toml: cannot be read: No such file"),
    "length: none": refused(f"{FIT} --seq-len 0", "--seq-len 0: at least one token is needed"),
    "kind: unknown": refused(f"{FIT} --kind x", "there is no kind 'x'"),
    "task: unknown": refused(f"{FIT.replace('model.py', 'config.json')} --task x", "there is no task 'x'"),
    "repeats: none": refused(f"{PROBE} --repeats 0", "--repeats 0: at least one is needed"),
    "steps: none": refused(f"{PROBE} --steps 0", "--steps 0: at least one is needed"),
    "trials at a time: none": refused(f"{PROBE} --capacity --parallel-trials 0", "--parallel-trials 0: at least one"),
    "a list of ranks with a word": refused("probe model.py --device cpu --gpus 1,x", "this is not a list of numbers"),
    "a table on a folder": refused(f"{PROBE} --csv .", ".: cannot be written: is a folder"),
    "exit code: a word": refused("diagnose run.log --exit-code x", "Invalid value for '--exit-code'"),
    "exit code: none that exists": refused("diagnose run.log --exit-code 999", "exit code 999 does not exist"),
    "exit code: an unknown signal": refused("diagnose --exit-code -999", "exit code -999 does not exist"),
    "nodes: none": refused(f"{FIT} --nodes 0", "--nodes 0: at least one node is needed"),
    # In processes of their own: where Ray runs already, as in these tests, it is joined whatever the address.
    "cluster: a word": Case(f"autods {FIT} --address nonsense", 2, "is neither auto nor HOST:PORT", "shell"),
    "cluster: a client's address": Case(
        f"autods {FIT} --address ray://127.0.0.1:1", 2, "is neither auto nor HOST:PORT", "shell"
    ),
    "variable: an assignment": refused(f"{FIT} --address auto --export A=B", "is not the name of an environment"),
    "variable: two words": refused(f"{FIT} --address auto --export 'A B'", "is not the name of an environment"),
}


@each(VALUES)
def test_a_value_that_makes_no_sense(meet, case):
    meet(case)


EMPTY = {
    **{
        option: refused(f"{FIT} {option}=", f"{option} is empty")
        for option in ("--out", "--ladder", "--config", "--nvme-path", "--strategies", "--device", "--task")
    },
    "--on": refused("plan model.py --gpus 2 --on ''", "--on is empty"),
    "--vary": refused(f"{PROBE} --vary ''", "--vary is empty"),
    "--csv": refused(f"{PROBE} --csv ''", "--csv is empty"),
    "--gpus": refused(f"{FIT} --gpus=", "Invalid value for '--gpus'"),
    "WORKLOAD": refused("fit ''", "the workload's path is empty"),
    "LOG": refused("diagnose ''", "LOG is empty"),
    "a module": refused("fit -m ''", "-m : is not a module name"),
}


@each(EMPTY)
def test_an_empty_option_is_not_the_current_folder(meet, case):
    meet(case)


CONTRADICTIONS = {
    "several nodes without a cluster": refused(f"{FIT} --nodes 2", "--nodes 2 needs a Ray cluster"),
    "three nodes for two ranks": refused(f"{FIT} --nodes 3 --address auto", "cannot be split evenly over 3 nodes"),
    "variables for no nodes": refused(f"{FIT} --export DATA", "--export is for the nodes of a cluster"),
    "a card and its memory": refused(f"{PLAN} --on a100-80gb", "--on names a card, so --gpu-memory has no effect"),
    "a card and CPU ranks": refused("plan model.py --gpus 2 --on a100-80gb --device cpu", "--device cpu has no effect"),
    "no card": refused("plan model.py --gpus 2", "say which to forecast for"),
    "no number of ranks": refused("fit model.py --device cpu", "--device cpu needs the number of ranks"),
    "micro batch over batch": refused(f"{PLAN} --micro-batch 3 --global-batch 8", "does not divide the global batch 8"),
    "a task of a model.py": refused(f"{FIT} --task causal-lm", "--task is for a Hugging Face config"),
    "a target of a model.py": refused(f"{FIT} --target-len 5", "--target-len is for a Hugging Face config"),
    "a length that build_batch lacks": refused(f"{FIT} --seq-len 5", "its build_batch has no argument seq_len"),
    "arguments of a model.py": refused(f"{FIT} -- x", "takes no arguments: x"),
    "a second workload": refused(f"{FIT} model.py", "takes no arguments: model.py"),
    "a file as a module": refused(f"{FIT} -m", "-m model.py: is a file, and -m takes a module name"),
    "a module as a model": refused(
        f"{FIT} --kind model -m".replace("model.py", "train"), "-m starts a training script"
    ),
    "a kind of script for a config": refused("fit config.json --kind script", "--kind script is for a training script"),
    "a target of a causal model": refused("fit config.json --target-len 5", "--target-len is for --task seq2seq"),
    "a length of images": refused(
        "fit config.json --task image-classification --seq-len 5", "--seq-len is for text; the config holds the size"
    ),
    "arguments of a config": refused("fit config.json -- x", "takes no arguments: x"),
    "a length of a script": refused("fit train.py --seq-len 5", "--seq-len does not apply to a training script"),
    "zero.Init of a script": refused("fit train.py --zero-init", "--zero-init does not apply to a training script"),
    "checkpointing of a script": refused(
        "plan train.py --gpus 2 --gpu-memory 1GiB --checkpointing on --keep-checkpointing",
        "--checkpointing and --keep-checkpointing contradict each other",
    ),
    "kept checkpointing of a config": refused(
        "plan config.json --gpus 2 --gpu-memory 1GiB --keep-checkpointing", "is for a training script"
    ),
    "--ladder and an axis": refused(f"{PROBE} --ladder zero1 --vary rung=zero2", "--ladder and an axis both name"),
    "--gpus and an axis": refused(f"{PROBE} --vary gpus=1,2", "--vary gpus=… and --gpus both give the ranks"),
    "--precision and an axis": refused(f"{PROBE} --precision fp32 --vary precision=bf16", "contradict each other"),
    "--global-batch and an axis": refused(f"{PROBE} --global-batch 8 --vary accumulation=2", "contradict each other"),
    "several precisions of a probe": refused(f"{PROBE} --precision bf16,fp32", "--precision names one"),
    "--capacity and its answer": refused(f"{PROBE} --capacity --vary micro_batch=1", "looks for the largest micro"),
    "timed trials at once": refused(f"{PROBE} --parallel-trials 2", "would slow each other down"),
    "another machine with trials": refused(f"{PROBE} --on a100-80gb", "add --forecast-only"),
    "its memory with trials": refused(f"{PROBE} --host-memory 1GiB", "add --forecast-only"),
    "a forecast without one": refused(f"{PROBE} --forecast-only --no-forecast", "contradict each other"),
    "a forecast on a cluster": refused(f"{PROBE} --forecast-only --address auto", "runs nothing on a cluster"),
    "a forecast for several": refused("probe model.py --gpus 2 --forecast-only --on all", "names several machines"),
    "a table and JSON": Case(f"{PROBE} --csv - --json", 2, "both print to standard output"),
    "neither log nor exit code": refused("diagnose", "neither a log nor an exit code is given"),
    "--micro-batch of a fit": refused(f"{FIT} --micro-batch 2", "No such option: --micro-batch"),
    "--vary of a fit": refused(f"{FIT} --vary rung=ddp", "No such option: --vary"),
    "--on of a fit": refused(f"{FIT} --on a100-80gb", "--on a100-80gb is for a rehearsal"),
    "--rehearse without a machine": refused(f"{FIT} --rehearse", "--rehearse needs a machine"),
    "--fresh of diagnose": refused("diagnose run.log --fresh", "No such option: --fresh"),
    "--out of a plan": refused(f"{PLAN} --out x", "No such option: --out"),
    "--config of a plan": refused(f"{PLAN} --config quick", "No such option: --config"),
    "--stop of a probe": refused(f"{PROBE} --stop first-fit", "No such option: --stop"),
    "--quiet of diagnose": refused("diagnose run.log --quiet", "No such option: --quiet"),
    "--gpus of diagnose": refused("diagnose run.log --gpus 2", "No such option: --gpus"),
}


@each(CONTRADICTIONS)
def test_options_that_contradict_each_other(meet, case):
    meet(case)


SPELLING = {
    "an option that there is not": refused(f"{FIT} --gpuz 2", "No such option: --gpuz (Possible options: --gpus)"),
    "an abbreviation": refused(f"{FIT} --gpu 2", "No such option: --gpu"),
    "what torchrun calls it": refused(f"{PLAN} --nproc_per_node=8", "here it is --gpus N"),
    "what deepspeed calls it": refused(f"{FIT} --num-gpus 8", "here it is --gpus N"),
    "what the HF Trainer calls it": refused(f"{FIT} --gradient-accumulation-steps 8", "here it is --global-batch N"),
    "a stage": refused(f"{PLAN} --zero-stage 3", "here it is --ladder A,B,C"),
    "the model as an option": refused("plan --model model.py", "here it is WORKLOAD, without an option"),
    "what another command has": refused(f"{FIT} --per-device-train-batch-size 2", "--micro-batch is an option of plan"),
    "a single hyphen": refused("fit model.py -gpus 2", "No such option: -g"),
    "a dash": refused(f"{FIT} –gpus 2", "–gpus begins with the character –, and an option with two hyphens"),
    "a long dash": refused(f"{FIT} —gpus 2", "begins with the character —"),
    "a hyphen that does not break": refused(f"{FIT} ‑‑gpus 2", "begins with the character ‑"),
    "no value": refused("fit model.py --gpus", "Option '--gpus' requires an argument"),
    "a value of a switch": refused(f"{FIT} --quiet=yes", "Option '--quiet' does not take a value"),
    "an option as a value": refused("fit model.py --gpus --device cpu", "Invalid value for '--gpus'"),
    "the last of two": accepted(f"{FIT} --gpus 1 --gpus 2"),
    "both of a pair": accepted(f"{FIT} --no-forecast --forecast"),
    "no workload": refused("fit --gpus 2", "Missing argument 'WORKLOAD'"),
    "nothing after --": accepted(f"{FIT} --"),
    "a command that there is not": refused("fti model.py", "No such command 'fti'. Did you mean 'fit'?"),
    "a command with a foreign letter": refused("diаgnose run.log", "Did you mean 'diagnose'?"),
    "a command in capitals": refused("FIT model.py", "No such command 'FIT'"),
    "a command of nothing": refused("''", "No such command ''"),
    "a colour as a command": refused("\x1b[31m", r"No such command '\x1b[31m'"),
    "a colour in a path": refused("fit \x1b[31mmodel.py", r"\x1b[31mmodel.py: cannot be read"),
    "a log that turns the text": refused("diagnose \u202egol.nur", r"\u202egol.nur: no such file"),
    "a line end in a path": refused("diagnose 'a\nb'", "a b: no such file"),
    "help": Case("fit --help", 0, "Find the fastest DeepSpeed config"),
    "help, short": Case("fit -h", 0, "Find the fastest DeepSpeed config"),
    "help of everything": Case("-h", 0, "diagnose"),
    "help after what is wrong": Case("fit model.py --gpus 0 --help", 0, "Find the fastest DeepSpeed config"),
    "nothing": Case("", 0, "Usage: autods"),
    "the version": Case("--version", 0, "autods "),
    "the version of a command": refused("fit --version", "No such option: --version"),
    "--json before the command": Case("--json fit model.py", 2, "No such option: --json"),
}


@each(SPELLING)
def test_what_is_misspelt_is_named(meet, case):
    meet(case)


def test_a_second_user_reads_no_files_of_root(other, tmp_path):
    (tmp_path / "secret").write_text("secret")
    done = other.python("import sys\nprint(open(sys.argv[1]).read())", tmp_path / "secret")
    assert "PermissionError" in done.stderr
