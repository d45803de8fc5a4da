"""The problems of `examples/problems`: their solutions solve what is trained, and they train."""

import functools
import importlib
import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from pages import ROOT, module
from scipy.optimize import brentq

import mpx_pde as mpx


problems = importlib.import_module("examples.problems")
runner, deep, command, operators, references = map(
    module, ("_runner", "_deep", "__main__", "_operators", "references")
)
FOLDER = ROOT / "examples" / "problems"
NAMES = problems.names()
# Read rather than imported: a problem imports solvers and data.
EXACT = [n for n in NAMES if "\ndef exact(" in (FOLDER / f"{n}.py").read_text(encoding="utf-8")]


# Examples are programs of users.
pytestmark = pytest.mark.usefixtures("standard_promotion")


# --- The collection --------------------------------------------------------------------------


def test_there_are_thirty_problems_and_more():
    assert len(NAMES) >= 30
    assert len(EXACT) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_a_file_imports_nothing_private_but_what_they_share(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    private = re.findall(r"^(?:from|import) +(\S*\b_\w+|\._\w+)", text, re.MULTILINE)
    assert set(private) <= {"._problem", "._deep", "._operators", "._channel", "._finite_volumes"}
    assert re.search(r"\bmpx_pde\._", text) is None
    # None has a setting for a precision.
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
        monkeypatch.setattr(file, "SAMPLES", file.SIZE)  # of all it is no sample
    problem = file.PROBLEM
    few = lambda x: x[:16] if x.ndim > 1 else x

    def loss(size, points):
        """Of a solution that is off by `size`."""
        wrong = lambda p: problem.exact(p) + size * jnp.sin(1.0 + jnp.sum(p * (1 + 0.3 * p)))
        return problem.loss(wrong, points)

    with jax.enable_x64(True):
        points = jax.tree.map(few, problem.sample(jax.random.key(0)))
        evaluate = jax.jit(loss)
        exact = float(evaluate(0.0, points))
        # Squares of float64's rounding, of terms up to some thousands; factors of summands that
        # are drawn at random are float32.
        assert abs(exact) < (1e-15 if name == "black_scholes" else 1e-22)
        assert float(evaluate(1e-2, points)) > 1e-9
        assert problem.at.shape[1] == len(problem.coords)


MET = {  # the conditions that the form of a deep network meets: faces, and the fields known there
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
}


@pytest.mark.parametrize("name", MET)
def test_the_network_of_the_deep_recipe_meets_the_conditions(name):
    problem = problems.load(name)
    faces, fields = MET[name]
    exact = problem.exact
    if name == "burgers_1d":  # whose solution is no function of JAX
        exact = lambda p: -jnp.sin(jnp.pi * p[1])
    elif name == "allen_cahn":
        exact = lambda p: p[1] ** 2 * jnp.cos(jnp.pi * p[1])
    with jax.enable_x64(True):
        model = deep.Network(problem.deep, jnp.float64, key=jax.random.key(0))
        low, high = (np.asarray(x, float) for x in (problem.deep.low, problem.deep.high))
        for face in faces.split():
            axis = problem.coords.replace("s", "t").index(face[0])
            points = np.random.default_rng(0).uniform(low, high, (20, len(low)))
            points[:, axis] = (low, high)[int(face[1])][axis]
            known = [np.reshape(jax.vmap(f)(points), (20, -1))[:, :fields] for f in (model, exact)]
            # Rounding of sums; what is left of a kink in the initial values.
            np.testing.assert_allclose(*known, rtol=0, atol=1e-6 if name == "allen_cahn" else 1e-12)


# --- Solvers ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_harmonic_series_is_right_at_the_boundary():
    holes = module("poisson_holes")
    solution, bound = holes.solution()
    # By the maximum principle the error is nowhere larger, but between the boundary's points.
    assert bound < 1e-6
    assert holes.solution(20)[1] > 10 * bound
    assert 0 < solution(np.array([[0.0, 0.0]]))[0] < 1


def test_diffusion_is_of_second_order_and_solves_what_is_known():
    errors = []
    for n in (16, 32):
        x = (np.arange(n) + 0.5) / n
        u = np.sin(np.pi * x)[:, None] * np.sin(2 * np.pi * x)
        errors.append(relative(references.diffusion(np.ones((n, n)), 5 * np.pi**2 * u), u))
    assert errors[1] < 5e-3
    assert 3.5 < errors[0] / errors[1] < 4.5
    blocks = module("poisson_subdomains")
    coarse, fine = (blocks.reference(n).values.reshape(n, n) for n in (64, 128))
    # Where four blocks meet, u has corners.
    assert relative(coarse, fine.reshape(64, 2, 64, 2).mean(axis=(1, 3))) < 1e-2


def test_waves_converge_to_those_that_are_known():
    sine = lambda x: np.sin(np.pi * x)
    u = references.wave(np.ones_like, sine, time=0.5, cells=200, frames=5)
    t, x = np.linspace(0, 0.5, 6), np.linspace(0, 1, 201)
    assert relative(u, np.cos(np.pi * t)[:, None] * sine(x)) < 1e-4
    two = module("wave_heterogeneous")
    assert relative(two.reference(1000).values, two.reference(2000).values) < 1e-4


def test_chaos_and_patterns_do_not_change_with_the_grid():
    chaos = module("kuramoto_sivashinsky")
    coarse = chaos.reference(256, 600).values.reshape(31, 256)
    assert relative(coarse, chaos.reference(512, 1200).values.reshape(31, 512)[:, ::2]) < 1e-6
    # A reaction that is linear has a solution for each wave.
    x = np.arange(16) / 16
    start = np.stack([np.cos(2 * np.pi * x)[:, None] * np.ones(16), np.ones((16, 16))])
    given = {"length": 1.0, "time": 1.0, "steps": 20, "frames": 1}
    u = references.reaction_diffusion(start, lambda u: -u, (0.01, 0.02), **given)[1]
    decay = np.exp(-1 - np.array([0.04 * np.pi**2, 0.0]))
    assert relative(u, decay[:, None, None] * start) < 1e-6


@pytest.mark.slow
def test_patterns_do_not_change_with_the_grid():
    patterns = module("gray_scott")
    coarse = patterns.reference(128, 200).values.reshape(6, 64, 64, 2)
    fine = patterns.reference(256, 400).values.reshape(6, 128, 128, 2)[:, ::2, ::2]
    assert relative(coarse, fine) < 1e-3


@pytest.mark.slow
def test_vortices_are_those_of_taylor_and_green():
    x = np.arange(32) * 2 * np.pi / 32
    w = 2 * np.cos(x)[:, None] * np.cos(x)
    given = {"viscosity": 0.1, "time": 1.0, "time_step": 0.05, "frames": 1}
    u, v, w = references.vortices(w, **given)[1]
    slow = np.exp(-0.2)
    assert relative(u, -np.cos(x)[:, None] * np.sin(x) * slow) < 1e-6
    assert relative(v, np.sin(x)[:, None] * np.cos(x) * slow) < 1e-6
    # The initial fields of the problem belong together.
    fields = module("navier_stokes_long_time").start(x[:, None], x[None], np.cos, np.sin)
    given = {**given, "time": 1e-6, "time_step": 1e-6}
    found = references.vortices(fields[2], **given)[0]
    assert relative(found[0], np.broadcast_to(fields[0], (32, 32))) < 1e-12
    assert relative(found[1], np.broadcast_to(fields[1], (32, 32))) < 1e-12


@pytest.mark.slow
def test_the_vorticity_to_learn_is_the_same_function_on_every_grid():
    flow = module("operator_navier_stokes")
    with jax.enable_x64(True):
        fields = jax.jit(lambda key: [flow.initial(key, n) for n in (36, 72)])
        coarse, fine = (np.asarray(x) for x in fields(jax.random.key(3)))
        variances = jax.jit(jax.vmap(lambda key: jnp.mean(flow.initial(key, 36) ** 2)))
        mean = float(variances(jax.random.split(jax.random.key(0), 400)).mean())
    assert relative(fine[::2, ::2], coarse) < 1e-12
    assert abs(coarse.mean()) < 1e-12
    # Four waves have most of the variance: that of a field scatters by about one half of it.
    assert abs(mean / flow.STD**2 - 1) < 5 * 0.5 / np.sqrt(400)


@pytest.mark.slow
def test_the_vorticity_to_learn_is_resolved():
    flow = module("operator_navier_stokes")
    coarse, fine = flow.solved(2, 64, 0), flow.solved(2, 128, 0)
    np.testing.assert_array_equal(fine["first"][:, ::2, ::2], coarse["first"])
    # Waves beyond 2/3 of those of the coarse grid, which leaves them out.
    assert relative(fine["last"][:, ::2, ::2], coarse["last"]) < 2e-3
    assert relative(fine["last"], fine["first"]) > 0.3  # it flows


@pytest.mark.slow
def test_solitons_to_learn_solve_their_equation():
    """That of the file, by another solver, on a finer grid."""
    waves = module("emulate_kdv")
    x = 2 * np.pi * np.arange(192) / 192
    start = 2.2 * np.sin(3 * x + 1) * np.cos(2 * x)
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(waves.stepper())(jnp.asarray(start[None, ::2])))[0]
    k = 2 * np.pi / waves.EXTENT * np.arange(97)
    low = np.arange(97) <= 64  # of the square, only what is no alias
    slope = lambda u: np.fft.irfft(low * -3j * k * np.fft.rfft(u**2))
    linear = 1j * k**3 - 0.068 * k**4
    solution = references.etdrk4(start, linear, slope, dt=0.032 / 20, steps=20, every=20)[-1]
    # Of first order in 50 substeps: 1.2e-3.
    assert relative(found, solution[::2]) < 2e-3
    assert relative(start, solution) > 0.1  # it moves


