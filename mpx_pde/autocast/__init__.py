"""Precision by operation: [`mpx_pde.autocast`][]."""

from ._autocast import autocast as autocast
from ._report import AutocastReport as AutocastReport, Operation as Operation
from ._rules import parse_patterns as parse_patterns
