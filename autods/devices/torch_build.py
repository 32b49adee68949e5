"""The installed torch: what it was built with, read without importing it, and whether it can use cards."""

from __future__ import annotations

import importlib.util
import runpy
from dataclasses import dataclass
from pathlib import Path

from .base import CardReading

# The oldest capability for which a major version of CUDA compiles; its release notes have it under "Deprecated
# Architectures". Version 13 left out Maxwell, Pascal and Volta, as torch's builds for CUDA 12.8 and 12.9 do in part.
_OLDEST_CAPABILITY = {13: (7, 5)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch. `cuda` is the CUDA that it was built with, such as (13, 0); None without CUDA.

    `rocm`: it was built for AMD's cards.
    """

    version: str
    cuda: tuple[int, int] | None
    rocm: bool = False


def read_torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Run torch's version.py, because importing torch takes seconds. None where there is no such file."""
    if folder is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    try:
        values = runpy.run_path(str(folder / "version.py"))
    except OSError:
        return None
    major, _, minor = (values.get("cuda") or "").partition(".")
    cuda = (int(major), int(minor)) if major else None
    return TorchBuild(version=values["__version__"], cuda=cuda, rocm=bool(values.get("hip")))


def explain_unusable(seen: CardReading, torch: TorchBuild | None) -> str | None:
    """Return why torch cannot use the cards. A driver runs all minor versions of its major version of CUDA."""
    if not seen.cards or torch is None:
        return None
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA\n  install a CUDA build of torch: pytorch.org/get-started"
    if seen.cuda is not None and torch.cuda[0] > (driver_major := int(seen.cuda.partition(".")[0])):
        needs = ".".join(map(str, torch.cuda))
        return (
            f"torch {torch.version} needs CUDA {needs}, and the driver {seen.driver} runs {seen.cuda} at most\n"
            f"  update the driver, or install a build of torch for CUDA {driver_major}"
        )
    oldest = _OLDEST_CAPABILITY.get(torch.cuda[0], (0, 0))
    for card in seen.cards:
        if card.capability is not None and card.capability < oldest:
            has, needs = (".".join(map(str, version)) for version in (card.capability, oldest))
            return (
                f"torch {torch.version} has no kernels for the {card.name}: its CUDA needs compute capability {needs} "
                f"or later, and the card has {has}\n"
                "  install a build of torch for CUDA 12.6, or leave the card out: CUDA_VISIBLE_DEVICES"
            )
    return None
