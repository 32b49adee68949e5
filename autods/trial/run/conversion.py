"""Which checkpoints an attempt can load as they are, which have to be converted first, and which it cannot load."""

from __future__ import annotations

from dataclasses import replace

from .checkpoints import Checkpoint, Layout


def needs_conversion(checkpoint: Checkpoint, layout: Layout) -> bool:
    """Whether an engine of this layout can load the checkpoint in its converted form only."""
    saved = checkpoint.layout
    if saved.stage == layout.stage == 0:
        return False  # every rank saves and loads the whole states
    # Offloading to the host moves states, and changes no file.
    return _ignore_host(saved) != _ignore_host(layout)


def find_obstacle(checkpoint: Checkpoint, layout: Layout) -> str | None:
    """Return why an engine of this layout cannot load the checkpoint in any form; None if it can."""
    if checkpoint.layout.precision != layout.precision:
        return f"it was saved in {checkpoint.layout.precision or 'fp32'}, not in {layout.precision or 'fp32'}"
    return None


def convert_to_universal(checkpoint: Checkpoint) -> None:
    """Convert the checkpoint in a process of its own, unless it has been. Raises ConversionFailed with the reason."""
    raise NotImplementedError


class ConversionFailed(Exception):
    """A checkpoint could not be converted. The message is the reason, such as a full disk."""


def _ignore_host(layout: Layout) -> Layout:
    def on_nvme(device: str | None) -> str | None:
        return device if device == "nvme" else None

    return replace(
        layout, offload_optimizer=on_nvme(layout.offload_optimizer), offload_param=on_nvme(layout.offload_param)
    )
