"""Load a workload from a `model.py`, an object, a Hugging Face config or a script."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from ..errors import InputError
from ..types import WorkloadSource
from .arguments import with_arguments
from .hf_config import TASKS, config_file, load_config, local_path, read_config, task_of
from .model_py import base_config_of, check_file, load_file
from .protocol import Batch, Workload, WorkloadError
from .script_source import KINDS, is_script, local_files, module_file, module_named, script_source


def source_of(
    workload: Path | Workload,
    *,
    folder: Path | None = None,
    task: str | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
    recompute: bool | None = None,
    kind: str | None = None,
    argv: Sequence[str] = (),
    zero_init: bool = False,
) -> WorkloadSource:
    """A reference to the workload that every rank can load.

    A `Workload` object is pickled into `folder`: its functions by value, so that changed code is another workload, and
    what they use of other modules by name. task, seq_len, target_len, recompute, zero_init: see `WorkloadSource`.
    kind: 'model', 'script' or a kind of script, where what the file shows is not to decide; argv: the script's
    arguments. Raises InputError when the file is not a workload, the object cannot be pickled, or the workload has no
    such option.
    """
    _check_kind_of(workload)
    if kind not in (None, "model", "script", *KINDS):
        raise InputError(f"there is no kind {kind!r}", hint=f"give --kind model, script, {', '.join(KINDS)}")
    for option, length in (("--seq-len", seq_len), ("--target-len", target_len)):
        if length is not None and length < 1:
            raise InputError(f"{option} {length}: at least one token is needed")
    options = {"seq_len": seq_len, "target_len": target_len, "recompute": recompute}
    workload = local_path(workload) if isinstance(workload, Path) else workload
    module = module_named(workload) if isinstance(workload, Path) else None
    root: Path | None = None
    if module is not None:
        workload, root = module_file(module, Path.cwd())
        if kind == "model":
            raise InputError("-m starts a training script", hint="give the path of a model.py without -m")
        kind = kind or "script"
    path = workload.expanduser().absolute() if isinstance(workload, Path) else None
    config = config_file(path) if path is not None else None
    if path is not None and config is None and (kind not in (None, "model") or (not kind and is_script(path, argv))):
        _check_no_options({"--task": task, "--seq-len": seq_len, "--target-len": target_len}, path)
        if zero_init:
            raise InputError("--zero-init says nothing to a training script", where=str(path))
        known = next((one for one in KINDS if one == kind), None)
        return script_source(path, argv, known, Path.cwd(), module=module, root=root)
    if argv:
        where = str(path) if path is not None else None
        raise InputError(f"takes no arguments: {' '.join(argv)}", where=where, hint="they are for a training script")
    if config is not None:
        return _of_config(config, task, {**options, **({"zero_init": True} if zero_init else {})})
    if zero_init:
        raise InputError("--zero-init is for a Hugging Face config; a model.py decides itself how it builds its model")
    if task is not None or target_len is not None:
        option = "--task" if task is not None else "--target-len"
        raise InputError(f"{option} is for a Hugging Face config; a model.py says itself what it trains")
    source = _pickled(workload, folder or Path()) if isinstance(workload, Workload) else _of_file(workload)
    if seq_len is not None:
        _check_takes_seq_len(workload, source)
    return _with_options(source, options)


def _check_kind_of(workload: object) -> None:
    """Raises InputError for what a person may take for a workload: a module, a model, a function."""
    if isinstance(workload, Workload):
        for name in ("build_model", "build_batch"):
            if not callable(made := getattr(workload, name)):
                raise InputError(f"the Workload's {name} is {type(made).__name__}, no function")
    elif not isinstance(workload, Path):
        raise InputError(
            f"a workload is a path or an autods.Workload, not {type(workload).__name__}",
            hint="give 'model.py', or autods.Workload(build_model=…, build_batch=…)",
        )


def load(source: WorkloadSource) -> Workload:
    """The workload, ready to be built. What the user's code raises is passed on."""
    match source.kind:
        case "file":
            workload = bound(load_file(Path(source.path)), source)
        case "hf_config":
            workload = load_config(source)
        case "pickle":
            workload = bound(_unpickled(source), source)
        case "script":
            raise WorkloadError(
                "is a training script: it can be fitted, and nothing less", where=source.path, hint="autods fit …"
            )
    if source.recompute is False:
        workload = replace(workload, build_model=functools.partial(_keeping_activations, workload.build_model))
    return workload


def bound(workload: Workload, source: WorkloadSource) -> Workload:
    """What is loaded already, called with what this source says; a Hugging Face config is read anew."""
    if source.kind == "hf_config":
        return load(source)
    return with_arguments(_with_seq_len(workload, source), source)


