"""What a jaxpr holds, how it is walked, by which table, and what it multiplies in."""

from ._precision_report import (
    PrecisionReport as PrecisionReport,
    PrecisionWarning as PrecisionWarning,
    precision_report as precision_report,
)
