"""The public functions of JAX that take a real array, each with a call that works.

Most are found by trying calls. `SPECIAL` holds the others. `OTHERS` names what takes no real array.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


MODULES = {
    "jnp": jnp,
    "jnp.linalg": jnp.linalg,
    "jnp.fft": jnp.fft,
    "nn": jax.nn,
    "special": jax.scipy.special,
    "lax": lax,
}

# Exact in float16 and in bfloat16, so that casts of them round nothing.
VECTOR = np.asarray([0.75, -1.5, 0.25, 1.25, -0.5, 1.875, -0.875, 1.75], np.float32)
COMPANION = np.asarray([1.5, 0.5, -0.25, 1.875, 1.0, -0.75, 0.375, 1.125], np.float32)
MATRIX = np.asarray((np.arange(16).reshape(4, 4) % 7 - 2) / 4 + 2 * np.eye(4), np.float32)
INDICES = np.asarray([0, 2, 2, 1, 0, 3, 3, 3])


class Function(NamedTuple):
    """A function by name, as a call of a vector or of a matrix, with a second array or without.

    A series is called for a few numbers, one after the other: for an array JAX evaluates all
    branches of a function at each number, and some series hardly end outside of their branch. That
    of `exp1` for large arguments, compiled, takes half a minute at 2^-18.
    """

    name: str
    call: Callable
    matrix: bool = False
    companion: bool = False
    series: bool = False

    def arrays(self) -> tuple[np.ndarray, ...]:
        first = MATRIX if self.matrix else VECTOR
        arrays = (first, first.T if self.matrix else COMPANION)[: 1 + self.companion]
        return tuple(x[:4] for x in arrays) if self.series else arrays


# A call and whether its first argument is a matrix and whether it takes a second array.
TRIED: list[tuple[Callable, bool, bool]] = [
    (lambda f, x: f(x), False, False),
    (lambda f, x, y: f(x, y), False, True),
    (lambda f, x: f(x), True, False),
    (lambda f, x, y: f(x, y, y), False, True),
    (lambda f, x: f(x, 2), False, False),
    (lambda f, x: f(2, x), False, False),
    (lambda f, x, y: f(x, y), True, True),
    (lambda f, x, y: f([x, y]), False, True),
    (lambda f, x: f(x, 0), False, False),
    (lambda f, x: f(x, (0,)), False, False),
]

_volume = lambda x: x[None, :, None]
_kernel = lambda y: y[:3].reshape(1, 3, 1)
_numbers = ("NHC", "OHI", "NHC")
_scatter = lax.ScatterDimensionNumbers((), (0,), (0,))
_scattered = lambda f: lambda x, y: f(x, jnp.asarray(INDICES)[:, None], y[:8], _scatter)
_gather = lax.GatherDimensionNumbers((), (0,), (0,))
_add = lambda f: lambda x: f(x, jnp.zeros((), x.dtype), lax.add, (x.shape[0],), (1,), "VALID")


def _value_of(f: Callable) -> Callable:
    """Returns a call of a function that has no derivative, beside its argument, which has one."""
    return lambda x, y: (f(lax.stop_gradient(x), lax.stop_gradient(y)), x)


SPECIAL: dict[str, tuple[Callable, bool, bool]] = {
    "jnp.apply_along_axis": (lambda x: jnp.apply_along_axis(jnp.sum, 0, x), True, False),
    "jnp.apply_over_axes": (lambda x: jnp.apply_over_axes(jnp.sum, x, (0, 1)), True, False),
    "jnp.astype": (lambda x: jnp.astype(x, x.dtype), False, False),
    "jnp.bincount": (
        lambda x: jnp.bincount(jnp.zeros(x.size, int), x, length=2),
        False,
        False,
    ),
    "jnp.broadcast_to": (lambda x: jnp.broadcast_to(x, (2, x.size)), False, False),
    "jnp.choose": (
        lambda x, y: jnp.choose(jnp.arange(x.size) % 2, [x, y], mode="clip"),
        False,
        True,
    ),
    "lax.broadcast": (lambda x: lax.broadcast(x, (2,)), False, False),
    "lax.tile": (lambda x: lax.tile(x, (2,)), False, False),
    "jnp.cov": (jnp.cov, True, False),
    "jnp.cross": (lambda x, y: jnp.cross(x[:3], y[:3]), False, True),
    "jnp.delete": (lambda x: jnp.delete(x, 2), False, False),
    "jnp.dsplit": (lambda x: jnp.dsplit(x[None, None], 2), False, False),
    "jnp.einsum": (lambda x, y: jnp.einsum("i,i->", x, y), False, True),
    "jnp.einsum of one": (lambda x: jnp.einsum("i->", x), False, False),
    "jnp.fill_diagonal": (
        lambda x, y: jnp.fill_diagonal(x, y[0], inplace=False),
        True,
        True,
    ),
    "jnp.insert": (lambda x, y: jnp.insert(x, 1, y[0]), False, True),
    "jnp.interp": (
        lambda x, y: jnp.interp(x, jnp.linspace(-2.0, 2.0, y.size).astype(x.dtype), y),
        False,
        True,
    ),
    "jnp.interp of values": (
        lambda y, x: jnp.interp(x, jnp.linspace(-2.0, 2.0, y.size).astype(x.dtype), y),
        False,
        True,
    ),
    "jnp.lexsort": (lambda x, y: jnp.lexsort((x, y)), False, True),
    "jnp.moveaxis": (lambda x: jnp.moveaxis(x, 0, 1), True, False),
    "jnp.piecewise": (
        lambda x: jnp.piecewise(x, [x < 0], [lambda e: e * e, lambda e: 3 * e]),
        False,
        False,
    ),
    "jnp.place": (
        lambda x, y: jnp.place(x, jnp.arange(x.size) % 2 == 0, y, inplace=False),
        False,
        True,
    ),
    "jnp.polyfit": (
        lambda y: jnp.polyfit(jnp.linspace(-1, 1, y.size).astype(y.dtype), y, 2),
        False,
        False,
    ),
    "jnp.put": (lambda x, y: jnp.put(x, jnp.arange(4), y[:4], inplace=False), False, True),
    "jnp.put_along_axis": (
        lambda x, y: jnp.put_along_axis(x, jnp.arange(4), y[:4], 0, inplace=False),
        False,
        True,
    ),
    "jnp.reshape": (lambda x: jnp.reshape(x, (2, -1)), False, False),
    "jnp.select": (lambda x, y: jnp.select([x > y, x > 0], [x, y], x * y), False, True),
    "jnp.swapaxes": (lambda x: jnp.swapaxes(x, 0, 1), True, False),
    "jnp.take_along_axis": (
        lambda x: jnp.take_along_axis(x, jnp.asarray(INDICES), 0),
        False,
        False,
    ),
    "jnp.vectorize": (lambda x: jnp.vectorize(jnp.sin)(x), False, False),
    "jnp.where": (lambda x, y: jnp.where(x > y, x, y), False, True),
    "jnp.linalg.cross": (lambda x, y: jnp.linalg.cross(x[:3], y[:3]), False, True),
    "jnp.linalg.matrix_power": (lambda x: jnp.linalg.matrix_power(x, 3), True, False),
    "jnp.linalg.tensorinv": (lambda x: jnp.linalg.tensorinv(x, 1), True, False),
    "jnp.linalg.tensorsolve": (lambda x, y: jnp.linalg.tensorsolve(x, y[0]), True, True),
    "nn.dot_product_attention": (
        lambda x, y: jax.nn.dot_product_attention(x[:, None], y[:, None], y[:, None]),
        True,
        True,
    ),
    "nn.one_hot": (lambda x: jax.nn.one_hot(jnp.asarray(INDICES), 4) * x[:1], False, False),
    "special.expn": (lambda x: jax.scipy.special.expn(2, x), False, False),
    "special.hyp2f1": (lambda x: jax.scipy.special.hyp2f1(1.0, 2.0, 3.0, x), False, False),
    "special.polygamma": (lambda x: jax.scipy.special.polygamma(1, x), False, False),
    "special.zeta": (lambda x: jax.scipy.special.zeta(x + 1, 2.0), False, False),
    "special.poch": (lambda x: jax.scipy.special.poch(x, 1.5), False, False),
    "lax.zeta": (lambda q: lax.zeta(jnp.full_like(q, 2.5), q), False, False),
    "lax.polygamma": (lambda x: lax.polygamma(jnp.ones_like(x), x), False, False),
    "lax.igamma_grad_a": (_value_of(lax.igamma_grad_a), False, True),
    "lax.random_gamma_grad": (_value_of(lax.random_gamma_grad), False, True),
    "lax.argmax": (lambda x: lax.argmax(x, 0, int), False, False),
    "lax.argmin": (lambda x: lax.argmin(x, 0, int), False, False),
    "lax.associative_scan": (lambda x: lax.associative_scan(jnp.add, x), False, False),
    "lax.broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, x.size), (1,)), False, False),
    "lax.concatenate": (lambda x, y: lax.concatenate([x, y], 0), False, True),
    "lax.cond": (
        lambda x, y: lax.cond(x[0] > y[0], lambda x, y: x * y, lambda x, y: x + y, x, y),
        False,
        True,
    ),
    "lax.conv": (
        lambda x, y: lax.conv(x[None, None], y[:3].reshape(1, 1, 3), (1,), "SAME"),
        False,
        True,
    ),
    "lax.conv_general_dilated": (
        lambda x, y: lax.conv_general_dilated(
            _volume(x), _kernel(y), (1,), "SAME", dimension_numbers=_numbers
        ),
        False,
        True,
    ),
    "lax.conv_general_dilated_patches": (
        lambda x: lax.conv_general_dilated_patches(x[None, None], (3,), (1,), "SAME"),
        False,
        False,
    ),
    "lax.conv_transpose": (
        lambda x, y: lax.conv_transpose(
            _volume(x),
            y[:3].reshape(3, 1, 1),
            (2,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
        ),
        False,
        True,
    ),
    "lax.custom_linear_solve": (
        lambda x, y: lax.custom_linear_solve(
            lambda v: x @ v,
            y[0],
            lambda _, b: jnp.linalg.solve(x, b),
            lambda _, b: jnp.linalg.solve(x.T, b),
        ),
        True,
        True,
    ),
    "lax.custom_root": (
        lambda x: lax.custom_root(
            lambda z: z**3 + z - x,
            x,
            lambda f, z: lax.fori_loop(0, 40, lambda _, z: z - (z**3 + z - x) / (3 * z**2 + 1), z),
            lambda g, y: y / g(jnp.ones_like(y)),
        ),
        False,
        False,
    ),
    "lax.dot_general": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        True,
        True,
    ),
    "lax.dynamic_slice": (lambda x: lax.dynamic_slice(x, (2,), (4,)), False, False),
    "lax.dynamic_slice_in_dim": (lambda x: lax.dynamic_slice_in_dim(x, 2, 4), False, False),
    "lax.dynamic_update_index_in_dim": (
        lambda x, y: lax.dynamic_update_index_in_dim(x, y[0], 2, 0),
        False,
        True,
    ),
    "lax.dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y[:3], (2,)),
        False,
        True,
    ),
    "lax.dynamic_update_slice_in_dim": (
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y[:3], 2, 0),
        False,
        True,
    ),
    "lax.fori_loop": (lambda x: lax.fori_loop(0, 5, lambda _, h: h + 0.125 * x, x), False, False),
    "lax.gather": (
        lambda x: lax.gather(x, jnp.asarray(INDICES)[:, None], _gather, (1,)),
        False,
        False,
    ),
    "lax.map": (lambda x: lax.map(jnp.sin, x), False, False),
    "lax.pad": (lambda x, y: lax.pad(x, y[0], [(1, 1, 1)]), False, True),
    "lax.ragged_dot": (
        lambda x, y: lax.ragged_dot(x, y[None], jnp.asarray([4], "int32")),
        True,
        True,
    ),
    "lax.reduce": (
        lambda x: lax.reduce(x, jnp.zeros((), x.dtype), lax.add, (0,)),
        False,
        False,
    ),
    "lax.reduce_window": (_add(lax.reduce_window), False, False),
    "lax.reshape": (lambda x: lax.reshape(x, (2, x.size // 2)), False, False),
    "lax.scan": (
        lambda x: lax.scan(lambda c, e: (c + e, c), jnp.zeros((), x.dtype), x),
        False,
        False,
    ),
    "lax.scatter": (
        lambda x, y: lax.scatter(x, jnp.asarray([[1]]), y[:1], _scatter),
        False,
        True,
    ),
    "lax.scatter_add": (_scattered(lax.scatter_add), False, True),
    "lax.scatter_max": (_scattered(lax.scatter_max), False, True),
    "lax.scatter_min": (_scattered(lax.scatter_min), False, True),
    "lax.scatter_mul": (
        lambda x, y: lax.scatter_mul(
            x, jnp.arange(4)[:, None], y[:4], _scatter, unique_indices=True
        ),
        False,
        True,
    ),
    "lax.scatter_sub": (_scattered(lax.scatter_sub), False, True),
    "lax.select": (lambda x, y: lax.select(x > y, x, y), False, True),
    "lax.slice": (lambda x: lax.slice(x, (1,), (5,)), False, False),
    "lax.slice_in_dim": (lambda x: lax.slice_in_dim(x, 1, 5), False, False),
    "lax.split": (lambda x: lax.split(x, (3, x.size - 3)), False, False),
    "lax.squeeze": (lambda x: lax.squeeze(x[None], (0,)), False, False),
    "lax.switch": (lambda x: lax.switch(1, [jnp.sin, jnp.square], x), False, False),
    "lax.while_loop": (
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))[1],
        False,
        False,
    ),
}

_OTHERS = """
arange array_repr array_str bartlett bitwise_and bitwise_count bitwise_invert bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman broadcast_shapes can_cast
diag_indices einsum_path empty eye fromfile fromfunction fromiter frompyfunc fromstring full gcd
get_printoptions hamming hanning identity indices invert iscomplexobj isdtype isrealobj isscalar
issubdtype iterable kaiser lcm left_shift load mask_indices ndim ones packbits printoptions
promote_types ravel_multi_index result_type right_shift save savez set_printoptions shape size
tri tril_indices triu_indices unpackbits zeros get_scaled_dot_general_config scaled_dot_general
scaled_matmul bernoulli bessel_jn sph_harm_y ConvGeneralDilatedDimensionNumbers PrecisionLike
after_all all_gather all_to_all axis_index axis_size bitcast_convert_type broadcasted_iota clz
composite conv_dimension_numbers conv_general_dilated_local conv_general_permutations
conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple conv_with_general_padding
convert_element_type create_token dce_sink dtype fft fftfreq rfftfreq imag index_take iota mulhi
padtype_to_pads pbroadcast pcast platform_dependent pmean population_count ppermute precv psend
pshuffle psum_scatter pswapaxes ragged_all_to_all ragged_dot_general real reduce_and reduce_or
reduce_precision reduce_window_shape_tuple reduce_xor rng_bit_generator rng_uniform
scatter_apply shape_as_value shift_left shift_right_arithmetic shift_right_logical
with_sharding_constraint empty_like psum pmax pmin frombuffer from_dlpack asarray_chkfinite
argwhere compress extract flatnonzero intersect1d nonzero roots setdiff1d setxor1d trim_zeros
union1d unique unique_all unique_counts unique_inverse unique_values
"""

OTHERS = frozenset(_OTHERS.split())
"""Functions of integers, shapes, dtypes, files or devices, and those that cannot be traced, because
the shape of their result depends on values."""


def traced(call: Callable, arrays: tuple[np.ndarray, ...]) -> str | None:
    """Returns the program of a call as text, or `None` if the call does not work."""
    try:
        with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"):
            warnings.simplefilter("ignore")
            closed, shape = jax.make_jaxpr(call, return_shape=True)(*map(jnp.asarray, arrays))
    except Exception:  # whatever a wrong call raises
        return None
    leaves = jax.tree.leaves(shape)
    known = bool(leaves) and all(hasattr(x, "dtype") and x.size for x in leaves)
    return str(closed) if known else None


_SERIES = """
special.exp1 special.expi special.expn special.gammainc special.gammaincc special.hyp1f1
special.hyp2f1 special.poch lax.igamma_grad_a lax.random_gamma_grad
"""

SERIES = frozenset(_SERIES.split())
"""Functions whose loops run as long as a series needs."""


def function(name: str) -> Function:
    """Returns the function with this name, such as `jnp.sum`."""
    found = _called(name)
    if name not in SERIES:
        return found
    each = lambda *arrays: lax.map(lambda numbers: found.call(*numbers), arrays)
    return found._replace(call=each, series=True)


def _called(name: str) -> Function:
    if name in SPECIAL:
        call, *rest = SPECIAL[name]
        return Function(name, call, *rest)
    short, _, plain = name.rpartition(".")
    f = getattr(MODULES[short], plain)
    for call, matrix, companion in TRIED:
        bound = lambda *arrays, call=call: call(f, *arrays)
        one = Function(name, bound, matrix, companion)
        if traced(bound, one.arrays()):
            return one
    raise LookupError(f"no call of `{name}` is known")


def names() -> Iterator[str]:
    """Yields the names of all functions."""
    for short, module in MODULES.items():
        for plain in sorted(dir(module)):
            if plain.startswith("_") or plain in OTHERS or plain.endswith("_p"):
                continue
            if callable(f := getattr(module, plain)) and not inspect.isclass(f):
                yield f"{short}.{plain}"
    yield from (name for name in SPECIAL if " of " in name)


def distinct(chosen: Iterable[str]) -> dict[str, list[str]]:
    """Returns the names, each with those of the same program, such as `jnp.abs` and `jnp.fabs`."""
    known: dict[str, list[str]] = {}
    for name in chosen:
        f = function(name)
        known.setdefault(str(traced(f.call, f.arrays())), []).append(name)
    return {first: rest for first, *rest in known.values()}
