"""From what the user gave to what the ranks can load."""

from __future__ import annotations

import hashlib
from pathlib import Path

import cloudpickle

from ..errors import InputError
from ..values import WorkloadSource
from .model_py import base_config_of, check_file, load_file
from .workload import Workload, WorkloadError


def source_of(workload: Path | Workload, *, folder: Path | None = None) -> WorkloadSource:
    """A reference to the workload that every rank can load.

    A `Workload` object is pickled into `folder` (functions of `__main__` by value, others by their module). Raises
    InputError when the file is not a workload or the object cannot be pickled.
    """
    if isinstance(workload, Workload):
        return _pickled(workload, folder or Path())
    path = workload.expanduser().absolute()
    tree = check_file(path)
    return WorkloadSource(
        kind="file",
        path=str(path),
        name=path.stem,
        digest=_digest(path.read_bytes()),
        base_config=base_config_of(tree, path),
    )


def load(source: WorkloadSource) -> Workload:
    """The workload, ready to be built. What the user's code raises is passed on."""
    if source.kind == "file":
        return load_file(Path(source.path))
    workload = cloudpickle.loads(Path(source.path).read_bytes())
    if not isinstance(workload, Workload):
        raise WorkloadError("is not a pickled Workload", where=source.path)
    return workload


def _pickled(workload: Workload, folder: Path) -> WorkloadSource:
    try:
        data = cloudpickle.dumps(workload)
    except Exception as error:
        raise InputError(
            f"the Workload cannot be sent to the ranks: {error}",
            mend="give functions that close over plain values, or write them into a model.py",
        ) from None
    digest = _digest(data)
    path = folder.absolute() / f"workload-{digest}.pkl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None
    name = getattr(workload.build_model, "__name__", "workload")
    base = dict(workload.deepspeed_config) if workload.deepspeed_config is not None else None
    return WorkloadSource(kind="pickle", path=str(path), name=name, digest=digest, base_config=base)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
