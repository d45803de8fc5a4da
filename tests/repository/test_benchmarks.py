"""What the benchmarks stand on: rounding to TF32, taking turns, levels, figures."""

import argparse
import importlib
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal, tree_allclose

from benchmarks import _figures, _history, networks
from benchmarks.__main__ import questions
from benchmarks._levels import LEVELS
from benchmarks._report import Report
from benchmarks._rivals import RivalMissing, failure, require
from benchmarks._tables._breadth import Ratios
from benchmarks._tf32 import emulate_tf32
from benchmarks._trainings import Moment, first_below, take_turns


# --- TF32 -----------------------------------------------------------------------------------------


def tf32(x):
    return jax.lax.reduce_precision(x, 8, 10)


@pytest.mark.slow
def test_products_forward_and_backward_are_those_of_rounded_operands():
    x, w, ct = normal(0, (8, 16)), normal(1, (16, 4)), normal(2, (8, 4))

    def gradients(x, w):
        return jax.vjp(jnp.matmul, x, w)[1](ct)

    dx, dw = emulate_tf32(gradients)(x, w)
    # The sums are taken in another order.
    assert np.allclose(dx, tf32(ct) @ tf32(w).T, rtol=1e-5, atol=1e-5)
    assert np.allclose(dw, tf32(x).T @ tf32(ct), rtol=1e-5, atol=1e-5)
    assert not np.allclose(dw, gradients(x, w)[1], rtol=1e-5, atol=1e-5)


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


# --- Trainings ------------------------------------------------------------------------------------


def training(steps, errors):
    for i, error in enumerate(errors):
        yield Moment(i * steps, float(i), lambda error=error: error)


def test_trainings_of_different_lengths_take_turns():
    turns = list(take_turns({"a": training(10, [3, 2, 1]), "b": training(5, [4])}))
    assert [name for name, _ in turns] == ["a", "b", "a", "a"]
    assert [moment.error() for _, moment in turns] == [3, 4, 2, 1]


def test_the_first_time_below_a_level():
    errors, steps = [9.0, float("nan"), 2.0, 3.0, 1.0], [0, 10, 20, 30, 40]
    assert first_below(errors, steps, 2.5) == 20
    assert first_below(errors, steps, 0.5) is None


@jax.numpy_dtype_promotion("standard")  # Optax counts in int32
def test_pytorch_takes_the_steps_of_muon_in_optax():
    torch = pytest.importorskip("torch")
    from benchmarks._torch.muon import Muon

    weights = [np.array(normal(i, shape)) for i, shape in enumerate([(3, 8), (8,), (8, 2), (2,)])]
    x = np.array(normal(4, (16, 3)))
    rates = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 50)

    optimizer = optax.contrib.muon(rates)
    params = jax.tree.map(jnp.asarray, weights)
    state = optimizer.init(params)

    def loss(params):
        w, b, v, c = params
        return jnp.mean((jnp.tanh(x @ w + b[None]) @ v + c[None] - 1) ** 2)

    for _ in range(30):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)

    network = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for parameter, weight in zip(network.parameters(), weights, strict=True):
            parameter.copy_(torch.tensor(weight.T))
    muon = Muon(network.parameters(), [float(rates(i)) for i in range(30)])
    for _ in range(30):
        muon.zero_grad()
        ((network(torch.tensor(x)) - 1) ** 2).mean().backward()
        muon.step()

    for parameter, param, weight in zip(network.parameters(), params, weights, strict=True):
        # Both round in float32, 30 times, in another order.
        assert np.allclose(parameter.detach().numpy().T, param, rtol=0, atol=1e-5)
        assert not np.allclose(param, weight, rtol=0, atol=1e-2)


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


def test_a_rival_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(RivalMissing, match=r"neuraloperator is not installed.*rivals"):
        require("neuralop")


def test_a_failure_is_one_line():
    assert failure(ValueError("first\nsecond")) == "ValueError: first"
    assert failure(KeyError()) == "KeyError"


# --- Figures --------------------------------------------------------------------------------------


def test_a_figure_tells_what_it_was_drawn_from(tmp_path):
    name, figure = next((n, f) for n, f in _figures.FIGURES.items() if f.results)
    data = _figures.load(figure.results)
    path = tmp_path / f"{name}.svg"
    assert _figures.drawn_from(path) is None
    _figures.save(figure, data, path)
    assert _figures.drawn_from(path) == figure.digest(data)
    changed = {**data, "environment": {**data["environment"], "jax": "0"}}
    assert _figures.drawn_from(path) != figure.digest(changed)


