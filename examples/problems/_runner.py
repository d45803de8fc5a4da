"""Trains a problem in a precision, by one recipe for all problems without exceptions.

`_problem.py`, which the files of the problems import, defines what a problem is. Everything that
concerns mixed precision is in `Trainer.step`.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int32, PRNGKeyArray, PyTree

import mpx_pde as mpx

from ._kept import Kept
from ._naive import without_protection
from ._problem import STEPS_PER_CALL, Problem, Reference, values_at


QUICK_STEPS = 4
RECORDED = ("values", "finite", "scales")  # of each step


class Precision(NamedTuple):
    """The precisions of a step: dtypes of its products and of its forward pass, and controls."""

    compute: str
    forward: str = "half"
    autocast: bool = False  # a dtype for each operation, instead of a cast of the network
    naive: bool = False  # by hand: a cast of everything, nested `jax.jvp`, only loss scaling
    rounded: bool = False  # rounds the initial weights once
    dropped: int = 0  # number of first steps that change nothing

    @property
    def mixed(self) -> bool:
        return self.compute not in ("float32", "float64") or self.forward != "half"

    @property
    def wide(self) -> str:
        """The dtype of the trained weights and of the points."""
        return "float64" if "float64" in (self.compute, self.forward) else "float32"


PRECISIONS = {
    "float32": Precision("float32"),
    "float16": Precision("float16"),
    "bfloat16": Precision("bfloat16"),
    "forward-float32-float16": Precision("float16", "float32"),
    "forward-float32-bfloat16": Precision("bfloat16", "float32"),
    "autocast-float16": Precision("float16", autocast=True),
    "autocast-bfloat16": Precision("bfloat16", autocast=True),
    "naive-float16": Precision("float16", naive=True),
    # Controls that measure chance: float32 with an almost identical start.
    "float32-rounded": Precision("float32", rounded=True),
    "float32-dropped": Precision("float32", dropped=3),
    # A CPU rounds split products as hardware that has them does, but takes longer.
    "forward-bfloat16_x3-bfloat16": Precision("bfloat16", "bfloat16_x3"),
    "forward-bfloat16_x3-float16": Precision("float16", "bfloat16_x3"),
    "float64": Precision("float64"),
    "forward-float64-float32": Precision("float32", "float64"),
}
OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "adam": lambda rate: optax.adam(rate, b2=0.99),
    "muon": optax.contrib.muon,
}
FINISHES = ("", "+lbfgs")  # suffixes of an optimizer's name


@dataclass(frozen=True)
class Outcome:
    """The result of one training."""

    precision: str
    optimizer: str
    seed: int
    steps: int
    error: float | None  # None if it is not finite
    errors: dict[str, float | None]
    loss: float | None  # mean over the last steps
    skipped: int
    loss_scale: float

    def record(self) -> dict[str, Any]:
        return asdict(self)


class State(NamedTuple):
    """Everything that a step changes."""

    model: Any
    opt_state: PyTree
    scaling: Any
    average: Any  # of the weights, over about the last tenth of the steps
    count: Int32[Array, ""]


class Progress(NamedTuple):
    """How far a training is: its state, the remaining key, and the records of the calls."""

    state: State
    key: PRNGKeyArray
    records: list[Any]

    def keep(self, file: Kept) -> None:
        told = dict(zip(RECORDED, map(np.stack, zip(*self.records, strict=True)), strict=True))
        file.save(self.state, key=np.asarray(jax.random.key_data(self.key)), **told)

    @classmethod
    def kept(cls, state: State, told: Mapping[str, np.ndarray]) -> "Progress":
        key = jax.random.wrap_key_data(jnp.asarray(told["key"]))
        return cls(state, key, list(zip(*(told[name] for name in RECORDED), strict=True)))


class Trainer:
    """The training of one problem in one precision, compiled once for any number of seeds.

    `transform` changes a step, a function of PyTrees of arrays; emulations use it. A compiled call
    takes `per_call` steps.
    """

    def __init__(
        self,
        problem: Problem,
        precision: str = "float32",
        *,
        optimizer: str | None = None,
        steps: int | None = None,
        per_call: int = STEPS_PER_CALL,
        transform: Callable[[Callable], Callable] = lambda step: step,
    ):
        self.problem, self.name, self.precision = problem, precision, PRECISIONS[precision]
        self.optimizer_name = optimizer or problem.optimizer
        base, plus, last = self.optimizer_name.partition("+")
        if base not in OPTIMIZERS or plus + last not in FINISHES:
            known = ", ".join(name + f for name in OPTIMIZERS for f in FINISHES)
            raise ValueError(f"`optimizer` must be one of {known}, got {self.optimizer_name!r}.")
        wanted = problem.steps if steps is None else steps
        self.per_call = min(per_call, wanted)
        self.steps = self.per_call * math.ceil(wanted / self.per_call)
        warm_up = max(1, self.steps // 20)  # also lets the scales settle
        highest = problem.learning_rate
        self.rates = optax.warmup_cosine_decay_schedule(0.0, highest, warm_up, self.steps)
        self.optimizer = OPTIMIZERS[base](self.rates)
        self.transform = transform
        self.choose = eqx.filter_jit(self._choose)
        self.program: Any = None

    # --- A step ------------------------------------------------------------------------------

    def gradient(self, loss: Callable, scaling: Any) -> Callable:
        """Returns the value and gradient of a loss; this is how the library is used."""
        return mpx.filter_value_and_grad(loss, scaling, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        compute, wide = self.precision.compute, self.precision.wide
        return {
            "use_mixed_precision": self.precision.mixed,
            "policy": f"params={wide},compute={compute},output={wide}",
            "keep_full": (False, not self.precision.naive),  # cast the network, not the points
            "forward": self.precision.forward,
            "autocast": self.precision.autocast,
        }

    def with_first_scales(self, state: State, points: PyTree) -> State:
        """Finds scales at which the first step does not overflow. Casts by hand skip this
        search."""
        if self.precision.naive or self.precision.compute != "float16":
            return state
        find = mpx.initial_scaling(self.problem.loss, state.scaling, **self.options)
        return state._replace(scaling=find(state.model, jax.tree.map(lambda x: x[0], points)))

    def step(self, state: State, points: PyTree) -> tuple[State, tuple[Array, Bool[Array, ""]]]:
        model, opt_state, scaling, average, count = state
        gradient = self.gradient(self.problem.loss, scaling)
        value, scaling, finite, grads = gradient(model, points)
        if self.precision.dropped:
            finite &= count >= self.precision.dropped
        model, opt_state = mpx.optimizer_update(model, self.optimizer, opt_state, grads, finite)
        average = running_average(average, model, finite, min(1.0, 10 / self.steps))
        return State(model, opt_state, scaling, average, count + 1), (value, finite)

    # --- A training --------------------------------------------------------------------------

    def types(self) -> Any:
        """Returns the context in which JAX has the types of the precision."""
        known = jax.dtypes.canonicalize_dtype("float64") == "float64"
        return jax.enable_x64(known or self.precision.wide == "float64")

    def initial(self, seed: int) -> tuple[State, PRNGKeyArray]:
        model_key, key = jax.random.split(jax.random.key(seed))
        with jax.enable_x64(False):
            model = self.problem.network(model_key)
        if self.precision.rounded:
            model = _rounded(model)
        if self.precision.naive:
            model = without_protection(model)
        if self.precision.wide == "float64":
            model = _in_float64(model)
        with mpx.half_precision("bfloat16" if "bfloat16" in self.precision.compute else "float16"):
            scaling = self._scaling()
        opt_state = self.optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        return State(model, opt_state, scaling, model, jnp.zeros((), jnp.int32)), key

    def _scaling(self) -> Any:
        """Builds the default scaling of the library, for any problem."""
        loss = mpx.DynamicLossScaling()
        if self.precision.naive or not self.problem.order:
            return loss
        if self.problem.derivatives is not None:
            return mpx.Scaling(loss, self.problem.derivatives())
        coords, order = self.problem.coords, self.problem.order
        return mpx.Scaling(loss, mpx.DerivativeScaling.per_direction(coords, order=order))

    def next_points(self, model: Any, key: PRNGKeyArray) -> PyTree:
        """Draws the points of the next steps; they depend on the precision only if the model
        chooses."""
        if self.precision.wide != "float64":
            return self.choose(model, key)
        with jax.enable_x64(False):
            points = self.choose(_astype(model, jnp.float32), key)
        return _astype(points, jnp.float64)

    def _choose(self, model: Any, key: PRNGKeyArray) -> PyTree:
        if self.problem.points is not None:
            points = self.problem.points(model, key)
            return jax.tree.map(lambda x: x[: self.per_call], points)
        assert self.problem.sample is not None
        return jax.vmap(self.problem.sample)(jax.random.split(key, self.per_call))

    def steps_of(self, state: State) -> Callable:
        """Returns the program of `per_call` steps, from arrays to arrays."""
        if self.program is None:
            self.static = eqx.filter(state, eqx.is_array, inverse=True)

            def body(arrays, points):
                new, record = self.step(eqx.combine(arrays, self.static), points)
                scaling: Any = new.scaling
                scaling = scaling.loss if isinstance(scaling, mpx.Scaling) else scaling
                return eqx.filter(new, eqx.is_array), (*record, scaling.loss_scaling)

            body = self.transform(body)
            self.program = jax.jit(lambda arrays, points: jax.lax.scan(body, arrays, points))
        return self.program

    def __call__(
        self,
        seed: int,
        *,
        follow: Callable[[int, float, Any], Any] = lambda *_: False,
        kept: Kept | None = None,
    ) -> Outcome:
        """Trains from a seed. `follow` gets steps, loss and scaling, and ends training by True.
        `kept` is where Ctrl-C leaves the training, and whence it goes on."""
        return self.stages(seed, follow=follow, kept=kept)[-1]

    def stages(
        self,
        seed: int,
        *,
        follow: Callable[[int, float, Any], Any] = lambda *_: False,
        kept: Kept | None = None,
    ) -> list[Outcome]:
        """Returns the outcome; if L-BFGS finishes, also the outcome before it, as the first."""
        with warnings.catch_warnings(), self.types():
            # With Fourier features, the float32 first layer is half of a small network.
            warnings.simplefilter("ignore", mpx.PrecisionWarning)
            progress = self._begun(seed, kept)
            try:
                while len(progress.records) < self.steps // self.per_call:
                    progress = self._after_a_call(progress)
                    loss = float(progress.records[-1][0].mean())
                    if follow(self.per_call, loss, progress.state.scaling):
                        break
                return self._outcomes(seed, progress)
            except KeyboardInterrupt:
                if kept is not None and progress.records:
                    progress.keep(kept)
                raise

    def _outcomes(self, seed: int, progress: Progress) -> list[Outcome]:
        state, key, records = progress
        base, plus, _ = self.optimizer_name.partition("+")
        outcomes = [self._outcome(seed, state.average, records, base)]
        if plus:
            from ._lbfgs import finish

            model = finish(self, state.average, state.scaling, key)
            outcomes.append(self._outcome(seed, model, records, self.optimizer_name))
        return outcomes

    def _begun(self, seed: int, kept: Kept | None) -> Progress:
        """Returns the start of a training, or where it was stopped."""
        state, key = self.initial(seed)
        found = kept.load(state) if kept is not None else None
        return Progress(state, key, []) if found is None else Progress.kept(*found)

    def _after_a_call(self, progress: Progress) -> Progress:
        """Takes the steps of one call of the program."""
        state, key, records = progress
        key, points_key = jax.random.split(key)
        points = self.next_points(state.model, points_key)
        state = state if records else self.with_first_scales(state, points)
        run = self.steps_of(state)
        arrays, record = run(eqx.filter(state, eqx.is_array), points)
        state = eqx.combine(arrays, self.static)
        return Progress(state, key, [*records, jax.tree.map(np.asarray, record)])

    def errors(self, model: Any) -> Mapping[str, float]:
        """Returns the errors of a network, by name."""
        if self.problem.as_trained and self.precision.mixed and self.precision.forward == "half":
            cast = mpx.autocast if self.precision.autocast else mpx.cast_tree
            model = cast(model, self.precision.compute)
        return errors_of(self.problem, model)

    def _outcome(self, seed: int, model: Any, records: Sequence[Any], optimizer: str) -> Outcome:
        values, finite, scales = (np.concatenate(r) for r in zip(*records, strict=True))
        self.model = model
        errors = {name: number(e) for name, e in self.errors(model).items()}
        return Outcome(
            precision=self.name,
            optimizer=optimizer,
            seed=seed,
            steps=len(values),
            error=next(iter(errors.values())),
            errors=errors,
            loss=number(values[-self.per_call :].mean()),
            skipped=int((~finite[self.precision.dropped :]).sum()),
            loss_scale=float(scales[-1]),
        )


def running_average(average: Any, model: Any, finite: Bool[Array, ""], rate: float) -> Any:
    """Moves the average of the weights towards the model, unless the step was skipped."""
    arrays, static = eqx.partition(average, eqx.is_inexact_array)
    moved = optax.incremental_update(eqx.filter(model, eqx.is_inexact_array), arrays, rate)
    return eqx.combine(mpx.select_tree(finite, moved, arrays), static)


def number(x: Any) -> float | None:
    return float(x) if np.isfinite(x) else None


def _rounded(model: Any) -> Any:
    """Rounds the weights of a model to float16."""
    round_ = lambda x: jax.lax.reduce_precision(x, 5, 10) if eqx.is_inexact_array(x) else x
    return jax.tree.map(round_, model)


def _astype(tree: PyTree, dtype: Any) -> PyTree:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def _in_float64(model: Any) -> Any:
    """Casts a model to float64, including layers that otherwise stay in float32."""
    return jax.tree.map(lambda x: mpx.cast_tree(x, "float64"), model)


# --- Errors ----------------------------------------------------------------------------------


def reference_of(problem: Problem) -> Reference:
    """Returns the values to compare the fields of a problem with."""
    if problem.exact is None:
        assert problem.reference is not None
        return problem.reference()
    with jax.enable_x64(True):
        values = jax.vmap(problem.exact)(jnp.asarray(problem.at, jnp.float64))
        return Reference(np.asarray(problem.at), np.asarray(values))


def errors_of(problem: Problem, model: Any) -> Mapping[str, float]:
    """Returns the relative L2 errors: their mean over the fields, then each."""
    if problem.errors is not None:
        return problem.errors(model)
    points, values = reference_of(problem)
    got = values_at(model, points).reshape(len(points), -1)
    want = values.reshape(len(points), -1)
    out = {}
    for i, name in enumerate(problem.fields):
        known = np.isfinite(want[:, i])
        a, b = got[known, i], want[known, i]
        if i in problem.free:
            a, b = a - a.mean(), b - b.mean()
        out[name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return {"rel. L2 error": float(np.mean(list(out.values()))), **out}
