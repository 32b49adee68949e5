"""What is asked of a card: models with random weights × rungs × emulated cards × micro batches, a trial each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_ranks import Ranks

from autods.config.deepspeed import required_ops, start_settings
from autods.config.rungs import Rung, list_ladder, read_rungs
from autods.types import PHASES, Fit, Knobs, ModelFacts, Steps, WorkloadSource
from autods.workload import make_source
from tests.support.composed import compose_config

ROOT = Path(__file__).resolve().parents[2]
GEOMETRIES = ROOT / "examples" / "geometries"
_STALL_S = 100.0  # without a heartbeat: a model of billions of weights is built on the host meanwhile
STEPS = Steps(warmup=2, timed=3, most_timed=8, spread=0.03, budget_s=12.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """config: a folder, or a Hugging Face config. cards_gib: sizes to emulate; None: those that were asked for."""

    config: str | Mapping[str, Any]
    seq_len: int
    target_len: int | None = None
    task: str | None = None
    cards_gib: tuple[float, ...] | None = None
    micro_batches: tuple[int, ...] = (1, 4)


def _gpt2(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": layers, "n_embd": width,
        "n_head": heads, "n_positions": 1024, "vocab_size": 50257,
    }  # fmt: skip


MODELS: Mapping[str, Model] = {
    "gpt2-small": Model(config=_gpt2(12, 768, 12), seq_len=1024),
    "gpt2-medium": Model(config=_gpt2(24, 1024, 16), seq_len=1024),
    "gpt2-large": Model(config=_gpt2(36, 1280, 20), seq_len=1024),
    "gpt2-xl": Model(config=_gpt2(48, 1600, 25), seq_len=1024, micro_batches=(1,)),
    "qwen2-1.5b": Model(config="qwen2-1.5b", seq_len=1024, micro_batches=(1, 2)),
    "t5-3b": Model(config="t5-3b", seq_len=1024, target_len=128, task="seq2seq", cards_gib=(16,), micro_batches=(1, 2)),
    # For CPU ranks: the same path in seconds.
    "tiny": Model(
        config={**_gpt2(4, 256, 4), "vocab_size": 2048, "n_positions": 128}, seq_len=64, micro_batches=(1, 2)
    ),
}
# What a part of the measurement is made of, the most telling first.
PARTS: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("gpt2-large", "gpt2-small"),
    "t5": ("t5-3b",),
    "qwen2": ("qwen2-1.5b",),
    "gpt2-more": ("gpt2-medium", "gpt2-xl"),
    "tiny": ("tiny",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One trial. card_bytes: the emulated card; None: the card as it is."""

    model: str
    precision: str
    rung: str
    world_size: int
    card_bytes: int | None
    micro_batch: int
    checkpointing: bool = True

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where it is measured. usable_bytes: of a rank's device as it is. native: ops of DeepSpeed that could be built."""

    device: str
    ranks: int
    usable_bytes: int
    precision: str
    rungs: tuple[str, ...]
    nvme: Path | None = None
    native: tuple[str, ...] = ()


def source(name: str, folder: Path) -> WorkloadSource:
    """The reference that ranks and simulator load; an inline config is written into `folder` first."""
    model = MODELS[name]
    path = GEOMETRIES / model.config if isinstance(model.config, str) else folder / name
    if not isinstance(model.config, str):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(model.config))
    return make_source(path, task=model.task, seq_len=model.seq_len, target_len=model.target_len)


