"""Keep the traces of a script out of the user's world: its files, its checkpoints and its experiment trackers."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...devices import find_device
from ...system.host import cache_folder
from ...system.landlock import confine_writes
from ..job import RankJob
from ..patching import declare, declare_all, when_imported
from .batches import iter_tensors
from .overlay import LARGEST_COPIED, Overlay
from .policy import Policy, Zeros, make_skipped_folder
from .user_errors import WRITABLE

# Experiment trackers, by their own switches.
_TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_MODE": "disabled",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "CLEARML_OFFLINE_MODE": "1",
    "NEPTUNE_MODE": "debug",
    "TRACKIO_MODE": "disabled",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}
# Caches may be written: they make the next trial faster.
_CACHES = (
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE", "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "NLTK_DATA",
)  # fmt: skip
_NOT_SAVED = "a trial does not save models"
_ENGINE_SAVES = declare_all(
    "deepspeed.runtime.engine.DeepSpeedEngine",
    ("save_checkpoint", "save_16bit_model", "save_fp16_model"),
    _NOT_SAVED,
    optional=True,
)
_ENGINE_LOAD = declare(
    "deepspeed.runtime.engine.DeepSpeedEngine.load_checkpoint", "a trial begins anew, whatever rung has saved before"
)
# Functions that write a model to the file that is their second argument.
_FILE_SAVES = (
    declare("torch.save", _NOT_SAVED),
    declare("safetensors.torch.save_file", _NOT_SAVED),
    declare("safetensors.torch.save_model", _NOT_SAVED),
    declare("safetensors.numpy.save_file", _NOT_SAVED),
    declare("safetensors.serialize_file", _NOT_SAVED),  # libraries import `save_file` under names of their own
)
_LMDB = declare("lmdb.open", "it writes a lock file, also beside data that are only read")
_WANDB = declare("wandb.init", 'mode="online" in a script overrides the environment')


def install(policy: Policy, rank: int) -> tuple[Overlay, bool]:
    """Set the sandbox up for the rest of this process; return the overlay, and whether the kernel confines writes.

    Saves are no part of training, and neither is a checkpoint that the script goes on from. Small files are written to
    the overlay, where the script finds them again. Large files are empty there, and so are the folders of checkpoints:
    a script may go on with them, for example copy them.
    What bypasses the overlay is refused by the kernel, if it can. CUDA must be initialised before, if it is needed:
    its setuid helper nvidia-modprobe gains no privileges any more.
    """
    scratch = Path(policy.job.scratch)
    temporary, link = scratch / "tmp", Path(policy.job.private) / f"tmp{rank}"
    temporary.mkdir(parents=True, exist_ok=True)
    link.symlink_to(temporary)  # short: DataLoader workers make sockets in it, whose paths have at most 107 characters
    tempfile.tempdir = str(link)
    os.environ.update(_TRACKERS_OFF, TMPDIR=str(link), MLFLOW_TRACKING_URI=f"file:{scratch / 'mlruns'}")
    for patch in _ENGINE_SAVES.values():
        patch.wrap(_skip_checkpoint, policy)
    _ENGINE_LOAD.wrap(skip_load, policy)
    for patch in _FILE_SAVES:
        with contextlib.suppress(ImportError):  # safetensors may be missing
            patch.wrap(_skip_large_file, policy, everywhere=True)
    free = tuple(list_free_folders(policy.job))
    confined = confine_writes(free)
    # A rank of another node reads what rank 0 wrote into a folder of the cluster, such as prepared data.
    overlay = Overlay(policy.job.shared_folder / "written", free)
    overlay.install()
    overlay.follow_children(Path(policy.job.private) / f"python{rank}")
    when_imported("lmdb", read_lmdb_unlocked)
    when_imported("wandb", disable_wandb)
    return overlay, confined


def list_free_folders(job: RankJob) -> Iterator[str]:
    """The folders in which a script may write, each also by its real path: the trial's own, caches, and the system's.

    Missing caches are made: where the kernel refuses writes, nobody could make them later. Links in them count as well.
    """
    at_home = [str(Path.home() / name) for name in find_device(job.device).cache_folders]
    named = [folder for name in _CACHES if (folder := os.environ.get(name))]
    # Inductor decides at import where it compiles headers, whatever TORCHINDUCTOR_CACHE_DIR says later.
    headers = getattr(sys.modules.get("torch._inductor.codecache"), "_HEADER_DIR", None)
    named += [str(cache_folder()), *at_home, *([headers] if headers else [])]
    caches = [os.path.join(job.source.folder or "", folder) for folder in named]
    for folder in caches:
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    places = ("*", "huggingface/*", "torch/*")
    below = [str(path) for folder in caches for place in places for path in Path(folder).glob(place)]
    given = filter(None, os.environ.get(WRITABLE, "").split(os.pathsep))
    trials = (job.scratch, job.folder, str(job.shared_folder), job.swap, job.private)
    system = ("/dev", "/proc", "/sys", sys.prefix)
    for path in filter(None, (*trials, *caches, *filter(os.path.islink, below), *given, *system)):
        yield path
        yield os.path.realpath(path)


def read_lmdb_unlocked() -> None:
    """Let `lmdb.open(…, readonly=True)` do without its lock file, which the kernel would refuse."""

    def open_unlocked(original: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **({**kwargs, "lock": False} if kwargs.get("readonly") else kwargs))

    _LMDB.wrap(open_unlocked)


def disable_wandb() -> None:
    """Let `wandb.init` ignore the mode that a script asks for."""
    _WANDB.wrap(lambda original, *args, **kwargs: original(*args, **{**kwargs, "mode": "disabled"}))


def _skip_checkpoint(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    if policy.hooks_paused:
        return original(*args, **kwargs)
    policy.begin_skipped("save")
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    make_skipped_folder(os.path.join(arguments["save_dir"], str(arguments.get("tag") or "")))
    return True


def skip_load(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Load nothing, as where DeepSpeed finds no checkpoint. The files of another rung would not fit this engine."""
    if policy.hooks_paused:
        return original(*args, **kwargs)
    policy.begin_skipped("load")
    return None, Zeros()


def _skip_large_file(policy: Policy, original: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Save tensors that fit into a small file; a large file is empty. A buffer in memory gets all of them."""
    from torch.nn import Module

    target: Any = args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename"))
    if policy.hooks_paused or target is None or isinstance(target, io.BytesIO):
        return original(*args, **kwargs)
    policy.begin_skipped("save")
    if not isinstance(target, (str, bytes, os.PathLike)):
        return None
    value = args[0] if args and original.__module__.startswith("torch.") else None
    tensors = value.parameters() if isinstance(value, Module) else iter_tensors(value)
    descriptor, temporary = tempfile.mkstemp()  # moved to its place at once: all ranks may save, and one may read
    with os.fdopen(descriptor, "wb") as file:
        if value is not None and sum(t.numel() * t.element_size() for t in tensors) <= LARGEST_COPIED:
            with contextlib.suppress(Exception):  # values that cannot be pickled, such as simulated tensors
                original(value, file)
    with contextlib.suppress(OSError):
        shutil.move(temporary, os.fsdecode(target))
    return None
