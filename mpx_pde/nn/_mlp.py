"""A network for physics-informed models, and fields that meet their boundary conditions by
construction."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray

from .._util._calls import called, public
from .._util._repr import in_a_line
from .._util._types import DTypeLike
from .._util._wrapper import unfit_signature
from ..precision._cast import Fixed, FullPrecision, widen
from ..precision._dtypes import as_floating_dtype, check_integer, is_half, is_integer, is_real
from ..precision._forward import takes_halves
from ..precision._tree import check_key
from ..products._dot import mixed_dot_general
from ._activations import as_activation


class Embedding(eqx.Module):
    """Maps periodic coordinates to sine and cosine, then optionally all of them to random Fourier
    features.
    """

    frequencies: Float[Array, "inputs features"] | None
    periods: tuple[float | None, ...] = eqx.field(static=True)

    def __call__(self, point: Float[Array, " coords"]) -> Float[Array, " embedded"]:
        parts, start = [], 0
        # Group runs of equal periods, since there may be a thousand coordinates.
        for period, run in itertools.groupby(self.periods):
            stop = start + len(tuple(run))
            if period is None:
                parts.append(point[start:stop])
            else:
                for i in range(start, stop):
                    phase = (2 * np.pi / period) * point[i : i + 1]
                    parts += [jnp.cos(phase), jnp.sin(phase)]
            start = stop
        x = jnp.concatenate(parts)
        if self.frequencies is not None:
            # The frequencies are drawn once and not trained.
            phase = 2 * np.pi * (x @ jax.lax.stop_gradient(self.frequencies))
            x = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
        return x


class Dense(eqx.Module):
    """Computes `x @ weight + bias` by a mixed product, in `dtype` or in the dtype of the weight."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]
    dtype: np.dtype | None = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
        # Widened here, a half weight has its gradient summed in float32; the same holds for the
        # bias. Then `x` is the narrower operand, which decides the dtype if `dtype` is not given.
        axes = (((x.ndim - 1,), (0,)), ((), ()))
        weight = widen(self.weight)
        out = mixed_dot_general(x.astype(self.stored), weight, axes, dtype=self.multiplied_in)
        return (widen(out) + jnp.broadcast_to(widen(self.bias), out.shape)).astype(self.stored)

    @property
    def multiplied_in(self) -> np.dtype | None:
        """Returns the dtype that the layer passes to its product, or `None`."""
        half = self.dtype is not None and is_half(self.dtype)
        return None if half and not takes_halves() else self.dtype

    @property
    def stored(self) -> np.dtype:
        """Returns the dtype of the layer's input and output."""
        return self.multiplied_in or self.weight.dtype


def _dense(key: PRNGKeyArray, inputs: int, outputs: int, dtype: Any) -> Dense:
    # Glorot's normal initialisation, which keeps the derivatives of deep networks in scale.
    scale = math.sqrt(2 / (inputs + outputs))
    weight = scale * jax.random.normal(key, (inputs, outputs), jnp.float32)
    return Dense(weight, jnp.zeros(outputs, jnp.float32), dtype)


def _is_number(x: Any) -> bool:
    """Returns whether `x` is a positive, finite number of Python, NumPy or JAX."""
    known = eqx.is_array(x) and x.shape == () and not isinstance(x, Tracer)
    return (is_real(x) or known) and 0 < float(x) < math.inf


def _parse_periods(periodic: Any, in_size: int) -> dict[int, float]:
    periods = {} if periodic is None else periodic
    fits = isinstance(periods, Mapping) and all(
        is_integer(i) and i in range(in_size) and _is_number(p) for i, p in periods.items()
    )
    if not fits:
        raise ValueError(
            f"`{called()}` takes `periodic` as a mapping from indices of its {in_size} coordinates "
            f"to positive periods, such as {{0: 2.0}}, but got {in_a_line(periodic)}."
        )
    return {int(i): float(p) for i, p in periods.items()}


