"""The folder of a run's checkpoints: which are whole, which are torn, and which an attempt can load.

A checkpoint is a folder step-N. DeepSpeed's files lie in its `state`, the ranks' random generators in `ranks`.
`complete.json` is written last: it lists every file with its size.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config.deepspeed import enabled_half_precision, get_key
from ...files import ask_anew
from ...schema import read_as

STATE, RANKS = "state", "ranks"
MARK = "complete.json"
_PREFIX = "step-"
_SUB_GROUP_SIZE = 1_000_000_000  # DeepSpeed's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the states of a training run lie on its ranks: what decides whether a checkpoint can be loaded as it is.

    `offload_optimizer` and `offload_param` are 'cpu', 'nvme' or None. `precision` is 'bf16', 'fp16' or None for fp32.
    Stage 3 cuts its flat tensors by `sub_group_size`; stages 1 and 2 order theirs by `round_robin`. `divided` is
    whether the ranks hold different parts of the model: stages of a pipeline, experts, or parts of layers.
    """

    stage: int
    world_size: int
    offload_optimizer: str | None = None
    offload_param: str | None = None
    precision: str | None = None
    sub_group_size: int | None = None
    round_robin: bool = False
    divided: bool = False

    @classmethod
    def from_config(cls, ds_config: Mapping[str, Any], world_size: int, *, divided: bool = False) -> Layout:
        """The layout of an engine with this DeepSpeed config."""

        def read_device(name: str) -> str | None:
            device = get_key(ds_config, f"zero_optimization.{name}.device")
            return None if device in (None, "none") else str(device)

        stage = int(get_key(ds_config, "zero_optimization.stage") or 0)
        size = get_key(ds_config, "zero_optimization.sub_group_size") or _SUB_GROUP_SIZE
        return cls(
            stage=stage,
            world_size=world_size,
            offload_optimizer=read_device("offload_optimizer"),
            offload_param=read_device("offload_param"),
            precision=enabled_half_precision(ds_config),
            sub_group_size=None if stage < 3 else int(size),
            round_robin=stage in (1, 2) and bool(get_key(ds_config, "zero_optimization.round_robin_gradients")),
            divided=divided,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `complete.json`. `files` maps each file's path, relative to the checkpoint, to its bytes.

    `samples` is how many samples the run has trained on. `save_s` is how long the ranks took to save. `others` are
    further files, which the run does not need to go on: the script may change or remove them.
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
    others: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
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
        """Bytes on disk, when it was saved."""
        return sum(self.manifest.files.values()) + sum(self.manifest.others.values())


@dataclass(frozen=True, slots=True)
class Torn:
    """A checkpoint that is not whole, and why. One that the file system does not let us read `may_be_whole`."""

    path: Path
    reason: str
    may_be_whole: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """The checkpoints of a folder, each sorted by step."""

    complete: tuple[SavedCheckpoint, ...] = ()
    torn: tuple[Torn, ...] = ()

    @property
    def latest(self) -> SavedCheckpoint | None:
        """The complete checkpoint with most steps."""
        return self.complete[-1] if self.complete else None


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` optimizer steps."""
    return checkpoints / f"{_PREFIX}{step:08d}"


def list_checkpoints(checkpoints: Path) -> CheckpointList:
    """Return the checkpoints below `checkpoints`. The files of each are compared with its manifest by size."""
    complete: list[SavedCheckpoint] = []
    torn: list[Torn] = []
    for folder in sorted(checkpoints.glob(f"{_PREFIX}*")) if checkpoints.is_dir() else ():
        if folder.is_dir():
            match _inspect(folder):
                case SavedCheckpoint() as checkpoint:
                    complete.append(checkpoint)
                case Torn() as tear:
                    torn.append(tear)
    complete.sort(key=lambda checkpoint: checkpoint.step)
    return CheckpointList(tuple(complete), tuple(torn))


def list_marked_steps(checkpoints: Path) -> list[int]:
    """Return the steps whose checkpoints are marked as complete. No other file is looked at.

    Their files are there while the attempt runs that saved them, or that began after `remove_torn`.
    """
    names = (mark.parent.name.removeprefix(_PREFIX) for mark in checkpoints.glob(f"{_PREFIX}*/{MARK}"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_checkpoint(folder: Path) -> SavedCheckpoint:
    """Return a complete checkpoint. Raises ValueError or OSError where its manifest cannot be read."""
    return SavedCheckpoint(folder, read_as(Manifest, json.loads((folder / MARK).read_text()), name=MARK))


def _inspect(folder: Path) -> SavedCheckpoint | Torn:
    """Read a checkpoint, which the ranks may remove meanwhile: it counts as torn then.

    A rank of another machine may have marked it a moment ago. `list_marked_steps` has looked for the mark before, and
    NFS keeps its absence for up to a minute: the checkpoint would be removed.
    """
    ask_anew(folder)
    try:
        checkpoint = read_checkpoint(folder)
    except FileNotFoundError:
        return Torn(folder, f"it has no {MARK}: it was not saved to its end")
    except (OSError, ValueError) as error:
        return Torn(folder, f"its {MARK} cannot be read: {error}", may_be_whole=isinstance(error, OSError))
    for name, size in checkpoint.manifest.files.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            return Torn(folder, f"{name} cannot be read: {error.strerror}", may_be_whole=not is_gone)
        if actual != size:
            return Torn(folder, f"{name} has {actual} bytes instead of {size}")
    return checkpoint


def find_damage(checkpoint: SavedCheckpoint) -> str | None:
    """Return which file of a checkpoint does not hold what was written, and why; None where none is known not to.

    `torch.save` writes zip archives with a checksum for each tensor, which `torch.load` does not compare
    (MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS of its build). Other files are not looked at. All bytes are read.
    """
    for name in checkpoint.manifest.files:
        if name.endswith(".pt"):
            try:
                with zipfile.ZipFile(checkpoint.path / name) as archive:
                    bad = archive.testzip()
            except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                return f"{name} cannot be read: {error}"
            if bad is not None:
                return f"{name} has other bytes than were written, in {bad}"
    return None


def can_load_directly(saved: Manifest, layout: Layout, optimizer: str) -> bool:
    """Whether DeepSpeed itself loads the checkpoint into an engine of this layout and class of optimizer.

    The classes of Adam count their steps in different places. Whether parts of the model differ by rank does not matter
    here: `find_obstacle` asks that.
    """
    before, after = saved.layout, replace(layout, divided=saved.layout.divided)
    if before.stage == after.stage == 0:  # every rank saves and loads the whole states
        after = replace(after, world_size=before.world_size)
    elif {before.stage, after.stage} == {1, 2}:  # their files are the same
        after = replace(after, stage=before.stage)
    return before == after and saved.optimizer == optimizer


def find_obstacle(checkpoint: SavedCheckpoint, layout: Layout) -> str | None:
    """Return why no engine of this layout can go on from the checkpoint; None if it can.

    A supervisor asks before it chooses a rung or a number of ranks.
    """
    saved = checkpoint.layout
    if replace(saved, divided=layout.divided) == layout:
        return None
    if saved.divided or layout.divided:
        return "the model is divided among the ranks, so its checkpoint needs the same rung and number of ranks"
    if saved.offload_optimizer == "nvme":
        return "its optimizer was on NVMe, so its checkpoint needs the same rung and number of ranks"
    return None


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It counts as torn from the first moment on. Raises OSError where files stay."""
    (folder / MARK).unlink(missing_ok=True)
    shutil.rmtree(folder)


def remove_torn(checkpoints: Path) -> list[Torn]:
    """Remove the checkpoints that are not whole, and return them. Call it while no rank saves.

    One that cannot be read now is left, for it may be whole; so is one that cannot be removed.
    """
    removed = []
    for torn in list_checkpoints(checkpoints).torn:
        if not torn.may_be_whole:
            with contextlib.suppress(OSError):
                remove_checkpoint(torn.path)
                removed.append(torn)
    return removed


def remove_old(checkpoints: Path, keep: int) -> None:
    """Remove complete checkpoints but the last `keep`. A folder that cannot be removed is left."""
    for checkpoint in list_checkpoints(checkpoints).complete[:-keep]:
        with contextlib.suppress(OSError):
            remove_checkpoint(checkpoint.path)


def list_files(folder: Path) -> dict[str, int]:
    """Return the files below a folder by relative path, with their bytes; without the mark."""
    names = {str(file.relative_to(folder)): file.stat().st_size for file in _walk(folder)}
    return {name: size for name, size in names.items() if name != MARK}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Mark a checkpoint as complete, once its files are safe on the disk: whole or not at all."""
    temporary = folder / f"{MARK}.tmp"
    with open(temporary, "w") as file:
        json.dump(asdict(manifest), file)
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
    """The files below a folder. Linked folders are followed, each once."""
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        for name in names:
            yield Path(root) / name


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
