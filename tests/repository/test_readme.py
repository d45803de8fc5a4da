"""Tests that the README's commands set up what they use, its links work, and its diff runs."""

import re
import shlex
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from pages import ROOT, blocks

import mpx_pde as mpx


README = ROOT / "README.md"


def command(name: str) -> str:
    pattern = rf"^<!-- command:{name} -->\n```bash\n(.*?)^```$"
    match = re.search(pattern, README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


@pytest.mark.parametrize(("name", "extra"), [("main", "examples"), ("test", "test")])
def test_a_command_is_one_line_that_sets_up_all_it_uses(name, extra):
    text = command(name)
    assert text.count("\n") == 1
    make, install, use = (shlex.split(part) for part in text.split("&&"))
    assert make == ["python3", "-m", "venv", ".venv"]
    assert install == [".venv/bin/pip", "install", "-q", "-e", f".[{extra}]"]
    assert use[0] == ".venv/bin/python"
    if name == "main":
        assert (ROOT / use[1]).is_file()


def test_links_to_files_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert Path(ROOT, link).exists(), link


@pytest.mark.slow
def test_both_sides_of_the_diff_run_and_agree(standard_promotion):
    [(_, diff)] = blocks(README, "diff")
    lines = diff.splitlines()
    assert all(line[:1] in ("+", "-", " ", "") for line in lines)
    before, after = ("\n".join(x[1:] for x in lines if not x.startswith(c)) for c in "+-")
    x = jnp.linspace(-1, 1, 64)[:, None]
    loss = lambda model, batch: jnp.mean((jax.vmap(model)(batch) - batch) ** 2)
    common = {"eqx": eqx, "mpx": mpx, "optimizer": optax.adam(1e-3), "loss_fn": loss}
    model = eqx.nn.MLP(1, 1, 16, 2, key=jax.random.key(0))
    opt_state = common["optimizer"].init(eqx.filter(model, eqx.is_inexact_array))
    full, half = dict(common), dict(common)
    exec(before, full)
    exec(after, half)
    _, _, full_loss = full["step"](model, opt_state, x)
    trained, _, scaling, half_loss = half["step"](model, opt_state, half["scaling"], x)
    assert scaling.skipped_steps == 0
    assert trained.layers[0].weight.dtype == jnp.float32
    # The loss is a mean of squares of values that are rounded to 11 bits.
    assert jnp.allclose(half_loss, full_loss, rtol=1e-2)