def _parse_features(features: Any) -> tuple[int, float]:
    pair = isinstance(features, Sequence) and len(features) == 2
    if not (pair and is_integer(features[0]) and features[0] > 0 and _is_number(features[1])):
        raise ValueError(
            f"`{called()}` takes `(features, sigma)` as `fourier_features`, how many random "
            "frequencies and their standard deviation, such as (64, 1.0), but got "
            f"{in_a_line(features)}."
        )
    return int(features[0]), float(features[1])


class CoordinateMLP(eqx.Module):
    """A network from coordinates to fields, for physics-informed models.

    It has the structure of [`equinox.nn.MLP`][], and differs in its precision:

    - Coordinates, their embedding and the first layer are float32. Derivatives with respect to
        the coordinates come from that layer, and rounded coordinates cost more accuracy than
        anything else.
    - Hidden layers multiply in the dtype of their weights by [`mpx_pde.mixed_matmul`][]. That is
        half precision in a model that [`mpx_pde.filter_grad`][] has cast, and float32 in the
        masters.
    - Activations are evaluated in float32 and stored in half precision, so that intermediate values
        of their higher derivatives do not overflow.

    With `forward="float32"` nothing is cast. In half precision throughout, keep the points in
    float32: `filter_value_and_grad(..., keep_full=(False, True))`.

    **Attributes:**

    - `embedding`, `first`: float32 layers, each in a [`mpx_pde.FullPrecision`][].
    - `hidden`: the layers in between.
    - `last`: the output layer. With `full_precision_last` it is in a [`mpx_pde.FullPrecision`][].
    - `activation`: the activation, as [`mpx_pde.nn.safe`][] makes it.
    """

    embedding: FullPrecision
    first: FullPrecision
    hidden: tuple[Dense, ...]
    last: Dense | FullPrecision
    activation: Callable
    in_size: int = eqx.field(static=True)
    out_size: int | Literal["scalar"] = eqx.field(static=True)
    width_size: int = eqx.field(static=True)
    depth: int = eqx.field(static=True)

    @public
    def __init__(
        self,
        in_size: int,
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        *,
        key: PRNGKeyArray,
        activation: Callable[..., Any] = jnp.tanh,
        fourier_features: Any = None,
        periodic: Any = None,
        full_precision_last: bool = False,
        dtype: DTypeLike | None = None,
    ):
        """**Arguments:**

        - `in_size`: number of coordinates.
        - `out_size`: number of fields, or `"scalar"`.
        - `width_size`: size of the hidden layers; a multiple of 8 suits tensor cores.
        - `depth`: number of hidden layers, at least 1.
        - `key`: a `jax.random.key`.
        - `activation`: an elementwise function. If it has parameters, as `equinox.nn.PReLU()` has,
            they are trained.
        - `fourier_features`: `(features, sigma)`. The embedding is the cosine and sine of 2π times
            the coordinates' products with `features` random frequencies, drawn from a normal
            distribution with standard deviation `sigma` (in cycles per unit of length). They are
            not trained: [`mpx_pde.optimizer_update`][] leaves them unchanged. If you do not use
            that function, exclude them from weight decay by a mask.
        - `periodic`: a mapping from the index of each coordinate in which the fields are periodic
            to its period, such as `{0: 2.0}`.
        - `full_precision_last`: whether the output layer is float32 too. Without `forward=` this
            reduces the error by 0 to 20 % in float16, and by nothing measurable in bfloat16.
        - `dtype`: the dtype of the products of hidden layers; by default the dtype of their
            weights. With a half type, float32 masters enter the products uncast, so their gradients
            come out in float32. A half type gives way where full precision is asked for, as by
            `forward="float32"` or [`mpx_pde.FullPrecision`][].

        **Raises:** `ValueError` for sizes below 1, or a `periodic` or `fourier_features` that do
        not fit; `TypeError` for a `key` or an `activation` that is not one.
        """
        self.in_size = check_integer(in_size, "in_size")
        self.width_size = check_integer(width_size, "width_size")
        self.depth = check_integer(depth, "depth")
        scalar = out_size == "scalar"
        self.out_size = out_size if scalar else check_integer(out_size, "out_size")
        check_key(key)
        periods = _parse_periods(periodic, in_size)
        embed_key, first_key, *keys = jax.random.split(key, depth + 2)
        embedded = in_size + len(periods)
        frequencies = None
        if fourier_features is not None:
            features, sigma = _parse_features(fourier_features)
            frequencies = sigma * jax.random.normal(embed_key, (embedded, features), jnp.float32)
            embedded = 2 * features
        dtype = None if dtype is None else as_floating_dtype(dtype)
        outputs = 1 if scalar else out_size
        by_coordinate = tuple(periods.get(i) for i in range(in_size))
        self.embedding = Fixed(Embedding(frequencies, by_coordinate))
        self.first = FullPrecision(_dense(first_key, embedded, width_size, None))
        self.hidden = tuple(_dense(k, width_size, width_size, dtype) for k in keys[:-1])
        last = _dense(keys[-1], width_size, outputs, None if full_precision_last else dtype)
        self.last = FullPrecision(last) if full_precision_last else last
        self.activation = as_activation(activation)

    def __call__(
        self, point: Float[Array, " coords"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*fields"]:
        """**Arguments:**

        - `point`: the coordinates, shape `[in_size]`, in float32.
        - `key`: ignored; provided for compatibility with the layers of Equinox.

        **Returns:**

        The fields, shape `[out_size]` or a scalar, in the dtype of the last layer's product.

        **Raises:** `ValueError` for a `point` of another shape.
        """
        point = jnp.asarray(point)
        # The embedding takes coordinates by index, so from a batch it would take the first points.
        # Asked of NumPy: converters of programs replace functions of `jax.numpy` while they trace.
        if np.shape(point) != (self.in_size,):
            raise ValueError(
                f"`CoordinateMLP` takes one point, an array of its {self.in_size} coordinates, but "
                f"got shape {np.shape(point)}. For many points use `jax.vmap`."
            )
        x = self.first(self.embedding(widen(point)))
        for layer in (*self.hidden, self.last):
            if isinstance(layer, FullPrecision):
                x = layer(widen(self.activation(x)))
            else:
                # Rounded before the activation, so that values kept for the backward pass are half.
                x = layer(self.activation(x.astype(layer.stored)))
        return x[0] if self.out_size == "scalar" else x


class Ansatz(eqx.Module):
    """A network inside a formula, such as `u = lift(x) + distance(x) * network(x)`.

    The formula is evaluated in float32, whatever the precision of the network inside. It is an
    ordinary function of the point, and [`mpx_pde.partials`][] differentiates it like any other: in
    float32 in the formula, and in half precision in the products of the network.

    **Attributes:**

    - `network`: a function of one point, such as a [`mpx_pde.nn.CoordinateMLP`][] or any other
        network.
    - `form`: a function of a point and of the network's output there, both in float32. If it is a
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

        signature = unfit_signature(self.form, 2)
        if signature is not None:
            raise TypeError(
                "`Ansatz` takes a function of a point and of what the network returned there as "
                f"`form`, such as `lambda x, u: x[0] * (1 - x[0]) * u`, but got one of "
                f"{signature}. The network comes first."
            )

    def __call__(
        self, point: Float[Array, " coords"], *, key: PRNGKeyArray | None = None
    ) -> Float[Array, "*fields"]:
        """**Arguments:**

        - `point`: the coordinates, in float32.
        - `key`: ignored; provided for compatibility with the layers of Equinox.

        **Returns:** what `form` returns.
        """
        return self.form(widen(point), widen(self.network(point)))
