"""Tests the cooling problems of `examples/problems` with flow in three dimensions: conditions,
points, equations, and the finite volumes that they are compared with."""

import functools
import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import module


problems = importlib.import_module("examples.problems")
channels, volumes, geometry = map(module, ("_channel", "_finite_volumes", "geometry"))
Box = geometry.Box
NAMES = ("fpga_laminar", "fpga_zero_equation", "three_fin_3d")
GIVEN = {"coords": "xyz", "outputs": "uvwpt", "scaling": None}


# Examples are programs of users.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def surface(seed, boxes, count):
    """Returns points on faces of boxes and their normals. `geometry` compiles more slowly."""
    draw = np.random.default_rng(seed)
    box, axis, end = (draw.integers(n, size=count) for n in (len(boxes), 3, 2))
    low, high = np.moveaxis(np.array(boxes, np.float32), 1, 0)[:, box]
    at, normals = low + draw.random((count, 3), np.float32) * (high - low), np.zeros((count, 3))
    rows = np.arange(count)
    at[rows, axis] = np.where(end == 1, high[rows, axis], low[rows, axis])
    normals[rows, axis] = 2 * end - 1
    return jnp.asarray(at), normals.astype(np.float32)


# --- Conditions and points -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three_fin_3d", "fpga_laminar"])
def test_fields_of_any_network_meet_their_conditions(name):
    problem, channel = module(name).PROBLEM, module(name).CHANNEL
    form = channels.form(channel, 2.0)
    outputs = jnp.array([1.0, -2.0, 3.0, 0.5, -1.5])
    fields = jax.jit(jax.vmap(lambda p: form(p, outputs)))
    at, _ = surface(1, [*channel.block, channel.space], 800)
    x, y, z = (np.asarray(at, np.float64)).T
    u, v, w, p, t = np.asarray(fields(at), np.float64).T
    block = np.abs(geometry.distance(channel.block, at)) < 1e-6
    stuck = block | (np.abs(np.abs(y) - 0.55) < 1e-6) | (np.abs(z - 0.5) > 0.5 - 1e-6)
    inlet, outlet = (x == 0) & ~stuck, np.abs(x - 1.8) < 1e-6
    assert min(block.sum(), inlet.sum(), outlet.sum(), (stuck & ~block).sum()) > 20
    assert np.abs(np.stack([u, v, w])[:, stuck]).max() < 1e-4
    want = 36 * (0.25 - (y / 1.1) ** 2) * (z - z**2)
    assert np.allclose(u[inlet], want[inlet], atol=1e-4)
    assert np.abs(np.stack([v, w, t])[:, inlet]).max() < 1e-5
    assert np.abs(np.stack([v, w, p])[:, outlet]).max() < 1e-5
    assert np.abs(t[block] - 1).max() < 1e-3
    assert problem.free == (3,)
    assert len(problem.fields) == 5


@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_the_paper_has_a_larger_network_and_more_points(name):
    small, paper = (problems.load(name, size) for size in problems.SIZES)
    made = lambda fun: jax.tree.leaves(eqx.filter_eval_shape(fun, jax.random.key(0)))
    count = lambda fun: sum(x.size for x in made(fun) if hasattr(x, "size"))
    assert count(paper.network) > 50 * count(small.network)
    assert count(paper.sample) > 10 * count(small.sample)
    assert paper.steps > 100 * small.steps
    assert (paper.loss, paper.reference) == (small.loss, small.reference)


def test_a_problem_without_a_size_says_so():
    with pytest.raises(ValueError, match="`kovasznay` has no size 'paper'"):
        problems.load("kovasznay", "paper")


# --- The equations, and finite volumes -------------------------------------------------------


def smooth(point, np=jnp):
    """Returns fields whose velocity has no divergence."""
    x, y, z = point
    u, v, w = 1 + np.sin(2 * y) * np.cos(z), np.cos(x + z), np.sin(2 * x - y)
    return np.stack([u, v, w, np.sin(x + 2 * y * z), np.cos(x - y + 2 * z)])


def channel_of(**options):
    options = {"viscosity": 0.3, "block": (Box((0.2, -0.1, 0), (0.4, 0.1, 0.2)),), **options}
    return channels.Channel(Box((0, -0.5, 0), (2, 0.5, 1)), **options)


