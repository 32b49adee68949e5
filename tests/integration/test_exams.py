"""What a trial does besides training, on real CPU ranks: the worst case, and losses that two configs share."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

import pytest

from autods.report.results.fit import Parity
from autods.runner.runner import RayRunner
from autods.tuner.loss_parity import compare_fits, describe_difference
from autods.types import Exam, Examined, Fit, Knobs, Outcome, OutOfMemory, Scalar, Steps, Trial
from tests.support.fits import TORCH_ADAM

TOLERANCE = 1e-5  # relative, fp32: measured up to 3e-7 between configs that cut and shard the same training
# A loss in bf16 has 8 bits: what is honest could not be told from what is not. Small buckets: 1 GiB is the budget.
BUCKETS = {f"zero_optimization.{name}_bucket_size": 1_000_000 for name in ("reduce", "allgather")}
FP32 = {"bf16.enabled": False, **BUCKETS}
FIVE = Steps(warmup=1, timed=4, most_timed=4)


def explain_failure(runner: RayRunner, rung: str, exam: Exam | None, steps: Steps = FIVE, **knobs: object) -> Outcome:
    asked = Knobs(checkpointing=False, **knobs)  # type: ignore[arg-type]
    trial = Trial(rung=rung, knobs=asked, purpose="certify", exam=exam, steps=steps)
    return runner.run(trial, id=1).outcome


def worst_case(runner: RayRunner, rung: str, steps: Steps = FIVE, **knobs: object) -> Examined:
    outcome = explain_failure(runner, rung, "worst_case", steps, **knobs)
    assert isinstance(outcome, Fit), outcome
    assert outcome.examined is not None
    return outcome.examined


@pytest.mark.parametrize(("rung", "gathered"), [("ddp", None), ("zero2", None), ("zero3", True)])
def test_a_tiny_model_passes_the_worst_case(runners, rung, gathered):
    examined = worst_case(runners(), rung)
    assert examined.draws == 16
    assert examined.batch_shape == (1, 16)
    assert examined.evaluated
    assert examined.restored
    assert examined.gathered is gathered
    assert examined.checkpoint_bytes > 577 * 12
    assert examined.growth_bytes == 0
    assert examined.left_out == ()


def test_a_leak_of_32_mib_a_step_is_seen(runners):
    assert worst_case(runners("leaking.py"), "ddp").growth_bytes == pytest.approx(32 * 2**20, rel=0.01)


def test_only_training_steps_are_timed_and_have_a_loss(runners):
    outcome = explain_failure(runners(), "zero1", "worst_case", Steps(warmup=1, timed=2, most_timed=2))
    assert isinstance(outcome, Fit), outcome
    assert len(outcome.step_s) == 2
    assert len(outcome.losses) == 3


def test_the_longest_batch_is_the_workloads_own(runners):
    examined = worst_case(runners("lengths.py"), "ddp")
    assert examined.draws == 0
    assert examined.batch_shape == (1, 65536)


def test_a_longest_batch_can_run_out_where_training_fits(runners):
    runner = runners("lengths.py")
    assert isinstance(explain_failure(runner, "ddp", None, Steps(), micro_batch=32), Fit)
    ran_out = explain_failure(runner, "ddp", "worst_case", Steps(), micro_batch=32)
    assert isinstance(ran_out, OutOfMemory), ran_out
    assert (ran_out.tier, ran_out.phase) == ("device", "forward")


def test_an_evaluation_that_does_not_fit_is_a_failure_of_the_trial(runners):
    ran_out = explain_failure(runners("lengths.py"), "ddp", "worst_case", Steps(), micro_batch=2)
    assert isinstance(ran_out, OutOfMemory), ran_out
    assert (ran_out.tier, ran_out.phase) == ("device", "evaluate")


@pytest.fixture
def small_disk(runners):
    """The trials' folders on a file system of 4 MiB."""
    runner = runners("lengths.py")
    logs = runner.settings.out / "logs"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(logs)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small file system")
    yield runner
    subprocess.run(["umount", "--lazy", str(logs)], check=True)


