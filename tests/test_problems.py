"""The problems of `examples/problems`: their solutions solve what is trained, and they train."""

import importlib
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from test_docs import ROOT

import mpx_pde as mpx


sys.path.insert(0, str(ROOT))
problems = importlib.import_module("examples.problems")
runner = importlib.import_module("examples.problems._runner")
command = importlib.import_module("examples.problems.__main__")
references = importlib.import_module("examples.problems.references")
FOLDER = ROOT / "examples" / "problems"
NAMES = problems.names()
# Read rather than imported: a problem imports solvers and data.
EXACT = [n for n in NAMES if "\ndef exact(" in (FOLDER / f"{n}.py").read_text(encoding="utf-8")]


@pytest.fixture(autouse=True)
def promotion_of_numpy():
    """Examples are programs of users, who have JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# --- The collection --------------------------------------------------------------------------


def test_there_are_thirty_problems_and_more():
    assert len(NAMES) >= 30
    assert len(EXACT) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_short_and_imports_nothing_private_but_what_they_share(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    private = re.findall(r"^(?:from|import) +(\S*\b_\w+|\._\w+)", text, re.MULTILINE)
    assert set(private) <= {"._problem", "._operators", "._channel", "._finite_volumes"}
    assert re.search(r"\bmpx_pde\._", text) is None
    # None has a setting for a precision.
    assert re.search(r"float16|bfloat16|loss_scal|init_scale|max_scale", text) is None


def test_a_name_that_is_none_is_told():
    with pytest.raises(ValueError, match="no problem `heat_death`; there are allen_cahn"):
        problems.load("heat_death")


# --- Exact solutions -------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_the_loss_of_the_exact_solution_vanishes_in_float64(name, monkeypatch):
    module = importlib.import_module(f"examples.problems.{name}")
    if name == "black_scholes":
        monkeypatch.setattr(module, "SAMPLES", module.SIZE)  # of all it is no sample
    problem = module.PROBLEM
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


# --- Solvers ---------------------------------------------------------------------------------


def module(name):
    return importlib.import_module(f"examples.problems.{name}")


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
    emulated = importlib.import_module("benchmarks._problems").EMULATED
    for name in names:
        known, transform = emulated[f"{name}-emulated"]
        step = lambda: None
        assert (known, transform(step)) == (name, step)


# --- Trainings -------------------------------------------------------------------------------


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
@pytest.mark.parametrize("precision", runner.PRECISIONS)
def test_every_precision_trains(precision):
    found = outcome(precision)
    assert found.skipped == 0
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


@pytest.mark.slow
def test_a_time_step_is_rolled_out():
    record = runner.Trainer(problems.load("emulate_ks"), "float16", steps=4)(0).record()
    assert list(record["errors"]) == [
        "rollout",
        "step 1",
        "step 5",
        "step 10",
        "step 20",
        "step 40",
    ]
    assert record["errors"]["step 1"] < record["errors"]["step 20"]
