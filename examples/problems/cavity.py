"""The lid-driven cavity at Re = 100: steady Navier–Stokes in the unit square.

The reference is a finite-volume solution of our own, beside the table of Ghia, Ghia & Shin (1982).
Points, loss and network are those of `examples/lid_driven_cavity.py`.
"""

from lid_driven_cavity import problem

from ._problem import from_example


PROBLEM = from_example(problem(), coords="xy", order=2, steps=4000)
