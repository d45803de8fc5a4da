"""How long does a step take on networks that do not use this library? Rivals by network.

The step trains a network of `_networks.py` for u_tt - u_xx - u_yy + sin u = 0 in three coordinates.
It takes the gradient of the mean squared residual and updates with Adam. The rivals begin with the
same weights and points:

- `float32`: `jax.hessian` of the network; on a GPU also with TF32 products;
- `mpx_pde`: `partials` in float32, cast to float16, and with a full-precision forward pass and a
  bfloat16 backward pass (`forward=`).

Besides time and memory, the errors of the residuals and of the first gradient against float64 are
recorded.

    python -m benchmarks foreign_step --networks KAN SIREN
"""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from . import _steps
from ._networks import NETWORKS
from ._report import Report
from ._steps import HIGHEST, START, TF32, Rival, Task, in_float32, precision_options


FOREIGN = ("LayerNorm", "PirateNet", "SIREN", "KAN", "attention")
TERMS = ("u", "u_tt", "u_xx", "u_yy")


def residual(d: Mapping[str, jax.Array]) -> jax.Array:
    return d["u_tt"] - d["u_xx"] - d["u_yy"] + jnp.sin(d["u"])


def loss(model: Any, points: Any, *, terms: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the residuals."""
    out = jax.vmap(lambda p: residual(terms(model, p)))(points)
    return jnp.mean(out**2), out


def by_hessian(model: Any, p: Any) -> dict[str, Any]:
    second = jnp.diagonal(jax.hessian(model)(p))
    return dict(zip(TERMS, (model(p), *second), strict=True))


def by_library(precision: str, **options: Any) -> Rival:
    """Takes the step with `partials`; float16 uses a scale for each derivative."""

    def ours(model, points, *, derivatives=None):
        named = {"coords": "txy", "outputs": "u", "scaling": derivatives}
        return loss(model, points, terms=lambda model, p: mpx.partials(model, TERMS, **named)(p))

    def scaling():
        derivatives = mpx.DerivativeScaling.per_direction("txy", order=2)
        return mpx.Scaling(mpx.DynamicLossScaling(START), derivatives)

    options = {**precision_options(precision), "keep_full": (False, True), **options}
    step = _steps.by_library(ours, **options)
    return step._replace(scaling=scaling) if precision == "float16" else step


def rivals(gpu: bool) -> dict[str, Rival]:
    plain = in_float32(partial(loss, terms=by_hessian), HIGHEST)
    in_tf32 = {"TF32": plain._replace(products=TF32)} if gpu else {}
    ours = {f"mpx_pde {name}": by_library(name) for name in ("float32", "float16")}
    for forward in ("bfloat16_x3", "float32"):
        ours[f"mpx_pde bfloat16, forward {forward}"] = by_library("bfloat16", forward=forward)
    return {"float32": plain, **in_tf32, **ours}


def task(network: str, width: int, points: int, gpu: bool = False) -> Task:
    return Task(
        {"network": network, "width": width, "points": points},
        lambda: NETWORKS[network](3, width, jax.random.key(0)),
        partial(loss, terms=by_hessian),
        lambda: [np.random.default_rng(0).uniform(size=(points, 3)).astype(np.float32)],
        jax.ShapeDtypeStruct((points, 3), jnp.float32),
        rivals(gpu),
        chunk=1024 if gpu else 64,  # a GPU holds more than a CPU's caches
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _steps.add_arguments(parser, rounds=5)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=FOREIGN)


def run(report: Report, args: argparse.Namespace) -> bool:
    gpu = jax.default_backend() == "gpu"
    width, points = (512, 16_384) if gpu else (32, 64) if args.quick else (64, 256)
    tasks = (task(name, width, points, gpu) for name in args.networks)
    return _steps.run_sizes(report, args, tasks)
