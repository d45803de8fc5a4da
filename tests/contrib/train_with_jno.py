"""Runs the training blocks of the section on jNO in `docs/other_libraries.md`, then measures
products and errors. `test_jno.py` runs this in a separate process, because jNO changes JAX's
settings on import.

    python tests/contrib/train_with_jno.py docs/other_libraries.md  # prints a line of JSON last
"""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from pages import blocks

import mpx_pde as mpx


def run(page: Path) -> tuple[dict, dict]:
    """Returns the names of the page and the error of each training against the exact solution."""
    names = {"__name__": "__docs__"}
    cores = {}
    for line, source in blocks(page, "python", within="jNO"):
        exec(compile("\n" * (line - 1) + source, str(page), "exec"), names)
        if "core" in names:
            cores[id(names["core"])] = names["core"], names["error"]
    plain, model, error = names["poisson"](names["network"](), optax.adam(5e-3))
    plain.solve(400, inner_steps=50)
    pairs = dict(zip(("bfloat16", "float16", "own"), cores.values(), strict=True))
    pairs["float32"] = plain, error
    return names, {k: float(jnp.sqrt(jnp.mean(c.eval([e]) ** 2))) for k, (c, e) in pairs.items()}


def scale_from_too_high(names: dict) -> float:
    """Returns the loss scale of float16 after training in jNO's loop from too high a scale."""

    def adam(rate):
        scaling = mpx.DynamicLossScaling(2.0**24)
        scale_by = mpx.contrib.scale_by_loss_scaling
        return scale_by(optax.adam(rate), scaling, scale_in_params=lambda net: net.scale)

    network = names["ScaledMLP"](names["network"](), jnp.float32(2**24))
    core, model, _ = names["poisson"](network, adam)
    # The page's `scaled_residuals` reads these two names.
    names["model"] = model
    names["residuals"] = mpx.autocast(core.compiled_constraints_fn, "float16")
    core.compiled_constraints_fn = names["scaled_residuals"]
    core.solve(40, inner_steps=20)
    trained = core.models[model.layer_id]
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(trained))
    return float(trained.scale)


def by_jno(core, residuals):
    """Returns jNO's value and gradient, by the function that its loop builds, and the products."""
    core.compiled_constraints_fn = residuals
    parameters, rest = eqx.partition(core.models, eqx.is_inexact_array)
    arrays, static = eqx.partition(rest, eqx.is_array)
    step = core.make_grad_fn(core.domain.total_samples, arrays, static)

    def gradient(parameters):
        grads, _, value, _ = step(parameters, jax.random.PRNGKey(0), core.domain_data.context)
        return value, grads

    value, grads = jax.jit(gradient)(parameters)
    report = mpx.precision_report(gradient)(parameters)
    flat = jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])
    return value, flat, {dtype: n for dtype, (n, _) in report.by_dtype().items()}


def measured(names: dict) -> dict:
    """Returns products by dtype and errors relative to float32."""
    core, _, _ = names["poisson"](names["network"](), optax.adam(5e-3))
    residuals = core.compiled_constraints_fn
    value, grads, products = by_jno(core, residuals)
    out = {"float32": {"products": products}}
    for half in ("float16", "bfloat16"):
        of_half, grads_of_half, products = by_jno(core, mpx.autocast(residuals, half))
        off = jnp.linalg.norm(grads_of_half - grads) / jnp.linalg.norm(grads)
        errors = {"value": float(abs(of_half - value) / value), "gradient": float(off)}
        out[half] = {"products": products, "dtype": grads_of_half.dtype.name, **errors}
    return out


if __name__ == "__main__":
    names, errors = run(Path(sys.argv[1]))
    results = {"errors": errors, "measured": measured(names), "scale": scale_from_too_high(names)}
    print(json.dumps(results))
