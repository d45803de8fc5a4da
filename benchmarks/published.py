"""Which errors that others published does the deep recipe reach?

- The Korteweg–de Vries equation from a cosine: the recipe as it is.
- The Kuramoto–Sivashinsky equation up to t = 1, where it is chaotic: the recipe in windows of time.
  A network learns what is added to the values at the beginning of its window, which are a Fourier
  series, and begins with the weights of the last one.
- The lid-driven cavity at Re = 3200: the recipe with a Reynolds number that rises from 100.

    python -m benchmarks published --problems kdv_cosine --seeds 0
"""

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

import mpx_pde as mpx
from examples.problems import _deep, cavity as flow, kuramoto_sivashinsky as ks
from examples.problems._problem import quasirandom

from ._problems import problems
from ._report import Report, commit


PUBLISHED = {
    "kdv_cosine": ("Korteweg–de Vries, from a cosine", 4.3e-4, "PirateNet"),
    "kuramoto_sivashinsky": ("Kuramoto–Sivashinsky, up to t = 1", 0.16, "jaxpi"),
    "cavity": ("Lid-driven cavity, Re = 3200", 4.2e-2, "PirateNet"),
}
"""Titles, and relative L2 errors of PirateNets (Wang et al., arXiv 2402.00326) and of jaxpi (Wang
et al., arXiv 2308.08468), which train in float32."""


class Training:
    """Levenberg–Marquardt steps in float64 whose points are drawn anew. Compiles once."""

    def __init__(self, residual: Callable[[Any, Array], Array], model: Any):
        optimizer = mpx.LevenbergMarquardt(residual, forward="float64")
        self.update = eqx.filter_jit(optimizer.update)
        self.model, self.state = model, optimizer.init(model)
        self.begin = optimizer.init
        self.steps = 0

    def take(self, steps: int, draw: Callable[[int], Array]) -> None:
        """Takes steps; `draw` gets the number of steps taken so far."""
        for step in range(steps):
            if step % _deep.REDRAWN == 0:
                examples = draw(self.steps)
            self.model, self.state = self.update(self.model, self.state, examples)
            self.steps += 1


def parameters(model: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))


# --- Korteweg–de Vries -----------------------------------------------------------------------


def kdv_cosine(seed: int, quick: bool) -> dict[str, Any]:
    problem = problems.load("kdv_cosine")
    outcome = _deep.DeepTrainer(problem, steps=4 if quick else None)(seed)
    at = ("parameters", "steps", "error")
    return {name: getattr(outcome, name) for name in at}


# --- Kuramoto–Sivashinsky --------------------------------------------------------------------

WINDOWS, WINDOW_STEPS, WAVES, WIDTH, MODES = 50, 30, 12, 20, 96


def series(values: Float[np.ndarray, " x"]) -> Complex[np.ndarray, " k"]:
    """Returns the coefficients of a real Fourier series with `MODES` frequencies."""
    found = np.fft.rfft(values)[:MODES] / len(values)
    found[1:] *= 2
    return found


@jax.jit
def at_begin(coefficients: Complex[Array, " k"], x: Float[Array, " x"]) -> Float[Array, "x 4"]:
    """Returns the value of a series and its derivatives of order 1, 2 and 4."""
    k = jnp.arange(len(coefficients))
    waves = jnp.exp(1j * k * x[:, None])
    return jnp.stack([(waves @ (coefficients * (1j * k) ** n)).real for n in (0, 1, 2, 4)], axis=1)


