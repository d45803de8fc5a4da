"""Statements of random programs, as people write them.

In a template `{x}` is any array, `{a}` one with axes, `{b}` one of the shape of the first operand,
`{s}` a scalar, `{v}` a vector, `{u}` a vector of the same length, `{m}` a matrix. `{n}` and `{l}`
are the first and the last size of the first operand. `{i}` is an index below `{n}`, `{c}` a number,
and `{W:n,4}` a new weight of that shape. `{t}` is a threshold near the size of the first operand,
which may lie within one rounding to half of an entry. No input has the name of a function's
parameter. The functions that statements call are in `program_functions`.
"""


def _lines(text):
    return [line for line in text.strip().splitlines() if line]


# --- Templates -----------------------------------------------------------------------------------

ELEMENTWISE = """
jnp.tanh({x})
jnp.sin({c} * {x})
jnp.cos({x} + {c})
jnp.exp(-({x} ** 2))
jnp.exp({x} / 4)
jnp.log(1.5 + {x} ** 2)
jnp.log1p({x} * {x})
jnp.sqrt(1 + {x} ** 2)
jnp.cbrt(2 + jnp.sin({x}))
{x} ** 2
{x} ** 3
lax.integer_pow({x}, 5)
jnp.power(2 + jnp.sin({x}), 1.5)
2.0 ** {x}
1 / (1 + {x} ** 2)
jnp.where(jnp.abs({x}) < 1e-3, 1.0, jnp.sin({x}) / {x})
jnp.maximum({x}, 0.1 * {x})
jnp.clip({x}, -1, 1)
{x} - jnp.floor({x})
jnp.mod({x}, 1.0)
jnp.arctan({x})
jnp.arcsinh({x})
jnp.hypot({x}, 1.0)
jnp.logaddexp({x}, 0.0)
jnp.sinc({x})
jnp.square(jnp.tan({x} / 4))
jnp.cosh({x} / 2)
jax.nn.gelu({x})
jax.nn.gelu({x}, approximate=False)
jax.nn.silu({x})
jax.nn.softplus({x})
jax.nn.relu({x}) ** 2
jax.nn.elu({x})
jax.nn.leaky_relu({x})
jax.nn.mish({x})
jax.nn.sigmoid({x})
jax.nn.selu({x})
jax.scipy.special.ndtr({x})
swish({x})
newton({x})
jax.jit(lambda e: jnp.sin(e) * e)({x})
jax.checkpoint(lambda e: jnp.tanh(e) * e)({x})
{x}.astype(jnp.float32)
jnp.asarray({x}) * np.float32(0.5)
-{x}
{x} - {c}
{x} * {c}
{c} / (2 + jnp.sin({x}))
{x} * lax.stop_gradient({x})
jnp.exp2({x} / 2)
jnp.log2(1.5 + {x} ** 2)
jnp.arcsin(jnp.tanh({x}) / 1.5)
jnp.arccos(jnp.sin({x}) / 1.5)
jnp.arctanh(jnp.tanh({x}) / 2)
jnp.arccosh(2 + {x} ** 2)
jnp.sinh({x} / 2)
lax.erfc({x})
jax.scipy.special.erfinv(jnp.tanh({x}) / 2)
jax.scipy.special.gammaln(2 + {x} ** 2)
jax.scipy.special.entr(1 + {x} ** 2)
jax.scipy.special.i0e({x})
jax.scipy.special.log_ndtr({x})
jnp.float_power(2 + jnp.sin({x}), 0.3)
jnp.copysign({x}, -1.0)
jnp.modf({x})[0]
jnp.round({x}, 1) * {x}
jax.nn.celu({x})
jax.nn.sparse_plus({x})
jnp.select([{x} > 1, {x} > 0], [{x} ** 2, jnp.sin({x})], 0.1 * {x})
jnp.piecewise({x}, [{x} < 0], [lambda e: e**2, lambda e: 0.3 * e])
jnp.exp(1j * {x}).imag
jnp.abs({x} + 0.3j)
jnp.angle({x} + 1j)
(({x} + 1j) ** 2).imag
jnp.real(1 / ({x} + 1j))
lax.reduce_precision({x}, 11, 52)
lax.optimization_barrier({x})
lax.clamp(-0.5, {x}, 0.5)
lax.igamma(2.0, 1 + {x} ** 2)
halved({x})
magnitude({x} + 1j)
lax.stop_gradient(newton({x})) * {x}
jnp.real(jnp.sin({x} + 0j) * jnp.sin({x} / 2j + 0.3))
"""

