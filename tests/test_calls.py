"""Tests that a message names the innermost public function that the user has called."""

import inspect
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import mpx_pde as mpx
from mpx_pde._util._calls import called, named, public


SCALING = mpx.NoOpLossScaling()
MODEL = jnp.ones(2)
NAMES = {"coords": "xy", "outputs": "u"}
OUTSIDE = called()


def message(fun, *args, error=(TypeError, ValueError)):
    """Returns the name at the start of the message with which `fun(*args)` fails, and checks that
    no name is left behind."""
    with pytest.raises(error) as caught:
        fun(*args)
    assert called() == OUTSIDE
    return str(caught.value).split("`")[1]


@public
def plain(x, *, y=1):
    """Says nothing."""
    return called()


@public
def drives(generator):
    return next(generator)[1], called()


class Owner:
    @public
    def __init__(self):
        self.built = called()

    @classmethod
    @public
    def made(cls):
        return called()

    @public
    def __call__(self):
        return called(), plain(0), called()


def test_functions_classes_and_methods_name_themselves():
    assert plain(0) == "plain"
    assert (Owner().built, Owner.made(), Owner()()) == (
        "Owner",
        "Owner.made",
        ("Owner", "plain", "Owner"),
    )
    assert str(inspect.signature(plain)) == "(x, *, y=1)"
    assert (plain.__name__, plain.__doc__) == ("plain", "Says nothing.")


def test_the_innermost_function_is_named_and_the_outer_one_after_it():
    def wrong_inside(model):
        return mpx.partials(jnp.sum, ["v"], **NAMES)(model)["v"]

    def wrong_after(model):
        mpx.partials(jnp.sum, ["u"], **NAMES)(model)
        mpx.filter_grad(jnp.sum, SCALING)(model)
        return model

    def caught_inside(model):
        with pytest.raises(ValueError, match="`partials`"):
            mpx.partials(jnp.sum, ["v"], **NAMES)
        return model

    gradient = mpx.filter_grad
    assert message(gradient(wrong_inside, SCALING), MODEL) == "partials"
    assert message(gradient(wrong_after, SCALING), MODEL) == "filter_grad"
    assert message(gradient(caught_inside, SCALING), MODEL) == "filter_grad"


def test_what_a_function_returns_keeps_its_name_for_later():
    first = mpx.laplacian(lambda p: jnp.stack([p[0], p[0]]), **NAMES)
    second = mpx.filter_grad(lambda model: model, SCALING)
    third = mpx.derivatives.jacrev(mpx.derivatives.jacfwd(lambda x: "no array"))
    fourth = mpx.scaled(lambda x: x, SCALING, has_aux=True)
    mpx.partials(jnp.sum, ["u"], **NAMES)(MODEL)  # names no later call
    assert message(first, MODEL) == "laplacian"
    assert message(first.report, MODEL) == "laplacian"
    assert message(second, MODEL) == "filter_grad"
    assert message(third, 1.0) == "jacrev"
    assert message(fourth, 1.0) == "scaled"
    # Also inside of one another.
    assert message(mpx.filter_grad(lambda model: first(model)["lap_u"], SCALING), MODEL) == (
        "laplacian"
    )


@pytest.mark.parametrize(
    "transform",
    [eqx.filter_jit, jax.vmap, jax.grad, jax.checkpoint, jax.linearize, jax.eval_shape],
)
def test_names_are_right_while_jax_traces(transform):
    def loss(model):
        return mpx.partials(lambda p: p, ["u"], **NAMES)(model)["u"]

    gradient = mpx.filter_grad(loss, SCALING)
    gradient = lambda x, gradient=gradient: gradient(x)[-1].sum()
    x = jnp.ones((3, 2)) if transform is jax.vmap else MODEL
    takes_values = transform in (jax.linearize, jax.eval_shape)
    for _ in range(2):  # JAX keeps no trace that has failed
        if takes_values:
            assert message(transform, gradient, x) == "partials"
        else:
            assert message(transform(gradient), x) == "partials"


def test_a_generator_takes_no_name_along_while_it_waits():
    def steps():
        for terms in (["u"], ["u_x"]):
            yield mpx.partials(jnp.sum, terms, **NAMES)(MODEL), called()

    waiting = steps()
    assert drives(waiting) == ("drives", "drives")
    assert called() == OUTSIDE
    assert next(waiting)[1] == OUTSIDE
    with mpx.half_precision("bfloat16"):
        assert called() == OUTSIDE
        assert message(mpx.cast_tree, MODEL, "int8") == "cast_tree"
    with pytest.raises(ValueError, match="`half_precision` takes"):
        mpx.half_precision("float32").__enter__()

    def generator():
        yield

    with pytest.raises(AssertionError):  # its body would run after the name has gone
        public(generator)


def test_threads_do_not_share_names():
    found = []
    with named("here"):
        thread = threading.Thread(target=lambda: found.append(called()))
        thread.start()
        thread.join()
        assert called() == "here"
    assert found == [OUTSIDE]
