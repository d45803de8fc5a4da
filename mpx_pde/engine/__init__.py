"""The derivative engine: a function of a point, evaluated together with its derivatives."""

from ._entry import Equation as Equation, propagate as propagate
from ._plain import InForward as InForward
from ._plan import Index as Index, Plan as Plan, make_plan as make_plan, sum_key as sum_key