PAIRS = """
{x} + {b}
{x} - {b}
{x} * {b}
{x} / (1 + {b} ** 2)
jnp.where({x} > {b}, {x}, {b} ** 2)
jnp.maximum({x}, {b})
jnp.logaddexp({x}, {b})
jnp.power(1 + {x} ** 2, jnp.tanh({b}))
jnp.hypot({x}, 1 + {b})
jnp.arctan2({x}, 1 + {b} ** 2)
jnp.fmod({x}, 1 + {b} ** 2)
jnp.copysign({x}, {b})
jnp.ldexp({x}, 2) / (4 + {b} ** 2)
lax.clamp(-jnp.abs({b}), {x}, jnp.abs({b}))
jax.jvp(jnp.sin, ({x},), ({b},))[1]
({x} + 1j * {b}).imag * {x}
jnp.abs({x} + 1j * (1 + {b} ** 2))
(({x} + 1j) / (2 + 1j * {b})).real
lax.cond(jnp.sum({x}) > jnp.sum({b}), lambda e, f: e * f, lambda e, f: e - f, {x}, {b})
logaddexp({x}, {b})
magnitude({x} + 1j * {b})
jnp.abs(jnp.exp(({x} * 2j - {b}) / 2)) * jnp.cos({x})
jnp.imag((1j * {x} + {b}) ** 3)
"""

SCALARS_AND_ARRAYS = """
{s} * {a}
{a} + {s}
(1 - {s}) * {a}
jnp.where({s} > 0, {a}, -{a})
jnp.maximum({a}, {s})
{s} ** jnp.arange(4)
{s} * jnp.arange(4)
jnp.array([{s}, {s} ** 2, 1.0])
jnp.full(4, {s}) * jnp.linspace(0.0, 1.0, 4)
{v}.at[{i}].set({s})
{v}.at[{i}].add({s})
{v}.at[{i}].multiply({s})
lax.cond({s} > 0, jnp.sin, jnp.tanh, {a})
lax.switch(jnp.clip(jnp.floor(4 * {s}).astype(int), 0, 2), [jnp.sin, jnp.cos, jnp.tanh], {a})
lax.fori_loop(0, 3, lambda i, h: jnp.sin(h + {s}), {a})
lax.dynamic_slice({v}, (jnp.floor(3 * {s}).astype(int),), (2,))
{v}[jnp.clip(jnp.floor(3 * {s}).astype(int), 0, 1)]
lax.dynamic_update_slice({v}, {s}[None], (1,))
jax.vmap(lambda e: jnp.sin({s} * e))({v})
jnp.stack([{s}, {s} * {s}, jnp.sin({s})])
fourier({s})
jnp.where(jnp.arange({n}) < 2, {s}, {v})
jnp.polyval({v}, {s} / 2)
jnp.heaviside({s}, 0.5) * {a}
jnp.clip({a}, {s}, {s} + 1)
{s} - {a} / (2 + {s} ** 2)
(2 + jnp.sin({a})) ** {s}
(1 + {s} ** 2) ** {a}
jnp.arctan2({s}, 2 + {a} ** 2)
jnp.logaddexp({a}, {s})
jnp.hypot({a}, {s} + 2)
jnp.mod({a}, 1 + {s} ** 2)
{v}.at[{i}].max({s})
{v}.at[{i}].divide(1 + {s} ** 2)
{v}.at[jnp.argmax({v})].set({s})
{v}.at[1:].add({s})
jnp.insert({v}, 1, {s})
jnp.append({s}, {v})
jnp.vander(jnp.stack([{s}, {s} ** 2]), 3)
lax.dynamic_update_slice({v}, {s}[None], (jnp.floor(2 * jnp.abs({s})).astype(int),))
lax.dynamic_index_in_dim({v}, jnp.floor(2 * jnp.abs({s})).astype(int), keepdims=False)
lax.scan(lambda c, i: (0.5 * c + {s} * i, jnp.sin(c)), {a}, jnp.arange(3.0))[1].sum(0)
lax.scan(lambda c, e: (c * {s}, c + e), {s}, {v}, reverse=True)[1]
jax.vmap(lambda e: lax.cond(e > {s}, jnp.sin, lambda f: f * {s}, e))({v})
jax.vmap(jax.grad(lambda e: jnp.sin(e * {s}) * e))({v})
jax.grad(lambda s: jnp.sum(jnp.tanh(s * {a})))({s})
jnp.array([0.3, -1.0, 2.0])[jnp.digitize({s}, jnp.array([-0.5, 0.5]))] * {a}
jnp.exp(1j * {s}).real * {a}
{s} / (2 + jnp.sin({a}))
jnp.sum({a} ** 2) * jnp.sin({s}) + {a}
jnp.array([1.0, 2.0, 0.5])[jnp.clip(jnp.floor(3 * jnp.abs({s})).astype(int), 0, 2)] * {s}
jnp.linalg.solve(3 * jnp.eye({n}) + jnp.sin({s}) * jnp.ones({n})[:, None] / 4, {v})
"""

