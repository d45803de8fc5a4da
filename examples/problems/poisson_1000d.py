"""The Poisson equation in the unit ball of 1,000 dimensions, by sampled second derivatives.

Its solution is known (Hu et al., *Tackling the curse of dimensionality with physics-informed neural
networks*, 2024). Points, loss and network are those of `examples/high_dimensions.py`.
"""

from high_dimensions import PROBLEM as EXAMPLE

from ._problem import from_example


PROBLEM = from_example(
    EXAMPLE,
    order=2,
    optimizer="adam",
    steps=2000,
    # A scale for each order: with one for each of 1,000 coordinates, half a million histograms.
    derivatives=lambda: EXAMPLE.derivatives(None, "paper"),
)
