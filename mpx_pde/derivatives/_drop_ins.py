"""Replaces `jax.grad`, `jax.jacfwd`, `jax.jacrev` and `jax.hessian` in losses by functions with
scaled seeds."""

import dataclasses
import functools as ft
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .._util._calls import called, named, public
from .._util._repr import in_a_line
from .._util._types import Names, PyTree
from .._util._wrapper import of_some
from ..precision._cast import widen
from ..precision._dtypes import is_integer
from ..scaling._checks import Term, check_fun, coords_of, names_of
from ..scaling._derivatives import DerivativeScaling, check_derivatives
from ._evaluation import Evaluation


Argnums = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """A function that was differentiated once or several times. A call evaluates it in one pass.

    [`mpx_pde.derivatives.grad`][], [`jacfwd`][mpx_pde.derivatives.jacfwd] and
    [`hessian`][mpx_pde.derivatives.hessian] return it. Differentiating one again adds an order. So
    `grad(grad(u))` carries its scale through both and is unscaled once, at its end.

    **Attributes:**

    - `taken`, `scalar`, `coords`: for each time, the arguments, whether it was by `grad`, and the
        names of coordinates, if any.
    - `has_aux`: whether `fun` returns a pair, of which only the first is differentiated.
    - `call`: the name of the last call, for errors.
    """

    fun: Callable
    taken: tuple[Argnums, ...]
    scalar: tuple[bool, ...]
    coords: tuple[tuple[str, ...] | None, ...]
    has_aux: bool
    scaling: DerivativeScaling | None
    outputs: tuple[str, ...] | None
    call: str

    def __call__(self, *args: Any, **kwargs: Any) -> PyTree:
        with named(self.call):
            if self.has_aux:
                # Compilation leaves out the first result here.
                pair = self._pair(self.fun(*args, **kwargs))
                return self._derivative(args, kwargs), pair[1]
            return self._derivative(args, kwargs)

    def _pair(self, out: Any) -> tuple[Any, Any]:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(
                f"`{called()}` with `has_aux=True` differentiates a function that returns a pair "
                f"`(output, aux)`, but it returned {in_a_line(out)}."
            )
        return out

    def _output(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what is differentiated."""
        out = self.fun(*args, **kwargs)
        return self._pair(out)[0] if self.has_aux else out

    def _used(self, args: tuple) -> list[int]:
        """Returns the positions of the differentiated arguments, in the order of the point."""
        # The arguments in tuples come in the order of the tuples, as `coords` names them.
        tuples = (i for argnums in self.taken if isinstance(argnums, tuple) for i in argnums)
        every = {i for argnums in self.taken for i in _indices(argnums)}
        used = list(dict.fromkeys((*tuples, *sorted(every))))
        if max(used) >= len(args):
            raise TypeError(
                f"`{called()}` differentiates in the positional argument {max(used)}, but the "
                f"function was called with {len(args)}."
            )
        return used

    def _terms(
        self, places: dict[int, tuple[int, ...]], coords: Sequence[str], outputs: Sequence[str]
    ) -> dict[tuple, Term]:
        """Returns the terms that the entries of the derivative need, by output and directions."""
        terms: dict[tuple, Term] = {}
        taken = set[str]()
        along = [itertools.chain(*(places[i] for i in _indices(argnums))) for argnums in self.taken]
        # Entries that are equal by symmetry share a term.
        for output, *dirs in itertools.product(range(len(outputs)), *along):
            key = output, tuple(sorted(dirs))
            if key in terms:
                continue
            name = outputs[output] + "_" + "".join(coords[i] for i in key[1])
            # Longer names may run together, so the position distinguishes such terms.
            terms[key] = Term(f"{name} {key}" if name in taken else name, *key)
            taken.add(name)
        return terms

    def _derivative(self, args: tuple, kwargs: dict) -> PyTree:
        used = self._used(args)
        places = _places(args, used)
        # Plain arithmetic would return a Python number as one, and not as an array.
        args = tuple(jnp.asarray(x) if i in used else x for i, x in enumerate(args))
        shape, dtype = self._result(args, kwargs)

        def at(point):
            parts = [point[np.asarray(places[i])].reshape(args[i].shape) for i in used]
            parts = [part.astype(args[i].dtype) for i, part in zip(used, parts, strict=True)]
            return jnp.ravel(of_some(ft.partial(self._output, **kwargs), args, used)(*parts))

        point = jnp.concatenate(widen([jnp.ravel(args[i]) for i in used]))
        coords, count = self._coords(args, used, places), math.prod(shape)
        outputs = self.outputs or (("u",) if count == 1 else None)
        outputs = self._named("outputs", outputs, "u", count)
        terms = self._terms(places, coords, outputs)
        every, values = tuple(terms.values()), {}
        if every:
            values = Evaluation(at, coords, outputs, every, (), self.scaling, None)(point)

        def array(chosen: tuple[int, ...]) -> Array:
            """Returns the derivatives with respect to one argument for each order."""
            entries = itertools.product(range(count), *(places[i] for i in chosen))
            parts = [values[terms[output, tuple(sorted(dirs))].name] for output, *dirs in entries]
            shape_of = *shape, *(n for i in chosen for n in args[i].shape)
            return jnp.stack(parts).reshape(shape_of) if parts else jnp.zeros(shape_of, dtype)

        def tree(chosen: tuple[int, ...], left: Sequence[Argnums]) -> PyTree:
            """Returns all arrays, in the structure of JAX's result."""
            if not left:
                return array(chosen)
            several = [tree((*chosen, i), left[1:]) for i in _indices(left[0])]
            return tuple(several) if isinstance(left[0], tuple) else several[0]

        return tree((), self.taken)

    def _result(self, args: tuple, kwargs: dict) -> tuple[tuple[int, ...], Any]:
        """Returns the shape of the function's result, and the dtype of its derivatives."""
        out = eqx.filter_eval_shape(self._output, *args, **kwargs)
        shape = getattr(out, "shape", None)
        if shape is None:
            raise TypeError(
                f"`{called()}` differentiates a function that returns an array, but it returned "
                f"{type(out).__name__}."
            )
        so_far = shape
        for argnums, scalar in zip(self.taken, self.scalar, strict=True):
            if scalar and so_far != ():
                raise TypeError(
                    "`grad` differentiates a function that returns a scalar, but it returned an "
                    f"array of shape {so_far}. `jacfwd` takes arrays."
                )
            if scalar and jnp.issubdtype(out.dtype, jnp.complexfloating):
                raise TypeError(
                    "`grad` differentiates a function that returns a real number, but it returned "
                    f"{out.dtype.name}. `jacfwd` takes complex numbers."
                )
            axes = [np.shape(args[i]) for i in _indices(argnums)]
            so_far = (*so_far, *axes[0]) if len(axes) == 1 else (*so_far, len(axes))
        return shape, jnp.promote_types(out.dtype, np.float32)

    def _coords(
        self, args: tuple, used: Sequence[int], places: dict[int, tuple[int, ...]]
    ) -> tuple[str, ...]:
        """Returns the names of the coordinates in the point: those that the calls give, and for
        others those of the scaling, or numbered ones."""
        what = "coordinates in `argnums`"
        everything = list(itertools.chain(*(places[i] for i in used)))
        names: dict[int, str] = {}
        for argnums, own_names in zip(self.taken, self.coords, strict=True):
            own = list(itertools.chain(*(places[i] for i in _indices(argnums))))
            if own_names is None:
                continue
            # A call names its own coordinates, or those of all calls.
            of = own if len(own_names) == len(own) else everything
            for place, name in zip(of, self._named(what, own_names, "x", len(of)), strict=True):
                if names.setdefault(place, name) != name:
                    raise ValueError(
                        f"`{called()}` got the names {names[place]!r} and {name!r} for one "
                        "coordinate."
                    )
        known = None if self.scaling is None else self.scaling.strategy.coords
        if not names and known is None:
            return self._named(what, None, "x", len(everything))
        others = self._of_scaling(args, used, places, known) or {}
        taken = set(names.values())
        names |= {i: name for i, name in others.items() if i not in names and name not in taken}
        ordered = tuple(names[i] for i in everything if i in names)
        self._named(what, ordered or known, "x", len(everything))
        return coords_of(ordered)

    def _of_scaling(
        self,
        args: tuple,
        used: Sequence[int],
        places: dict[int, tuple[int, ...]],
        known: tuple[str, ...] | None,
    ) -> dict[int, str] | None:
        """Returns the names that the scaling has for the entries of the point, if it names as many
        coordinates as there are in the `used` arguments, or in all arguments."""
        sizes = {
            i: len(places[i]) if i in places else _coordinates_in(x) for i, x in enumerate(args)
        }
        for of in (list(used), list(range(len(args)))):
            if known is not None and sum(sizes[i] for i in of) == len(known):
                names = iter(known)
                taken = {i: [next(names) for _ in range(sizes[i])] for i in of}
                pairs = ((places[i], taken[i]) for i in used)
                return {p: n for ps, ns in pairs for p, n in zip(ps, ns, strict=True)}
        return None

    def _named(self, what: str, given: tuple[str, ...] | None, letter: str, size: int) -> Any:
        """Returns the names of coordinates or outputs: the given ones, or numbered letters."""
        names = tuple(f"{letter}{i}" for i in range(size)) if given is None else given
        if len(names) != size:
            raise ValueError(
                f"`{called()}` of {size} {what} has the names of {len(names)}: {', '.join(names)}"
                ". Name each, in their order."
            )
        return names


def _coordinates_in(x: Any) -> int:
    """Returns the number of coordinates in an argument that is a scalar or has one axis."""
    fits = eqx.is_array_like(x) and np.ndim(x) <= 1
    return int(np.size(x)) if fits and jnp.issubdtype(jnp.result_type(x), jnp.floating) else 0


def _indices(argnums: Argnums) -> tuple[int, ...]:
    return argnums if isinstance(argnums, tuple) else (argnums,)


def _places(args: tuple, used: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Returns the positions in the point of the entries of each differentiated argument."""
    places, start = {}, 0
    for i in used:
        x = args[i]
        if not eqx.is_array_like(x) or np.ndim(x) > 1 or not np.size(x):
            shape = getattr(x, "shape", None)
            got = f"a {type(x).__name__}" if shape is None else f"an array of shape {shape}"
            raise TypeError(
                f"`{called()}` differentiates in scalars and in arrays with one axis, the "
                f"coordinates of one point, but the argument {i} is {got}. For many points use "
                "`jax.vmap`; for the gradient of a loss in the parameters, `mpx_pde.filter_grad`."
            )
        dtype = jnp.result_type(x)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"`{called()}` takes a floating-point point, but its argument {i} is {dtype.name}. "
                "Pass an integer as `jnp.float32(x)`."
            )
        places[i] = tuple(range(start, start + np.size(x)))
        start += np.size(x)
    return places


def _differentiate(
    fun: Callable,
    argnums: Any,
    scaling: Any,
    coords: Names | None,
    outputs: Names | None,
    has_aux: bool,
    scalar: bool = False,
) -> Derivative:
    check_fun(fun)
    check_derivatives(scaling)
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    numbers: tuple[Any, ...] = tuple(argnums) if several else (argnums,)
    if not numbers or not all(is_integer(i) and i >= 0 for i in numbers):
        raise TypeError(
            f"`{called()}` takes positions of arguments from 0 on as `argnums`, an integer or a "
            f"tuple of them, but got {in_a_line(argnums)}."
        )
    taken: Argnums = tuple(int(i) for i in numbers) if several else int(numbers[0])
    coords = None if coords is None else coords_of(coords)
    outputs = None if outputs is None else names_of(outputs, "the outputs")
    if not isinstance(fun, Derivative):
        fun = Derivative(fun, (), (), (), bool(has_aux), None, None, called())
    elif fun.has_aux != bool(has_aux):
        raise TypeError(
            f"`{called()}` differentiates a result of `{fun.call}` that "
            f"{'returns a pair' if fun.has_aux else 'has no `aux`'}. Pass "
            f"`has_aux={fun.has_aux}` to both."
        )
    options = {"scaling": scaling, "outputs": outputs}
    return dataclasses.replace(
        fun,
        taken=(*fun.taken, taken),
        scalar=(*fun.scalar, scalar),
        coords=(*fun.coords, coords),
        call=called(),
        **{name: x for name, x in options.items() if x is not None},
    )


@public
def grad(
    fun: Callable,
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    scaling: Any = None,
    coords: Names | None = None,
    outputs: Names | None = None,
) -> Derivative:
    """Differentiates a network in its coordinates like [`jax.grad`][], with scaled seeds.

    In a loss that is written with `jax.grad`, replace its name, and pass as `scaling` what the loss
    receives as `derivatives`. The engine of [`mpx_pde.partials`][] evaluates the derivatives, the
    scaling counts them, and they are unscaled once. So `grad(grad(u))` is one pass of second order,
    unscaled at its end. Do not pass the first derivative through a function of your own, which
    would unscale it half way. Take [`mpx_pde.derivatives.hessian`][] there.

    **Arguments:**

    - `fun`: a function that returns a scalar, or a result of `grad`.
    - `argnums`: the positional arguments to differentiate in, as in [`jax.grad`][]. Each is a
        scalar or an array with one axis: the coordinates of one point.
    - `has_aux`: whether `fun` returns a pair `(output, aux)`, as in [`jax.grad`][]. Nested calls
        all take it, and return one `aux`.
    - `scaling`: the `derivatives` that the loss received, or `None` for no scaling.
    - `coords`: the names of the coordinates in `argnums`, in their order: a letter for each, or a
        list. Each of several nested calls names its own, or one of them names all, in the order of
        the arguments. By default those of a scaling `per_direction`, if it has as many coordinates
        as `argnums`, or as all arguments together.
    - `outputs`: the names of the outputs, for scalings that name terms; by default `u`.

    **Returns:**

    A function of the same arguments that returns the result of `jax.grad`, in float32 (float64 for
    float64); with `has_aux`, a pair of this result and `aux`.

    **Raises:** `TypeError` for a `scaling` that is not one, `argnums` that are not positions,
    arguments with two axes or more or without a floating-point dtype, and outputs that are not
    scalars; `ValueError` for names that do not fit.

    ```python
    u = lambda t, x: jnp.sin(x) * jnp.exp(-t)
    u_t = mpx.derivatives.grad(u)
    u_xx = mpx.derivatives.grad(mpx.derivatives.grad(u, 1), 1)
    u_t(0.0, 1.0) - u_xx(0.0, 1.0)  # 0.0
    ```
    """
    return _differentiate(fun, argnums, scaling, coords, outputs, has_aux, scalar=True)


@public
def jacfwd(
    fun: Callable,
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    scaling: Any = None,
    coords: Names | None = None,
    outputs: Names | None = None,
) -> Derivative:
    """Differentiates a network in its coordinates like [`jax.jacfwd`][], with scaled seeds.

    It works like [`mpx_pde.derivatives.grad`][], for a function that returns an array of any shape,
    real or complex.

    **Arguments:** as for [`mpx_pde.derivatives.grad`][].

    **Returns:**

    A function of the same arguments that returns the result of `jax.jacfwd`, in float32.

    **Raises:** as [`mpx_pde.derivatives.grad`][].
    """
    return _differentiate(fun, argnums, scaling, coords, outputs, has_aux)


@public
def jacrev(
    fun: Callable,
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    scaling: Any = None,
    coords: Names | None = None,
    outputs: Names | None = None,
) -> Derivative:
    """Differentiates a network in its coordinates like [`jax.jacrev`][], with scaled seeds.

    The result is that of [`mpx_pde.derivatives.jacfwd`][], and it is evaluated in the same way: the
    coordinates of a point are few, so that forward mode is the cheaper one.

    **Arguments:** as for [`mpx_pde.derivatives.grad`][].

    **Returns:**

    A function of the same arguments that returns the result of `jax.jacrev`, in float32.

    **Raises:** as [`mpx_pde.derivatives.grad`][].
    """
    return _differentiate(fun, argnums, scaling, coords, outputs, has_aux)


@public
def hessian(
    fun: Callable,
    argnums: Any = 0,
    *,
    has_aux: bool = False,
    scaling: Any = None,
    coords: Names | None = None,
    outputs: Names | None = None,
) -> Derivative:
    """Differentiates a network in its coordinates twice, like [`jax.hessian`][], with scaled
    seeds.

    Entries that are equal by symmetry are evaluated once, and all entries in one pass. For the sum
    along the diagonal alone, [`mpx_pde.laplacian`][] is cheaper.

    **Arguments:** as for [`mpx_pde.derivatives.grad`][]; `fun` may return an array of any shape.

    **Returns:**

    A function of the same arguments that returns the result of `jax.hessian`, in float32.

    **Raises:** as [`mpx_pde.derivatives.grad`][].
    """
    once = _differentiate(fun, argnums, scaling, coords, outputs, has_aux)
    return _differentiate(once, argnums, scaling, coords, outputs, has_aux)
