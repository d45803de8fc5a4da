"""One training on one device, on several, or on several hosts.

A physics-informed network for the lid-driven cavity (`--problem cavity`) or a Fourier neural
operator for Darcy flow (`--problem fno`) is trained with float16 products, in one of three layouts:

    --layout data       every device has the parameters, and a part of the points
    --layout full       parameters, gradients and optimizer state are also split over the devices
    --layout shard_map  as `data`, with the sum of gradients written out: `--sum bfloat16` sends
                        half the bytes

The first two are the training step of one device with its arrays laid out differently: JAX's
compiler finds out what has to be sent. The loss curve is the same in all layouts and for any number
of devices.

    python examples/sharded.py                                    # all devices of this host
    python examples/sharded.py --quick                            # twenty small steps
    python examples/sharded.py --layout full --cpu-devices 4      # four virtual CPU devices
    python examples/sharded.py --checkpoint outputs/run           # run again to continue

On several hosts, run the same command on each, with the address of the first:

    python examples/sharded.py --coordinator host0:1234 --processes 2 --process-id 0
    python examples/sharded.py --coordinator host0:1234 --processes 2 --process-id 1

Under Slurm, `srun python examples/sharded.py --cluster` finds all three values by itself.
"""

import json
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import orbax.checkpoint as ocp
from _command_line import file, folder, parser, positive, run_main, stop_on_interrupt
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float32, Int32, PRNGKeyArray, PyTree
from problems.references import darcy_data

import mpx_pde as mpx


LAYOUTS = ("data", "full", "shard_map")
DEVICES = "devices"  # the name of the mesh's only axis


# --- The problem -----------------------------------------------------------------------------


class Problem(NamedTuple):
    """A model, batches for it, and a loss that is a mean over the rows of a batch."""

    model: Callable[..., PyTree]
    batch: Callable[..., PyTree]
    loss: Callable[..., Array]
    scaling: Callable[[], mpx.AbstractLossScaling]


def cavity_model(dtype: str | None, *, key: PRNGKeyArray, width: int = 32) -> eqx.Module:
    """Maps a point to u, v and p. With `dtype`, the parameters are float32 master weights: products
    round them inside, so that they are gathered in half precision and their gradients summed in
    float32."""
    return mpx.nn.CoordinateMLP(2, 3, width, 4, key=key, dtype=dtype)


def cavity_batch(key: PRNGKeyArray, size: int) -> dict[str, Float32[Array, "batch ..."]]:
    """Draws points inside, points on the walls with the velocity there, and a weight per row."""
    inside, along, side = jax.random.split(key, 3)
    s = jax.random.uniform(along, (size,))
    side = jax.random.randint(side, (size,), 0, 4)
    zero, one = jnp.zeros_like(s), jnp.ones_like(s)
    x = jnp.select([side == 0, side == 1], [zero, one], s)
    y = jnp.select([side == 2, side == 3], [zero, one], s)
    lid = jnp.where(side == 3, 1 - (2 * s - 1) ** 16, zero)  # continuous at the corners
    return {
        "inside": jax.random.uniform(inside, (size, 2)),
        "wall": jnp.stack([x, y], axis=1),
        "velocity": jnp.stack([lid, zero], axis=1),
        "weight": one,
    }


TERMS = ["u", "v", *(f"{f}_{d}" for f in "uvp" for d in "xy"), "u_xx", "u_yy", "v_xx", "v_yy"]
VISCOSITY = 0.01


def cavity_loss(model: Any, batch: dict[str, Array], *, derivatives: Any) -> Float32[Array, ""]:
    """Computes the loss of momentum, continuity and walls."""
    fields = mpx.partials(model, TERMS, coords="xy", outputs="uvp", scaling=derivatives)
    d = jax.vmap(fields)(batch["inside"])
    momentum_x = d["u"] * d["u_x"] + d["v"] * d["u_y"] + d["p_x"]
    momentum_y = d["u"] * d["v_x"] + d["v"] * d["v_y"] + d["p_y"]
    momentum_x -= VISCOSITY * (d["u_xx"] + d["u_yy"])
    momentum_y -= VISCOSITY * (d["v_xx"] + d["v_yy"])
    continuity = d["u_x"] + d["v_y"]
    wall = jax.vmap(model)(batch["wall"])[:, :2].astype(jnp.float32) - batch["velocity"]
    squares = momentum_x**2 + momentum_y**2 + continuity**2 + 10 * jnp.sum(wall**2, axis=1)
    return jnp.mean(batch["weight"] * squares)


