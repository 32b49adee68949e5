"""What can be varied, how values are read, and what is said of what cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autods.config import releases
from autods.config.deepspeed import read_known_keys
from autods.config.rungs import read_rungs
from autods.errors import InputError
from autods.prober.axes import list_keys, parse_value, read_axes
from autods.prober.probe_settings import MOST_CELLS, ProbeSettings, resolve_probe
from autods.requests import ProbeRequest
from autods.system.host import Hardware
from autods.types import WorkloadSource
from autods.workload.conditions import apply_conditions, apply_to_source
from tests.support.probes import CARD, HERE, ask

RUNGS = read_rungs()
BARE = "def build_model(): ...\ndef build_batch(n): ..."
MANY = ",".join(map(str, range(1, 33)))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("false", False), ("2", 2), ("1e6", 1_000_000), ("1.5", 1.5), ("1e-4", 1e-4), ("1.0", 1.0),
        ('"2"', "2"), ("null", None), ("ring", "ring"), ("a b", "a b"), ("[1]", "[1]"), ("", ""),
    ],
)  # fmt: skip
def test_values_are_read_as_json_and_what_is_none_is_text(text: str, value: object) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_an_axis_keeps_the_order_of_its_values_and_each_once() -> None:
    (axis,) = read_axes(["micro_batch=4,1,4,2"], RUNGS)
    assert axis.values == (4, 1, 2)


def test_true_and_1_are_two_values() -> None:
    (axis,) = read_axes(["optimizer.params.flag=true,1"], RUNGS)
    assert axis.values == (True, 1)


def test_axes_of_the_api_are_names_and_values() -> None:
    axes = read_axes({"rung": ["zero1"], "gradient_clipping": [0.5, 1.0], "micro_batch": 2}, RUNGS)
    assert [(axis.name, axis.values) for axis in axes] == [
        ("rung", ("zero1",)), ("gradient_clipping", (0.5, 1.0)), ("micro_batch", (2,)),
    ]  # fmt: skip


def test_deepspeeds_own_names_of_the_batch_mean_the_same() -> None:
    axes = read_axes(["train_micro_batch_size_per_gpu=1,2", "gradient_accumulation_steps=1,4"], RUNGS)
    assert [axis.name for axis in axes] == ["micro_batch", "accumulation"]


def test_an_environment_variable_is_text_and_null_leaves_it_unset() -> None:
    (axis,) = read_axes(["env.NCCL_ALGO=Ring,0,true,null"], RUNGS)
    assert axis.values == ("Ring", "0", "true", None)


def test_checkpointing_has_three_states() -> None:
    (axis,) = read_axes(["checkpointing=on,off,offload"], RUNGS)
    assert axis.values == (True, False, "offload")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rung", "NAME=A,B,C"),
        ("=1", "NAME=A,B,C"),
        ("rung=", "NAME=A,B,C"),
        ("rung=zero9", "the rungs are: ddp, zero1"),
        ("precision=int8", "bf16, fp16, fp32"),
        ("micro_batch=0", "not a whole number above 0"),
        ("micro_batch=two", "not a whole number above 0"),
        ("gpus=true", "not a whole number above 0"),
        ("checkpointing=maybe", "none of off, every-4"),
        ("reduce_bucket=1,2", "did you mean zero_optimization.reduce_bucket_size"),
        ("zero_optimization.nonsense=1", "possible are rung, precision"),
        ("zero_optimization=1", "nothing of that name"),
        ("zero_optimization.offload_param.colour=1", "nothing of that name"),
        ("zero_optimization.stage=1,2", "give --vary rung=…"),
        ("bf16.enabled=true,false", "give --vary precision="),
        ("train_batch_size=8,16", "give --vary micro_batch=…"),
        ("env.MASTER_PORT=1,2", "autods sets MASTER_PORT itself"),
        ("env=1", "nothing of that name"),
        ("build_model=1", "nothing of that name"),
        ("sparse_gradients=true,false", "the installed DeepSpeed has removed sparse_gradients"),
        ("compression_training.x=1", "the installed DeepSpeed has removed compression_training"),
        ("build_model.n_layer=null", "not a number, true, false or text"),
    ],
)
def test_a_wrong_axis_is_refused_with_what_is_possible(line: str, said: str) -> None:
    with pytest.raises(InputError) as raised:
        read_axes([line], RUNGS)
    assert said in str(raised.value)


def test_a_release_that_has_a_removed_key_still_varies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "_installed", lambda: "0.19.7")
    axes = read_axes(["sparse_gradients=true,false", "compression_training.layer_reduction.enabled=true"], RUNGS)
    assert [axis.values for axis in axes] == [(True, False), (True,)]
    with pytest.raises(InputError, match="nothing of that name"):
        read_axes(["nebula=1"], RUNGS)


def test_an_axis_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="twice"):
        read_axes(["rung=zero1", "rung=zero2"], RUNGS)


def test_every_key_of_the_list_can_be_varied() -> None:
    for key in (*list_keys(), *(f"{section}.anything" for section in read_known_keys().sections)):
        assert read_axes([f"{key}=1"], RUNGS)[0].name == key


def test_what_nobody_says_is_the_plainest_rung_and_is_said_to_be(tmp_path: Path) -> None:
    question = ask(tmp_path, "micro_batch=1,2")
    assert [axis.name for axis in question.axes] == ["rung", "micro_batch"]
    assert question.axes[0].values == ("ddp",)
    assert question.assumed == ("rung ddp (--vary rung=…)",)


def test_capacity_asks_every_rung_of_the_ladder(tmp_path: Path) -> None:
    question = ask(tmp_path, capacity=True)
    assert len(question.axes[0].values) == 9
    assert question.repeats == 1


def test_a_long_phase_is_no_hang_in_a_capacity_search(tmp_path: Path) -> None:
    limits = ask(tmp_path, capacity=True).settings.profile.limits
    assert limits.stall_s == limits.init_s > ask(tmp_path).settings.profile.limits.stall_s


def test_several_ranks_are_an_axis_and_the_most_of_them_the_settings(tmp_path: Path) -> None:
    question = ask(tmp_path, gpus="1,2,4")
    assert {axis.name: axis.values for axis in question.axes}["gpus"] == (1, 2, 4)
    assert question.settings.gpus == 4


@pytest.mark.parametrize(
    ("vary", "asked", "said"),
    [
        (("gpus=1,2",), {"gpus": 2}, "both give the ranks"),
        (("rung=zero1",), {"ladder": ("zero2",)}, "both name the rungs"),
        (("rung=zero1",), {"lossy": True}, "--lossy and an axis both name the rungs"),
        ((), {"ladder": ("zero2",), "experiment": "stages"}, "both name the rungs"),
        (("seq_len=1,2",), {"text": BARE}, "no argument 'seq_len'"),
        (("build_model.depth=1",), {}, "it has n_layer"),
        (("build_batch.micro_batch_size=1",), {}, "it has seq_len, width"),
        (("target_len=8",), {}, "build_batch.target_len"),
        (("precision=bf16,fp32",), {"precision": "bf16"}, "contradict each other"),
        (("accumulation=1,2",), {"global_batch": 8}, "--global-batch contradict"),
        (("micro_batch=1,2",), {"capacity": True}, "--capacity looks for the largest micro batch itself"),
        (("micro_batch=1,2",), {"forecast_only": True}, "--forecast-only looks for the largest micro batch itself"),
        ((), {"precision": "bf16,fp32"}, "--vary precision=bf16,fp32"),
        ((), {"repeats": 0}, "--repeats 0"),
        ((), {"steps": 0}, "--steps 0"),
        ((), {"gpus": "2,x"}, "not a list of numbers"),
        ((), {"gpus": "0,2"}, "at least one rank"),
        ((), {"on": "a100-80gb"}, "add --forecast-only"),
        ((), {"forecast_only": True, "gpu_memory": None, "device": "cuda"}, "say which to forecast for"),
        ((), {"forecast_only": True, "gpus": None, "device": "cuda"}, "how many ranks"),
        (("gpus=2,3",), {"gpus": None, "global_batch": 8}, "cannot be split over 3 ranks"),
        (("gpus=3,4",), {"gpus": None, "nodes": 2, "address": "auto"}, "these fill no whole nodes"),
        ((), {"nodes": 2}, "needs a Ray cluster"),
        ((), {"nodes": 2, "address": "auto", "forecast_only": True}, "runs nothing on a cluster"),
        ((f"micro_batch={MANY}", f"accumulation={MANY}"), {}, "1,024 cells"),
    ],
)  # fmt: skip
def test_a_request_that_contradicts_itself_is_refused(
    tmp_path: Path, vary: tuple[str, ...], asked: dict[str, object], said: str
) -> None:
    assert MOST_CELLS == 1000
    with pytest.raises(InputError) as raised:
        ask(tmp_path, *vary, **asked)  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_a_function_that_takes_anything_takes_any_argument(tmp_path: Path) -> None:
    text = "def build_model(**options): ...\ndef build_batch(n, **options): ..."
    question = ask(tmp_path, "build_model.depth=1,2", "build_batch.size=3", text=text)
    assert [axis.name for axis in question.axes] == ["rung", "build_model.depth", "build_batch.size"]


def resolved(workload: Path, source: WorkloadSource, *vary: str) -> ProbeSettings:
    request = ProbeRequest(workload, vary=vary, gpus=2, device="cpu", gpu_memory="416MiB")
    return resolve_probe(request, source, hardware=HERE)


def test_keys_of_a_hugging_face_config_are_arguments_of_its_model(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2", "n_layer": 2}')
    source = WorkloadSource(kind="hf_config", path=str(config), name="gpt2", digest="1", task="causal-lm")
    assert resolved(config, source, "build_model.n_layer=1,2", "seq_len=8,16").axes[1].values == (1, 2)
    for wrong in ("build_model.layers=1", "build_batch.width=1", "target_len=4"):
        with pytest.raises(InputError):
            resolved(config, source, wrong)


def test_script_arguments_stand_where_the_command_names_them(tmp_path: Path) -> None:
    argv = ("--lr", "{lr}", "--config", "{ds_config}")
    source = WorkloadSource(kind="script", path=str(tmp_path / "train.py"), name="train", digest="1", argv=argv)
    question = resolved(tmp_path / "train.py", source, "args.lr=1e-3,2e-3")
    assert [apply_to_source(source, {"args.lr": value}).argv[1] for value in question.axes[1].values] == [
        "0.001",
        "0.002",
    ]
    for wrong in ("args.depth=1", "build_model.depth=1", "seq_len=8"):
        with pytest.raises(InputError, match=r"train\.py"):
            resolved(tmp_path / "train.py", source, wrong)
    with pytest.raises(InputError, match="--keep-checkpointing keeps what the script does"):
        resolved(tmp_path / "train.py", replace(source, keeps_checkpointing=True), "checkpointing=on")
    with pytest.raises(InputError, match="a training script's arguments"):
        ask(tmp_path, "args.lr=1")


def test_vary_replaces_an_axis_of_a_shipped_experiment(tmp_path: Path) -> None:
    question = ask(tmp_path, "rung=zero3-offload,zero3-nvme", experiment="offload")
    assert {axis.name: axis.values for axis in question.axes} == {
        "rung": ("zero3-offload", "zero3-nvme"), "pin_memory": (True, False),
    }  # fmt: skip
    assert len(list(ask(tmp_path, experiment="nccl").cells())) == 8
    assert len(list(ask(tmp_path, experiment="stages").cells())) == 6
    assert len(list(ask(tmp_path, experiment="precision").cells())) == 2
    with pytest.raises(InputError, match="nccl, offload, precision, stages"):
        ask(tmp_path, experiment="nonsense")


def test_fewer_ranks_than_the_nodes_hold_leave_nodes_alone(tmp_path: Path) -> None:
    settings = ask(tmp_path, gpus="1,2,4", nodes=2, address="auto").settings
    assert (settings.gpus, settings.nodes) == (4, 2)
    smaller = [apply_conditions(settings, {"gpus": count}) for count in (1, 2, 4)]
    assert [one.nodes for one in smaller] == [1, 1, 2]


def test_a_forecast_is_asked_of_a_machine_that_is_not_here(tmp_path: Path) -> None:
    said = {"device": "cuda", "gpu_memory": None, "forecast_only": True, "on": "a100-80gb"}
    question = ask(tmp_path, gpus="1,8,16", **said)
    assert question.machine is not None
    assert question.settings.device_bytes == question.machine.device_bytes > 70 * 2**30
    assert question.settings.gpus == 16
    assert question.capacity
    assert question.settings.base == {"bf16": {"enabled": True}}
    assert ask(tmp_path, gpus=1, **(said | {"on": "v100-16gb"})).settings.base == {"fp16": {"enabled": True}}


def test_a_real_card_is_asked_for_trials(tmp_path: Path) -> None:
    here = Hardware(cpu="EPYC", cores=2, host_bytes=2**36, host_free_bytes=2**35, cards=(CARD,) * 2)
    question = ask(tmp_path, hardware=here, device="cuda", gpu_memory=None)
    assert question.settings.device_bytes == CARD.total_bytes
    with pytest.raises(InputError, match="this machine shows 2 GPUs"):
        ask(tmp_path, hardware=here, device="cuda", gpu_memory=None, gpus="2,4")


def test_nvme_of_a_machine_that_is_not_here_need_not_be_a_folder_here(tmp_path: Path) -> None:
    said = {"device": "cuda", "gpu_memory": "80GiB", "forecast_only": True, "gpus": 8}
    assert ask(tmp_path, **said).settings.nvme_path is None
    assert ask(tmp_path, nvme_path="/no/such/nvme", **said).settings.nvme_path == Path("/no/such/nvme")
    with pytest.raises(InputError, match="not a folder"):
        ask(tmp_path, nvme_path="/no/such/nvme")
