"""20,480 parameters without biases in five equal layers: what a collective moves can be told in advance."""

import torch

WIDTH, LAYERS = 64, 5
PARAMETERS = LAYERS * WIDTH * WIDTH


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, samples):
        return torch.nn.functional.mse_loss(self.layers(samples), samples)


def build_model():
    return Counted()


def build_batch(micro_batch_size):
    return {"samples": torch.randn(micro_batch_size, WIDTH)}