def chaotic(steps: int) -> Float[np.ndarray, "times x"]:
    """Returns the reference at the ends of the windows."""
    return ks.reference(512, steps, end=1.0, frames=WINDOWS).values.reshape(-1, 512)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def kuramoto_sivashinsky(seed: int, quick: bool) -> dict[str, Any]:
    length = 1 / WINDOWS
    high = (length, ks.TURN)
    deep = _deep.Deep(
        residual=ks.residual,
        form=lambda point, n: point[0] / length * n,
        low=(0, 0),
        high=high,
        periodic={1: ks.TURN},
        waves=WAVES,
        width=WIDTH,
    )

    def residual(added: Any, example: Float[Array, "6"]) -> Float[Array, ""]:
        """The residual of the sum of what is added and the values at the beginning."""
        point, begin = example[:2], example[2:]
        operator = {"linear": {"t": 1.0, "xx": ks.B, "xxxx": ks.C}}
        terms = mpx.linear_operator(added, operator, ["u", "u_x"], coords="tx", outputs="u")
        d = terms(point)
        linear = d["linear_u"] + ks.B * begin[2] + ks.C * begin[3]
        return (linear + ks.A * (d["u"] + begin[0]) * (d["u_x"] + begin[1])) / 10

    key = jax.random.key(seed)
    training = Training(residual, _deep.Network(deep, jnp.float64, key=key))
    count = 4 * parameters(training.model)
    reference = chaotic(20_000)
    x = jnp.arange(512) * ks.TURN / 512
    ended = eqx.filter_jit(lambda model, x: jax.vmap(lambda x: model(jnp.stack([length, x])))(x))
    values, found = reference[0], [reference[0]]
    for _ in range(2 if quick else WINDOWS):
        coefficients = jnp.asarray(series(values))

        def draw(step: int, coefficients: Array = coefficients) -> Array:
            points = quasirandom(jax.random.fold_in(key, step), count, (0, 0), high, jnp.float64)
            return jnp.concatenate([points, at_begin(coefficients, points[:, 1])], axis=1)

        training.state = training.begin(training.model)
        training.take(4 if quick else WINDOW_STEPS, draw)
        values = np.asarray(at_begin(coefficients, x)[:, 0] + ended(training.model, x))
        found.append(values)
        off = relative(values, reference[len(found) - 1])
        print(f"window {len(found) - 1}: error {off:.1e}", flush=True)
    reference = reference[: len(found)]
    by_time = map(relative, found, reference)
    return {
        "parameters": parameters(training.model),
        "steps": training.steps,
        "error": relative(np.stack(found), reference),
        "reference_error": relative(chaotic(10_000)[: len(found)], reference),
        "by_time": [float(f"{e:.3g}") for e in by_time],
    }


# --- The cavity ------------------------------------------------------------------------------

REYNOLDS, LAST, RISING, CAVITY_WIDTH = 3200.0, 200, 400, 28


def cavity(seed: int, quick: bool) -> dict[str, Any]:
    low, high = (0, 0), (1, 0.998)
    deep = _deep.Deep(
        residual=flow.weighted, form=flow.form, low=low, high=high, outputs=3, width=CAVITY_WIDTH
    )

    def fields_of(model: Any, nu: Any) -> Callable[[Array], Array]:
        return lambda point: flow.form(point, model.mlp(model.inputs(point)), nu)

    def residual(model: Any, example: Float[Array, "3"]) -> Float[Array, "3"]:
        point, nu = example[:2], example[2]
        viscosity = lambda *_: (nu, 0.0, 0.0)
        return flow.weighted(fields_of(model, nu), point, None, viscosity)

    key = jax.random.key(seed)
    training = Training(residual, _deep.Network(deep, jnp.float64, key=key))
    count = 3 * parameters(training.model)
    rising, last = (4, 4) if quick else (RISING, LAST)

    def draw(step: int) -> Array:
        share = min(1.0, step / rising)
        reynolds = 100.0 * (REYNOLDS / 100.0) ** share
        points = quasirandom(jax.random.fold_in(key, step), count, low, high, jnp.float64)
        return jnp.concatenate([points, jnp.full((count, 1), 1 / reynolds)], axis=1)

    training.take(rising + last, draw)
    s = np.linspace(0, 1, 129)[1:-1]
    n = 32 if quick else 160
    want = np.concatenate(flow.center_lines(s, REYNOLDS, n))
    coarse = np.concatenate(flow.center_lines(s, REYNOLDS, n // 2))
    got = np.concatenate(flow.lines(fields_of(training.model, 1 / REYNOLDS), s))
    return {
        "parameters": parameters(training.model),
        "steps": training.steps,
        "error": relative(got, want),
        "reference_error": relative(coarse, want),
    }


TRAININGS = {
    "kdv_cosine": kdv_cosine,
    "kuramoto_sivashinsky": kuramoto_sivashinsky,
    "cavity": cavity,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    if args.resume:
        report.resume("trainings")
    keys = [{"problem": p, "seed": s} for p, s in itertools.product(args.problems, args.seeds)]
    for key in report.missing("trainings", keys):
        title, published, source = PUBLISHED[key["problem"]]
        began = time.process_time()
        with jax.enable_x64(True):
            found = TRAININGS[key["problem"]](key["seed"], args.quick)
        told = {"title": title, "published": published, "source": source, "commit": commit()}
        minutes = (time.process_time() - began) / 60
        report.record("trainings", **key, **told, **found, cpu_minutes=minutes)
