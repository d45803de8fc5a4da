"""The Allen–Cahn equation u_t = 1e-4 u_xx + 5 (u − u³), periodic on −1 ≤ x ≤ 1, up to t = 1.

From x² cos πx. The reference is a Fourier method of fourth order in time. Points, loss and network
are those of `examples/allen_cahn.py`.
"""

from allen_cahn import PROBLEM as EXAMPLE

from ._problem import from_example


PROBLEM = from_example(EXAMPLE, coords="tx", order=2, learning_rate=1e-2)
