"""Networks for PDE models that put precision where it counts."""

from ._activations import (
    gelu as gelu,
    safe as safe,
    silu as silu,
    sin as sin,
    softplus as softplus,
    tanh as tanh,
)
from ._mlp import CoordinateMLP as CoordinateMLP
