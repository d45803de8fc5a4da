"""Networks for PDE models that put precision where it counts."""

from ._activations import (
    exact_gelu as exact_gelu,
    gelu as gelu,
    safe as safe,
    silu as silu,
    sin as sin,
    soft_clip as soft_clip,
    softplus as softplus,
    tanh as tanh,
)
from ._fno import FNO as FNO
from ._mlp import Ansatz as Ansatz, CoordinateMLP as CoordinateMLP
from ._spectral_conv import SpectralConv as SpectralConv
