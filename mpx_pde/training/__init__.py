"""Training steps: gradients, updates, a ladder of precisions, options."""

from ._accumulate import filter_accumulated_value_and_grad as filter_accumulated_value_and_grad
from ._advise import Advice as Advice, advise as advise
from ._collectives import all_reduce_mean as all_reduce_mean, gather_parameters as gather_parameters
from ._faults import error_if_stuck as error_if_stuck
from ._floor import PrecisionFloor as PrecisionFloor, precision_floor as precision_floor
from ._grad import (
    calculate_scaled_grad as calculate_scaled_grad,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    line_search_value as line_search_value,
)
from ._initial_scaling import initial_scaling as initial_scaling
from ._ladder import PrecisionLadder as PrecisionLadder
from ._masters import compensated as compensated
from ._optimizer import optimizer_update as optimizer_update
from ._options import as_trained as as_trained
from ._scaling_options import (
    check_scaling_options as check_scaling_options,
    scaling_options as scaling_options,
)
