"""What holds of all cells, for whoever reads the table."""

from __future__ import annotations

from .question import Question


def notes_of(question: Question) -> tuple[str, ...]:
    """Sentences: what was assumed, and what this device cannot show."""
    names = [axis.name for axis in question.axes]
    said = [f"assumed: {one}" for one in question.assumed]
    if not question.capacity and "micro_batch" not in names:
        micro_batch = question.settings.base.get("train_micro_batch_size_per_gpu")
        said += [] if isinstance(micro_batch, int) else ["assumed: micro batch 1 (--vary micro_batch=…)"]
    if question.settings.device != "cpu" or question.forecast_only:
        return tuple(said)
    if any(name.startswith("env.NCCL_") for name in names):
        said.append("CPU ranks talk through gloo: NCCL's variables change nothing here")
    if any("pin_memory" in name for name in names):
        said.append("on CPU ranks no memory is pinned for the CPU's Adam: pin_memory shows on GPUs")
    rungs = {rung.name: rung for rung in question.settings.ladder}
    if any("host" in rung.places.values() for rung in rungs.values()):
        said.append("on CPU ranks the device's memory is host memory: offloading to the CPU saves nothing here")
    return tuple(said)
