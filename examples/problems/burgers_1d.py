"""Burgers' equation u_t + u u_x = ν u_xx with ν = 0.01/π, on −1 ≤ x ≤ 1 up to t = 1.

From −sin πx at first, 0 at the ends, to a shock 0.01 wide (Raissi et al., 2019). The solution is
that of Cole and Hopf. Points, loss and network are those of `examples/burgers.py`.
"""

from burgers import PROBLEM as EXAMPLE

from ._problem import from_example


PROBLEM = from_example(EXAMPLE, coords="tx", order=2, learning_rate=1e-2)