REDUCTIONS = """
jnp.sum({a})
jnp.mean({a})
jnp.var({a})
jnp.std({a})
jnp.max({a})
jnp.prod(jnp.cos({v}))
jnp.linalg.norm({v})
jnp.linalg.norm({v} - jnp.ones({n}))
jnp.sum(({m} - jnp.zeros_like({m})) ** 2)
jax.nn.logsumexp({v})
{v} @ {u}
{v}[{i}]
{v}[jnp.argmax(jnp.abs({v}))]
jnp.median({v})
huber({v})
jnp.linalg.det(positive({m}))
jnp.var({v}, ddof=1)
jnp.var(2 * {m}, axis=(0, 1))
jnp.std(1e2 + {v})
jnp.linalg.norm({m})
jnp.sum({v}, where={v} > 0)
jnp.mean({v}, where=jnp.arange({n}) > 0)
jnp.ptp({v})
jnp.quantile({v}, 0.3)
jnp.nanmean({v})
jnp.max({m}, axis=(0, 1))
jax.scipy.special.logsumexp({v}, b=0.5 + {u} ** 2)
jax.nn.one_hot(jnp.argmax({v}), {n}) @ {v}
jnp.linalg.eigvalsh(positive({m}))[-1]
"""

VECTORS = """
jax.nn.softmax({v})
jax.nn.log_softmax({v})
jnp.cumsum({v})
jnp.cumprod(jnp.cos({v}))
lax.cummax({v})
jnp.sort({v})
{v}[jnp.argsort({v})]
jnp.take_along_axis({v}, jnp.argsort({u}), 0)
lax.top_k({v}, 2)[0]
{v}[::-1]
{v}[1:] - {v}[:-1]
jnp.pad({v}, 1)
{v}[:2]
layer_norm({v})
rms_norm({v})
{v} / jnp.linalg.norm({v})
{v} / (1e-3 + jnp.max(jnp.abs({v})))
eqx.nn.LayerNorm({n})({v})
eqx.nn.RMSNorm({n})({v})
recurrence({v})
running({v})
mixing({v})
lax.associative_scan(jnp.add, {v})
jnp.convolve({v}, jnp.array([0.25, 0.5, 0.25]), mode="same")
jnp.fft.rfft({v}).real
jnp.fft.irfft(jnp.fft.rfft({v}) * 0.5, {n})
{v} - lax.stop_gradient(jnp.max({v}))
{v}.at[0].set(0.0)
{v}.at[jnp.array([0, 1])].add({u}[:2])
jnp.interp({v}, jnp.linspace(-2.0, 2.0, 5), jnp.array([0.0, 1.0, 0.5, -1.0, 2.0]))
lax.cumsum({v}, reverse=True)
lax.cumlogsumexp({v})
lax.cummin({v})
lax.sort(({v}, {u}), num_keys=1)[1]
jnp.zeros({n}).at[jnp.argsort({v})].set({u})
jnp.take({v}, jnp.clip(jnp.floor(3 * {u}).astype(int), 0, 1))
{v}[jnp.searchsorted(jnp.linspace(-1.0, 1.0, {n} - 1), {u})]
jax.ops.segment_sum({v}, jnp.arange({n}) % 2, 2)
jax.ops.segment_max({v}, jnp.arange({n}) % 2, 2)
lax.reduce_window({v}, 0.0, lax.add, (2,), (1,), "VALID")
lax.reduce_window({v}, -jnp.inf, lax.max, (2,), (1,), "VALID")
eqx.nn.AvgPool1d(2)({v}[None])
eqx.nn.MaxPool1d(2)({v}[None])
jax.nn.standardize({v})
eqx.nn.LayerNorm({n})(1e2 + {v})
jnp.gradient({v})
jnp.kron({v}, {u}[:2])
jnp.fft.fft({v}).imag
jnp.fft.ifft(jnp.fft.fft({v}) ** 2).real
jnp.abs(jnp.fft.fft({v}) + 1)
jnp.convolve({v}, {u})
jnp.correlate({v}, {u}, mode="same")
jax.grad(lambda e: jnp.sum(jnp.sin(e) ** 2))({v})
jax.jacfwd(lambda e: e * jnp.sum(e))({v}) @ {u}
lax.associative_scan(jnp.maximum, {v})
lax.associative_scan(lambda d, b: d * b, jnp.cos({v}), reverse=True)
jnp.array_split({v}, 2)[0]
lax.scan(lambda c, e: (jnp.where(e > 0, c + e, c), c), 0.0, {v})[1]
centred({v})
tilted({v})
own(lambda v: lax.fori_loop(0, 2, lambda _, f: jnp.roll(f, 1) + f, v))({v})
own(lambda v: lax.cond(jnp.sum(v) > 0, lambda f: f[::-1], lambda f: f, v))({v})
own(reversed_sums)({v})
own(jax.jit(jnp.cumsum))({v})
own(jax.jit(jnp.sin))({v})
{v}.at[jnp.array([0, 99])].get(mode="fill", fill_value=3.0)
{v} / (1 + jnp.sum(({v} - jnp.sum({v}) / 3) ** 2))
lax.reshape(jnp.stack([{v}, {u}]), (2 * {n},), (1, 0))
lax.scan(lambda c, _: (jnp.sin(c), c), {v}, None, 0)[0]
{v} + lax.scan(lambda c, e: (c * e, c), {v}, jnp.ones(0))[0]
jnp.zeros({n}).at[jnp.argmax({v})].set({v}[0] ** 2) + {v}
lax.dynamic_update_slice({v}, {u}[:1] ** 2, (jnp.argmax({v}),))
lax.switch(jnp.argmax({v}) % 2, [lambda v: v**2, lambda v: jnp.sin(v)], {v})
"""

