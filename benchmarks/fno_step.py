"""How long does a step of an FNO take, and how much memory? By library, resolution and modes.

The rivals train one network from the same weights on the same batches, with Adam and the relative
L2 loss. The network is a Fourier neural operator of four blocks in two dimensions:

- `mpx_pde`: `mpx_pde.nn.FNO` in float32 by `fft` and by `dft`, and `dft` in half precision as well,
  trained as in `examples/problems`;
- `plain JAX`: the same function by `rfft2` and `einsum`, in float32; and with weights and
  activations cast to bfloat16 by hand around a float32 FFT, which is the usual compromise;
- `MPX`: that plain function unchanged, and with `force_full_precision` around the spectral
  convolution;
- `neuraloperator`: its FNO in float32; by `torch.amp` as in its trainer, which scales no gradients
  (bfloat16 on a CPU; float16 and bfloat16 on a GPU, where a `GradScaler` is tried too); by
  `fno_block_precision`; and with the `tanh` that it recommends for "mixed". The `tanh` changes the
  function, so that error is not one of rounding. In its last block neuraloperator has no activation
  between convolution and MLP; the benchmark adds one, so that the functions are equal.

Errors are relative to the plain function in float64. All activations are exact GELUs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mpx_pde as mpx

from . import _steps
from ._report import Report, require
from ._steps import HIGHEST, TF32, Rival, Task, precision_options


BLOCKS = 4
LEARNING_RATE = 1e-3  # the same as in `_steps.adam`
BATCHES = 2  # which steps take in turn

Batch = tuple[Any, Any]


class Size(NamedTuple):
    resolution: int
    modes: int
    channels: int
    batch: int


QUICK = [Size(16, 4, 4, 2)]
ON_CPU = [Size(64, 16, 16, 4), Size(128, 16, 16, 4), Size(64, 8, 16, 4), Size(64, 32, 16, 4)]
# In order of importance: sizes that exceed the time are left out.
ON_GPU = [Size(*s, 64, 32) for s in ((128, 32), (256, 32), (128, 64), (512, 32), (128, 16))]


def fields(size: Size) -> list[Batch]:
    """Makes smooth random fields, and smooths the square of each; both have unit size."""
    n, rng = size.resolution, np.random.default_rng(0)
    frequencies = np.fft.fftfreq(n, 1 / n)[:, None] ** 2 + np.fft.rfftfreq(n, 1 / n) ** 2

    def smooth(x, decay):
        x = np.fft.irfft2(np.fft.rfft2(x) * (1 + frequencies) ** -decay, s=x.shape[-2:])
        return np.asarray(x / x.std(), np.float32)

    inputs = smooth(rng.standard_normal((BATCHES, size.batch, 1, n, n), np.float32), 1.5)
    return list(zip(inputs, smooth(inputs**2 - 1, 0.5), strict=True))


# --- The network by hand ---------------------------------------------------------------------


def spectral(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Applies a spectral convolution to a batch, in the dtype of the input."""
    (n, _), (m, last) = x.shape[-2:], weight.shape[:2]
    modes = jnp.roll(jnp.fft.rfft2(x, norm="forward")[..., :last], m // 2, axis=2)[:, :, :m]
    modes = jnp.einsum("bixy,xyio->boxy", modes, jax.lax.complex(weight[..., 0], weight[..., 1]))
    modes = jnp.pad(modes, ((0, 0), (0, 0), (0, n - m), (0, n // 2 + 1 - last)))
    return jnp.fft.irfft2(jnp.roll(modes, -(m // 2), axis=2), s=x.shape[-2:], norm="forward")


def plain(model: mpx.nn.FNO, x: jax.Array, convolution: Callable = spectral) -> jax.Array:
    """Evaluates `model` on a batch, written out in plain JAX."""
    gelu = partial(jax.nn.gelu, approximate=False)
    product = lambda p, x: jnp.einsum("oi,bixy->boxy", p.weight, x)
    linear = lambda p, x: product(p, x) + p.bias[:, None, None]
    mlp = lambda m, x: linear(m.last, gelu(linear(m.first, x)))
    axis = np.arange(x.shape[-1]) / x.shape[-1]
    grid = jnp.asarray(np.stack(np.meshgrid(axis, axis, indexing="ij")), x.dtype)
    x = jnp.concatenate([x, jnp.broadcast_to(grid, (len(x), *grid.shape))], axis=1)
    x = mlp(model.lifting, x)
    for i, block in enumerate(model.blocks):
        x = gelu(x) if i else x
        y = gelu(convolution(x, block.spectral.weight) + linear(block.skip, x))
        x = mlp(block.mlp, y) + block.gate[:, None, None] * x
    return mlp(model.projection, x)


def relative_l2(prediction: jax.Array, truth: jax.Array) -> jax.Array:
    error = prediction.astype(truth.dtype) - truth
    squares = lambda x: jnp.sum(x**2, axis=(1, 2, 3))
    return jnp.mean(jnp.sqrt(squares(error) / squares(truth)))


def loss(apply: Callable, model: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the loss and the predictions."""
    prediction = apply(model, batch[0])
    return relative_l2(prediction, batch[1]), prediction


def with_casts(model: mpx.nn.FNO, x: jax.Array) -> jax.Array:
    """Casts as AMP does: bfloat16 except for the FFT."""
    full = lambda x, w: spectral(x.astype(jnp.float32), w.astype(jnp.float32)).astype(x.dtype)
    model = jax.tree.map(lambda w: w.astype(jnp.bfloat16) if eqx.is_array(w) else w, model)
    return plain(model, x.astype(jnp.bfloat16), full)


# --- The rivals ------------------------------------------------------------------------------


def network(size: Size, method: Any = "fft", remat: bool = True) -> mpx.nn.FNO:
    """Builds the network with the transform `method`; `remat` recomputes what it does not keep."""
    sizes = 1, 1, size.channels, BLOCKS, (size.modes, size.modes)
    given = {"activation": partial(jax.nn.gelu, approximate=False), "key": jax.random.key(0)}
    return mpx.nn.FNO(*sizes, method=method, remat=remat, **given)


def by_library(
    size: Size, precision: str, method: str = "dft", forward: str = "half", **options: Any
) -> Rival:
    kept = {"keep_full": (False, True), "forward": forward, **precision_options(precision)}
    ours = _steps.by_library(partial(loss, lambda m, x: jax.vmap(m)(x)), **kept)
    return ours._replace(products=HIGHEST, model=partial(network, size, method, **options))


def by_mpx(full_fft: bool) -> Rival:
    """Takes the step with MPX as documented: delicate operations in full precision."""

    def function(model, batch):
        full: Any = require("mpx").force_full_precision
        in_full = lambda x, weight: full(spectral, x.dtype)(x, weight)
        prediction = plain(model, batch[0], in_full if full_fft else spectral)
        return full(relative_l2, jnp.float32)(prediction, batch[1]), prediction

    return _steps.by_mpx(function, "float16", mpx.FLOAT16_MAX, HIGHEST)


def jax_rivals(size: Size, gpu: bool) -> dict[str, Rival]:
    in_float32 = lambda apply: _steps.in_float32(partial(loss, apply), HIGHEST)
    rivals = {
        "mpx_pde fft float32": by_library(size, "float32", "fft"),
        "mpx_pde dft float32": by_library(size, "float32"),
        "mpx_pde dft float16": by_library(size, "float16"),
        "mpx_pde dft bfloat16": by_library(size, "bfloat16"),
        "mpx_pde dft float16, remat=False": by_library(size, "float16", remat=False),
        "plain JAX float32": in_float32(plain),
        "plain JAX bfloat16, float32 FFT": in_float32(with_casts),
        "MPX float16": by_mpx(full_fft=False),
        "MPX float16, float32 FFT": by_mpx(full_fft=True),
    }
    if gpu:
        for name in ("mpx_pde dft", "plain JAX"):
            rivals[f"{name} TF32"] = rivals[f"{name} float32"]._replace(products=TF32)
    return rivals


def task(size: Size, gpu: bool = False) -> Task:
    shape = jax.ShapeDtypeStruct((size.batch, 1, size.resolution, size.resolution), jnp.float32)
    return Task(
        size._asdict(),
        partial(network, size),
        partial(loss, plain),
        partial(fields, size),
        (shape, shape),
        jax_rivals(size, gpu),
    )


def torch_rivals(gpu: bool, task: Task) -> dict[str, Any]:
    from ._torch.fno import step

    half = "float16" if gpu else "bfloat16"
    mixed, tanh = {"fno_block_precision": "mixed"}, {"stabilizer": "tanh"}
    options = {
        "float32": {},
        f"amp {half}": {"precision": half},
        "half": {"fno_block_precision": "half"},
        "mixed": mixed,
        f"amp {half}, tanh": {"precision": half, **tanh},
        f"amp {half}, mixed, tanh": {"precision": half, **mixed, **tanh},
    }
    if gpu:
        options["TF32"] = {"precision": "TF32"}
        options["amp float16, GradScaler"] = {"precision": half, "grad_scaler": True}
        options["amp bfloat16"] = {"precision": "bfloat16"}
    leaves = jax.tree.leaves(eqx.filter(task.model(), eqx.is_array))
    return {
        f"neuraloperator {name}": partial(step, leaves, task.batches(), LEARNING_RATE, **given)
        for name, given in options.items()
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _steps.add_arguments(parser, rounds=5)


def run(report: Report, args: argparse.Namespace) -> bool:
    gpu = jax.default_backend() == "gpu"
    tasks = (task(size, gpu) for size in (QUICK if args.quick else ON_GPU if gpu else ON_CPU))
    others = partial(torch_rivals, gpu), ("torch", "neuralop")
    return _steps.run_sizes(report, args, tasks, *others)
