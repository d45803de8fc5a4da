"""Muon as in Optax, so that PyTorch takes the same steps."""

from collections.abc import Iterable, Sequence

import torch


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Optax's


def orthogonalized(x: torch.Tensor, steps: int = 5, eps: float = 1e-8) -> torch.Tensor:
    """Approximates the nearest matrix with orthonormal rows or columns by Newton–Schulz steps."""
    a, b, c = COEFFICIENTS
    x = x / (torch.linalg.norm(x) + eps)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """`optax.contrib.muon` with learning rate `rates[i]` in step i: orthogonalized momentum for
    matrices, and Adam with Nesterov momentum for all other parameters.

    Matrices are the weights of `torch.nn.Linear`, whose first axis indexes the outputs.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], rates: Sequence[float]):
        super().__init__(parameters, {})
        self.rates, self.count = rates, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        rate = self.rates[self.count]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(rate * (self._muon(p) if p.ndim == 2 else self._adam(p)))

    def _momentum(self, p: torch.Tensor, beta: float) -> torch.Tensor:
        """Returns bias-corrected Nesterov momentum."""
        state, t = self.state[p], self.count
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        ahead = state["momentum"].lerp_(p.grad, 1 - beta) / (1 - beta ** (t + 1))
        return beta * ahead + (1 - beta) / (1 - beta**t) * p.grad

    def _muon(self, p: torch.Tensor) -> torch.Tensor:
        outputs, inputs = p.shape
        return max(1.0, outputs / inputs) ** 0.5 * orthogonalized(self._momentum(p, 0.95))

    def _adam(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if "square" not in state:
            state["square"] = torch.zeros_like(p)
        v = state["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
        return self._momentum(p, 0.9) / ((v / (1 - 0.999**self.count)).sqrt() + 1e-8)
