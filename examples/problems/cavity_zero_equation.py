"""The lid-driven cavity with the zero-equation turbulence model, ν = 1/Re + l² √(2 S:S).

Derivatives of a viscosity that is made of derivatives. The reference is a finite-volume solution of
our own. Points, loss and network are those of `examples/lid_driven_cavity.py`.
"""

from lid_driven_cavity import problem

from ._problem import from_example


EXAMPLE = problem("zero-equation")
PROBLEM = from_example(
    EXAMPLE,
    coords="xy",
    order=2,
    steps=3000,
    # The viscosity has a scaler of its own, as in the example.
    derivatives=lambda: EXAMPLE.derivatives(None, "paper"),
)
