"""The table of modes: requests to the library for a random program, and their plain JAX forms."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from program_rounding import Format, format_of, rounded

import mpx_pde as mpx


COORDS, OUTPUTS = "xyztabcdefghijklm", "uvw"

# Split products and TF32 have their documented accuracy.
UNITS = {name: format_of(name) for name in ("bfloat16", "float16", "float32", "float64")}
UNITS |= {"tensorfloat32": Format(2.0**-11), "bfloat16_x3": Format(2.0**-16)}
FULL = UNITS["float32"]


class Mode(NamedTuple):
    """A request for a random program.

    **Attributes:**

    - `kind`: `"point"` for programs of one point, `"loss"` for losses of a batch.
    - `options`: draws the other random choices.
    - `exact`: the answer in plain JAX, in the precision of its arguments.
    - `library`: the answer of the library, with the same leaves as `exact`'s.
    - `units`: the roundings of full and of half values, and of a model's values if only what is
      kept is half, by the first word of a leaf.
    - `wide`: whether 64-bit types are on.
    """

    kind: str
    options: Callable[[Any], dict]
    exact: Callable[..., dict]
    library: Callable[..., dict]
    units: Callable[[dict], dict[str, tuple[Format, ...]]]
    wide: bool = False


# --- Derivatives ---------------------------------------------------------------------------------

# A sum is written as pairs of directions and factors. A factor in a string is a function of the
# point `p`.


def factor_of(factor):
    return eval(f"lambda p: {factor}", {"jnp": jnp}) if isinstance(factor, str) else factor


def nested(f, directions):
    """Returns the derivative along `directions`, by nested forward mode."""
    for d in directions:
        f = lambda p, f=f, d=d: jax.jvp(f, (p,), (d.astype(p.dtype),))[1]
    return f


def exact_sums(f, p, o):
    """Returns all sums of derivatives at a point, each with an axis of outputs. `turn` rotates the
    order of directions, which matters only for a rule that is not a derivative."""
    eye = jnp.eye(p.size)
    all_dirs = {dirs for s in o["sums"].values() for dirs, _ in s}
    all_dirs = sorted(all_dirs, key=lambda d: (len(d), d))
    turned = lambda d: jnp.roll(d, o.get("turn", 0), axis=0)
    found = {}
    for order, group in itertools.groupby(all_dirs, len):
        group = list(group)
        along = jnp.stack([eye[np.array(d, int)] for d in group])
        values = jax.vmap(lambda d, n=order: nested(f, list(turned(d)) if n else [])(p))(along)
        found |= dict(zip(group, values, strict=True))
    value = lambda x: x(p) if callable(x) else x
    one = lambda dirs, factor: value(factor_of(factor)) * jnp.atleast_1d(found[dirs])
    return {name: sum(one(*pair) for pair in s) for name, s in o["sums"].items()}


def order_of(s):
    return max(len(dirs) for dirs, _ in s)


def named(o, sums):
    """Names leaves by order, so that leaves of one order are compared with each other."""
    return {
        f"order{order_of(o['sums'][name])}/{name}_{OUTPUTS[i]}": x[..., i]
        for name, x in sums.items()
        for i in range(o["outputs"])
    }


def word(dirs, coords):
    return "".join(coords[i] for i in dirs)


def evaluation(f, o, **options):
    """Makes the call of the library that `o` asks for."""
    coords, outputs = COORDS[: o["size"]], OUTPUTS[: o["outputs"]]
    names = {"coords": coords, "outputs": outputs, **options}
    is_term = lambda s: len(s) == 1 and s[0][1] == 1.0
    terms = {
        f"{u}_{word(s[0][0], coords)}".rstrip("_"): f"order{len(s[0][0])}/{name}_{u}"
        for name, s in o["sums"].items()
        if is_term(s) and name not in o["operators"]
        for u in outputs
    }
    translated = dict(terms)
    for name in o["operators"]:
        for u in outputs:
            shown = "lap" if o["call"] == "laplacian" else name
            translated[f"{shown}_{u}"] = f"order{order_of(o['sums'][name])}/{name}_{u}"
    if o["call"] == "partials":
        run = mpx.partials(f, list(terms), **names)
    elif o["call"] == "laplacian":
        over = {} if o["over"] is None else {"over": COORDS[: o["over"]]}
        run = mpx.laplacian(f, list(terms), **names, **over)
    else:
        operators = {
            name: spec
            if isinstance(spec, str)
            else {word(d, coords): factor_of(c) for d, c in spec}
            for name, spec in o["operators"].items()
        }
        sampled = o.get("sampled", {})
        if sampled:
            sampled = {**sampled, "key": jax.random.key(o["key"])}
        run = mpx.linear_operator(f, operators, list(terms), **names, **sampled)
    return lambda p: {translated[k]: x for k, x in run(p).items()}


def combine(values, o):
    """Combines all leaves into one number, for gradients."""
    coefficients = itertools.cycle((1.0, -0.7, 0.4, 1.3))
    parts = [c * x for c, (_, x) in zip(coefficients, sorted(values.items()), strict=False)]
    return jnp.mean(sum(parts) ** 2 if o.get("squared") else sum(parts))


def leaves(tree, name="grad"):
    return {f"{name}/{i}": x for i, x in enumerate(tree)}


def exact_derivatives(f, w, q, o):
    at = lambda w, p: named(o, exact_sums(lambda p: f(w, p), p, o))
    spread = lambda w: jax.vmap(lambda p: at(w, p))(q)
    if o["how"] != "grad":
        return spread(w)
    return leaves(jax.grad(lambda w: combine(spread(w), o))(w))


def spread_by(how, at, q):
    """Evaluates `at` at all points with the transformation `how`, or for `"call"` at the first."""
    if how == "call":
        return jax.tree.map(lambda x: x[None], at(q[0]))
    if how == "scan":
        return lax.scan(lambda c, p: (c, at(p)), 0, q)[1]
    if how == "checkpoint":
        return jax.vmap(jax.checkpoint(at))(q)
    return jax.jit(jax.vmap(at))(q) if how == "jit" else jax.vmap(at)(q)


def library_derivatives(f, w, q, o):
    if o.get("half"):
        w = mpx.cast_tree(w, o["half"])

    def spread(w):
        return spread_by(o["how"], lambda p: evaluation(lambda p: f(w, p), o)(p), q)

    if o["how"] != "grad":
        return spread(w)
    return leaves(jax.grad(lambda w: combine(spread(w), o))(w))


def drop_ins(f, w, q, o):
    """Evaluates `mpx.derivatives.grad`, `jacfwd` and `hessian` in place of JAX's own."""
    return _drop_ins(mpx.derivatives, f, mpx.cast_tree(w, o["half"]) if o["half"] else w, q, o)


