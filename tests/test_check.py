"""Tests the check of a device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx_pde import check


def one(error, tolerance=1e-3):
    return [check.Check("products", "one", error, tolerance)]


@pytest.mark.slow
def test_this_device_passes(capfd):
    assert check.main([]) == 0
    out = capfd.readouterr().out
    groups = ("products", "split products", "scatters and loops", "PINN step", "FNO step")
    assert all(f"\n{group} " in out for group in groups)
    assert "jaxlib" in out
    assert "cpu: " in out
    assert "checks passed" in out
    assert "FAILED" not in out


def test_the_exit_status_tells_of_a_failure(capfd):
    def broken() -> float:
        raise RuntimeError("no kernel\nof this kind")

    assert check.main([], one(lambda: 1e-4)) == 0
    for error in (lambda: 1e-2, lambda: float("nan"), broken):
        assert check.main([], one(error)) == 1
        out = capfd.readouterr().out
        assert "1 of 1 checks FAILED: products, one." in out
    assert "RuntimeError: no kernel" in out


SLOW = pytest.param("float16, sums in float32", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [SLOW, "segment_sum", "bfloat16_x3", "softmax"])
def test_a_device_that_computes_wrongly_fails(monkeypatch, name):
    """A device that loses one entry of its results, as a miscompiled kernel does."""
    (found,) = (x for x in check.checks() if x.name == name)
    assert check.run(found).passed
    right = check.on_device

    def wrong(fun, *args):
        def lost(x):
            x = np.array(x)
            x[(0,) * x.ndim] *= 0.99
            return x

        return jax.tree.map(lost, right(fun, *args))

    monkeypatch.setattr(check, "on_device", wrong)
    assert not check.run(found).passed


def test_a_step_whose_gradient_is_wrong_or_infinite_fails(monkeypatch):
    (step,) = (x for x in check.checks() if (x.group, x.name) == ("PINN step", "float16"))

    def zeros(fun, model, batch):
        return 1.0, None, True, jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))

    monkeypatch.setattr(check, "on_device", zeros)
    assert not check.run(step).passed
    monkeypatch.setattr(check, "on_device", lambda *_: (1.0, None, False, ()))
    assert check.run(step).error == float("inf")