def darcy_model(dtype: str | None, *, key: PRNGKeyArray, width: int = 32) -> eqx.Module:
    """Builds the operator of `problems/operator_darcy.py`, also with float32 master weights."""
    return mpx.nn.FNO(1, 1, width, 4, (12, 12), key=key, domain_padding=0.25, dtype=dtype)


def darcy_batch(key: PRNGKeyArray, size: int) -> dict[str, Float32[Array, "batch ..."]]:
    """Draws rows from 64 samples on a grid of 32²."""
    a, u = darcy_data(64, 32, seed=0)
    rows = jax.random.randint(key, (size,), 0, len(a))
    one = jnp.ones(size)
    # Scaled to order one: coefficients are 3 and 12, solutions about 0.01.
    return {
        "a": jnp.asarray(a)[rows, None] / 10,
        "u": 100 * jnp.asarray(u)[rows, None],
        "weight": one,
    }


def darcy_loss(model: Any, batch: dict[str, Array]) -> Float32[Array, ""]:
    """Returns the squared relative L2 error."""
    error = jax.vmap(model)(batch["a"]).astype(jnp.float32) - batch["u"]
    squares = jnp.sum(error**2, axis=(1, 2, 3)) / jnp.sum(batch["u"] ** 2, axis=(1, 2, 3))
    return jnp.mean(batch["weight"] * squares)


PROBLEMS = {
    "cavity": Problem(
        cavity_model,
        cavity_batch,
        cavity_loss,
        lambda: mpx.Scaling(derivatives=mpx.DerivativeScaling.per_direction("xy", order=2)),
    ),
    "fno": Problem(darcy_model, darcy_batch, darcy_loss, mpx.DynamicLossScaling),
}


# --- The layout ------------------------------------------------------------------------------


def layout_of(x: Any, mesh: Mesh, layout: str) -> NamedSharding:
    """Returns the layout of an array of the state on the devices; the layout `full` splits it along
    its longest axis that can be split."""
    spec: list[str | None] = [None] * np.ndim(x)
    axes = [i for i, n in enumerate(np.shape(x)) if n % mesh.size == 0 and n >= 2 * mesh.size]
    if layout == "full" and axes:
        spec[max(axes, key=lambda i: np.shape(x)[i])] = DEVICES
    return NamedSharding(mesh, P(*spec))


def lay_out(tree: PyTree, mesh: Mesh, layout: str) -> PyTree:
    def leaf(x):
        if not eqx.is_array(x):
            return x
        return lax.with_sharding_constraint(x, layout_of(x, mesh, layout))

    return jtu.tree_map(leaf, tree)


# --- The training step -----------------------------------------------------------------------


class State(NamedTuple):
    """Everything that a run needs to continue."""

    model: PyTree
    opt_state: PyTree
    scaling: Any
    key: PRNGKeyArray
    step: Int32[Array, ""]


