"""Trains a model by second-order steps in one call."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray

from .._util._repr import in_a_line
from .._util._types import PyTree
from ..precision._dtypes import is_integer
from ..precision._tree import is_key
from ._levenberg_marquardt import LevenbergMarquardt, LevenbergMarquardtState


_STUCK = 3
"""The number of draws of points, or of steps with points that stay, without any progress."""

_HISTORY = ("step", "seconds", "loss", "damping", "iterations", "taken")


class Solution(NamedTuple):
    """The outcome of [`mpx_pde.solve`][].

    **Attributes:**

    - `model`, `state`: those after the last step.
    - `history`: lists of equal length, an entry a step: `step`, `seconds` of this and earlier
        steps without compilation, `loss`, `damping`, `iterations`, `taken`.
    - `reason`: why it ended: `"steps"`, `"seconds"`, `"tolerance"`, `"stuck"` or `"interrupted"`.
    """

    model: PyTree
    state: LevenbergMarquardtState
    history: dict[str, list]
    reason: str


def solve(
    residuals: Callable[..., Any] | tuple[Callable[..., Any], ...],
    model: PyTree,
    sample: Any,
    *,
    optimizer: Callable[..., LevenbergMarquardt] = LevenbergMarquardt,
    steps: int | None = None,
    seconds: float | None = None,
    tolerance: float | None = None,
    redraw: int = 30,
    key: PRNGKeyArray | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike | None = None,
) -> Solution:
    """Trains a model by Levenberg–Marquardt steps until a limit is reached.

    Draws points, takes steps, and shows a line with loss, damping and iterations. It ends at the
    first of the limits that are given, if the loss does not fall for three draws of points, or
    with Ctrl-C.

    ```python
    inside = mpx.Points((0.0, 0.0), (1.0, 1.0), 500, residual=interior)
    edge = mpx.Points((0.0, 0.0), (1.0, 1.0), 100, faces=(0, 1))
    model, state, history, reason = mpx.solve(
        (interior, boundary), model, (inside, edge), steps=300, tolerance=1e-8
    )
    ```

    **Arguments:**

    - `residuals`: as for [`mpx_pde.LevenbergMarquardt`][].
    - `model`: the PyTree whose floating-point arrays are optimized.
    - `sample`: a function of the model and `key=` that draws the examples, such as a
        [`mpx_pde.Points`][]; or the examples themselves; or a tuple with either for each residual.
    - `optimizer`: a function that makes an optimizer from the residuals, such as
        `functools.partial(mpx.LevenbergMarquardt, forward="float64", jacobian="bfloat16")`.
    - `steps`, `seconds`, `tolerance`: the number of steps in all, their time without compilation,
        and a loss to reach.
    - `redraw`: the number of steps with the same points.
    - `key`: of the points, by default `jax.random.key(0)`.
    - `progress`: whether to show the line.
    - `checkpoint`: a file that the run is saved to at each draw of points and at its end. If it
        exists, the run continues from it, as if it had not ended. Examples that are not drawn are
        those that are passed.

    **Returns:** a `Solution`.

    **Raises:** `ValueError` if no limit is given, one is not a positive number, `redraw` is not an
    integer, or the checkpoint is of another run; `TypeError` for an `optimizer` that is no
    function; what the optimizer raises.
    """
    if not callable(optimizer):
        raise TypeError(
            "`solve` makes its optimizer itself, from the residuals, so it takes a function of "
            "these as `optimizer`, such as `functools.partial(mpx_pde.LevenbergMarquardt, "
            f"forward='float64')`, but got {in_a_line(optimizer)}."
        )
    limits = {"steps": steps, "seconds": seconds, "tolerance": tolerance, "redraw": redraw}
    if steps is seconds is tolerance is None:
        raise ValueError("`solve` needs one of `steps`, `seconds` and `tolerance`, but got none.")
    for name, limit in limits.items():
        number = eqx.is_array_like(limit) and jnp.ndim(limit) == 0
        if limit is not None and not (number and limit > 0):
            raise ValueError(f"`solve` needs a number `{name}` above 0, but got {limit!r}.")
    if not is_integer(redraw):
        raise ValueError(f"`solve` needs an integer as `redraw`, but got {redraw!r}.")
    method = optimizer(residuals)
    draw = _Draw(sample, jax.random.key(0) if key is None else key)
    update = eqx.filter_jit(method.update)
    state, history = method.init(model), {name: [] for name in _HISTORY}
    points: Any = draw(model, 0)
    file = None if checkpoint is None else Path(checkpoint)
    run = model, state, points
    if file is not None and file.exists():
        run, history = _loaded(file, run, anew=draw.anew)
    step, spent = len(history["step"]), (history["seconds"] or [0.0])[-1]
    fresh, reason = True, _ended(history, limits, anew=draw.anew)
    try:
        while not reason:
            model, state, points = run
            if step and step % redraw == 0 and draw.anew:
                points = draw(model, step // redraw)
            if step % redraw == 0 and file is not None:
                _save(file, (model, state, points), history, anew=draw.anew)
            began = time.perf_counter()
            model, state = jax.block_until_ready(update(model, state, points))
            spent += 0.0 if fresh else time.perf_counter() - began  # the first step compiles
            fresh, run, step = False, (model, state, points), step + 1
            entry = step, spent, float(state.loss), float(state.damping)
            entry = *entry, int(state.iterations), bool(state.taken)
            for name, value in zip(_HISTORY, entry, strict=True):
                history[name].append(value)
            reason = _ended(history, limits, anew=draw.anew)
            if progress:
                _show(history, steps)
    except KeyboardInterrupt:
        reason = "interrupted"
    if progress:
        print(f"\nended: {reason}", file=sys.stderr)
    model, state, _ = run
    if file is not None:
        _save(file, run, history, anew=draw.anew)
    return Solution(model, state, history, reason)


class _Draw:
    """Draws the examples from what people pass as `sample`."""

    def __init__(self, sample: Any, key: PRNGKeyArray):
        each = type(sample) is tuple and any(map(callable, sample))
        self.sample, self.key, self.anew = sample, key, each or callable(sample)
        self._drawn = _drawn_each if each else _drawn  # not compiled: sizes may differ

    def __call__(self, model: PyTree, index: int) -> Any:
        key = jax.random.fold_in(self.key, index)
        return self._drawn(self.sample, model, key) if self.anew else self.sample


def _drawn(sample: Any, model: PyTree, key: PRNGKeyArray) -> Any:
    return sample(model, key=key)


def _drawn_each(sample: Any, model: PyTree, key: PRNGKeyArray) -> Any:
    keys = jax.random.split(key, len(sample))
    pairs = zip(sample, keys, strict=True)
    return tuple(draw(model, key=k) if callable(draw) else draw for draw, k in pairs)


def _ended(history: dict[str, list], limits: dict[str, Any], *, anew: bool) -> str:
    """Returns the reason to end, or an empty string."""
    steps, seconds, tolerance = (limits[name] for name in ("steps", "seconds", "tolerance"))
    if not history["step"]:
        return ""
    if tolerance is not None and history["loss"][-1] <= tolerance:
        return "tolerance"
    if steps is not None and history["step"][-1] >= steps:
        return "steps"
    if seconds is not None and history["seconds"][-1] >= seconds:
        return "seconds"
    patience = _STUCK * (limits["redraw"] if anew else 1)
    stuck = len(history["taken"]) >= patience and not any(history["taken"][-patience:])
    return "stuck" if stuck else ""


def _show(history: dict[str, list], steps: int | None) -> None:
    step, seconds, loss, damping, iterations, _ = (history[name][-1] for name in _HISTORY)
    bar = ""
    if steps is not None:
        done = min(24, 24 * step // steps)
        bar = f" [{'#' * done}{'.' * (24 - done)}] {steps}"
    text = f"loss {loss:.2e}, damping {damping:.0e}, {iterations} iterations, {seconds:.0f} s"
    print(f"\r{step}{bar}  {text}   ", end="", file=sys.stderr, flush=True)


def _save(file: Path, run: PyTree, history: dict[str, list], *, anew: bool) -> None:
    """Writes a line of JSON and the arrays, to another file that then replaces the old one. Points
    are saved if they are drawn anew, with their shapes, because draws may differ in number."""
    model, state, points = run
    points = points if anew else None
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    with partial.open("wb") as out:
        shapes = [jnp.shape(x) for x in jtu.tree_leaves(points)]
        out.write(json.dumps({"history": history, "points": shapes}).encode() + b"\n")
        eqx.tree_serialise_leaves(out, (model, state, points), filter_spec=_write)
    partial.replace(file)


def _loaded(file: Path, like: PyTree, *, anew: bool) -> tuple[PyTree, dict[str, list]]:
    model, state, points = like
    leaves, structure = jtu.tree_flatten(points if anew else None)
    try:
        with file.open("rb") as source:
            saved = json.loads(source.readline())
            pairs = zip(leaves, saved["points"], strict=True)
            drawn = structure.unflatten([_like(x, tuple(shape)) for x, shape in pairs])
            like = model, state, drawn
            model, state, drawn = eqx.tree_deserialise_leaves(source, like, filter_spec=_read)
    except (RuntimeError, ValueError, TypeError, KeyError, EOFError) as e:
        raise ValueError(
            f"`solve` cannot continue from the checkpoint {str(file)!r}, because it is not of a "
            "run with this model, optimizer and sample. Pass those of its run, or another file."
        ) from e
    return (model, state, drawn if anew else points), saved["history"]


def _like(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array, or its type, like `x` and of another shape."""
    if is_key(x):
        words = jax.random.key_data(x).shape[x.ndim :]
        data = jnp.zeros((*shape, *words), jnp.uint32)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    # NumPy's float64 stays what it is without 64-bit types.
    make = np.empty if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct
    return make(shape, x.dtype)


def _write(out: Any, x: Any) -> None:
    eqx.default_serialise_filter_spec(out, jax.random.key_data(x) if is_key(x) else x)


def _read(source: Any, like: Any) -> Any:
    if not is_key(like):
        return eqx.default_deserialise_filter_spec(source, like)
    data = eqx.default_deserialise_filter_spec(source, jax.random.key_data(like))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
