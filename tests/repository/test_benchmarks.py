"""Tests the basis of the benchmarks: rounding to TF32, levels, and the commit of a result."""

import argparse
import importlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, tree_allclose

from benchmarks import _outside, _report, _steps, darcy, halves
from benchmarks.__main__ import LEVELS, questions
from benchmarks._problems import emulate_tf32


# --- TF32 -----------------------------------------------------------------------------------------


def tf32(x):
    return jax.lax.reduce_precision(x, 8, 10)


def test_products_inside_of_jit_and_loops_are_rounded_and_nothing_else_is():
    x, w = normal(0, (8, 8)), normal(1, (8, 8)) / 3

    @jax.jit
    def power(x, w):
        body = lambda x, _: (jnp.tanh(x @ w) + 1e-4, None)
        return jax.lax.scan(body, x, None, length=3)[0]

    want = x
    for _ in range(3):
        want = jnp.tanh(tf32(want) @ tf32(w)) + 1e-4
    assert np.allclose(emulate_tf32(power)(x, w), want, rtol=1e-5, atol=1e-5)
    assert tree_allclose(emulate_tf32(lambda x: jnp.sin(x) * x)(x), jnp.sin(x) * x)


# --- The runner -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_all_commands_of_a_level_are_understood(level):
    known = questions()
    for command in LEVELS[level]:
        name, *options = command.split()
        assert name in known
        parser = argparse.ArgumentParser()
        module = importlib.import_module(f"benchmarks.{name}")
        getattr(module, "add_arguments", lambda parser: None)(parser)
        parser.parse_args(options)


# --- Steps side by side ---------------------------------------------------------------------------


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_is_compared_with_float64_with_and_without_predictions(tmp_path):
    """Gradients in float32 are right up to some roundings. Predictions are compared if a loss
    returns them."""
    x = normal(0, (8, 3))
    predict = lambda w, x: jnp.tanh(x @ w)
    losses = {
        "with": lambda w, x: (jnp.mean(predict(w, x) ** 2), predict(w, x)),
        "without": _steps.alone(lambda w, x: jnp.mean(predict(w, x) ** 2)),
    }
    report = _report.Report("steps", command="", folder=tmp_path)
    args = argparse.Namespace(quick=True, rounds=1, minutes=None, jobs=1)
    for name, loss in losses.items():
        rivals = {"float32": _steps.in_float32(loss), "left out": _steps.in_float32(loss)}
        model = lambda: normal(1, (3, 2))
        task = _steps.Task({"network": name}, model, loss, lambda: [x], x, rivals, chunk=4)
        chosen = lambda task, rival: rival == "float32"
        assert not _steps.run_sizes(report, args, [task], chosen=chosen)
    one, other = report.sections["steps"]
    assert one["error_output"] < 1e-6
    assert "error_output" not in other
    for record in (one, other):
        assert (record["rival"], record["skipped"]) == ("float32", 0)
        assert record["error_gradient"] < 1e-6


# --- The code of a result -------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Creates a separate repository. Returns a function that commits a text to its library."""
    monkeypatch.setattr(_report, "ROOT", tmp_path)
    library = tmp_path / "mpx_pde"
    library.mkdir()
    told = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    git = lambda *args: subprocess.run(["git", *told, *args], cwd=tmp_path, check=True)
    git("init", "--quiet")

    def add(text):
        library.joinpath("file.py").write_text(text, encoding="utf-8")
        git("add", ".")
        git("commit", "--quiet", "--message", text)
        return library / "file.py"

    return add


def test_a_result_names_its_commit_and_what_changed_since(repository):
    file = repository("1")
    first = _report.commit()
    assert re.fullmatch(r"[0-9a-f]{7,} of \d{4}-\d\d-\d\d", first)
    assert _report.is_code_of(first)
    file.write_text("not committed", encoding="utf-8")
    assert _report.commit() == first.replace(" of", "+ of")
    assert not _report.is_code_of(first)
    assert not _report.is_code_of(_report.commit())
    repository("2")
    file.parent.with_name("README.md").write_text("no code", encoding="utf-8")
    assert not _report.is_code_of(first)
    assert "+" not in _report.commit()
    assert _report.changes_since(first) == 1
    assert _report.changes_since(_report.commit()) == 0
    assert _report.changes_since("unknown") is None