class Run:
    """A training with a step to call. `state` is laid out on the devices. With `start=False` there
    is no state; use this to compile for absent devices."""

    def __init__(
        self,
        problem: str = "cavity",
        *,
        precision: str = "float16",
        layout: str = "data",
        sum_dtype: str | None = None,
        batch: int = 1024,
        seed: int = 0,
        overflow_at: int | None = None,
        devices: Any = None,
        learning_rate: float = 2e-3,
        start: bool = True,
        **sizes: int,
    ):
        devices = jax.devices() if devices is None else devices
        mesh = Mesh(np.array(devices), (DEVICES,), axis_types=(AxisType.Auto,))
        model, make_batch, loss, make_scaling = PROBLEMS[problem]
        half = None if precision == "float32" else precision
        optimizer = optax.adam(learning_rate)

        def init(key):
            model_key, key = jax.random.split(key)
            params = model(half, key=model_key, **sizes)
            opt_state = optimizer.init(eqx.filter(params, eqx.is_inexact_array))
            state = State(params, opt_state, make_scaling(), key, jnp.array(0))
            return lay_out(state, mesh, layout)

        # The parameters are master weights already and points stay in float32: nothing is cast.
        options: dict[str, Any] = {"keep_full": True, "use_mixed_precision": half is not None}
        if half is not None:
            options["policy"] = f"params=float32,compute={half},output=float32"

        def gathered(model, rows, **kwargs):
            everywhere = NamedSharding(mesh, P())
            return loss(mpx.gather_parameters(model, everywhere, dtype=half), rows, **kwargs)

        def gradients(model, scaling, rows):
            """Returns value, scaling, flag and gradients of the mean over all rows."""
            if layout != "shard_map":
                whole = gathered if layout == "full" else loss
                return mpx.filter_value_and_grad(whole, scaling, **options)(model, rows)

            arrays, static = eqx.partition(model, eqx.is_array)

            def share(model, rows, **kwargs):
                # This device's share of the mean over all rows, so that cotangents, and with them
                # the scales, are those of one device.
                return loss(model, rows, **kwargs) / mesh.size

            def local(arrays, scaling, rows):
                # Each device gets its own copy, so that JAX leaves the sum of gradients to us.
                own = lax.pcast(arrays, DEVICES, to="varying")
                grad_fn = mpx.filter_value_and_grad(share, scaling, axis_name=DEVICES, **options)
                value, scaling, finite, grads = grad_fn(eqx.combine(own, static), rows)
                mean = mpx.all_reduce_mean(grads, DEVICES, dtype=sum_dtype)
                grads = jtu.tree_map(lambda g: mesh.size * g, mean)
                return lax.psum(value, DEVICES), scaling, finite, grads

            specs = (P(), P(), P(DEVICES))
            mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
            return mapped(arrays, scaling, rows)

        def step(state):
            model, opt_state, scaling, key, i = state
            rows = make_batch(jax.random.fold_in(key, i), batch)
            if overflow_at is not None:  # only in the last row, so only on one device
                bad = (i == overflow_at) & (jnp.arange(batch) == batch - 1)
                rows["weight"] = jnp.where(bad, 1e30, rows["weight"])
            rows = lax.with_sharding_constraint(rows, NamedSharding(mesh, P(DEVICES)))
            value, scaling, finite, grads = gradients(model, scaling, rows)
            model, opt_state = mpx.optimizer_update(model, optimizer, opt_state, grads, finite)
            state = State(model, opt_state, scaling, key, i + 1)
            return lay_out(state, mesh, layout), (value, finite)

        self.init, self.raw_step = init, step
        self.step = eqx.filter_jit(step, donate="all")
        if start:
            self.state: State = eqx.filter_jit(init)(jax.random.key(seed))

    def advance(self) -> dict[str, Any]:
        """Takes one step and returns what to log."""
        self.state, (value, finite) = self.step(self.state)
        scaling: Any = self.state.scaling
        loss: Any = scaling.loss if isinstance(scaling, mpx.Scaling) else scaling
        scales = []
        if isinstance(scaling, mpx.Scaling):
            scales = np.asarray(scaling.derivatives.scales).tolist()
        return {
            "step": int(self.state.step),
            "loss": float(value),
            "finite": bool(finite),
            "loss_scale": float(loss.loss_scaling),
            "derivative_scales": scales,
            "skipped": int(scaling.skipped_steps),
        }


# --- Checkpoints -----------------------------------------------------------------------------


def save(manager: ocp.CheckpointManager, state: State) -> None:
    """Saves the arrays as laid out on the devices of all hosts, and the options of the scalings."""
    arrays = ocp.args.StandardSave(eqx.filter(state, eqx.is_array))
    options = ocp.args.JsonSave(mpx.scaling_options(state))
    manager.save(int(state.step), args=ocp.args.Composite(arrays=arrays, scalings=options))


def restore(manager: ocp.CheckpointManager, like: State) -> State:
    """Restores the last checkpoint, laid out like `like`, on any number of devices."""
    step = manager.latest_step()
    if step is None:
        return like
    arrays, static = eqx.partition(like, eqx.is_array)
    arrays = ocp.args.StandardRestore(arrays)
    args = ocp.args.Composite(arrays=arrays, scalings=ocp.args.JsonRestore())
    saved = manager.restore(step, args=args)
    mpx.check_scaling_options(saved["scalings"], like)
    return eqx.combine(saved["arrays"], static)


