"""The neural-operator examples run, in half precision too, and learn."""

import _neural_operator as operators
import darcy
import jax
import jax.numpy as jnp
import navier_stokes
import numpy as np
import pytest
from _neural_operator import Problem, Training
from _progress import progress_bar
from helpers import equations
from rich.console import Console
from test_docs import jax_defaults


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MPX_PDE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("example", "precision"), [(darcy, "float16"), (navier_stokes, "bfloat16")]
)
def test_an_example_trains_and_draws(example, precision, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(operators, "TEST_SAMPLES", 2)
    with jax_defaults():
        results = example.main(
            [precision],
            steps=3,
            samples=4,
            quick=True,
            out=tmp_path,
            hidden_channels=8,
            num_layers=1,
        )
    [(name, result)] = results.items()
    assert name == result.precision == precision
    assert list(result.errors) == [16, 32]
    assert result.error == result.errors[16]["l2"]
    assert all(np.isfinite(e) for norms in result.errors.values() for e in norms.values())
    assert result.skipped_steps == 0
    assert result.prediction.shape == (32, 32)
    assert len(result.loss) == len(result.scale) == 10  # whole tens
    [picture] = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    printed = capsys.readouterr().out.replace("\n", "")  # long paths are wrapped
    for text in (precision, "H1 32²", picture.name, f"{result.error:.4f}"):
        assert text in printed


def smoothing() -> Problem:
    """Waves and what is left of them after a moment of diffusion."""
    x = np.arange(16) / 16
    rng = np.random.default_rng(0)
    phases, k = rng.uniform(size=(12, 2, 1, 1)), rng.integers(1, 3, size=(12, 2, 1, 1))
    waves = np.sin(2 * np.pi * (k[:, 0] * x[:, None] + k[:, 1] * x + phases[:, 0]))
    decayed = np.exp(-0.2 * np.sum(k**2, axis=1)) * waves
    inputs, outputs = (f[:, None].astype(np.float32) for f in (waves, decayed))
    return Problem(
        name="smoothing",
        title="Smoothing",
        periodic=True,
        inputs=inputs[:8],
        outputs=outputs[:8],
        tests={16: (inputs[8:], outputs[8:])},
        labels=("before", "after"),
    )


@pytest.fixture(scope="module")
def training():
    return Training(
        smoothing(), "float16", steps=100, hidden_channels=8, num_layers=1, modes=6, loss="l2"
    )


def test_a_half_precision_training_learns(training):
    with progress_bar(Console(quiet=True), 9) as progress:
        result = training(0, progress)
        again = training(0, progress)
        other = training(1, progress)
    assert result.loss[-10:].mean() < 0.3 * result.loss[:10].mean()
    np.testing.assert_array_equal(result.loss, again.loss)  # a seed says it all
    assert not np.array_equal(result.loss, other.loss)


def test_the_masters_and_the_optimizer_stay_float32_and_the_products_are_half(training):
    state = training.initial(0)
    batch = jax.tree.map(lambda x: x[:2], training.data)
    new, (value, _) = jax.eval_shape(lambda b: training.step(state, b), batch)
    assert value.dtype == jnp.float32
    model, opt_state, _ = (jax.tree.leaves(part) for part in new)
    for leaf in (*model, *opt_state):
        assert leaf.dtype in (jnp.float32, jnp.int32)
    jaxpr = jax.make_jaxpr(lambda b: training.step(state, b)[1])(batch)
    products = [e for e in equations(jaxpr) if "dot_general" in e.primitive.name]
    assert products
    assert {e.params.get("dtype") for e in products} == {np.dtype("float16")}


def test_steps_must_be_positive():
    with pytest.raises(ValueError, match="`steps` must be at least 1, but got -1"):
        darcy.main(steps=-1, samples=1, quick=True, out=None)
