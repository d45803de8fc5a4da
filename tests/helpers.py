"""Helpers of several test files: comparison of PyTrees, tolerances, inspection of jaxprs, programs
on several devices, and formulas of a network and of a spectral convolution."""

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.extend as jex
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType

import mpx_pde as mpx
from mpx_pde.nn._spectral_weights import CPWeight


HALVES = ("float16", "bfloat16")

# Error against an oracle, relative to the largest entry of each leaf, by the dtype of the
# arithmetic. Each is a number of unit roundoffs:
# - float64 and float32: the same operations as the oracle, in another order (fusion, sums over
#   some hundred entries): 2^6 of 2^-53 and of 2^-24.
# - float16 and bfloat16: networks of two or three layers, with some ten successive roundings, some
#   of which cancel: 2^4 of 2^-11 and of 2^-8.
TOLERANCES = {"float64": 2.0**-47, "float32": 2.0**-18, "float16": 2.0**-7, "bfloat16": 2.0**-4}


def is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _difference(x: Any, y: Any, tolerance: float | None) -> str | None:
    if not (eqx.is_array(x) and eqx.is_array(y)):
        same = type(x) is type(y) and (x is y or x == y)
        return None if same else f"{x!r} and {y!r}"
    if x.dtype != y.dtype or x.shape != y.shape:
        return f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}"
    if is_key(x):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    x, y = np.asarray(x), np.asarray(y)
    if tolerance is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return None if x.tobytes() == y.tobytes() else f"bits of {x} and {y}"
    wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    size = np.max(np.abs(y), initial=0.0, where=np.isfinite(y))
    close = np.allclose(x, y, rtol=0, atol=tolerance * max(size, np.finfo(np.float64).tiny))
    return None if close else f"{x} and {y}, tolerance {tolerance:.1e} of {size:.1e}"


def _compare(a: Any, b: Any, tolerance: Any) -> bool:
    """Compares PyTrees and prints the differences, which pytest shows if the assertion fails."""
    if jtu.tree_structure(a) != jtu.tree_structure(b):
        print(f"structures: {jtu.tree_structure(a)}\n       and: {jtu.tree_structure(b)}")
        return False
    differences = [
        (path, difference)
        for (path, x), y in zip(jtu.tree_leaves_with_path(a), jtu.tree_leaves(b), strict=True)
        if (difference := _difference(x, y, tolerance(x)))
    ]
    for path, difference in differences:
        print(f"{jtu.keystr(path) or 'root'}: {difference}")
    return not differences


def tree_equal_bits(a: Any, b: Any) -> bool:
    """Returns whether structures, dtypes, shapes and all bits of arrays are equal: a NaN equals
    itself, 0.0 does not equal -0.0. Other leaves are compared by type and `==`."""
    return _compare(a, b, lambda x: None)


