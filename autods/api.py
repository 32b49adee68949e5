"""The Python API: what the command line does, as functions. The same checks, the same errors, the same result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .events import Listener
from .report.results import Report
from .requests import Settings, check_nodes, resolve, typed, whole
from .types import WorkloadSource

if TYPE_CHECKING:
    from .forecast.values import ForecastListener
    from .prober.request import Question as ProbeQuestion
    from .report.results import Forecast, ProbeReport
    from .requests import Question
    from .system.host import Hardware
    from .workload.protocol import Workload


def find_best_config(
    workload: str | Path | Workload,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    address: str | None = None,
    device: str = "cuda",
    gpu_memory: str | int | None = None,
    global_batch: int | None = None,
    precision: str = "auto",
    base_config: str | Path | Mapping[str, Any] | None = None,
    config: str = "default",
    ladder: str | Sequence[str] = (),
    strategies: Sequence[str | Path] = (),
    nvme_path: str | Path | None = None,
    task: str | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
    zero_init: bool = False,
    kind: str | None = None,
    script_args: Sequence[str] = (),
    out: str | Path | None = None,
    seed: int = 0,
    forecast: bool = True,
    objective: str = "samples",
    stop: str | None = None,
    max_trials: int | None = None,
    max_time: str | float | None = None,
    fresh: bool = False,
    on_event: Listener | None = None,
) -> Report:
    """The fastest DeepSpeed config that fits, found by real trials: `autods fit` as a function.

    workload: a `model.py`, a Hugging Face `config.json` or its folder, a `Workload(build_model=…, build_batch=…)`, or
    a training script, whose arguments are `script_args`, with placeholders such as '{ds_config}'.
    kind: 'model', 'script' or a kind of script, where what the file shows is not to decide.
    task, seq_len, target_len: of a Hugging Face config; a build_batch that takes `seq_len` is given it.
    zero_init: under stage 3 the model of a Hugging Face config is split while it is built, as `HfDeepSpeedConfig` does.
    gpus: ranks, of all nodes together. nodes: of the Ray cluster at `address` ('auto' or 'HOST:PORT') over which they
    are spread, as many on each; without an address they run on this machine.
    gpu_memory: bytes or '416MiB', a budget for each rank; needed for nothing but a smaller card or `device="cpu"`.
    forecast: False tries every rung, even those that cannot fit by the forecast.
    objective: 'samples', 'tokens' (the most a second) or 'memory' (the least of the device).
    stop: 'first-fit' takes the first rung that fits, 'fastest' races all that could be faster; else as the config says.
    max_trials, max_time: after so many trials, or seconds in them ('20m'), nothing more is raced or tuned.
    fresh: forget the journal in `out`; otherwise finished trials are not run again.
    on_event: called with each `events.Event` while it works.

    That nothing fits is a result (`report.status == "nothing_fits"`). Raises `InputError` for wrong input,
    `EnvironmentBroken` when the machine lacks something, `Interrupted` on Ctrl-C.
    """
    asked = {name: value for name, value in locals().items() if name not in ("workload", "fresh", "on_event")}
    settings = settle(workload, **asked)
    return run_fit(settings, on_event or _ignore, fresh)


def settle(workload: str | Path | Workload, **asked: Any) -> Settings:
    """Check the workload and what was asked (by `find_best_config`'s names) against this machine. Raises InputError."""
    asked = _one_world(typed(asked))
    source = _source_to_try(workload, asked)
    return resolve(source, hardware=_hardware(asked), **_with_tuples(asked))


def _hardware(asked: Mapping[str, Any]) -> Hardware:
    """This machine's, or that of the weakest node of a cluster that may be used."""
    from .system.host import read_hardware

    if asked.get("address") is None:
        return read_hardware()
    from .runner.placement import weakest_of

    check_nodes(asked.get("nodes"), asked["address"])
    return weakest_of(asked["address"], gpus=asked.get("gpus"), nodes=asked.get("nodes") or 1, device=asked["device"])


def plan(
    workload: str | Path | Workload,
    *,
    gpus: int | None = None,
    nodes: int | None = None,
    on: str | None = None,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    nvme: str | int | None = None,
    nvme_path: str | Path | None = None,
    device: str = "cuda",
    task: str | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
    kind: str | None = None,
    script_args: Sequence[str] = (),
    micro_batch: int | None = None,
    global_batch: int | None = None,
    precision: str = "auto",
    checkpointing: str | bool | None = None,
    zero_init: bool = False,
    as_written: bool = False,
    base_config: str | Path | Mapping[str, Any] | None = None,
    ladder: str | Sequence[str] = (),
    strategies: Sequence[str | Path] = (),
    largest: bool = True,
    on_event: ForecastListener | None = None,
) -> Forecast:
    """What every rung of the ladder needs on every tier, without a GPU and without a trial: `autods plan`.

    workload: a `model.py`, a Hugging Face `config.json` or its folder, a `Workload`, or a training script, whose
    arguments are `script_args`, with placeholders such as '{ds_config}'; kind: as for `find_best_config`.
    on: machines of the catalogue, 'a100-80gb,h100-80gb' or 'all'; else `gpu_memory`, `host_memory` and `nvme`, in
    bytes or as '80GiB', else this machine's cards.
    on_event: called with each `forecast.values` value while it works, from any thread.

    Raises InputError for wrong input, EnvironmentBroken when nothing can be simulated here, Interrupted on Ctrl-C.
    """
    asked = {name: value for name, value in locals().items() if name not in ("workload", "on_event")}
    if isinstance(checkpointing, bool):
        asked["checkpointing"] = "on" if checkpointing else "off"
    return run_plan(ask(workload, **asked), on_event or _ignore)


def ask(workload: str | Path | Workload, **asked: Any) -> Question:
    """Check the workload and what was asked (by `plan`'s names). Raises InputError."""
    from .requests import pose
    from .system.host import read_hardware

    asked = _one_world(typed(asked))
    recompute = False if asked.get("checkpointing") == "off" else None
    source = _source(workload, asked, folder=Path("autods-out"), recompute=recompute)
    return pose(source, hardware=read_hardware(), **_with_tuples(asked))


def run_plan(question: Question, listen: ForecastListener) -> Forecast:
    """Run the plan."""
    from .planner.plan import plan

    return plan(question, listen=listen)


def probe(
    workload: str | Path | Workload,
    *,
    vary: Sequence[str] | Mapping[str, Iterable[Any]] = (),
    experiment: str | Path | None = None,
    gpus: int | str | Sequence[int] | None = None,
    nodes: int | None = None,
    address: str | None = None,
    device: str = "cuda",
    gpu_memory: str | int | None = None,
    capacity: bool = False,
    parallel_trials: int = 1,
    forecast_only: bool = False,
    on: str | None = None,
    host_memory: str | int | None = None,
    repeats: int | None = None,
    steps: int | None = None,
    global_batch: int | None = None,
    precision: str = "auto",
    base_config: str | Path | Mapping[str, Any] | None = None,
    as_written: bool = False,
    config: str = "default",
    ladder: str | Sequence[str] = (),
    strategies: Sequence[str | Path] = (),
    nvme_path: str | Path | None = None,
    task: str | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
    zero_init: bool = False,
    kind: str | None = None,
    script_args: Sequence[str] = (),
    out: str | Path | None = None,
    forecast: bool = True,
    seed: int = 0,
    fresh: bool = False,
    on_event: Listener | None = None,
) -> ProbeReport:
    """A table of real trials, one cell for each combination of what is varied: `autods probe` as a function.

    vary: {'rung': ['zero1', 'zero2'], 'micro_batch': [1, 2, 4]}, or lines as on the command line. experiment: axes of a
    file in `configs/experiments`, or of one of your own. gpus: several are an axis. nodes, address: as for
    `find_best_config`, for the most ranks; a cell with fewer leaves nodes alone.
    capacity: look for the largest micro batch of each cell, by the forecast and then by trials at its boundary.
    parallel_trials: cells that are searched at a time, as far as cards or processors are free; speeds are told of
    trials that had their machine to themselves.
    forecast_only: the forecast alone, for the machine `on` of the catalogue, or for `gpu_memory` and `host_memory`.
    repeats: how often each cell is measured, in turns. steps: timed steps of a trial.
    script_args: of a training script; `args.NAME` is what stands for {NAME} in them.

    That no cell fits is a result (`report.status == "nothing_fits"`). Raises `InputError` for wrong input,
    `EnvironmentBroken` when the machine lacks something, `Interrupted` on Ctrl-C.
    """
    asked = {name: value for name, value in locals().items() if name not in ("workload", "fresh", "on_event")}
    return run_probe(ask_probe(workload, **asked), on_event or _ignore, fresh)


def ask_probe(workload: str | Path | Workload, **asked: Any) -> ProbeQuestion:
    """Check the workload and what was asked (by `probe`'s names) against this machine. Raises InputError."""
    from .prober.request import most_ranks
    from .prober.request import settle as settle_probe

    asked = typed(asked)
    source = _source_to_try(workload, asked)
    ranks = most_ranks(asked.get("gpus"), asked.get("vary", ())) if asked.get("address") else None
    return settle_probe(workload, source, hardware=_hardware({**asked, "gpus": ranks}), **_with_tuples(asked))


def run_probe(question: ProbeQuestion, listen: Listener, fresh: bool) -> ProbeReport:
    """Run the probe; imported late, because it brings Ray."""
    from .prober.run import probe

    return probe(question, listen=listen, fresh=fresh)


def _one_world(asked: dict[str, Any]) -> dict[str, Any]:
    """gpus is one number; only a probe has several."""
    return asked if asked.get("gpus") is None else {**asked, "gpus": whole("gpus", asked["gpus"])}


def _source_to_try(workload: str | Path | Workload, asked: dict[str, Any]) -> WorkloadSource:
    """As `_source`, for trials; a pickled workload goes into their output folder."""
    folder = Path(asked.get("out") or "autods-out")
    return _source(workload, asked, folder=folder, zero_init=asked.pop("zero_init", False))


def _source(
    workload: str | Path | Workload,
    asked: dict[str, Any],
    *,
    folder: Path,
    recompute: bool | None = None,
    zero_init: bool = False,
) -> WorkloadSource:
    """The workload, with those of `asked` that are about it; they are taken out. zero_init: a plan has its own."""
    from .workload.load import make_source

    own = {name: asked.pop(name, None) for name in ("task", "seq_len", "target_len", "kind")}
    argv = tuple(asked.pop("script_args", ()))
    given = Path(workload) if isinstance(workload, str) else workload
    return make_source(given, folder=folder, recompute=recompute, zero_init=zero_init, argv=argv, **own)


def _with_tuples(asked: dict[str, Any]) -> dict[str, Any]:
    """A ladder may be a line or a list, folders may be text."""
    ladder = asked.get("ladder", ())
    names = tuple(name.strip() for name in ladder.split(",")) if isinstance(ladder, str) else tuple(ladder)
    return {**asked, "ladder": names, "strategies": tuple(Path(folder) for folder in asked.get("strategies", ()))}


def run_fit(settings: Settings, listen: Listener, fresh: bool) -> Report:
    """Run the fit; imported late, because it brings Ray."""
    from .tuner.fit import fit

    return fit(settings, listen=listen, fresh=fresh)


def _ignore(event: object) -> None:
    return None
