"""Losses of physics-informed networks, with derivatives as their authors take them."""

import functools as ft

import jax
import jax.numpy as jnp

import mpx_pde as mpx

from ._client import Client, dense, layers, normal, squared, uniform


def nested(u, terms, *, coords, outputs):
    """Returns what `mpx.partials` does, by nested `jvp`."""

    def along(u, name):
        e = jnp.eye(len(coords))[coords.index(name)]
        return lambda p: jax.jvp(u, (p,), (e.astype(p.dtype),))[1]

    def values(p):
        names = {term: term.partition("_")[2] for term in terms}
        return {term: ft.reduce(along, name, u)(p) for term, name in names.items()}

    return values


# --- A causal network with factorized weights ----------------------------------------------------


def factorized(seed, *sizes):
    """Draws layers whose weights are a scale for each column times a direction."""
    found = []
    for i, (w, b) in enumerate(layers(seed, *sizes)):
        scale = jnp.exp(1.0 + normal(seed + 70 + i, b.shape, 0.1))
        found.append((scale, w / scale, b))
    return tuple(found)


def causal():
    """Allen-Cahn by nested `jax.grad`, with weights of times that wait for earlier ones."""
    frequencies = normal(99, (3, 8))

    def network(params, t, x):
        phase = jnp.stack([t, jnp.cos(jnp.pi * x), jnp.sin(jnp.pi * x)]) @ frequencies
        h = jnp.concatenate([jnp.cos(phase), jnp.sin(phase)])
        made = [(scale * direction, bias) for scale, direction, bias in params]
        return dense(made, h)[0]

    def residual(params, t, x):
        u = network(params, t, x)
        u_t = jax.grad(network, 1)(params, t, x)
        u_xx = jax.grad(jax.grad(network, 2), 2)(params, t, x)
        return u_t - 1e-2 * u_xx + u**3 - u

    def loss(params, t, x):
        at = jax.vmap(jax.vmap(residual, (None, None, 0)), (None, 0, None))
        by_time = jnp.mean(at(params, t, x) ** 2, axis=1)
        earlier = jnp.cumsum(by_time) - by_time
        weights = jax.lax.stop_gradient(jnp.exp(-0.1 * earlier))
        start = jax.vmap(lambda x: network(params, 0.0 * x, x) - x**2 * jnp.cos(jnp.pi * x))(x)
        return jnp.mean(weights * by_time) + 10 * squared(start)

    data = jnp.linspace(0, 1, 8), uniform(1, (32,), -1)
    return Client(loss, factorized(0, 16, 32, 32, 1), data)


# --- A separable network -------------------------------------------------------------------------


def separable():
    """Helmholtz on a grid: one network for each axis, differentiated by nested `jvp`."""

    def loss(params, x, y, source):
        def along(network, x):
            value = lambda x: dense(network, x[:, None])
            slope = lambda x: jax.jvp(value, (x,), (jnp.ones_like(x),))[1]
            return value(x), jax.jvp(slope, (x,), (jnp.ones_like(x),))[1]

        (f, f_xx), (g, g_yy) = map(along, params, (x, y))
        product = lambda f, g: jnp.einsum("ir,jr->ij", f, g)
        return squared(product(f_xx, g) + product(f, g_yy) + product(f, g) - source)

    x, y = jnp.linspace(-1, 1, 24), jnp.linspace(-1, 1, 16)
    source = 5 * jnp.sin(jnp.pi * x)[:, None] * jnp.sin(2 * jnp.pi * y)
    return Client(loss, (layers(2, 1, 32, 32, 16), layers(5, 1, 32, 32, 16)), (x, y, source))


# --- Subdomains ----------------------------------------------------------------------------------


