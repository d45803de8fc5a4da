"""Levenberg–Marquardt steps, whose linear algebra is narrower than their residual."""

from ._levenberg_marquardt import (
    LevenbergMarquardt as LevenbergMarquardt,
    LevenbergMarquardtState as LevenbergMarquardtState,
)
