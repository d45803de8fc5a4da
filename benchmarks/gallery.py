"""What do solutions look like? Pictures of problems, trained with the defaults of the library.

Each problem is trained once with the forward pass in float32 and the backward pass in bfloat16, and
drawn next to its reference. This command writes `docs/figures/gallery/*.webp` and the errors that
the page shows:

    python -m benchmarks gallery --resume
"""

import argparse
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from examples.problems import _operators as operators, _runner as runner

from ._problems import problems
from ._report import Report


PRECISION = "forward-float32-bfloat16"
FOLDER = Path(__file__).parent.parent / "docs" / "figures" / "gallery"


class Shown(NamedTuple):
    """The drawn values of a problem: one field over two axes, or over nodes of a grid."""

    field: str
    axes: tuple[str, str]
    grid: tuple[Float[np.ndarray, " a"], Float[np.ndarray, " b"]]
    reference: Float[np.ndarray, "a b"]
    learnt: Float[np.ndarray, "a b"]
    given: Float[np.ndarray, "a b"] | None = None  # the input of an operator, and its name
    given_name: str = ""

    @property
    def error(self) -> float:
        """The relative L2 error of the drawn values."""
        known = np.isfinite(self.reference)
        wrong = (self.learnt - self.reference)[known]
        return float(np.linalg.norm(wrong) / np.linalg.norm(self.reference[known]))


class Cut(NamedTuple):
    """A field over two coordinates of a problem; the others are fixed near the values in `at`."""

    field: str = "u"
    at: dict[str, float] = {}  # noqa: RUF012, never changed

    def told(self) -> str:
        cut = ", ".join(f"{name} = {value:g}" for name, value in self.at.items())
        return f"{self.field} at {cut}. " if cut else "" if self.field == "u" else f"{self.field}. "

    def __call__(self, module: Any, model: Any) -> Shown:
        problem = module.PROBLEM
        points, values = runner.reference_of(problem)
        names = list(problem.coords)
        kept = np.ones(len(points), bool)
        for name, wanted in self.at.items():
            column = points[:, names.index(name)]
            kept &= column == column[np.argmin(np.abs(column - wanted))]
        over = [i for i, name in enumerate(names) if name not in self.at]
        index = list(problem.fields).index(self.field)
        points, values = points[kept], values[kept]
        learnt = runner.values_at(model, points).reshape(len(points), -1)[:, index]
        reference = values.reshape(len(points), -1)[:, index]
        found = (np.unique(points[:, i], return_inverse=True) for i in over)
        axes, places = zip(*found, strict=True)

        def on_grid(x: np.ndarray) -> np.ndarray:
            out = np.full([len(a) for a in axes], np.nan)
            out[places] = x
            return out

        want = on_grid(reference)
        learnt = np.where(np.isfinite(want), on_grid(learnt), np.nan)
        return Shown(self.field, (names[over[0]], names[over[1]]), (axes[0], axes[1]), want, learnt)


class Sample(NamedTuple):
    """The first field of an operator's test data, in two dimensions."""

    field: str = "u"
    given: str = "a"

    def told(self) -> str:
        return f"The first field of the test data, with its input {self.given} on the left. "

    def __call__(self, module: Any, model: Any) -> Shown:
        inputs, outputs = (x[:1, 0] for x in module.data()[1])
        learnt = np.asarray(model(jnp.asarray(inputs)), np.float64)[0]
        x, y = ((np.arange(n) + 0.5) / n for n in learnt.shape)
        return Shown(self.field, ("x", "y"), (x, y), outputs[0], learnt, inputs[0], self.given)


class Rollout(NamedTuple):
    """A one-dimensional field from outside the training data, advanced step by step."""

    steps: int
    time_step: float
    extent: float
    spin_up: int = 0
    field: str = "u"

    def told(self) -> str:
        return (
            f"{self.steps} steps from a field outside the training data, "
            f"to t = {self.steps * self.time_step:g}. "
        )

    def __call__(self, module: Any, model: Any) -> Shown:
        given = {"count": 1, "steps": self.steps, "spin_up": self.spin_up, "seed": 2}
        fields = operators.trajectories(module.stepper, module.initial, **given)[0]
        roll = jax.jit(lambda u: operators.rollout(model, u, self.steps))
        learnt = np.concatenate([fields[:1], np.asarray(roll(jnp.asarray(fields[0])))])[:, 0]
        reference = fields[:, 0]
        x = np.arange(reference.shape[-1]) / reference.shape[-1] * self.extent
        t = np.arange(self.steps + 1) * self.time_step
        return Shown(self.field, ("t", "x"), (t, x), reference, learnt)


