"""jNO as a client: its own loop, and one around its residuals, train in half precision as
`docs/jno.md` says. Skipped where it is not installed (the extra `jno`)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import HALVES
from pages import ROOT


pytestmark = pytest.mark.slow


ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

# Looked for without an import, which would change JAX's settings for the tests behind these.
if importlib.util.find_spec("jno") is None:
    pytest.skip("could not find 'jno'", allow_module_level=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jno")
    script = Path(__file__).with_name("train_with_jno.py")
    # Where jNO leaves its logs, and no cache of programs in the user's home.
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JNO_COMPILE_CACHE": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env["XLA_FLAGS"] = env["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 600}
    command = [sys.executable, str(script), str(ROOT / "docs/jno.md")]
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr
    # By its loop with autocast around the residuals, and no more, nothing is unknown.
    assert "not in registry" not in done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("half", HALVES)
def test_all_products_of_the_gradient_that_jno_takes_are_half(half, result):
    of_full, of_half = result["measured"]["float32"], result["measured"][half]
    assert list(of_full["products"]) == ["float32"]
    assert of_half["products"] == {half: of_full["products"]["float32"]}
    assert of_half["dtype"] == "float32"
    # Half a roundoff in the gradient, twice as much elsewhere; in the loss, a mean over 144 points,
    # roundings mostly cancel.
    assert of_half["value"] < ROUNDOFF[half] / 8
    assert 0 < of_half["gradient"] < 2 * ROUNDOFF[half]


@pytest.mark.parametrize("loop", ["bfloat16", "float16", "own"])
def test_a_problem_of_jno_trains_in_half_precision(loop, result):
    errors = result["errors"]
    # Of a solution of one. Adam's steps of 5e-3 leave each run, float32's too, at a thousandth or
    # two, now more and now less.
    assert errors["float32"] < 5e-3
    assert errors[loop] < 5e-3
    assert errors[loop] != errors["float32"]


def test_steps_that_overflow_are_skipped_in_jnos_loop_and_lower_the_scale(result):
    assert 2.0**8 < result["scale"] < 2.0**24
