"""Evaluates functions with JAX's own primitives alone: [`mpx_pde.plain`][]."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from .._util._calls import public
from .._util._in_jax import IN_JAX
from .._util._wrapper import AbstractWrapper, check_callable
from . import _tables as tables
from ._jaxpr import aval_of, bodies_of, equations_in, own_bind, trace_arrays, walk
from ._rebind import rebind


_OF_DERIVATIVES = tables.CALLS | tables.CUSTOM | tables.CHECKPOINTS
"""Containers that run the program in them once, and matter for derivatives only."""

_IDENTITIES = frozenset({"name", "optimization_barrier"})
"""Primitives of JAX that matter for the backward pass and for compilation only."""


def _known(atom: Literal) -> Any:
    return np.asarray(atom.val, aval_of(atom).dtype)


def _evaluate(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    return walk(closed.jaxpr, closed.consts, args, _known, _equation)


def _equation(_: int, eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
    name, bodies = eqn.primitive.name, bodies_of(eqn)
    if (evaluate := IN_JAX.get(eqn.primitive)) is not None:
        out = evaluate(*args, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]
    if name in _IDENTITIES:
        return args
    ours = any(e.primitive in IN_JAX for body in bodies for e in equations_in(body))
    if name == "remat2" or (ours and name in _OF_DERIVATIVES):
        return _evaluate(bodies[0], args)
    if ours:
        return rebind(eqn, args, [lambda *args, b=b: _evaluate(b, args) for b in bodies])
    return own_bind(eqn, args)


class _Plain(AbstractWrapper):
    fun: Any

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        closed, leaves, assemble = trace_arrays(self.fun, args, kwargs)
        return assemble(_evaluate(closed, [x for _, x in leaves]))

    def __get__(self, instance: Any, owner: Any = None):
        return self if instance is None else _Plain(eqx.Partial(self.fun, instance))


@public
def plain(fun: Callable[..., Any]) -> Any:
    """Evaluates a function, such as a trained network, with JAX's own primitives alone.

    Networks of [`mpx_pde.nn`][mpx_pde.nn.FNO] and mixed products hold primitives of this library.
    These say how to differentiate, and in which order and precision a backward pass computes.
    Inference needs none of that. Pass the result to a converter that knows JAX's primitives only,
    such as jax2onnx.

    Values agree with those of `fun` up to the order of sums: products multiply in the same dtypes.
    Derivatives of the result are JAX's, so train `fun` itself.

    **Arguments:**

    - `fun`: a function or a callable module.

    **Returns:**

    A callable with the name, docstring and signature of `fun`. It traces `fun` at each call.

    **Raises:** `TypeError` if `fun` cannot be called.

    ```python
    model = mpx.nn.FNO(1, 1, 8, 2, (8, 8), key=jax.random.key(0))
    jaxpr = jax.make_jaxpr(mpx.plain(model))(jnp.ones((1, 32, 32)))
    ```
    """
    check_callable(fun)
    with warnings.catch_warnings():
        # It is not trained, so a function that `jax.vmap` returns may be held too.
        warnings.filterwarnings("ignore", "(?s).*JAX-transformed callable")
        return eqx.module_update_wrapper(_Plain(fun))
