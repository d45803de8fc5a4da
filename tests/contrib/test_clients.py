"""Tests other libraries as clients, through public names alone: a jinns loss object and networks of
pdequinox. The tests are skipped if they are not installed (the extra `clients`)."""

import functools as ft
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from helpers import HALVES, relative

import mpx_pde as mpx


jinns = pytest.importorskip("jinns")
pdequinox = pytest.importorskip("pdequinox")


# jinns filters this warning of Equinox about its classes on import, but pytest resets the filter.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Using `field:UserWarning")]
# Foreign code mixes dtypes and ranks, which JAX's defaults allow.
pytestmark += [pytest.mark.usefixtures("standard_promotion")]

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def products(report):
    """Returns the number of products by dtype. Complex ones have no half form and are left out."""
    return {dtype: n for dtype, (n, _) in report.by_dtype().items() if "complex" not in dtype}


def in_full(loss, model, batch):
    """Returns the value, the gradient and the number of products in float32."""
    gradient = mpx.filter_value_and_grad(loss, None, has_aux=True, use_mixed_precision=False)
    (value, _), _, _, grads = eqx.filter_jit(gradient)(model, batch)
    count = products(mpx.precision_report(gradient)(model, batch))
    assert set(count) == {"float32"}
    return value, grads, count["float32"]


def in_half(loss, model, batch, half, reference, **options):
    """Returns the errors of value and gradient in mixed precision, and a report of the products."""
    scaling = mpx.DynamicLossScaling(2.0**10)
    gradient = mpx.filter_value_and_grad(loss, scaling, has_aux=True, **options)
    with mpx.half_precision(half):
        (value, _), _, finite, grads = eqx.filter_jit(gradient)(model, batch)
        report = mpx.precision_report(gradient)(model, batch)
    assert value.dtype == jnp.float32
    assert finite
    assert {x.dtype.name for x in jtu.tree_leaves(eqx.filter(grads, eqx.is_array))} == {"float32"}
    error = relative(grads, reference[1])
    assert error > 0, "float32's, bit for bit"
    return abs(value - reference[0]) / abs(reference[0]), error, report


# --- pdequinox ------------------------------------------------------------------------------------

KEY = jax.random.key(0)
NETWORKS = {
    "ConvNet": lambda: pdequinox.arch.ConvNet(1, 1, 1, hidden_channels=16, depth=3, key=KEY),
    "ModernUNet": lambda: pdequinox.arch.ModernUNet(
        1, 1, 1, hidden_channels=8, num_levels=1, num_blocks=1, key=KEY
    ),
    "ClassicFNO": lambda: pdequinox.arch.ClassicFNO(
        1, 1, 1, hidden_channels=16, num_modes=8, num_blocks=2, key=KEY
    ),
}

# Bounds of successive roundings of (value, gradient), in units of the roundoff. The loss is a mean
# over 512 residuals, whose roundings mostly cancel. Autocast takes it in float32. In gradients of
# networks with `relu`, the largest roundings are those that turn a unit on or off.
ROUNDINGS = {"cast": (2, 64), "autocast": (0.5, 64)}


def fields():
    inputs = jax.random.normal(jax.random.key(1), (8, 1, 64))
    return inputs, jnp.cumsum(inputs, axis=-1) / 8


def squared_error(model, batch):
    inputs, targets = batch
    outputs = jax.vmap(model)(inputs)
    return jnp.mean((outputs - targets) ** 2), outputs


def spectral_layers_full(model):
    is_spectral = lambda x: isinstance(x, pdequinox.conv.SpectralConv)
    wrap = lambda x: mpx.FullPrecision(x) if is_spectral(x) else x
    return jtu.tree_map(wrap, model, is_leaf=is_spectral)