def cells(name: str, site: Site, cards: tuple[int, ...]) -> Iterator[Cell]:
    """Of one model: each card, each rung, the micro batches ascending. cards: bytes; the card as it is comes first.

    There the largest micro batch also runs without checkpointing.
    """
    model = MODELS[name]
    sizes = cards if model.cards_gib is None else tuple(int(size * 2**30) for size in model.cards_gib)
    for card in (None, *(size for size in sizes if size < site.usable_bytes)):
        for rung in site.rungs:
            for micro_batch in model.micro_batches:
                yield Cell(
                    model=name, precision=site.precision, rung=rung, world_size=site.ranks, card_bytes=card,
                    micro_batch=micro_batch,
                )  # fmt: skip
            if card is None:  # the speed without recomputation
                yield Cell(
                    model=name, precision=site.precision, rung=rung, world_size=site.ranks, card_bytes=card,
                    micro_batch=model.micro_batches[-1], checkpointing=False,
                )  # fmt: skip


def too_large(cards: tuple[int, ...], site: Site) -> tuple[int, ...]:
    """Sizes that this card cannot emulate."""
    return tuple(size for size in cards if size >= site.usable_bytes)


def base_of(precision: str) -> dict[str, Any]:
    """What every config has."""
    said: dict[str, Any] = {"steps_per_print": 10**9}
    return said if precision == "fp32" else {**said, precision: {"enabled": True}}


def knobs_of(cell: Cell, rung: Rung, facts: ModelFacts, site: Site) -> Knobs:
    """As a fit starts on a card of that size."""
    size = cell.card_bytes or site.usable_bytes
    settings = start_settings(rung, base=base_of(cell.precision), device_bytes=size, facts=facts)
    return Knobs(
        micro_batch=cell.micro_batch, checkpointing=cell.checkpointing and facts.checkpointing, settings=settings
    )


def config_of(cell: Cell, facts: ModelFacts, site: Site) -> dict[str, Any]:
    """The whole DeepSpeed config; torch's AdamW where DeepSpeed's own could not be built."""
    rung = read_rungs()[cell.rung]
    made = {
        "base": base_of(cell.precision), "world_size": cell.world_size, "own_optimizer": False,
        "nvme_path": site.nvme or Path("/local_nvme"),
    }  # fmt: skip
    knobs = knobs_of(cell, rung, facts, site)
    config = compose_config(rung, knobs, **made)
    needed = [op for op in required_ops(config) if op != "async_io"]
    if set(needed) <= set(site.native):
        return config
    made["base"] = {**base_of(cell.precision), "optimizer": {"params": {"torch_adam": True}}}
    return compose_config(rung, knobs, **made)


def tried(cell: Cell, ranks: Ranks, site: Site, wall_s: float) -> dict[str, Any]:
    """The cell's row: its outcome, what was measured, its speed."""
    assert ranks.facts is not None
    config = config_of(cell, ranks.facts, site)
    outcome, peaks, seconds = ranks.run(
        ds_config=config, micro_batch=cell.micro_batch, checkpointing=cell.checkpointing and ranks.facts.checkpointing,
        steps=STEPS, limit_bytes=cell.card_bytes, wall_s=wall_s, silence_s=dict.fromkeys(PHASES, _STALL_S),
        swap=str(site.nvme / "autods-gpu") if site.nvme and read_rungs()[cell.rung].uses_nvme else None,
    )  # fmt: skip
    ran = outcome if isinstance(outcome, Fit) else None
    return {
        **cell.as_row(),
        "ds_config": config,
        "facts": asdict(ranks.facts),
        "outcome": asdict(outcome),
        "measured": dict(peaks),
        "samples_per_second": ran.samples_per_second if ran else None,
        "tokens_per_second": ran.tokens_per_second if ran else None,
        "seconds": seconds,
    }


def rungs_for(asked: str | None, nvme: Path | None) -> tuple[str, ...]:
    """The names that were asked for, or the whole ladder; the NVMe rung only with a folder for it."""
    rungs = read_rungs()
    wanted = asked.split(",") if asked else [name for name in list_ladder(rungs) if nvme or not rungs[name].uses_nvme]
    unknown = [name for name in wanted if name not in rungs]
    if unknown:
        raise ValueError(f"there is no rung {unknown[0]!r}; there are {', '.join(rungs)}")
    return tuple(wanted)