def exact_drop_ins(f, w, q, o):
    found = _drop_ins(jax, f, w, q, o)
    if o["drop_in"] not in ("hessian", "jacfwd of jacfwd"):
        return found
    # The library evaluates each entry above the diagonal once. If a rule is not the derivative of
    # any function, the entries below it differ.
    mirrored = lambda x: jnp.triu(x) + jnp.triu(x, 1).swapaxes(-1, -2)
    return {name: mirrored(x) for name, x in found.items()}


def _drop_ins(lib, f, w, q, o):
    g = lambda p: f(w, p)
    run = {
        "grad": lambda: lib.grad(g) if o["outputs"] == 1 else lib.jacfwd(g),
        "jacfwd": lambda: lib.jacfwd(g),
        "hessian": lambda: lib.hessian(g),
        "jacfwd of jacfwd": lambda: lib.jacfwd(lib.jacfwd(g)),
    }[o["drop_in"]]()
    return {f"order/{o['drop_in']}": jax.vmap(run)(q)}


def derivative_units(o):
    half = UNITS[o["half"]] if o.get("half") else FULL
    return {"order": (FULL, half), "grad": (FULL, half)}


def wide_units(o):
    # The judge recognizes a cast to float32 by the dtype.
    return {"order": (UNITS["float64"],) * 2, "grad": (UNITS["float64"],) * 2}