@pytest.mark.slow
def test_heat_in_a_finned_block_goes_out_where_it_must():
    # In a cube of size 1, cos k(x − ½) cos k(y − ½) Z(z) with k tan k/2 = 1 and Z'' = 2k² Z.
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


@pytest.mark.slow
def test_points_of_a_union_of_boxes_are_inside_and_on_it():
    geometry, block = module("geometry"), module("finned_block_3d")
    points = geometry.inside(jax.random.key(0), block.SOLID, 200)
    assert (geometry.distance(block.SOLID, points) < 0).all()
    at, normals, there = geometry.surface(jax.random.key(1), block.SOLID, 400)
    assert np.abs(geometry.distance(block.SOLID, at[there > 0])).max() < 1e-6
    assert (geometry.distance(block.SOLID, at + 0.01 * normals)[there > 0] > 0).all()
    # Where fins stand on the base, the base has no surface.
    covered = (at[:, 2] == np.float32(0.2)) & (at[:, 0] > 0.11) & (at[:, 0] < 0.19)
    assert covered.any()
    assert not there[covered].any()


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
    # What comes in goes out.
    assert abs(fields[1][-1, :, 0].mean() - 0.5) < 1e-3


# --- Emulated products -----------------------------------------------------------------------


def test_products_are_emulated():
    """Between float32's error and that of TF32: 2^-11 of the operands."""
    emulate = importlib.import_module("benchmarks._tf32").emulate_tf32
    x, y = (np.random.default_rng(i).standard_normal((64, 64)).astype(np.float32) for i in (0, 1))
    product = lambda x, y: {"z": jax.jit(jnp.matmul)(x, y)}
    exact = x.astype(np.float64) @ y
    assert relative(product(x, y)["z"], exact) < 1e-5
    assert 1e-5 < relative(emulate(product)(x, y)["z"], exact) < 1e-3


