"""The training of a `model.py` or a Hugging Face config in a run: its data, and its optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ...workload.protocol import Workload, WorkloadError
from ..comparable_losses import join_samples
from ..job import RankJob
from ..model_facts import check_batch, place, seed_all
from ..model_trial import Observe, build, initialize, optimizer_step
from ..pipeline import is_pipeline
from .samples import derive_seed
from .session import Session, note, session
from .states import preserved_random_states
from .token_files import TokenDataset


def train(workload: Workload, job: RankJob, observe: Observe) -> None:
    """Train a workload until the job's order is done, on every rank. Exceptions of the user's code are passed on."""
    observe("build", 0)
    model = build(workload, job.ds_config, checkpointing=job.checkpointing)
    if is_pipeline(model):
        raise WorkloadError(
            "a PipelineModule is not trained by autods run", hint="write a script: engine.train_batch(data_iter=…)"
        )
    dataset = make_dataset(workload, job, model)
    observe("init", 0)
    engine = initialize(workload, model, job.ds_config)
    del model
    current = session(engine)
    if dataset is None:
        batches = draw_batches(workload, current, job.seed)
    else:
        batches = current.batches(dataset, collate_fn=workload.collate)
    for batch in batches:
        current.step_done(optimizer_step(workload, engine, place(batch, engine), 1, current.step, observe))


def make_dataset(workload: Workload, job: RankJob, model: Any) -> Any:
    """Return the samples of a run; None where `build_batch` makes them.

    Raises WorkloadError where the workload takes no --data, and where nothing says when training ends.
    """
    order = job.order
    assert order is not None
    if workload.build_dataset is not None:
        return workload.build_dataset(order.data)
    if order.data is None:
        if order.steps is None:
            raise WorkloadError("nothing says when the training ends", hint="give --steps")
        return None
    if not job.source.form.is_model_config:
        raise WorkloadError(
            "it defines no build_dataset, so --data has no effect",
            place=job.source.path,
            hint="add: def build_dataset(path) -> a dataset or a list of samples",
        )
    if job.source.task != "causal-lm":
        raise WorkloadError(
            f"--data is for causal-lm, and this is {job.source.task}",
            place=job.source.path,
            hint="write a model.py with build_model, build_batch and build_dataset",
        )
    with preserved_random_states():
        length = int(workload.build_batch(1)["input_ids"].shape[1])  # type: ignore[call-overload]
    return TokenDataset(order.data, length, int(model.config.get_text_config().vocab_size))


def draw_batches(workload: Workload, current: Session, seed: int) -> Iterator[Any]:
    """Yield this rank's micro batches of `build_batch`, up to the end of the run.

    Each sample is drawn alone with a seed of its own, so that the global batch is the same in any division. Where
    samples differ in shape, or none can be drawn alone, a micro batch is drawn at once.
    """
    with preserved_random_states():
        alone = _can_draw_alone(workload, seed)
    if not alone:
        note("build_batch draws no single samples of one shape: its batches depend on the micro batch")
    for step in itertools.count(current.step):
        if current.done:  # also at once: a run may be killed between its last save and its end
            return
        for first, last in current.share.spans(step):
            with preserved_random_states():
                if alone:
                    batch = join_samples([_draw(workload, seed, sample, 1) for sample in range(first, last)])
                else:
                    batch = _draw(workload, seed, first, last - first)
            yield batch


def _draw(workload: Workload, seed: int, sample: int, count: int) -> Any:
    seed_all(derive_seed(seed, sample))
    batch = check_batch(workload.build_batch(count), count)
    return dict(batch) if isinstance(batch, Mapping) else batch


def _can_draw_alone(workload: Workload, seed: int) -> bool:
    """Whether samples can be drawn one by one, and have the same shapes."""
    try:
        join_samples([_draw(workload, seed, sample, 1) for sample in range(4)])
    except Exception:  # a mistake of the user's comes up again with the micro batch
        return False
    return True
