"""The training step on the cavity in PyTorch: see `benchmarks/pinn_step.py`."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import numpy as np
import torch
from torch.func import jvp, vmap

from ..pinn_step import Layers, balance, named, nested
from .steps import DEVICE, TorchStep, autocast


# All compiled steps share the same code, but each has its own compiled program.
torch._dynamo.config.recompile_limit = 64  # pyright: ignore

LEARNING_RATE = 1e-3  # as for the other libraries, `_steps.adam`


def network(layers: Layers) -> torch.nn.Sequential:
    """Builds a tanh network with these weights."""
    modules: list[torch.nn.Module] = []
    for weight, bias in layers:
        linear = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(weight.T))
            linear.bias.copy_(torch.tensor(bias))
        modules += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*modules[:-1]).to(DEVICE)


def layers_of(model: torch.nn.Sequential, value: Callable = lambda p: p) -> Layers:
    """Returns the weights of a network in NumPy, or `value` of each weight."""
    array = lambda p: value(p).detach().cpu().numpy().copy()
    return [(array(m.weight).T, array(m.bias)) for m in model if isinstance(m, torch.nn.Linear)]


# --- Derivatives -----------------------------------------------------------------------------


def slopes(y: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Returns the derivatives of y, shape [points], with respect to both coordinates."""
    return torch.autograd.grad(y.sum(), points, create_graph=True)[0]


def double_backward(fun: Callable, points: torch.Tensor, order: int) -> dict[str, torch.Tensor]:
    """Computes the inputs of `balance` by reverse mode over reverse mode; `points` must require
    their gradient."""
    value = fun(points).float().unbind(-1)
    first = [slopes(y, points).unbind(-1) for y in value]
    d = named(value, *zip(*first, strict=True))
    for name, coordinate, (x, y) in zip("uv", (0, 1), first, strict=False):
        if order >= 2:
            d[f"lap_{name}"] = slopes(x, points)[:, 0] + slopes(y, points)[:, 1]
        if order >= 3:
            along = f"lap_{name}_{'xy'[coordinate]}"
            d[along] = slopes(d[f"lap_{name}"], points)[:, coordinate]
    return d


def vmapped_jvp(fun: Callable, points: torch.Tensor, order: int) -> dict[str, torch.Tensor]:
    """Computes the same by `torch.func`: forward mode over forward mode, at each point."""
    eye = partial(torch.eye, device=points.device)
    return vmap(nested(fun, order, jvp=jvp, eye=eye))(points)


METHODS = {"double backward": double_backward, "torch.func": vmapped_jvp}


# --- The step --------------------------------------------------------------------------------


def cavity_step(
    method: str,
    precision: str,
    compiled: bool,
    scale: float,
    layers: Layers,
    points: np.ndarray,
    order: int,
) -> TorchStep:
    """Builds a step with `torch.amp` in half precision, and with `GradScaler` in float16.

    As PyTorch's documentation recommends, the network and its derivatives with respect to the
    points run inside `autocast`, and the loss outside in float32.
    """
    model = network(layers)

    def loss(points):
        with autocast(precision):
            d = METHODS[method](model, points, order)
        mass, x, y = balance({name: value.float() for name, value in d.items()}, order)
        return (mass**2 + x**2 + y**2).mean()

    evaluate = torch.compile(loss) if compiled else loss
    batch = torch.tensor(points, device=DEVICE, requires_grad=method == "double backward")
    return TorchStep(
        lambda batch: (evaluate(batch), None),
        torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=DEVICE == "cuda"),
        precision,
        cycle([batch]),
        lambda: layers_of(model, lambda p: p.grad),
        scale=scale,
    )