PICTURES: dict[str, Cut | Sample | Rollout] = {
    **dict.fromkeys(("burgers_1d", "klein_gordon", "kdv", "schrodinger", "sine_gordon"), Cut()),
    **dict.fromkeys(("wave_heterogeneous", "poisson_holes", "poisson_subdomains"), Cut()),
    "biharmonic_plate": Cut(),
    "kovasznay": Cut("v"),
    "heat_varying": Cut(at={"t": 0.5}),
    "burgers_2d": Cut(at={"t": 1.0}),
    "gray_scott": Cut("v", at={"t": 20.0}),
    "finned_block_3d": Cut("t", at={"y": 0.5}),
    "operator_darcy": Sample(),
    "emulate_burgers": Rollout(20, 0.1, 2 * np.pi),
    "emulate_ks": Rollout(60, 0.5, 32.0, spin_up=200),
}
"""The pictures by problem, in the order of the page."""

# --- Drawing ---------------------------------------------------------------------------------


ONE_SIGN = 0.02  # share of the largest value that values of the other sign may have


def limits(field: np.ndarray, *others: np.ndarray) -> dict[str, Any]:
    """Chooses a color map and its limits for a field and those it is compared with.

    A field of one sign is drawn from its least to its greatest value, any other from blue through
    white at 0 to red. Readers who do not see red or green can tell both apart.
    """
    ends = lambda x: (float(np.nanmin(x)), float(np.nanmax(x)))
    small, large = sorted(map(abs, ends(field)))
    low, high = ends(np.stack([field, *others]))
    if small <= ONE_SIGN * large or np.prod(ends(field)) > 0:
        return {"cmap": "viridis", "vmin": low, "vmax": high}
    size = max(abs(low), abs(high))
    return {"cmap": "RdBu_r", "vmin": -size, "vmax": size}


def draw(figure: Any, shown: Shown) -> None:
    """Draws the input of an operator, the reference, the learned field and its error."""
    names = [] if shown.given is None else ["input"]
    names += ["reference", "learnt", f"error: {shown.error:.1e} in relative L²"]
    axes = figure.subplots(1, len(names), sharex=True, sharey=True)
    x, y = shown.grid

    def panel(at: Any, values: np.ndarray, **given: Any) -> Any:
        image = at.pcolormesh(x, y, values.T, shading="nearest", rasterized=True, **given)
        if shown.axes[0] != "t":
            at.set_aspect("equal")
        return image

    if shown.given is not None:
        image = panel(axes[0], shown.given, **limits(shown.given))
        figure.colorbar(image, ax=axes[0], label=shown.given_name, pad=0.03)
    reference, learnt, error = axes[-3:]
    colors = limits(shown.reference, shown.learnt)
    panel(reference, shown.reference, **colors)
    image = panel(learnt, shown.learnt, **colors)
    figure.colorbar(image, ax=[reference, learnt], label=shown.field, pad=0.02)
    wrong = np.abs(shown.learnt - shown.reference)
    image = panel(error, wrong, cmap="magma", vmin=0.0, vmax=float(np.nanmax(wrong)))
    bar = figure.colorbar(image, ax=error, label=f"|error of {shown.field}|", pad=0.03)
    bar.formatter.set_powerlimits((-2, 3))
    for at, name in zip(axes, names, strict=True):
        at.set_title(name, fontsize="medium")
        at.set_xlabel(shown.axes[0])
    axes[0].set_ylabel(shown.axes[1])


def save(shown: Shown, path: Path) -> None:
    """Writes the picture."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 8.5}):
        figure = Figure(figsize=(7.4 if shown.given is None else 9.2, 2.3), layout="constrained")
        draw(figure, shown)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130, pil_kwargs={"quality": 80, "method": 6})


# --- Trainings -------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problems", nargs="+", choices=PICTURES, help="by default all")
    parser.add_argument("--pictures", type=Path, default=FOLDER, help="folder of the pictures")
    parser.add_argument("--resume", action="store_true", help="keep the trainings in the file")


def run(report: Report, args: argparse.Namespace) -> None:
    chosen = args.problems or list(PICTURES)
    report.resume("trainings")
    if not args.resume:
        before = report.sections.get("trainings", [])
        report.sections["trainings"] = [r for r in before if r["problem"] not in chosen]
    for key in report.missing("trainings", ({"problem": name} for name in chosen)):
        record, shown = trained(key["problem"], quick=args.quick)
        save(shown, args.pictures / f"{key['problem']}.webp")
        report.record("trainings", **key, **record)
        print(f"{key['problem']}: {record['error']:.2e}", flush=True)
    report.sections["trainings"].sort(key=lambda r: list(PICTURES).index(r["problem"]))


def trained(name: str, *, quick: bool = False) -> tuple[dict[str, Any], Any]:
    """Trains a problem from seed 0; returns the record, and the values to draw."""
    problem = problems.load(name)
    module = importlib.import_module(f"examples.problems.{name}")
    trainer = runner.Trainer(problem, PRECISION, steps=runner.QUICK_STEPS if quick else None)
    about = {"title": problem.title, "family": problem.family}
    return {**about, **trainer(0).record()}, PICTURES[name](module, trainer.model)
