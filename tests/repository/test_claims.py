"""Tests that the words of the README and the landing page agree with the figures in the results."""

import re
import statistics

import pytest
from pages import ROOT

from benchmarks._tables import table
from benchmarks._tables._breadth import NEAR, Ratios, overall
from benchmarks._tables._format import NOT_RUN, load


PAGES = ("README.md", "docs/index.md")


def text(page):
    """Returns the text of a page without tables, in one line."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return " ".join(line for line in lines if not line.startswith("|"))


def curves(rival):
    data = load("time_to_error-cavity-cpu")
    return [c for c in data["curves"] if c["rival"] == rival]


def final(rival):
    """Returns the last error for the seed that all rivals share."""
    [error] = [c["errors"][-1] for c in curves(rival) if c["seed"] == 0]
    return error


def test_the_time_of_a_step_by_torch_is_that_of_the_results():
    [told] = re.findall(r"(\d+) times the time of a step on this CPU", text("docs/index.md"))
    times = {t["rival"]: t["step"] for t in load("time_to_error-cavity-cpu")["times"]}
    slow, fast = (times[rival]["median"] for rival in ("torch.amp, float16", "mpx_pde, float16"))
    assert round(slow / fast) == int(told)


def test_who_fails_stalls_and_ends_where_is_that_of_the_results():
    float32 = final("float32")
    assert final("casts by hand, float16") > 100 * float32  # fails
    assert 3 * float32 < final("MPX, float16") < 100 * float32  # stalls
    # "ends where derivative scaling ends"
    assert final("torch.amp, float16") == pytest.approx(final("mpx_pde, float16"), rel=0.2)
    # "None of them reaches float32's last digits."
    assert min(final("torch.amp, float16"), final("mpx_pde, float16")) > 1.1 * float32
    # "The last digits are float32's too."
    assert final("mpx_pde, forward float32, float16") < 1.05 * float32


@pytest.mark.parametrize("page", PAGES)
def test_where_float16_by_hand_is_as_good_is_that_of_the_results(page):
    assert "about half of the problems" in text(page)
    ratios = Ratios(load("breadth-cpu"))
    medians = [statistics.median(r) for p in ratios.solved if (r := ratios.of(p, "naive-float16"))]
    assert 0.4 < sum(r <= NEAR for r in medians) / len(medians) < 0.6


@pytest.mark.parametrize("page", PAGES)
def test_no_speed_is_claimed_before_it_is_measured(page):
    measured = list((ROOT / "benchmarks" / "results").glob("*-nvidia-*.json"))
    assert measured or "half-precision speed" not in text(page).lower()


def test_what_was_compiled_for_an_h100_is_said_not_to_have_run():
    """Both tables and figures say so."""
    for name in ("steps.steps", "summary.headline"):
        assert NOT_RUN in table(name)(), name
    assert "not run" in table("steps.collectives")()
    for path in sorted((ROOT / "docs" / "figures").glob("*.svg")):
        drawn = path.read_text(encoding="utf-8")
        assert drawn.count("compiled for an H100") == drawn.count(NOT_RUN), path


def test_the_range_of_a_mode_is_beside_that_of_chance():
    """The pages say that a row that looks like a control is not limited by precision."""
    rows = {row["name"]: row for row in overall(load("breadth-cpu"))}
    span = lambda name: map(float, rows[name]["spread"].split("–"))
    (low, high), (least, most) = map(span, ("forward-float32-float16", "float32-rounded"))
    assert high <= most + 0.05
    assert low >= least - 0.05
    assert rows["forward-float32-float16"]["median"] == "1.00"


@pytest.mark.parametrize("page", [*PAGES, "docs/results.md"])
def test_the_error_of_the_reference_of_the_cavity_is_that_of_the_results(page):
    checks = load("outside")["checks"]
    [error] = [check["error"] for check in checks if check["problem"] == "cavity_64"]
    assert f"{error:.1e}".replace("e-0", "e-") == re.findall(r"is ([\d.]+e-\d) off", text(page))[0]


def test_what_is_said_of_phijax_is_that_of_the_results():
    trainings = load("phijax")["trainings"]
    errors = {}
    for run in trainings:
        errors.setdefault((run["problem"], run["training"]), []).append(run["error"])
    median = {key: statistics.median(found) for key, found in errors.items()}

    def ratios(name):
        problems = sorted({problem for problem, _ in median})
        return [median[p, name] / median[p, "PhiJAX, 32-true"] for p in problems]

    assert len(ratios("PhiJAX, 16-mixed")) == 3
    assert max(ratios("PhiJAX, 16-mixed")) < 1.26  # "up to a quarter above"
    assert all(2.4 < ratio < 4 for ratio in ratios("PhiJAX, bf16-mixed"))
    assert max(ratios("mpx_pde, on PhiJAX's loss")) < 1.05  # "at float32's error or below"
