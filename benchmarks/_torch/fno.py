"""neuraloperator's FNO with the weights of `mpx_pde.nn.FNO`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from neuralop.models import FNO

from .steps import DEVICE, TorchStep, in_turn, supervised, tensor


def _parameters(model: FNO) -> list[torch.nn.Parameter]:
    """Returns the parameters in the order of the leaves of `mpx_pde.nn.FNO`."""
    mlp = lambda m: [p for layer in m.fcs for p in (layer.weight, layer.bias)]
    blocks, out = model.fno_blocks, mlp(model.lifting)
    for i, conv in enumerate(blocks.convs):
        out += [conv.weight.tensor, blocks.fno_skips[i].conv.weight, conv.bias]
        out += [*mlp(blocks.channel_mlp[i]), blocks.channel_mlp_skips[i].weight]
    return out + mlp(model.projection)


def _to_torch(array: Any) -> torch.Tensor:
    """Converts spectral weights `[k_1, k_2, in, out, 2]` to complex `[in, out, k_1, k_2]`."""
    x = tensor(array)
    return torch.view_as_complex(x.permute(2, 3, 0, 1, 4).contiguous()) if x.ndim == 5 else x


def _to_numpy(x: torch.Tensor, shape: Sequence[int]) -> np.ndarray:
    if x.is_complex():
        x = torch.view_as_real(x).permute(2, 3, 0, 1, 4)
    return x.float().cpu().numpy().reshape(shape)


def network(leaves: Sequence[Any], **options: Any) -> tuple[FNO, list[torch.nn.Parameter]]:
    """Builds the network, and lists its parameters in the order of `leaves`.

    `leaves` are the arrays of a `mpx_pde.nn.FNO` with one input and one output channel. `options`
    are passed to neuraloperator's FNO.
    """
    spectral = [leaf for leaf in leaves if leaf.ndim == 5]
    modes, _, channels, _, _ = spectral[0].shape
    sizes = {"n_modes": (modes, modes), "in_channels": 1, "out_channels": 1}
    sizes |= {"hidden_channels": channels, "n_layers": len(spectral)}
    model = FNO(**sizes, **options).to(DEVICE)
    parameters = _parameters(model)
    with torch.no_grad():
        for parameter, leaf in zip(parameters, leaves, strict=True):
            parameter.copy_(_to_torch(leaf).reshape(parameter.shape))
    # In its last block, neuraloperator has no activation between convolution and MLP.
    mlps = model.fno_blocks.channel_mlp
    mlps[-1] = torch.nn.Sequential(torch.nn.GELU(), mlps[-1])
    return model, parameters


def relative_l2(prediction: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    norm = lambda x: torch.linalg.vector_norm(x.float(), dim=(1, 2, 3))
    return torch.mean(norm(prediction.float() - truth) / norm(truth))


def step(
    leaves: Sequence[Any],
    batches: Sequence[tuple[Any, Any]],
    learning_rate: float,
    precision: str = "float32",
    *,
    grad_scaler: bool = False,
    **options: Any,
) -> TorchStep:
    """Builds a step with Adam and the relative L2 loss, with the data and weights of JAX.

    neuraloperator's own trainer does not scale gradients, and a `GradScaler` rejects complex ones.
    """
    model, parameters = network(leaves, **options)

    def gradients():
        return [_to_numpy(p.grad, x.shape) for p, x in zip(parameters, leaves, strict=True)]

    return TorchStep(
        supervised(model, relative_l2, precision),
        torch.optim.Adam(parameters, lr=learning_rate),
        precision,
        in_turn(batches),
        gradients,
        grad_scaler=grad_scaler,
    )