def how(rng, *, grads=True):
    several = ["call", "call", "vmap", "vmap", "jit", "scan", "checkpoint"] + ["grad"] * 2 * grads
    return str(rng.choice(several))


def draw_dirs(rng, size, order):
    return tuple(sorted(int(i) for i in rng.integers(0, size, order)))


def base(rng, size, outputs=1):
    chosen = how(rng)
    points = 1 if chosen == "call" else 2
    return {"size": size, "outputs": outputs, "how": chosen, "points": points, "operators": {}}


def draw_partials(rng, highest=4):
    size = int(rng.integers(1, 6))
    o = base(rng, size, int(rng.choice([1, 1, 1, 2])))
    top = int(rng.choice([1, 2, 2, 3, 4][: highest + 1]))
    orders = [0, *rng.integers(1, top + 1, 3), top]
    chosen = {draw_dirs(rng, size, n) for n in orders}
    return o | {"call": "partials", "sums": {f"d{word(d, COORDS)}": [(d, 1.0)] for d in chosen}}


def draw_half(draw):
    return lambda rng: draw(rng) | {"half": str(rng.choice(["float16", "bfloat16"]))}


def draw_laplacian(rng):
    size = int(rng.choice([2, 3, 5, 8, 9, 10, 16, 17]))
    o = base(rng, size, int(rng.choice([1, 1, 2])))
    over = int(rng.integers(1, size + 1)) if rng.random() < 0.2 else None
    sums = {"sum": [((i, i), 1.0) for i in range(over or size)], "d": [((), 1.0)]}
    if rng.random() < 0.5:
        i = int(rng.integers(0, size))
        sums["dx"] = [((i,), 1.0)]
    return o | {"call": "laplacian", "sums": sums, "operators": {"sum": "laplacian"}, "over": over}


def biharmonic(size):
    pairs = itertools.combinations_with_replacement(range(size), 2)
    return [((i, i, j, j), 1.0 if i == j else 2.0) for i, j in pairs]


def draw_operator(rng):
    if rng.random() < 0.2:
        size = int(rng.integers(1, 4))
        o = base(rng, size)
        sums = {"sum": biharmonic(size), "d": [((), 1.0)]}
        return o | {"call": "operator", "sums": sums, "operators": {"sum": "biharmonic"}}
    size = int(rng.choice([1, 2, 3, 4, 10]))
    o = base(rng, size, int(rng.choice([1, 1, 2])))
    factors = [1.0, -0.5, 0.01, 3.0, "jnp.sin(p[0])", "1.0 + jnp.sum(p**2)"]
    top = int(rng.choice([1, 2, 3]))
    dirs = {draw_dirs(rng, size, int(n)) for n in rng.integers(1, top + 1, 4)}
    if size == 10:
        dirs = {(i, i) for i in range(size)}
    spec = [(d, factors[rng.integers(len(factors))]) for d in sorted(dirs)]
    sums = {"sum": spec, "d": [((), 1.0)]}
    return o | {"call": "operator", "sums": sums, "operators": {"sum": spec}}


