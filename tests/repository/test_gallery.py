"""Tests that every gallery picture exists, shows an existing problem and has its equation."""

import importlib
import json

import pytest
from pages import ROOT

from benchmarks import gallery
from benchmarks._tables._gallery import equation


problems = importlib.import_module("examples.problems")
FOLDER = ROOT / "docs" / "figures" / "gallery"
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks/results/gallery-cpu.json").read_text(encoding="utf-8"))


def test_the_page_shows_every_problem_that_was_trained_and_no_other():
    trained = [t["problem"] for t in RESULTS["trainings"]]
    assert tuple(trained) == tuple(gallery.PICTURES)
    assert len(trained) >= 12
    assert {t["family"] for t in RESULTS["trainings"]} == {"PINN", "3D", "operator", "emulator"}
    assert {path.stem for path in FOLDER.glob("*.webp")} == set(trained)
    assert sorted(set(trained) - set(problems.names())) == []


@pytest.mark.parametrize("name", gallery.PICTURES)
def test_a_picture_is_small_and_on_the_page(name):
    path = FOLDER / f"{name}.webp"
    assert path.read_bytes()[8:12] == b"WEBP"
    assert path.stat().st_size < 60_000
    assert f"(figures/gallery/{name}.webp)" in PAGE
    assert f"/examples/problems/{name}.py)" in PAGE
    assert len(equation(name)) > 40
    assert equation(name) in PAGE