MATRICES = """
jnp.outer({v}, {u})
jnp.stack([{v}, {u}])
jnp.tile({v}, (2, 1))
{m}.T
{m} @ {m}.T
jnp.sum({m}, 0)
jnp.mean({m}, 1)
jnp.max({m}, 0)
{m}[0]
{m}[:, 0]
jnp.einsum("ij,ij->i", {m}, {m})
jax.nn.softmax({m}, -1)
jax.vmap(layer_norm)({m})
jnp.cumsum({m}, 1)
jnp.linalg.solve(positive({m}), {m}[0])
jnp.linalg.inv(positive({m}))
jnp.linalg.cholesky(positive({m}))
jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(positive({m})), {m}[0], lower=True)
jnp.take_along_axis({m}, jnp.argmax({m}, 1)[:, None], 1)[:, 0]
jnp.concatenate([{m}, jnp.sin({m})], 1)
eqx.nn.GroupNorm(1, {n})({m})
lax.scan(lambda c, e: (jnp.tanh(c + e), jnp.sum(c * e)), {m}[0], {m})[1]
lax.dot_general({m}, {m}, (((1,), (1,)), ((), ())))
jnp.ravel({m}, order="F")
jnp.stack([{v}, {u}]).reshape({n}, 2, order="F")
jax.vmap(lambda e: e[:, None].reshape(-1), 1)(jnp.stack([{m}, {m}]))
jnp.diagonal({m})
jnp.triu({m})
jnp.rot90({m})
{m}.at[0].set({m}[1])
{m}.at[:, 0].add(1.0)
{m}[:, jnp.argsort({m}[0])]
{m}[jnp.argmax({m}[:, 0])]
jnp.var({m}, 1, keepdims=True) * {m}
jnp.std({m}, 0)
jnp.cov({m})
jnp.linalg.qr(positive({m}))[1]
jax.scipy.linalg.expm(positive({m}) / 4)
jnp.einsum("ij,kj,k->i", {m}, {m}, {m}[:, 0])
lax.conv_general_dilated({m}[None], {m}[:, None, :1], (1,), "SAME", feature_group_count={n})[0]
jnp.sum(jnp.where({m} > 0, {m}, 0.0), 1)
jnp.cumsum({m}, 0)
jnp.sort({m}, 0)
lax.top_k({m}, 1)[0][:, 0]
jax.vmap(lambda r: lax.scan(lambda c, e: (0.5 * c + e, c), 0.0, r)[1])({m})
lax.scan(lambda c, e: (c, eqx.nn.LayerNorm({l})(e + c)), {m}[0], {m})[1]
lax.map(lambda r: jax.nn.softmax(r), {m})
jnp.fft.fft2({m}).real
jax.vmap(halved)({m})
jax.vmap(lambda r: lax.stop_gradient(halved(r)) * r)({m})
{m} / (1 + jnp.sum(({m} - jnp.mean({m}, 0, keepdims=True)) ** 2, 1, keepdims=True))
({m} - jnp.mean({m})) / (0.1 + jnp.var({m}, 0, keepdims=True))
lax.reduce({m}, 0.0, lambda d, b: d + b * 1.0, (1,))
"""

