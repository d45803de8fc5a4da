"""Tools to walk and bind jaxprs, the table of primitives, and reports on precision."""

from ._precision_report import (
    PrecisionReport as PrecisionReport,
    precision_report as precision_report,
)
from ._warnings import PrecisionWarning as PrecisionWarning
