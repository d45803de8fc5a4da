"""Tests a fixed set of random programs. `python -m tests.programs` runs more of them."""

import re
import zlib

import by_numpy
import jax
import numpy as np
import program_functions as functions
import program_operations as operations
import programs
import pytest
from program_drawing import Drawing, Program, draw_program, finished, inputs_of, short
from program_modes import MODES


# Small programs, for the tests that always run.
FEW = dict.fromkeys(MODES, 0) | {"forward": 2, "sampled": 2}
FEW |= dict.fromkeys(("partials_half", "drop_ins", "scaled", "cast"), 1)
FEW |= dict.fromkeys(("partials", "partials64", "laplacian", "operator"), 3)
del FEW["forward64"]  # takes longer than a second


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
    for k in range(3):
        judged(name, 1, k)


def of_point(*lines, weights=(), q=(0.3, -0.4, 0.5)):
    named = tuple((f"v{i}", text) for i, text in enumerate(lines))
    q = np.float64(np.float32(q))[None]
    return Program("point", {"q": q}, weights, named, named[-1][0])


OPTIONS = {"size": 3, "outputs": 1, "how": "call", "points": 1, "operators": {}, "call": "partials"}
OPTIONS |= {"sums": {"dx": [((0,), 1.0)], "dxx": [((0, 0), 1.0)]}}


def test_a_wrong_derivative_is_found(monkeypatch):
    """The library's derivatives are off by one thousandth in this test."""
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
    """The expression 1e4 + x - 1e4 loses four digits."""
    good = programs.judge(programs.Case("partials", of_point("jnp.sum(jnp.sin(q))"), OPTIONS))
    bad = of_point("jnp.sum(jnp.sin(q))", "v0 + 1e4", "v1 - 1e4", "v2 ** 2")
    bad = programs.judge(programs.Case("partials", bad, OPTIONS))
    assert good.status == bad.status == "ok"
    assert bad.tolerance > 100 * good.tolerance


def test_what_cancels_inside_of_a_statement_is_rounded():
    """The standard deviation of two entries is linear, so its second derivative is a rounding."""
    o = OPTIONS | {"how": "vmap", "drop_in": "jacfwd of jacfwd", "half": ""}
    program = of_point("jnp.std(q)", q=(0.184, 0.118))
    assert programs.judge(programs.Case("drop_ins", program, o)).status == "undecidable"


def test_what_a_half_cannot_hold_is_no_failure():
    """Numbers near 1e-9 vanish in float16, and nothing cancels in float32."""
    weights = (np.full((3, 4), 0.5), np.full(4, 0.5))
    lines = "q @ w[0] + 20.0", "jnp.exp(-v0)", "v1 @ w[1]"
    program = of_point(*lines, weights=weights)
    case = lambda half: programs.Case("partials_half", program, OPTIONS | {"half": half})
    assert programs.judge(case("float16")).status == "undecidable"
    assert programs.judge(case("bfloat16")).status == "ok"


def test_a_rule_that_is_no_derivative_has_the_upper_half_of_a_hessian():
    program = of_point("tilted(q)", "jnp.sum(v0 * q * q)")
    o = OPTIONS | {"how": "vmap", "drop_in": "hessian", "half": ""}
    assert programs.judge(programs.Case("drop_ins", program, o)).status == "ok"


def test_what_is_cast_is_judged_beside_a_cast_by_hand():
    """An offset near 1e4 loses all digits in half, in any implementation."""
    o = {"how": "call", "half": "bfloat16", "gradient": {}}
    inputs = {k: np.zeros(8) for k in "xazty"} | {"table": functions.TABLE}
    inputs["a"] = short(1e4 + np.random.default_rng(0).normal(size=(8, 4)), 2)
    lines = (("v0", "jnp.linalg.norm(a - 1e4, axis=1)"), ("v1", "jnp.sum(w[0] * jnp.tanh(v0))"))
    program = Program("loss", inputs, (np.linspace(-1.0, 2.0, 8),), lines, "v1")
    verdict = programs.judge(programs.Case("cast", program, o))
    assert verdict.status == "undecidable", verdict
    kept = o | {"gradient": {"keep_full": (False, *[True] * 6)}}
    assert programs.judge(programs.Case("cast", program, kept)).status == "ok"


def test_programs_are_reproducible():
    with programs.standard(), jax.enable_x64(True):
        draw = lambda: draw_program(np.random.default_rng(5), MODES["partials"], OPTIONS)
        one, other = draw(), draw()
    assert one.source() == other.source()