WEIGHTED = """
{v} @ {W:n,8}
{W:8,n} @ {v}
jnp.tanh({v} @ {W:n,8} + {W:8})
jax.nn.gelu({v} @ {W:n,8} + {W:8})
jax.nn.softplus({v} @ {W:n,4})
{v} + jnp.tanh({v} @ {W:n,n})
jnp.einsum("i,kij->kj", {v}, {W:2,n,4})
{v} @ {W:n}
{x} * {W:1}[0]
jnp.exp({W:n} * {v} / 4)
layers({v}, {W:3,n,n})
residual({v}, {W:2,n,n})
jax.vmap(lambda k: k @ {v})({W:4,n})
lax.map(lambda k: jnp.tanh(k @ {v}), {W:3,n})
linear({v}, {W:4,n}, {W:4})
convolution({v}, {W:2,1,3})
jnp.tanh({m} @ {W:l,4} + {W:4})
jax.vmap(lambda e: jnp.tanh({W:4,l} @ e))({m})
attention({m}, {W:l,l}, {W:l,l}, {W:l,l}, {W:l,l})
jnp.einsum("ij,ijk->k", {m}, {W:n,l,4})
jnp.einsum("nk,nk->n", hermite({v}), {W:n,4})
jax.checkpoint(lambda h, k: jnp.tanh(h @ k))({v}, {W:n,8})
eqx.nn.PReLU()({v}) * {W:n}
jax.grad(lambda e: jnp.sum(jnp.tanh({W:4,n} @ e)))({v})
jax.jvp(lambda e: jnp.tanh({W:4,n} @ e), ({v},), ({u},))[1]
lax.scan(lambda h, e: (jnp.tanh({W:4,4} @ h + e), h[0]), jnp.zeros(4), {v})[1]
jnp.einsum("i,ij,j->", {v}, {W:n,n}, {v})
{W:n,4}[jnp.argmax({v})]
jax.nn.glu({v} @ {W:n,8})
jax.nn.softmax({v} @ {W:n,4} / {c})
jnp.matmul({m}, {W:2,l,4}).sum(0)
lax.dot_general({W:2,n,4}, {W:2,4}, (((2,), (1,)), ((0,), (0,)))) @ {v}
stopped_layers({v}, {W:2,n,n})
jax.checkpoint(lambda v, k: jnp.tanh(k @ v) + lax.stop_gradient(newton(v)) * v)({v}, {W:n,n})
shifted_layers({v}, {W:n,n})
one_of_two({v}, {W:n,n})
(lambda k: jax.checkpoint(lambda k, v: v @ (k / jnp.linalg.norm(k) + 1))(k, {v}))({W:n,n})
"""

