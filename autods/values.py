"""The values that flow through autods: frozen, plain, one way.

`Trial` goes down to a runner, an `Outcome` comes back, a `Record` joins the two and is what the journal keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .outcomes import Outcome

Device = Literal["cuda", "cpu"]

# Why a trial is run: which part of the search asked for it; "probe": a person did.
Purpose = Literal["walk", "shortfall", "grow", "race", "tune", "verify", "certify", "probe"]

# What a trial does besides training steps on `build_batch`. worst_case: its steps run on the longest batch, then it
# evaluates, saves a checkpoint and loads it. parity: all ranks and micro batches cut the same samples of one global
# batch, without dropout, so that the losses of two configs can be compared; a script deals out its own samples, and a
# mark says which.
Exam = Literal["worst_case", "parity"]

# What a Hugging Face config is trained for.
Task = Literal["causal-lm", "seq2seq", "masked-lm", "image-classification"]

# What a training script hands its model to.
ScriptKind = Literal["deepspeed", "hf_trainer", "accelerate", "lightning"]

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What is tuned within a rung. `settings` maps a dotted DeepSpeed key to its value."""

    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: bool = True
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def train_batch(self, world_size: int) -> int:
        """train_batch_size = micro batch × accumulation × world size, DeepSpeed's identity."""
        return self.micro_batch * self.accumulation * world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How many optimizer steps a trial runs: untimed ones, then timed ones until their spread is small."""

    warmup: int = 1
    timed: int = 1
    most_timed: int = 1
    spread: float = 0.05  # stop early once the median's relative standard error is below this
    budget_s: float = 30.0  # no further timed step is started after this many seconds of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One short real run of one rung with one set of knobs. Equal trials have equal keys, see `journal.key_of`.

    conditions: what a probe varies beside rung and knobs, see `workload.conditions`. examined_from_s: where a step
    takes so long, or longer, nothing larger will be tried: it goes on with the worst_case exam, if it times the longest
    batch; None: it does not.
    """

    rung: str
    knobs: Knobs
    purpose: Purpose
    steps: Steps = field(default_factory=Steps)
    native_optimizer: bool = True  # False: torch's AdamW stands in, so that no DeepSpeed op has to be built yet
    limited: bool = True  # False: without the memory budget, to learn how much would have been enough
    repeat: int = 0  # the same knobs measured again
    exam: Exam | None = None
    conditions: Mapping[str, Scalar] = field(default_factory=dict)
    examined_from_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished trial: `id` is its number in the fit, `seconds` its wall time.

    beside: how many others ran on the same machine meanwhile; with any, its times say little.
    """

    id: int
    trial: Trial
    outcome: Outcome
    seconds: float
    beside: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A rung that was not tried, and why."""

    rung: str
    reason: str


# How the search asks for a trial. A journaled runner answers from the journal when it knows the answer.
Run = Callable[[Trial], Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a look at the workload (no training, no budget) found out.

    config: the DeepSpeed config that a script gave to `deepspeed.initialize`, without what was put in its hands.
    config_place: the line that gives it, where no file holds it: the result has to be put there by hand.
    stood_in: what a script asked of GPUs that CPU ranks did without, each with its line.
    """

    parameters: int
    largest_parameter: int  # elements
    checkpointing: bool  # the model can recompute activations
    tokens_per_sample: int | None
    has_optimizer: bool  # the workload brings `build_optimizer`
    layers: int = 0  # that repeat; 0: unknown, or none do
    layer_parameters: int = 0  # of one of them
    config: Mapping[str, Any] | None = None
    config_place: str | None = None
    stood_in: tuple[str, ...] = ()
    pipeline_stages: int = 0  # of a `deepspeed.pipe.PipelineModule`; 0: it is none
    replica_ranks: int = 1  # ranks that hold one replica of the model together: a pipeline's stages
    experts: int = 0  # of a layer of `deepspeed.moe`; 0: there is none
    longest_ratio: float = 1.0  # elements of a sample of build_longest_batch by those of build_batch; 1: has none

    def replicas(self, world_size: int) -> int:
        """How many train on samples of their own: the data-parallel size, which the batch identity multiplies by."""
        return world_size // self.replica_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSource:
    """Where the ranks find the workload: a `model.py`, a pickled `Workload` of the Python API, a Hugging Face config,
    or a training script that nobody changed.

    task: of an hf_config, always set. seq_len, target_len: tokens of a sample that were asked for; build_batch of a
    file or a pickle takes the first as `seq_len`. recompute: False turns off gradient checkpointing that build_model
    turned on; None leaves it as build_model made it. arguments: 'build_model.NAME' and 'build_batch.NAME' → what these
    functions are called with; of an hf_config the first is a key of its config. zero_init: stage 3 builds an hf_config
    under `deepspeed.zero.Init`, already split. Of a script: argv as given, with the placeholders of `workload.script`;
    script_kind, None where its imports do not tell; folder, where it is run; module, where it is started with `python
    -m`, and root the folder that its top package is in.
    """

    kind: Literal["file", "pickle", "hf_config", "script"]
    path: str  # absolute
    name: str  # for people and for the default output folder
    digest: str  # of the content: a changed workload is another fit
    base_config: Mapping[str, Any] | str | None = None  # the DeepSpeed config it brings: an object, or a JSON file
    task: Task | None = None
    seq_len: int | None = None
    target_len: int | None = None
    recompute: bool | None = None
    argv: tuple[str, ...] = ()
    script_kind: ScriptKind | None = None
    folder: str | None = None
    module: str | None = None
    root: str | None = None
    arguments: Mapping[str, Scalar] = field(default_factory=dict)
    zero_init: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "argv", tuple(self.argv))  # JSON, by which it travels, makes a list of it
