"""Fields that meet their boundary conditions by construction."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._cast import widen
from ._mlp import Groups


class Ansatz(eqx.Module):
    """A network inside a formula, such as `u = lift(x) + distance(x) * network(x)`.

    The formula is evaluated and differentiated in float32. The network beneath it keeps its own
    way of propagating derivatives, which it would lose as part of a plain function: derivatives of
    order 1 and 2 of the whole come from those of the network by the chain rule.

    **Attributes:**

    - `network`: a function of one point with a method `forward_derivatives`, usually a
        [`mpx_pde.nn.CoordinateMLP`][].
    - `form`: a function of a point and of what the network returned there, in float32; static.

    ```python
    network = mpx.nn.CoordinateMLP(1, "scalar", 16, 2, key=jax.random.key(0))
    model = mpx.nn.Ansatz(network, lambda x, u: x[0] * (1 - x[0]) * u)  # zero at 0 and 1
    ```
    """

    network: Any
    form: Callable = eqx.field(static=True)

    def __check_init__(self):
        if not hasattr(self.network, "forward_derivatives"):
            raise TypeError(
                "`Ansatz` takes a network that propagates derivatives, such as "
                f"`mpx_pde.nn.CoordinateMLP`, as `network`, but got {type(self.network).__name__}. "
                "Any other is differentiated as part of a plain function: write one."
            )
        if not callable(self.form):
            raise TypeError(
                "`Ansatz` takes a function of a point and of what the network returned there as "
                f"`form`, but got {self.form!r}."
            )

    def __call__(self, point: Float[Array, " coords"]) -> Float[Array, "*fields"]:
        """**Arguments:**

        - `point`: the coordinates, in float32.

        **Returns:** what `form` returns.
        """
        return self.form(widen(point), widen(self.network(point)))

    def forward_derivatives(
        self, point: Float[Array, " coords"], seeds: Float[Array, "seeds coords"], second: Groups
    ) -> tuple[
        Float[Array, "*fields"], Float[Array, "seeds *fields"], Float[Array, "sums *fields"]
    ]:
        """Value, first derivatives along `seeds`, and sums of second derivatives along them, as
        `forward_derivatives` of a [`mpx_pde.nn.CoordinateMLP`][] returns them."""
        point, seeds = widen(point), widen(seeds)
        value, first, sums = widen(self.network.forward_derivatives(point, seeds, second))
        at = (point, value)

        def along(i):
            return lambda *at: jax.jvp(self.form, at, (seeds[i], first[i]))[1]

        def summed(group, curve):
            # The network's own curvature through the form, and that of the form along its slopes.
            out = jax.jvp(lambda v: self.form(point, v), (value,), (curve,))[1]
            return out + sum(jax.jvp(along(i), at, (seeds[j], first[j]))[1] for i, j in group)

        out = self.form(*at)
        slopes = [along(i)(*at) for i in range(len(seeds))]
        curves = [summed(group, curve) for group, curve in zip(second, sums, strict=True)]
        empty = jnp.zeros((0, *out.shape), out.dtype)
        stack = lambda rows: jnp.stack(rows) if rows else empty
        return out, stack(slopes), stack(curves)
