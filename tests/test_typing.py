"""What a type checker sees of the package that is installed: pyright, in strict mode, on a user's
script against the built wheel."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile

import pytest
from pages import ROOT


# Both are of the extra `dev`, which `.ci/run` installs for the linters.
needs_tools = [pytest.importorskip(name) for name in ("pyright", "hatchling.build")]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    code = "import sys; import hatchling.build as b; b.build_{}(sys.argv[1])"
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", code.format(kind), str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """The Python of an environment in which the wheel is installed, and what this one has."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    return folder / "bin" / "python"


CONFIG = {
    "typeCheckingMode": "strict",
    "include": ["script.py"],
    "reportMissingTypeStubs": False,  # of other packages
}


def check(python, folder, script):
    """What pyright says of a script in strict mode, as `{line: [message]}`."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", str(python)]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--project", str(folder)], **options, timeout=300, check=False)
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == 1
    found: dict[int, list[str]] = {}
    for d in told["generalDiagnostics"]:
        found.setdefault(d["range"]["start"]["line"] + 1, []).append(d["message"])
    return found


RIGHT = """
from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx_pde as mpx


def loss(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(x) ** 2)


def loss_and_aux(model: eqx.nn.MLP, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return loss(model, x), x


def pinn(model: Any, x: jax.Array, *, derivatives: Any) -> jax.Array:
    terms = mpx.partials(model, ["u", "u_xx"], coords="x", outputs="u", scaling=derivatives)
    values = jax.vmap(terms)(x)
    return jnp.mean(values["u_xx"])


def train(model: eqx.nn.MLP, x: jax.Array) -> None:
    scaling = mpx.DynamicLossScaling(2**10, period=100)
    value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(model, x)
    assert_type(value, jax.Array)
    assert_type(scaling, mpx.DynamicLossScaling)
    assert_type(finite, jax.Array)
    (value, aux), scaling, finite, grads = mpx.filter_value_and_grad(
        loss_and_aux, scaling, has_aux=True, policy="compute=bfloat16"
    )(model, x)
    assert_type(value, jax.Array)
    assert_type(scaling, mpx.DynamicLossScaling)
    value, grads = mpx.calculate_scaled_grad(loss, scaling)(model, x)
    assert_type(value, jax.Array)

    both = mpx.Scaling(scaling, mpx.DerivativeScaling.per_direction("x"))
    both, finite, grads = mpx.filter_grad(pinn, both)(model, x)
    assert_type(both, mpx.Scaling)
    assert_type(both.loss, mpx.AbstractLossScaling)

    optimizer = optax.adam(1e-3)
    state: Any = None
    model, state = mpx.optimizer_update(model, optimizer, state, grads, finite)
    print(aux, state)


def products(x: jax.Array) -> jax.Array:
    y = mpx.mixed_matmul(x, x, dtype="bfloat16", out_dtype=jnp.float32)
    return mpx.mixed_dot_general(x, y, (((1,), (0,)), ((), ())), dtype=np.float16)


def others(model: eqx.nn.MLP, x: jax.Array) -> None:
    half: Callable[..., Any] = mpx.cast_function(model, jnp.float16, "float32")
    fast = mpx.autocast(model, "bfloat16_x3", full="readout")
    assert_type(fast.report(x), mpx.AutocastReport)
    assert_type(mpx.range_report(half)(x), mpx.RangeReport)
    assert_type(mpx.laplacian(model, coords="xy", outputs=["u"])(x)["laplacian"], jax.Array)
    with mpx.half_precision(jnp.bfloat16):
        assert_type(mpx.half_precision_datatype(), np.dtype[Any])
        assert_type(mpx.HALF_PRECISION_DATATYPE, np.dtype[Any])
    network = mpx.nn.CoordinateMLP(2, "scalar", 16, 2, key=jax.random.key(0), dtype="float16")
    print(network(x), mpx.FLOAT16_MAX)
"""


@pytest.mark.slow
def test_a_script_passes_in_strict_mode(python, tmp_path):
    assert check(python, tmp_path, RIGHT) == {}


# Each line but the first is wrong.
WRONG = """import mpx_pde as mpx
mpx.nosuch
mpx.DynamicLossScaling("a")
mpx.DynamicLossScaling(period="often")
mpx.filter_grad(abs, "dynamic")
mpx.filter_grad(abs, None, police=None)
mpx.filter_grad(abs, None, policy=16)
mpx.cast_tree([], 16)
mpx.mixed_matmul([], [], dtype=None)
mpx.partials(abs, 3, coords="x", outputs="u")
mpx.nn.CoordinateMLP(2, "vector", 16, 2)
"""


@pytest.mark.slow
def test_what_is_wrong_is_found(python, tmp_path):
    found = check(python, tmp_path, WRONG)
    assert set(range(2, 1 + len(WRONG.splitlines()))) <= set(found)


@pytest.mark.slow
def test_the_wheel_says_that_it_is_typed(built):
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "mpx_pde/py.typed" in names
    assert not [name for name in names if not re.match(r"mpx_pde(-[\w.]+\.dist-info)?/", name)]


def test_the_source_distribution_has_what_its_tests_import(built):
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    results = "benchmarks/results/predicted-h100-cpu.json"
    assert names >= {"benchmarks/__main__.py", results, "README.md"}
    tracked = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")]
    assert names.issuperset(tracked)
    assert names.issuperset(p.relative_to(ROOT).as_posix() for p in ROOT.glob("examples/*.py"))
