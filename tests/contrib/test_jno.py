"""Tests jNO as a client: its own loop and a loop around its residuals train in half precision, as
in `docs/other_libraries.md`. The tests are skipped if it is not installed (the extra `jno`)."""

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

# Does not import jNO, because that would change JAX's settings for later tests.
if importlib.util.find_spec("jno") is None:
    pytest.skip("could not find 'jno'", allow_module_level=True)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jno")
    script = Path(__file__).with_name("train_with_jno.py")
    # jNO writes its logs to this folder, and no cache of programs to the user's home.
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JNO_COMPILE_CACHE": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env["XLA_FLAGS"] = env["XLA_FLAGS"].replace("device_count=8", "device_count=1")
    options = {"cwd": folder, "env": env, "capture_output": True, "text": True, "timeout": 600}
    command = [sys.executable, str(script), str(ROOT / "docs/other_libraries.md")]
    done = subprocess.run(command, **options, check=False)
    assert done.returncode == 0, done.stderr
    # jNO's loop with autocast around the residuals reports no unknown operation.
    assert "not in registry" not in done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("half", HALVES)
def test_all_products_of_the_gradient_that_jno_takes_are_half(half, result):
    of_full, of_half = result["measured"]["float32"], result["measured"][half]
    assert list(of_full["products"]) == ["float32"]
    assert of_half["products"] == {half: of_full["products"]["float32"]}
    assert of_half["dtype"] == "float32"
    # The gradient is off by half a roundoff here, by twice as much elsewhere. The loss is a mean
    # over 144 points, so its roundings mostly cancel.
    assert of_half["value"] < ROUNDOFF[half] / 8
    assert 0 < of_half["gradient"] < 2 * ROUNDOFF[half]


@pytest.mark.parametrize("loop", ["bfloat16", "float16", "own"])
def test_a_problem_of_jno_trains_in_half_precision(loop, result):
    errors = result["errors"]
    # Errors of a solution of size one. Adam's steps of 5e-3 leave every run, float32's too, at an
    # error of one or two thousandths.
    assert errors["float32"] < 5e-3
    assert errors[loop] < 5e-3
    assert errors[loop] != errors["float32"]


def test_steps_that_overflow_are_skipped_in_jnos_loop_and_lower_the_scale(result):
    assert 2.0**8 < result["scale"] < 2.0**24