def test_a_checkpoint_too_large_for_the_disk_is_skipped(small_disk):
    examined = worst_case(small_disk, "ddp")
    assert examined.evaluated
    assert examined.checkpoint_bytes is None
    assert examined.save_s is None
    assert examined.restored is None
    (reason,) = examined.left_out
    assert "about 7.8 MiB of disk are needed and 4.0 MiB are free" in reason


def losses(
    runner: RayRunner, rung: str, *, settings: Mapping[str, Scalar] = FP32, **knobs: object
) -> tuple[float, ...]:
    outcome = explain_failure(runner, rung, "parity", settings=settings, **knobs)
    assert isinstance(outcome, Fit), outcome
    assert len(outcome.losses) == 5
    return outcome.losses


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(mine - theirs) / theirs for mine, theirs in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def plain(runners) -> tuple[float, ...]:
    """The losses of plain data parallelism, all samples of a rank in one micro batch."""
    return losses(runners("lengths.py"), "ddp", micro_batch=4)


@pytest.mark.parametrize(
    ("rung", "micro_batch", "accumulation"), [("ddp", 4, 1), ("zero1", 1, 4), ("zero3", 4, 1), ("zero3", 2, 2)]
)
def test_losses_do_not_depend_on_sharding_or_accumulation(runners, plain, rung, micro_batch, accumulation):
    found = losses(runners("lengths.py"), rung, micro_batch=micro_batch, accumulation=accumulation)
    assert apart(found, plain) < TOLERANCE


@pytest.mark.parametrize(
    "broken",
    [
        {"optimizer.params.lr": 1.1e-4, **TORCH_ADAM},
        {"scheduler.type": "WarmupLR", "scheduler.params.warmup_num_steps": 10},
    ],
    ids=["another learning rate", "a warm-up"],
)
def test_a_knob_that_changes_the_training_changes_the_losses(runners, plain, broken):
    found = losses(runners("lengths.py"), "zero1", micro_batch=4, settings={**FP32, **broken})
    assert found[0] == pytest.approx(plain[0], rel=TOLERANCE)
    assert apart(found, plain) > 10 * TOLERANCE


@pytest.mark.parametrize("settings", [BUCKETS, FP32], ids=["bf16", "fp32"])
def test_gradient_norms_show_what_losses_and_updates_hide(runners, settings):
    def compare(rung: str, accumulation: int) -> Parity:
        fits = [
            explain_failure(runners("wrong_gradients.py"), each, "parity", settings=settings, **cut)
            for each, cut in (
                (rung, {"micro_batch": 4 // accumulation, "accumulation": accumulation}),
                ("ddp", {"micro_batch": 4}),
            )
        ]
        assert all(isinstance(fit, Fit) for fit in fits), fits
        return compare_fits(*fits, tolerance=0.02, rung="ddp")  # type: ignore[arg-type]

    right, wrong = compare("zero1", 2), compare("zero2", 1)
    assert right.within
    assert right.gradient_difference < 0.01
    assert not wrong.within
    assert wrong.gradient_difference == pytest.approx(2 / 3, rel=0.02)
    assert describe_difference(wrong) == "gradient norms differ by 67 % from ddp's, tolerance 5 %"


def test_the_size_of_updates_shows_a_learning_rate_that_bf16_hides(runners):
    def update_size(rung: str, **settings: Scalar) -> float:
        outcome = explain_failure(
            runners("lengths.py"), rung, "parity", settings={**BUCKETS, **TORCH_ADAM, **settings}, micro_batch=4
        )
        assert isinstance(outcome, Fit), outcome
        assert outcome.update_size is not None
        return outcome.update_size

    plain = update_size("ddp")
    assert update_size("zero3") == pytest.approx(plain, rel=0.003)
    assert update_size("zero1", **{"optimizer.params.lr": 1.1e-4}) == pytest.approx(1.1 * plain, rel=0.01)