# --- Tables ---------------------------------------------------------------------------------------


def test_trainings_by_earlier_code_stand_over_float32_of_their_day():
    def of(precision, error, problem="u", seed=0):
        about = {"optimizer": "adam", "steps": 9, "title": problem.upper(), "problem": problem}
        return {**about, "precision": precision, "seed": seed, "error": error}

    data = {
        "trainings": [of("float32", 0.1), of("float32", 0.2, seed=1), of("bfloat16", 0.3)],
        "earlier": [
            *(of("float32", 0.05), of("bfloat16", 9.0), of("float16", 0.06)),
            *(of("float32", 0.01, "v"), of("float16", 0.04, "v")),
        ],
    }
    ratios = Ratios(data)
    assert ratios.titles == {"u": "U", "v": "V"}
    assert (ratios.error("u"), ratios.error("v")) == pytest.approx((0.15, 0.01))
    assert ratios.error("w") is None
    assert ratios.of("u", "bfloat16") == pytest.approx([3.0])
    assert ratios.of("u", "float16") == pytest.approx([1.2])
    assert ratios.of("v", "float16") == pytest.approx([4.0])
    assert [ratios.earlier(name) for name in ("bfloat16", "float16")] == [0, 2]


# --- Derivatives of networks ----------------------------------------------------------------------


@pytest.mark.parametrize("problem", networks.PROBLEMS, ids=lambda p: p.name)
def test_all_rivals_take_the_same_derivative(problem):
    if problem.size > 3:
        problem = problem._replace(size=5)  # summed by a `vmap`
    fun = lambda p: jnp.sin(p[0]) * jnp.exp(p[1] / 2) + jnp.sum(p**4)
    p = jnp.linspace(0.2, 0.7, problem.size)
    x, y = float(p[0]), float(p[1])
    wave = np.exp(y / 2)
    want = {
        "order": {
            1: np.cos(x) * wave + 4 * x**3,
            2: -np.sin(x) * wave + 12 * x**2,
            3: -np.cos(x) * wave + 24 * x,
            4: np.sin(x) * wave + 24,
        }[problem.order],
        "laplacian": (1 / 4 - 1) * np.sin(x) * wave + 12 * float(jnp.sum(p**2)),
        "biharmonic": (1 - 2 / 4 + 1 / 16) * np.sin(x) * wave + 48,
    }[problem.operator]
    for way in (networks.ours, networks.nested, networks.by_jet):
        # float32, by some twenty operations.
        assert abs(float(jax.jit(way(fun, problem))(p)) / want - 1) < 1e-5


# --- The code of a result -------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Adds a commit to a repository of its own, with a text in the library."""
    monkeypatch.setattr(_history, "ROOT", tmp_path)
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
    first = _history.commit()
    assert re.fullmatch(r"[0-9a-f]{7,} of \d{4}-\d\d-\d\d", first)
    assert _history.is_code_of(first)
    file.write_text("not committed", encoding="utf-8")
    assert _history.commit() == first.replace(" of", "+ of")
    assert not _history.is_code_of(first)
    assert not _history.is_code_of(_history.commit())
    repository("2")
    file.parent.with_name("README.md").write_text("no code", encoding="utf-8")
    assert not _history.is_code_of(first)
    assert "+" not in _history.commit()
    assert _history.changes_since(first) == 1
    assert _history.changes_since(_history.commit()) == 0
    assert _history.changes_since("unknown") is None


def test_without_git_a_result_is_of_unknown_code(tmp_path, monkeypatch):
    monkeypatch.setattr(_history, "ROOT", tmp_path)
    assert _history.commit() == "unknown"
    assert not _history.is_code_of("unknown")


def test_a_benchmark_goes_on_where_it_was_left(tmp_path, repository):
    def go_on(**options):
        report = Report("errors", command="", folder=tmp_path)
        report.resume("errors", **options)
        left = list(report.missing("errors", keys))
        return left, len(report.environment["commits"])

    keys = [{"format": name} for name in ("float16", "bfloat16")]
    repository("1")
    report = Report("errors", command="", folder=tmp_path)
    for key in report.missing("errors", keys[:1]):
        report.record("errors", **key, u=1.0)
    assert go_on(same_code=True) == (keys[1:], 1)
    repository("2")
    assert go_on() == (keys[1:], 2)  # writes nothing but what was there, and both commits
    assert go_on(same_code=True) == (keys, 1)
