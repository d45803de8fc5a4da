"""Tests mistakes of users, at least one for each public call. Each raises during tracing, with a
message that names the call, what was passed, and how to fix it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpx_pde as mpx


pytestmark = pytest.mark.usefixtures("unchecked_annotations")

KEY = jax.random.key(0)
W, X = jnp.ones(3), jnp.ones((4, 3))
POINT, POINTS = jnp.array([0.3, 0.2]), jnp.ones((4, 2))
FIELD = jnp.ones((2, 8))
SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
NET = {"coords": "xy", "outputs": "u"}
DS, DYNAMIC = mpx.DerivativeScaling, mpx.DynamicLossScaling
SCALING, STATIC, DIRECTIONS = DYNAMIC(4.0), mpx.StaticLossScaling(2.0), DS.per_direction("xt")
TWO = {"a": {"x": 1.0}, "a_b": {"y": 1.0}}
BOTH, YY = mpx.Scaling(derivatives=DIRECTIONS), {"a": {"yy": 1.0}}
mean, select, scaled, einsum = mpx.all_reduce_mean, mpx.select_tree, mpx.scaled, mpx.mixed_einsum
LADDER, LM, derivatives = mpx.PrecisionLadder, mpx.LevenbergMarquardt, mpx.derivatives
d_grad, ranges = derivatives.grad, mpx.range_report
advise, search, find = mpx.advise, mpx.line_search_value, mpx.initial_scaling
explain, gather = mpx.explain_nonfinite, mpx.gather_parameters
FULL, by_axis = mpx.FullPrecision, DS.per_direction
X1, U_X1 = {"coords": ["x1", "x2"]}, DS.per_order(2, terms=["u_x1"])
EVERYWHERE = NamedSharding(jax.make_mesh((1,), ("i",)), PartitionSpec())


def net(p):
    return jnp.sin(p[0]) * jnp.exp(p[1])


def total(w, *rest, **kwargs):
    return jnp.sum(w)


def mlp(**options):
    return mpx.nn.CoordinateMLP(2, 1, 8, 1, **{"key": KEY, **options})


def trained(**options):
    return mpx.as_trained(mlp(), **options)


def fno(modes=2, **options):
    return mpx.nn.FNO(2, 1, 4, 1, modes, **{"key": KEY, **options})


def conv(modes=2, **options):
    return mpx.nn.SpectralConv(2, 1, modes, key=KEY, **options)


def matmul(x, y, dtype="float16"):
    return mpx.mixed_matmul(x, y, dtype=dtype)


def convolved(x=X, dtype="float16"):
    return mpx.mixed_conv_general_dilated(x, X, (), "VALID", dtype=dtype)


def stuck(scaling, skips=3, tree=W):
    return mpx.error_if_stuck(tree, scaling, max_consecutive_skips=skips)


def update(state, optimizer=ADAM, model=W, grads=W, **options):
    return mpx.optimizer_update(model, optimizer, state, grads, True, **options)


def half_update(state=None, **options):
    w = W.astype("bfloat16")
    return update(SGD.init(w) if state is None else state, SGD, w, w, **options)


def scale_by(optimizer, scaling, **options):
    return mpx.contrib.scale_by_loss_scaling(optimizer, scaling, **options)


def reduced(dtype):
    return jax.vmap(lambda w: mean(w, "i", dtype=dtype), axis_name="i")(X)


def searched(value_fn):
    optimizer = scale_by(optax.lbfgs(), STATIC)
    return optimizer.update(W, optimizer.init(W), W, value=1.0, grad=W, value_fn=value_fn)


def partials(terms, fun=net, **options):
    return mpx.partials(fun, terms, **{**NET, **options})


def laplacian(fun=net, **options):
    return mpx.laplacian(fun, **NET, **options)


def jvp(scale, primals=(POINT,), tangents=(POINT,)):
    return mpx.scaled_jvp(net, primals, tangents, scale)


def operator(spec, **options):
    return mpx.linear_operator(net, spec, **{**NET, **options})


def pair(w, x):
    return w, x


def fitted(state=None, residual=lambda w, x: w * x, batch=W):
    optimizer = LM(residual)
    return optimizer.update(W, optimizer.init(W) if state is None else state, batch)


def accumulated(func, scaling, *args, n=2, **kwargs):
    return mpx.filter_accumulated_value_and_grad(func, scaling, n, *args, **kwargs)


def accumulate(*args, n=2, in_axes=0, **kwargs):
    return accumulated(total, SCALING, n=n, in_axes=in_axes)(W, *args, **kwargs)


def grad(loss=total, scaling=SCALING, **options):
    return mpx.filter_grad(loss, scaling, **options)(W)


def climb(rung, **options):
    return LADDER(("half", rung)).update(0, total, SCALING, **options)


def floor(**options):
    return mpx.precision_floor(total, SCALING, **options)


GRADIENTS = mpx.filter_grad(total, SCALING), mpx.filter_value_and_grad(total, SCALING)
TREE = {"w": W, "b": jnp.ones(2), "n": jnp.arange(2), "f": jnp.tanh}
FLOATS = eqx.filter(TREE, eqx.is_inexact_array)


def needs_derivatives(w, *, derivatives):
    raise AssertionError


def update_tree(optimizer=SGD, **grads):
    return update(SGD.init(FLOATS), optimizer, TREE, {**FLOATS, **grads})


HALVES = ["float16", jnp.bfloat16, np.dtype("float16")]
NO_HALVES = ["float32", "float64", "float8_e4m3fn", "int8", "", None, 16, jnp.float32]

# Parts of a message, in any order, and the call that raises it. A call may take several values,
# each of which makes it wrong.

TYPE_ERRORS = {
    # Losses.
    "real floating-point … complex64": lambda: grad(lambda w: jnp.sum(w.astype(complex))),
    "scalar loss … tuple … pass `has_aux=True`": lambda: grad(lambda w: (jnp.sum(w), w)),
    "`filter_grad` … real floating-point scalar": lambda: grad(lambda w: (w, None), has_aux=True),
    "`scaled` … returns `(loss, aux)` … leave `has_aux` out": lambda: scaled(sum, SCALING, True)(W),
    # Gradients.
    "`filter_grad` … `scaling` … DynamicLossScaling() … 32768.0": lambda: grad(total, 2.0**15),
    "`scaled` needs a loss scaling as `scaling`": lambda: scaled(total, DYNAMIC),
    '`filter_grad` … jmp.Policy … "params=float32 … float16': lambda: grad(policy=jnp.float16),
    "`filter_grad` … has none … Pass the model first": lambda: GRADIENTS[0]({"n": W.astype(int)}),
    "`filter_grad` … bool as `has_aux` … 'bfloat16'": lambda: grad(has_aux="bfloat16"),
    "`use_mixed_precision` … `policy` … 'half'": lambda: grad(use_mixed_precision="half"),
    "`filter_grad` … name of a mesh axis … 3": lambda: grad(axis_name=3),
    "`loss`, its first argument … `Scaling(derivatives=…)`": lambda: mpx.Scaling(DIRECTIONS),
    "as `loss` … but got 3": lambda: mpx.Scaling(3),
    "`Scaling`": (lambda x: mpx.Scaling(**{x: mlp()}), ["loss", "derivatives"]),
    "`Scaling` needs a derivative scaling": lambda: mpx.Scaling(),
    "`filter_grad`": lambda: mpx.filter_grad(total, DIRECTIONS),
    "`derivatives` … takes none … plain loss scaling": lambda: mpx.filter_grad(pair, BOTH),
    "`filter_grad` … with a `Scaling` alone … per_direction": lambda: grad(needs_derivatives),
    "needs a loss scaling … mpx_pde.Scaling(derivatives=...)": lambda: grad(total, DIRECTIONS),
    "passes `derivatives`": lambda: mpx.filter_grad(total, BOTH)(W, derivatives=None),
    "`as_trained` takes bools": lambda: trained(keep_full=3),
    "`refined` takes a function": lambda: mpx.refined(1.0),
    "precision_report(fun)(*args)": lambda: mpx.precision_report(W),
    "`range_report` … 3": lambda: ranges(3),
    "cannot be called inside of": lambda: jax.jit(ranges(jnp.sin))(W),
    "`autocast` … 3": lambda: mpx.autocast(3),
    "takes a bool as `autocast`": lambda: grad(autocast={"dtype": "float16"}),
    "explain_nonfinite(mpx_pde.filter_grad(loss, scaling)": lambda: explain(jnp.sin, SCALING),
    "takes names of primitives": lambda: mpx.autocast(jnp.sin, full=jnp.exp),
    "`line_search_value` takes a loss function first": lambda: search(1.0, None),
    "`line_search_value` needs a loss scaling": lambda: search(total, None),
    "`line_search_value` … `policy`": lambda: search(total, SCALING, policy=1.0),
    "`line_search_value` … real floating-point scalar": lambda: search(jnp.sin, SCALING)(W),
    "`initial_scaling` … inside of `jax.jit`": lambda: jax.jit(find(total, SCALING))(W),
    "`initial_scaling` differentiates with respect to": lambda: find(total, SCALING)(),
    "`advise` takes a loss function first": lambda: advise(3),
    "the loss itself, but got a gradient of it": (advise, GRADIENTS),
    "`advise(loss, ...)(model, batch)`": lambda: advise(total, W, X),
    "`advise` … inside of `jax.jit`": lambda: jax.jit(lambda x: advise(total)(W, x).width)(X),
    "needs a function that returns a real floating-point": lambda: advise(jnp.sin)(W),
    "differentiates with respect to the first positional": lambda: advise(total)(),
    # Arguments that are missing, and those of another call.
    "missing … 'scaling'. Write … DynamicLossScaling()": (
        lambda call: getattr(mpx, call)(total),
        ["filter_grad", "filter_value_and_grad", "initial_scaling", "line_search_value"],
    ),
    "`filter_accumulated_value_and_grad` … (loss, scaling, micro_batches)": lambda: (
        mpx.filter_accumulated_value_and_grad(total)
    ),
    "`partials` … 'coords'. Write … coords='tx', outputs='u'": lambda: mpx.partials(net, ["u"]),
    "`laplacian` … 'outputs'. Write": lambda: mpx.laplacian(net, coords="xy"),
    "`linear_operator` … 'operators'. Write": lambda: mpx.linear_operator(net, coords="xy"),
    "too many … Write … filter_grad(loss, scaling))(model, batch)": (
        lambda call: call(GRADIENTS[0], W, X),
        [explain, ranges, mpx.precision_report],
    ),
    "`optimizer_update` … Write … grads_finite)": lambda: mpx.optimizer_update(W),
    "compile it by `eqx.filter_jit`": lambda: jax.jit(GRADIENTS[0])(
        eqx.nn.MLP(1, 1, 1, 1, key=KEY)
    ),
    # Casts.
    "`force_full_precision` … a function … 3": lambda: mpx.force_full_precision(3),
    "`FullPrecision` … callable layer … or one floating-point array, but got %r": (FULL, [None, 3]),
    "`FullPrecision` around an array is read by … `value`": lambda: FULL(W)(1.0),
    # Products.
    "real floating-point": lambda: matmul(X, jnp.ones((3, 3), int)),
    "imaginary": lambda: matmul(X, jnp.ones((3, 3), jnp.complex64)),
    "string": lambda: einsum(X, X, dtype="float16"),
    "mixed_matmul … contracts": (lambda x: matmul(X, x), [X, X[0, 0]]),
    "broadcasts": lambda: matmul(jnp.ones((3, 3, 3)), jnp.ones((2, 3, 3))),
    "mixed_dot_general … contracting": (
        lambda x: mpx.mixed_dot_general(X[:3], X[:3, :2], x, dtype="float16"),
        [
            None,
            ((1,), (0,)),
            ((1, 0), ((), (0,))),  # a batch axis of one alone
            (((1, 1), (0, 0)), ((), ())),  # twice
            (((1,), (0,)), ((1,), (0,))),  # contracted and of the batch
            (((1,), (1,)), ((), ())),  # of sizes 3 and 2
        ],
    ),
    "`mixed_conv_general_dilated` … int32": lambda: convolved(x=X.astype(int)),
    # Optimizers and collectives.
    "optax.adam(1e-3) … `optimizer` … function adam": lambda: update_tree(optax.adam),
    "`optimizer_update` got … 'masters'. Write `master`": lambda: half_update(masters="kahan"),
    "`optimizer_update` … key of `jax.random` … 0": lambda: half_update(master="stochastic", key=0),
    "from the parameters … 'scale'": lambda: scale_by(ADAM, SCALING, scale_in_params="scale"),
    "Pass its `loss`": lambda: scale_by(SGD, BOTH),
    "cannot unscale `value_fn` … mpx_pde.line_search_value": lambda: searched(jnp.sum),
    "`gather_parameters` needs a `jax.sharding": lambda: gather(X, PartitionSpec()),
    # Derivatives.
    "`DerivativeScaling.per_direction` … nothing in between … 'x, t'": lambda: by_axis("x, t"),
    "the coordinates … ''": lambda: partials(["u"], coords=""),
    "list of names … got 3": (lambda x: x(3), [partials, DS.per_term]),
    "`partials` … floating-point … int32": lambda: partials(["u"])(jnp.arange(2)),
    "2 coordinates x, y, but got 2 arguments … stack": lambda: partials(["u"])(1.0, 2.0),
    "2 coordinates x, y, but got {'x': 1.0} … stack": lambda: partials(["u"])({"x": 1.0}),
    "`partials` … (w, x) … lambda point: fun(point[0]": lambda: partials(["u"], pair),
    "`laplacian` … (w, x) … lambda point: fun(point[0]": lambda: laplacian(pair),
    "`linear_operator` … {}": lambda: operator({}),
    "`linear_operator` takes one key … as `key` … got %r": (
        lambda x: operator({"op": "laplacian"}, samples=1, key=x),
        [None, 3],
    ),
    "`laplacian` … `over`": lambda: laplacian(over=""),
    "`partials`": lambda: partials(["u"], scaling=mlp()),
    "`DerivativeScaling` … got a `Scaling`": lambda: partials(["u"], scaling=BOTH),
    "unknown options speed": lambda: DS.per_order(2, speed=1),
    "`scaled_vjp` … shape": lambda: mpx.scaled_vjp(jnp.sin, W, scale=jnp.ones(2)),
    "`grad` … floating-point … argument 1 is int32": lambda: d_grad(jnp.multiply, (0, 1))(3.0, 2),
    "`telemetry` … `DerivativeScaling`": lambda: derivatives.telemetry(mpx.NoOpLossScaling()),
    **{
        f"`{name}` … {says}": lambda f=name, n=n, x=x: getattr(derivatives, f)(total, n)(x)
        for name in ("grad", "jacfwd", "jacrev", "hessian")
        for n, x, says in (((), W, "`argnums`"), (0, W[:0], "shape (0,)"))
    },
    "`grad` differentiates a function that returns a scalar": lambda: d_grad(jnp.sin)(POINT),
    "`grad` … an array of shape (2,). `jacfwd`": lambda: d_grad(d_grad(net))(POINT),
    "`grad` with `has_aux=True` … (output, aux)": lambda: d_grad(total, has_aux=True)(W),
    "`grad` … `grad` that returns a pair … `has_aux=True`": lambda: d_grad(
        d_grad(total, has_aux=True)
    ),
    "argument 0 is an array of shape (4, 2) … jax.vmap": lambda: derivatives.hessian(net)(POINTS),
    "argument 0 is a CoordinateMLP": lambda: d_grad(lambda m, x: m(x))(mlp(), POINT),
    "positions of arguments": lambda: d_grad(net, -1),
    "positional argument 2": lambda: d_grad(jnp.multiply, 2)(W[0], W[0]),
    "`DerivativeScaling` as `scaling`": lambda: d_grad(net, scaling=DYNAMIC()),
    "`scaled_jvp` … `primals` as a tuple … `(x,)`": lambda: jvp(2.0, POINT, POINT),
    "`scaled_jvp` … int32 … float32": lambda: jvp(2.0, (jnp.arange(2),)),
    "`DerivativeScaling` is made by … per_direction": lambda: DS("xt"),
    "floating-point or complex outputs, … int32": lambda: partials(["u_x"], jnp.argmax)(POINT),
    # Networks.
    "`CoordinateMLP` … jax.random.key(0)": lambda: mlp(key=None),
    "`FNO` … jax.random.key(0)": lambda: fno(key=0),
    "`Ansatz` … `form` … (u)": lambda: mpx.nn.Ansatz(net, lambda u: u),
    "`Ansatz` … `network`": lambda: mpx.nn.Ansatz(1.0, total),
    "`safe` takes an elementwise function … `fun`, but got": lambda: mpx.nn.safe(3),
    "`FNO` … bool as `grid_embedding` … 'grid'": lambda: fno(grid_embedding="grid"),
    "`FNO` … `remat=False` … 'all'": lambda: fno(remat="all"),
    "`FNO` … complex64": lambda: fno()(FIELD.astype(complex)),
    "`SpectralConv` … complex64 … channels": lambda: conv()(FIELD.astype(complex)),
    "`SpectralConv` … int32 … Cast it to float32": lambda: conv()(FIELD.astype(int)),
    # Ladders, floors, counters, files.
    "`PrecisionLadder` … `say` … 'print'": lambda: LADDER(say="print"),
    "Python integer": lambda: LADDER().update(jnp.zeros(()), total, None),
    "`PrecisionLadder.update` … inside of `jax.jit`": lambda: jax.jit(
        lambda x: LADDER().update(500, total, SCALING)(W, x).index
    )(X),
    "`PrecisionLadder` … filter_jit": lambda: jax.jit(lambda x: jnp.zeros(len(x.rung)))(LADDER()),
    "`PrecisionFloor.verdict` … traced … `reached`": lambda: jax.jit(
        lambda w: len(floor(micro_batches=1)(w, X).verdict)
    )(W),
    "`precision_floor` differentiates … Pass the model first": lambda: floor()(),
    "`error_if_stuck` … `tree` with an array … None": lambda: stuck(SCALING, tree=None),
    "`error_if_stuck` needs a scaling that counts": (stuck, [mpx.NoOpLossScaling(), STATIC]),
    "`check_scaling_options` … `saved`": lambda: mpx.check_scaling_options(SCALING, SCALING),
    "`filter_grad` returns a function … mpx_pde.filter_grad(...)(model, batch)": lambda: list(
        mpx.filter_grad(total, SCALING)
    ),
    "`partials` returns a function of one point … jax.vmap(terms)(points)['u_x']": lambda: partials(
        ["u_x"]
    )["u_x"],
    "`CoordinateMLP` … jnp.tanh … `activation` … 'tanh'": lambda: mlp(activation="tanh"),
    "`FNO` … jnp.tanh … `activation` … 'gelu'": lambda: fno(activation="gelu"),
    "Points.__call__() … 'key'": lambda: mpx.Points(0, 1, 4)(net),
    # Levenberg–Marquardt.
    "takes a function of the model": lambda: LM(3),
    "`solver` … lineax … 3": lambda: LM(total, solver=3),
    "`LevenbergMarquardt.update` … `state` … init(model)": lambda: fitted(state={"w": W}),
    "`LevenbergMarquardt.update` … returned tuple … Stack several": lambda: fitted(residual=pair),
}

VALUE_ERRORS = {
    # Gradients.
    "policy 'compute=float17' … \"params=float32": lambda: grad(policy="compute=float17"),
    "`filter_grad` … `axis_name='devices'` … leave it out": lambda: grad(axis_name="devices"),
    "`all_reduce_mean` … float16": (reduced, [*NO_HALVES[1:4], 3]),
    "`all_reduce_mean` … `axis_name='devices'` … `jax.shard_map`": lambda: mean(W, "devices"),
    "`filter_accumulated_value_and_grad` … no array … by position": lambda: accumulate(x=POINTS),
    "`micro_batches` … 0": lambda: accumulate(X, n=0),
    "[0]['x'] … 3 micro-batches … 4 entries along axis 0": lambda: accumulate({"x": X}, n=3),
    "axis 2 … (4, 3)": lambda: accumulate(X, in_axes=2),
    "prefix of the 2 positional … (0, 0, None)": lambda: accumulate(X, X, in_axes=(0, 0, None)),
    "'half', … `forward`, but got %r": (lambda x: grad(forward=x), ["float8", "float16", None]),
    '"half", in the compute dtype of `policy`': (lambda x: grad(forward=x), HALVES),
    "`filter_grad` … float64 … jax_enable_x64": lambda: grad(forward="float64"),
    "`precision_floor` … float64 … jax_enable_x64": lambda: floor(use_mixed_precision=False),
    "`PrecisionLadder` … float64 … jax_enable_x64": lambda: LADDER(("half", "float64")),
    "overrides of `autocast` or": lambda: grad(autocast={"full": "x"}, forward="float32"),
    "`line_search_value` … `forward`": lambda: search(total, SCALING, forward="half?"),
    "`refined` takes float16 or bfloat16": lambda: mpx.refined(total, dtype="float32"),
    "`as_trained` cannot read the policy": lambda: trained(policy="half please"),
    "`as_trained(policy=…)` … int8": lambda: trained(policy=jmp.Policy(*3 * [jnp.int8])),
    "`as_trained` takes 'half', … as `forward`": lambda: trained(forward="float8"),
    "float16, bfloat16 or the name of a split product": lambda: mpx.autocast(jnp.sin, "float32"),
    "takes float16 or bfloat16": lambda: explain(jnp.sin, "float32"),
    # Scalers.
    "`DynamicLossScaling` … integer … `period`": (lambda x: DYNAMIC(period=x), [2.5, 0.5, 2**31]),
    "power of two above 1 as `factor` … got %r": (lambda x: DYNAMIC(factor=x), [1, 0.5, 3, 1.5]),
    "`DynamicLossScaling` … `counter` … %r": (lambda x: DYNAMIC(counter=x), [-1, 1.5, "a", 2**31]),
    "between `min_loss_scaling` … 0.25": lambda: DYNAMIC(0.25, min_loss_scaling=1),
    "between `min_loss_scaling` … 8.0": lambda: DYNAMIC(8.0, max_loss_scaling=4.0),
    "`max_consecutive_skips`": (lambda x: stuck(SCALING, x), [0, -1, 2.5, True]),
    # Casts.
    "got bfloat16 and float16": lambda: mpx.mixed_matmul(W.astype("float16"), W.astype("bfloat16")),
    "`set_half_precision_datatype` … float16": (mpx.set_half_precision_datatype, NO_HALVES),
    "`half_precision` … bfloat16": (lambda x: mpx.half_precision(x).__enter__(), NO_HALVES),
    "`cast_tree` needs a real floating-point dtype": lambda: mpx.cast_tree(W, None),
    "`FullPrecision` needs a": lambda: FULL(eqx.nn.Identity(), out_dtype="halve"),
    # Products.
    "mixed_matmul … int32": lambda: matmul(X, X.T, dtype="int32"),
    "which is not a dtype": lambda: matmul(X, X.T, dtype="halve"),
    "number of operands, 1": lambda: einsum("ij,jk->ik", X, dtype="float16"),
    "number of indices": lambda: einsum("ijk->i", X, dtype="float16"),
    "did not appear": lambda: einsum("ij,jk->il", X, X.T, dtype="float16"),
    "`mixed_einsum` … shapes (4, 3), (4, 3) … does not match": lambda: einsum("ij,jk", X, X),
    "`mixed_einsum` … '...i,...->...' … does not match": lambda: einsum("...i,...->...", X, W[:2]),
    "needs a real floating-point dtype": lambda: convolved(dtype="int8"),
    # Trees.
    "`select_tree` … structure … at ['b'] it has nothing": lambda: select(True, {"a": W}, {"b": W}),
    "`select_tree` … the root … same shape … float32[3] … float32[4,3]": lambda: select(True, W, X),
    # Optimizers and collectives.
    "same structure … ['b'] it has None … `eqx.combine`": lambda: update_tree(b=None),
    "same structure … ['n']": lambda: update_tree(n=jnp.ones(2)),
    "a node differs … list … tuple": lambda: update(SGD.init((W,)), SGD, (W,), [W]),
    "['b'] … (2, 1) … (2,) … of this model": lambda: update_tree(b=jnp.ones((2, 1))),
    "`optimizer_state` … [0].count … optimizer.init(": lambda: update(SGD.init(W)),
    "[0].mu it has float32[1] … should be float32[3]": lambda: update(ADAM.init(jnp.ones(1))),
    "`optimizer_update` takes 'nearest', … got 'up'": lambda: half_update(master="up"),
    "half-precision parameters … stochastic": lambda: update(SGD.init(W), SGD, master="stochastic"),
    "half-precision parameters … kahan": lambda: update(SGD.init(W), SGD, master="kahan"),
    "with residues": lambda: half_update(mpx.compensated(SGD.init(W), W)),
    "needs `scale_in_params`": lambda: scale_by(SGD, SCALING),
    "needs a float32 scalar": lambda: scale_by(SGD, SCALING, scale_in_params=lambda p: p).init(W),
    "found no spectral convolution": lambda: mpx.contrib.convert_spectral_layers(mlp()),
    "`gather_parameters` takes float16 or bfloat16": lambda: gather(X, EVERYWHERE, dtype="float32"),
    # Derivatives.
    "`partials` … at least one term": lambda: partials(iter(())),
    "`linear_operator` … {} for 'a'": lambda: operator({"a": {}}),
    "can read 'xx' as two different sequences … x, xx": (
        lambda call: call(["x", "xx"]),
        [by_axis, lambda names: partials(["u"], coords=names)],
    ),
    "can read 'abab' as two": lambda: by_axis(["a", "ab", "bab", "c"]),
    "`grad` got the names 'x' and 'y' for one coordinate": lambda: d_grad(
        d_grad(jnp.sin, coords="x"), coords="y"
    )(W[0]),
    "`DerivativeScaling.per_direction` got 'x' twice": lambda: by_axis("xx"),
    "positive, finite number as `max_scale`": lambda: by_axis("xt", max_scale=-1),
    "`max_scale` … mapping … x, t … {'x': 1}": lambda: by_axis("xt", max_scale={"x": 1}),
    "`DerivativeScaling.per_order` … integer as `order`": lambda: DS.per_order(0),
    "`DerivativeScaling.per_order` … power of two": lambda: DS.per_order(2, factor=3),
    "`init_scale` … 2^16 outside": lambda: DS.per_order(2, init_scale=2.0**16),
    "'nu_x', but got 'cap'": lambda: DS.per_order(2, special={"nu_x": {"cap": 1}}),
    "`DerivativeScaling.per_term` … 'u_x' twice": lambda: DS.per_term(["u_x", "u_x"]),
    "`DerivativeScaling.per_term` … ['u']": lambda: DS.per_term(["u"]),
    "`partials` … 'z' in the term 'u_z' … coordinates are x, y": lambda: partials(["u_z"]),
    "`partials` … 'w' of the term %r": (lambda x: partials([x]), ["w_x", "w"]),
    "`partials` … 'u_x' twice": lambda: partials(["u_x", "u_x"]),
    "'u_x' … an output and as a derivative of 'u'": lambda: partials(["u_x"], outputs=["u", "u_x"]),
    "`linear_operator` … 'a_b_u' twice": lambda: operator(TWO, outputs=["b_u", "u"]),
    "`partials` got 'x' twice": lambda: partials(["u_x"], coords="xx"),
    "'u_xx' is of order 2 … up to 1 … `DerivativeScaling.per_": (
        lambda x: partials(["u_xx"], scaling=x),
        [DS.per_order(1), by_axis("xy", order=1)],
    ),
    "no scaler … 'u_y' … knows u_x": lambda: partials(["u_y"], scaling=DS.per_term(["u_x"])),
    "`partials` … each of `outputs`, u, … (2,) … (1,)": lambda: partials(["u"], jnp.sin)(POINT),
    "`partials` … one point … (4, 2) … `jax.vmap`": lambda: partials(["u"])(POINTS),
    "`laplacian` got 'x' twice … `over`": lambda: laplacian(over="xx"),
    "`laplacian` cannot sum over 'z'": lambda: laplacian(over="xz"),
    "Laplacian … 'laplacian'": lambda: laplacian(scaling=DS.per_term(["u_x"])),
    "t, e, m, p … write `outputs=['temp']`": lambda: partials(["temp_x"], outputs="temp"),
    "`linear_operator` … 'xx', not 'u_xx'": lambda: operator({"a": {"u_xx": 1.0}}),
    "`linear_operator` … has no scale for 'y'": lambda: operator(YY, scaling=by_axis("x")),
    # A factor with several entries would give one entry to each output.
    "`linear_operator` multiplies … in the operator 'op'": (
        lambda x: operator({"op": {"x": x}})(POINT),
        ["b", None, 1j, W, W[:1], lambda p: p],
    ),
    "`scaled_jvp` … 2^-126 to 2^126 … %r": (lambda x: jvp(x), [2.0**127, 2.0**-130]),
    "`scaled_jvp` … power of two": lambda: jvp(3.0),
    "`partials` … 'lap' … `laplacian` returns 'lap_u' without being asked": lambda: partials(
        "lap_u"
    ),
    "`optimizer_update` … tuple of 3 … scaling, grads_finite, grads = ": lambda: update(
        ADAM.init(W), grads=mpx.filter_grad(total, SCALING)(W)
    ),
    "`autocast` … `dtype`, but got a `CoordinateMLP`": lambda: mpx.autocast(total, mlp()),
    "one step or more, as `history`, but got []": lambda: derivatives.plot([]),
    "the term 'u_x1' … as `coords`": lambda: partials(["u_x1"], scaling=U_X1, **X1),
    "`DerivativeScaling.per_order` … 'u_z' … the coordinates x1, x2": lambda: DS.per_order(
        2, terms=["u_z"], **X1
    ),
    "`scaled_jvp` … [0] … (3,) … (2,)": lambda: jvp(2.0, tangents=(W,)),
    "of 2 coordinates in `argnums` has the names of 3": lambda: d_grad(net, coords="xyz")(POINT),
    "`DerivativeScaling.adjust` … (15, 66)": lambda: DIRECTIONS.adjust(W),
    "`DerivativeScaling.with_exponents` … x, t … [1]": lambda: DIRECTIONS.with_exponents([1]),
    # Networks.
    "`CoordinateMLP` … (64, 1.0)": (
        lambda x: mlp(fourier_features=x),
        [(0, 1.0), (8, "a"), (1.0, 64), 16],
    ),
    "`CoordinateMLP` … {0: 2.0}": (lambda x: mlp(periodic=x), [2.0, {0: float("inf")}, {"x": 1.0}]),
    "`periodic` … 2 coordinates": lambda: mlp(periodic={2: 1.0}),
    "`width_size`": lambda: mpx.nn.CoordinateMLP(2, 1, 0, 1, key=KEY),
    # It takes neither the first coordinates nor the first point of a batch.
    "`CoordinateMLP` takes one point … 2 coordinates … %r … `jax.vmap`": (
        lambda x: mlp()(jnp.ones(x)),
        [(3,), (5, 2), ()],
    ),
    "`SpectralConv` … modes": (lambda x: conv(x), [None, (4.0,), (4, 0), (4, 4, 4, 4)]),
    "`SpectralConv` … 'dft' … 'svd'": lambda: conv(method="svd"),
    "`SpectralConv` … 'tanh' … 'relu'": lambda: conv(stabilizer="relu"),
    "`SpectralConv` … 'cp' … 'tucker'": lambda: conv(factorization="tucker"),
    "`SpectralConv` … `rank` … 1.5": lambda: conv(factorization="cp", rank=1.5),
    "`SpectralConv` … `in_channels` … 0": lambda: mpx.nn.SpectralConv(0, 1, 2, key=KEY),
    "`SpectralConv` … (6, 6) … (12, 5) … finer": lambda: conv((6, 6))(jnp.ones((2, 12, 5))),
    "`SpectralConv` … [2 channels … (3, 8)": lambda: conv()(jnp.ones((3, 8))),
    "`SpectralConv` … 1 spatial ax … `jax.vmap`": lambda: conv()(jnp.ones((1, 2, 8))),
    "`SpectralConv` … `output_shape` … %r": (
        lambda x: conv(4)(FIELD, output_shape=x),
        ["a", -8, (8, 8), (2,)],
    ),
    "`soft_clip` … stabilizer=soft_clip(4.0)": lambda: conv(stabilizer=mpx.nn.soft_clip)(FIELD),
    "`soft_clip` … 0": lambda: mpx.nn.soft_clip(0),
    "`FNO` … `mlp_ratio`": (lambda x: fno(mlp_ratio=x), [-1, "a", float("inf")]),
    "`FNO` … fraction … 8/64": lambda: fno(domain_padding=8),
    "`FNO` … `domain_padding` … 2 axes": lambda: fno((2, 2), domain_padding=(0.1, 0.1, 0.1)),
    "`FNO` … `domain_padding`": lambda: fno(domain_padding=-1.0),
    "`FNO` … `hidden_channels`": lambda: mpx.nn.FNO(2, 1, 0, 1, 2, key=KEY),
    "`FNO` … `modes`": lambda: fno(()),
    "`FNO` … 2 channels … `jax.vmap`": lambda: fno()(jnp.ones((3, 2, 8))),
    "`SpectralConv` … finer grid": lambda: fno(6)(jnp.ones((2, 4))),
    # Ladders, floors, reports.
    "`PrecisionLadder` … number as `tolerance`": (lambda x: LADDER(tolerance=x), [float("nan"), 0]),
    "positive integer as `interval`": lambda: LADDER(interval=0.5),
    "'half', 'tensorfloat32' … as `rungs`, but got 'float8'": lambda: LADDER(("half", "float8")),
    "'half', which follows 'float32' … ('half', 'float32')": lambda: LADDER(("float32", "half")),
    "not above it": lambda: LADDER(("half", "half")),
    "tuple of names": (lambda x: LADDER(x), ["half", (), 3]),
    # These raise at the first step, not hundreds of steps later.
    "its rung, 'half', … `forward='float32'`": lambda: climb("full", forward="float32"),
    "`use_mixed_precision=False`": lambda: climb("full", use_mixed_precision=False),
    "'full' (the compute dtype of `policy`": lambda: climb("float32", policy="float32"),
    "tolerance": lambda: climb("full", tolerance=0.0),
    "`precision_floor` takes 'half', … as `against`": lambda: floor(against="float8"),
    "compares 'float32' with a precision": lambda: floor(forward="float32", against="half"),
    "positive integer as `micro_batches`": lambda: floor(micro_batches=0),
    "number as `tolerance`": (lambda x: floor(tolerance=x), [-1.0, 0, True, np.inf, np.nan]),
    "`RangeReport` … 'float16' … 'float32'": lambda: ranges(jnp.sin)(W).first_overflow("float32"),
    # Levenberg–Marquardt.
    "`damping`": (lambda x: LM(total, damping=x), ["a", 0.0]),
    "`acceleration`": lambda: LM(total, acceleration=-1.0),
    "`refinements` >= 0": lambda: LM(total, refinements=-1),
    "as `forward`": lambda: LM(total, forward="half"),
    "no wider": lambda: LM(total, jacobian="float64"),
    "64-bit": lambda: LM(total, forward="float64"),
    "floating-point arrays": lambda: LM(total).init({}),
    "`LevenbergMarquardt.init` … complex": lambda: LM(total).init(W.astype(complex)),
    "`LevenbergMarquardt.update` … 12 parameters … 3 … order": lambda: fitted(LM(total).init(X)),
    "`LevenbergMarquardt.update` … at least one example": lambda: fitted(batch=W[:0]),
    "`LevenbergMarquardt.update` … ('i',) … AxisType.Auto": lambda: fitted(
        batch=jax.device_put(W, NamedSharding(EVERYWHERE.mesh, PartitionSpec("i")))
    ),
    "a leading axis of one length": lambda: fitted(batch=((W, X),)),
    "a tuple with the examples of each of the 2 residuals": lambda: fitted(residual=(total, total)),
    "each of the 2 residuals as `batches`, but got float32[4, 3]": lambda: jax.jit(
        lambda x: fitted(residual=(total, total), batch=x)
    )(X),
}


@pytest.mark.parametrize(
    ("error", "says"),
    [*((TypeError, says) for says in TYPE_ERRORS), *((ValueError, says) for says in VALUE_ERRORS)],
)
def test_mistakes_are_named(error, says):
    call = (TYPE_ERRORS if error is TypeError else VALUE_ERRORS)[says]
    call, values = call if isinstance(call, tuple) else (lambda _, call=call: call(), [None])
    for x in values:
        with pytest.raises(error) as caught:
            call(x)
        # Excludes a subclass, which JAX would have raised somewhere below.
        assert type(caught.value) is error
        for part in says.replace("%r", repr(x)).split(" … "):
            assert part in str(caught.value), str(caught.value)
        assert len(str(caught.value)) < 500  # not a whole object
