"""Results tell which code they were taken with, and fail when it has changed since."""

import json
import re

import pytest
from test_docs import ROOT

from benchmarks import _sources
from benchmarks.__main__ import questions
from benchmarks._tables import _format


CODE = '''
"""A module."""

import math
from typing import Any


# A comment.
class Point:
    """A point."""

    x: float
    y: float = 0.0

    def norm(self, order: int = 2) -> float:
        """Its norm."""
        total: float = abs(self.x) ** order + abs(self.y) ** order
        return math.pow(total, 1 / order)


def table(point):
    return f"{point.x:>{9}} {point!r}"
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A comment.", "# Another."),
        ('"""A module."""', '"""Another."""'),
        ('"""Its norm."""\n', '"""Its\n\n        length."""\n\n'),
        (
            "abs(self.x) ** order + abs",
            "(\n            abs(self.x) ** order  # so\n        ) + abs",
        ),
        ("order: int = 2) -> float", "order=2)"),
        ("total: float = ", "total = "),
        ("x: float\n", "x: int\n"),
        ("import Any", "import Any, Protocol"),
        ("import math\n", "import json\nimport math\n"),
        ("class Point", "from typing import TypeVar\n\n\nT = TypeVar('T')\n\n\nclass Point"),
        (
            "class Point",
            "from typing import overload\n\n\n@overload\ndef f(x): ...\n\n\nclass Point",
        ),
    ],
)
def test_what_changes_no_result_changes_no_digest(old, new):
    assert CODE.count(old) == 1
    assert _sources.digest(CODE.replace(old, new)) == _sources.digest(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= 0.0", "= 1.0"),
        ("order: int = 2", "order: int = 3"),
        ("** order + abs", "** order - abs"),
        ("    x: float\n", ""),
        ("import math", "import cmath as math"),
        ("{9}", "{8}"),
        ("1 / order", "1.0 / order"),
        ("def norm", "@property\n    def norm"),
    ],
)
def test_what_may_change_a_result_changes_the_digest(old, new):
    assert CODE.count(old) == 1
    assert _sources.digest(CODE.replace(old, new)) != _sources.digest(CODE)


def test_definitions_that_do_not_count_are_left_out_with_their_imports():
    without = frozenset({"table"})
    changed = CODE.replace("import math", "import math\nfrom rich import box").replace(
        "return f", "return box, f"
    )
    assert _sources.digest(changed, without) == _sources.digest(CODE, without)
    assert _sources.digest(changed) != _sources.digest(CODE)
    guarded = f'{CODE}\n\nif __name__ == "__main__":\n    print(table(Point()))\n'
    assert _sources.digest(guarded) == _sources.digest(CODE)


def test_a_digest_is_the_same_in_every_python():
    # Syntax trees differ from version to version. Taken with Python 3.11, 3.12 and 3.13.
    assert _sources.digest(CODE) == "7f47676d0b48"


# --- What is measured ------------------------------------------------------------------------


def test_every_pattern_finds_a_file_and_every_benchmark_has_some():
    for name in _sources.MEASURED:
        for pattern in _sources.MEASURED[name]:
            assert list(ROOT.glob(pattern)), (name, pattern)
    assert {name.split("-")[0] for name in _sources.MEASURED} == set(questions())


# Modules of the library that no benchmark measures.
UNMEASURED = re.compile(
    r"mpx_pde/(_einsum|_jet|_notes|_refined|_repr|_types|ranges/\w+|contrib/\w+"
    r"|interpret/(_marks|_precision_report|_products)"
    r"|training/(_accumulate|_as_trained|_checkpoint|_checkpoint_file|_faults|_floor|_ladder|_masters"
    r"|_norms|_policy))\.py"
)


def test_every_module_of_the_library_is_measured_or_known_not_to_be():
    """A module that is new must be put on one of the lists."""
    measured = {path for name in _sources.MEASURED for path in _sources.measured(name)}
    modules = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("mpx_pde/**/*.py")}
    modules = {path for path in modules if not path.endswith("__init__.py")}
    assert {path for path in modules - measured if not UNMEASURED.fullmatch(path)} == set()
    assert not any(UNMEASURED.fullmatch(path) for path in measured)


def test_what_a_benchmark_imports_and_loads_is_among_its_sources():
    """At any depth; what is apart is not, nor what it alone needs."""
    of = lambda name: {path.split("/", 1)[1] for path in _sources.measured(name)}
    torch = {"_torch/fno.py", "_torch/steps.py"}
    assert of("fno_step") >= {"fno_step.py", "_measured.py", "_steps.py"} | torch
    assert of("compile_time") >= {"compile_time.py", "overhead.py", "_steps.py", "vit.py"}
    assert of("predicted") >= {"predicted.py", "vit_step.py", "_roofline.py", "vit.py"}
    assert of("weak_scaling") >= {"weak_scaling.py", "sharded.py", "_darcy_data.py"}
    assert of("time_to_error-burgers") >= {"time_to_error.py", "_pinn_trainings.py", "burgers.py"}
    assert not of("predicted") & torch
    assert not of("compile_time") & {"_measured.py", "_roofline.py"}
    assert not of("growth") & {"_steps.py"}
    assert not of("breadth") & {"_examples.py", "_report.py"}


# --- The check -------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder with one result, up to date, and a function that writes it anew."""
    monkeypatch.setattr(_sources, "RESULTS", tmp_path)
    monkeypatch.setattr(_sources, "ACCEPTED", tmp_path / "accepted_older.json")

    def write(**sources):
        now = _sources.sources("float8")
        content = {"benchmark": "float8", "environment": {}, "sources": {**now, **sources}}
        (tmp_path / "float8-cpu.json").write_text(json.dumps(content))

    write()
    return write


def test_a_result_older_than_its_code_is_told(results):
    assert _sources.complaints() == []
    results(**{"benchmarks/float8.py": "0" * 12})
    assert _sources.complaints() == [
        "older than the code: float8-cpu; changed benchmarks/float8.py"
    ]
    results(**{"mpx_pde/_gone.py": "0" * 12})
    assert _sources.complaints() == ["older than the code: float8-cpu; changed mpx_pde/_gone.py"]


def test_a_result_without_digests_is_older(results, tmp_path):
    (tmp_path / "float8-cpu.json").write_text('{"benchmark": "float8", "environment": {}}')
    assert len(_sources.complaints()) == 1


def test_an_older_result_is_accepted_with_a_reason_until_its_code_changes_again(
    results, monkeypatch, capsys
):
    with pytest.raises(SystemExit):
        _sources.accept(["nothing-cpu", "--reason", "none"])
    assert _sources.accept(["float8-cpu", "--reason", "Up to date."]) == 0
    assert _sources.accepted() == {}

    results(**{"benchmarks/float8.py": "0" * 12})
    with pytest.raises(SystemExit):
        _sources.accept(["float8-cpu"])
    assert "--reason" in capsys.readouterr().err
    assert _sources.accept(["float8-cpu", "--reason", "An error message."]) == 0
    assert _sources.complaints() == []

    digest = _sources.digest
    monkeypatch.setattr(_sources, "digest", lambda *args: digest(*args)[::-1])
    [line] = _sources.complaints()
    assert line.startswith("older than the code: float8-cpu; changed again")
    assert _sources.accept(["float8-cpu"]) == 0  # for the reason given before
    assert _sources.accepted()["float8-cpu"]["reason"] == "An error message."
    assert _sources.complaints() == []


def test_what_was_accepted_as_older_and_is_up_to_date_again_is_told(results):
    results(**{"benchmarks/float8.py": "0" * 12})
    _sources.accept(["float8-cpu", "--reason", "An error message."])
    results()
    assert _sources.complaints() == ["accepted as older, but up to date: float8-cpu"]
    _sources.RESULTS.joinpath("float8-cpu.json").unlink()
    assert _sources.complaints() == ["accepted as older, but not there: float8-cpu"]


def test_a_table_tells_that_it_is_older_than_the_code(monkeypatch):
    data = _format.load("float8-cpu")
    entry = {"reason": "A comma in a message.", "changed": {}}
    monkeypatch.setattr(_format, "accepted", dict)
    assert "Older" not in _format.source(data)
    monkeypatch.setattr(_format, "accepted", lambda: {"float8-cpu": entry})
    assert _format.source(data).endswith("**Older than the code:** A comma in a message.")
