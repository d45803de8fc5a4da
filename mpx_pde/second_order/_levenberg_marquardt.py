"""Levenberg–Marquardt with the residual in full precision and its linear algebra in less."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int32

from .._util._calls import called, public
from .._util._repr import described, in_a_line, number
from .._util._types import PyTree
from ..precision._cast import convert
from ..precision._dtypes import check_choice, is_real
from ..precision._forward import check_forward
from ..precision._split import SPLIT_PRODUCTS
from ..precision._tree import select_tree
from ..program._warnings import PrecisionWarning, warn_user
from ..scaling._loss import DynamicLossScaling
from ._checks import check_dampings, check_parameters, check_solver
from ._choice import MEMORY, METHODS, Choice, chosen, leading_columns
from ._dual import Dual
from ._gram import Reflector, first_leading
from ._low_rank import LowRank, examples_at_a_time
from ._primal import Primal
from ._residuals import Linearized, Residuals
from ._search import Damping, Search, System, at_highest_precision


_FORWARDS = ("float32", "float64")
_JACOBIANS = ("float16", "bfloat16", *SPLIT_PRODUCTS, "float32", "float64")


class LevenbergMarquardtState(eqx.Module):
    """The state of [`mpx_pde.LevenbergMarquardt`][] between steps.

    **Attributes:**

    - `loss`: the loss after the last step; infinite before the first.
    - `damping`: the damping of the next step.
    - `growth`: the factor on the damping if the next try is not taken.
    - `taken`: true if the last step changed the model.
    - `steps`, `rejected`: the numbers of tries that were taken and that were not taken, int32.
    - `scaling`: the loss scaling of a float16 Jacobian.
    - `iterations`: the largest number of conjugate gradient iterations of a try in the last step,
        without its acceleration, int32. If it reaches `refinements`, the Jacobian is too narrow.
    - `leading`: directions of the largest singular values of the Jacobian; `None` if the method
        needs none, as in float64.
    - `system`: the place of the last step's method in `("primal", "dual", "low_rank")`, the number
        of residuals and that of parameters, int32. The first is -1 before the first step.
    - `asked`: the `method`, `jacobian` and `memory` of the optimizer of the last step.
    """

    loss: Float[Array, ""]
    damping: Float[Array, ""]
    growth: Float[Array, ""]
    taken: Bool[Array, ""]
    steps: Int32[Array, ""]
    rejected: Int32[Array, ""]
    scaling: DynamicLossScaling
    iterations: Int32[Array, ""]
    leading: Reflector | None
    system: Int32[Array, "3"]
    asked: tuple[str, str, float] = eqx.field(static=True)

    @property
    def choice(self) -> Choice | None:
        """Returns the method of the last step and why it was taken; `None` before the first."""
        # The members of an ensemble have one size.
        index, rows, parameters = np.reshape(self.system, (-1, 3))[0].tolist()
        return None if index < 0 else chosen(*self.asked, rows, parameters)

    def __repr__(self) -> str:
        names = ("loss", "damping", "steps", "rejected", "iterations")
        parts = [f"{name}={number(getattr(self, name))}" for name in names]
        known = not isinstance(self.system, Tracer | jax.ShapeDtypeStruct)
        choice = self.choice if known else None
        return described(self, ", ".join(parts), *([repr(choice)] if choice else []))


class LevenbergMarquardt(eqx.Module):
    """Minimizes a sum of squares by damped Gauss–Newton steps.

    The residual decides where training ends, and its Jacobian only how it gets there. So the
    residual and the gradient `g` are evaluated in true float32 or in float64, and the Jacobian may
    be narrower.

    A step `v` solves `(Jᵀ J + damping) v = -g`. The *primal* method, for no more parameters than
    residuals, sums the Gram matrix `Jᵀ J` over blocks of the examples, from products in the
    precision of the Jacobian, and factorizes it. With a float64
    Jacobian, the factorization solves for the step. With a narrower one, it preconditions conjugate
    gradients, whose products are in the precision of the residual. They run until the step gains as
    much as the exact one, to 1e-9 (1e-4 in float32). The rounding of `Jᵀ J` is relative to its
    largest singular values. So the Jacobian is turned until up to 192 of their directions come
    first, and the rest has a Gram matrix of its own. The state updates the directions at each step.

    The *dual* method, for more parameters than residuals, factorizes `J Jᵀ + damping` instead,
    because `v = -Jᵀ (J Jᵀ + damping)⁻¹ r`. With a float64 Jacobian its rows are in float64. The
    gradient of a weight matrix of `m × n` entries is a sum of `s` outer products, one for each
    derivative that passes through its layer. Where `s² (m + n) < m n`, products of rows are taken
    by these factors, and this part of `J` is not formed. With a narrower Jacobian the rows are in
    float32, their parts along up to 128 tracked directions stay in it, and what these leave is
    rounded to the precision of the Jacobian for its products. So a half precision matrix needs
    hardly more conjugate gradients than a float32 one. `J` is held a block of rows at a time.

    The *low-rank* method holds no matrix of parameters² or residuals² entries. It runs conjugate
    gradients with a Nyström approximation of `Jᵀ J` from 64 tracked directions as preconditioner.

    The residual of a network bends long before such a step ends. So half of an acceleration is
    added to the step, unless it is too large. The acceleration solves the same system for the
    second derivative of the residual along `v` (Transtrum and Sethna, *Improvements to the
    Levenberg-Marquardt algorithm*, arXiv 1201.5885). The step is taken only if the loss falls.
    Otherwise the damping rises, and up to three more are tried with the same Gram matrix. If none
    is taken, or anything is not finite, the model is returned bit-identical. The damping does not
    rise if a step changes nothing, or if the residual or Jacobian is not finite, because the next
    examples may need less. The damping follows the ratio of the decrease to the one that the linear
    model predicted (Nielsen, *Damping parameter in Marquardt's method*, 1999).

    With `a` and `b` for the smaller and the larger of the numbers of parameters and residuals, a
    step takes about `a² b` operations and the memory of a few matrices of `a²` entries. The
    low-rank method takes about `100 a b` operations and memory for a hundred vectors of parameters.

    ```python
    def interior(model, point):
        d = mpx.partials(model, ["u_xx", "u_yy"], coords="xy", outputs="u")(point)
        return d["u_xx"] + d["u_yy"] - source(point)


    def boundary(model, point):
        return 10.0 * model(point)


    optimizer = mpx.LevenbergMarquardt((interior, boundary), jacobian="bfloat16")
    state = optimizer.init(model)
    step = eqx.filter_jit(optimizer.update)
    for _ in range(200):
        model, state = step(model, state, (points, edge))
    ```
    """

    residuals: tuple[Callable[..., Any], ...]
    forward: str = eqx.field(static=True)
    jacobian: str = eqx.field(static=True)
    method: str = eqx.field(static=True)
    memory: float = eqx.field(static=True)
    damping: float = eqx.field(static=True)
    min_damping: float = eqx.field(static=True)
    max_damping: float = eqx.field(static=True)
    acceleration: float = eqx.field(static=True)
    refinements: int = eqx.field(static=True)
    solver: Any

    @public
    def __init__(
        self,
        residuals: Callable[..., Any] | tuple[Callable[..., Any], ...],
        *,
        forward: str = "float32",
        jacobian: str | None = None,
        method: str = "auto",
        memory: float = MEMORY,
        damping: float = 1e-3,
        min_damping: float = 1e-14,
        max_damping: float = 1e12,
        acceleration: float = 0.75,
        refinements: int = 100,
        solver: Any = None,
    ):
        """**Arguments:**

        - `residuals`: a function of the model and *one* example that returns the residual there, an
            array of any shape; or a tuple of such functions. The loss is the sum over them of the
            mean over their examples of the sum of squares. Put weights into the residuals.
        - `forward`: the precision of the residual and of the linear solve, `"float32"` or
            `"float64"`.
        - `jacobian`: the precision of the Jacobian and of the products that make its Gram matrix,
            no wider than `forward`, which is the default: `"float16"`, `"bfloat16"`, `"float32"`,
            `"float64"`, or a split product such as `"bfloat16_x3"` for the Gram matrix of a float32
            Jacobian. The low-rank method takes float64 or float32. For wide layers the dual method
            is fastest in float64.
        - `method`: `"primal"`, `"dual"`, `"low_rank"`, or `"auto"` for that of the first two
            which takes fewer operations if its matrix fits into memory, and otherwise `"low_rank"`.
            In float64, the dual method is taken up to 1.3 times as many residuals as parameters.
            `choice(model, batches)` and the state say which, and why.
        - `memory`: bytes that the matrices of a step may take with `"auto"`.
        - `damping`: the first damping, relative to the largest squared norm of a Jacobian column.
        - `min_damping`, `max_damping`: the bounds of the damping, relative to the same norm.
        - `acceleration`: the largest length of the acceleration, relative to the step, at which
            half of it is added. It takes the second derivative of the residuals in forward mode. 0
            omits it.
        - `refinements`: the largest number of conjugate gradient iterations that solve for a step,
            unless the Jacobian is float64. Each takes a product with the Jacobian in full and one
            with its transpose. The state has their number; a `PrecisionWarning` says when they did
            not suffice. With 0 the factorization alone solves.
        - `solver`: a solver of [lineax](https://docs.kidger.site/lineax) for the positive definite
            matrix; by default a Cholesky decomposition.

        **Raises:** `TypeError` for residuals that are not functions or a `solver` that is not one;
        `ValueError` for precisions that are unknown or need 64-bit types, a `jacobian` wider than
        `forward`, an unknown `method`, `memory` or dampings that are not positive and in order, a
        negative `acceleration`, numbers that are not finite, and `refinements` that are not an
        integer of at least 0.
        """
        functions = residuals if isinstance(residuals, tuple) else (residuals,)
        if not functions or not all(callable(f) for f in functions):
            raise TypeError(
                f"`{called()}` takes a function of the model and one example as `residuals`, or a "
                f"tuple of such functions, but got {in_a_line(residuals)}."
            )
        jacobian = forward if jacobian is None else jacobian
        check_choice(forward, _FORWARDS, "forward")
        if jacobian not in _JACOBIANS or (jacobian == "float64" and forward != "float64"):
            raise ValueError(
                f"`{called()}` takes one of {_JACOBIANS} as `jacobian`, no wider than `forward` "
                f"({forward!r}), but got {jacobian!r}."
            )
        check_choice(method, ("auto", *METHODS), "method")
        if not is_real(memory) or not memory > 0:
            raise ValueError(
                f"`{called()}` needs bytes, a number above 0, as `memory`, but got {memory!r}."
            )
        check_dampings(min_damping, damping, max_damping, acceleration)
        check_solver(solver)
        if type(refinements) is not int or refinements < 0:
            raise ValueError(f"`{called()}` needs `refinements` >= 0, but got {refinements!r}.")
        self.residuals = functions
        self.forward = check_forward(forward)
        self.jacobian = jacobian
        self.method = method
        self.memory = float(memory)
        self.damping = float(damping)
        self.min_damping, self.max_damping = float(min_damping), float(max_damping)
        self.acceleration = float(acceleration)
        self.refinements = refinements
        self.solver = solver

    @property
    def _dtype(self) -> Any:
        return jnp.dtype(self.forward)

    @public
    def init(self, model: PyTree) -> LevenbergMarquardtState:
        """Returns the first state.

        **Arguments:**

        - `model`: the PyTree whose floating-point arrays are optimized.

        **Returns:** a `LevenbergMarquardtState`.

        **Raises:** `ValueError` for a model without parameters, or with complex ones. Issues a
        `PrecisionWarning` for parameters of a narrower dtype than `forward`.
        """
        check_parameters(model, self._dtype)
        number = lambda x: jnp.array(x, self._dtype)
        columns = sum(x.size for x in jtu.tree_leaves(model) if eqx.is_inexact_array(x))
        several = leading_columns(self.method, columns, self._narrow, self.memory)
        leading = first_leading(columns, several)
        return LevenbergMarquardtState(
            loss=number(jnp.inf),
            damping=number(self.damping),
            growth=number(2.0),
            taken=jnp.array(False),
            steps=jnp.array(0, jnp.int32),
            rejected=jnp.array(0, jnp.int32),
            scaling=DynamicLossScaling(1.0),
            iterations=jnp.array(0, jnp.int32),
            leading=leading if leading.y.size else None,  # Orbax cannot save an empty array
            system=jnp.full(3, -1, jnp.int32),
            asked=self._asked,
        )

    @public
    def update(
        self, model: PyTree, state: LevenbergMarquardtState, batches: PyTree
    ) -> tuple[PyTree, LevenbergMarquardtState]:
        """Takes one step.

        **Arguments:**

        - `model`: the PyTree whose floating-point arrays are optimized; other leaves are kept.
        - `state`: from `init` or the last step.
        - `batches`: the examples of the residual: a PyTree of arrays with a leading axis. With a
            tuple of residuals, a tuple with the examples of each. A tuple of length one holds the
            examples of a single residual.

        **Returns:** `(model, state)`, in the dtypes of the arguments.

        **Raises:** `ValueError` if several residuals do not get a tuple of as many batches, for the
        state of a model of another size, and for examples without a leading axis of one length,
        with one on an explicit axis of a mesh, or none; `TypeError` for another `state`, and for
        residuals that do not return a real floating-point array.
        """
        if not isinstance(state, LevenbergMarquardtState):
            raise TypeError(
                f"`{called()}` takes the model, the state that `init(model)` returned, and the "
                f"examples, but got {in_a_line(state)} as `state`."
            )
        if jnp.ndim(state.damping):
            raise ValueError(
                f"`{called()}` takes the state of one model, but got one whose `damping` has "
                f"shape {jnp.shape(state.damping)}, as an update under `jax.vmap` returns it for "
                "all members. Map this call over the state too, or take that of a member."
            )
        batches = self._each(batches)
        # That of an optimizer with another `forward` has another dtype.
        number = lambda x: x.astype(self._dtype)
        state = dataclasses.replace(
            state,
            loss=number(state.loss),
            damping=number(state.damping),
            growth=number(state.growth),
            asked=self._asked,
        )
        choice = self.choice(model, batches)
        most = examples_at_a_time(choice.parameters) if choice.method == "low_rank" else None
        at = Linearized(self._residuals, model, batches, state.scaling, most=most)
        system = self._system(choice.method, at, state)
        rule = Damping(self.min_damping, self.max_damping)
        search = Search.begun(at, system, rule, self.acceleration)
        after, delta = at_highest_precision(lambda: search(self._begun(state, search, choice)))
        self._tell(choice, after, search)
        moved = select_tree(after.taken, at.parameters(at.start + delta), at.params)
        alike = lambda x, y: convert(x, x.dtype, getattr(y, "weak_type", False))
        return eqx.combine(jtu.tree_map(alike, moved, at.params), at.static), after

    def choice(self, model: PyTree, batches: PyTree) -> Choice:
        """Returns the method that `update` takes for a model and examples, with the operations and
        the memory of each method. Arguments are those of `update`; nothing is computed.

        ```python
        print(optimizer.choice(model, batches))
        ```
        """
        params, static = eqx.partition(model, eqx.is_inexact_array)

        def values(params):
            return self._residuals.values(params, static, self._each(batches))

        rows = jax.eval_shape(values, params).size
        return chosen(*self._asked, rows, sum(x.size for x in jtu.tree_leaves(params)))

    @property
    def _asked(self) -> tuple[str, str, float]:
        return self.method, self.jacobian, self.memory

    @property
    def _residuals(self) -> Residuals:
        return Residuals(self.residuals, self.forward, self.jacobian)

    @property
    def _narrow(self) -> bool:
        """Returns whether the Jacobian is narrower than float64."""
        return self.jacobian != "float64"

    def _each(self, batches: PyTree) -> tuple:
        """Returns a tuple with the examples of each residual."""
        count, length = len(self.residuals), len(batches) if type(batches) is tuple else None
        if count == 1 and length != 1:
            return (batches,)
        if length != count:
            raise ValueError(
                "`LevenbergMarquardt.update` needs a tuple with the examples of each of the "
                f"{count} residuals as `batches`, but got "
                + (in_a_line(batches) if length is None else f"a tuple of {length}")
                + "."
            )
        return batches

    def _system(self, method: str, at: Linearized, state: LevenbergMarquardtState) -> System:
        columns, leading = at.theta.size, state.leading
        if leading is not None and len(leading.y) != columns:
            raise ValueError(
                f"`LevenbergMarquardt.update` got a state that `init` made for a model of "
                f"{len(leading.y):,} parameters, but a model of {columns:,}. It takes the "
                "model, its state and the examples, in this order."
            )
        options = {"solver": self.solver, "refinements": self.refinements}
        if method == "low_rank":
            self._tell_wider()
            if leading is None:  # a state that another method began
                leading = first_leading(columns, leading_columns(method, columns, self._narrow))
            return LowRank.sketched(at, leading, self.refinements)
        if leading is None or not self._narrow:
            dtype = "float32" if self._narrow else "float64"
            leading = first_leading(columns, 0, dtype)
        kind = Primal if method == "primal" else Dual
        return kind.summed(at, leading, **options)

    def _tell_wider(self) -> None:
        if self.jacobian not in _FORWARDS:
            warn_user(
                f"`LevenbergMarquardt` was asked for {self.jacobian}, but products with the "
                "Jacobian in the low-rank method are float32: it forms no matrix that a half "
                "precision could speed up. Pass `method='dual'`, or `jacobian='float32'`."
            )

    def _begun(
        self, state: LevenbergMarquardtState, search: Search, choice: Choice
    ) -> LevenbergMarquardtState:
        """Returns the state before the tries of a step."""
        scaling, leading = state.scaling, state.leading
        scaled = self.jacobian == "float16" and choice.method == "primal"
        tracked = leading is not None and (self._narrow or choice.method == "low_rank")
        size = METHODS.index(choice.method), choice.rows, choice.parameters
        if scaled:  # a residual that is not finite tells nothing of the scale
            scaling = select_tree(search.evaluated, scaling.adjust(search.finite), scaling)
        first = dataclasses.replace(
            state,
            loss=search.loss,
            taken=jnp.zeros_like(state.taken),
            iterations=jnp.zeros_like(state.iterations),
            scaling=scaling,
            leading=search.system.next_leading() if tracked else leading,
            system=jnp.asarray(size, jnp.int32),
        )
        return jtu.tree_map(lambda x, y: x.astype(y.dtype), first, state)

    def _tell(self, choice: Choice, state: LevenbergMarquardtState, search: Search) -> None:
        """Warns at run time if the solve for a step used all its iterations, or if no step is taken
        because the loss overflows in float32 or a float16 Jacobian with the smallest loss scale."""
        finite = search.finite | ~search.evaluated
        if self.refinements and (self._narrow or choice.method == "low_rank"):
            _warn_if(
                state.iterations >= self.refinements,
                f"`LevenbergMarquardt` ended the solve for a step after {self.refinements} "
                f"iterations (`refinements`), before it converged: {self._fix(choice)}, or a "
                "larger `min_damping`.",
            )
        scaled = self.jacobian == "float16" and choice.method == "primal"
        if search.r.dtype == np.float32:
            _warn_if(
                search.evaluated & ~jnp.isfinite(search.loss),
                "`LevenbergMarquardt` takes no step: the sum of the squared residuals overflows in "
                "float32. Write residuals of order one, or pass `forward='float64'`.",
            )
        if scaled:
            scaling = state.scaling
            _warn_if(
                ~finite & (scaling.loss_scaling <= scaling.min_loss_scaling),
                "`LevenbergMarquardt` takes no step: the float16 Jacobian overflows at the "
                "smallest loss scale. Write residuals of order one, or pass `jacobian='bfloat16'`.",
            )

    def _fix(self, choice: Choice) -> str:
        if choice.method == "low_rank":
            return "so few leading directions hardly precondition it. Pass `method='dual'`"
        wider = "float32" if self.jacobian != "float32" else self.forward
        fix = f"`jacobian={wider!r}`" if wider != self.jacobian else "`forward='float64'`"
        return f"a {self.jacobian} Jacobian hardly preconditions it any more. Pass {fix}"


def _warn_if(condition: Bool[Array, ""], text: str) -> None:
    """Warns at run time if `condition` is true."""

    def tell(condition):  # under `vmap` this is always called
        if np.any(condition):
            warnings.warn(text, PrecisionWarning, stacklevel=2)

    run = lambda condition: jax.debug.callback(tell, condition)
    lax.cond(condition, run, lambda _: None, condition)
