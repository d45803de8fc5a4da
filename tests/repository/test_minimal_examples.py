"""Tests that the two examples for newcomers are short, use only public names, and learn."""

import ast
import importlib

import pytest
from pages import ROOT


EXAMPLES = ROOT / "examples"
NAMES = ["minimal_pinn", "minimal_fno"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_uses_public_names_alone(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names]
            modules += [getattr(node, "module", None) or ""]
            assert not any(part.startswith("_") for m in modules for part in m.split("."))
        if isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "below"), [
    # An untrained network has an error of 1.
    ("minimal_pinn", {"steps": 600}, 0.5),
    ("minimal_fno", {"steps": 60, "samples": 128}, 0.7),
])  # fmt: skip
@pytest.mark.usefixtures("standard_promotion")  # the examples use JAX's defaults
def test_it_learns(name, options, below):
    assert importlib.import_module(name).main(**options) < below
