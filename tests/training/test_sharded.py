"""Tests that a training has the same curve on 1 to 8 devices, in all layouts, in two processes."""

import importlib
import json
import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from pages import ROOT


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


EXAMPLE = ROOT / "examples" / "sharded.py"
sharded = importlib.import_module("sharded")
STEPS, BAD = 6, 3
SIZES = {"batch": 64, "width": 16}


def log_of(devices, **options):
    """Returns the log of a run with an overflow planted in the last row of step `BAD`."""
    cavity = sharded.PROBLEMS["cavity"]
    traced = []

    def batch(key, size):
        traced.append(size)
        return cavity.batch(key, size)

    # The reference run is made before the fixtures of a test.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(sharded.PROBLEMS, "cavity", cavity._replace(batch=batch))
        run = sharded.Run(overflow_at=BAD, devices=jax.devices()[:devices], **SIZES, **options)
        log = sharded.train(run, STEPS)
    assert len(traced) == 1  # one compiled step served clean and skipped steps alike
    return log


@pytest.fixture(scope="module")
def reference():
    return log_of(1)


def check_same(log, reference, rtol):
    for key in ("finite", "loss_scale", "derivative_scales", "skipped"):
        assert [line[key] for line in log] == [line[key] for line in reference]
    losses = [[line["loss"] for line in lines] for lines in (log, reference)]
    np.testing.assert_allclose(*losses, rtol=rtol)


# float32 sums over the batch in another order move a parameter by an ulp, and change some roundings
# to float16: 2^-11 of one of many terms, over six steps.
ORDER = 2.0**-9


def test_the_planted_overflow_is_skipped(reference):
    assert [line["finite"] for line in reference] == [i != BAD for i in range(STEPS)]
    assert reference[-1]["skipped"] == 1


LAYOUTS = [(2, "data", None), (8, "data", None), (4, "full", None), (8, "shard_map", None)]


@pytest.mark.parametrize(
    ("devices", "layout", "sum_dtype"), [*LAYOUTS, (8, "shard_map", "bfloat16")]
)
def test_the_curve_is_that_of_one_device(reference, devices, layout, sum_dtype):
    log = log_of(devices, layout=layout, sum_dtype=sum_dtype)
    # 2^-8 of each gradient. Adam's steps follow its sign, and six of them stay close.
    check_same(log, reference, 2.0**-4 if sum_dtype else ORDER)


@pytest.mark.parametrize("layout", ["full", "shard_map"])
def test_two_processes_with_two_devices_each(reference, tmp_path, layout):
    flags = re.sub(r"--xla_force_host_\S+", "", os.environ.get("XLA_FLAGS", ""))
    env = os.environ | {"XLA_FLAGS": flags}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLE), "--layout", layout, "--cpu-devices", "2"]
    command += ["--steps", str(STEPS), "--overflow-at", str(BAD), "--log", str(tmp_path / "log")]
    command += [f"--{name}={size}" for name, size in SIZES.items()]
    command += ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id"]
    options = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([*command, str(i)], **options) for i in range(2)]
    try:
        outputs = [p.communicate(timeout=300)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], "\n".join(outputs)
    assert "4 devices in 2 processes" in outputs[0]
    logs = [json.loads((tmp_path / f"log-{i}").read_text(encoding="utf-8")) for i in range(2)]
    assert logs[0] == logs[1]  # every process skips, with bit-identical results
    check_same(logs[0], reference, ORDER)


def test_a_run_goes_on_from_its_checkpoint_on_another_mesh(reference, tmp_path):
    def run(devices):
        return sharded.Run(overflow_at=BAD, devices=jax.devices()[:devices], layout="full", **SIZES)

    log = sharded.train(run(8), BAD + 1, checkpoint=tmp_path)
    log += sharded.train(run(2), STEPS, checkpoint=tmp_path)
    check_same(log, reference, ORDER)