def test_a_benchmark_goes_on_where_it_was_left(tmp_path, repository):
    def go_on(**options):
        report = _report.Report("errors", command="", folder=tmp_path)
        report.resume("errors", **options)
        left = list(report.missing("errors", keys))
        return left, len(report.environment["commits"])

    keys = [{"format": name} for name in ("float16", "bfloat16")]
    repository("1")
    report = _report.Report("errors", command="", folder=tmp_path)
    for key in report.missing("errors", keys[:1]):
        report.record("errors", **key, u=1.0)
    assert go_on(same_code=True) == (keys[1:], 1)
    repository("2")
    assert go_on() == (keys[1:], 2)  # it keeps the old records and lists both commits
    assert go_on(same_code=True) == (keys, 1)


# --- Files of others ------------------------------------------------------------------------------


def test_a_file_of_others_is_left_out_if_it_is_missing_and_refused_if_it_is_another(
    tmp_path, capsys
):
    report = _report.Report("outside", command="", folder=tmp_path)
    for folder in (None, tmp_path):
        assert _outside.outside_file(report, folder, "AC.mat") is None
        assert "Left out: AC.mat (github.com/maziarraissi/PINNs" in capsys.readouterr().out
    tmp_path.joinpath("AC.mat").write_bytes(b"another")
    with pytest.raises(ValueError, match="has the sha256"):
        _outside.outside_file(report, tmp_path, "AC.mat")


def test_the_h1_error_is_that_of_a_plane_wave():
    """Central differences multiply a wave by sin(2πk/n) n; here both waves have that slope."""
    x = np.arange(16) / 16
    wave = lambda k: np.broadcast_to(np.sin(2 * np.pi * k * x), (1, 16, 16))
    slope = lambda k: np.sin(2 * np.pi * k / 16) * 16
    want = 0.1 * np.sqrt((1 + slope(3) ** 2) / (1 + slope(1) ** 2))
    found = darcy.relative_h1(wave(1) + 0.1 * wave(3), wave(1), np)
    np.testing.assert_allclose(found, want, rtol=1e-7)
    np.testing.assert_allclose(darcy.relative_l2(wave(1) + 0.1 * wave(3), wave(1)), 0.1)


# --- What halves do -------------------------------------------------------------------------------


def test_a_row_of_halves_tells_numbers_infinities_and_exceptions():
    def fails():
        raise TypeError("no halves")

    calls = [lambda: jnp.float16(2048), lambda: -jnp.inf, lambda: jnp.nan, lambda: "twice", fails]
    want = ["2048", "−∞", "NaN", "twice", "raises TypeError"]
    assert list(map(halves.done, calls)) == want
    assert halves.told(np.asarray([-0.0, 1.5e-5])) == "0, 1.5e−05"


def test_what_is_wrong_of_a_function_in_float16_is_counted():
    """A product of two numbers is correctly rounded. float16 has 0.999 as 0.99902."""
    assert halves.wrong(lambda x: x * x, lambda x: x * x)[0] == 0
    count, off = halves.wrong(lambda x: x * 0.999, lambda x: x * 1.0)
    assert count > 1000
    assert 0.9e-3 < off < 2e-3


@pytest.mark.slow
def test_sums_of_halves_are_right_under_autocast():
    """5,000 ones come to 5,000 in every sum; those that are gathers or scatters in JAX too."""
    rows = [row for row in halves.sums() if row.ours]
    assert len(rows) == 10
    for row in rows:
        assert (row.what, halves.done(row.ours)) == (row.what, "5000")
