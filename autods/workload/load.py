"""Identify a workload and load it: a `model.py`, a `Workload` object, a Hugging Face config or a training script."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from os import _exit  # the workload may replace it
from pathlib import Path
from typing import Any

import cloudpickle

from ..config.trainers import SCRIPT_KINDS
from ..errors import InputError, make_write_error
from ..files import read_file
from ..system import private
from ..types import WorkloadSource
from .conditions import argument_names, bind_arguments
from .hf_config import (
    TASKS,
    find_config_file,
    find_idle_senses,
    find_other_use,
    find_quantization,
    infer_task,
    load_config,
    read_config,
    resolve_hf_path,
)
from .hf_weights import describe_weights, make_quantized_error
from .lora import NOT_IN_PARTS, parse_lora, require_packages
from .protocol import (
    FUNCTIONS,
    Workload,
    WorkloadError,
    check_model_py,
    check_signatures,
    load_model_py,
    read_base_config,
)
from .script_source import find_module, is_script, local_files, make_script_source, module_name


def make_source(
    workload: Path | Workload,
    *,
    folder: Path | None = None,
    task: str | None = None,
    seq_len: int | None = None,
    target_len: int | None = None,
    kind: str | None = None,
    argv: Sequence[str] = (),
    zero_init: bool = False,
    lora: str | int | None = None,
    weights: bool = False,
    sequence_parallel: int | None = None,
    tiled_loss: bool = False,
    keep_checkpointing: bool = False,
) -> WorkloadSource:
    """Return a reference to the workload, from which every rank can load it.

    A `Workload` object is pickled below `folder`, where only this user can read it. Its functions are pickled by value,
    so changed code changes the digest. `kind` overrides detection: 'model', 'script' or a kind of script. `argv` holds
    the arguments of a script.
    `WorkloadSource` explains the other options. Raises InputError when the file is not a workload, when the object
    cannot be pickled, or when the workload has no such option.
    """
    _check_form(workload, kind)
    options = {"--task": task, "--seq-len": seq_len, "--target-len": target_len, "--lora": lora}
    options |= {"--zero-init": zero_init or None, "--weights": weights or None}
    options |= {"--sequence-parallel": sequence_parallel, "--tiled-loss": tiled_loss or None}
    given = [name for name, value in options.items() if value is not None]
    for name, tokens in (("--seq-len", seq_len), ("--target-len", target_len)):
        if tokens is not None and tokens < 1:
            raise InputError(f"{name} {tokens}: at least one token is needed")
    path = config = None
    if isinstance(workload, Path):
        path, module, root = _find_file(workload, kind)
        kind = kind or ("script" if module is not None else None)
        config = find_config_file(path)
        if config is None and (is_script(path, argv) if kind is None else kind != "model"):
            if given:
                hint = "give the script's own arguments after --"
                raise InputError(f"{given[0]} does not apply to a training script", place=str(path), hint=hint)
            known = kind if kind in SCRIPT_KINDS else None
            source = make_script_source(path, argv, known, Path.cwd(), module=module, root=root)
            return keep_own_checkpointing(source) if keep_checkpointing else source
    if keep_checkpointing:
        hint = "drop it; autods plan has --checkpointing, and autods probe --vary checkpointing=on,off"
        raise InputError("--keep-checkpointing is for a training script", hint=hint)
    if kind not in (None, "model") and config is not None:
        raise InputError(
            f"--kind {kind} is for a training script", place=str(config), hint="drop it, or give the script"
        )
    if argv:
        hint = "only a training script takes arguments after --"
        raise InputError(f"takes no arguments: {' '.join(argv)}", place=str(path) if path else None, hint=hint)
    if config is not None:
        adapters = None if lora is None else parse_lora(lora)
        if adapters is not None:
            require_packages(adapters)
            if zero_init and adapters.quantized:
                raise InputError(NOT_IN_PARTS[0], hint=NOT_IN_PARTS[1])
        in_parts = zero_init or (weights and not (adapters is not None and adapters.quantized))
        source = _make_config_source(config, task, seq_len, target_len, in_parts)
        source = _with_long_sequences(source, sequence_parallel, tiled_loss)
        if weights:
            if source.quantization is not None:
                raise make_quantized_error(source.quantization, config.parent)
            described = describe_weights(config.parent)
            source = replace(source, weights=True, digest=_digest(source.digest.encode() + described))
        return source if adapters is None else _with_options(source, lora=str(adapters))
    for name in given:
        if name not in ("--seq-len", "--zero-init"):
            raise InputError(f"{name} is for a Hugging Face config; a model.py decides that itself")
    if isinstance(workload, Workload):
        source = _pickle_source(workload, folder or Path())
    else:
        assert path is not None
        source = _make_file_source(path)
    names = argument_names(workload, source, "build_batch")
    source = replace(source, takes_seq_len=names is None or "seq_len" in names)
    if seq_len is not None and not source.takes_seq_len:
        raise InputError(
            "its build_batch has no argument seq_len, so --seq-len has no effect",
            place=source.place,
            hint="write def build_batch(micro_batch_size, seq_len=1024): …, or drop --seq-len",
        )
    return _with_options(source, seq_len=seq_len, zero_init=zero_init or None)


def keep_own_checkpointing(source: WorkloadSource) -> WorkloadSource:
    """The script, whose model recomputes activations where the script itself lets it."""
    return _with_options(source, keeps_checkpointing=True)


def _check_form(workload: object, kind: str | None) -> None:
    """Raises InputError for what is neither a path nor a `Workload` of functions, and for an unknown kind."""
    if isinstance(workload, Workload):
        for each in fields(Workload):
            value, is_config = getattr(workload, each.name), each.name == "deepspeed_config"
            fits = isinstance(value, Mapping) if is_config else callable(value)
            if not fits and (value is not None or each.name in FUNCTIONS):
                wanted = "a dict" if is_config else "a function"
                raise InputError(f"the Workload's {each.name} is {type(value).__name__}, not {wanted}")
        check_signatures(workload, complete=False)
    elif not isinstance(workload, Path):  # a module, a model, a function
        raise InputError(
            f"a workload is a path or an autods.Workload, not {type(workload).__name__}",
            hint="give 'model.py', or autods.Workload(build_model=…, build_batch=…)",
        )
    if kind not in (None, "model", "script", *SCRIPT_KINDS):
        raise InputError(f"there is no kind {kind!r}", hint=f"give --kind model, script, {', '.join(SCRIPT_KINDS)}")


def _find_file(workload: Path, kind: str | None) -> tuple[Path, str | None, Path | None]:
    """The absolute path of a workload. For 'module:package.name' also the module's name and the folder above it."""
    workload = resolve_hf_path(workload)
    module, root = module_name(workload), None
    if module is not None:
        if kind == "model":
            raise InputError("-m starts a training script", hint="give the path of a model.py without -m")
        workload, root = find_module(module, Path.cwd())
    return Path(os.path.expanduser(workload)).absolute(), module, root


