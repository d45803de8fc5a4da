"""The vision transformer of `examples/vit.py`, with its weights."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .steps import DEVICE, TorchStep, in_turn, supervised, tensor


class Attention(nn.Module):
    def __init__(self, features: int, heads: int):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.queries = nn.Linear(features, features)
        self.keys = nn.Linear(features, features)
        self.values = nn.Linear(features, features)
        self.out = nn.Linear(features, features)
        self.heads = heads

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.first = nn.Linear(features, hidden)
        self.second = nn.Linear(hidden, features)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(self.norm(x)), approximate="tanh"))


class ViT(nn.Module):
    """The network in PyTorch; `size` is a `Size` of `examples/vit.py`."""

    def __init__(self, size: Any):
        super().__init__()
        self.embedding = nn.Linear(size.channels * size.patch**2, size.features)
        self.positions = nn.Parameter(torch.zeros(size.tokens, size.features))
        blocks = [
            (Attention(size.features, size.heads), Dense(size.features, size.hidden))
            for _ in range(size.blocks)
        ]
        self.blocks = nn.Sequential(*(layer for block in blocks for layer in block))
        self.norm = nn.LayerNorm(size.features)
        self.head = nn.Linear(size.features, size.classes)
        self.patch = size.patch

    def forward(self, images):
        b, c, n, _ = images.shape
        n, p = n // self.patch, self.patch
        patches = images.reshape(b, c, n, p, n, p).permute(0, 2, 4, 1, 3, 5).reshape(b, n * n, -1)
        x = self.blocks(self.embedding(patches) + self.positions)
        return self.head(self.norm(x).mean(1))

    def ordered(self) -> list[nn.Parameter]:
        """Returns the parameters in the order of the leaves of the JAX network."""
        layers = [self.embedding, *self.blocks, self.norm, self.head]
        first, *rest = ([*layer.parameters()] for layer in layers)
        return [*first, self.positions, *(p for layer in rest for p in layer)]


def step(
    size: Any,
    leaves: Sequence[Any],
    batches: Sequence[tuple[Any, Any]],
    rate: Callable[[int], Any],
    weight_decay: float,
    precision: str,
) -> TorchStep:
    """Builds a step with AdamW, with the weights and data of JAX; `rate(i)` is step i's rate."""
    model = ViT(size).to(DEVICE)
    parameters = model.ordered()
    with torch.no_grad():
        for parameter, leaf in zip(parameters, leaves, strict=True):
            parameter.copy_(tensor(leaf))

    def gradients() -> list[np.ndarray]:
        return [p.grad.cpu().numpy() for p in parameters]

    loss = lambda logits, labels: F.cross_entropy(logits, labels.long())
    return TorchStep(
        supervised(model, loss, precision),
        torch.optim.AdamW(parameters, weight_decay=weight_decay),
        precision,
        in_turn(batches),
        gradients,
        learning_rates=(float(rate(i)) for i in count()),
    )
