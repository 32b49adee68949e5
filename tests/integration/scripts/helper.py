"""A module beside the scripts."""

import torch


def build(width):
    """A model and its data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    return model, torch.utils.data.TensorDataset(torch.randn(512, width), torch.randn(512, width))
