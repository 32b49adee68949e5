"""A model that torch.compile takes apart, with a part that it must leave alone; the backend only counts the graphs."""

import torch

graphs = []


def counted(graph, inputs):
    graphs.append(graph)
    return graph.forward


@torch.compiler.disable
def alone(x):
    assert not torch.compiler.is_compiling()
    return x * 1


def squared(x):
    return (alone(x * 2) ** 2).mean()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.squared = torch.compile(squared, backend=counted)

    def forward(self, x):
        return self.squared(self.layers(x))


def build_model():
    net = Net()
    net.compile(backend=counted)
    return net


def build_batch(micro_batch_size):
    return (torch.ones(micro_batch_size, 16),)


def loss(model, batch):
    value = model(*batch)
    assert len(graphs) >= 2, f"{len(graphs)} graphs were compiled"  # before and after `alone`
    return value