def _make_file_source(path: Path) -> WorkloadSource:
    """A model.py. Its digest covers the modules beside it that it imports: a changed layer is another workload."""
    tree = check_model_py(path)
    content = read_file(path)
    for file in local_files(path, [path.parent]):
        content += b"\0%b\0%b" % (os.fsencode(os.path.relpath(file, path.parent)), read_file(file))
    base = read_base_config(tree, path)
    return WorkloadSource(kind="file", path=str(path), name=path.stem, digest=_digest(content), base_config=base)


def load(source: WorkloadSource) -> Workload:
    """Load the workload. Exceptions of the user's code are passed on."""
    match source.kind:
        case "file":
            workload = bind_arguments(load_model_py(Path(source.path)), source)
            check_signatures(workload)
        case "hf_config":
            workload = load_config(source)
        case "pickle":
            try:
                packed = pickle.loads(private.read(Path(source.path)))
            except InputError as error:
                raise WorkloadError(error.problem, hint=error.hint) from None
            sys.path.extend(folder for folder in packed["path"] if folder not in sys.path)
            unpickled = pickle.loads(packed["workload"])
            if not isinstance(unpickled, Workload):
                raise WorkloadError("is not a pickled Workload", place=source.path)
            workload = bind_arguments(unpickled, source)
            check_signatures(workload)
        case "script":
            raise WorkloadError("is a training script, and cannot be loaded as a model", place=source.path)
    return workload


def bind_options(workload: Workload, source: WorkloadSource) -> Workload:
    """A loaded workload with the source's options bound to it. A Hugging Face config is loaded anew."""
    return load(source) if source.form.is_model_config else bind_arguments(workload, source)


