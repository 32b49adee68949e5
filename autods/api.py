"""The Python API: what the command line does, as functions. The same checks, the same errors, the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .report import Report
from .settings import Settings, resolve
from .values import Event, Listener

if TYPE_CHECKING:
    from .workload import Workload


def find_best_config(
    workload: str | Path | Workload,
    *,
    gpus: int | None = None,
    device: str = "cuda",
    gpu_memory: str | int | None = None,
    global_batch: int | None = None,
    precision: str = "auto",
    base_config: str | Path | Mapping[str, Any] | None = None,
    config: str = "default",
    ladder: str | Sequence[str] = (),
    strategies: Sequence[str | Path] = (),
    nvme_path: str | Path | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    fresh: bool = False,
    on_event: Listener | None = None,
) -> Report:
    """The fastest DeepSpeed config that fits, found by real trials: `autods fit` as a function.

    workload: a `model.py`, or a `Workload(build_model=…, build_batch=…)`.
    gpu_memory: bytes or '416MiB', a budget for each rank; needed for nothing but a smaller card or `device="cpu"`.
    fresh: forget the journal in `out`; otherwise finished trials are not run again.
    on_event: called with each `values.Event` while it works.

    That nothing fits is a result (`report.status == "nothing_fits"`). Raises `InputError` for wrong input,
    `EnvironmentBroken` when the machine lacks something, `Interrupted` on Ctrl-C.
    """
    settings = settle(
        workload,
        gpus=gpus,
        device=device,
        gpu_memory=gpu_memory,
        global_batch=global_batch,
        precision=precision,
        base_config=base_config,
        config=config,
        ladder=ladder,
        strategies=strategies,
        nvme_path=nvme_path,
        out=out,
        seed=seed,
    )
    return run_fit(settings, on_event or _ignore, fresh)


def settle(workload: str | Path | Workload, **asked: Any) -> Settings:
    """Check the workload and what was asked (by `find_best_config`'s names) against this machine. Raises InputError."""
    from .hardware import look
    from .workload import source_of

    out = asked.get("out")
    source = source_of(
        Path(workload) if isinstance(workload, str) else workload,
        folder=Path(out) if out is not None else Path("autods-out"),
    )
    ladder = asked.get("ladder", ())
    asked["ladder"] = tuple(name.strip() for name in ladder.split(",")) if isinstance(ladder, str) else tuple(ladder)
    asked["strategies"] = tuple(Path(folder) for folder in asked.get("strategies", ()))
    return resolve(source, hardware=look(), **asked)


def run_fit(settings: Settings, listen: Listener, fresh: bool) -> Report:
    """Run the fit; imported late, because it brings Ray."""
    from .fit import fit

    return fit(settings, listen=listen, fresh=fresh)


def _ignore(event: Event) -> None:
    return None
