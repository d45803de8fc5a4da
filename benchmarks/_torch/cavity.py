"""The training step on the cavity in PyTorch: see `benchmarks/_cavity.py`."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.func import jvp, vmap

from .._cavity import Layers, balance, named, nested
from .steps import DEVICE


HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Every compiled step has the same code, and a compiled program of its own.
torch._dynamo.config.recompile_limit = 64  # pyright: ignore

LEARNING_RATE = 1e-3  # that of the other libraries, `_steps.optimizer`


def network(layers: Layers) -> torch.nn.Sequential:
    """A tanh network with these weights."""
    modules: list[torch.nn.Module] = []
    for weight, bias in layers:
        linear = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(weight.T))
            linear.bias.copy_(torch.tensor(bias))
        modules += [linear, torch.nn.Tanh()]
    return torch.nn.Sequential(*modules[:-1]).to(DEVICE)


def layers_of(model: torch.nn.Sequential, value: Callable = lambda p: p) -> Layers:
    """The weights of a network in NumPy, or what `value` makes of them."""
    array = lambda p: value(p).detach().cpu().numpy().copy()
    return [(array(m.weight).T, array(m.bias)) for m in model if isinstance(m, torch.nn.Linear)]


def autocast(precision: str) -> Any:
    if precision not in HALF:
        return nullcontext()
    return torch.autocast(DEVICE, dtype=HALF[precision])


# --- Derivatives -----------------------------------------------------------------------------


def slopes(y: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The derivatives of y, shape [points], with respect to both coordinates."""
    return torch.autograd.grad(y.sum(), points, create_graph=True)[0]


def double_backward(fun: Callable, points: torch.Tensor, order: int) -> dict[str, torch.Tensor]:
    """What `balance` wants, by reverse mode over reverse mode: for `points` that require
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
    """The same by `torch.func`: forward mode over forward mode, at each point."""
    eye = partial(torch.eye, device=points.device)
    return vmap(nested(fun, order, jvp=jvp, eye=eye))(points)


METHODS = {"double backward": double_backward, "torch.func": vmapped_jvp}


# --- The step --------------------------------------------------------------------------------


class CavityStep:
    """A step with `torch.amp` in half precision, and `GradScaler` in float16.

    Derivatives with respect to the points come out of `autocast` as its documentation has it: the
    network inside, the loss in float32.
    """

    def __init__(
        self,
        method: str,
        precision: str,
        compiled: bool,
        scale: float,
        layers: Layers,
        points: np.ndarray,
        order: int,
    ):
        self.precision = precision
        self.model = network(layers)
        self.parameters = list(self.model.parameters())
        reverse = method == "double backward"
        self.points = torch.tensor(points, device=DEVICE, requires_grad=reverse)
        fused = DEVICE == "cuda"
        self.optimizer = torch.optim.Adam(self.parameters, lr=LEARNING_RATE, fused=fused)
        scaled = precision == "float16"
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=scale, enabled=scaled)

        def loss(points):
            with autocast(precision):
                d = METHODS[method](self.model, points, order)
            mass, x, y = balance({name: value.float() for name, value in d.items()}, order)
            return (mass**2 + x**2 + y**2).mean()

        self.loss = torch.compile(loss) if compiled else loss

    def temp_bytes(self) -> int | None:
        """What the allocator of the GPU hands out in a step."""
        if DEVICE != "cuda":
            return None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self()
        return torch.cuda.max_memory_allocated() - before

    def __call__(self) -> torch.Tensor:
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "TF32"
        self.optimizer.zero_grad()
        value = self.loss(self.points)
        self.scaler.scale(value).backward(inputs=self.parameters)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return value.detach()

    def layers(self) -> Layers:
        return layers_of(self.model)

    def moment(self) -> Layers:
        """Of zeros before the first step that counts."""
        state = self.optimizer.state
        moment = lambda p: state[p]["exp_avg"] if p in state else torch.zeros_like(p)
        return layers_of(self.model, moment)
