"""Second-order methods of other libraries, by their own recommended settings.

Each takes residuals, a model and the examples of each residual. It returns a function that takes a
step, and its first state. The loss is that of `LevenbergMarquardt`, unless the library halves it.
"""

import importlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree


Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Maps a model, a state and the examples to the next model and state."""


def values(residuals: Any, model: Any, batches: Any) -> jax.Array:
    """Returns all residuals, whose squares sum up to the loss."""
    each = zip(residuals, batches, strict=True)
    rows = [jax.vmap(f, (None, 0))(model, x) / jnp.sqrt(len(x)) for f, x in each]
    return jnp.concatenate([jnp.ravel(x) for x in rows])


def loss_of(residuals: Any, model: Any, batches: Any) -> jax.Array:
    return jnp.sum(values(residuals, model, batches) ** 2)


def lbfgs(residuals: Any, model: Any, batches: Any) -> tuple[Step, Any]:
    """L-BFGS as Optax recommends it, with its zoom line search."""
    optimizer = optax.lbfgs()
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def update(model, state, batches):
        loss = lambda params: loss_of(residuals, eqx.combine(params, static), batches)
        params = eqx.filter(model, eqx.is_inexact_array)
        value, grad = optax.value_and_grad_from_state(loss)(params, state=state)
        given = {"value": value, "grad": grad, "value_fn": loss}
        updates, state = optimizer.update(grad, state, params, **given)
        return eqx.apply_updates(model, updates), state

    return update, optimizer.init(params)


def _of_optimistix(solver: Any, fun: Callable, model: Any, batches: Any) -> tuple[Step, Any]:
    """Steps of a solver of Optimistix for `fun(params, batches)`. A trial of its line search is a
    step."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    whole = lambda params, batches: (fun(eqx.combine(params, static), batches), None)
    shape, _ = jax.eval_shape(whole, params, batches)
    state = solver.init(whole, params, batches, {}, shape, None, frozenset())

    def update(model, state, batches):
        params = eqx.filter(model, eqx.is_inexact_array)
        params, state, _ = solver.step(whole, params, batches, {}, state, frozenset())
        return eqx.combine(params, static), state

    return update, state


def optimistix(residuals: Any, model: Any, batches: Any) -> tuple[Step, Any]:
    optx = importlib.import_module("optimistix")
    solver = optx.LevenbergMarquardt(rtol=1e-8, atol=1e-8)
    return _of_optimistix(solver, partial(values, residuals), model, batches)


def ssbroyden(residuals: Any, model: Any, batches: Any) -> tuple[Step, Any]:
    """Self-scaled Broyden with the settings that its authors name for their paper."""
    found = importlib.import_module("ssbroyden_optimistix")
    solver = found.SSBroyden(rtol=0.0, atol=0.0, alpha="search", initial_scaling=False)
    return _of_optimistix(solver, partial(loss_of, residuals), model, batches)


def _randngd(dense: bool, residuals: Any, model: Any, batches: Any) -> tuple[Step, Any]:
    """Natural gradients for half the loss, by their defaults."""
    randngd = importlib.import_module("randngd")
    params, static = eqx.partition(model, eqx.is_inexact_array)
    count = ravel_pytree(params)[0].size
    each = zip(residuals, batches, strict=True)
    terms = [(lambda p, x, f=f: f(eqx.combine(p, static), x), x) for f, x in each]
    kind = "full" if dense else "jacobians"
    metric = randngd.metrics.gauss_newton(terms, params, representation=kind)
    if dense:
        inverse = randngd.NGDFull(metric, key=0)
    else:
        inverse = randngd.NystromNGD(metric, kind="gaussian", ell_max=min(500, count), key=0)
    solver = randngd.ngd_solver(inverse, min_stepsize=1e-15)
    half = lambda model, batches: loss_of(residuals, model, batches) / 2
    return _of_optimistix(solver, half, model, batches)


def nlls_gram(residuals: Any, model: Any, batches: Any) -> tuple[Step, Any]:
    """Levenberg–Marquardt in the smaller of both spaces, with geodesic acceleration."""
    found = importlib.import_module("nlls_gram")
    params, static = eqx.partition(model, eqx.is_inexact_array)
    fun = lambda params, batches: values(residuals, eqx.combine(params, static), batches)
    solver = found.LevenbergMarquardt(fun)

    def update(model, state, batches):
        params = eqx.filter(model, eqx.is_inexact_array)
        params, state, _ = solver.update(params, state, batches)
        return eqx.combine(params, static), state

    return update, solver.init(params, batches)


def jinns(residuals: Any, model: Any, batches: Any) -> tuple[Step, Any]:
    """Its natural gradient with its defaults, on our residuals in place of its loss classes."""
    found = importlib.import_module("jinns")
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = found.optimizers.vanilla_ngd(
        linesearch=optax.scale_by_backtracking_linesearch(max_backtracking_steps=15)
    )
    wrapped = lambda p: found.parameters.Params(nn_params=p, eq_params={})
    one = lambda f: lambda p, x: jnp.ravel(f(eqx.combine(p.nn_params, static), x))

    class Loss:
        @staticmethod
        def evaluate_per_sample(params, batches):
            each = zip(residuals, batches, strict=True)
            return tuple(jax.vmap(one(f), (None, 0))(params, x) for f, x in each)

    def update(model, state, batches):
        params = wrapped(eqx.filter(model, eqx.is_inexact_array))
        each = list(zip(residuals, batches, strict=True))
        r = Loss.evaluate_per_sample(params, batches)
        g = tuple(jax.vmap(jax.jacrev(one(f)), (None, 0))(params, x) for f, x in each)
        weights = tuple(jnp.asarray(len(x) ** -0.5) for x in batches)
        value = sum(jnp.sum((w * y) ** 2) for w, y in zip(weights, r, strict=True))
        updates, state = optimizer.update(
            (r, g, weights), state, params, loss=Loss, batch=batches, loss_value=value
        )
        return eqx.apply_updates(model, updates.nn_params), state

    return update, optimizer.init(wrapped(params))


RIVALS = {
    "randngd": partial(_randngd, False),
    "randngd-dense": partial(_randngd, True),
    "nlls-gram": nlls_gram,
    "ssbroyden": ssbroyden,
    "optimistix": optimistix,
    "jinns": jinns,
    "lbfgs": lbfgs,
}
DENSE = ("randngd-dense", "optimistix", "jinns")
"""Rivals that need a matrix of parameters², and operations of parameters³."""

_PACKAGES = {"randngd-dense": "randngd", "ssbroyden": "ssbroyden-optimistix", "lbfgs": "optax"}


def version_of(rival: str) -> str | None:
    """Returns the package of a rival and its version; `None` for a method of ours."""
    if rival not in RIVALS:
        return None
    package = _PACKAGES.get(rival, rival)
    return f"{package} {version(package)}"
