"""The gallery: every picture is there, of a problem that is there, and shows what it says."""

import importlib
import json

import numpy as np
import pytest
from matplotlib.figure import Figure
from pages import ROOT

from benchmarks import _gallery
from benchmarks._tables._gallery import equation


problems = importlib.import_module("examples.problems")
FOLDER = ROOT / "docs" / "figures" / "gallery"
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks/results/gallery-cpu.json").read_text(encoding="utf-8"))


def test_the_page_shows_every_problem_that_was_trained_and_no_other():
    trained = [t["problem"] for t in RESULTS["trainings"]]
    assert tuple(trained) == tuple(_gallery.PICTURES)
    assert len(trained) >= 12
    assert {t["family"] for t in RESULTS["trainings"]} == {"PINN", "3D", "operator", "emulator"}
    assert {path.stem for path in FOLDER.glob("*.webp")} == set(trained)
    assert sorted(set(trained) - set(problems.names())) == []


@pytest.mark.parametrize("name", _gallery.PICTURES)
def test_a_picture_is_small_and_on_the_page(name):
    path = FOLDER / f"{name}.webp"
    assert path.read_bytes()[8:12] == b"WEBP"
    assert path.stat().st_size < 60_000
    assert f"(figures/gallery/{name}.webp)" in PAGE
    assert f"/examples/problems/{name}.py)" in PAGE
    assert len(equation(name)) > 40
    assert equation(name) in PAGE


def shown(reference, wrong, **given):
    x, y = np.linspace(0, 1, 4), np.linspace(0, 2, 5)
    return _gallery.Shown("u", ("x", "y"), (x, y), reference, reference + wrong, **given)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_colors_tell_signs_and_errors_do_not_saturate(sign):
    reference = sign * (1.0 + np.arange(20.0).reshape(4, 5))
    one = shown(reference, 0.5 * np.eye(4, 5))
    figure = Figure()
    _gallery.draw(figure, one)
    panels = [a for a in figure.axes if a.get_title()]
    assert [a.get_title() for a in panels][:2] == ["reference", "learnt"]
    # The norm is said, and is that of the definition.
    error = 1.0 / np.linalg.norm(reference)
    assert panels[2].get_title() == f"error: {error:.1e} in relative L²"
    images = [a.collections[0] for a in panels]
    assert [i.get_cmap().name for i in images] == ["viridis", "viridis", "magma"]
    assert images[0].get_clim() == images[1].get_clim()
    assert images[2].get_clim() == (0.0, 0.5)
    assert {a.get_ylabel() for a in figure.axes if not a.get_title()} == {"u", "|error of u|"}

    both = _gallery.limits(reference - reference.mean(), reference)
    assert both["cmap"] == "RdBu_r"
    assert both["vmin"] == -both["vmax"]
    nearly = np.where(np.arange(20).reshape(4, 5) == 3, -0.01 * sign * 20, reference)
    assert _gallery.limits(nearly)["cmap"] == "viridis"


@pytest.mark.slow
def test_a_cut_of_the_solution_has_no_error():
    module = importlib.import_module("examples.problems.heat_varying")
    cut = _gallery.PICTURES["heat_varying"](module, module.exact)
    assert cut.axes == ("x", "y")
    assert cut.reference.shape == (33, 33)
    x, y = cut.grid
    half = np.exp(-0.5) * np.sin(np.pi * x)[:, None] * np.sin(2 * np.pi * y)
    assert np.allclose(cut.reference, half, atol=1e-12)
    assert cut.error < 1e-5  # the solution in float32


def test_what_is_outside_of_a_domain_is_left_out():
    values = np.ones((4, 5))
    values[1:3, 2] = np.nan
    hole = shown(values, np.full((4, 5), 0.25))
    assert hole.error == pytest.approx(0.25)
