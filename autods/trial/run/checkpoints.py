"""The folder of a run's checkpoints: which are whole, which are torn, and in which form an attempt can load one.

A checkpoint is a folder step-N. DeepSpeed's files lie in its `state`, the ranks' random generators in `ranks`.
`complete.json` is written last: it lists every file with its size. `universal` has the same states in the form of
DeepSpeed's universal checkpoint, which every number of ranks can load; its own `complete.json` is written last, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...config.deepspeed import enabled_half_precision, get_key
from ...schema import read_as

STATE, RANKS, UNIVERSAL = "state", "ranks", "universal"
MARK = "complete.json"
_PREFIX = "step-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the states of a training run lie on its ranks: what decides whether a checkpoint can be loaded as it is.

    `offload_optimizer` and `offload_param` are 'cpu', 'nvme' or None. `precision` is 'bf16', 'fp16' or None for fp32.
    Stage 3 cuts its flat tensors by `sub_group_size`; stages 1 and 2 order theirs by `round_robin`.
    """

    stage: int
    world_size: int
    offload_optimizer: str | None = None
    offload_param: str | None = None
    precision: str | None = None
    sub_group_size: int | None = None
    round_robin: bool = False

    @classmethod
    def from_config(cls, ds_config: Mapping[str, Any], world_size: int) -> Layout:
        """The layout of an engine with this DeepSpeed config."""

        def device(name: str) -> str | None:
            where = get_key(ds_config, f"zero_optimization.{name}.device")
            return None if where in (None, "none") else str(where)

        stage = int(get_key(ds_config, "zero_optimization.stage") or 0)
        size = get_key(ds_config, "zero_optimization.sub_group_size")
        return cls(
            stage=stage,
            world_size=world_size,
            offload_optimizer=device("offload_optimizer"),
            offload_param=device("offload_param"),
            precision=enabled_half_precision(ds_config),
            sub_group_size=None if stage < 3 or size is None else int(size),
            round_robin=stage in (1, 2) and bool(get_key(ds_config, "zero_optimization.round_robin_gradients")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `complete.json`. `files` maps each file's path, relative to the checkpoint, to its bytes.

    `samples` is how many samples the run has trained on. `save_s` is how long the ranks took to save.
    """

    step: int
    samples: int
    global_batch: int
    seed: int
    layout: Layout
    optimizer: str  # the class of the base optimizer
    files: Mapping[str, int]
    versions: Mapping[str, str] = field(default_factory=dict)
    save_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The optimizer steps that were done when it was saved."""
        return self.manifest.step

    @property
    def layout(self) -> Layout:
        """The layout of the engine that saved it."""
        return self.manifest.layout

    @property
    def size_bytes(self) -> int:
        """Bytes on disk, without the converted form."""
        return sum(self.manifest.files.values())

    @property
    def is_converted(self) -> bool:
        """Whether its universal form is whole."""
        return (self.path / UNIVERSAL).is_dir() and find_tear(self.path / UNIVERSAL) is None


@dataclass(frozen=True, slots=True)
class Torn:
    """A checkpoint that is not whole, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """The checkpoints of a folder, each sorted by step."""

    complete: tuple[Checkpoint, ...] = ()
    torn: tuple[Torn, ...] = ()

    @property
    def latest(self) -> Checkpoint | None:
        """The complete checkpoint with most steps."""
        return self.complete[-1] if self.complete else None


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` optimizer steps."""
    return checkpoints / f"{_PREFIX}{step:08d}"


def list_checkpoints(checkpoints: Path) -> CheckpointList:
    """Return the checkpoints below `checkpoints`. The files of each are compared with its manifest by size."""
    complete, torn = [], []
    for folder in sorted(checkpoints.glob(f"{_PREFIX}*")) if checkpoints.is_dir() else ():
        if not folder.is_dir():
            continue
        reason = find_tear(folder)
        if reason is None:
            complete.append(read_checkpoint(folder))
        else:
            torn.append(Torn(folder, reason))
    complete.sort(key=lambda checkpoint: checkpoint.step)
    return CheckpointList(tuple(complete), tuple(torn))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return a complete checkpoint. Raises ValueError or OSError where its manifest cannot be read."""
    return Checkpoint(folder, read_as(Manifest, json.loads((folder / MARK).read_text()), name=MARK))


def find_tear(folder: Path) -> str | None:
    """Return why the folder of a checkpoint, or its universal form, is not whole; None if it is."""
    try:
        data = json.loads((folder / MARK).read_text())
        if folder.name != UNIVERSAL:
            read_as(Manifest, data, name=MARK)
        files = dict(data["files"])
    except FileNotFoundError:
        return f"it has no {MARK}: it was not saved to its end"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MARK} cannot be read: {error}"
    for name, size in files.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if actual != size:
            return f"{name} has {actual} bytes instead of {size}"
    return None


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It counts as torn from the first moment on. Raises OSError where files stay."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder)


def remove_torn(checkpoints: Path) -> list[Torn]:
    """Remove the checkpoints that are not whole, and return them. Call it while no rank saves."""
    listed = list_checkpoints(checkpoints)
    for torn in listed.torn:
        remove_checkpoint(torn.path)
    for checkpoint in listed.complete:
        half = checkpoint.path / UNIVERSAL
        if half.exists() and not checkpoint.is_converted:
            shutil.rmtree(half, ignore_errors=True)
    return list(listed.torn)


def remove_old(checkpoints: Path, keep: int) -> None:
    """Remove complete checkpoints but the last `keep`. A folder that cannot be removed is left."""
    for checkpoint in list_checkpoints(checkpoints).complete[:-keep]:
        with contextlib.suppress(OSError):
            remove_checkpoint(checkpoint.path)


def list_files(folder: Path) -> dict[str, int]:
    """Return the files below a folder by relative path, with their bytes; without the mark and the converted form."""
    sizes = {}
    for file in _walk(folder):
        name = str(file.relative_to(folder))
        if name != MARK and name.split(os.sep)[0] != UNIVERSAL:
            sizes[name] = file.stat().st_size
    return sizes


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark a checkpoint as complete, once its files are safe on the disk."""
    write_mark(folder, asdict(manifest))


def write_mark(folder: Path, content: Mapping[str, Any]) -> None:
    """Write `complete.json` whole or not at all, and let it reach the disk."""
    temporary = folder / f"{MARK}.tmp"
    with open(temporary, "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / MARK)
    _sync(folder)
    _sync(folder.parent)


def sync_files(folder: Path) -> None:
    """Let all files below a folder, and the folders, reach the disk. Raises OSError where the disk fails."""
    for file in _walk(folder):
        _sync(file)
        _sync(file.parent)


def _walk(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        for name in names:
            yield Path(root) / name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
