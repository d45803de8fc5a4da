"""Tests the import of the package, the order of its modules, and its public names."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

import mpx_pde as mpx
from mpx_pde._util._types import GradientOptions
from mpx_pde.modes._choice import mode_of


PACKAGE = Path(mpx.__file__).parent
# All files by the names of their modules. An `__init__` has the name of its package.
FILES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}

# Each module imports only from modules before it. A package is one unit.
ORDER = [
    ["_util"],
    ["precision"],
    ["program"],
    ["products"],
    ["scaling"],
    ["checkpoint_policies"],
    ["engine"],
    ["derivatives", "reports"],
    ["modes"],
    ["training"],
    ["second_order"],
    ["nn"],
    ["check", "contrib"],
    ["__init__"],
]


@pytest.mark.slow
def test_importing_starts_no_backend_and_changes_no_setting():
    code = """
import jax
before = dict(jax.config.values)
import mpx_pde as mpx
for name in dir(mpx):
    getattr(mpx, name)
assert mpx.HALF_PRECISION_DATATYPE == "float16"
mpx.set_half_precision_datatype("bfloat16")
assert mpx.HALF_PRECISION_DATATYPE == "bfloat16"
@mpx.force_full_precision
def decorated(x):
    return x
assert dict(jax.config.values) == before
print("imported")
jax.devices()
"""
    paths = {"PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "no_such_platform"}
    options = {"env": os.environ | paths, "capture_output": True, "text": True, "timeout": 120}
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], **options, check=False)
    assert out.stdout == "imported\n", out.stderr
    # The last line shows that a backend would not have started.
    assert "no_such_platform" in out.stderr


def imported(name: str) -> list[tuple[str, str | None]]:
    """Returns the modules of this package that a module imports, inside or outside of functions,
    each with the imported name, or `None` for the module itself."""
    package = name.split(".") if FILES[name].stem == "__init__" else name.split(".")[:-1]
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found += [(x.name, None) for x in node.names if x.name.split(".")[0] == PACKAGE.name]
        if not isinstance(node, ast.ImportFrom):
            continue
        base = [*package[: len(package) + 1 - node.level]] if node.level else []
        base = ".".join([*base, *filter(None, [node.module])])
        for alias in node.names if base.split(".")[0] == PACKAGE.name else ():
            inner = f"{base}.{alias.name}"
            found.append((inner, None) if inner in TREES else (base, alias.name))
    return found


def unit(name: str) -> str:
    """Returns the name in `ORDER` of the module or package to which a file belongs."""
    return [*name.split("."), "__init__"][1]


def test_imports_run_one_way():
    names_of = {name for names in ORDER for name in names}
    assert {unit(name) for name in TREES} == names_of
    order = {name: i for i, names in enumerate(ORDER) for name in names}
    for name in TREES:
        for module, _ in imported(name):
            here, there = unit(name), unit(module)
            assert here == there or order[there] < order[here], (name, module)


def test_no_private_name_crosses_the_border_of_a_module():
    for name in TREES:
        private = [f"{x} of {module}" for module, x in imported(name) if x and x.startswith("_")]
        assert private == [], name


def test_no_module_uses_the_private_parts_of_jax():
    using = [name for name, path in FILES.items() if re.search(r"\b_src\b", path.read_text())]
    assert using == []


def reexports() -> dict[str, str]:
    """Returns the names that `__init__` re-exports, each with its module."""
    out = {}
    for node in TREES[PACKAGE.name].body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for alias in node.names:
                # `X as X` tells type checkers that the name is public.
                assert alias.asname == alias.name, alias.name
                out[alias.name] = node.module
    return out


def test_public_names_are_those_that_init_reexports():
    names = reexports()
    assert names
    public = {
        name
        for name, value in vars(mpx).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(names)
    packages = {"checkpoint_policies", "contrib", "derivatives", "nn"}
    assert all(isinstance(getattr(mpx, name), ModuleType) for name in packages)
    # `dir` shows these, and no package that importing them has left behind.
    every = {*names, *packages, "HALF_PRECISION_DATATYPE"}
    assert {name for name in dir(mpx) if not name.startswith("__")} == every
    assert sorted(mpx.__all__) == sorted(every)
    for name, module in names.items():
        assert getattr(sys.modules[f"mpx_pde.{module}"], name) is getattr(mpx, name)
    assert isinstance(mpx.__version__, str)


@pytest.mark.parametrize("name", ["checkpoint_policies", "contrib", "derivatives", "nn"])
def test_public_modules_offer_only_their_own_names(name):
    module = getattr(mpx, name)
    # The hook that checks annotations adds `jaxtyping`.
    own = [x for x in vars(module) if not x.startswith("_") and x != "jaxtyping"]
    offered = getattr(module, "__all__", own)
    assert offered
    for value in (getattr(module, x) for x in offered):
        assert not isinstance(value, ModuleType)
        assert type(value).__module__.startswith("mpx_pde.") or (
            value.__module__.startswith("mpx_pde.")
        )


def test_public_names_have_docstrings():
    for name in reexports():
        value = getattr(mpx, name)
        if isinstance(value, float):
            continue
        assert value.__doc__, name
        assert value.__doc__.strip()[0].isupper() or value.__doc__.startswith("["), name
        for method, function in vars(value).items() if isinstance(value, type) else []:
            is_member = callable(function) or isinstance(function, property)
            if is_member and not method.startswith("_"):
                assert function.__doc__, f"{name}.{method}"


# --- Types -----------------------------------------------------------------------------------


TRANSFORMATIONS = mpx.filter_grad, mpx.filter_value_and_grad, mpx.calculate_scaled_grad
TRANSFORMATIONS += mpx.filter_accumulated_value_and_grad, mpx.line_search_value


@pytest.mark.parametrize("transform", TRANSFORMATIONS)
def test_type_checkers_know_the_options_of_the_gradient_transformations(transform):
    """Their overloads take the options as one `TypedDict`."""
    parameters = inspect.signature(transform).parameters.values()
    options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"in_axes"}
    assert options == set(get_type_hints(GradientOptions))
    # They and `use_mixed_precision` select the mode, all but the mesh axis.
    chosen = {"use_mixed_precision", *options} - {"axis_name"}
    assert chosen == set(inspect.signature(mode_of).parameters)
