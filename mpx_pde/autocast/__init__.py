"""Precision by operation: [`mpx_pde.autocast`][]."""

from ._autocast import autocast as autocast
from ._report import (
    AutocastReport as AutocastReport,
    Operation as Operation,
    parse_patterns as parse_patterns,
)
