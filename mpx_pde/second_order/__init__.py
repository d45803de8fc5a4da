"""Levenberg–Marquardt steps whose linear algebra may be narrower than their residual."""

from ._levenberg_marquardt import (
    LevenbergMarquardt as LevenbergMarquardt,
    LevenbergMarquardtState as LevenbergMarquardtState,
)
