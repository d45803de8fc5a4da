"""Finds the place in the user's code that an equation comes from, and the part of this library that
was called there.
"""

import functools as ft
import inspect
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jaxtyping
from jax.extend.core import JaxprEqn


HOME = os.path.join(Path(__file__).parents[1], "")  # the folder of this library
_JAX, _EQUINOX, _JAXTYPING = (os.path.join(m.__path__[0], "") for m in (jax, eqx, jaxtyping))
_LAYERS = os.path.join(_EQUINOX, "nn", "")
_STANDARD = sysconfig.get_path("stdlib") + os.sep


class Site(NamedTuple):
    """The place of an equation in the user's code, as all reports name it.

    **Attributes:**

    - `line`: the innermost `file:line` in the user's code. If there is none, as for a loss object
        of another library, the innermost one in an installed library, not in Equinox if possible.
    - `layer`: the function or class of this library that the user called there, if it made the
        equation, or the layer of Equinox.
    - `backward`: whether the equation belongs to the backward pass of the outermost derivative
        around it; `None` outside of derivatives.
    - `inside`: whether it is inside of a `jax.custom_vjp` that is called on the line.
    - `users`: whether the line is in the user's code.
    - `cast_of`: the values that a cast belongs to: the `"arguments"` of a function, `"derivatives"`
        by `partials` and similar functions, or `"layers"` for values kept in half; else `""`.
    - `body`: the file and name of the function of JAX or of this library whose jaxpr this is in.
    """

    line: str = ""
    layer: str = ""
    backward: bool | None = None
    inside: bool = False
    users: bool = False
    body: tuple[str, str] | None = None
    cast_of: str = ""


@ft.cache
def installed(path: str) -> bool:
    """Returns whether a file belongs to this library or to another installed one."""
    return path.startswith((HOME, "<")) or "-packages/" in path


@ft.cache
def _is_users(file: str) -> bool:
    return not installed(file) and not file.startswith((_JAX, _EQUINOX, _JAXTYPING, _STANDARD))


@ft.cache
def _is_library(file: str) -> bool:
    """Returns whether a file that is not the user's is in a library whose lines users may know."""
    known = "-packages/" in file or not file.startswith(_STANDARD)
    return known and not file.startswith((HOME, "<", _JAX, _JAXTYPING))


NOWHERE = Site()


class _Frame(NamedTuple):
    file: str
    function: str
    line: int


@ft.lru_cache(maxsize=2**14)
def _frames_of(traceback: Any) -> tuple[_Frame, ...]:
    """Returns the frames of a traceback, innermost first. JAX makes them anew at each look."""
    return tuple(_Frame(f.file_name, f.function_name, f.line_num) for f in traceback.frames)


def _frames(source: Any) -> tuple[_Frame, ...]:
    return _frames_of(source.traceback) if source.traceback else ()


_DERIVATIVE = re.compile(r"\b(transpose|jvp)\(")


def site_of(eqn: JaxprEqn, outer: Site = NOWHERE) -> Site:
    """Returns the site of an equation of a jaxpr that belongs to `outer`."""
    backward = outer.backward
    if backward is None and (outermost := _DERIVATIVE.search(str(eqn.source_info.name_stack))):
        backward = outermost.group() == "transpose("
    inside, ours = in_custom_vjp(eqn.source_info), []
    libraries: list[str] = []
    for file, name, number in _frames(eqn.source_info):
        if outer.body and file == outer.body[0] and name.rpartition(".")[2] == outer.body[1]:
            # JAX traces such a function once and records its first call. The call that counts here
            # is in `outer`.
            break
        if file.startswith((HOME, _LAYERS)):
            ours.append((file, name))
        if _is_users(file):
            line = f"{file}:{number}"
            return Site(line, _layer(ours), backward, inside, True, outer.body)
        if _is_library(file):
            libraries.append(f"{file}:{number}")
    # A trace inside of another, such as that of a checkpoint, does not record its caller.
    # `"mpx_pde"` stands for an unknown part of the library and names no layer.
    named = outer.layer if outer.layer != "mpx_pde" else ""
    layer, inside = named or _layer(ours) or outer.layer, inside or outer.inside
    site = outer._replace(layer=layer, backward=backward, inside=inside)
    if outer.users or not libraries:
        return site
    others = [line for line in libraries if not line.startswith(_EQUINOX)]
    return site._replace(line=next(iter(others or libraries)))