def draw_sampled(rng):
    """Draws all coordinates without replacement, or rebuilds the estimator from its key."""
    size, order = int(rng.choice([2, 3, 5, 10])), int(rng.choice([1, 2, 2, 3]))
    o = base(rng, size)
    replace, key = bool(rng.random() < 0.5), int(rng.integers(1000))
    samples = 16 if replace else size
    drawn = np.arange(size)
    if replace:
        one = jax.random.split(jax.random.key(key), 1)[0]
        drawn = np.asarray(jax.random.choice(one, size, (samples,), replace=True))
    counts = np.bincount(drawn, minlength=size) * size / samples
    sums = {"sum": [((i,) * order, float(c)) for i, c in enumerate(counts)], "d": [((), 1.0)]}
    spec = "laplacian" if order == 2 else [((i,) * order, 1.0) for i in range(size)]
    o |= {"call": "operator", "sums": sums, "operators": {"sum": spec}, "key": key}
    return o | {"sampled": {"samples": samples, "replace": replace}}


def draw_drop_ins(rng):
    o = base(rng, int(rng.integers(1, 5)))
    kinds = ["grad", "jacfwd", "hessian", "jacfwd of jacfwd"]
    half = str(rng.choice(["", "", "float16", "bfloat16"]))
    return o | {"how": "vmap", "drop_in": str(rng.choice(kinds)), "half": half}


# --- Gradients of losses of derivatives ----------------------------------------------------------


def value_and_grad(loss, o, scaling=None):
    """Builds the gradient transformation that `o` asks for, with named leaves."""
    policy = f"params=float32,compute={o['half']},output=float32"
    options = {"policy": policy, **o["gradient"]}
    scaling = mpx.DynamicLossScaling(2.0**10) if scaling is None else scaling
    if o.get("micro_batches"):
        run = mpx.filter_accumulated_value_and_grad(loss, scaling, o["micro_batches"], **options)
    else:
        run = mpx.filter_value_and_grad(loss, scaling, **options)

    def call(w, *inputs):
        value, _, finite, grads = run(w, *inputs)
        return {"value": value, "finite": finite, **leaves(grads)}

    if o["how"] == "jit":
        return jax.jit(call)
    if o["how"] == "scan":

        def scanned(w, *inputs):
            return lax.scan(lambda c, _: (c, call(c, *inputs)), w, None, length=1)[1]

        return lambda w, *inputs: jax.tree.map(lambda x: x[0], scanned(w, *inputs))
    return call


def value_and_leaves(loss, w):
    """Returns the value and the gradient, and marks what the backward pass keeps."""
    value, pull = jax.vjp(loss, w)
    pull = jax.tree.map(lambda x: rounded(x, "kept"), pull)
    return {"value": value, **leaves(pull(jnp.ones_like(value))[0])}


def exact_residual(f, w, q, o):
    at = lambda w: jax.vmap(lambda p: named(o, exact_sums(lambda p: f(w, p), p, o)))(q)
    return value_and_leaves(lambda w: combine(at(w), o), w)


def library_residual(f, w, q, o):
    scaling = None
    if o["scaled"]:
        coords = COORDS[: o["size"]]
        orders = [order_of(s) for s in o["sums"].values()]
        names = [
            f"{u}_{word(s[0][0], coords)}"
            for s in o["sums"].values()
            for u in OUTPUTS[: o["outputs"]]
            if s[0][0]
        ]
        derivatives = {
            "per_direction": lambda **k: mpx.DerivativeScaling.per_direction(coords, **k),
            "per_order": lambda **k: mpx.DerivativeScaling.per_order(max(orders), **k),
            "per_term": lambda **k: mpx.DerivativeScaling.per_term(names, **k),
        }[o["scaled"]](init_scale=o["scale"])
        scaling = mpx.Scaling(derivatives=derivatives)

    def loss(w, q, *, derivatives=None):
        run = evaluation(lambda p: f(w, p), o, scaling=derivatives)
        return combine(jax.vmap(run)(q), o)

    return value_and_grad(loss, o, scaling)(w, q)


def draw_step(rng):
    hows, halves = ["call", "call", "jit", "scan"], ["float16", "bfloat16"]
    return {"how": str(rng.choice(hows)), "half": str(rng.choice(halves))}


