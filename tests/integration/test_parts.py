"""Models of special parts on real ranks: pipelines, experts; and what a trial counts of DeepSpeed's collectives."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

import pytest

from autods.events import Note
from autods.forecast.predict.verdict import judge_memory
from autods.forecast.simulate import ProcessSimulator
from autods.forecast.values import EngineSpec
from autods.runner.runner import RayRunner
from autods.system.host import read_hardware
from autods.tuner.fit import fit
from autods.types import Communication, Exam, Examined, Fit, Knobs, Scalar, Steps, Trial
from autods.workload import make_source
from tests.support.fits import HERE, TORCH_ADAM, question
from tests.support.settings import fit_settings

PARAMETERS = 20_480  # of counted.py, in five layers; bf16 has two bytes for each
WHOLE = 2 * PARAMETERS
TIMED = Steps(warmup=1, timed=2, most_timed=2)
ONCE = Steps()
EXAM = Steps(warmup=1, timed=4, most_timed=4)
BUCKETS: dict[str, Scalar] = {f"zero_optimization.{name}_bucket_size": 1_000_000 for name in ("reduce", "allgather")}
# Nothing that was gathered is kept: each use gathers anew.
RELEASING: dict[str, Scalar] = {
    "zero_optimization.stage3_param_persistence_threshold": 0,
    "zero_optimization.stage3_max_reuse_distance": 0,
    "zero_optimization.stage3_max_live_parameters": 1,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
}
FP32: dict[str, Scalar] = {"bf16.enabled": False}


def ran(
    runner: RayRunner,
    rung: str,
    *,
    exam: Exam | None = None,
    steps: Steps = TIMED,
    settings: Mapping[str, Scalar] | None = None,
    **knobs: int,
) -> Fit:
    asked = Knobs(checkpointing=False, settings={**BUCKETS, **TORCH_ADAM, **(settings or {})}, **knobs)
    trial = Trial(rung=rung, knobs=asked, purpose="race", exam=exam, steps=steps)
    outcome = runner.run(trial, id=1).outcome
    assert isinstance(outcome, Fit), outcome
    return outcome


def spent(runner: RayRunner, rung: str, **said: object) -> Communication:
    found = ran(runner, rung, **said).communication  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ddp_reduces_its_gradients_once_a_step(runners, accumulation):
    ops = spent(runners("counted.py"), "ddp", accumulation=accumulation).ops
    assert set(ops) == {"all_reduce"}
    assert ops["all_reduce"].bytes == WHOLE
    assert ops["all_reduce"].sent_bytes == WHOLE  # of two ranks: 2 × 1/2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_stage_2_reduces_each_micro_batch_and_gathers_once(runners, accumulation):
    ops = spent(runners("counted.py"), "zero2", accumulation=accumulation).ops
    assert ops["all_gather"].bytes == WHOLE
    assert ops["all_reduce"].bytes == pytest.approx(accumulation * WHOLE, abs=16)  # norms and flags are a few bytes


@pytest.mark.parametrize("accumulation", [1, 2])
def test_stage_3_gathers_in_every_forward_and_backward(runners, accumulation):
    ops = spent(runners("counted.py"), "zero3", accumulation=accumulation, settings=RELEASING).ops
    assert ops["all_gather"].bytes == 2 * accumulation * WHOLE
    assert ops["all_gather"].calls == 2 * accumulation * 5
    assert ops["reduce_scatter"].bytes == accumulation * WHOLE


def test_a_measuring_trial_times_each_collective(runners):
    found = ran(runners("counted.py"), "zero3", settings=RELEASING)
    assert found.communication is not None
    assert len(found.step_s) == 2
    assert len(found.losses) == 4  # two warm up under ZeRO-3; the step in which nothing overlaps is none of them
    assert found.communication.share is not None
    assert 0 < found.communication.share < 1


def test_a_trial_of_one_step_counts_collectives_untimed(runners):
    found = spent(runners("counted.py"), "ddp", steps=ONCE)
    assert found.ops["all_reduce"].bytes == WHOLE
    assert found.share is None


def test_the_written_config_keeps_the_users_comms_logger(runners, tmp_path, monkeypatch):
    (tmp_path / "base.json").write_text('{"comms_logger": {"enabled": true, "verbose": false}}')
    runner = runners("counted.py")
    trial = Trial(rung="ddp", knobs=Knobs(checkpointing=False), purpose="race", steps=TIMED)
    assert "comms_logger" not in runner.final_config(trial)
    monkeypatch.setattr(
        runner, "settings", question("counted.py", tmp_path / "out", base_config=str(tmp_path / "base.json"))
    )
    assert runner.final_config(trial)["comms_logger"] == {"enabled": True, "verbose": False}
    assert spent(runner, "ddp").ops["all_reduce"].bytes == WHOLE


def test_the_stages_of_a_pipeline_count_as_one_replica(runners):
    runner = runners("pipe.py")
    assert (runner.facts.pipeline_stages, runner.facts.replica_ranks) == (2, 2)
    assert runner.facts.parameters == 4 * (64 * 64 + 64)
    found = ran(runner, "ddp", micro_batch=2, accumulation=4, steps=ONCE)
    assert found.samples_per_second == pytest.approx(2 * 4 / found.step_s[0])
    sent = found.communication.ops["send"]
    assert (sent.calls, sent.bytes) == (4, 4 * 2 * 64 * 2)  # a stage's output for each micro batch, in bf16


def test_the_stages_of_a_pipeline_train_on_the_same_samples(runners):
    """Its labels are its samples, turned around: with labels of other samples no loss would fall below their spread."""
    said = {"exam": "parity", "steps": Steps(warmup=0, timed=4, most_timed=4), "settings": FP32}
    one = ran(runners("pipe.py"), "ddp", micro_batch=8, accumulation=1, **said)
    other = ran(runners("pipe.py"), "ddp", micro_batch=2, accumulation=4, **said)
    assert one.losses == pytest.approx(other.losses, rel=1e-5)
    assert one.losses[-1] < one.losses[0]


@pytest.mark.parametrize(("rung", "settings"), [("ddp", FP32), ("zero1", {})])
def test_a_pipeline_evaluates_saves_and_loads(runners, rung, settings):
    examined = ran(runners("pipe.py"), rung, exam="worst_case", steps=EXAM, accumulation=2, settings=settings).examined
    assert isinstance(examined, Examined)
    assert (examined.evaluated, examined.restored, examined.left_out) == (True, True, ())
    assert examined.checkpoint_bytes > 4 * (64 * 64 + 64) * 12


def test_a_bf16_pipeline_without_zero_cannot_load(runners):
    examined = ran(runners("pipe.py"), "ddp", exam="worst_case", accumulation=2).examined
    assert examined.restored is None
    assert any("cannot load" in reason and "ZeRO-1" in reason for reason in examined.left_out)


@pytest.mark.parametrize("rung", ["ddp", "zero1", "zero2", "zero2-offload"])
def test_experts_train_evaluate_save_and_load(runners, rung):
    runner = runners("experts.py")
    assert runner.facts.experts == 4
    found = ran(runner, rung, exam="worst_case", accumulation=2)
    assert (found.examined.evaluated, found.examined.restored) == (True, True)
    assert found.communication.ops["all_to_all"].calls == 2 * 4  # there and back, in forward and in backward


def test_the_pipeline_of_a_script_is_counted_too(ray, tmp_path_factory):
    source = make_source(HERE / "scripts" / "with_pipeline.py", argv=("--deepspeed_config", "{ds_config}"))
    settings = fit_settings(
        source, hardware=read_hardware(), gpus=2, device="cpu", gpu_memory="1GiB", config="quick", precision="fp32",
        out=tmp_path_factory.mktemp("pipe"),
    )  # fmt: skip
    with RayRunner(settings, lambda event: None) as runner:
        facts, _ = runner.survey()
        assert (facts.pipeline_stages, facts.replica_ranks, facts.parameters) == (2, 2, 4 * (64 * 64 + 64))
        found = ran(runner, "ddp", micro_batch=2, accumulation=4, steps=ONCE)
    assert found.samples_per_second == pytest.approx(2 * 4 / found.step_s[0])
    assert found.communication is not None
    assert (found.communication.ops["send"].calls, found.communication.ops["send"].bytes) == (4, 4 * 2 * 64 * 4)


@pytest.fixture(scope="module")
def experts_simulator(runners):
    with ProcessSimulator(runners("experts.py").settings.source, processes=1) as simulator:
        yield simulator


@pytest.mark.parametrize("rung", ["ddp", "zero2"])
def test_experts_are_forecast_with_their_groups(runners, experts_simulator, rung):
    runner = runners("experts.py")
    asked = Knobs(checkpointing=False, micro_batch=8, settings=BUCKETS)
    trial = Trial(rung=rung, knobs=asked, purpose="race")
    ask = EngineSpec(
        rung=rung, ds_config=runner.final_config(trial), world_size=2, ranks_per_node=2, device_bytes=2**30,
        device="cpu", checkpointing=False,
    )  # fmt: skip
    simulated = experts_simulator.simulate(ask, [8])[0]
    assert simulated.further_groups == 2
    said = judge_memory(ask, simulated, limits={"device": 2**30}).memory["device"]
    assert said.low_bytes <= ran(runner, rung, micro_batch=8, steps=ONCE).device_peak_bytes <= said.high_bytes


def test_a_fit_of_a_pipeline_explains_the_rungs_it_skips(runners, tmp_path, monkeypatch):
    said = []
    runner = runners("pipe.py")

    def start(settings, listen):
        monkeypatch.setattr(runner, "settings", settings)
        monkeypatch.setattr(runner, "listen", listen)
        return contextlib.nullcontext(runner)

    settings = question("pipe.py", tmp_path, certified=True, forecast=True, global_batch=8)
    report = fit(settings, listen=said.append, start=start)
    assert report.status == "fit"
    assert report.rung == "ddp"
    assert report.ds_config["train_batch_size"] == 8
    assert report.ds_config["train_batch_size"] == report.knobs.micro_batch * report.knobs.accumulation
    assert report.reasons["zero1"] == "1 replica of the pipeline: no sharding to gain"
    assert "DeepSpeed refuses it" in report.reasons["zero2"]
    assert "DeepSpeed refuses it" in report.reasons["zero3"]
    assert any("a pipeline is not forecast" in note.text for note in said if isinstance(note, Note))
    assert not report.forecast
    assert json.loads((tmp_path / "report.json").read_text())["question"]["pipeline_stages"] == 2