@ft.cache
def network_in_full(name):
    return in_full(squared_error, NETWORKS[name](), fields())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("path", ["cast", "autocast"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_pdequinox(name, path, half):
    model = NETWORKS[name]()
    if (name, path) == ("ClassicFNO", "cast"):
        model = spectral_layers_full(model)
    reference = network_in_full(name)
    given = squared_error, model, fields(), half, reference
    value, grads, report = in_half(*given, autocast=path == "autocast")
    # All products are half in both passes, except the FNO's complex ones.
    assert products(report) == {half: reference[2]}
    assert ("complex64" in report.by_dtype()) == (name == "ClassicFNO")
    of_value, of_gradient = ROUNDINGS[path]
    assert value < of_value * ROUNDOFF[half]
    assert grads < of_gradient * ROUNDOFF[half]


# --- jinns ----------------------------------------------------------------------------------------


def burgers(network):
    """Builds parameters, the loss object and the batch generator as in jinns' own notebook."""
    u, nn_params = jinns.nn.PINN_MLP.create(eqx_network=network, eq_type="PDENonStatio")
    params = jinns.parameters.Params(nn_params=nn_params, eq_params={"nu": 0.01 / jnp.pi})
    loss = jinns.loss.LossPDENonStatio(
        u=u,
        dynamic_loss=jinns.loss.BurgersEquation(Tmax=1.0),
        initial_condition_fun=lambda x: -jnp.sin(jnp.pi * x).squeeze(),
        boundary_condition=jinns.loss.Dirichlet(),
        loss_weights=jinns.loss.LossWeightsPDENonStatio(
            dyn_loss=1.0, initial_condition=10.0, boundary_loss=1.0
        ),
        params=params,
    )
    box = {"dim": 1, "min_pts": (-1.0,), "max_pts": (1.0,), "tmin": 0.0, "tmax": 1.0}
    sizes = {"n": 512, "ni": 64, "nb": 2, "domain_batch_size": 128, "initial_batch_size": 32}
    key = jax.random.PRNGKey(1)
    data = jinns.data.CubicMeshPDENonStatio(key=key, method="uniform", **box, **sizes)
    return params, loss, data


def network():
    return eqx.nn.MLP(2, 1, 32, 3, activation=jnp.tanh, key=KEY)


def coordinates_in_full():
    wrap = lambda layer: mpx.FullPrecision(layer, out_dtype="half")
    return eqx.tree_at(lambda m: m.layers[0], network(), replace_fn=wrap)


# The network, the options, the least share of half work, and the bounds of the errors of value and
# gradient in units of the roundoff. Casting everything also rounds the coordinates, to which second
# derivatives and the initial condition are sensitive.
WAYS = {
    "cast": (network, {}, 1.0, (4, 32)),
    "coordinates in float32": (coordinates_in_full, {"keep_full": (False, True)}, 0.85, (1, 8)),
    "autocast": (network, {"autocast": True}, 1.0, (1, 8)),
}


@ft.cache
def burgers_in_full():
    params, loss, data = burgers(network())
    return in_full(loss, params, data.get_batch()[1])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_a_jinns_loss(way, half):
    make, options, share, (of_value, of_gradient) = WAYS[way]
    params, loss, data = burgers(make())
    _, batch = data.get_batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", mpx.PrecisionWarning)
        value, grads, report = in_half(loss, params, batch, half, burgers_in_full(), **options)
    count = burgers_in_full()[2]
    done = sum(products(report).values())
    # The loss calls the network for each derivative. `autocast` evaluates what these share once.
    assert done < count if way == "autocast" else done == count
    assert report.half_share >= share
    if share == 1:
        assert products(report) == {half: done}
    assert value < of_value * ROUNDOFF[half]
    assert grads < of_gradient * ROUNDOFF[half]


def test_float32_points_alone_make_it_float32_and_that_is_said():
    params, loss, data = burgers(network())
    _, batch = data.get_batch()
    gradient = mpx.filter_grad(loss, mpx.DynamicLossScaling(), True, keep_full=(False, True))
    report = mpx.precision_report(gradient)(params, batch)
    assert report.half_share == 0
    # No line is the user's, so the report names the library that called Equinox, not Equinox.
    assert all("/jinns/" in row.line for row in report.rows)
    with pytest.warns(mpx.PrecisionWarning, match='out_dtype="half"'):
        eqx.filter_jit(gradient)(params, batch)