def rates_off(channel, residuals, cells):
    """Returns the differences between the rates of finite volumes and of the residuals, at x > 1
    over the floor: for u, v, w and T, relative to the largest. Needs 64-bit types."""
    solver = volumes.FiniteVolumes(channel, 1 / cells)
    places, fields = [], []
    for field in range(5):
        axes = list(solver.axes)
        if field < 3:
            axes[field] = np.append(axes[field] - solver.h / 2, axes[field][-1] + solver.h / 2)
        places.append(np.stack(np.meshgrid(*axes, indexing="ij")))
        fields.append(smooth(places[-1], np)[field])
    rates, viscosity = solver.momentum(fields[:3], fields[3])
    rates = [*rates, solver.heat(fields[:3], fields[4], viscosity)]
    at, got = [], []
    for (x, y, z), rate in zip(places[:3] + places[4:], rates, strict=True):
        # More than a cell away from walls, and closest to the floor.
        kept = (x > 1.05) & (x < 1.75) & (np.abs(y) < 0.18) & (z > 0.12) & (z < 0.28)
        at.append(np.stack([x, y, z], axis=-1)[kept])
        got.append(np.asarray(rate)[kept])
    wrong = jax.jit(lambda at: residuals(smooth, at, GIVEN))
    mass, force, heat = wrong(jnp.asarray(np.concatenate(at)))
    assert np.abs(mass).max() < 1e-12
    sizes = np.cumsum([0, *map(len, at)])
    want = [-np.asarray(x)[slice(*sizes[i : i + 2])] for i, x in enumerate((*force, heat))]
    return np.array([np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, want, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fpga_laminar", "fpga_zero_equation"])
def test_finite_volumes_solve_the_equations_that_are_trained(name, monkeypatch):
    problem = module(name)
    # The eddy viscosity is as large as the viscosity, with a length that depends on the distance.
    channel = channel_of(mixing=0.5 if name == "fpga_zero_equation" else 0.0)
    monkeypatch.setattr(problem, "CHANNEL", channel)
    residuals = problem.residuals
    if name == "fpga_laminar":
        residuals = lambda fields, at, given: problem.residuals(fields, at, given, nu=0.3)
    with jax.enable_x64(True):
        coarse, fine = (rates_off(channel, residuals, cells) for cells in (20, 40))
    assert (fine < 2e-3).all()
    assert (coarse > 3 * fine).all()  # of second order


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_references_keep_mass(name):
    flow = volumes.steady(module(name).CHANNEL, 10, 3e-7)
    assert np.abs(flow["flux"] / flow["flux"][0] - 1).max() < 1e-6
    u, *_, t = flow["fields"]
    # The solid cells fill the block, and the fluid is faster beside it.
    solid = np.isnan(u).mean() * geometry.volume([module(name).CHANNEL.space])
    assert solid == pytest.approx(geometry.volume(module(name).CHANNEL.block))
    assert np.nanmean(u[8]) > 1.1 * np.nanmean(u[0])
    assert 0 < np.nanmean(t) < 1


@pytest.mark.slow
def test_an_extrapolated_reference_is_nearer_to_that_of_finer_cells(monkeypatch):
    channel = channel_of(viscosity=0.05)._replace(space=Box((0, -0.3, 0), (0.8, 0.3, 0.4)))
    # Each size is solved only once, because it compiles slowly.
    solved = functools.cache(lambda cells: volumes.steady(channel, cells))
    monkeypatch.setattr(volumes, "cached", lambda name, make, cells, **_: solved(cells))
    fine = volumes.reference(channel, 20).values.reshape(8, 2, 6, 2, 4, 2, 5)
    fine = fine.mean(axis=(1, 3, 5)).reshape(-1, 5)
    coarse = np.moveaxis(solved(10)["fields"], 0, -1).reshape(-1, 5)
    known = np.isfinite(fine[:, 0])
    off = lambda x: np.linalg.norm((x - fine)[known], axis=0)
    assert (off(volumes.reference(channel, 10).values) < 0.5 * off(coarse)).all()
