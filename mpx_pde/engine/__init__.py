"""The derivative engine: a function of a point, evaluated together with its derivatives."""

from ._entry import (
    Equation as Equation,
    InForward as InForward,
    linearized as linearized,
    propagate as propagate,
)
from ._mixed import Mixed as Mixed
from ._products import multiplied_in as multiplied_in
from ._stream_products import broadcast_like as broadcast_like
from .taylor._plan import Index as Index, make_plan as make_plan, sum_key as sum_key
from .taylor._univariate import KEPT_TERMS as KEPT_TERMS