DECISIONS = """
jnp.where({x} > {t}, {x} ** 2, jnp.sin({x}))
jnp.where({x} - {t} > 0, 3 * {x}, {x})
jnp.maximum({x}, {t}) * {x}
jnp.minimum({x} - {t}, 0.0) + {x}
jnp.sign({x} - {t}) * {x}
jnp.heaviside({x} - {t}, 0.5) + {x} ** 2
jnp.clip({x}, {t}, {t} + 0.5) * {x}
jax.nn.relu({x} - {t})
jnp.abs({x} - {t}) * jnp.cos({x})
({x} >= {t}) * {x}
lax.select({x} < {t}, {x} * 2, jnp.tanh({x}))
jnp.where(jnp.tanh({x}) > jnp.tanh({t}), 2 * {x}, {x})
jnp.where({x} + {b} > {t} + {b}, {x} * {b}, {x})
lax.cond({s} > {t}, jnp.sin, lambda e: 3 * e, {s})
jnp.floor({x} - {t}) + {x} ** 2
own(lambda e: jnp.where(e > {t}, 2 * e, e))({x})
jax.checkpoint(lambda e: jnp.where(e - {t} > 0, 2 * e, jnp.tanh(e)))({x})
thresholded({v}, {W:n,n}, {t})
jnp.where({v} > {t}, {v} @ {W:n,n}, {v})
jnp.sum(jnp.where({m} > {t}, {m} ** 2, 0.0), 1)
"""

# Weights that are made of parameters and of something else, skips in loops, products of two
# networks, networks that are called twice, and energies.
MADE = """
{v} @ jnp.tril({W:n,n})
{v} @ ({W:n,n} + jnp.eye({n}))
{v} @ ({W:n,n} * (jnp.arange({n}) % 2))
(lambda k: {v} @ (k + k.T))({W:n,n})
{v} @ ({W:n,2} @ {W:2,n})
{v} @ jnp.concatenate([{W:n,4}, {W:n,2}], 1)
{v} @ jnp.concatenate([{W:n,4}, jnp.ones(({n}, 2))], 1)
{v} @ jnp.pad({W:n,3}, ((0, 0), (0, 2)))
(lambda k: {v} @ (k / jnp.linalg.norm(k)))({W:n,8})
{v} @ (jnp.exp({W:8} / 2) * {W:n,8})
(lambda k: {v} @ (k - jnp.mean(k, 0)))({W:n,8})
{v} @ jnp.zeros(({n}, {n})).at[0].set({W:n})
(lambda k: {v} @ jnp.where(k > 0, k, 0.1 * k))({W:n,8})
jnp.tanh({m} @ (jnp.triu({W:l,l}) + 0.5))
(lambda k: {v} @ (k / jnp.sqrt(jnp.sum(k**2, 0) + 1e-3)))({W:n,8})
skipping({v}, {W:n,n}, 0.1)
skipping({v}, {W:n,n}, 0.01)
leaking({v}, {W:n,n}, {W:1}[0])
gated({v}, {W:n,n}, {W:n,n})
unrolled({v}, {W:3,n,n})
(lambda f: f({v}) * jnp.sin(f({v})))(lambda h: jnp.tanh(h @ {W:n,8}))
(lambda f: f({v}) + jax.grad(lambda h: jnp.sum(f(h)))({v}))(lambda h: jnp.tanh(h @ {W:n,n}))
(lambda f: jax.jvp(f, ({v},), (jnp.sin({v}),))[1] + f({v}))(lambda h: jnp.tanh(h @ {W:n,n}))
calling_twice({v}, {W:n,n})
energy(jnp.tanh({v} @ {W:n,n})) * {v}
lax.scan(lambda h, k: (h + 0.1 * jnp.tanh(h @ k), None), {v}, {W:4,n,n})[0]
jnp.tanh({v} @ {W:n,4}) @ jnp.tanh({u} @ {W:n,4})
jnp.tanh({v} @ {W:n,4}) * jnp.sin({u} @ {W:n,4})
jnp.outer(jnp.tanh({v} @ {W:n,4}), jnp.tanh({u} @ {W:n,3}))
jnp.tanh({m} @ {W:l,4}) @ jnp.tanh({m} @ {W:l,4}).T
jnp.einsum("ip,jp,p->ij", jnp.tanh({m} @ {W:l,4}), {m} @ {W:l,4}, {W:4})
jnp.sum(jnp.tanh({m} @ {W:l,4}) * jnp.tanh({m} @ {W:l,4}), 1)
jax.vmap(lambda e: jnp.tanh({W:4,l} @ e) @ jnp.sin({W:4,l} @ e))({m})
"""