def _check_no_options(options: Mapping[str, Any], path: Path) -> None:
    for option, value in options.items():
        if value is not None:
            raise InputError(
                f"{option} says nothing to a training script", where=str(path), hint="give its own arguments after --"
            )


def _of_file(workload: Path) -> WorkloadSource:
    path = workload.expanduser().absolute()
    tree = check_file(path)
    return WorkloadSource(
        kind="file",
        path=str(path),
        name=path.stem,
        digest=_digest_with(path, local_files(path, [path.parent])),
        base_config=base_config_of(tree, path),
    )


def _of_config(path: Path, task: str | None, options: Mapping[str, Any]) -> WorkloadSource:
    config = read_config(path)
    chosen = next((known for known in TASKS if known == task), None) if task else task_of(config)
    if chosen is None:
        raise InputError(f"there is no task {task!r}", hint=f"give --task {', '.join(TASKS[:-1])} or {TASKS[-1]}")
    if chosen == "image-classification" and options["seq_len"] is not None:
        raise InputError("--seq-len is for text; the images' size stands in the config", where=str(path))
    if chosen != "seq2seq" and options["target_len"] is not None:
        raise InputError(f"--target-len is for --task seq2seq, this is {chosen}", where=str(path))
    name = path.parent.name if path.name == "config.json" else path.stem
    source = WorkloadSource(
        kind="hf_config", path=str(path), name=name or config["model_type"], digest=_digest(path.read_bytes())
    )
    return _with_options(source, {**options, "task": chosen})


def _with_options(source: WorkloadSource, options: Mapping[str, Any]) -> WorkloadSource:
    """Another option is another workload: the digest says so."""
    said = sorted((name, value) for name, value in options.items() if value is not None)
    return replace(source, digest=_digest(f"{source.digest} {said}".encode()), **options) if said else source


def _check_takes_seq_len(workload: Path | Workload, source: WorkloadSource) -> None:
    """Raises InputError when build_batch has no argument `seq_len`."""
    if isinstance(workload, Workload):
        names = set(inspect.signature(workload.build_batch).parameters)
    else:
        tree = ast.parse(Path(source.path).read_bytes())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        found = [node.args for node in functions if node.name == "build_batch"]
        if not found:
            return  # imported or assigned: the call itself will say
        names = {argument.arg for argument in (*found[-1].args, *found[-1].kwonlyargs)}
    if "seq_len" not in names:
        raise InputError(
            "its build_batch has no argument seq_len, so --seq-len says nothing to it",
            where=source.path if source.kind == "file" else source.name,
            hint="write def build_batch(micro_batch_size, seq_len=1024): …, or drop --seq-len",
        )


def _with_seq_len(workload: Workload, source: WorkloadSource) -> Workload:
    if source.seq_len is None:
        return workload
    build_batch: Callable[..., Batch] = workload.build_batch
    bound = replace(workload, build_batch=functools.partial(build_batch, seq_len=source.seq_len))
    longest: Callable[..., Batch] | None = workload.build_longest_batch
    if longest is not None and "seq_len" in inspect.signature(longest).parameters:
        return replace(bound, build_longest_batch=functools.partial(longest, seq_len=source.seq_len))
    return bound


def _keeping_activations(build_model: Callable[[], Any]) -> Any:
    """The model, told not to recompute its activations where it knows how."""
    model = build_model()
    disable = getattr(model, "gradient_checkpointing_disable", None)
    if disable is not None:
        disable()
    return model


def _unpickled(source: WorkloadSource) -> Workload:
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
            hint="give functions that close over plain values, or write them into a model.py",
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
    made = (workload.build_model, workload.build_batch, workload.build_longest_batch)
    functions = (*made, workload.build_optimizer, workload.loss)
    names = {getattr(function, "__module__", None) or "" for function in functions} - {"__main__"}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    own = [module for module in modules if not str(getattr(module, "__file__", "")).startswith(tuple(installed))]
    with contextlib.ExitStack() as stack:
        for module in set(own) - {sys.modules[name] for name in cloudpickle.list_registry_pickle_by_value()}:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        data: bytes = cloudpickle.dumps(workload)
    return data


def _digest_with(path: Path, own: Sequence[Path]) -> str:
    """Of the file and of what it imports of the user's own: a changed layer in another file is another workload."""
    files = [f"\0{os.path.relpath(file, path.parent)}\0".encode() + file.read_bytes() for file in own]
    return _digest(b"".join((path.read_bytes(), *files)))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
