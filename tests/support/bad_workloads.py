"""Faulty workloads: each is a good one with one change, and the message that it must give."""

from __future__ import annotations

from functools import partial

from tests.support.faults import Fault

GOOD = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).mean()


def build_model():
    return Model()


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, 4)}
"""


Bad = partial(Fault, good=GOOD)

# Found without running anything.
ON_SIGHT = {
    "a syntax error": Bad(
        old="return Model()", new="return Model(", line=14, message="syntax error: '(' was never closed"
    ),
    "no build_model": Bad(old="build_model", new="make_model", line=None, message="defines no build_model"),
    "no build_batch": Bad(old="build_batch", new="make_batch", line=None, message="defines no build_batch"),
}

# Found by building the model and a batch, before any trial.
IN_THE_SURVEY = {
    "raising at import": Bad(old="\n\nclass", new="\nprint(1 / 0)\n\nclass", line=3, message="ZeroDivisionError"),
    "leaving at import": Bad(
        old="\n\nclass", new="\nraise SystemExit(7)\n\nclass", line=3, message="sys.exit(7) was called"
    ),
    "build_model that is no function": Bad(
        old="def build_batch",
        new="build_model = 1\n\ndef build_batch",
        line=None,
        message="defines no function build_model",
    ),
    "a missing import": Bad(
        old="import torch\n", new="import torch, no_such_module\n", line=1, message="No module named"
    ),
    "build_model that raises": Bad(
        old="return Model()", new="raise ValueError('no weights here')", line=14, message="ValueError: no weights here"
    ),
    "build_model that returns no module": Bad(
        old="return Model()", new="return 'gpt2'", line=None, message="build_model returned str"
    ),
    "build_model that forgets to return": Bad(
        old="return Model()", new="Model()", line=None, message="build_model returned NoneType"
    ),
    "a model without parameters": Bad(
        old="torch.nn.Linear(4, 1)", new="torch.nn.Identity()", line=None, message="without a parameter to train"
    ),
    "build_batch that raises": Bad(
        old="torch.ones(micro_batch_size, 4)", new="open('/no/such/data')", line=18, message="No such file"
    ),
    "build_batch that returns no tensor": Bad(
        old='{"x": torch.ones(micro_batch_size, 4)}', new="{}", line=None, message="build_batch returned no tensor"
    ),
    "a batch of a fixed first dimension": Bad(
        old="ones(micro_batch_size, 4)",
        new="ones(3, 4)",
        line=None,
        message="build_batch(1) returned 'x' of shape (3, 4)",
    ),
}

# Only a trial can find these.
IN_A_TRIAL = {
    "a batch of the wrong width": Bad(
        old="ones(micro_batch_size, 4)", new="ones(micro_batch_size, 5)", line=10, message="cannot be multiplied"
    ),
    "a batch with a key that forward does not take": Bad(
        old='{"x":', new='{"y":', line=None, message="unexpected keyword argument 'y'"
    ),
    "a loss that is not a scalar": Bad(
        old="self.layer(x).mean()",
        new="self.layer(x).expand(-1, 3)",
        line=None,
        message="the loss is not a scalar: its shape is (1, 3)",
    ),
    "no loss": Bad(
        old="self.layer(x).mean()",
        new='{"logits": self.layer(x)}',
        line=None,
        message="the model returned dict of logits, no loss",
    ),
    "a NaN loss": Bad(
        old="self.layer(x).mean()",
        new="self.layer(x).mean() * float('nan')",
        line=None,
        message="the loss is nan at step 1",
    ),
    "a loss without a gradient": Bad(
        old="self.layer(x).mean()", new="self.layer(x).mean().detach()", line=None, message="the loss has no gradient"
    ),
    "leaving in forward": Bad(
        old="return self.layer(x).mean()", new="exit(3)", line=10, message="sys.exit(3) was called"
    ),
}

# Fills the disk, so that the trial cannot write its result.
FILLING = GOOD.replace(
    "        return self.layer",
    """        with open("FILLER", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
        return self.layer""",
)

# Prints 20 KiB a step, so that the logs of trials fill a small disk.
TALKING = GOOD.replace("        return self.layer", "        print(20 * 1024 * 'x')\n        return self.layer")
