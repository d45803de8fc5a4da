"""Where in the user's code an equation comes from, and by way of which part of this library."""

import functools as ft
import os
import sys
import sysconfig
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jaxtyping
from jax.extend.core import JaxprEqn

from ..interpret._jaxpr import bodies_of
from ..interpret._products import HOME


_PLUMBING = tuple(os.path.join(m.__path__[0], "") for m in (jax, eqx, jaxtyping))
_LAYERS = os.path.join(_PLUMBING[1], "nn", "")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = os.path.join(sysconfig.get_path("stdlib"), "site-packages") + os.sep


class Place(NamedTuple):
    line: str = ""
    """`file:line` in the user's code."""
    layer: str = ""
    """The function or class of this library that the user called there, if it is one's work, or
    the layer of Equinox."""
    backward: bool = False
    """Whether it belongs to the backward pass of a derivative."""
    body: tuple[str, str] | None = None
    """File and name of the function of JAX or of this library whose jaxpr this is in."""


@ft.cache
def _is_ours(file: str) -> bool:
    return file.startswith(HOME)


@ft.cache
def _is_users(file: str) -> bool:
    # Installed packages may lie inside the directory of the standard library.
    if _is_ours(file) or file.startswith((*_PLUMBING, "<@beartype")):
        return False
    return file.startswith(_INSTALLED) or not file.startswith(_STANDARD)


def place_of(eqn: JaxprEqn, outer: Place) -> Place:
    """The place of an equation of a jaxpr that belongs to `outer`."""
    backward = outer.backward or "transpose(" in str(eqn.source_info.name_stack)
    ours = []
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        file, name = frame.file_name, frame.function_name
        if outer.body and file == outer.body[0] and name.rpartition(".")[2] == outer.body[1]:
            # A function that JAX traces once says where it was called first: what counts is where
            # it is called here.
            break
        if _is_ours(file) or file.startswith(_LAYERS):
            ours.append((file, name))
        elif _is_users(file):
            return Place(f"{file}:{frame.line_num}", _layer(ours), backward, outer.body)
    # A trace inside of another, such as that of a checkpoint, does not see who called it.
    # What is only known to be of the library, such as the loop around a first step, names no layer.
    named = outer.layer if outer.layer != "mpx_pde" else ""
    return outer._replace(layer=named or _layer(ours) or outer.layer, backward=backward)


def definition_of(fun: Any) -> Place:
    """Where a function of the user is defined: the place of what has no other."""
    while hasattr(fun, "__wrapped__"):
        fun = fun.__wrapped__
    code = getattr(fun, "__code__", None) or getattr(type(fun).__call__, "__code__", None)
    if code is None or not _is_users(code.co_filename):
        return Place()
    return Place(f"{code.co_filename}:{code.co_firstlineno}")


def inside(eqn: JaxprEqn, place: Place) -> Place:
    """The place of the jaxprs in a container."""
    if eqn.primitive.name != "jit":
        return place
    [closed] = bodies_of(eqn)
    info = closed.jaxpr.debug_info
    file = info.func_filename
    if file is None or _is_users(file):
        return place._replace(body=None)
    return place._replace(body=(file, info.func_name.rpartition(".")[2]))


# What public functions return, by what users know it as.
_RETURNED = {"Evaluation": "partials"}


def _layer(ours: list[tuple[str, str]]) -> str:
    """The outermost part of the library with a public name, networks before all others; a layer of
    Equinox is its own, whoever calls it."""
    # Looked up: an import would run in a circle, since the package imports this module.
    mpx_pde = sys.modules[__name__.partition(".")[0]]
    names = [(file, name.partition(".")[0]) for file, name in reversed(ours)]
    if names and not _is_ours(names[-1][0]):
        # The innermost: the layers of a model are told apart by what they are.
        return next((f"eqx.nn.{x}" for _, x in reversed(names) if hasattr(eqx.nn, x)), "")
    for file, name in names:
        if file.startswith(os.path.join(HOME, "nn", "")) and hasattr(mpx_pde.nn, name):
            return name
    for file, name in names:
        name = _RETURNED.get(name, name)
        if _is_ours(file) and not name.startswith("_") and hasattr(mpx_pde, name):
            return name
    return "mpx_pde" if names else ""


def is_ours(layer: str) -> bool:
    """Whether a layer is one of this library."""
    return bool(layer) and not layer.startswith("eqx.nn.")