def site_within(eqn: JaxprEqn, around: Sequence[JaxprEqn], outer: Site = NOWHERE) -> Site:
    """Returns the site of an equation inside the containers `around` it, which are given outermost
    first. The first of them belongs to `outer`."""
    for container in around:
        outer = site_inside(container, site_of(container, outer))
    return site_of(eqn, outer)


def line_of(eqn: JaxprEqn, around: Sequence[JaxprEqn] = ()) -> str:
    """Returns the line of an equation inside the containers `around` it, or `"unknown"`."""
    return site_within(eqn, around).line or "unknown"


def source_of(eqn: JaxprEqn, calls: Sequence[JaxprEqn]) -> Any:
    """Returns the source to attribute an equation to that is inlined from `calls`. It is its own,
    or that of the call of a function of JAX or this library, which records its first call only."""
    chain = [*calls, eqn]
    for outer, inner in reversed(list(itertools.pairwise(chain))):
        body = site_inside(outer, NOWHERE).body
        if body is None or site_of(inner, Site(body=body)).users:
            return inner.source_info
    return chain[0].source_info


def site_inside(eqn: JaxprEqn, site: Site) -> Site:
    """Returns the site of the jaxprs in a container."""
    if eqn.primitive.name != "jit":
        return site
    info = eqn.params["jaxpr"].jaxpr.debug_info
    file = info.func_filename
    if file is None or _is_users(file):
        return site._replace(body=None)
    return site._replace(body=(file, info.func_name.rpartition(".")[2]))


def definition_of(fun: Any) -> Site:
    """Returns the site where the user defined a function, for rows that have no other site."""
    fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", None) or getattr(type(fun).__call__, "__code__", None)
    if code is None or not _is_users(code.co_filename):
        return Site()
    return Site(f"{code.co_filename}:{code.co_firstlineno}", users=True)


# Classes that public functions return, with the public names of these functions.
_RETURNED = {"Evaluation": "partials"}


def _layer(ours: list[tuple[str, str]]) -> str:
    """Returns the outermost part of the library with a public name, networks first. A layer of
    Equinox is returned under its own name, whoever calls it.
    """
    # Looked up, because an import would be circular: the package imports this module.
    mpx_pde = sys.modules[__name__.partition(".")[0]]
    names = [(file, name.partition(".")[0]) for file, name in reversed(ours)]
    if names and not names[-1][0].startswith(HOME):
        # The innermost, because the layers of a model are distinguished by their classes.
        return next((f"eqx.nn.{x}" for _, x in reversed(names) if hasattr(eqx.nn, x)), "")
    networks = [name for file, name in names if file.startswith(os.path.join(HOME, "nn", ""))]
    others = [_RETURNED.get(name, name) for file, name in names if file.startswith(HOME)]
    public = [name for name in networks if hasattr(mpx_pde.nn, name)]
    public += [name for name in others if not name.startswith("_") and name in mpx_pde.__all__]
    if public:
        return public[0]
    return "mpx_pde.nn" if networks else "mpx_pde" if names else ""


def is_ours(layer: str) -> bool:
    """Returns whether a layer belongs to this library."""
    return bool(layer) and not layer.startswith("eqx.nn.")


_CASTS = {
    "derivatives": ("scaling/_checks.py", "as_network.<locals>.network"),
    "arguments": ("precision/_cast.py", "cast_except"),
}

STORED = "mpx_pde.stored_by_a_layer"
"""The scope of casts of derivatives that a layer stores. They have the line of what is stored, and
no frame of this library."""


def cast_of(eqn: JaxprEqn) -> str:
    """Returns the kind of values that a cast belongs to, as in `Site.cast_of`."""
    if STORED in str(eqn.source_info.name_stack):
        return "layers"
    frames = [(f.file, f.function) for f in _frames(eqn.source_info)]
    for of, (file, name) in _CASTS.items():
        if (os.path.join(HOME, *file.split("/")), name) in frames:
            return of
    return ""


INSIDE = "the `jax.custom_vjp` called there"
"""The words for an equation of which `in_custom_vjp` is true."""


def in_custom_vjp(source: Any) -> bool:
    """Returns whether an equation is inside of a `jax.custom_vjp`, so that its line is that of the
    call. JAX gives the equations of a backward rule the frames of the call, and no other line."""
    for frame in _frames(source):
        if not frame.file.startswith(_JAX):
            return False
        if frame.function.endswith("custom_vjp.__call__"):
            return True
    return False


def is_of_jax(eqn: JaxprEqn, function: str) -> bool:
    """Returns whether an equation was traced inside of a function of JAX."""
    frames = _frames(eqn.source_info)
    return any(f.function == function and f.file.startswith(_JAX) for f in frames)
