"""Derivatives in half precision, with scaled seeds, one unscaling, and scales that adapt."""

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
from ._scaling import DerivativeScaling as DerivativeScaling, Scaling as Scaling
from ._seeds import scaled_jvp as scaled_jvp, scaled_vjp as scaled_vjp
from ._telemetry import plot as plot, telemetry as telemetry
