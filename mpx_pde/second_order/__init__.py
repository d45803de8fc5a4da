"""Levenberg–Marquardt steps whose linear algebra may be narrower than their residual."""

from ._choice import Choice as Choice
from ._levenberg_marquardt import (
    LevenbergMarquardt as LevenbergMarquardt,
    LevenbergMarquardtState as LevenbergMarquardtState,
)
from ._points import Points as Points
from ._solve import Solution as Solution, solve as solve
