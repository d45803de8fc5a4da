"""Training steps on the cavity: how libraries of JAX differentiate and lower the precision.

All begin with the same weights and points and take Adam. Each step is a function `(model, optimizer
state, scaling, points, targets) -> (model, optimizer state, scaling, loss)`, as `overhead.Runner`
wants it; there are no targets here.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from ._cavity import (
    ORDERS,
    Layers,
    coordinate_mlp,
    laplacian_residuals,
    layers_of,
    mean_square,
    named,
    nested,
    network,
    residuals,
)
from ._rivals import require
from ._roofline import predicted_seconds
from ._steps import (
    PERIOD,
    START,
    hand_scaling,
    jmp_scaling,
    mpx_scaling,
    policy_of,
    step_by_hand,
    step_by_jmp,
    step_by_library,
    step_by_mpx,
    step_in_float32,
)
from .overhead import Runner


MOMENTUM = 0.9  # Adam's b1 in Optax and in PyTorch


class Step(Protocol):
    """A step with its state, ready to run: a call takes it and waits for nothing."""

    def __call__(self) -> Any: ...

    def temp_bytes(self) -> int | None:
        """Memory beyond weights, optimizer and points while it runs, where that can be told."""
        ...

    def layers(self) -> Layers:
        """The weights as they are now."""
        ...

    def moment(self) -> Layers:
        """Adam's first moment."""
        ...


class Rival(NamedTuple):
    """A way to take the step.

    - `make(layers, points, order)`: the step.
    - `everywhere`: whether it runs at all sizes, or only at the first.
    - `orders`: those that it knows.
    """

    library: str
    method: str
    precision: str
    make: Callable[[Layers, np.ndarray, int], Step]
    everywhere: bool = True
    orders: tuple[int, ...] = ORDERS


class JaxStep:
    """A compiled step. `products` is JAX's precision of float32 matrix products."""

    def __init__(self, step: Any, model: Any, scaling: Any, points: Any, products: Any = None):
        self.points = jnp.asarray(points), jnp.zeros(())
        self.runner = Runner(step, model, scaling)
        with jax.default_matmul_precision(products) if products else nullcontext():
            program = self.runner.step.lower(self.runner.state, *self.points).compile()
        self.runner.step = self.program = program
        device = jax.devices()[0].device_kind
        self.predicted = predicted_seconds(program.as_text(), device)

    def __call__(self) -> jax.Array:
        return self.runner(*self.points)

    def temp_bytes(self) -> int | None:
        memory = self.program.memory_analysis()
        return memory.temp_size_in_bytes if memory is not None else None

    def layers(self) -> Layers:
        return layers_of(self.runner.state[0])

    def moment(self) -> Layers:
        return layers_of(self.runner.state[1][0].mu)


# --- Losses ----------------------------------------------------------------------------------


def _widened(order: int) -> Callable[[Any], jax.Array]:
    """The loss of derivatives in any precision: residuals and their mean in float32."""
    return lambda d: mean_square(jax.tree.map(lambda x: x.astype(jnp.float32), d), order)


def nested_loss(layers, points, _=None, *, order, finish=None):
    """By nested `jax.jvp`, in the precision of the arguments up to the residuals."""
    finish = finish or _widened(order)
    return finish(jax.vmap(nested(partial(network, layers), order))(points))


def folx_loss(layers, points, _=None, *, order):
    """By folx: one pass for value, Jacobian and Laplacian."""
    forward = require("folx").forward_laplacian(partial(network, layers))

    def terms(point):
        out = forward(point)
        d = named(out.x, *out.jacobian.dense_array)
        d["lap_u"], d["lap_v"], _ = out.laplacian
        if order >= 3:
            along = lambda e: jax.jvp(lambda p: forward(p).laplacian, (point,), (e,))[1]
            d["lap_u_x"], d["lap_v_y"] = along(jnp.eye(2)[0])[0], along(jnp.eye(2)[1])[1]
        return d

    return mean_square(jax.vmap(terms)(points), order)


# --- Steps -----------------------------------------------------------------------------------


def _arrays(layers: Layers) -> Layers:
    return jax.tree.map(jnp.asarray, layers)


def in_float32(loss, products, layers, points, order):
    step = partial(step_in_float32, partial(loss, order=order))
    return JaxStep(step, _arrays(layers), hand_scaling(1.0), points, products)


def by_hand(layers, points, order):
    step = partial(step_by_hand, partial(nested_loss, order=order), "float16", PERIOD)
    return JaxStep(step, _arrays(layers), hand_scaling(START), points)


def by_mpx(layers, points, order):
    """As MPX's README has it, what is critical in full precision."""
    full_precision = require("mpx").force_full_precision
    finish = full_precision(partial(mean_square, order=order), jnp.float32)
    step = partial(step_by_mpx, partial(nested_loss, order=order, finish=finish), "float16")
    return JaxStep(step, _arrays(layers), mpx_scaling(START, PERIOD), points)


def by_jmp(layers, points, order):
    """As jmp's README has it."""
    policy = require("jmp").get_policy(policy_of("float16"))
    finish = lambda d: mean_square(policy.cast_to_output(d), order)
    loss = partial(nested_loss, order=order, finish=finish)
    step = partial(step_by_jmp, loss, policy, PERIOD)
    return JaxStep(step, _arrays(layers), jmp_scaling(START), points)


def library_step(method, precision, layers, order, forward="half"):
    """The step by this library, its model and its scaling."""

    def loss(model, points, _, *, derivatives):
        if method == "laplacian":
            return laplacian_residuals(model, points, derivatives=derivatives)
        return residuals(model, points, derivatives=derivatives, propagate=True, order=order)

    options = {
        "use_mixed_precision": precision != "float32",
        "policy": policy_of(precision),
        "keep_full": (False, True, True),
        "forward": forward,
    }
    with mpx.half_precision("bfloat16" if precision == "bfloat16" else "float16"):
        derivatives = mpx.DerivativeScaling.per_direction("xy", order=order)
        scaling = mpx.Scaling(mpx.DynamicLossScaling(START), derivatives)
    return partial(step_by_library, loss, options), coordinate_mlp(layers), scaling


def by_library(method, precision, layers, points, order):
    return JaxStep(*library_step(method, precision, layers, order), points)


def jax_rivals(gpu: bool) -> list[Rival]:
    """On a GPU, JAX multiplies in TF32 unless told otherwise; this library always does as told."""
    full = {"float32": "highest"} | ({"TF32": "tensorfloat32"} if gpu else {})
    out = [
        Rival(library, method, name, partial(in_float32, loss, products))
        for library, method, loss in (
            ("jax", "nested jvp", nested_loss),
            ("folx", "forward Laplacian", folx_loss),
        )
        for name, products in full.items()
    ]
    out += [
        Rival("by hand", "nested jvp", "float16", by_hand),
        Rival("mpx", "nested jvp", "float16", by_mpx, everywhere=False),
        Rival("jmp", "nested jvp", "float16", by_jmp, everywhere=False),
    ]
    for method, orders in {"partials": ORDERS, "laplacian": (2,)}.items():
        for precision in ("float32", "float16", "bfloat16"):
            make = partial(by_library, method, precision)
            everywhere = method == "partials" and precision != "bfloat16"
            out.append(Rival("mpx_pde", method, precision, make, everywhere, orders))
    return out
