"""How accurate are trainings in PhiJAX's own half precision? Beside its float32, and ours.

PhiJAX trains physics-informed networks in JAX. Its `precision="16-mixed"` keeps parameters in
float32, computes its networks in float16, coordinates included, and scales the loss. Here its
`Trainer` trains its `build_mlp` with normalized inputs, as in its quick start, by equations written
with its helpers for derivatives. Ours trains the same network by the same equations
(`on its loss`), and by those of `examples/problems` (`partials`). All begin with the same weights,
take the same points and the same optimizer; the benchmark compares the losses of both forms of the
equations first. Skipped steps are those whose gradients were not finite.

PhiJAX is optional: `pip install phijax`, for Python 3.12 or newer. It fixes the version of JAX.

    python -m benchmarks phijax --problems burgers_1d --seeds 0
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx
from examples.problems._runner import errors_of, number

from ._problems import problems
from ._report import Report, versions


POINTS, ENDS, STEPS = 512, 64, 1500
RATE = 1e-2  # the largest rate of the optimizer
BY_PHIJAX = {f"PhiJAX, {mode}": mode for mode in ("32-true", "16-mixed", "bf16-mixed")}
ON_ITS_LOSS, BY_PARTIALS = "mpx_pde, on PhiJAX's loss", "mpx_pde, partials"
TRAININGS = (*BY_PHIJAX, ON_ITS_LOSS, BY_PARTIALS)


class Task(NamedTuple):
    """A problem of `examples/problems` for PhiJAX."""

    low: tuple[float, float]
    high: tuple[float, float]
    outputs: int
    hidden: tuple[int, ...]
    form: Callable[[Any, Any], Any]
    """Maps a point and the outputs of a network to fields that meet conditions."""
    residuals: dict[str, Callable[[Callable, Any], list[Any]]]
    """The residuals at a point of fields of two coordinates, by the name of their points."""
    weights: dict[str, float]
    features: dict[str, Any] | None = None
    """Its options for Fourier features of the coordinates."""

    def points(self, key: Any) -> Any:
        """Draws the points of a step; those on the ends have the second coordinate's bounds."""
        inside, ends = jax.random.split(key)
        low, high = jnp.array(self.low), jnp.array(self.high)
        found = {"inside": low + (high - low) * jax.random.uniform(inside, (POINTS, 2))}
        if "ends" in self.residuals:
            at = low + (high - low) * jax.random.uniform(ends, (ENDS, 2))
            sides = jnp.where(jnp.arange(ENDS) % 2 == 0, self.low[1], self.high[1])
            found["ends"] = at.at[:, 1].set(sides)
        return found


# --- Residuals, written with PhiJAX's derivatives ---------------------------------------------


def first(fields: Callable, point: Any) -> tuple[Any, Any, Any]:
    """Returns the fields and their derivatives by either coordinate."""
    value, slopes = importlib.import_module("phijax").value_and_jacobian(fields, (0, 1))(*point)
    return value, *slopes


def second(fields: Callable, axes: Sequence[int]) -> Callable:
    return importlib.import_module("phijax").hessian_diagonal(fields, axes)


def burgers(fields: Callable, point: Any) -> list[Any]:
    (u,), (u_t,), (u_x,) = first(fields, point)
    ((u_xx,),) = second(fields, [1])(*point)
    weight = jax.lax.stop_gradient(jax.lax.rsqrt(1 + jnp.abs(u_x)))
    return [weight * (u_t + u * u_x - 0.01 / math.pi * u_xx)]


def solitons(fields: Callable, point: Any) -> list[Any]:
    (u,), (u_t,), (u_x,) = first(fields, point)
    curvature = lambda t, x: second(fields, [1])(t, x)[0]
    _, _, (u_xxx,) = first(curvature, point)
    return [u_t + 6 * u * u_x + u_xxx]