def train(
    run: Run,
    steps: int,
    *,
    checkpoint: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Trains until step `steps` or until `stop()`, from the last checkpoint if there is one.

    Returns the log of each step.
    """
    log = []
    if checkpoint is None:
        while int(run.state.step) < steps and not stop():
            log.append(run.advance())
        return log
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=max(1, steps // 10))
    with ocp.CheckpointManager(Path(checkpoint).absolute(), options=options) as manager:
        run.state = restore(manager, run.state)
        while int(run.state.step) < steps and not stop():
            log.append(run.advance())
            mpx.error_if_stuck(run.state.step, run.state.scaling, max_consecutive_skips=100)
            save(manager, run.state)
    return log


STEPS, QUICK_STEPS = 200, 20
BATCH, QUICK_BATCH = {"cavity": 1024, "fno": 16}, {"cavity": 64, "fno": 8}
WIDTH, QUICK_WIDTH = 32, 16


def main(
    problem: str = "cavity",
    *,
    layout: str = "data",
    precision: str = "float16",
    sum_dtype: str | None = None,
    quick: bool = False,
    steps: int | None = None,
    batch: int | None = None,
    width: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    log: Path | None = None,
    overflow_at: int | None = None,
    cpu_devices: int | None = None,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    cluster: bool = False,
) -> None:
    """Trains and prints some of the steps; the options are those of the command line."""
    if cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    if cluster:
        jax.distributed.initialize()
    elif coordinator is not None:
        jax.distributed.initialize(coordinator, processes, process_id)

    run = Run(
        problem,
        precision=precision,
        layout=layout,
        sum_dtype=sum_dtype,
        batch=batch or (QUICK_BATCH if quick else BATCH)[problem],
        seed=seed,
        overflow_at=overflow_at,
        width=width or (QUICK_WIDTH if quick else WIDTH),
    )
    steps = steps or (QUICK_STEPS if quick else STEPS)
    # Processes that stop at different steps would wait for each other.
    alone = jax.process_count() == 1
    with stop_on_interrupt() if alone else nullcontext(lambda: False) as stop:
        done = train(run, steps, checkpoint=checkpoint, stop=stop)
        if jax.process_index() == 0:
            print(f"{jax.device_count()} devices in {jax.process_count()} processes, {layout}")
            for line in done[:: max(1, len(done) // 10)]:
                print("step {step:5d}  loss {loss:.3e}  skipped {skipped}".format(**line))
        if log is not None:
            path = log.with_stem(f"{log.stem}-{jax.process_index()}")
            path.write_text(json.dumps(done), encoding="utf-8")


def arguments() -> ArgumentParser:
    """Returns the options of `main`."""
    options = parser(__doc__)
    add = options.add_argument
    add("--problem", choices=PROBLEMS, default="cavity", help="what to train")
    add(
        "--layout",
        choices=LAYOUTS,
        default="data",
        help="contents of every device: all parameters, a part, or all with sums written out",
    )
    precisions = ("float32", "float16", "bfloat16")
    add("--precision", choices=precisions, default="float16", help="precision of the products")
    add(
        "--sum",
        choices=("float16", "bfloat16"),
        dest="sum_dtype",
        help="with --layout shard_map: dtype in which gradients are sent; by default float32",
    )
    add("--quick", action="store_true", help="train a small network for few steps, as a check")
    default = f"by default {STEPS}, or {QUICK_STEPS} with --quick"
    add("--steps", type=positive, help=f"number of steps, including a checkpoint's; {default}")
    default = "by default {cavity:,} (fno: {fno})".format(**BATCH)
    default += ", or {cavity} ({fno}) with --quick".format(**QUICK_BATCH)
    add("--batch", type=positive, help=f"rows in a step; {default}")
    default = f"by default {WIDTH}, or {QUICK_WIDTH} with --quick"
    add("--width", type=positive, help=f"width of the network; {default}")
    add("--seed", type=int, default=0, help="seed of the first weights and the batches")
    add("--checkpoint", type=folder, help="folder to save to and to continue from")
    add("--log", type=file, help="JSON file for loss, scales and skipped steps")
    add("--overflow-at", type=int, help="step at which one device gets an artificial overflow")
    add("--cpu-devices", type=positive, help="number of virtual devices on the CPU")
    add("--coordinator", help="with several processes: address:port of the first")
    add("--processes", type=positive, help="with --coordinator: number of processes")
    add("--process-id", type=int, help="with --coordinator: index of this process, from 0")
    add("--cluster", action="store_true", help="several hosts, found by JAX")
    return options


if __name__ == "__main__":
    run_main(main, arguments())
