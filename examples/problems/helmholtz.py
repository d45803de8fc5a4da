"""The Helmholtz equation Δu + u = f on −1 ≤ x, y ≤ 1, with u = sin πx sin 4πy (Wang et al., 2021).

Points, loss and network are those of `examples/helmholtz.py`.
"""

from helmholtz import PROBLEM as EXAMPLE

from ._problem import from_example


PROBLEM = from_example(EXAMPLE, coords="xy", order=2, optimizer="adam", steps=4000)