def _make_config_source(
    path: Path, task: str | None, seq_len: int | None, target_len: int | None, zero_init: bool
) -> WorkloadSource:
    config = read_config(path)
    chosen = next((known for known in TASKS if known == task), None) if task else infer_task(config)
    if chosen is None:
        raise InputError(f"there is no task {task!r}", hint=f"give --task {', '.join(TASKS[:-1])} or {TASKS[-1]}")
    is_text = chosen != "image-classification"
    if seq_len is not None and not is_text:
        raise InputError("--seq-len is for text; the config holds the size of images", place=str(path))
    if chosen != "seq2seq" and target_len is not None:
        raise InputError(f"--target-len is for --task seq2seq, and this is {chosen}", place=str(path))
    name = path.parent.name if path.name == "config.json" else path.stem
    source = WorkloadSource(
        kind="hf_config", path=str(path), name=name or config["model_type"], digest=_digest(read_file(path)),
        idle=find_idle_senses(config) if chosen == "causal-lm" else (),
        other_use=None if task else find_other_use(config), quantization=find_quantization(config),
        takes_seq_len=is_text,
    )  # fmt: skip
    options = {"seq_len": seq_len, "target_len": target_len, "task": chosen}
    return _with_options(source, **options, zero_init=zero_init or None)


def _with_long_sequences(source: WorkloadSource, sequence_parallel: int | None, tiled_loss: bool) -> WorkloadSource:
    """The source with these options. Raises InputError where it is no causal language model, or for no rank."""
    given = [
        name for name, value in (("--sequence-parallel", sequence_parallel), ("--tiled-loss", tiled_loss)) if value
    ]
    if given and source.task != "causal-lm":
        raise InputError(f"{given[0]} is for --task causal-lm, and this is {source.task}", place=source.path)
    if sequence_parallel is not None and sequence_parallel < 1:
        raise InputError(f"--sequence-parallel {sequence_parallel}: at least one rank is needed")
    return _with_options(source, sequence_parallel=sequence_parallel, tiled_loss=tiled_loss or None)


def _with_options(source: WorkloadSource, **options: Any) -> WorkloadSource:
    """The source with its options, which are part of its digest."""
    given = sorted((name, value) for name, value in options.items() if value is not None)
    return replace(source, digest=_digest(f"{source.digest} {given}".encode()), **options) if given else source


def _pickle_source(workload: Workload, folder: Path) -> WorkloadSource:
    try:
        data = _pickle_by_value(workload)
    except Exception as error:
        raise InputError(
            f"the Workload cannot be sent to the ranks: {error}",
            hint="give functions that close over plain values, or write them into a model.py",
        ) from None
    digest = _digest(data)
    path = folder.absolute() / "workload" / f"{digest}.pkl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks import the user's modules from the folders that this process imports them from.
        packed = {"path": [os.path.abspath(entry) for entry in sys.path], "workload": data}
        private.write(path, pickle.dumps(packed))
    except OSError as error:
        place = Path(error.filename or path)
        raise make_write_error(place, error, hint="give another folder with --out") from None
    name = getattr(workload.build_model, "__name__", "workload")
    base = dict(workload.deepspeed_config) if workload.deepspeed_config is not None else None
    return WorkloadSource(kind="pickle", path=str(path), name=name, digest=digest, base_config=base)


def _pickle_by_value(workload: Workload) -> bytes:
    """Pickle functions of the user's modules by value, and those of installed packages by name."""
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    builders = (
        workload.build_model,
        workload.build_batch,
        workload.build_longest_batch,
        workload.adapt_model,
        workload.load_model,
    )
    of_data = (workload.build_dataset, workload.collate)
    functions = (*builders, workload.build_optimizer, workload.loss, *of_data)
    names = {getattr(function, "__module__", None) or "" for function in functions} - {"__main__", "builtins"}
    modules = {sys.modules[name] for name in names if name in sys.modules}
    registered = {sys.modules[name] for name in cloudpickle.list_registry_pickle_by_value()}
    with contextlib.ExitStack() as stack:
        for module in modules - registered:
            if not str(getattr(module, "__file__", "")).startswith(installed):
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        data: bytes = cloudpickle.dumps(workload)
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class SecondRank(WorkloadError):
    """The user's code has forked this process, which goes on as a second rank."""

    def __init__(self) -> None:
        hint = "let it end with os._exit(0), or start a program with subprocess"
        super().__init__("os.fork() was called, and the new process goes on as a second rank", hint=hint)


def check_process(pid: int) -> None:
    """Raise SecondRank where this is not the process `pid`, but one that it has forked."""
    if os.getpid() != pid:
        raise SecondRank


@contextlib.contextmanager
def in_one_process(report: Callable[[SecondRank], object]) -> Iterator[None]:
    """Run the user's code in the block. A process that it forks may do what it likes, but does not leave the block.

    One that goes on as a second rank is reported, and both processes end.
    """
    pid = os.getpid()
    try:
        yield
        check_process(pid)
    except BaseException as error:
        if os.getpid() == pid:
            raise
        try:
            if not isinstance(error, SecondRank):
                traceback.print_exc()
                return
            report(error)
            if os.getppid() == pid:  # else it has ended by itself
                os.kill(pid, signal.SIGKILL)
        finally:
            _exit(1)
