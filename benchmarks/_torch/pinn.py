"""The laminar cavity of `examples/problems/cavity.py`, trained in PyTorch."""

import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from examples.problems import cavity

from ..pinn_step import Layers
from .cavity import double_backward, layers_of, network, slopes
from .muon import Muon
from .steps import TorchStep, autocast, synchronize, tensor


def lift(points: torch.Tensor) -> torch.Tensor:
    """Computes the fields that contain the corners and meet all boundary conditions."""
    x, y = points.unbind(-1)
    a, b, c, d = cavity._A, cavity._B, cavity._C, 1 - y

    def corner(x):
        angle = torch.arctan2(d, x)
        return a + b * angle + c * angle * x / d

    minus_v, u = slopes(-d * corner(x) * corner(1 - x) * y**2, points).unbind(-1)
    left = (b * d + c * x) / (x**2 + d**2)
    right = (b * d + c * (1 - x)) / ((1 - x) ** 2 + d**2)
    return torch.stack([u, -minus_v, 2 * cavity.NU * (right - left)], dim=-1)


def loss_of(d: dict[str, torch.Tensor], points: torch.Tensor) -> torch.Tensor:
    """Computes the loss of the example."""
    mass = d["u_x"] + d["v_y"]
    x = d["u"] * d["u_x"] + d["v"] * d["u_y"] + d["p_x"] - cavity.NU * d["lap_u"]
    y = d["u"] * d["v_x"] + d["v"] * d["v_y"] + d["p_y"] - cavity.NU * d["lap_v"]
    to_side = torch.minimum(points[:, 0], 1 - points[:, 0])
    corner = to_side**2 + (1 - points[:, 1]) ** 2
    near = lambda radius: (corner / radius**2).clamp(max=1)
    return (cavity.MASS * near(0.01) * mass**2 + near(0.1) ** 2 * (x**2 + y**2)).mean()


def train(
    layers: Layers,
    frequencies: np.ndarray,
    points_by_call: Iterable[np.ndarray],
    rates: Sequence[float],
    precision: str,
) -> Iterator[tuple[float, Layers]]:
    """Trains by double backward and Muon.

    Yields before the first call and after each call the seconds spent on steps and the running
    average of the weights, which covers about the last tenth of the training.

    **Arguments:**

    - `layers`: the initial weights W and biases b of the example's network, x @ W + b.
    - `frequencies`: its Fourier features, shape `[2, features]`, in cycles per unit of length.
    - `points_by_call`: for each call the points of its steps, shape `[steps, batch, 2]`.
    - `rates`: the learning rate of each step, over all calls.
    - `precision`: "float32", "TF32" (on a GPU), or "float16" or "bfloat16" by `torch.amp`, float16
        with `GradScaler`.
    """
    frequency, model = tensor(frequencies), network(layers)
    decay = 1 - 10 / len(rates)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def inner(points):
        """Returns what the network adds to the lift; only the network runs in half precision."""
        phase = 2 * torch.pi * (points @ frequency)
        with autocast(precision):
            out = model(torch.cat([torch.cos(phase), torch.sin(phase)], dim=-1)).float()
        x, y = points.unbind(-1)
        inside = 16 * x * (1 - x) * y * (1 - y)
        return out * torch.stack([inside, inside, torch.ones_like(inside)], dim=-1)

    def loss(batch):
        points, lifted = batch
        d = double_backward(inner, points.detach().requires_grad_(), 2)
        return loss_of({name: lifted[name] + value for name, value in d.items()}, points), None

    step = TorchStep(loss, Muon(model.parameters(), rates), precision, scale=2.0**15)
    seconds = 0.0
    yield seconds, layers
    for points in points_by_call:
        start, batches = time.perf_counter(), tensor(points)
        # The lift depends on no weights, so one pass computes its derivatives for all steps.
        every = double_backward(lift, batches.reshape(-1, 2).requires_grad_(), 2)
        lifted = {k: v.detach().reshape(batches.shape[:2]) for k, v in every.items()}
        for i, batch in enumerate(batches):
            step.take((batch, {k: v[i] for k, v in lifted.items()}))
            average.update_parameters(model)
        synchronize()
        seconds += time.perf_counter() - start
        yield seconds, layers_of(average.module)
