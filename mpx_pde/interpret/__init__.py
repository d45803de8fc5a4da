"""Jaxprs: what they hold, how they are walked, by which table, and what they multiply in."""

from ._precision_report import (
    PrecisionReport as PrecisionReport,
    PrecisionWarning as PrecisionWarning,
    precision_report as precision_report,
)