# Tests of single operations: derivatives of each order, stacked directions, and losses.
ORDERS = [(), (0,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 2)]
LAPLACIAN = {"size": 10, "over": None, "operators": {"sum": "laplacian"}, "call": "laplacian"}
LAPLACIAN |= {"sums": {"sum": [((i, i), 1.0) for i in range(10)], "d": [((), 1.0)]}}
ALONE = {
    "partials": OPTIONS | {"sums": {f"d{i}": [(dirs, 1.0)] for i, dirs in enumerate(ORDERS)}},
    "laplacian": OPTIONS | LAPLACIAN,
    "forward": {"how": "call", "half": "bfloat16", "gradient": {"forward": "float32"}},
}
TEMPLATES = {name: family for name, (_, family) in operations.FAMILIES.items()}
TEMPLATES["models"] = operations.MODELS


def ending_in(template, name):
    """Yields drawings that end in a statement of this form, with fitting operands."""
    mode, o = MODES[name], ALONE[name]
    for attempt in range(20):
        rng = np.random.default_rng([zlib.crc32(template.encode()), attempt])
        with programs.standard(), jax.enable_x64(True):
            drawing = Drawing(rng, mode.kind, inputs_of(rng, mode.kind, o))
            if mode.kind == "point":
                drawing.add(f"q @ {{W:{o['size']},4}} + {{W:4}}")
                drawing.add("jnp.outer({v}, {u})")
            else:
                drawing.add("jnp.tanh(x @ {W:4,4} + {W:4})")
                drawing.add("jnp.mean({m}, 1)")
            drawing.add("jnp.tanh({a}[0])")
            drawing.add("{v}[0]")
            # Every derivative in `ORDERS` involves `q[0]`. With another entry, all would vanish.
            drawing.pool = [x for x in drawing.pool if x[0] == "v" or x in ("q", "q[0]")]
            rng.shuffle(drawing.pool)
            fits = drawing.add(template)
        if fits:
            yield drawing, rng


def decides(template, name):
    """Returns whether a program ending in the template agrees with float64. None may be wrong."""
    for drawing, rng in ending_in(template, name):
        with programs.standard(), jax.enable_x64(True):
            program = finished(rng, drawing, MODES[name], ALONE[name])
        if program is None:
            continue
        case = programs.Case(name, program, ALONE[name])
        verdict = programs.judge(case)
        # A program that is constant up to rounding decides nothing, as squares of a layer norm.
        wrong = verdict.status == "wrong" and verdict.ratio > 4 and verdict.tolerance < 1
        if verdict.status == "raised" or wrong:
            pytest.fail(programs.shown(case, verdict, template))
        if verdict.status == "ok":
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("partials", family) for family in operations.FAMILIES),
        ("laplacian", "pairs"),
        *(("forward", family) for family in ("weighted", "models")),
    ],
)
def test_each_operation(name, family):
    undecided = [template for template in TEMPLATES[family] if not decides(template, name)]
    # `huber` has a rule for reverse mode only.
    assert undecided == (["huber({v})"] if (name, family) == ("partials", "reductions") else [])


UNUSUAL = r"argmax|argsort|floor|top_k|switch|own|tilted|magnitude|1j|fill|order=|reshape|^logadd"


@pytest.mark.slow
def test_unusual_operations():
    """Tests templates with indices, complex numbers and custom derivatives."""
    found = [t for family in TEMPLATES for t in TEMPLATES[family] if re.search(UNUSUAL, t)]
    for i, template in enumerate(found[:40]):  # templates of one point, not of a batch
        if i % 2 == 0 or "own(" in template:
            assert decides(template, "partials"), template


@pytest.mark.slow
@pytest.mark.parametrize("family", operations.FAMILIES)
def test_numpy_computes_what_jax_does(family):
    """Each operation runs with its derivative, under two `vmap`s."""
    runs, given = {}, {}
    for template in operations.FAMILIES[family][1]:
        drawing, _ = next(ending_in(template, "partials"))
        (name, text), space = drawing.lines[-1], drawing.space
        arrays = {k: space[k] for k in space if re.fullmatch(r"q|w|v\d", k) and k != name}
        value = lambda arrays, text=text, space=space: eval(text, {**space, **arrays})
        slope = lambda arrays, f=value: jax.jvp(f, (arrays,), (arrays,))
        # The custom derivative of `huber` is for reverse mode only.
        runs[template] = jax.vmap(jax.vmap(value if "huber" in text else slope))
        given[template] = jax.tree.map(lambda x: np.stack([np.stack([x, 0.9 * x])] * 2), arrays)
    with programs.standard(), jax.enable_x64(True):
        want = jax.jit(lambda given: {t: run(given[t]) for t, run in runs.items()})(given)
        for template, run in runs.items():
            got = jax.tree.leaves(by_numpy.called(run, given[template]))
            for ours, theirs in zip(got, jax.tree.leaves(want[template]), strict=True):
                # Errors are float64's, of at most one solve.
                np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9, err_msg=template)
