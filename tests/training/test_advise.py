"""Tests that the advice on the precision of a loss is correct."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import HALVES, assert_tells, relative
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mpx_pde as mpx


X = jax.random.normal(jax.random.key(1), (16, 3))


def network(width=32):
    return eqx.nn.MLP(3, "scalar", width, 1, activation=jnp.tanh, key=jax.random.key(0))


def fit(model, x):
    return jnp.mean((jax.vmap(model)(x) - jnp.sin(x[:, 0]).astype(x.dtype)) ** 2)


@pytest.fixture(scope="module")
def advice():
    return mpx.advise(fit)(network(), X)


NAMES = ["float32", *(f"forward float32, backward {half}" for half in HALVES)]
NAMES += [f"{half} throughout{by}" for by in ("", ", autocast") for half in HALVES]


@pytest.mark.slow
def test_it_tells_the_error_of_each_gradient(advice):
    assert [row.name for row in advice.rows] == NAMES
    want = eqx.filter_grad(fit)(network(), X)
    for row in advice.rows:
        run = mpx.filter_grad(fit, row.scaling, **row.options)
        *_, grads = eqx.filter_jit(run)(network(), X)
        # XLA sums in another order.
        assert row.error == pytest.approx(relative(grads, want), rel=0.02, abs=1e-6)
        assert (row.finite, row.failed) == (True, None)
    half = [row.half_share for row in advice.rows]
    assert 0 == half[0] < half[1] == half[2] < half[3] == half[4] == half[5] == half[6] == 1
    errors = [row.error for row in advice.rows]
    assert 0 == errors[0] < errors[1] < errors[2] < errors[4]
    assert errors[3] < errors[4]
    assert advice.rows[4].scaling.loss_scaling == 1
    assert (advice.examples, advice.width, advice.reference) == (16, 3, "float32")
    assert_tells(str(advice), *NAMES, *advice.call.splitlines())
    assert advice.choice in advice.rows


@pytest.mark.slow
def test_memory_is_that_of_the_program_and_grows_with_the_batch(advice):
    row = advice.rows[0]
    model, static = eqx.partition(network(), eqx.is_array)

    def needs(n):
        gradient = jax.jit(lambda m, x: jax.grad(lambda m: fit(eqx.combine(m, static), x))(m))
        compiled = gradient.lower(model, jnp.ones((n, 3))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert row.memory == pytest.approx(needs(16), rel=0.1)
    assert row.memory_per_example == pytest.approx((needs(16) - needs(8)) / 8, rel=0.2)
    # The same holds for a batch in NumPy, and for one on a mesh with explicit axes.
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    whole = eqx.filter_shard(network(), NamedSharding(mesh, P()))
    sharded = jax.device_put(X, NamedSharding(mesh, P("data")))
    for found in (mpx.advise(fit)(network(), np.asarray(X)), mpx.advise(fit)(whole, sharded)):
        assert found.examples == 16
        assert found.rows[0].memory_per_example is not None
    whole = mpx.advise(lambda m, x, y: fit(m, x) + jnp.sum(y))(network(), X, jnp.ones(5))
    assert (whole.rows[0].memory_per_example, whole.examples) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_numbers_and_states_are_no_batch(make):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(32, "batch", mode="batch")

    def loss(model, state, x, weight, key):
        noisy = lambda x, key: model[0](x + 1e-3 * jax.random.normal(key, x.shape, x.dtype))
        hidden = jax.vmap(noisy)(x, jax.random.split(key, len(x)))
        mapped = jax.vmap(model[1], axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, state = mapped(hidden, state)
        return weight * jnp.mean(out**4), state

    model = eqx.nn.Linear(3, 32, key=jax.random.key(0)), norm
    found = mpx.advise(loss, has_aux=True)(model, state, X, jnp.ones(()), make(0))
    assert found.examples == 16
    assert found.rows[0].memory_per_example is not None


@pytest.mark.slow
def test_the_arrays_of_a_scaling_are_not_closed_over_by_the_loss():
    def equation(model, x, *, derivatives):
        d = jax.vmap(mpx.laplacian(model, coords="xyz", outputs="u", scaling=derivatives))(x)
        return jnp.mean((d["lap_u"] - jnp.sum(offsets)) ** 2)

    offsets = jnp.ones(0)
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xyz"))
    assert mpx.advise(equation, scaling)(network(), X).closed_over == ()
    offsets = jnp.ones(5)
    assert mpx.advise(equation, scaling)(network(), X).closed_over == ("float32[5]",)


@pytest.mark.slow
def test_a_batch_that_cannot_be_halved_has_no_memory_per_example():
    targets = jnp.sin(X[:, 0])
    loss = lambda model, x: jnp.mean((jax.vmap(model)(x) - targets.astype(x.dtype)) ** 2)
    rows = mpx.advise(loss)(network(), X).rows
    assert all(row.failed is None and row.memory_per_example is None for row in rows)


@pytest.mark.slow
def test_it_takes_what_saves_memory_at_one_per_cent(advice):
    first = advice.rows[0]
    least = min((r for r in advice.rows if r.error <= 0.01), key=lambda r: r.memory)
    assert advice.choice == (least if least.memory <= 0.9 * first.memory else first)

    def cancels(model, x):
        u = jax.vmap(model)(x)
        return jnp.mean(((u + 100.0) ** 2 - u**2 - 1e4) ** 2 / 1e4)

    cancelling = mpx.advise(cancels)(network(), X)
    assert cancelling.rows[3].error > 0.01
    assert cancelling.choice is not cancelling.rows[3]


@pytest.mark.slow
def test_derivatives_that_overflow_and_those_that_are_scaled():
    def loss(model, x, *, derivatives):
        terms = mpx.partials(model, ["u_xx"], coords="xyz", outputs="u", scaling=derivatives)
        return jnp.mean((jax.vmap(terms)(300.0 * x)["u_xx"] * 1e-4) ** 2)

    steep = eqx.tree_at(lambda m: m.layers[0].weight, network(), replace_fn=lambda w: 1e3 * w)
    plain = mpx.advise(loss)(steep, X / 1e5)
    assert not plain.rows[3].finite
    assert "overflows" in str(plain)
    scaling = mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xyz", order=2))
    scaled = mpx.advise(loss, scaling)(steep, X / 1e5)
    assert scaled.rows[3].finite
    assert scaled.rows[3].scaling.derivatives.exponents[0] < 0


@pytest.mark.slow
def test_what_a_cast_cannot_have_runs_by_autocast():
    """JAX has no Fourier transform of halves."""

    def loss(w, x):
        modes = jnp.fft.rfft(x) * w["f"][None].astype(jnp.complex64)
        return jnp.mean((jnp.fft.irfft(modes) @ w["m"] - 1) ** 2)

    w = {"f": jnp.ones(9), "m": jnp.ones((16, 4))}
    advice = mpx.advise(loss)(w, jax.random.normal(jax.random.key(0), (4, 16)))
    assert [row.name for row in advice.rows[3:]] == NAMES[5:]
    assert all(row.error < 0.02 for row in advice.rows)

    def raises(w, x):
        if w["m"].dtype == jnp.float16:
            raise NotImplementedError("no float16 here")
        return loss(w, x)

    half = mpx.advise(raises)(w, jnp.ones((4, 16)))
    assert [row.name for row in half.rows[3:]] == NAMES[5:]


@pytest.mark.slow
def test_what_fails_in_half_alone_is_a_row():
    def loss(w, x):
        if jnp.result_type(w) != jnp.float32 or mpx.half_precision_datatype() == jnp.bfloat16:
            raise NotImplementedError("float32 and float16 alone")
        return jnp.sum(w * x)

    advice = mpx.advise(loss, autocast={})(jnp.ones(3), jnp.ones(3))
    assert "float32 and float16 alone" in advice.rows[4].failed
    assert "bfloat16 throughout fails: NotImplementedError" in str(advice)


@pytest.mark.slow
def test_the_advice_is_code_to_paste_and_tells_what_it_does(capfd):
    """The names in it are those of the user's step: `loss` and `scaling`."""

    def loss(model, x, *, derivatives):
        terms = mpx.partials(model, ["u_xx"], coords="xyz", outputs="u", scaling=derivatives)
        return jnp.mean(jax.vmap(terms)(x)["u_xx"] ** 2)

    wide, x = network(256), jax.random.normal(jax.random.key(1), (512, 3))
    advice = mpx.advise(loss)(wide, x)
    assert len(advice.rows) == 5  # autocast is for operators
    assert "5 precisions" in capfd.readouterr().err
    assert "partial" not in str(advice)
    # A CPU may save nothing; then the mode for a GPU is told beside float32.
    assert bool(advice.call_on_gpu) == (advice.choice is advice.rows[0])
    written = advice.call_on_gpu or advice.call
    assert 'DerivativeScaling.per_direction("xyz")' in written
    assert written in str(advice).replace("\n    ", "\n")
    want = eqx.filter_grad(loss)(wide, x, derivatives=None)
    for code in filter(None, (advice.call, advice.call_on_gpu)):
        names = {"mpx_pde": mpx, "loss": loss}
        *lines, last = code.split("\n")
        exec("\n".join(lines), names)
        _, _, finite, grads = eval(last, names)(wide, x)
        assert finite
        assert relative(grads, want) < 0.01
    # float16 is the default, so no policy is written for it.
    assert ("policy" in written) == ("bfloat16" in written)


@pytest.mark.slow
def test_a_loss_that_may_take_derivatives_is_advised_to_scale_them():
    def loss(model, x, *, derivatives=None):
        terms = mpx.partials(model, ["u_xx"], coords="xyz", outputs="u", scaling=derivatives)
        return jnp.mean(jax.vmap(terms)(x)["u_xx"] ** 2)

    advice = mpx.advise(loss)(network(), X)
    assert 'per_direction("xyz")' in (advice.call_on_gpu or advice.call)
