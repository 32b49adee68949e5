"""A small model with large activations, for simulated cards: `fault.json` beside the cards' file says what goes wrong.

The keys of the file: `kind`, and the `rank` and the `step` in whose forward pass it happens.
"""

import json
import os
from pathlib import Path

import torch

from tests.support.cards.machine import MIB, Machine

CARDS = Path(os.environ.get("AUTODS_TEST_CARDS", "/nonexistent"))
WIDTH = 64
COPIES = 32 * MIB // (2 * WIDTH)  # of a sample's features in bf16: 32 MiB
PIECE = 24 * MIB


class Activations(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.steps, self.fault = 0, {}

    def forward(self, x):
        if self.steps == 0 and (file := CARDS.with_name("fault.json")).exists():  # ranks share the build
            self.fault = json.loads(file.read_text())
        if self.fault and self.fault["rank"] == int(os.environ["RANK"]) and self.fault["step"] == self.steps:
            FAULTS[self.fault["kind"]](x)
        self.steps += 1
        return self.layer(x).repeat(1, COPIES).square().mean()


def lose_card(x):
    """The card of this rank falls off the bus."""
    machine = Machine(CARDS)
    machine.state.card[machine.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))[x.device.index]].lost = 1


def fill_card(x, left=0):
    """Another process, which outlives the trial, takes what this rank's card has free."""
    machine = Machine(CARDS)
    index = machine.visible(os.environ.get("CUDA_VISIBLE_DEVICES"))[x.device.index]
    free = machine.state.card[index].total_bytes - machine.used_bytes(index)
    machine.hold(int(CARDS.with_name("neighbour.pid").read_text()), index, free - left)


def share_card(x):
    """Another process takes memory that this rank does not need."""
    fill_card(x, left=2**30)


def waste_cache(x):
    """Let the allocator keep small pieces of all that the card has free, and then ask for a large one."""
    free, _ = torch.cuda.mem_get_info()
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    pieces = [torch.empty(PIECE, dtype=torch.uint8, device=x.device) for _ in range((free + idle) // PIECE - 4)]
    del pieces
    torch.empty(100 * PIECE, dtype=torch.uint8, device=x.device)


FAULTS = {"lost": lose_card, "filled": fill_card, "shared": share_card, "wasted": waste_cache}


def build_model():
    return Activations()


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, WIDTH)}
