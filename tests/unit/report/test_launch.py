import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from autods.config.checkpointing import set_state
from autods.config.deepspeed import DEFAULT_OPTIMIZER, get_key, to_trainer_config
from autods.report import FitReport, to_dict, write
from autods.report.answers.fit import list_answer, make_fit_document
from autods.report.launch import (
    LAUNCHERS,
    accelerate_yaml,
    fill_placeholders,
    launch_commands,
    launch_lines,
    trainer_arguments,
)
from autods.system.host import Hardware
from autods.workload import make_source
from autods.workload.script_source import ScriptLaunch, describe_launch, describe_trainer
from tests.support.reports import fitting_report, hopeless_report
from tests.support.terminal import printed

ADAM = {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": False},
    "optimizer": ADAM,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000},
}


def scripted(*argv: str, kind: str = "deepspeed", device: str = "cuda", takes_local_rank: bool = True) -> FitReport:
    script = ScriptLaunch(path="train.py", argv=argv, kind=kind, takes_local_rank=takes_local_rank)
    report = fitting_report("out")
    return replace(report, ds_config=CONFIG, question=replace(report.question, device=device, script=script))


def test_placeholders_of_a_scripts_command_line_are_filled():
    argv = ("--epochs", "3", "--deepspeed_config", "{ds_config}", "--batch={micro_batch_size}")
    said = launch_commands(scripted(*argv, kind="accelerate"))
    assert said["torchrun"] == (
        "torchrun --standalone --nproc_per_node 2 train.py --epochs 3 --deepspeed_config out/ds_config.json --batch=4"
    )
    assert said["deepspeed"].startswith("deepspeed --num_gpus 2 train.py --epochs 3")
    assert said["accelerate"].startswith("accelerate launch --config_file out/accelerate.yaml train.py --epochs 3")


