"""A script that makes an Accelerator, and trains its model without it."""

import accelerate
import torch
from evidence import TOKENS, make_model

accelerate.Accelerator()
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
model(input_ids=TOKENS[:2], labels=TOKENS[:2]).loss.backward()
optimizer.step()
