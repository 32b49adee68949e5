"""The result of `autods fit`: the config that fits, its certificate, and every trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...config.profiles import Budget
from ...devices import Device, find_device
from ...forecast.values import PartitionedBuild, RungForecast
from ...system.host import Hardware
from ...types import Knobs, Record, Skipped, Tier, TierUse
from ...workload.script_source import ScriptLaunch
from .measured import Measured
from .shown import Shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """The rate over whole optimizer steps, all ranks together. Tokens are None when a sample has no fixed length."""

    samples_per_second: float
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The least and the most samples a second that so many trials of one config measured."""

    low: float
    high: float
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosestRung:
    """The rung that came nearest to fitting, when none does.

    missing_bytes is a lower bound unless `exact`, and None when it is not known.
    """

    rung: str
    missing_bytes: int | None
    exact: bool = False
    tier: Tier = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointProof:
    """A checkpoint of the whole engine; a part that was not done is None. See `types.Examined`."""

    bytes: int | None
    save_s: float | None
    load_s: float | None
    gathered: bool | None
    restored: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The losses compared with a plain config's on the same samples, step by step, and the updates and gradients.

    `reference` is the plain config's rung.
    `largest_difference` is that of losses, relative; infinite when only one of two losses is finite.
    `update_difference` is that of the mean change of a weight in a step, relative; None where it is not known.
    `gradient_difference` is that of the first gradients' norms, relative; None where they are not known.
    `changed_by` are the knobs that changed them; setting back any of them is enough.
    `taken_back` is the one that was set back. The differences are then those of the config without it.
    """

    reference: str
    steps: int
    tolerance: float
    largest_difference: float
    within: bool
    update_difference: float | None = None
    update_tolerance: float | None = None
    gradient_difference: float | None = None
    gradient_tolerance: float | None = None
    changed_by: tuple[str, ...] = ()
    taken_back: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The result of all checks. `passed` means that everything was checked and nothing failed.

    `batch_shape` is the shape of the longest batch's largest tensor; empty when no such batch ran to its end.
    `draws` is the number of batches that it is the longest of; 0 when the workload names its longest batch.
    `skipped_steps` came on top of `optimizer_steps`; their gradients overflowed in fp16.
    `headroom_bytes` is limit less peak, for each tier with a limit.
    `headroom_kept` tells whether the longest batch left the search's headroom free on the device.
    `growth_bytes` is by how much the device's memory in use grew in each step. If it did, the device holds about
    `runs_out_after_steps` steps.
    `backed_off`, `failures` and `not_checked` are sentences.
    """

    passed: bool = False
    batch_shape: tuple[int, ...] = ()
    draws: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    evaluated: bool = False
    checkpoint: CheckpointProof | None = None
    alloc_retries: int | None = None
    headroom_bytes: Mapping[Tier, int] = field(default_factory=dict)
    headroom_kept: bool | None = None
    growth_bytes: int | None = None
    runs_out_after_steps: int | None = None
    parity: Parity | None = None
    backed_off: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitQuestion:
    """What a fit was asked: the workload, the machine and the search.

    `weights` and `lora` are those of its `WorkloadSource`.
    `gpus` are the ranks of all nodes, `threads` those of one rank. `usable_bytes` is a rank's device memory without the
    headroom of the search. `ladder` has the names of its rungs in order.
    `lacks_nvme` are the rungs that need --nvme-path, which was not given. `script` tells how to start a training
    script; it is None for any other workload, and `trainer` tells what trains that, if anything does.
    `checkpointing` is whether the model can recompute its activations. `recomputes` is whether the script lets it do
    so; None where autods does not switch that. `stood_in` and `writes_confined` are those of its `ModelFacts`.
    `ops_folder` is the folder in which trials built DeepSpeed's ops. `fingerprint` identifies the question, see
    `Settings.fingerprint`; `budget` and `forecast` are the parts of it that decide only which trials are run.
    `rehearsed_on` names the machine of the catalogue whose simulation answered the trials; None for a real fit.
    """

    workload: str = "workload"
    parameters: int | None = None
    weights: bool = False
    lora: str | None = None
    gpus: int = 1
    nodes: int = 1
    pipeline_stages: int | None = None
    experts: int = 0
    device: str = "cuda"
    device_bytes: int | None = None
    usable_bytes: int | None = None
    threads: int | None = None
    global_batch: int | None = None
    profile: str = ""
    objective: str = ""
    stop: str = ""
    ladder: tuple[str, ...] = ()
    lacks_nvme: tuple[str, ...] = ()
    script: ScriptLaunch | None = None
    trainer: ScriptLaunch | None = None
    checkpointing: bool | None = None
    recomputes: bool | None = None
    stood_in: tuple[str, ...] = ()
    writes_confined: bool | None = None
    ops_folder: str | None = None
    fingerprint: str = ""
    budget: Budget = field(default_factory=Budget)
    forecast: bool = True
    rehearsed_on: str | None = None

    @property
    def ranks_per_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FitReport(Shown):
    """The result of a fit. `rung`, `knobs`, `ds_config` and `throughput` are None when nothing fits.

    `throughput` is the median of all timed trials of the winner, and `spread` their ends; None in reports of before it
    was kept. `memory` has the winner's largest peaks; a tier that was not measured is absent. `certificate` is None
    where nothing was examined. `importances` maps a tuned key to its share of the variation in throughput.

    `reasons` maps a rung, or a variant of it, to why it was left or chosen. Its entries "grow", "tune" and "certify"
    say why these steps stopped. "batch" says how many samples an optimizer step trains on, and why.

    `real_fit_seconds` is what the trials of a rehearsal and the certificate would take on real ranks, by estimate; None
    for a real fit, which took `seconds`.

    `variables` are environment variables that the config needs.
    `warnings` are sentences on what slowed the machine while it measured.
    """

    status: Literal["fit", "nothing_fits"]
    rung: str | None = None
    knobs: Knobs | None = None
    ds_config: Mapping[str, Any] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    throughput: Throughput | None = None
    spread: Spread | None = None
    memory: Mapping[Tier, TierUse] = field(default_factory=dict)
    certificate: Certificate | None = None
    forecast: tuple[RungForecast, ...] = ()
    trials: tuple[Record, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    importances: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    largest_micro_batch: int | None = None
    closest: ClosestRung | None = None
    partitioned: PartitionedBuild | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: Hardware | None = None
    question: FitQuestion = FitQuestion()
    seconds: float = 0.0
    real_fit_seconds: float | None = None
    out: str = ""

    @property
    def device(self) -> Device:
        """The device of the fit's ranks."""
        return find_device(self.question.device)

    def answer_with(self, config: Measured, knobs: Knobs) -> FitReport:
        """This report with the config as its answer, which has these knobs: its rung, rate, spread and memory."""
        return replace(
            self,
            status="fit",
            rung=config.trial.rung,
            knobs=knobs,
            throughput=Throughput(
                samples_per_second=config.samples_per_second, tokens_per_second=config.tokens_per_second
            ),
            spread=Spread(
                low=config.low_samples_per_second, high=config.high_samples_per_second, trials=len(config.fits)
            ),
            memory=config.memory,
        )