def test_the_batch_of_all_ranks_is_filled_in_for_split_layers():
    report = scripted("--batch", "{train_batch_size}")
    assert launch_commands(report)["torchrun"].endswith("--batch 16")
    split = {key: value for key, value in CONFIG.items() if key != "train_batch_size"}
    split["tensor_parallel"] = {"autotp_size": 2}
    assert report.knobs.train_batch(report.question.gpus // 2) == 8
    assert launch_commands(replace(report, ds_config=split))["torchrun"].endswith("--batch 8")


def test_each_rank_gets_the_threads_that_it_had_in_trials():
    report = scripted(device="cpu")
    report = replace(report, question=replace(report.question, threads=4))
    assert launch_commands(report)["torchrun"].startswith("DS_ACCELERATOR=cpu OMP_NUM_THREADS=4 torchrun --standalone")


def test_launch_lines_have_the_allocator_of_the_trials():
    report = replace(scripted(), variables={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    lines = launch_commands(report)
    assert all(line.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ") for line in lines.values())
    assert to_dict(report)["variables"] == dict(report.variables)
    assert dict(list_answer(report))["environment"] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_launchers_bind_ranks_with_states_on_the_host_as_trials_did():
    report = scripted(kind="hf_trainer")
    node = Hardware(cpu="", cores=64, host_bytes=1, host_free_bytes=1, cards=(), numa_nodes=2, numactl=True)
    two = replace(report, hardware=node)
    offload = {**CONFIG, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    bound = replace(two, ds_config=offload)
    assert "deepspeed --num_gpus 2 --bind_cores_to_rank train.py" in launch_commands(bound)["deepspeed"]
    assert "--nproc_per_node 2 --numa-binding exclusive train.py" in launch_commands(bound)["torchrun"]
    assert "enable_cpu_affinity: true\n" in accelerate_yaml(bound, "ds_config.json")
    assert launch_commands(bound)["accelerate"].endswith("accelerate.yaml --enable_cpu_affinity train.py")
    assert "note" not in dict(launch_lines(bound))
    lacking = replace(bound, hardware=replace(node, numactl=False))
    assert "bind" not in " ".join(launch_commands(lacking).values())  # both launchers refuse to without it
    assert "install numactl" in dict(launch_lines(lacking))["note"]
    alone = scripted(kind="accelerate")  # accelerate binds its ranks without numactl
    assert "note" not in dict(launch_lines(replace(alone, hardware=lacking.hardware, ds_config=offload)))
    on_cpu = replace(bound, question=replace(bound.question, device="cpu"))
    for each in (two, on_cpu, replace(bound, hardware=None), replace(bound, question=replace(bound.question, gpus=1))):
        assert "bind" not in " ".join(launch_commands(each).values())
        assert "affinity" not in launch_commands(each)["accelerate"]
        assert "affinity" not in accelerate_yaml(each, "ds_config.json")


def test_a_share_of_the_optimizer_is_trained_by_autods_run():
    share = {**CONFIG, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}}
    report = replace(scripted(), ds_config=share)
    note = dict(launch_lines(report))["note"]
    assert note.startswith("train by autods run: in other launches the part of the optimizer on the device ignores")
    assert note in printed(make_fit_document(report), 400)
    assert "note" not in dict(launch_lines(scripted()))


def test_ops_that_trials_built_are_not_built_again():
    report = scripted()
    built = replace(report, question=replace(report.question, ops_folder="/my cache/ops"))
    assert launch_commands(built)["torchrun"].startswith("TORCH_EXTENSIONS_DIR='/my cache/ops' torchrun")
    without_ops = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert launch_commands(replace(built, ds_config=without_ops))["torchrun"].startswith("torchrun")


def test_braces_that_are_no_placeholder_stay():
    assert fill_placeholders(('{"a": 1}', "{seed}", "{micro_batch_size}x"), {"micro_batch_size": 4}) == (
        '{"a": 1}',
        "{seed}",
        "4x",
    )


def test_what_a_shell_would_split_is_quoted():
    said = launch_commands(scripted("--prompt", "two words"))["torchrun"]
    assert shlex.split(said)[-1] == "two words"


def test_cpu_ranks_are_asked_for_by_name_also_where_there_are_gpus():
    said = launch_commands(scripted(device="cpu"))
    assert said["deepspeed"] == "DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 train.py"


def test_launchers_get_the_ranks_per_node_on_several_nodes():
    report = scripted(kind="hf_trainer")
    said = launch_commands(replace(report, question=replace(report.question, gpus=8, nodes=2)))
    assert said["deepspeed"] == "deepspeed --hostfile HOSTFILE --num_nodes 2 --num_gpus 4 train.py"
    assert said["torchrun"].startswith(
        "torchrun --nnodes 2 --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500 --nproc"
    )
    assert "--nproc_per_node 4" in said["torchrun"]
    assert "--machine_rank NODE_NUMBER --main_process_ip FIRST_NODE" in said["accelerate"]


@pytest.mark.parametrize(("nodes", "launcher"), [(1, None), (2, "standard")])
def test_accelerate_is_started_on_each_of_several_nodes(nodes, launcher):
    """By its default it hands over to DeepSpeed's launcher, which trains on one node where it gets no hostfile."""
    yaml = pytest.importorskip("yaml")
    report = scripted()
    report = replace(report, question=replace(report.question, gpus=8, nodes=nodes))
    said = yaml.safe_load(accelerate_yaml(report, "c.json"))
    assert (said["num_machines"], said["num_processes"]) == (nodes, 8)
    assert said["deepspeed_config"].get("deepspeed_multinode_launcher") == launcher


def test_a_script_that_knows_no_local_rank_is_not_given_one():
    assert "--no_local_rank train.py" in launch_commands(scripted(takes_local_rank=False))["deepspeed"]


def test_a_trainer_script_gets_the_config_that_it_may_fill_in():
    said = launch_commands(scripted("--deepspeed", "{ds_config}", kind="hf_trainer"))["torchrun"]
    assert "train.py --deepspeed out/ds_config_hf.json" in said


def test_a_trainer_script_gets_the_sizes_that_its_trials_set():
    micro_batch = ("--per_device_train_batch_size", "{micro_batch_size}")
    said = launch_commands(scripted("--deepspeed", "{ds_config}", *micro_batch, kind="hf_trainer"))["torchrun"]
    assert said.endswith("--per_device_train_batch_size 4 --gradient_accumulation_steps 2")


def test_arguments_in_a_trainer_script_get_the_sizes_by_code_lines():
    lines = launch_lines(scripted("config.json", kind="hf_trainer"))
    assert [text for name, text in lines if name == "code"] == [
        "TrainingArguments(…, deepspeed='out/ds_config_hf.json')",
        "TrainingArguments(…, per_device_train_batch_size=4, gradient_accumulation_steps=2)",
    ]


def test_a_setting_for_a_yaml_file_is_read_as_the_path():
    yaml = pytest.importorskip("yaml")
    report = replace(scripted("train", "sft.yaml", kind="hf_trainer"), out="/out/it's: #1 😀")
    said = next(text for name, text in launch_lines(report) if name == "settings")
    assert yaml.safe_load(said) == {"deepspeed": "/out/it's: #1 😀/ds_config_hf.json"}


def test_arguments_in_a_yaml_file_get_lines_of_that_file():
    report = scripted("train", "sft.yaml", kind="hf_trainer")
    report = replace(report, question=replace(report.question, recomputes=not report.knobs.checkpointing))
    lines = launch_lines(report)
    assert [text for name, text in lines if name in ("code", "settings")] == [
        f"{setting}  # in sft.yaml, as the Trainer names it"
        for setting in (
            "deepspeed: out/ds_config_hf.json",
            "per_device_train_batch_size: 4",
            "gradient_accumulation_steps: 2",
            f"gradient_checkpointing: {json.dumps(report.knobs.checkpointing)}",
        )
    ]


def test_a_script_without_config_placeholder_gets_a_code_line():
    assert (
        dict(launch_lines(scripted("--epochs", "3")))["code"] == "deepspeed.initialize(…, config='out/ds_config.json')"
    )
    assert "code" not in dict(launch_lines(scripted("--deepspeed_config", "{ds_config}")))


def test_auto_stands_exactly_where_the_trainer_fills_in():
    config = to_trainer_config(CONFIG)
    autos = {
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16.enabled",
        "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
    }  # fmt: skip
    assert all(get_key(config, key) == "auto" for key in autos)
    assert json.dumps(config).count('"auto"') == len(autos)
    assert config["zero_optimization"] == CONFIG["zero_optimization"]
    assert "scheduler" not in config
    assert "fp16" not in config


def test_the_trainer_keeps_the_rate_at_which_a_warmup_begins():
    schedule = {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4, "warmup_num_steps": 100}
    config = to_trainer_config({**CONFIG, "scheduler": {"type": "WarmupLR", "params": schedule}})
    assert config["scheduler"]["params"] == {**dict.fromkeys(schedule, "auto"), "warmup_min_lr": 1e-6}


def test_the_trainers_arguments_say_what_auto_took_out_of_the_config():
    said = trainer_arguments(scripted(), "c.json")
    pairs = dict(itertools.pairwise(said))
    assert pairs["--per_device_train_batch_size"] == "4"
    assert pairs["--gradient_accumulation_steps"] == "2"
    assert (pairs["--learning_rate"], pairs["--adam_beta2"], pairs["--max_grad_norm"]) == ("0.0003", "0.95", "0.5")
    assert "--bf16" in said
    assert "--fp16" not in said
    assert "--gradient_checkpointing" in said


@pytest.mark.parametrize("optimizer", [ADAM, DEFAULT_OPTIMIZER])
def test_the_trainer_gets_the_rate_to_which_a_warmup_leads(optimizer: dict[str, object]) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 6e-4, "warmup_num_steps": 100}}
    report = replace(scripted(), ds_config={**CONFIG, "optimizer": optimizer, "scheduler": schedule})
    arguments = trainer_arguments(report, "c.json")
    assert arguments.count("--learning_rate") == 1
    assert dict(itertools.pairwise(arguments))["--learning_rate"] == "0.0006"


def test_a_newer_trainer_recomputes_a_share_of_its_layers() -> None:
    report = replace(scripted(), versions={"transformers": "5.23.0"})
    assert "--activation_checkpointing" in trainer_arguments(report, "c.json")
    report = replace(report, knobs=set_state(report.knobs, "every-2"))
    pairs = dict(itertools.pairwise(trainer_arguments(report, "c.json")))
    assert json.loads(pairs["--activation_checkpointing_kwargs"]) == {"every_n_layers": 2}


def test_a_share_of_layers_is_left_alone_by_the_trainer():
    report = scripted()
    report = replace(report, knobs=set_state(report.knobs, "every-2"))
    assert "--gradient_checkpointing" not in trainer_arguments(report, "c.json")
    lines = list(launch_lines(replace(report, question=replace(report.question, script=None))))
    assert ("model", "recompute_some_layers(model, 2)  # the function of examples/train.py") in lines


def test_a_long_load_has_the_trainers_own_timeout():
    report = replace(scripted(), variables={"DEEPSPEED_TIMEOUT": "94"})
    arguments = " ".join(trainer_arguments(report, "c.json"))
    assert "--ddp_timeout 5640" in arguments
    assert "--ddp_timeout" not in " ".join(trainer_arguments(scripted(), "c.json"))


def test_a_trainer_script_gets_the_timeout_of_a_long_load():
    """TrainingArguments hand their own to the process groups, 30 minutes, whatever DEEPSPEED_TIMEOUT is."""
    variables = {"DEEPSPEED_TIMEOUT": "94"}
    parsed = replace(scripted("--deepspeed", "{ds_config}", kind="hf_trainer"), variables=variables)
    assert launch_commands(parsed)["torchrun"].endswith(" --ddp_timeout 5640")
    own = scripted("--deepspeed", "{ds_config}", "--ddp_timeout=9000", kind="hf_trainer")
    assert "5640" not in launch_commands(replace(own, variables=variables))["torchrun"]
    for argv, name, words in (
        ("config.json", "code", "gradient_accumulation_steps=2, ddp_timeout=5640)"),
        ("sft.yaml", "settings", "ddp_timeout: 5640  # in sft.yaml"),
    ):
        lines = launch_lines(replace(scripted(argv, kind="hf_trainer"), variables=variables))
        assert any(each == name and words in text for each, text in lines)
    other = replace(scripted("--deepspeed", "{ds_config}"), variables=variables)
    assert "ddp_timeout" not in str((dict(launch_lines(other)), launch_commands(other)))


def test_a_scripts_own_parser_gets_no_options_of_the_trainers():
    """An argparse of the script's exits at an option that it does not know: the code has it."""
    argv = ("--deepspeed", "{ds_config}", "--size", "{micro_batch_size}", "--steps", "{gradient_accumulation_steps}")
    report = replace(scripted(*argv, kind="hf_trainer"), variables={"DEEPSPEED_TIMEOUT": "94"})
    assert report.question.script is not None
    script = replace(report.question.script, has_own_parser=True)
    report = replace(report, question=replace(report.question, script=script))
    assert launch_commands(report)["torchrun"].endswith(" --size 4 --steps 2")
    assert ("code", "TrainingArguments(…, ddp_timeout=5640)") in list(launch_lines(report))


def test_a_lightning_script_gets_the_timeout_of_a_long_load():
    script = scripted("{ds_config}", kind="lightning")
    lines = list(launch_lines(replace(script, variables={"DEEPSPEED_TIMEOUT": "94"})))
    assert ("code", "DeepSpeedStrategy(…, timeout=datetime.timedelta(minutes=94))") in lines
    assert "timedelta" not in str(list(launch_lines(script)))


def test_the_trainers_usual_clipping_is_not_handed_on():
    report = replace(scripted(), ds_config={**CONFIG, "gradient_clipping": 1.0})
    assert "--max_grad_norm" not in trainer_arguments(report, "c.json")


def test_a_learning_rate_that_nobody_asked_for_is_not_handed_on():
    report = replace(scripted(), ds_config={**CONFIG, "optimizer": DEFAULT_OPTIMIZER})
    assert "--learning_rate" not in trainer_arguments(report, "c.json")


def test_accelerate_file_repeats_nothing_of_the_config():
    yaml = pytest.importorskip("yaml")
    path = "/out/ds config 😀: #1.json"
    assert yaml.safe_load(accelerate_yaml(scripted(), path))["deepspeed_config"]["deepspeed_config_file"] == path
    said = yaml.safe_load(accelerate_yaml(scripted(device="cpu"), "/out/ds config.json"))
    assert said["deepspeed_config"] == {"deepspeed_config_file": "/out/ds config.json"}
    assert (said["distributed_type"], said["num_processes"], said["use_cpu"]) == ("DEEPSPEED", 2, True)
    assert "mixed_precision" not in said


@pytest.mark.parametrize(("own", "line"), [(None, None), (True, None), (False, "enable")])
def test_checkpointing_that_the_script_lacks_is_a_line_of_code(own: bool | None, line: str | None) -> None:
    report = scripted("--deepspeed_config", "{ds_config}")
    report = replace(report, question=replace(report.question, recomputes=own))
    assert report.knobs.checkpointing
    code = dict(launch_lines(report)).get("code")
    assert code == (line and "model.gradient_checkpointing_enable()  # before deepspeed.initialize, as it was measured")


def test_only_a_trainer_is_given_its_option_of_checkpointing() -> None:
    """DeepSpeed's own parser has a switch --deepspeed, too (`deepspeed.add_config_arguments`)."""
    report = scripted("--deepspeed", "--deepspeed_config", "{ds_config}")
    report = replace(report, question=replace(report.question, recomputes=False))
    lines = dict(launch_lines(report))
    assert lines["launch"].endswith("train.py --deepspeed --deepspeed_config out/ds_config.json")
    assert lines["code"].startswith("model.gradient_checkpointing_enable()")


@pytest.mark.parametrize(("version", "option"), [("5.22.2", "gradient"), ("5.23.0", "activation")])
def test_checkpointing_that_a_trainer_turns_off_is_an_argument(version: str, option: str) -> None:
    """The newer of the two names wins (`TrainingArguments.__post_init__`), and older versions lack it."""
    for argv, place in ((("--deepspeed", "{ds_config}"), "launch"), (("config.json",), "code")):
        report = replace(scripted(*argv, kind="hf_trainer"), versions={"transformers": version})
        knobs = replace(report.knobs, checkpointing=False)
        report = replace(report, knobs=knobs, question=replace(report.question, recomputes=True))
        lines = [words for name, words in launch_lines(report) if name == place]
        ends = (f" --{option}_checkpointing False", f" {option}_checkpointing=False)")
        assert any(words.endswith(ends) for words in lines)


def test_adapters_of_a_config_are_a_line_of_code() -> None:
    report = fitting_report("out")
    report = replace(report, question=replace(report.question, lora="16,q_proj,v_proj"))
    (line,) = [words for name, words in launch_lines(report) if "peft" in words]
    assert line == (
        "import peft; model = peft.get_peft_model(model, "
        "peft.LoraConfig(r=16, lora_alpha=32, target_modules=['q_proj', 'v_proj']))"
    )


def test_4_bit_weights_come_with_the_line_that_loads_them_so():
    report = fitting_report("out")
    report = replace(report, ds_config=CONFIG, question=replace(report.question, lora="4bit:16,all-linear"))
    load, adapt, *_ = [words for name, words in launch_lines(report) if name == "model"]
    assert "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'" in load
    assert "bnb_4bit_compute_dtype='bfloat16'" in load
    assert adapt.endswith("peft.LoraConfig(r=16, lora_alpha=32, target_modules='all-linear'))")


def test_a_model_py_is_launched_by_the_training_script_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def build_model(): ...\ndef build_batch(micro_batch_size): ...\n")
    trainer = describe_trainer(make_source(tmp_path / "model.py"), None)
    report = fitting_report("out")
    report = replace(report, question=replace(report.question, trainer=trainer))
    lines = dict(launch_lines(report))
    for launcher, name in (("torchrun", "launch"), ("deepspeed", "or")):
        _, program = lines[name].split(launcher, 1)
        words = shlex.split(program)
        (script,) = [Path(word) for word in words if word.endswith("train.py")]
        assert script == Path(__file__).parents[3] / "examples" / "train.py"
        assert f"--model {tmp_path}/model.py --deepspeed_config out/ds_config.json" in program
        assert ("--gradient-checkpointing" in words) is report.knobs.checkpointing


def test_a_models_config_is_launched_with_its_lengths_and_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    argv = describe_trainer(make_source(tmp_path / "config.json", lora="8,c_attn", zero_init=True), 512).argv
    pairs = dict(itertools.pairwise(argv))
    assert (pairs["--model"], pairs["--task"], pairs["--seq-len"]) == (f"{tmp_path}/config.json", "causal-lm", "512")
    assert json.loads(pairs["--lora"]) == {"r": 8, "lora_alpha": 16, "target_modules": ["c_attn"]}
    assert "--zero-init" in argv
    assert "--weights" not in argv
    weights = replace(make_source(tmp_path / "config.json"), weights=True)
    assert "--weights" in describe_trainer(weights, 512).argv
    quantized = replace(make_source(tmp_path / "config.json"), lora="4bit:8")
    assert describe_trainer(quantized, 512) is None


def test_accelerates_file_says_that_the_config_brings_the_optimizer():
    assert "DummyOptim" in accelerate_yaml(scripted(), "c.json")
    assert "DummyOptim" not in accelerate_yaml(fitting_report(), "c.json")


def test_the_files_are_those_that_the_commands_name(tmp_path: Path):
    report = replace(scripted("--deepspeed", "{ds_config}", kind="hf_trainer"), out=str(tmp_path))
    write(report, tmp_path)
    launch = to_dict(report)["launch"]
    lines = filter(None, launch.values())
    named = {word for line in lines for word in (shlex.split(line) if isinstance(line, str) else line)}
    assert {str(tmp_path / name) for name in ("ds_config_hf.json", "accelerate.yaml")} <= named
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accelerate.yaml", "ds_config.json", "ds_config_hf.json", "report.json",
    ]  # fmt: skip


def test_a_lightning_script_gets_a_config_without_accumulation_steps(tmp_path: Path):
    report = replace(scripted("--config", "{ds_config}", kind="lightning"), out=str(tmp_path))
    write(report, tmp_path)
    config = json.loads((tmp_path / "ds_config_lightning.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert not {"gradient_accumulation_steps", "train_batch_size"} & config.keys()
    assert launch_commands(report)["torchrun"].endswith("ds_config_lightning.json")


def test_accelerate_launches_its_script_without_a_placeholder():
    assert [name for name, _ in launch_lines(scripted("--epochs", "3", kind="accelerate"))] == ["launch"]
    assert dict(launch_lines(scripted(kind="accelerate")))["launch"].startswith("accelerate launch")


def test_what_accelerate_makes_of_cpu_ranks_is_said():
    said = dict(launch_lines(scripted("--epochs", "3", kind="accelerate", device="cpu")))
    assert "does not share out the data" in said["note"]


def test_a_command_that_needs_gpus_says_so_on_cpu_ranks():
    report = scripted(device="cpu")
    report = replace(report, question=replace(report.question, stood_in=("torch.cuda.set_device (train.py:12)",)))
    note = dict(launch_lines(report))["note"]
    assert note == "on CPU ranks it fails at torch.cuda.set_device (train.py:12); trials did without"


LAUNCHES = [
    ((), "accelerate"),
    (("--config", "{ds_config}"), "accelerate"),
    ((), "deepspeed"),
    ((), "lightning"),
    ((), "hf_trainer"),
    (("--deepspeed", "{ds_config}"), "hf_trainer"),
    (("sft.yaml",), "hf_trainer"),
]


@pytest.mark.parametrize(("argv", "kind"), LAUNCHES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_json_has_the_launch_lines_of_the_terminal(argv: tuple[str, ...], kind: str, device: str):
    report = scripted(*argv, kind=kind, device=device)
    launch, lines = to_dict(report)["launch"], list(launch_lines(report))
    commands = [launch[name] for name in LAUNCHERS if launch[name] is not None]
    assert commands == [text for name, text in lines if name in ("launch", "or")]
    for name in ("model", "code", "settings", "note"):
        assert launch[name] == [text for each, text in lines if each == name]
    assert {name for name, _ in lines} <= {"launch", "or", "model", "code", "settings", "note"}
    assert (launch["trainer_arguments"] is not None) == (kind == "hf_trainer")


def test_json_has_the_launch_lines_of_a_model():
    launch, lines = to_dict(fitting_report())["launch"], list(launch_lines(fitting_report()))
    others = [shlex.join(words) if isinstance(words, list) else words for words in launch.values()]
    written = [text for each in launch.values() if isinstance(each, list) for text in each] + others
    assert {text for _, text in lines} <= {*written}


def test_json_names_no_launcher_that_leaves_the_config_out():
    launch = to_dict(scripted("--lr", "1", kind="accelerate"))["launch"]
    assert (launch["torchrun"], launch["deepspeed"], launch["trainer_arguments"]) == (None, None, None)
    assert launch["accelerate"] == "accelerate launch --config_file out/accelerate.yaml train.py --lr 1"


def test_where_nothing_fits_there_is_nothing_to_launch():
    assert to_dict(hopeless_report())["launch"] is None


@pytest.mark.parametrize(
    ("text", "knows"),
    [
        ("import deepspeed\nparser.add_argument('--local_rank')", True),
        ("import deepspeed\ndeepspeed.add_config_arguments(parser)", False),
        ("import deepspeed\ndeepspeed.initialize()", False),
        ("from transformers import TrainingArguments", True),
    ],
)
def test_only_a_script_that_knows_local_rank_gets_it(tmp_path: Path, text: str, knows: bool):
    (tmp_path / "train.py").write_text(text)
    said = describe_launch(make_source(tmp_path / "train.py", argv=("--a", "{ds_config}")))
    assert said.takes_local_rank is knows
    assert said.argv == ("--a", "{ds_config}")