def cavity(fields: Callable, point: Any) -> list[Any]:
    (u, v, _), (u_x, v_x, p_x), (u_y, v_y, p_y) = first(fields, point)
    (u_xx, v_xx), (u_yy, v_yy) = second(lambda x, y: fields(x, y)[:2], [0, 1])(*point)
    x, y = point
    corner = jnp.minimum(x, 1 - x) ** 2 + (1 - y) ** 2
    near = lambda radius: jnp.minimum(corner / radius**2, 1.0)
    return [
        jnp.sqrt(0.3 * near(0.01)) * (u_x + v_y),
        near(0.1) * (u * u_x + v * u_y + p_x - (u_xx + u_yy) / 100),
        near(0.1) * (u * v_x + v * v_y + p_y - (v_xx + v_yy) / 100),
    ]


def task_of(name: str) -> Task:
    file = importlib.import_module(f"examples.problems.{name}")
    low, high = file.DEEP.low, file.DEEP.high
    if name == "burgers_1d":
        return Task(low, high, 1, (32,) * 4, file.form, {"inside": burgers}, {})
    if name == "cavity":
        features = {"embed_dim": 16, "scale": 1.0}
        return Task(low, high, 3, (32,) * 4, file.form, {"inside": cavity}, {}, features)
    rates = jnp.array([0.0, file.K, file.L, file.K + file.L])

    def form(point, n):
        # The initial values of `exact`, written so that nested derivatives do not overflow float32:
        # 2 (ln F)_xx is twice the variance of the exponents' rates.
        t, x = point
        fast, slow = file.K * (x + 6), file.L * (x + 1)
        shares = jax.nn.softmax(jnp.stack([0 * x, fast, slow, fast + slow + math.log(file.A)]))
        return 2 * (shares @ rates**2 - (shares @ rates) ** 2) + t * n

    wrong = lambda fields, point: [fields(*point)[0] - file.exact(jnp.stack(point))]
    residuals = {"inside": solitons, "ends": wrong}
    features = {"embed_dim": 24, "scale": 3.0}
    return Task(low, high, 1, (40,) * 3, form, residuals, {"ends/0": 10.0}, features)


TASKS = ("burgers_1d", "kdv", "cavity")


# --- A network of PhiJAX ----------------------------------------------------------------------


class Fields(eqx.Module):
    """The fields of a network of PhiJAX, whose parameters are the arrays of this module."""

    parameters: Any
    apply: Callable = eqx.field(static=True)
    form: Callable = eqx.field(static=True)

    def __call__(self, point: Any) -> Any:
        n = self.apply(self.parameters, point)
        return self.form(point, n if len(n) > 1 else n[0])


def built(task: Task, mode: str, seed: int) -> Any:
    """Builds its network in a mode, as its quick start does. Its parameters are those of the
    seed."""
    models = importlib.import_module("phijax.models")
    low, high = np.asarray(task.low, np.float32), np.asarray(task.high, np.float32)
    return models.build_mlp(
        *(jax.random.key(seed), 2, task.outputs),
        input_mean=(low + high) / 2,
        input_std=(high - low) / np.float32(math.sqrt(12)),  # of points that are spread evenly
        precision=mode,
        hidden=task.hidden,
        activation="tanh",
        input_norm=True,
        fourier_features=task.features is not None,
        fourier_features_kwargs=task.features,
    )


def fields_of(task: Task, mode: str, seed: int) -> Fields:
    network = built(task, mode, seed)
    return Fields(network.state, network.apply, task.form)


def objective_of(task: Task) -> Any:
    equations = importlib.import_module("phijax.equations")
    objectives = importlib.import_module("phijax.objectives")

    def equation(residual: Callable) -> Callable:
        count = 3 if residual is cavity else 1

        @equations.residual_equation(names=tuple(map(str, range(count))))
        def grouped(model_apply, model_state, batch, *, stream="residual"):
            fields = Fields(model_state, model_apply, task.form)
            at = lambda *coordinates: jnp.reshape(fields(jnp.stack(coordinates)), (-1,))
            rows = jax.vmap(lambda point: jnp.stack(residual(at, tuple(point))))(batch["inputs"])
            return tuple((rows[:, i : i + 1],) for i in range(count))

        return grouped

    terms = {name: equation(residual) for name, residual in task.residuals.items()}
    return objectives.CompositeObjective.from_equations(terms)


