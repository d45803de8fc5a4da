"""Support for the loops, losses and layers of other libraries."""

from ._optax import (
    LossScalingState as LossScalingState,
    scale_by_loss_scaling as scale_by_loss_scaling,
)
from ._optimistix import least_squares_solver as least_squares_solver
from ._spectral import convert_spectral_layers as convert_spectral_layers
