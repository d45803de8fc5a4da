"""A training step in PyTorch, in float32 or by `torch.amp`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import jax
import numpy as np
import torch

from .._steps import LARGEST_SKIPS, First


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def tensor(x: Any) -> torch.Tensor:
    """Copies an array to the device."""
    return torch.tensor(np.asarray(x), device=DEVICE)


def in_turn(batches: Sequence[Any]) -> Iterator[Any]:
    """Cycles through the batches, on the device."""
    return cycle([tuple(map(tensor, batch)) for batch in batches])


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def autocast(precision: str) -> Any:
    """Returns `torch.autocast` in half precision, and a null context otherwise."""
    half = HALF.get(precision)
    return torch.autocast(DEVICE, dtype=half) if half else nullcontext()


def supervised(model: torch.nn.Module, loss: Callable, precision: str) -> Callable:
    """Returns a function from a batch of inputs and outputs to the loss and the predictions."""

    def evaluate(batch):
        inputs, outputs = batch
        with autocast(precision):
            predictions = model(inputs)
            return loss(predictions, outputs), predictions

    return evaluate


class TorchStep:
    """A step in float32, TF32 (on a GPU) or half precision; float16 uses a `GradScaler` by default.

    `loss` takes a batch and returns the loss and predictions. `gradients` returns the gradients of
    the parameters as NumPy arrays in the order and layout of the JAX network. `learning_rates` are
    those of the steps, if they change.
    """

    def __init__(
        self,
        loss: Callable[[Any], tuple[torch.Tensor, torch.Tensor | None]],
        optimizer: torch.optim.Optimizer,
        precision: str,
        batches: Iterable[Any] = (),
        gradients: Callable[[], Any] = list,
        *,
        grad_scaler: bool | None = None,
        scale: float = 2.0**16,
        learning_rates: Iterable[float] | None = None,
    ):
        self.loss, self.optimizer, self.batches = loss, optimizer, iter(batches)
        self.gradients, self.tf32 = gradients, precision == "TF32"
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.rates = iter(learning_rates) if learning_rates is not None else None
        scaled = precision == "float16" if grad_scaler is None else grad_scaler
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=scale, enabled=scaled)
        self.temp_bytes = None

    def _next(self) -> Any:
        """Sets the learning rate of the next step and returns its batch."""
        if self.rates is not None:
            rate = next(self.rates)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        return next(self.batches)

    def take(self, batch: Any) -> tuple[torch.Tensor, Any]:
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        self.optimizer.zero_grad(set_to_none=True)
        value, predictions = self.loss(batch)
        self.scaler.scale(value).backward(inputs=self.parameters)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return value.detach(), predictions

    def first(self) -> First:
        batch = self._next()
        for skipped in range(LARGEST_SKIPS):
            _, predictions = self.take(batch)
            gradients = self.gradients()
            finite = all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
            if finite or not self.scaler.is_enabled():
                if predictions is not None:
                    predictions = predictions.detach().float().cpu().numpy()
                return First(predictions, gradients, skipped)
        raise FloatingPointError(f"{LARGEST_SKIPS} steps in a row overflow.")

    def __call__(self) -> torch.Tensor:
        batch = self._next()
        if DEVICE == "cpu" or self.temp_bytes is not None:
            value, _ = self.take(batch)
            synchronize()
            return value
        # The optimizer's state exists now and stays; gradients are allocated anew in each step.
        self.optimizer.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value, _ = self.take(batch)
        synchronize()
        self.temp_bytes = torch.cuda.max_memory_allocated() - before
        return value
