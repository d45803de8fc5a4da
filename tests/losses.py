"""Losses of many kinds, of a small network: what people write, and what rounding may harm."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import normal
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec as P


WEIGHT, STATES = normal(0, (64, 64), 1 / 8), normal(1, (16, 64))
OTHER, POINTS = normal(2, (64, 64), 1 / 8), normal(3, (128, 16))
LAYERS = (
    normal(4, (16, 64), 1 / 4),
    normal(5, (64,), 0.1),
    normal(6, (64, 64), 1 / 8),
    normal(7, (64,), 0.1),
    normal(8, (64, 8), 1 / 8),
)


def network(p, x):
    h = jax.nn.gelu(x @ p[0] + p[1], approximate=False)
    return jax.nn.gelu(h @ p[2] + p[3]) @ p[4]


with jax.numpy_rank_promotion("allow"):
    TARGETS = network(LAYERS, POINTS)


def squared(x):
    return jnp.mean(x**2)


def evolved(step, state, length):
    return jax.lax.scan(lambda u, _: (step(u), None), state, length=length)[0]


def near(threshold, x, w):
    """Returns values that rounding to bfloat16 may move to the other side of a threshold."""
    return threshold - 1e-4 + 1e-5 * jnp.tanh(x @ w)


@jax.custom_vjp
def kinked(x):
    return jnp.where(x - 0.1 > 0, 30 * x, x)


kinked.defvjp(lambda x: (kinked(x), x), lambda x, g: (jnp.where(x - 0.1 > 0, 30 * g, g),))

DECISIONS = {
    "where": lambda h, w: jnp.where(h - 0.1 > 0, 30 * h, h) @ w,
    "sign": lambda h, w: (jnp.sign(h - 0.1) * h) @ w,
    "heaviside": lambda h, w: (jnp.heaviside(h - 0.1, 0.5) + h) @ w,
    "log": lambda h, w: jnp.where(jnp.log(10 * h) > 0, 30 * h, h) @ w,
    "maximum": lambda h, w: (jnp.maximum(h, 0.1) * h) @ w,
    "a rule": lambda h, w: kinked(h) @ w,
    "a checkpoint": jax.checkpoint(lambda h, w: jnp.where(h - 0.1 > 0, 30 * h, h) @ w),
    "a loop": lambda h, w: evolved(
        lambda h: jnp.where(h - 0.1 > 0, 1.2 * h, h) + 0.01 * jnp.tanh(h @ w), h, 5
    ),
    "a loop in a checkpoint": jax.checkpoint(
        lambda h, w: evolved(
            lambda h: jnp.where(h - 0.1 > 0, 1.2 * h, h) + 0.01 * jnp.tanh(h @ w), h, 5
        )
    ),
}


def _made(make):
    return lambda p, x: squared(network((*p[:2], make(p[2]), *p[3:]), x) - 1)


BASE = normal(9, (64, 64), 1 / 8)
MADE = {
    "tril": jnp.tril,
    "a base": lambda w: w + BASE,
    "a mask": lambda w: w * (BASE > 0),
    "identity": lambda w: w + jnp.eye(64),
    "a scale": lambda w: w * BASE[0][:, None],
    "padding": lambda w: jnp.pad(w[:-1], ((0, 1), (0, 0))),
    "a fixed row": lambda w: jnp.concatenate([w[:-1], BASE[:1]]),
    "its norm": lambda w: w / jnp.linalg.norm(w),
}

# Values near those of the network, of which each example has its own.
NEAR = TARGETS + normal(25, (128, 8), 1e-3)


def fitted(_, near, values):
    return 1e3 * squared(values - near) + squared(jnp.sin(3 * values)) + jnp.mean(values**3)


def centred(p, x):
    """Radial functions of computed values, at centres that are trained."""
    values = (300 + network(p[0], x))[..., None]
    return squared(jnp.exp(-((values + p[1]) ** 2)) @ p[2])


LABELS = jnp.arange(16) % 4


def sure(loss):
    """A classification that gives every label a probability of 0.999."""
    return lambda w, x: jnp.mean(loss(x @ w[:, :4] + 8 * jax.nn.one_hot(LABELS, 4)))


def of_labels(values):
    return jnp.take_along_axis(values, LABELS[:, None], axis=1)


def by_hand(values):
    terms = jnp.exp(values - jnp.max(values, axis=1, keepdims=True))
    return terms / (jnp.sum(terms, axis=1, keepdims=True) + 1e-12)


def mean_place(shares):
    """The place of a maximum, counted from far away."""
    return lambda w, x: squared(jnp.sum(shares(3 * x @ w) * (300.0 + jnp.arange(64)), 1) - 331)


SHARES = {
    "softmax": sure(lambda z: -jnp.log(of_labels(jax.nn.softmax(z)))),
    "a logarithm": sure(lambda z: jax.nn.logsumexp(z, axis=1, keepdims=True) - of_labels(z)),
    "place": mean_place(jax.nn.softmax),
    "place, by hand": mean_place(by_hand),
}


def deviation(p, x):
    return 0.01 * network(p, x)


def counts(p, x):
    logarithm = deviation(p, x)
    return 1e3 * jnp.mean(jnp.exp(logarithm) - 1.001 * logarithm)


def gate(w, x):
    open = jax.nn.sigmoid(x @ w)
    return squared(open * (30 + x) + (1 - open) * (30 + jnp.sin(x)) - 31)


def elastic(p, x):
    """The energy of a material close to its natural state."""
    strain = deviation(p, x)[:, :4].reshape(-1, 2, 2)
    gradient = jnp.eye(2) + strain
    (a, b), (c, d) = gradient[:, 0].T, gradient[:, 1].T
    return 1e3 * jnp.mean(0.5 * jnp.sum(gradient**2, (1, 2)) - jnp.log(a * d - b * c))


def divergence(p, x):
    """The divergence of two normal distributions, as in a variational autoencoder."""
    mean, log_variance = jnp.split(deviation(p, x), 2, axis=1)
    return 1e3 * jnp.mean(jnp.exp(log_variance) + mean**2 - 1 - log_variance)


def entropy(p, x):
    shares = jax.nn.softmax(deviation(p, x))
    return 1e3 * jnp.mean(shares * jnp.log(shares))


def by_a_product(p, x):
    """Its linear term has a product on the way back, which has no values of the network."""
    z = deviation(p, x)
    return 1e3 * (jnp.mean(jnp.exp(z)) - jnp.mean(z @ jnp.ones((8, 1))) / 8)


def summed(p, x):
    step = lambda total, x: (total + divergence(p, x), None)
    return jax.lax.scan(step, 0.0, x.reshape(4, 32, -1))[0]


def summed_again(p, x):
    step = jax.checkpoint(lambda total, x: (total + divergence(p, x), None))
    return jax.lax.scan(step, 0.0, x.reshape(4, 32, -1))[0]


def mapped(p, x):
    return jnp.mean(jax.lax.map(lambda x: divergence(p, x), x.reshape(4, 32, -1)))


def by_an_inner_product(p, x):
    z = deviation(p, x)
    return 1e3 * (jnp.mean(jnp.exp(z)) - jnp.vdot(jnp.ones_like(z), z) / z.size)


def of_two_networks(p, x):
    """The derivative by each network is a difference of values of both."""
    y, z = jnp.exp(deviation(p[0], x)), deviation(p[1], x)
    return 1e3 * (jnp.mean(jnp.exp(z)) - jnp.einsum("ij,ij->", y, z) / z.size)


def in_a_branch(p, x):
    return jax.lax.cond(x[0, 0] < 1e3, by_an_inner_product, lambda p, x: jnp.sum(p[-1]), p, x)


def over_devices(p, x):
    mesh = jax.make_mesh((2,), ("i",), (jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}
    mean = lambda p, x: jax.lax.pmean(by_an_inner_product(p, x), "i")
    return jax.shard_map(mean, mesh=mesh, **specs)(p, x)


def called_twice(p, x):
    return 1e3 * jnp.mean(jnp.exp(deviation(p, x)) - deviation(p, x))


# The energy of a membrane, by matrices and stencils that are the same in each step. Its derivative
# is `K u - f`.
STIFFNESS = 2 * np.eye(128) - np.eye(128, k=1) - np.eye(128, k=-1)
DIFFERENCES = np.eye(129, 128) - np.eye(129, 128, k=-1)
SPARSE = BCOO.fromdense(jnp.asarray(STIFFNESS, jnp.float32))


LOAD = jnp.asarray(STIFFNESS, jnp.float32) @ (TARGETS + 1e-2 * normal(26, (128, 8)))


def loaded(energy):
    """Returns an energy with a load under which the network is close to the minimum."""
    moved = TARGETS + 1e-2 * normal(25, (128, 8))
    load = jax.grad(energy)(moved)
    return lambda p, x: energy(u := network(p, x)) - jnp.vdot(load, u)


def stretched(u):
    return 0.5 * jnp.sum((jnp.asarray(DIFFERENCES, u.dtype) @ u) ** 2)


def by_stiffness(u):
    return 0.5 * jnp.einsum("ic,ij,jc->", u, jnp.asarray(STIFFNESS, u.dtype), u)


def by_a_stencil(u):
    forces = jax.vmap(lambda v: jnp.convolve(v, jnp.array([-1.0, 2.0, -1.0]), mode="same"), 1, 1)
    return 0.5 * jnp.sum(u * forces(u))


def by_sparse_stiffness(u):
    return 0.5 * jnp.vdot(u, SPARSE @ u)


def area(u):
    return jnp.sum(jnp.sqrt(1 + (jnp.asarray(DIFFERENCES, u.dtype) @ u) ** 2))


def summed_over_columns(u):
    stiffness = jnp.asarray(STIFFNESS, u.dtype)
    step = lambda total, v: (total + 0.5 * v @ (stiffness @ v), None)
    return jax.lax.scan(step, 0.0, u.T)[0]


def by_elements(u):
    """Each element has two nodes, and the same matrix."""
    ends = u[np.arange(127)[:, None] + np.arange(2)]
    return 0.5 * jnp.einsum("eic,ij,ejc->", ends, jnp.array([[1.0, -1.0], [-1.0, 1.0]]), ends)


def by_a_trace(u):
    return 0.5 * jnp.trace(u.T @ (jnp.asarray(STIFFNESS, u.dtype) @ u))


def two_phases(u):
    """The stress is a sum of terms, times a value: none of them is small."""
    strain = jnp.asarray(DIFFERENCES, u.dtype) @ u
    return jnp.sum((strain**2 - 1) ** 2 + strain**2)


def on_a_basis(u):
    basis = normal(27, (8, 128), 0.1)
    return by_stiffness((u @ basis).T)


def lowest_frequency(p, x):
    """A quotient of energies, whose derivative is `K u - q u`."""
    u = network(p, x)[:, 0] + jnp.sin(jnp.pi * (jnp.arange(128.0) + 1) / 129)
    return u @ (jnp.asarray(STIFFNESS, u.dtype) @ u) / (u @ u)


# A small derivative of the loss, which is the difference of large terms.
NEAR_A_MINIMUM = {
    "counts": counts,
    "elastic": elastic,
    "divergence": divergence,
    "entropy": entropy,
    "gate": gate,
    "by a product": by_a_product,
    "by an inner product": by_an_inner_product,
    "of two networks": of_two_networks,
    "in a branch": in_a_branch,
    "over devices": over_devices,
    "called twice": called_twice,
    "energy by a matrix": loaded(by_stiffness),
    "energy by differences": loaded(stretched),
    "energy by a stencil": loaded(by_a_stencil),
    "energy by a sparse matrix": loaded(by_sparse_stiffness),
    "energy of an area": loaded(area),
    "energy of elements": loaded(by_elements),
    "energy by a trace": loaded(by_a_trace),
    "energy of two phases": loaded(two_phases),
    "energy on a basis": loaded(on_a_basis),
    "energy summed in a loop": loaded(summed_over_columns),
    "quotient of energies": lowest_frequency,
    "energy of parameters": lambda p, x: by_stiffness(p[0]) - jnp.vdot(LOAD, p[0]),
    "summed in a loop": summed,
    "summed in a loop of checkpoints": summed_again,
    "mean over a loop": mapped,
}
OTHERS = {
    "gate": (WEIGHT, STATES),
    "of two networks": ((LAYERS, LAYERS), POINTS),
    "energy of parameters": ((TARGETS,), POINTS),
}


PROGRAMS = {
    "small residual": (
        lambda p, x, y: squared(network(p, x) - y),
        LAYERS,
        POINTS,
        TARGETS + 1e-3 * normal(24, (128, 8)),
    ),
    "two networks": (
        lambda p, x, z: squared(jnp.einsum("bp,np->bn", network(p[0], x), network(p[1], z)) - 1),
        (LAYERS, LAYERS),
        POINTS,
        POINTS[:48],
    ),
    "trained centres": (
        centred,
        (LAYERS, jnp.linspace(-302, -298, 7), jnp.linspace(1, 2, 7)),
        POINTS,
    ),
    "fitted parameters": (lambda p, x: fitted(*p, network(p[0], x)), (LAYERS, NEAR), POINTS),
    **{f"shares: {k}": (loss, WEIGHT, STATES) for k, loss in SHARES.items()},
    **{
        f"near a minimum: {k}": (loss, *OTHERS.get(k, (LAYERS, POINTS)))
        for k, loss in NEAR_A_MINIMUM.items()
    },
    **{f"made weights: {k}": (_made(make), LAYERS, POINTS) for k, make in MADE.items()},
    **{
        f"decision: {k}": (
            lambda p, x, f=f: squared(f(near(0.1, x, p[0]), p[1])),
            (WEIGHT, OTHER),
            STATES,
        )
        for k, f in DECISIONS.items()
    },
}