# Common preparations of a batch for a model. `a` lies near 1e4, `z` near 1e-3, and `t` in [0, 1],
# half of the time within 1e-2.
PREPARATIONS = _lines("""
a - 1e4
(a - 1e4) / 2
(a - jnp.mean(a, 0)) / jnp.std(a, 0)
a / 1e4
1e3 * z
jnp.log(z)
z / jnp.linalg.norm(z)
jnp.diff(t) * 1000
jnp.diff(t * 1000) / 2
jnp.sin(2 * jnp.pi * t)
jnp.stack([jnp.sin(k * jnp.pi * t) for k in (1, 4, 32)], 1)
jnp.sin(t[:, None] * 2.0 ** jnp.arange(4))
jnp.sin(2 * jnp.pi * t[:, None] * 2.0 ** jnp.arange(6))
table[jnp.floor(t * 512).astype(int)]
table[(t * 512).astype(int)][:, None] * x
jnp.where(x > 0, x, 0.0)
jnp.where(t > 0.5, 1.0, 0.0)
x[:, :2]
jnp.cumsum(t)
jnp.exp(-t)
t - jnp.mean(t)
jnp.roll(x, 1, 0) - x
(x - 0.5) * 2
x[jnp.argsort(t[::-1])]
(a - 1e4)[jnp.argsort(a[:, 0])]
jnp.sort(a, 0) - 1e4
jnp.where(a > 1e4, 1.0, 0.5)
(a > 1e4) * x
lax.cond(jnp.mean(a) > 1e4, jnp.sin, jnp.cos, x)
jax.nn.one_hot(jnp.argmax(a, 1), 4)
jnp.argsort(jnp.argsort(a[:, 1])) / 8.0
jnp.mod(a, 1.0)
jnp.mod(8 * t, 1.0)
a - jnp.floor(a)
jnp.round(512 * t) / 512
((1000 * t).astype(int) % 7) / 7.0
jnp.searchsorted(jnp.linspace(0.0, 1.0, 65), t) / 64.0
jnp.digitize(a, 1e4 + jnp.array([-0.5, 0.5])) - 1.0
jnp.take(table, (t * 512).astype(int))
jnp.interp(t, jnp.linspace(0.0, 1.0, 512), table)
lax.scan(lambda c, s: (c + s, jnp.sin(1e3 * (s - c))), 0.0, t)[1]
lax.fori_loop(0, 3, lambda i, b: b - 1e4 / 3, a)
jax.ops.segment_sum(x, (8 * t).astype(int), 8)
jnp.zeros(8).at[(8 * t).astype(int)].add(1.0)
jnp.bincount((8 * t).astype(int), length=8) / 4.0
jax.nn.standardize(a, 0)
jax.vmap(eqx.nn.LayerNorm(4))(a)
jnp.linalg.norm(a - 1e4, axis=1)
jnp.exp(a - 1e4)
(a**2 - 1e8) / 1e4
x @ jnp.ones((4, 4)) / 4
jnp.linalg.solve(jnp.eye(4) * 1e4, a.T).T - 1
jnp.count_nonzero(x > 0, axis=1) / 4.0
jnp.concatenate([x, 1e3 * z], 1)
""")

# Only for modes with 64-bit types.
WIDE = _lines("""
((1e8 + jnp.sin({x})) - 1e8).astype(jnp.float32)
jnp.tanh({x}).astype(jnp.float32)
({x} * 1e6 - jnp.floor({x} * 1e6)).astype(jnp.float32)
""")