def test_split_products_on_a_cpu_need_no_emulation():
    """They are no float32 products there, but have the errors of their parts: 2^-16."""
    x, y = (np.random.default_rng(i).standard_normal((64, 64)).astype(np.float32) for i in (0, 1))
    split = jax.jit(mpx.autocast(jnp.matmul, "bfloat16_x3"))
    assert 1e-6 < relative(split(x, y), x.astype(np.float64) @ y) < 1e-4
    names = ("forward-bfloat16_x3-float16", "forward-bfloat16_x3-bfloat16")
    emulated = importlib.import_module("benchmarks._problems").OTHERS
    for name in names:
        known, transform = emulated[f"{name}-emulated"]
        step = lambda: None
        assert (known, transform(step)) == (name, step)


@pytest.mark.slow
def test_derivatives_of_two_evaluations_have_the_values_of_float32():
    trainer = importlib.import_module("benchmarks._problems").trainer

    def losses(precision):
        training = trainer("reaction", precision, optimizer="adam", steps=3)
        state, key = training.initial(0)
        points = training.next_points(state.model, key)
        return np.asarray(training.steps_of(state)(eqx.filter(state, eqx.is_array), points)[1][0])

    full, refined = losses("float32"), losses("refined-bfloat16")
    assert refined[0] == full[0]
    # Steps by a gradient that is in half.
    assert 1e-6 < relative(refined[2], full[2]) < 1e-2


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
    assert capsys.readouterr().out == ""
    assert json.loads(path.read_text()) == before
    with pytest.raises(SystemExit):
        command.main(["run", "reaction", "nothing"])
    assert "no problem nothing" in capsys.readouterr().err


@functools.cache
def outcome(precision, **options):
    return runner.Trainer(problems.load("reaction"), precision, steps=6, **options)(0)


