"""The values that flow through autods: trials, knobs, outcomes, records, facts of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from .units import escape_controls, format_factor

Tier = Literal["device", "host", "pinned", "shm", "nvme"]
TIERS: tuple[Tier, ...] = ("device", "host", "pinned", "nvme")  # forecast and measured; shm is watched and diagnosed
TIERS_OF_A_NODE: tuple[Tier, ...] = ("host", "nvme")  # the others are a rank's
_LACKS: Mapping[Tier, str] = {"shm": "/dev/shm", "nvme": "disk space"}
_GROWN_BESIDE = 64 * 2**20  # bytes of kernels and libraries that are loaded after the first step
# The activity of a rank. The order is that of a trial; the heartbeat stores the index. In "script" a run's script works
# between the calls of its engine.
Phase = Literal[
    "start", "rendezvous", "build", "init", "compile", "forward", "backward", "step", "script", "evaluate", "save",
    "load", "done",
]  # fmt: skip
PHASES: tuple[Phase, ...] = get_args(Phase)
FailureKind = Literal[
    "memory_pressure", "config", "toolchain", "communication", "secondary", "user_code", "infrastructure", "unknown"
]
Action = Literal["leaner_rung", "less_host_memory", "fix_environment", "fix_config", "fix_code", "retry", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """Peak bytes on one tier: per rank for `device` and `pinned`, per node for `host` and `nvme`.

    `in_use_bytes` is the peak of a card without what torch's allocator caches; None elsewhere.
    """

    peak_bytes: int
    limit_bytes: int | None = None
    in_use_bytes: int | None = None

    @property
    def counted_bytes(self) -> int:
        """What counts against a limit: the peak in use where that is known."""
        return self.peak_bytes if self.in_use_bytes is None else self.in_use_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """Peak bytes of the fullest rank's card: allocated and reserved by torch's allocator, and used as NVML counts.

    `nvml_bytes` includes the CUDA context, NCCL and kernels. `in_use_bytes` is the same without the allocator's cache.
    """

    allocated_bytes: int
    reserved_bytes: int
    nvml_bytes: int | None = None
    in_use_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The parts of a trial's wall time in seconds. `overhead_s` is `wall_s` without `build_s` and `steps_s`."""

    wall_s: float
    build_s: float = 0.0
    init_s: float = 0.0
    steps_s: float = 0.0
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The results of a `worst_case` trial. A part that was skipped is None, and `left_out` says why in a sentence.

    `batch_shape` is the shape of the largest tensor of the batch. The batch is the longest of `draws` batches of
    `build_batch`; with 0 draws `build_longest_batch` made it. `growth_bytes` is the growth of the device's memory from
    step to step.
    """

    batch_shape: tuple[int, ...]
    draws: int
    growth_bytes: int | None = None  # None: the steps were too few to tell
    evaluated: bool = False
    checkpoint_bytes: int | None = None  # on disk, of all ranks of the fullest node
    save_s: float | None = None
    load_s: float | None = None
    gathered: bool | None = None  # stage 3 gathered the whole weights; None: nothing to gather
    restored: bool | None = None  # the loaded engine evaluates to the loss of the saved one
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A digest of the samples that a script's parity trial trained on, and the sum of its first weights' magnitudes.

    Losses of two trials can be compared when both values agree. A value that was not observed is None.
    """

    samples: str | None
    weights: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective in an optimizer step, on the rank that used it most.

    `bytes` is the size of the whole tensors, `sent_bytes` the least that a rank sends for them by the ring algorithm.
    `seconds` is the time without overlap and without waiting for slower ranks, or None if it was not measured.
    """

    calls: int
    bytes: int
    sent_bytes: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """The collectives of one optimizer step by name, such as all_reduce, all_gather and reduce_scatter.

    `step_s` is the time of the step in which they ran one by one, without overlap, or None if it was not measured.
    """

    ops: Mapping[str, Collective]
    step_s: float | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by all collectives."""
        return sum(op.sent_bytes for op in self.ops.values())

    @property
    def share(self) -> float | None:
        """Their share of the step without overlap; None where a collective was not timed."""
        seconds = [op.seconds for op in self.ops.values()]
        if self.step_s is None or None in seconds:
            return None
        return sum(value for value in seconds if value is not None) / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The slowest rank of a job: its forward takes `ratio` times as long as the median rank's."""

    rank: int
    ratio: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is the slowest: its forward takes {format_factor(self.ratio)} × as long as the median"
            " rank's, and all wait for it (see what else runs on its card or processors, and whether its samples are"
            " longer)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The trial ran whole optimizer steps within the limit."""

    memory: Mapping[Tier, TierUse]
    samples_per_second: float
    tokens_per_second: float | None
    step_s: tuple[float, ...]  # seconds of each timed optimizer step, slowest rank
    spread: float  # relative standard error of the median step
    losses: tuple[float, ...]  # one per optimizer step, warm-up included: rank 0's; in a parity trial the mean of all
    timing: Timing
    skipped_steps: int = 0  # besides: fp16 gradients overflowed, so that the optimizer did not run
    alloc_retries: int = 0  # after the first step: the device's allocator found nothing free and had to flush its cache
    examined: Examined | None = None
    trained: Trained | None = None  # of a script's parity trial
    update_size: float | None = None  # of a parity trial: mean change of a weight in an optimizer step
    gradient_norms: tuple[float, ...] = ()  # of a parity trial: before clipping, one for each optimizer step
    communication: Communication | None = None
    card: CardUse | None = None  # of a CUDA rank
    slowest: SlowRank | None = None  # where one rank is slower than noise explains
    kind: Literal["fit"] = "fit"

    @property
    def device_peak_bytes(self) -> int:
        """Peak bytes in use on the fullest rank's device, which decide whether a trial leaves the headroom.

        What torch's allocator caches does not count: it gives that back to make room. If it had to after the first
        step, the trial has `alloc_retries`.
        """
        use = self.find_use("device")
        assert use is not None
        return use.counted_bytes

    def find_use(self, tier: Tier) -> TierUse | None:
        """The peak on the tier, that of a card with what was in use; None where the trial does not measure the tier."""
        use = self.memory.get(tier)
        if use is None or tier != "device" or self.card is None:
            return use
        return replace(use, in_use_bytes=self.card.in_use_bytes)

    def leaves_headroom(self, usable_bytes: float, knobs: Knobs) -> bool:
        """Whether it ran within the usable memory, and its allocator never had to flush its cache to do so.

        One whose `knobs` keep it out of the headroom may: what that costs is in the time of its steps.
        """
        return self.is_within(usable_bytes, knobs) and (knobs.keeps_headroom or not self.alloc_retries)

    def is_within(self, usable_bytes: float, knobs: Knobs) -> bool:
        """Whether its peak is within the usable memory.

        With `knobs` that keep its allocator out of the headroom, what lies beside it may have grown a little since its
        limit was set.
        """
        return self.device_peak_bytes <= usable_bytes + (_GROWN_BESIDE if knobs.keeps_headroom else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A tier was full. `wanted_bytes` is the allocation that failed, `free_bytes` what was left of the limit.

    Rank −1 is the process that forks the ranks. `action` and `advice` come from `diagnosis`.
    """

    tier: Tier
    rank: int
    phase: Phase
    evidence: str
    step: int = 0
    wanted_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    fragmented: bool = False  # the device's allocator held enough free memory, but in pieces
    action: Action = "leaner_rung"
    advice: str = ""
    kind: Literal["out_of_memory"] = "out_of_memory"

    @property
    def lacked(self) -> str:
        """What was lacking, after "out of"."""
        return name_lack(self.tier)

    @property
    def missing_bytes(self) -> int | None:
        """A lower bound of the bytes that were missing: the failed allocation less the free bytes."""
        if self.wanted_bytes is None:
            return None
        return max(1, self.wanted_bytes - (self.free_bytes or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The trial failed for a reason other than memory, or an unknown one. Rank −1 is the node or the driver.

    `op` is the broken DeepSpeed op; only rungs that need it fail alike. With `wants_larger_batch` the model cannot
    train with so small a micro batch (batch normalisation of one sample, say). `own_batch` is the micro batch of a
    script whose command line cannot change it. `hung_at` is the line of the user's code where the rank was stuck, if it
    did not wait for another rank there.
    """

    failure: FailureKind
    rank: int
    phase: Phase
    evidence: str
    action: Action
    advice: str
    step: int = 0
    op: str | None = None
    wants_larger_batch: bool = False
    own_batch: int | None = None
    hung_at: str | None = None
    kind: Literal["failed"] = "failed"


Outcome = Fit | OutOfMemory | Failed


def is_machines_fault(outcome: Outcome) -> bool:
    """Whether the machine needs a fix first: a full disk, a lost GPU, a missing compiler."""
    return not isinstance(outcome, Fit) and outcome.action == "fix_environment"


def may_have_lost_device(outcome: Outcome) -> bool:
    """Whether a card, a link or a node that is gone could explain it."""
    return isinstance(outcome, Failed) and outcome.failure in ("infrastructure", "communication", "unknown")


def name_lack(tier: Tier) -> str:
    """What a full tier lacks, after "out of": 'device memory'; of a disk, NVMe or a checkpoint's, 'disk space'."""
    return _LACKS.get(tier, f"{tier} memory")


def first_line(text: str, most: int = 160) -> str:
    """Return the first line that is not blank, cut to `most` characters, as a terminal may show it."""
    line = escape_controls(next((" ".join(line.split()) for line in text.splitlines() if line.strip()), ""))
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


MOST_RANKS = 100_000  # of a job, and of a machine of the catalogue
# The part of the search that a trial belongs to, or "probe".
Purpose = Literal["walk", "shortfall", "grow", "race", "tune", "verify", "certify", "probe"]
# What a trial does besides training steps on `build_batch`. worst_case: its steps run on the longest batch, then it
# evaluates, saves a checkpoint and loads it. parity: all ranks and micro batches cut the same samples of one global
# batch, without dropout, so that the losses of two configs can be compared; a script deals out its own samples, and a
# mark says which.
Exam = Literal["worst_case", "parity"]
# The task that a Hugging Face config is trained for.
Task = Literal["causal-lm", "seq2seq", "masked-lm", "image-classification"]
Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """The values that are tuned within a rung. `settings` maps a dotted DeepSpeed key to its value.

    `checkpointing` recomputes the activations of all layers, or of one in so many.
    `expandable` lets torch's allocator grow its segments. With `keeps_headroom` it may reserve the usable memory alone:
    it gives cached memory back rather than take the headroom, which costs time alone.
    """

    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: bool | int = True
    expandable: bool = False
    keeps_headroom: bool = False
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def train_batch(self, world_size: int) -> int:
        """train_batch_size = micro batch × accumulation × world size, DeepSpeed's identity."""
        return self.micro_batch * self.accumulation * world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The optimizer steps of a trial: untimed ones, then timed ones until their spread is small."""

    warmup: int = 1
    timed: int = 1
    most_timed: int = 1
    spread: float = 0.05  # stop early once the median's relative standard error is below this
    budget_s: float = 30.0  # no further timed step is started after this many seconds of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One short real run of one rung with one set of knobs. Equal trials have equal keys, see `journal.trial_key`.

    `conditions` are the values that a probe varies besides rung and knobs, see `workload.arguments`.
    """

    rung: str
    knobs: Knobs
    purpose: Purpose
    steps: Steps = field(default_factory=Steps)
    limited: bool = True  # False: without the memory budget, to learn how much would have been enough
    repeat: int = 0  # the same knobs measured again
    exam: Exam | None = None
    conditions: Mapping[str, Scalar] = field(default_factory=dict)

    def without_headroom(self) -> Trial:
        """The same trial, whose allocator keeps out of the headroom."""
        return replace(self, knobs=replace(self.knobs, keeps_headroom=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished trial: `id` is its number in the fit, `seconds` its wall time.

    `neighbours` counts the trials that ran on the same machine meanwhile. With any, its times say little.
    """

    id: int
    trial: Trial
    outcome: Outcome
    seconds: float
    neighbours: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A rung that was skipped, and why."""

    rung: str
    reason: str


# How the search runs a trial. A `journal.TrialStore` answers from the journal where it can.
Run = Callable[[Trial], Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the workload from its survey: it is built once, without training and without a budget.

    `config` is the DeepSpeed config that a script gave to `deepspeed.initialize`, without the keys that autods set.
    `config_place` is the line that gives it if it comes from no file; the result has to be put there by hand.
    `tokens_per_sample` counts all texts of a sample, `seq_len` the tokens of the first one.
    `stood_in` lists the script's uses of GPUs that CPU ranks did without, each with its line. `warnings` says what its
    library does otherwise with DeepSpeed, in sentences.
    `writes_confined` tells whether the kernel of the first node refuses a script's writes outside the trial's folders,
    or Python alone redirects them; None for other workloads.
    """

    parameters: int
    largest_parameter: int  # elements
    checkpointing: bool  # the model can recompute activations, and autods may switch that
    tokens_per_sample: int | None
    has_optimizer: bool  # the workload brings `build_optimizer`
    config: Mapping[str, Any] | None = None
    config_place: str | None = None
    recomputes: bool = False  # a script itself lets its model recompute activations
    stood_in: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    writes_confined: bool | None = None
    pipeline_stages: int = 0  # of a `deepspeed.pipe.PipelineModule`; 0: it is none
    replica_ranks: int = 1  # ranks that hold one replica of the model together: a pipeline's stages
    experts: int = 0  # of a layer of `deepspeed.moe`; 0: there is none
    seq_len: int | None = None
    trained_parameters: int | None = None  # those that are not frozen; None: all
    alike_layers: int = 0  # that can be recomputed one by one
    frozen_in_layer: int = 0  # frozen matrices of the layer that has the most
    longest_ratio: float = 1.0  # elements of a sample of build_longest_batch by those of build_batch; 1: has none

    @property
    def has_frozen(self) -> bool:
        """Whether some weights are frozen."""
        return self.trained_parameters is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadForm:
    """What the form of a workload implies. autods builds the model and calls DeepSpeed, unless a field says otherwise.

    `runs_as_main`: the code runs as `__main__` and calls DeepSpeed. `brings_config`: its DeepSpeed config is known when
    it has run up to there. `is_model_config`: the model is described by a config, and has random weights.
    """

    has_file: bool = True
    runs_as_main: bool = False
    brings_config: bool = False
    chooses_precision: bool = False
    is_model_config: bool = False


FORMS: Mapping[str, WorkloadForm] = {
    "file": WorkloadForm(),
    "pickle": WorkloadForm(has_file=False),
    "hf_config": WorkloadForm(is_model_config=True),
    "script": WorkloadForm(runs_as_main=True, brings_config=True, chooses_precision=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSource:
    """The place of a workload: a `model.py`, a pickled `Workload`, a Hugging Face config, or a training script.

    `task` is set for every hf_config. `seq_len` and `target_len` are the tokens of a sample that the user gave.
    `build_batch` of a file or a pickle takes the first as `seq_len`. `arguments` maps 'build_model.NAME' and
    'build_batch.NAME' to values for these functions. For an hf_config, NAME is a key of its config. With `zero_init`,
    stage 3 builds the model under `deepspeed.zero.Init`, already split. With `lora`, '[4bit:]RANK,NAME,…',
    the weights of an hf_config are frozen, and adapters train (`workload.lora`). With `weights` its ranks start from
    the safetensors of its folder (`workload.hf_weights`), and forecasts from random ones. `sequence_parallel` ranks
    share each of its sequences, and with `tiled_loss` its logits are made in parts (`workload.long_sequences`).
    `idle` are the senses of its model that samples of text leave idle, such as vision. `other_use` is the class that
    its config names and that is for none of the tasks; None where the task was asked for. `quantization` is the
    method that the config's weights were quantized with, which its model leaves out. Without `takes_seq_len` the
    workload decides its samples' length itself, or they have none, and --seq-len is refused.

    The other fields describe a script. `argv` has the placeholders of `workload.script_source`. `script_kind` names a
    row of `config.trainers`, None if its imports do not show it. It runs in `folder`. If it starts with
    `python -m`, `module` is its name, and `root` the folder of its top package.
    With `keeps_checkpointing` its model recomputes activations where the script itself lets it.
    """

    kind: Literal["file", "pickle", "hf_config", "script"]
    path: str  # absolute
    name: str  # for people and for the default output folder
    digest: str  # of the content: a changed workload is another fit
    base_config: Mapping[str, Any] | str | None = None  # the DeepSpeed config it brings: an object, or a JSON file
    task: Task | None = None
    seq_len: int | None = None
    target_len: int | None = None
    argv: tuple[str, ...] = ()
    script_kind: str | None = None
    folder: str | None = None
    module: str | None = None
    root: str | None = None
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    zero_init: bool = False
    lora: str | None = None
    weights: bool = False
    sequence_parallel: int | None = None
    tiled_loss: bool = False
    idle: tuple[str, ...] = ()
    other_use: str | None = None
    quantization: str | None = None
    takes_seq_len: bool = True
    keeps_checkpointing: bool = False

    @property
    def form(self) -> WorkloadForm:
        """What the workload's form implies."""
        return FORMS[self.kind]

    @property
    def place(self) -> str:
        """The file for an error, or the name of a workload without one."""
        return self.path if self.form.has_file else self.name

    def __post_init__(self) -> None:
        for name in ("argv", "idle"):  # JSON turns them into lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
