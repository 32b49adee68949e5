"""From what the user gave to what the ranks can load."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import sysconfig
from pathlib import Path

import cloudpickle

from ..errors import InputError
from ..values import WorkloadSource
from .model_py import base_config_of, check_file, load_file
from .workload import Workload, WorkloadError


def source_of(workload: Path | Workload, *, folder: Path | None = None) -> WorkloadSource:
    """A reference to the workload that every rank can load.

    A `Workload` object is pickled into `folder`: its functions by value, so that changed code is another workload, and
    what they use of other modules by name. Raises InputError when the file is not a workload or the object cannot be
    pickled.
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
    packed = pickle.loads(Path(source.path).read_bytes())
    sys.path.extend(folder for folder in packed["path"] if folder not in sys.path)
    workload = pickle.loads(packed["workload"])
    if not isinstance(workload, Workload):
        raise WorkloadError("is not a pickled Workload", where=source.path)
    return workload


def _pickled(workload: Workload, folder: Path) -> WorkloadSource:
    try:
        data = _by_value(workload)
    except Exception as error:
        raise InputError(
            f"the Workload cannot be sent to the ranks: {error}",
            mend="give functions that close over plain values, or write them into a model.py",
        ) from None
    digest = _digest(data)
    path = folder.absolute() / f"workload-{digest}.pkl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The user's own modules are found where they were found here.
        path.write_bytes(pickle.dumps({"path": [os.path.abspath(one) for one in sys.path], "workload": data}))
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(path)) from None
    name = getattr(workload.build_model, "__name__", "workload")
    base = dict(workload.deepspeed_config) if workload.deepspeed_config is not None else None
    return WorkloadSource(kind="pickle", path=str(path), name=name, digest=digest, base_config=base)


def _by_value(workload: Workload) -> bytes:
    """The functions themselves where their module is the user's own; an installed one is the same for every rank."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    functions = (workload.build_model, workload.build_batch, workload.build_optimizer, workload.loss)
    names = {getattr(function, "__module__", None) or "" for function in functions} - {"__main__"}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    own = [module for module in modules if not str(getattr(module, "__file__", "")).startswith(tuple(installed))]
    with contextlib.ExitStack() as stack:
        for module in set(own) - {sys.modules[name] for name in cloudpickle.list_registry_pickle_by_value()}:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        data: bytes = cloudpickle.dumps(workload)
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
