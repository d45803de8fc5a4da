"""Compares bytes and operations of compiled programs with XLA's counts and with hand counts."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import predicted
from benchmarks._chips import H100
from benchmarks._hlo import Module, Shape, shapes
from benchmarks._roofline import KINDS, Roofline, summary


# A small version of XLA's output: a fusion that reads a slice and multiplies it, a product with a
# workspace, a loop that runs the product five times, and an update in place.
TEXT = (Path(__file__).parent / "small_program.hlo").read_text(encoding="utf-8")


def test_a_program_is_read_as_it_stands():
    module = Module.parse(TEXT)
    assert module.entry == "main"
    want = [Shape("f16", (10, 8)), Shape("s8", (1000,)), Shape("f32", ())]
    assert shapes("(f16[10,8]{1,0}, s8[1000]{0}, f32[])") == want
    launched = [(launch.instruction.opcode, launch.times) for launch in module.launched()]
    assert sorted(launched) == [("custom-call", 5), ("fusion", 1), ("fusion", 1)]
    with pytest.raises(ValueError, match="takes optimized HLO"):
        Module.parse("HloModule nothing")


def test_bytes_and_operations_are_those_of_a_hand_count():
    fusion, gemm, update = Roofline(Module.parse(TEXT)).kernels()
    # Reads 10 rows of the slice and `b`, writes half the bytes of either. The sum takes `multiply`.
    assert (fusion.read, fusion.written) == (2 * 320, 160)
    assert fusion.arithmetic == 80 * (1 + 20 + 2)
    assert (fusion.kind, fusion.own_seconds) == ("elementwise", 4.5e-6)
    # 10 × 8 × 4 terms, five times. The workspace causes no traffic.
    assert gemm.products == {"half": 2 * 10 * 8 * 4}
    assert (gemm.read, gemm.written, gemm.times) == (160 + 64, 160, 5)
    # The update reads a row and its index, and writes a row.
    assert (update.read, update.written) == (32 + 4, 32)


def test_times_are_the_longest_of_what_a_kernel_does():
    kernels = Roofline(Module.parse(TEXT)).kernels()
    record = summary(kernels, H100)
    assert record["kernels"] == 7
    assert record["seconds"] == pytest.approx(7 * H100.launch)
    assert record["seconds_by_xla"] == pytest.approx(6 * H100.launch + 4.5e-6)
    assert record["operations"] == {"half": 5 * 640}
    assert sum(kind["kernels"] for kind in record["by_kind"].values()) == 7
    assert set(record["by_kind"]) == set(KINDS)


def _network(w, x):
    y = jnp.tanh(x @ w)
    return jnp.sum(y * y[::-1])


@pytest.mark.parametrize("fun", [_network, jax.grad(_network)], ids=["forward", "gradient"])
def test_bytes_and_products_on_a_cpu_are_those_that_xla_counts(fun):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    compiled = jax.jit(fun).lower(shape(256, 384), shape(512, 256)).compile()
    cost, text = compiled.cost_analysis(), compiled.as_text()
    assert cost is not None
    assert text is not None
    record = summary(Roofline(Module.parse(text)).kernels(), H100)
    # XLA also counts traffic of constants and scalars, which is less than a percent here.
    assert record["bytes"] == pytest.approx(cost["bytes accessed"], rel=0.05)
    products = 1 if fun is _network else 2
    (operations,) = record["operations"].values()
    assert operations == products * 2 * 512 * 256 * 384


def test_the_traffic_of_small_steps_may_hardly_grow():
    before = {"a": {"bytes": 1000.0, "kernels": 10}, "b": {"bytes": 1.0, "kernels": 1}}
    assert predicted.growth(before, before) == []
    fewer = {**before, "a": {"bytes": 500.0, "kernels": 10}}
    assert predicted.growth(before, fewer) == []
    more = {**before, "a": {"bytes": 1019.0, "kernels": 11}}
    assert predicted.growth(before, more) == ["a: kernels grew from 10 to 11, by 10.0%"]
    more = {**before, "a": {"bytes": 1021.0, "kernels": 10}}
    assert predicted.growth(before, more) == ["a: bytes grew from 1,000 to 1,021, by 2.1%"]
    assert len(predicted.growth(before, {"a": before["a"]})) == 1


def test_the_ideal_is_the_products_and_the_state():
    module = Module.parse(TEXT)
    seconds = predicted.ideal_seconds(module, Roofline(module).kernels(), H100)
    # Parameters of 3200, 320, 64, 32 and 4 bytes go in, and 3200 bytes come out.
    moved = (2 * 3200 + 320 + 64 + 32 + 4) / (3.35e12 * 0.85)
    assert seconds == pytest.approx(5 * 640 / (989e12 * 0.6) + moved)
