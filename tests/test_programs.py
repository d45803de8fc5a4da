"""A fixed set of random programs; `python -m tests.programs` runs more of them."""

import functools as ft

import by_numpy
import jax
import numpy as np
import program_operations as operations
import programs
import pytest
from program_modes import MODES


# Small programs, for the tests that always run.
FEW = {
    "partials": 3,
    "partials64": 3,
    "partials_half": 1,
    "laplacian": 3,
    "laplacian_half": 0,
    "operator": 3,
    "sampled": 2,
    "drop_ins": 1,
    "scaled": 1,
    "forward_residual": 0,
    "accumulated": 0,
    "forward": 2,
    "cast": 1,
    "autocast": 0,
}


def judged(name, seed, k):
    case, verdict, _ = programs.drawn(name, seed, k)
    assert case is not None
    if verdict.failed:
        pytest.fail(programs.shown(case, verdict, f"seed {seed} program {k}"))


@pytest.mark.parametrize(("name", "k"), FEW.items())
def test_programs(name, k):
    judged(name, 0, k)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODES))
def test_many_programs(name):
    for k in range(10):
        judged(name, 1, k)


def of_point(*lines, weights=(), q=(0.3, -0.4, 0.5)):
    named = tuple((f"v{i}", text) for i, text in enumerate(lines))
    q = np.float64(np.float32(q))[None]
    return programs.Program("point", {"q": q}, weights, named, named[-1][0])


OPTIONS = {
    "size": 3,
    "outputs": 1,
    "how": "call",
    "points": 1,
    "operators": {},
    "call": "partials",
    "sums": {"dx": [((0,), 1.0)], "dxx": [((0, 0), 1.0)]},
}


def test_a_wrong_derivative_is_found(monkeypatch):
    """A custom rule that is off by one thousandth, in the library's run alone."""
    case = programs.Case("partials", of_point("jnp.sum(jnp.tanh(q))"), OPTIONS)
    assert programs.judge(case).status == "ok"
    library = MODES["partials"].library

    def wrong(*args, o):
        return {k: x * (1 + 1e-3) for k, x in library(*args, o=o).items()}

    monkeypatch.setitem(MODES, "partials", MODES["partials"]._replace(library=wrong))
    verdict = programs.judge(case)
    assert verdict.status == "wrong"
    assert verdict.error == pytest.approx(1e-3, rel=0.01)


def test_the_tolerance_follows_the_condition():
    """1e4 + x - 1e4 loses four digits."""
    good = programs.judge(programs.Case("partials", of_point("jnp.sum(jnp.sin(q))"), OPTIONS))
    bad = of_point("jnp.sum(jnp.sin(q))", "v0 + 1e4", "v1 - 1e4", "v2 ** 2")
    bad = programs.judge(programs.Case("partials", bad, OPTIONS))
    assert good.status == bad.status == "ok"
    assert bad.tolerance > 100 * good.tolerance


def test_programs_are_reproducible():
    with programs.standard(), jax.enable_x64(True):
        one, other = (
            programs.draw_program(np.random.default_rng(5), MODES["partials"], OPTIONS)
            for _ in range(2)
        )
    assert one.source() == other.source()


def drawn_templates():
    """Each template with a program that ends in it; `None` where it fits no operands."""
    rng = np.random.default_rng(0)
    for _, family in operations.FAMILIES.values():
        for template in family:
            drawing = programs.Drawing(rng, "point", {"q": rng.uniform(0.2, 0.9, (1, 3))})
            drawing.add("jnp.outer({v}, {u})")
            drawing.add("{v} + 0.3")
            found = any(drawing.add(template) for _ in range(6))
            yield template, drawing if found else None


@pytest.mark.slow
def test_all_templates_are_drawn():
    """Each template fits some operands: none is dead."""
    with programs.standard(), jax.enable_x64(True):
        assert [template for template, drawing in drawn_templates() if drawing is None] == []


@pytest.mark.slow
def test_numpy_computes_what_jax_does():
    """Each operation with its derivative, under two `vmap`s."""
    with programs.standard(), jax.enable_x64(True):
        for template, drawing in drawn_templates():
            assert drawing is not None
            space, text = drawing.space, drawing.lines[-1][1]
            arrays = {k: space[k] for k in ("q", "v0", "v1", "w") if k in space}
            value = lambda arrays, text=text, space=space: eval(text, {**space, **arrays})
            slope = lambda arrays, f=value: jax.jvp(f, (arrays,), (arrays,))
            # A derivative of its own that is for reverse mode alone.
            slope = value if "huber" in text else slope
            several = jax.tree.map(lambda x: np.stack([np.stack([x, 0.9 * x])] * 2), arrays)
            run = jax.vmap(jax.vmap(slope))
            got, want = (
                jax.tree.leaves(f(several))
                for f in (ft.partial(by_numpy.called, run), jax.jit(run))
            )
            for ours, theirs in zip(got, want, strict=True):
                # float64, by a solve at most.
                np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9, err_msg=template)