def tree_allclose(a: Any, b: Any, computed_in: str | None = None, bits: int = 0) -> bool:
    """Returns whether structures, dtypes and shapes are equal, and floating-point arrays within the
    tolerance of `computed_in` (their own dtype by default) times 2^`bits`. Other leaves must be
    equal."""

    def tolerance(x):
        if not eqx.is_inexact_array(x):
            return None
        return 2**bits * TOLERANCES[computed_in or jnp.finfo(x.dtype).dtype.name]

    return _compare(a, b, tolerance)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Compares only values, not dtypes, so `want` may be an oracle in float64. The tolerance is
    relative to the largest entry of each leaf."""
    for x, y in zip(jtu.tree_leaves(got), jtu.tree_leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        assert np.abs(x - y).max(initial=0.0) <= tolerance * np.abs(y).max(initial=0.0)


def line_here(offset: int = 0) -> int:
    """Returns the number of the line that calls this, plus `offset`."""
    return inspect.currentframe().f_back.f_lineno + offset


def avals(tree: Any) -> list[tuple[str, bool]]:
    """Returns the compilation key of each array leaf: its type and whether it is weakly typed."""
    arrays = [x for x in jtu.tree_leaves(tree) if eqx.is_array(x)]
    return [(str(jax.typeof(x)).lstrip("~"), bool(getattr(x, "weak_type", False))) for x in arrays]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields all equations of a (closed) jaxpr and of the jaxprs inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jtu.tree_leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(parameter):
                yield from equations(parameter)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or isinstance(x, jex.core.ClosedJaxpr)


def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0, dtype: Any = float) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def policy(compute: str, output: str = "float32") -> str:
    return f"params=float32,compute={compute},output={output}"


def plain_update(model: Any, optimizer: Any, state: Any, grads: Any, **extra_args: Any) -> Any:
    """Takes a step of an optimizer without this library."""
    # Optax mixes int32 counters with floats.
    with jax.numpy_dtype_promotion("standard"):
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, params, **extra_args)
        return eqx.apply_updates(model, updates), state


def assert_half(fun: Any, *args: Any, half: str = "float16") -> list[str]:
    """Checks that every product in `fun` that the compiler sees is half × half. Returns them."""
    return products_are_half(program_for_gpu(jax.jit(fun), *args), half)


def program_for_gpu(fun: Any, *args: Any) -> str:
    """Returns a jitted function as a GPU's compiler would see it. No GPU is needed. For a CPU the
    operands of products are widened, which leaves no halves to look at."""
    return fun.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def products_are_half(text: str, half: str) -> list[str]:
    products = [
        line
        for line in text.splitlines()
        # A program may ask for more, as solvers do for their own sums.
        if ("stablehlo.dot_general" in line or "stablehlo.convolution" in line)
        and "HIGHEST" not in line
        and "complex" not in line
    ]
    assert products
    name = {"float16": "f16", "bfloat16": "bf16"}[half]
    for line in products:
        operands = line.rsplit(" : ", 1)[1].split("->")[0]
        assert operands.count(f"x{name}>") + operands.count(f"<{name}>") == 2, line
    return products


def scalar(fun: Any) -> Any:
    """Builds a loss from all floating-point results of `fun`."""

    def loss(*args):
        leaves = [x for x in jax.tree.leaves(fun(*args)) if eqx.is_inexact_array(x)]
        return sum(jnp.sum(jnp.sin(x)) for x in leaves)

    return loss


def coordinate_mlp(model: Any, point: Any) -> Any:
    """Evaluates a `CoordinateMLP` from formulas of its layers, because the float32 casts of the
    module itself would round in float64."""
    embedding = model.embedding.module
    parts = []
    for c, period in zip(point, embedding.periods, strict=True):
        phase = None if period is None else 2 * np.pi / period * c
        parts += [c] if period is None else [jnp.cos(phase), jnp.sin(phase)]
    h = jnp.stack(parts)
    if embedding.frequencies is not None:
        phase = 2 * np.pi * (h @ embedding.frequencies)
        h = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
    for layer in (model.first.module, *model.hidden):
        h = model.activation.fun(h @ layer.weight + layer.bias)
    last = model.last.module if isinstance(model.last, mpx.FullPrecision) else model.last
    return h @ last.weight + last.bias


def pairs(x):
    return jax.lax.complex(x[..., 0], x[..., 1])


def dense(weight):
    """Builds the dense complex weight from a factorized or plain one, by definition."""
    if not isinstance(weight, CPWeight):
        return pairs(weight)
    inputs, outputs, *modes = map(pairs, (weight.inputs, weight.outputs, *weight.modes))
    letters = "xyz"[: len(modes)]
    factors = ",".join(c + "r" for c in letters)
    return jnp.einsum(f"ir,ro,{factors}->{letters}io", inputs, outputs, *modes)


def spectral_by_definition(weight, modes, x, output=None):
    """Computes a spectral convolution by `rfftn`, multiplication of each mode, and `irfftn`."""
    grid, axes = x.shape[1:], range(1, x.ndim)
    output = output or grid
    *full, last = modes
    k = [np.arange(m) - m // 2 for m in full] + [np.arange(last // 2 + 1)]
    spectrum = jnp.fft.rfftn(x, axes=axes, norm="forward")
    kept = spectrum[:, *np.ix_(*(k % n for k, n in zip(k, grid, strict=True)))]
    y = jnp.einsum("i...,...io->o...", kept, dense(weight))
    placed = jnp.zeros((y.shape[0], *output[:-1], output[-1] // 2 + 1), y.dtype)
    placed = placed.at[:, *np.ix_(*(k % n for k, n in zip(k, output, strict=True)))].set(y)
    return jnp.fft.irfftn(placed, s=output, axes=axes, norm="forward")


def assert_tells(text: str, *parts: str, without: tuple[str, ...] = ()) -> None:
    """Checks that a message contains these parts, in any order, and none of `without`."""
    assert [part for part in parts if part not in text] == [], text
    assert [part for part in without if part in text] == [], text


def in_float64(tree: Any) -> Any:
    """Casts the floating-point arrays of a tree to float64. Needs 64-bit types."""
    wide = lambda x: jnp.asarray(np.asarray(x, np.float64)) if eqx.is_inexact_array(x) else x
    return jax.tree.map(wide, tree)


def over_devices(fun: Any, count: int, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    """Maps `fun` over `count` devices, along the axis `"data"`."""
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=jax.devices()[:count])
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def training_step(loss: Any, optimizer: Any, **options: Any) -> Any:
    """Builds a compiled step, as users write it. It takes a model, the optimizer's state, a scaling
    and a batch. It returns the new first three, the loss, whether it was taken, and gradients."""

    @eqx.filter_jit
    def step(model, state, scaling, *batch):
        run = mpx.filter_value_and_grad(loss, scaling, **options)
        value, scaling, finite, grads = run(model, *batch)
        model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling, value, finite, grads

    return step


def oscillation(u: Any, points: Any, weight: Any = 1.0, *, derivatives: Any, square: float = 1.0):
    """Returns the loss of u'' = −`square` u."""
    d = mpx.partials(u, ["u", "u_xx"], coords="x", outputs="u", scaling=derivatives)
    d = jax.vmap(d)(points)
    return jnp.mean(weight * (d["u_xx"] + square * d["u"]) ** 2)


def flat(tree: Any) -> np.ndarray:
    """Returns the floating-point numbers of an array or a tree as one vector in float64."""
    leaves = [x for x in jtu.tree_leaves(tree) if eqx.is_inexact_array_like(x)]
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in leaves])


def relative(got: Any, want: Any) -> float:
    """Returns the norm of the difference of two arrays or trees, relative to the norm of `want`."""
    return float(np.linalg.norm(flat(got) - flat(want)) / np.linalg.norm(flat(want)))


class Pair(NamedTuple):
    first: Any
    second: Any


class OwnScaling(mpx.AbstractLossScaling):
    """A user's own scaling, with another scaling inside and an option of any kind."""

    inner: mpx.AbstractLossScaling
    rule: Any = eqx.field(static=True)

    def scale(self, tree):
        return self.inner.scale(tree)

    def unscale(self, tree):
        return self.inner.unscale(tree)

    def adjust(self, grads_finite):
        return OwnScaling(self.inner.adjust(grads_finite), self.rule)


def running(scaling):
    """Marks a scaling as having taken a step, so its scale falls only by its factor."""
    return eqx.tree_at(lambda s: s.taken_steps, scaling, jnp.ones_like(scaling.taken_steps))


def scaler(exponent: int, **options: Any) -> Any:
    """Builds a dynamic scaling at a power of two, of a run that has taken a step."""
    return running(mpx.DynamicLossScaling(2.0**exponent, **options))


def products(fun: Any, *args: Any) -> list[Any]:
    """Returns the equations of a function that are products or Fourier transforms."""
    names = re.compile("dot_general|fft|conv_general_dilated")
    return [e for e in equations(jax.make_jaxpr(fun)(*args)) if names.search(e.primitive.name)]
