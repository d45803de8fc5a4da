"""A training step in PyTorch, in float32 or by `torch.amp`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch

from .._measured import First


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(x: Any) -> torch.Tensor:
    """A copy of an array on the device."""
    return torch.tensor(np.asarray(x), device=DEVICE)


def in_turn(batches: Sequence[Any]) -> Iterator[Any]:
    """The batches again and again, on the device."""
    return cycle([tuple(map(tensor, batch)) for batch in batches])


class TorchStep:
    """A step in float32, or by `torch.autocast` to `half`, with a `GradScaler` if asked for.

    `gradients` are those of the parameters as NumPy arrays in the order and layout of the JAX
    network; `learning_rates` those of the steps, where they change. `tf32` says what a GPU may make
    of float32 products.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
        gradients: Callable[[], Sequence[np.ndarray]],
        *,
        half: torch.dtype | None = None,
        grad_scaler: bool = False,
        learning_rates: Sequence[float] | None = None,
        tf32: bool = False,
    ):
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.batches = batches
        self.gradients, self.half, self.tf32 = gradients, half, tf32
        self.rates = iter(learning_rates) if learning_rates is not None else None
        self.scaler = torch.amp.GradScaler(DEVICE, enabled=grad_scaler)
        self.temp_bytes = None

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        torch.backends.cudnn.allow_tf32 = self.tf32
        if self.rates is not None:
            rate = next(self.rates)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
        inputs, outputs = next(self.batches)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, dtype=self.half, enabled=self.half is not None):
            predictions = self.model(inputs)
            value = self.loss(predictions, outputs)
        self.scaler.scale(value).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return value.detach(), predictions.detach()

    def first(self) -> First:
        _, predictions = self._step()
        return First(predictions.float().cpu().numpy(), self.gradients())

    def __call__(self) -> torch.Tensor:
        if DEVICE == "cpu" or self.temp_bytes is not None:
            return self._step()[0]
        # The optimizer's state is there now, and stays; the gradients come and go.
        self.optimizer.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value, _ = self._step()
        self.temp_bytes = torch.cuda.max_memory_allocated() - before
        return value