def subdomains():
    """A stiff oscillator on overlapping windows: five trained networks and a fixed one."""
    fixed = layers(8, 1, 16, 1)
    centers = jnp.linspace(0, 1, 5)

    def u(params, t):
        local = (t - centers) / 0.2
        window = jnp.cos(jnp.pi / 2 * jnp.clip(local, -1, 1)) ** 2
        outputs = jax.vmap(lambda p, s: dense(p, s[None])[0])(params, local)
        base = dense(jax.lax.stop_gradient(fixed), t[None])[0]
        return jnp.sum(window * outputs) / jnp.sum(window) * t**2 + base

    def loss(params, t, of=mpx.partials):
        terms = of(lambda t: u(params, t[0]), ["u", "u_t", "u_tt"], coords="t", outputs="u")
        d = jax.vmap(terms)(t)
        return squared(d["u_tt"] / 100 + 0.04 * d["u_t"] + d["u"])

    networks = [layers(10 * i, 1, 16, 16, 1) for i in range(5)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *networks)
    times = jnp.linspace(0.01, 0.99, 64)[:, None]
    return Client(loss, stacked, (times,), ft.partial(loss, of=nested))


# --- An operator network -------------------------------------------------------------------------


def deeponet():
    """A physics-informed DeepONet of an antiderivative and of advection, by `vjp`."""

    def operator(params, f, y):
        return jnp.sum(dense(params[0], f) * dense(params[1], y))

    def loss(params, f, y):
        def at(f, y):
            u, pull = jax.vjp(lambda y: operator(params, f, y), y)
            u_t, u_x = pull(jnp.ones_like(u))[0]
            return u_t + jnp.interp(y[1], jnp.linspace(0, 1, f.size), f) * u_x

        start = jax.vmap(lambda f, y: operator(params, f, y * jnp.array([0, 1])))(f, y)
        return squared(jax.vmap(at)(f, y)) + squared(start - jnp.sin(jnp.pi * y[:, 1]))

    branch, trunk = layers(20, 32, 48, 48), layers(22, 2, 48, 48)
    return Client(loss, (branch, trunk), (1 + 0.3 * normal(24, (64, 32)), uniform(25, (64, 2))))


# --- A sine network ------------------------------------------------------------------------------


def siren():
    """A sine network whose Laplacian fits an image, by nested `jvp`."""

    def network(params, x):
        return dense(params, 10 * x, lambda h: jnp.sin(h))[0]

    def loss(params, x, target):
        along = lambda f, v: lambda x: jax.jvp(f, (x,), (v,))[1]
        u = lambda x: network(params, x)
        axes = jnp.eye(2, dtype=x.dtype)
        laplacian = lambda x: sum(along(along(u, v), v)(x) for v in axes)
        return squared(jax.vmap(laplacian)(x) / 100 - target)

    x = uniform(26, (128, 2), -1)
    return Client(loss, layers(27, 2, 48, 48, 1), (x, jnp.sin(4 * x[:, 0]) * x[:, 1]))


# --- Gradients of terms inside of the loss -------------------------------------------------------


def balanced():
    """Weights the terms of a loss by the norms of their gradients."""

    def terms(params, x, b, of):
        u = lambda p: dense(params, p)[0]
        d = jax.vmap(of(u, ["u_xx", "u_yy"], coords="xy", outputs="u"))(x)
        on = jax.vmap(u)(b)
        return squared(d["u_xx"] + d["u_yy"] + 1), squared(on - 0.1)

    def norm(grads):
        return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))

    def loss(params, x, b, of=mpx.partials):
        fixed = jax.lax.stop_gradient(params)
        norms = [norm(jax.grad(lambda p, k=k: terms(p, x, b, of)[k])(fixed)) for k in range(2)]
        interior, boundary = terms(params, x, b, of)
        return interior + norms[0] / norms[1] * boundary

    points = uniform(33, (64, 2)), uniform(34, (32, 2))
    return Client(loss, layers(30, 2, 32, 32, 1), points, ft.partial(loss, of=nested))


def penalized():
    """Adds the norm of the loss's own gradient to the loss."""

    def loss(params, x):
        inner = lambda p: squared(dense(p, x, jax.nn.gelu))
        norm = sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(inner)(params)))
        return inner(params) + 0.1 * jnp.sqrt(norm)

    return Client(loss, layers(35, 16, 64, 64, 8), (normal(38, (128, 16)),))


CLIENTS = {
    "causal PINN, nested grad": causal,
    "separable PINN, nested jvp": separable,
    "subdomains, partials": subdomains,
    "DeepONet, vjp": deeponet,
    "SIREN, nested jvp": siren,
    "terms balanced by gradients": balanced,
    "norm of its own gradient": penalized,
}
