"""Effects of half precision on the values of a function: [`mpx_pde.range_report`][]."""

from ._ranges import explain_nonfinite as explain_nonfinite, range_report as range_report
from ._report import IdleProduct as IdleProduct, RangeReport as RangeReport, Row as Row
