"""The cooling problems of `examples/problems` with flow in three dimensions: conditions, points,
equations, and the finite volumes that they are compared with."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import relative
from pages import jax_defaults, module


problems = importlib.import_module("examples.problems")
channels, volumes, geometry = map(module, ("_channel", "_finite_volumes", "geometry"))
Box = geometry.Box
NAMES = ("fpga_laminar", "fpga_zero_equation", "three_fin_3d")
GIVEN = {"coords": "xyz", "outputs": "uvwpt", "scaling": None}
SLOW = pytest.mark.slow


# Examples are programs of users.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def surface(seed, boxes, count):
    """Points on faces of boxes and their normals; those of `geometry` take long to compile."""
    draw = np.random.default_rng(seed)
    box, axis, end = (draw.integers(n, size=count) for n in (len(boxes), 3, 2))
    low, high = np.moveaxis(np.array(boxes, np.float32), 1, 0)[:, box]
    at, normals = low + draw.random((count, 3), np.float32) * (high - low), np.zeros((count, 3))
    rows = np.arange(count)
    at[rows, axis] = np.where(end == 1, high[rows, axis], low[rows, axis])
    normals[rows, axis] = 2 * end - 1
    return jnp.asarray(at), normals.astype(np.float32)


# --- Geometry --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_smooth_distance_vanishes_on_boxes_alone():
    boxes = [Box((0, 0, 0), (1, 2, 1)), Box((0, 0, 1), (0.5, 1, 2))]
    at, normals = surface(0, boxes, 200)
    there = geometry.distance(boxes, at + 1e-3 * normals) > 0
    away = jax.jit(jax.vmap(lambda p: geometry.away(boxes, p)))
    assert np.abs(away(at)).max() < 1e-4
    near = away(at + 1e-2 * normals)[there]
    # The distance over itself and `reach`; next to the other box it is smaller.
    assert 0.15 < near.max() < 0.01 / 0.06
    assert near.min() > 0.02
    assert away(jnp.full((1, 3), 9.0)) == pytest.approx(1, abs=0.02)
    # No direction of approach has a derivative that is none.
    slopes = jax.jit(jax.vmap(jax.grad(lambda p: geometry.away(boxes, p))))(at)
    assert np.isfinite(slopes).all()


def test_distances_to_edges():
    box = [Box((0, 0, 0), (2, 2, 2))]
    at = jnp.array([[1.0, 1, 1], [1, 1, 2], [1, 2, 2], [1, 3, 3], [3, 3, 3], [1, -0.5, 0]])
    want = np.array([np.sqrt(2), 1, 0, np.sqrt(2), np.sqrt(3), 0.5])
    assert np.allclose(geometry.to_edges(box, at), want, atol=1e-6)


# --- Conditions and points -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three_fin_3d", pytest.param("fpga_laminar", marks=SLOW)])
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


@pytest.fixture(scope="module")
def drawn():
    """Points of some steps for the block of one problem."""
    channel = module("three_fin_3d").CHANNEL
    sizes = {"fluid": 512, "walls": 256, "sections": 6, "across": 12}
    draw = jax.jit(jax.vmap(lambda key: channels.draw(channel, key, **sizes)))
    with jax_defaults():
        points = draw(jax.random.split(jax.random.key(0), 30))
    return channel, jax.tree.map(np.asarray, points)


@pytest.mark.slow
def test_points_near_the_block_are_more_and_weigh_less(drawn):
    channel, points = drawn
    at, weight, calm = points["fluid"]
    assert at.dtype == np.float32
    assert (geometry.distance(channel.block, jnp.asarray(at.reshape(-1, 3))) > 0).all()
    near = channels.surroundings(channel)
    inside = ((at > near.low) & (at < near.high)).all(axis=-1)
    assert 0.6 < inside.mean() < 0.7  # half of them, and a third of the others
    # Weighted means are those over the fluid, to within what 30 × 512 points scatter by.
    size = geometry.volume([channel.space]) - geometry.volume(channel.block)
    share = (geometry.volume([near]) - geometry.volume(channel.block)) / size
    assert weight.mean() == pytest.approx(1, abs=0.03)
    assert (weight * inside).mean() == pytest.approx(share, abs=0.02)
    want = 0.9 * geometry.volume([channel.space]) - sum(
        geometry.volume([box]) * (box.low[0] + box.high[0]) / 2 for box in channel.block
    )
    assert (weight * at[..., 0]).mean() == pytest.approx(want / size, rel=0.03)
    assert calm.min() < 0.1
    assert calm.max() == 1


def test_points_on_walls_and_sections(drawn):
    channel, points = drawn
    at, normals, slope, there = points["walls"]
    chip = ((at[..., :2] > channel.chip.low) & (at[..., :2] < channel.chip.high)).all(axis=-1)
    chip &= normals[..., 2] < 0
    assert (slope == np.where(chip, channel.heat, 0)).all()
    assert (at[chip][:, 2] == 0).all()
    # Heat is given off where nothing covers the chip, on 0.72 − 0.42 of it.
    last = slice(-256 // 4, None)
    assert there[:, last].mean() == pytest.approx(1 - 0.42 / 0.72, abs=0.06)
    covered = (np.abs(at[..., 1]) < 0.35) & (at[..., 0] > 0.4) & (at[..., 0] < 1) & chip
    assert not there[covered].any()
    assert there[~covered & (at[..., 0] > 0.01)].mean() > 0.97
    at, fluid = points["sections"]
    assert (at[..., 0] == at[..., :1, 0]).all()
    # Where fins are, they take their part of a section of 1.1.
    through = fluid.mean(axis=-1)[(at[..., 0, 0] > 0.52) & (at[..., 0, 0] < 0.88)]
    assert through.mean() == pytest.approx(1 - (0.7 * 0.2 + 0.2 * 0.3 + 0.1 * 0.5) / 1.1, abs=0.01)


@pytest.mark.slow
def test_what_is_off_at_walls_and_through_sections(drawn):
    channel, points = drawn
    points = jax.tree.map(lambda x: jnp.asarray(x[0]), points)
    fields = lambda p: jnp.stack([2 + 0 * p[0], *[0 * p[0]] * 3, 0.5 * p[1] + p[2]])
    walls, sections = points["walls"], points["sections"]
    wrong = walls.normals @ jnp.array([0.0, 0.5, 1.0]) - walls.slope
    got = channels.heat_through_walls(fields, walls, GIVEN)
    assert got == pytest.approx(float(jnp.mean(walls.there * wrong**2)), rel=1e-5)
    got = channels.flow_through_sections(fields, sections, GIVEN)
    open_ = np.asarray(sections.fluid).mean(axis=1)
    assert got == pytest.approx(float(np.mean((2 * open_ - 1) ** 2)), rel=1e-5)


# --- The equations, and finite volumes -------------------------------------------------------


def smooth(point, np=jnp):
    """Fields whose velocity has no divergence."""
    x, y, z = point
    u, v, w = 1 + np.sin(2 * y) * np.cos(z), np.cos(x + z), np.sin(2 * x - y)
    return np.stack([u, v, w, np.sin(x + 2 * y * z), np.cos(x - y + 2 * z)])


def channel_of(**options):
    options = {"viscosity": 0.3, "block": (Box((0.2, -0.1, 0), (0.4, 0.1, 0.2)),), **options}
    return channels.Channel(Box((0, -0.5, 0), (2, 0.5, 1)), **options)


def rates_off(channel, residuals, cells):
    """How far the rates of finite volumes are from those of the residuals, at x > 1 over the
    floor: of u, v, w and T, relative to the largest."""
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
        # Away from walls by more than a cell, and closest to the floor.
        kept = (x > 1.05) & (x < 1.75) & (np.abs(y) < 0.18) & (z > 0.12) & (z < 0.28)
        at.append(np.stack([x, y, z], axis=-1)[kept])
        got.append(rate[kept])
    with jax.enable_x64(True):
        wrong = jax.jit(lambda at: residuals(smooth, at, GIVEN))
        mass, force, heat = wrong(jnp.asarray(np.concatenate(at)))
    assert np.abs(mass).max() < 1e-12
    sizes = np.cumsum([0, *map(len, at)])
    want = [-np.asarray(x)[slice(*sizes[i : i + 2])] for i, x in enumerate((*force, heat))]
    return np.array([np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, want, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fpga_laminar", pytest.param("fpga_zero_equation", marks=SLOW)])
def test_finite_volumes_solve_the_equations_that_are_trained(name, monkeypatch):
    problem = module(name)
    # Eddies with a length that depends on the distance, as large as the viscosity.
    channel = channel_of(mixing=0.5 if name == "fpga_zero_equation" else 0.0)
    monkeypatch.setattr(problem, "CHANNEL", channel)
    residuals = problem.residuals
    if name == "fpga_laminar":
        residuals = lambda fields, at, given: problem.residuals(fields, at, given, nu=0.3)
    coarse, fine = (rates_off(channel, residuals, cells) for cells in (20, 40))
    assert (fine < 2e-3).all()
    assert (coarse > 3 * fine).all()  # of second order


@pytest.mark.slow
def test_the_viscosity_of_eddies_is_differentiated(monkeypatch):
    problem = module("fpga_zero_equation")
    monkeypatch.setattr(problem, "CHANNEL", channel_of(mixing=0.1))

    def nu(point):
        slope = jax.jacfwd(smooth)(point)[:3]
        strain = (slope + slope.T) / 2
        length = channels.mixing_length(problem.CHANNEL, point[None])[0]
        return 0.3 + length**2 * jnp.sqrt(2 * jnp.sum(strain**2) + 1e-6)

    with jax.enable_x64(True):
        at = jax.random.uniform(jax.random.key(3), (8, 3), jnp.float64) + jnp.array([0.7, -0.5, 0])
        d = jax.vmap(problem.mpx.partials(smooth, problem.TERMS, **GIVEN))(at)
        _, value, slopes = problem.viscosity(d, at)
        want, want_slopes = jax.vmap(jax.value_and_grad(nu))(at)
    assert relative(value, want) < 1e-12
    assert relative(slopes.T, want_slopes) < 1e-12
    assert np.abs(want_slopes).max() > 1e-3


def duct(y, z, width, height):
    """u of ∇²u = −1 in a rectangle, |y| ≤ width/2, 0 ≤ z ≤ height, by its Fourier series."""
    n = np.arange(1, 40, 2)[:, None, None] * np.pi / height
    shape = 1 - np.cosh(n * y[:, None]) / np.cosh(n * width / 2)
    return np.sum(4 / height / n**3 * shape * np.sin(n * z), axis=0)


@pytest.mark.slow
def test_a_flow_that_is_fully_developed_is_that_of_a_duct():
    # Over a slab along the whole floor, so that one wall is that of a solid.
    space, slab = Box((0, -0.3, 0), (1.2, 0.3, 0.5)), Box((0, -0.3, 0), (1.2, 0.3, 0.1))
    errors, drops = [], []
    for cells in (10, 20):
        channel = channels.Channel(space, (slab,), viscosity=0.1)
        flow = volumes.steady(channel, cells, 1e-5, sound=3.4)
        u, p = flow["fields"][0], flow["fields"][3]
        assert np.isnan(u[:, :, flow["z"] < 0.1]).all()
        above = flow["z"] > 0.1
        want = duct(flow["y"], flow["z"][above] - 0.1, 0.6, 0.4)
        at = round(0.9 * cells)
        got = u[at][:, above]
        errors.append(relative(got / got.mean(), want / want.mean()))
        steepness = (p[at] - p[at - 1])[:, above].mean() * cells
        drops.append(-steepness / 0.1 * want.mean() / got.mean() - 1)
        assert np.abs(flow["flux"] / flow["flux"][0] - 1).max() < 1e-4
    # What five-point differences on 6 × 4 and 12 × 8 cells of the section are off by themselves.
    assert errors == pytest.approx([0.0497, 0.0172], rel=0.03)
    assert drops == pytest.approx([-0.0987, -0.0292], rel=0.03)


SMALL = channels.Channel(
    Box((0, -0.3, 0), (1.0, 0.3, 0.5)),
    (Box((0.3, -0.1, 0), (0.5, 0.1, 0.2)),),
    viscosity=0.1,
    chip=Box((0.2, -0.2), (0.6, 0.2)),
    heat=2.0,
)


def coarser(flow, by):
    """Means over cells, and NaN where one of them is solid."""
    fields = flow["fields"]
    n = [s // by for s in fields.shape[1:]]
    return fields.reshape(5, n[0], by, n[1], by, n[2], by).mean(axis=(2, 4, 6))


@pytest.mark.slow
def test_flow_and_temperature_converge_and_keep_mass_and_heat():
    channel = SMALL._replace(mixing=0.1)
    flows = {cells: volumes.steady(channel, cells, 1e-7) for cells in (10, 20, 30)}
    fields = {cells: coarser(flow, cells // 10) for cells, flow in flows.items()}
    known = np.isfinite(fields[10]) & np.isfinite(fields[30])
    off = lambda cells: [
        relative(fields[cells][i][known[i]], fields[30][i][known[i]]) for i in range(5)
    ]
    coarse, fine = np.array(off(10)), np.array(off(20))
    # Of first order, as around edges, a quarter.
    assert (fine < 0.4 * coarse).all()
    assert fine[0] < 0.05
    assert fine[4] < 0.05
    for flow in flows.values():
        assert np.abs(flow["flux"] / flow["flux"][0] - 1).max() < 1e-6
        t = flow["fields"][4]
        assert np.nanmin(t) > -0.05
        assert 0.85 < np.nanmax(t) < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_references_keep_mass(name):
    flow = volumes.steady(module(name).CHANNEL, 10)
    assert np.abs(flow["flux"] / flow["flux"][0] - 1).max() < 1e-6
    u, *_, t = flow["fields"]
    # As many cells are solid as the block has, and the fluid is faster beside it.
    solid = np.isnan(u).mean() * geometry.volume([module(name).CHANNEL.space])
    assert solid == pytest.approx(geometry.volume(module(name).CHANNEL.block))
    assert np.nanmean(u[8]) > 1.1 * np.nanmean(u[0])
    assert 0 < np.nanmean(t) < 1
