"""Flow and temperature around three heated fins in a channel, in two dimensions, at Re = 20.

The reference is a finite-volume solution of our own. Geometry, points, loss and network are those
of `examples/heat_sink.py`.
"""

from heat_sink import PROBLEM as EXAMPLE

from ._problem import from_example


PROBLEM = from_example(EXAMPLE, coords="xy", order=2, steps=3000)