@pytest.mark.slow
def test_controls_of_chance_are_near_float32_and_not_it():
    plain, rounded, dropped = map(outcome, ("float32", "float32-rounded", "float32-dropped"))
    assert rounded.error != plain.error
    assert abs(rounded.error / plain.error - 1) < 0.1
    assert dropped.error != plain.error
    assert dropped.skipped == 0  # none that counts as one


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [p for p in runner.PRECISIONS if p not in ("bfloat16", "autocast-bfloat16")]
)
def test_a_precision_trains(precision):
    found = outcome(precision)
    # By hand the first loss scale is too large, and steps are skipped until it is not.
    assert found.skipped == (1 if precision == "naive-float16" else 0)
    # Six steps go the same way in each, by their first digits.
    assert abs(found.error / outcome("float32").error - 1) < 0.1


@pytest.mark.slow
def test_lbfgs_goes_on_where_the_training_ended():
    transformed = []
    given = {"steps": 60, "transform": lambda step: transformed.append(step) or step}

    def trainer(optimizer):
        problem = problems.load("reaction")
        return runner.Trainer(problem, "forward-float32-bfloat16", optimizer=optimizer, **given)

    before, after = trainer("adam+lbfgs").stages(0)
    assert len(transformed) == 2  # emulations hold for the step, and for the gradient of L-BFGS
    assert before == trainer("adam")(0)
    assert (before.optimizer, after.optimizer) == ("adam", "adam+lbfgs")
    assert after.error < before.error
    with pytest.raises(ValueError, match=r"`optimizer` must be one of adam, adam\+lbfgs"):
        trainer("sgd")


def widened(asked):
    """An operator that makes a field half as large again, on data that tell what was asked for."""

    def pairs(count, points):
        waves = np.sin(2 * np.pi * np.arange(points) / points) * np.ones((count, 1, points, 1))
        return operators.Pairs(waves.astype(np.float32), 1.5 * waves.astype(np.float32))

    def data(train=9, tests=5):
        asked.append((train, tests))
        return pairs(train, 4), pairs(tests, 4)

    def finer(count):
        asked.append(count)
        return pairs(count, 16)

    network = lambda key: eqx.nn.Conv2d(1, 1, 1, key=key)
    return operators.operator(title="t", data=data, finer=finer, network=network, steps=100)


@pytest.mark.slow
def test_an_operator_is_tested_on_finer_grids_too():
    asked = []
    problem = widened(asked)
    # What a network makes of finer grids is its own.
    wrong = lambda x: 1.5 * x * (1 + x.shape[-1] / 100)
    errors = problem.errors(wrong)
    names = ("", " at 4²", " at 8²", " at 16²")
    assert list(errors) == [f"rel. L2 error{name}" for name in names]
    assert np.allclose(list(errors.values()), [0.04, 0.04, 0.08, 0.16], rtol=1e-5)
    assert asked == [(9, 5), operators.FINER_TESTS]


@pytest.mark.slow
@pytest.mark.parametrize("quick", [False, True])
def test_a_quick_run_makes_few_data(quick, monkeypatch):
    asked, found = [], []
    monkeypatch.setattr(command, "load", lambda name, size="small": widened(asked))
    monkeypatch.setattr(command, "train", lambda name, problem, args: found.append(problem))
    assert command.main(["run", "operator_darcy", *["--quick"] * quick]) == 0
    found[0].network(jax.random.key(0))
    benchmark = importlib.import_module("benchmarks._problems")
    monkeypatch.setattr(benchmark.problems(), "load", lambda name, size="small": widened(asked))
    given = {"optimizer": None, "steps": None, "quick": quick}
    benchmark.trainer("operator_darcy", "float32", **given).problem.network(jax.random.key(0))
    assert asked == 2 * [(2, 2) if quick else (9, 5)]
    asked.clear()
    finer = list(found[0].errors(lambda x: 1.5 * x))[1:]
    assert len(finer) == (0 if quick else 3)
    assert asked == ([] if quick else [operators.FINER_TESTS])


@pytest.mark.slow
def test_a_time_step_is_rolled_out():
    """Of a field that halves in each step, by a network that leaves it as it is."""
    nothing = lambda x: 0 * x if eqx.is_array(x) else x
    problem = operators.emulator(
        title="t",
        stepper=lambda: lambda u: u / 2,
        initial=lambda key: jax.random.normal(key, (1, 8)),
        network=lambda key: jax.tree.map(nothing, eqx.nn.Conv1d(1, 1, 1, key=key)),
        told=(1, 3),
        count=2,
        steps_each=3,
    )
    errors = problem.errors(problem.network(jax.random.key(0)))
    assert errors == pytest.approx({"rollout": np.sqrt(7), "step 1": 1, "step 3": 7}, rel=1e-6)