# Layers of a batch that also prepare the data themselves.
MODELS = _lines("""
jnp.tanh((a - 1e4) @ {W:4,8} + {W:8})
jnp.tanh(jnp.diff(a, axis=0) @ {W:4,8})
jnp.tanh((jnp.diff(t)[:, None] * 1000) @ {W:1,8} + {W:8})
jnp.sin(jnp.stack([jnp.sin(k * jnp.pi * t) for k in (1, 4, 32, 128)], 1) @ {W:4,8})
jnp.tanh(jnp.sin(2 * jnp.pi * t[:, None] * 2.0 ** jnp.arange(4)) @ {W:4,8} + {W:8})
table[jnp.floor(t * 512).astype(int)][:, None] * jnp.tanh(x @ {W:4,8})
{W:512}[jnp.floor(t * 512).astype(int)]
table[jnp.floor(t * 512).astype(int)][:, None] * {m}
table[jnp.floor(t * 512).astype(int)] * {v}
jnp.where(t[:, None] > 0.5, {m}, 0.0)
jax.vmap(lambda s: jnp.tanh({W:8,2} @ jnp.stack([s, table[jnp.floor(s * 512).astype(int)]])))(t)
jax.vmap(lambda s: jnp.tanh({W:8,4} @ jnp.sin(s * 2 * jnp.pi * 2.0 ** jnp.arange(4))))(t)
jax.vmap(lambda p: jnp.tanh({W:8,4} @ (p - 1e4)))(a)
lax.map(lambda p: jnp.tanh({W:8,4} @ (p - 1e4)), a)
{W:7,4}[(1000 * t).astype(int) % 7]
{W:65,4}[jnp.searchsorted(jnp.linspace(0.0, 1.0, 64), t)]
{W:4,8}[jnp.argmax(a, 1)]
jnp.tanh({W:8,4}[jnp.argsort(a[:, 0])])
jnp.take_along_axis({m}, jnp.argmax({m}, 1)[:, None], 1)
jnp.zeros((8, 4)).at[(8 * t).astype(int)].add(x @ {W:4,4})
jax.ops.segment_sum(jnp.tanh(x @ {W:4,4}), (4 * t).astype(int), 4)
jnp.where(a > 1e4, jnp.tanh((a - 1e4) @ {W:4,4}), x)
lax.map(lambda p: lax.cond(p[0] > 1e4, jnp.tanh, jnp.sin, {W:8,4} @ (p - 1e4)), a)
jax.vmap(lambda p: jnp.where(p[0] > 1e4, {W:8,4} @ (p - 1e4), {W:8,4} @ jnp.sin(p)))(a)
jax.checkpoint(lambda p, k: jnp.tanh((p - 1e4) @ k))(a, {W:4,8})
lax.scan(lambda c, p: (c, jnp.tanh({W:8,4} @ (p - 1e4))), 0, a)[1]
lax.scan(lambda h, p: (jnp.tanh({W:8,8} @ h + {W:8,4} @ (p - 1e4)), h[:4]), jnp.zeros(8), a)[1]
lax.scan(lambda c, p: (p, {W:8,4} @ (p - c)), a[0], a)[1]
lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ {W:4,4} + (a - 1e4)), x)
jnp.einsum("bi,io,b->bo", a - 1e4, {W:4,8}, 1000 * (t - t[0]))
jax.vmap(lambda p, s: jnp.sin(1000 * (s - t[0])) * jnp.tanh({W:8,4} @ p))(x, t)
jnp.tanh(x @ {W:4,8}) * jnp.mod(a[:, :1], 1.0)
jnp.tanh(x @ {W:4,4})[jnp.argsort(a[:, 0])]
(2 + jnp.tanh(x @ {W:4,4})) ** jnp.round(1 + 2 * t)[:, None]
jnp.interp(jnp.tanh(x @ {W:4}), jnp.linspace(-1.0, 1.0, 9), {W:9})
{W:9}[jnp.clip(jnp.floor(4 + 4 * jnp.tanh(x @ {W:4})).astype(int), 0, 8)]
jnp.sort(x @ {W:4,4}, 1)
lax.top_k(x @ {W:4,4}, 2)[0]
jax.nn.softmax((x @ {W:4,8}) @ (x @ {W:4,8}).T) @ x
jnp.tanh((a - jnp.mean(a, 0)) @ {W:4,8}) / (1e-3 + jnp.std(a))
jnp.tanh(x @ {W:4,8} + {W:8})
jax.nn.sigmoid(x @ {W:4,8})
jnp.tanh(x @ jnp.tril({W:4,4})) @ ({W:4,8} + 0.5)
lax.fori_loop(0, 10, lambda i, h: h + 0.1 * jnp.tanh(h @ {W:4,4}), x)
jnp.tanh(x @ {W:4,6}) @ jnp.tanh({W:8,3} @ {W:3,6}).T
jnp.tanh(x @ {W:4,6}) @ jnp.tanh(x[::-1] @ {W:4,6}).T
jnp.sum(jnp.tanh(x @ {W:4,6}) * jnp.tanh((a - 1e4) @ {W:4,6}), 1)
""")

FAMILIES = {
    "elementwise": (5, _lines(ELEMENTWISE)),
    "pairs": (2, _lines(PAIRS)),
    "scalars": (4, _lines(SCALARS_AND_ARRAYS)),
    "reductions": (2, _lines(REDUCTIONS)),
    "vectors": (3, _lines(VECTORS)),
    "matrices": (2, _lines(MATRICES)),
    "weighted": (5, _lines(WEIGHTED)),
    "decisions": (2, _lines(DECISIONS)),
    "made": (3, _lines(MADE)),
}
"""Templates, with the odds of drawing from each family."""
