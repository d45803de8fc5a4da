"""Mixed precision for PDE machine learning in JAX and Equinox."""

import typing as _typing

import numpy as _np

from . import (
    checkpoint_policies as checkpoint_policies,
    contrib as contrib,
    derivatives as derivatives,
    nn as nn,
)
from .derivatives import (
    DerivativeReport as DerivativeReport,
    laplacian as laplacian,
    linear_operator as linear_operator,
    partials as partials,
)
from .modes._autocast import autocast as autocast
from .modes._autocast_report import AutocastReport as AutocastReport
from .precision._cast import (
    FullPrecision as FullPrecision,
    cast_function as cast_function,
    cast_to_bfloat16 as cast_to_bfloat16,
    cast_to_float16 as cast_to_float16,
    cast_to_float32 as cast_to_float32,
    cast_to_full_precision as cast_to_full_precision,
    cast_to_half_precision as cast_to_half_precision,
    cast_tree as cast_tree,
    force_full_precision as force_full_precision,
)
from .precision._dtypes import (
    BFLOAT16_MAX as BFLOAT16_MAX,
    FLOAT16_MAX as FLOAT16_MAX,
    half_precision as half_precision,
    half_precision_datatype as half_precision_datatype,
    set_half_precision_datatype as set_half_precision_datatype,
)
from .precision._refined import refined as refined
from .precision._tree import (
    all_finite as all_finite,
    global_norm as global_norm,
    select_tree as select_tree,
)
from .products._conv import mixed_conv_general_dilated as mixed_conv_general_dilated
from .products._dot import mixed_dot_general as mixed_dot_general
from .products._einsum import mixed_einsum as mixed_einsum, mixed_matmul as mixed_matmul
from .program._plain import plain as plain
from .program._warnings import PrecisionWarning as PrecisionWarning
from .reports._precision import (
    PrecisionReport as PrecisionReport,
    precision_report as precision_report,
)
from .reports._range_report import RangeReport as RangeReport
from .reports._ranges import explain_nonfinite as explain_nonfinite, range_report as range_report
from .scaling._derivatives import DerivativeScaling as DerivativeScaling, Scaling as Scaling
from .scaling._loss import (
    AbstractLossScaling as AbstractLossScaling,
    DynamicLossScaling as DynamicLossScaling,
    NoOpLossScaling as NoOpLossScaling,
    StaticLossScaling as StaticLossScaling,
    scaled as scaled,
)
from .scaling._seeds import scaled_jvp as scaled_jvp, scaled_vjp as scaled_vjp
from .second_order import (
    LevenbergMarquardt as LevenbergMarquardt,
    LevenbergMarquardtState as LevenbergMarquardtState,
    Points as Points,
    Solution as Solution,
    solve as solve,
)
from .training import (
    Advice as Advice,
    PrecisionFloor as PrecisionFloor,
    PrecisionLadder as PrecisionLadder,
    advise as advise,
    all_reduce_mean as all_reduce_mean,
    as_trained as as_trained,
    calculate_scaled_grad as calculate_scaled_grad,
    check_scaling_options as check_scaling_options,
    compensated as compensated,
    error_if_stuck as error_if_stuck,
    filter_accumulated_value_and_grad as filter_accumulated_value_and_grad,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    gather_parameters as gather_parameters,
    initial_scaling as initial_scaling,
    line_search_value as line_search_value,
    optimizer_update as optimizer_update,
    precision_floor as precision_floor,
    scaling_options as scaling_options,
)


__version__ = "0.1.0"


__all__ = [
    "BFLOAT16_MAX",
    "FLOAT16_MAX",
    "HALF_PRECISION_DATATYPE",
    "AbstractLossScaling",
    "Advice",
    "AutocastReport",
    "DerivativeReport",
    "DerivativeScaling",
    "DynamicLossScaling",
    "FullPrecision",
    "LevenbergMarquardt",
    "LevenbergMarquardtState",
    "NoOpLossScaling",
    "Points",
    "PrecisionFloor",
    "PrecisionLadder",
    "PrecisionReport",
    "PrecisionWarning",
    "RangeReport",
    "Scaling",
    "Solution",
    "StaticLossScaling",
    "advise",
    "all_finite",
    "all_reduce_mean",
    "as_trained",
    "autocast",
    "calculate_scaled_grad",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "check_scaling_options",
    "checkpoint_policies",
    "compensated",
    "contrib",
    "derivatives",
    "error_if_stuck",
    "explain_nonfinite",
    "filter_accumulated_value_and_grad",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "gather_parameters",
    "global_norm",
    "half_precision",
    "half_precision_datatype",
    "initial_scaling",
    "laplacian",
    "line_search_value",
    "linear_operator",
    "mixed_conv_general_dilated",
    "mixed_dot_general",
    "mixed_einsum",
    "mixed_matmul",
    "nn",
    "optimizer_update",
    "partials",
    "plain",
    "precision_floor",
    "precision_report",
    "range_report",
    "refined",
    "scaled",
    "scaled_jvp",
    "scaled_vjp",
    "scaling_options",
    "select_tree",
    "set_half_precision_datatype",
    "solve",
]

HALF_PRECISION_DATATYPE: _np.dtype[_typing.Any]

if not _typing.TYPE_CHECKING:
    # Hidden from type checkers, which would take every name for one of this package.
    def __getattr__(name):
        if name == "HALF_PRECISION_DATATYPE":
            return half_precision_datatype()
        raise AttributeError(f"module 'mpx_pde' has no attribute {name!r}")

    def __dir__():
        return [*__all__, *(name for name in globals() if name.startswith("__"))]
