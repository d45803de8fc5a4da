"""The lid-driven cavity with the zero-equation turbulence model, ν = 1/Re + l² √(2 S:S).

    ν = 1/Re + l² √(2 u_x² + 2 v_y² + (u_y + v_x)²),    l = min(0.419 d, 0.045),

where d is the distance to the nearest wall (Xue et al., equation 1). Derivatives of ν are
derivatives of derivatives; their range differs from that of second derivatives, so they have their
own scales. The reference is a finite-volume solution of our own.
"""

import dataclasses
from functools import partial

import mpx_pde as mpx

from . import cavity


PROBLEM = dataclasses.replace(
    cavity.PROBLEM,
    title="Lid-driven cavity, zero-equation turbulence",
    loss=partial(cavity.loss, viscosity=cavity.turbulent_viscosity),
    errors=partial(cavity.errors, turbulence=True),
    steps=3000,
    derivatives=lambda: mpx.DerivativeScaling.per_order(2, special=["nu_x", "nu_y"]),
)
