"""Tests that problems of `examples/problems` train and that solutions solve their equations."""

import functools
import importlib
import itertools
import json
import re
import signal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from pages import ROOT, module
from scipy.optimize import brentq


problems = importlib.import_module("examples.problems")
runner, deep, command, references = map(module, ("_runner", "_deep", "__main__", "references"))
kept = module("_kept")
FOLDER = ROOT / "examples" / "problems"
NAMES = problems.names()
# The files are read rather than imported, because a problem imports solvers and data.
EXACT = [n for n in NAMES if "\ndef exact(" in (FOLDER / f"{n}.py").read_text(encoding="utf-8")]


# Examples are programs of users.
pytestmark = pytest.mark.usefixtures("standard_promotion")


# --- The collection --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_file_imports_nothing_private_but_what_they_share(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    private = re.findall(r"^(?:from|import) +(\S*\b_\w+|\._\w+)", text, re.MULTILINE)
    assert set(private) <= {"._problem", "._deep", "._operators", "._channel", "._finite_volumes"}
    assert re.search(r"\bmpx_pde\._", text) is None
    # No problem has a setting for a precision.
    assert re.search(r"float16|bfloat16|loss_scal|init_scale|max_scale", text) is None


def test_a_name_that_is_none_is_told():
    with pytest.raises(ValueError, match="no problem `heat_death`; there are allen_cahn"):
        problems.load("heat_death")


# --- Exact solutions -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_loss_of_the_exact_solution_vanishes_in_float64(name, monkeypatch):
    file = module(name)
    if name == "black_scholes":
        monkeypatch.setattr(file, "SAMPLES", file.SIZE)  # takes all instead of a sample
    problem = file.PROBLEM
    few = lambda x: x[:16] if x.ndim > 1 else x

    def loss(size, points):
        """Evaluates the loss of a solution that is off by `size`."""
        wrong = lambda p: problem.exact(p) + size * jnp.sin(1.0 + jnp.sum(p * (1 + 0.3 * p)))
        return problem.loss(wrong, points)

    with jax.enable_x64(True):
        points = jax.tree.map(few, problem.sample(jax.random.key(0)))
        evaluate = jax.jit(loss)
        exact = float(evaluate(0.0, points))
        # Squares of float64's rounding, of terms up to some thousands. Factors of randomly drawn
        # summands are float32.
        assert abs(exact) < (1e-15 if name == "black_scholes" else 1e-22)
        assert float(evaluate(1e-2, points)) > 1e-9
        assert problem.at.shape[1] == len(problem.coords)


