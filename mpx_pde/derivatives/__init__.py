"""Derivatives in half precision, with scaled seeds, one unscaling, and scales that adapt."""

from ..scaling._derivatives import DerivativeScaling as DerivativeScaling, Scaling as Scaling
from ..scaling._seeds import scaled_jvp as scaled_jvp, scaled_vjp as scaled_vjp
from ..scaling._telemetry import plot as plot, telemetry as telemetry
from ._drop_ins import (
    grad as grad,
    hessian as hessian,
    jacfwd as jacfwd,
    jacrev as jacrev,
)
from ._evaluation import DerivativeReport as DerivativeReport
from ._partials import (
    laplacian as laplacian,
    linear_operator as linear_operator,
    partials as partials,
)