def residual(rng, gradient, scaled=""):
    """Draws derivatives in a loss. A scale other than 1 shows where one is missing."""
    given = {"points": 4, "squared": True, "scaled": scaled, "gradient": gradient}
    given["scale"] = float(rng.choice([1, 4, 16]))
    if scaled != "per_term" and rng.random() < 0.5:
        other = (draw_laplacian, draw_operator, draw_sampled)[rng.integers(3)]
        return other(rng) | draw_step(rng) | given
    return draw_partials(rng, highest=3) | draw_step(rng) | given


def draw_scaled(rng):
    scaled = str(rng.choice(["per_direction", "per_order", "per_term"]))
    gradient: dict = {"keep_full": (False, True)}
    if rng.random() < 0.5:
        gradient = {"forward": "float32"}
    return residual(rng, gradient, scaled)


def draw_forward_residual(rng):
    return residual(rng, {"forward": str(rng.choice(FORWARDS))})


def draw_accumulated(rng):
    gradient = {"keep_full": (False, True)} if rng.random() < 0.5 else {"forward": "float32"}
    return residual(rng, gradient) | {"micro_batches": 2}


FORWARDS = ["float32", "float32", "bfloat16_x3", "tensorfloat32"]


def forward_units(o):
    half, forward = UNITS[o["half"]], o["gradient"].get("forward")
    if forward is None:
        # At most the data are kept in full.
        data = half if not o["gradient"] else FULL
        return {"value": (data, half), "grad": (data, half)}
    value = UNITS[forward]
    return {"value": (min(FULL, value), value), "grad": (FULL, max(half, value), value)}


# --- Losses --------------------------------------------------------------------------------------


def exact_loss(f, w, *inputs, o):
    return value_and_leaves(lambda w: f(w, *inputs), w)


def library_loss(f, w, *inputs, o):
    return value_and_grad(lambda w, *inputs: f(w, *inputs), o)(w, *inputs)


def draw_loss(gradient):
    return lambda rng: draw_step(rng) | {"gradient": gradient(rng)}


def draw_cast(rng):
    """Draws a cast of everything, or of the model alone, which keeps the six arrays of data."""
    return {"keep_full": (False, *[True] * 6)} if rng.random() < 0.7 else {}


_DERIVATIVES = exact_derivatives, library_derivatives, derivative_units
_RESIDUAL = exact_residual, library_residual, forward_units
_LOSS = exact_loss, library_loss, forward_units
_draw_few = draw_half(lambda rng: draw_partials(rng, highest=3))
_draw_forward = draw_loss(lambda rng: {"forward": str(rng.choice(FORWARDS))})

MODES = {
    "partials": Mode("point", draw_partials, *_DERIVATIVES),
    "partials64": Mode("point", draw_partials, *_DERIVATIVES[:2], wide_units, wide=True),
    "partials_half": Mode("point", _draw_few, *_DERIVATIVES),
    "laplacian": Mode("point", draw_laplacian, *_DERIVATIVES),
    "laplacian_half": Mode("point", draw_half(draw_laplacian), *_DERIVATIVES),
    "operator": Mode("point", draw_operator, *_DERIVATIVES),
    "sampled": Mode("point", draw_sampled, *_DERIVATIVES),
    "drop_ins": Mode("point", draw_drop_ins, exact_drop_ins, drop_ins, derivative_units),
    "scaled": Mode("point", draw_scaled, *_RESIDUAL),
    "forward_residual": Mode("point", draw_forward_residual, *_RESIDUAL),
    "accumulated": Mode("point", draw_accumulated, *_RESIDUAL),
    "forward": Mode("loss", _draw_forward, *_LOSS),
    "forward64": Mode("loss", draw_loss(lambda rng: {"forward": "float64"}), *_LOSS, wide=True),
    "cast": Mode("loss", draw_loss(draw_cast), *_LOSS),
    "autocast": Mode("loss", draw_loss(lambda rng: {"autocast": True}), *_LOSS),
}