def optimizer(steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of `examples/problems`, Muon, with its schedule."""
    return optax.contrib.muon(
        optax.warmup_cosine_decay_schedule(0.0, RATE, max(1, steps // 20), steps)
    )


class Training(NamedTuple):
    """The network at the end, what was skipped, and processor seconds after the first step."""

    fields: Fields
    skipped: int
    loss_scale: float
    seconds: float


# --- Its training, and ours -------------------------------------------------------------------


def by_phijax(task: Task, mode: str, seed: int, steps: int) -> Training:
    """Trains by its `Trainer`."""
    phijax = importlib.import_module("phijax")
    callbacks = importlib.import_module("phijax.callbacks")
    data = importlib.import_module("phijax.data")
    balancers = importlib.import_module("phijax.balancers")
    draw = jax.jit(task.points)

    class Source:
        def prepare(self, device):
            return self

        def __call__(self, step):
            points = draw(jax.random.fold_in(jax.random.key(seed), step))
            return {name: {"inputs": at} for name, at in points.items()}

        def sample(self, key, batch_sizes=None):
            return self(0)

    class Points(data.PhiDataModule):
        def setup(self, stage):
            pass

        def train_batch_source(self, batch_keys, key):
            return Source()

    class Counted(callbacks.Callback):
        def __init__(self):
            self.finite, self.began = [], 0.0

        def on_train_batch_end(self, context):
            self.finite.append(context.metrics["train/precision/gradients_finite"])
            if not self.began:
                jax.block_until_ready(self.finite)
                self.began = time.process_time()
            return False

    counted = Counted()
    module = phijax.PhiModule(built(task, mode, seed), objective_of(task))
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = phijax.Trainer(
            steps, accelerator="cpu", precision=mode, callbacks=[counted], **silent
        )
        result = trainer.fit(
            module,
            datamodule=Points(),
            optimizer=optimizer(steps),
            seed=seed,
            balancer=balancers.StaticLossBalancer(module.loss_names, weights=task.weights),
        )
    state = jax.block_until_ready(result.state)
    seconds = time.process_time() - counted.began
    skipped = steps - int(sum(map(float, counted.finite)))
    fields = Fields(state.model_state, result.module.forward, task.form)
    return Training(fields, skipped, float(state.loss_scale), seconds)


def its_loss(task: Task, network: Any) -> Callable:
    """Returns PhiJAX's loss of the network of fields at points."""
    phijax, objective = importlib.import_module("phijax"), objective_of(task)
    module, _ = phijax.PhiModule(network, objective).prepare_model(
        key=None, input_mean=None, input_std=None, precision=None
    )

    def loss(fields, points):
        batches = {name: {"inputs": at} for name, at in points.items()}
        losses = module.training_step(fields.parameters, batches)
        return sum(task.weights.get(name, 1.0) * value for name, value in losses.items())

    return loss


def our_loss(task: Task, name: str) -> Callable:
    """Returns the loss of `examples/problems` at these points."""
    loss = problems.load(name).loss
    alone = len(task.residuals) == 1
    return lambda fields, points, **given: loss(
        fields, points["inside"] if alone else points, **given
    )


def by_us(task: Task, loss: Callable, scaling: Any, seed: int, steps: int) -> Training:
    """Trains its float32 network on a loss in the recommended mode."""
    model, draw, adam = fields_of(task, "32-true", seed), jax.jit(task.points), optimizer(steps)
    scaling = mpx.initial_scaling(loss, scaling, forward="float32")(
        model, draw(jax.random.key(seed))
    )
    state = model, adam.init(eqx.filter(model, eqx.is_inexact_array)), scaling

    @eqx.filter_jit
    def step(state, points):
        model, adam_state, scaling = state
        gradient = mpx.filter_grad(loss, scaling, forward="float32")
        scaling, finite, grads = gradient(model, points)
        return (*mpx.optimizer_update(model, adam, adam_state, grads, finite), scaling), finite

    all_finite, began = [], 0.0
    for i in range(steps):
        points = draw(jax.random.fold_in(jax.random.key(seed), i))
        state, finite = step(state, points)
        all_finite.append(finite)
        if not began:
            jax.block_until_ready(state)
            began = time.process_time()
    model, _, scaling = jax.block_until_ready(state)
    seconds = time.process_time() - began
    loss_scaling: Any = scaling.loss if isinstance(scaling, mpx.Scaling) else scaling
    skipped = steps - int(sum(map(bool, all_finite)))
    return Training(model, skipped, float(loss_scaling.loss_scaling), seconds)


def train(name: str, training: str, seed: int, steps: int) -> Training:
    task = task_of(name)
    if training in BY_PHIJAX:
        return by_phijax(task, BY_PHIJAX[training], seed, steps)
    if training == ON_ITS_LOSS:
        loss = its_loss(task, built(task, "32-true", seed))
        return by_us(task, loss, mpx.DynamicLossScaling(), seed, steps)
    problem = problems.load(name)
    derivatives = mpx.DerivativeScaling.per_direction(problem.coords, order=problem.order)
    scaling = mpx.Scaling(mpx.DynamicLossScaling(), derivatives)
    return by_us(task, our_loss(task, name), scaling, seed, steps)


def error_of(problem: Any, fields: Fields) -> float | None:
    return number(next(iter(errors_of(problem, fields).values())))


def check(name: str) -> float:
    """Compares the losses of the untrained network by both forms of the equations.

    **Returns:** their relative difference.

    **Raises:** `AssertionError` if it is not rounding.
    """
    task = task_of(name)
    fields = fields_of(task, "32-true", 0)
    points = task.points(jax.random.key(0))
    its = float(its_loss(task, built(task, "32-true", 0))(fields, points))
    ours = float(our_loss(task, name)(fields, points))
    assert abs(its / ours - 1) < 1e-4, (name, its, ours)  # rounding, on third derivatives too
    return abs(its / ours - 1)


# --- The benchmark ----------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--trainings", nargs="+", default=TRAININGS, choices=TRAININGS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> int:
    try:
        importlib.import_module("phijax")
    except ModuleNotFoundError as error:
        if error.name != "phijax":
            raise
        report.note("PhiJAX is not installed: `pip install phijax`, for Python 3.12 or newer.")
        return 1
    report.environment |= versions(("phijax", "flax"))
    if args.resume:
        report.resume("trainings")
    steps = 8 if args.quick else args.steps
    for name in args.problems:
        print(f"{name}: both losses agree to {check(name):.0e}", flush=True)
    keys = [
        {"problem": name, "training": training, "seed": seed, "steps": steps}
        for seed, name, training in itertools.product(args.seeds, args.problems, args.trainings)
    ]
    for key in report.missing("trainings", keys):
        name, training = key["problem"], key["training"]
        done, problem = train(name, training, key["seed"], steps), problems.load(name)
        exact = dataclasses.replace(done.fields, apply=built(task_of(name), "32-true", 0).apply)
        told = {"title": problem.title, "error": error_of(problem, done.fields)}
        told |= {"error_in_float32": error_of(problem, exact), "skipped": done.skipped}
        told |= {"loss_scale": done.loss_scale, "cpu_ms": 1e3 * done.seconds / (steps - 1)}
        report.record("trainings", **key, **told)
        print(f"seed {key['seed']}, {name}, {training}: {told['error']:.2e}", flush=True)
    return 0