MET = {  # the faces on which a deep network's form meets the conditions, and the count of fields
    "burgers_1d": ("t0 x0 x1", 1),
    "allen_cahn": ("t0", 1),
    "kdv": ("t0 x0 x1", 1),
    "convection": ("t0", 1),
    "reaction": ("t0", 1),
    "wave_1d": ("t0 x0 x1", 1),
    "klein_gordon": ("t0 x0 x1", 1),
    "kovasznay": ("x0 x1 y0 y1", 2),
    "taylor_green": ("t0", 2),
    "sine_gordon": ("t0 x0 x1", 1),
    "helmholtz": ("x0 x1 y0 y1", 1),
    **dict.fromkeys(
        ("cavity", "cavity_parabolic_lid", "kuramoto_sivashinsky", "poisson_nd"), ("", 0)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MET)
def test_the_network_of_the_deep_recipe_meets_the_conditions(name):
    problem = problems.load(name)
    faces, fields = MET[name]
    exact = problem.exact
    if name == "burgers_1d":  # its solution is not a JAX function
        exact = lambda p: -jnp.sin(jnp.pi * p[1])
    elif name == "allen_cahn":
        exact = lambda p: p[1] ** 2 * jnp.cos(jnp.pi * p[1])
    with jax.enable_x64(True):
        model = deep.Network(problem.deep, jnp.float64, key=jax.random.key(0))
        low, high = (np.asarray(x, float) for x in (problem.deep.low, problem.deep.high))
        inside = jnp.asarray(np.random.default_rng(1).uniform(low, high, (8, len(low))))
        assert np.isfinite(jax.vmap(problem.deep.residual, (None, 0))(model, inside)).all()
        for face in faces.split():
            axis = problem.coords.replace("s", "t").index(face[0])
            points = np.random.default_rng(0).uniform(low, high, (20, len(low)))
            points[:, axis] = (low, high)[int(face[1])][axis]
            known = [np.reshape(jax.vmap(f)(points), (20, -1))[:, :fields] for f in (model, exact)]
            # Rounding of sums, or the remainder of a kink in the initial values.
            np.testing.assert_allclose(*known, rtol=0, atol=1e-6 if name == "allen_cahn" else 1e-12)


# --- Solvers ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_harmonic_series_is_right_at_the_boundary():
    holes = module("poisson_holes")
    solution, bound = holes.solution()
    # By the maximum principle, the error is larger at most between the boundary's points.
    assert bound < 1e-6
    assert holes.solution(20)[1] > 10 * bound
    assert 0 < solution(np.array([[0.0, 0.0]]))[0] < 1


@pytest.mark.slow
def test_the_potential_around_holes_is_right_at_the_boundary_and_inside():
    file = module("poisson_boltzmann")
    solution = file.solution(24, 30)
    # By the maximum principle, the error is largest at the boundary.
    assert file.off(solution) < 1e-6
    assert file.off(file.solution(16, 15)) > 10 * file.off(solution)
    # Central differences of fourth order fulfill the equation; 1e-4 is their error and rounding.
    points = np.array([[0.0, 0.1], [-0.7, -0.3], [0.85, 0.2], [-0.1, 0.6]])
    h = 4e-3
    at = lambda n: [solution(points + n * h * e) for e in np.eye(2)]
    second = sum(16 * (a + b) - c - d for a, b, c, d in zip(*map(at, (1, -1, 2, -2)), strict=True))
    laplacian = (second - 60 * solution(points)) / (12 * h**2)
    source = np.asarray(file.source(*points.T))
    assert relative(-laplacian + file.K**2 * solution(points), source) < 1e-4


@pytest.mark.slow
def test_the_flow_under_a_parabolic_lid_converges():
    flow = module("_cavity_reference")
    s = np.linspace(0.1, 0.9, 17)
    lines = [np.concatenate(flow.center_lines(s, n=n, lid="parabola")) for n in (16, 32, 64)]
    coarse, fine = (relative(a, lines[2]) for a in lines[:2])
    assert fine < 4e-3
    assert coarse > 3 * fine
    # The values in the cells are those on the lines: the middle row of an odd number of cells.
    u, v, _ = flow.cavity_fields(21, "parabola")
    centers = (np.arange(21) + 0.5) / 21
    want = np.concatenate(flow.center_lines(centers, n=64, lid="parabola"))
    assert relative(np.concatenate([u[10], v[:, 10]]), want) < 5e-3


def test_diffusion_is_of_second_order_and_solves_what_is_known():
    errors = []
    for n in (16, 32):
        x = (np.arange(n) + 0.5) / n
        u = np.sin(np.pi * x)[:, None] * np.sin(2 * np.pi * x)
        errors.append(relative(references.diffusion(np.ones((n, n)), 5 * np.pi**2 * u), u))
    assert errors[1] < 5e-3
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_waves_converge_to_those_that_are_known():
    sine = lambda x: np.sin(np.pi * x)
    u = references.wave(np.ones_like, sine, time=0.5, cells=200, frames=5)
    t, x = np.linspace(0, 0.5, 6), np.linspace(0, 1, 201)
    assert relative(u, np.cos(np.pi * t)[:, None] * sine(x)) < 1e-4


def test_a_linear_reaction_has_a_solution_for_each_wave():
    x = np.arange(16) / 16
    start = np.stack([np.cos(2 * np.pi * x)[:, None] * np.ones(16), np.ones((16, 16))])
    given = {"length": 1.0, "time": 1.0, "steps": 20, "frames": 1}
    u = references.reaction_diffusion(start, lambda u: -u, (0.01, 0.02), **given)[1]
    decay = np.exp(-1 - np.array([0.04 * np.pi**2, 0.0]))
    assert relative(u, decay[:, None, None] * start) < 1e-6


@pytest.mark.slow
def test_vortices_are_those_of_taylor_and_green():
    x = np.arange(32) * 2 * np.pi / 32
    w = 2 * np.cos(x)[:, None] * np.cos(x)
    given = {"viscosity": 0.1, "time": 1.0, "time_step": 0.05, "frames": 1}
    u, v, w = references.vortices(w, **given)[1]
    slow = np.exp(-0.2)
    assert relative(u, -np.cos(x)[:, None] * np.sin(x) * slow) < 1e-6
    assert relative(v, np.sin(x)[:, None] * np.cos(x) * slow) < 1e-6
    # The problem's initial vorticity belongs to its initial velocity.
    fields = module("navier_stokes_long_time").start(x[:, None], x[None], np.cos, np.sin)
    given = {**given, "time": 1e-6, "time_step": 1e-6}
    found = references.vortices(fields[2], **given)[0]
    assert relative(found[0], np.broadcast_to(fields[0], (32, 32))) < 1e-12
    assert relative(found[1], np.broadcast_to(fields[1], (32, 32))) < 1e-12


@pytest.mark.slow
def test_the_vorticity_to_learn_is_resolved():
    flow = module("operator_navier_stokes")
    coarse, fine = flow.solved(2, 64, 0), flow.solved(2, 128, 0)
    np.testing.assert_array_equal(fine["first"][:, ::2, ::2], coarse["first"])
    # The difference is in waves beyond 2/3 of the coarse grid's, which it omits.
    assert relative(fine["last"][:, ::2, ::2], coarse["last"]) < 2e-3
    assert relative(fine["last"], fine["first"]) > 0.3  # the fluid moves


@pytest.mark.slow
def test_heat_in_a_finned_block_goes_out_where_it_must():
    # The exact T in a unit cube: cos k(x − ½) cos k(y − ½) Z(z) with k tan k/2 = 1, Z'' = 2k² Z.
    k = brentq(lambda k: k * np.tan(k / 2) - 1, 1, 2)
    s = np.sqrt(2) * k
    b = -1 / s
    a = -b * (s * np.cosh(s) + np.sinh(s)) / (s * np.sinh(s) + np.cosh(s))
    errors = []
    for n in (8, 16):
        x = (np.arange(n) + 0.5) / n
        heat = np.cos(k * (x - 0.5))[:, None] * np.cos(k * (x - 0.5))
        t = references.conduction(np.ones((n, n, n), bool), heat, 1 / n)
        errors.append(relative(t, heat[:, :, None] * (a * np.cosh(s * x) + b * np.sinh(s * x))))
    assert errors[1] < 2e-3
    assert 3.5 < errors[0] / errors[1] < 4.5
    block = module("finned_block_3d")
    coarse, fine = block.reference(20), block.reference(40)
    wide = np.full((40, 40, 28), np.nan)
    wide[tuple(np.floor(fine.points.T * 40).astype(int))] = fine.values
    wide = wide.reshape(20, 2, 20, 2, 14, 2).mean(axis=(1, 3, 5))
    assert relative(coarse.values, wide[tuple(np.floor(coarse.points.T * 20).astype(int))]) < 1e-2


# --- Trainings -------------------------------------------------------------------------------


@pytest.mark.slow
def test_problems_train_from_the_command_line_and_resume(tmp_path, capsys):
    given = ["--quick", "--out", str(tmp_path), "--precision", "float16"]
    assert command.main(["run", "reaction", *given]) == 0
    path = tmp_path / "reaction.json"
    before = json.loads(path.read_text())
    [record] = before
    assert (record["precision"], record["steps"]) == ("float16", runner.QUICK_STEPS)
    assert 0 < record["error"] < 10
    capsys.readouterr()
    assert command.main(["run", "reaction", *given, "--resume"]) == 0
    told = f"already finished: error {record['error']:.2e}"
    assert told in capsys.readouterr().out
    assert json.loads(path.read_text()) == before
    with pytest.raises(SystemExit):
        command.main(["run", "reaction", "nothing"])
    assert "no problem nothing" in capsys.readouterr().err


def test_ctrl_c_tells_what_is_kept_and_how_to_go_on(tmp_path, monkeypatch, capsys):
    def press(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Trainer, "__call__", press)
    assert command.main(["run", "reaction", "--quick", "--out", str(tmp_path)]) == 130
    told = capsys.readouterr().err
    parts = ("Stopped", str(tmp_path), "--resume", "the running one had not begun")
    assert all(part in told for part in parts)
    assert "Traceback" not in told


def _press(when):
    """Returns a `follow` that presses Ctrl-C at the call of this number, counted from 1."""
    calls = itertools.count(1)

    def follow(*_):
        if next(calls) == when:
            # A process that a shell started in the background ignores it otherwise.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, before)
        return False

    return follow


@pytest.mark.slow
def test_a_training_goes_on_where_ctrl_c_stopped_it(tmp_path, monkeypatch):
    """The one that was stopped and went on ends with the same bits; so do its records."""
    monkeypatch.setattr(deep, "REDRAWN", 2)
    problem = problems.load("reaction")
    plain = runner.Trainer(problem, "forward-float32-float16", steps=8, per_call=2)
    second = deep.DeepTrainer(problem, "float64-float32", steps=8)
    for trainer, calls in ((plain, 3), (second, 5)):
        wanted, weights = trainer(1), jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
        file = kept.Kept(tmp_path / "training.npz")
        with pytest.raises(KeyboardInterrupt):
            trainer(1, follow=_press(calls), kept=file)
        assert file.path.exists()
        seen = []
        got = trainer(1, follow=lambda *given, seen=seen: seen.append(given), kept=file)
        assert len(seen) == (1 if trainer is plain else 4)  # the deep recipe repeats from step 4
        leaves = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
        assert all(jnp.array_equal(a, b) for a, b in zip(leaves, weights, strict=True))
        found, told = got.record(), wanted.record()
        for record in (found, told):  # but for the seconds
            record["curve"] = [(step, error) for step, _, error in record.get("curve", ())]
        assert found == told
        file.remove()
        assert list(tmp_path.iterdir()) == []


def test_a_training_shows_its_steps_its_loss_and_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(command.sys.stderr, "isatty", lambda: True, raising=False)
    times = iter([10.0, 12.0])
    monkeypatch.setattr(command.time, "monotonic", lambda: next(times))
    with command.Progress("reaction", 300) as progress:
        progress.plain(100, 0.5, None)
        progress.plain(100, 0.25, None)
    lines = [line.strip() for line in capsys.readouterr().err.split("\r") if line.strip()]
    assert lines == [
        "reaction  compiling",
        "reaction  step 100 of 300, loss 5.0e-01",
        "reaction  step 200 of 300, loss 2.5e-01, 2 s left",
    ]


@functools.cache
def outcome(precision, **options):
    return runner.Trainer(problems.load("reaction"), precision, steps=6, **options)(0)


# One of each kind, with both formats of the backward pass.
KINDS = ["float64", "float32-rounded", "naive-float16", "float16", "autocast-float16"]
KINDS += ["forward-float32-bfloat16", "forward-bfloat16_x3-float16"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", KINDS)
def test_a_precision_trains(precision):
    found = outcome(precision)
    # A cast by hand starts with too large a loss scale and skips steps until it fits.
    assert found.skipped == (1 if precision == "naive-float16" else 0)
    # Six steps give the same first digits in each precision.
    assert abs(found.error / outcome("float32").error - 1) < 0.1


@pytest.mark.slow
def test_lbfgs_goes_on_where_the_training_ended():
    transformed = []
    given = {"steps": 60, "transform": lambda step: transformed.append(step) or step}

    def trainer(optimizer):
        problem = problems.load("reaction")
        return runner.Trainer(problem, "forward-float32-bfloat16", optimizer=optimizer, **given)

    before, after = trainer("adam+lbfgs").stages(0)
    assert len(transformed) == 2  # emulations apply to the step and to the gradient of L-BFGS
    assert before == trainer("adam")(0)
    assert (before.optimizer, after.optimizer) == ("adam", "adam+lbfgs")
    assert after.error < before.error
    with pytest.raises(ValueError, match=r"`optimizer` must be one of adam, adam\+lbfgs"):
        trainer("sgd")


# A size of cells and steps, a function that thins out solutions of twice that size, and a bound of
# their difference. At the corner of four blocks, u is not smooth.
SIZES = {
    "poisson_subdomains": ((64,), lambda u: u.reshape(64, 2, 64, 2).mean(axis=(1, 3)), 1e-2),
    "wave_heterogeneous": ((1000,), lambda u: u, 1e-4),
    "kdv_cosine": ((512, 1000), lambda u: u.reshape(51, 1024)[:, ::2], 1e-5),
    "kuramoto_sivashinsky": ((256, 600), lambda u: u.reshape(31, 512)[:, ::2], 1e-6),
    "gray_scott": ((128, 200), lambda u: u.reshape(6, 128, 128, 2)[:, ::2, ::2], 1e-3),
}


@pytest.mark.parametrize(
    "name", [*list(SIZES)[:4], pytest.param("gray_scott", marks=pytest.mark.slow)]
)
def test_solutions_change_little_with_the_grid(name):
    size, thinned, tolerance = SIZES[name]
    solved = module(name).reference
    fine = solved(*(2 * n for n in size)).values
    assert relative(solved(*size).values, thinned(fine)) < tolerance


@pytest.mark.slow
def test_the_flow_over_a_step_changes_little_with_the_grid():
    step = module("back_step")
    fields = []
    for cells in (20, 40):
        points, values = step.reference(cells)
        fields.append(values.reshape(3 * cells, cells, 3))
    coarse, fine = fields[0], fields[1].reshape(60, 2, 20, 2, 3).mean(axis=(1, 3))
    known = np.isfinite(coarse) & np.isfinite(fine)
    assert relative(coarse[known], fine[known]) < 0.06  # of first order at the corner
    # The outflow equals the inflow.
    assert abs(fields[1][-1, :, 0].mean() - 0.5) < 1e-3
