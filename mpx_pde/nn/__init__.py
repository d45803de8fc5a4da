"""Networks for PDE models that put precision where it counts."""

from ._activations import (
    exact_gelu as exact_gelu,
    gelu as gelu,
    safe as safe,
    silu as silu,
    sin as sin,
    softplus as softplus,
    tanh as tanh,
)
from ._ansatz import Ansatz as Ansatz
from ._fno import FNO as FNO
from ._mlp import CoordinateMLP as CoordinateMLP
from ._spectral_conv import SpectralConv as SpectralConv
from ._stabilizers import soft_clip as soft_clip
