"""Tests the types of the installed package: pyright in strict mode checks a user's script against
the built wheel."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from pages import ROOT


# Both are in the extra `dev`, which `.ci/run` installs for the linters.
needs_tools = [pytest.importorskip(name) for name in ("pyright", "hatchling.build")]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds the wheel and the source distribution, and returns their folder."""
    folder = tmp_path_factory.mktemp("dist")
    code = "import sys; import hatchling.build as b; b.build_{}(sys.argv[1])"
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", code.format(kind), str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def python(built, tmp_path_factory):
    """Returns the Python of an environment with the wheel and this environment's packages."""
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
    "reportMissingTypeStubs": False,  # other packages lack them
}


def check(python, folder, script):
    """Returns pyright's messages about a script in strict mode, as `{line: [message]}`."""
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


@pytest.mark.slow
def test_a_script_passes_in_strict_mode(python, tmp_path):
    script = Path(__file__).with_name("typed_script.py").read_text(encoding="utf-8")
    assert check(python, tmp_path, script) == {}


# Each line except the first is wrong.
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
