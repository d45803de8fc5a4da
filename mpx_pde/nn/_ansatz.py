"""Fields that meet their boundary conditions by construction."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray

from .._cast import widen


class Ansatz(eqx.Module):
    """A network inside a formula, such as `u = lift(x) + distance(x) * network(x)`.

    The formula is evaluated in float32, whatever the network beneath it is in. It is an ordinary
    function of the point: [`mpx_pde.partials`][] differentiates it like any other, in float32 where
    the formula stands and in half where the network multiplies.

    **Attributes:**

    - `network`: a function of one point, such as a [`mpx_pde.nn.CoordinateMLP`][] or any other
        network.
    - `form`: a function of a point and of what the network returned there, in float32. If it is a
        module, its parameters are trained too.

    ```python
    network = mpx.nn.CoordinateMLP(1, "scalar", 16, 2, key=jax.random.key(0))
    model = mpx.nn.Ansatz(network, lambda x, u: x[0] * (1 - x[0]) * u)  # zero at 0 and 1
    ```
    """

    network: Any
    form: Callable[..., Any]

    def __check_init__(self):
        for name in ("network", "form"):
            if not callable(getattr(self, name)):
                raise TypeError(
                    "`Ansatz` takes a network and a function of a point and of what the network "
                    f"returned there as `form`, but got {getattr(self, name)!r} as `{name}`."
                )

        try:
            inspect.signature(self.form).bind(None, None)
        except (TypeError, ValueError) as e:
            if isinstance(e, ValueError):  # of a builtin
                return
            raise TypeError(
                "`Ansatz` takes a function of a point and of what the network returned there as "
                f"`form`, such as `lambda x, u: x[0] * (1 - x[0]) * u`, but got one of "
                f"{inspect.signature(self.form)}. The network comes first."
            ) from None

    def __call__(
        self, point: Float[Array, " coords"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*fields"]:
        """**Arguments:**

        - `point`: the coordinates, in float32.
        - `key`: ignored; as all layers of Equinox take it.

        **Returns:** what `form` returns.
        """
        return self.form(widen(point), widen(self.network(point)))
