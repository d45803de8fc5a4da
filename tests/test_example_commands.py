"""What a user of the examples types and sees: options, tables at 80 columns, Ctrl-C."""

import argparse
import dataclasses
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from rich.console import Console
from test_docs import ROOT
from test_examples import small


sys.path.insert(0, str(ROOT / "examples"))
commands = importlib.import_module("_command_line")
pinn = importlib.import_module("_pinn")
report = importlib.import_module("_pinn_report")
PATHS = sorted((ROOT / "examples").glob("[!_]*.py"))
# Those of one page have no options.
EXAMPLES = [path.stem for path in PATHS if not path.stem.startswith("minimal_")]


def run_example(name, *options):
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def parser_of(name, monkeypatch):
    """The parser of an example's command line."""
    found = []
    path = ROOT / "examples" / f"{name}.py"
    for module in (commands, pinn):
        monkeypatch.setattr(module, "run_main", lambda main, options: found.append(options))
    for shared in ("_neural_operator", name):
        monkeypatch.delitem(sys.modules, shared, raising=False)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    for shared in ("_neural_operator", name):
        sys.modules.pop(shared, None)  # those that hold what was patched
    return found[0]


HELPERS = {"_command_line", "_neural_operator", "_pinn", "_pinn_report", "_progress"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_beside_its_data_an_example_imports_one_helper_at_most(path):
    imports = re.findall(r"^(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(HELPERS & set(imports)) <= 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_tells_meanings_and_defaults(name, monkeypatch):
    options = parser_of(name, monkeypatch)
    monkeypatch.setenv("COLUMNS", "300")
    text = options.format_help()
    assert all(action.help for action in options._actions), name
    for action in options._actions:
        if isinstance(action.default, int | float | str) and not isinstance(action.default, bool):
            if action.default != argparse.SUPPRESS:
                assert f"by default {action.default}" in text, (name, action.dest)
        elif action.dest in ("steps", "batch", "width"):
            assert "by default" in action.help, (name, action.dest)


WRONG = [
    ("--steps", "0"),
    ("--steps", "-3"),
    ("--steps", "many"),
    ("--rungs", "float8"),
]


@pytest.mark.parametrize(("option", "value"), WRONG)
@pytest.mark.parametrize("name", EXAMPLES)
def test_impossible_options_are_usage_errors(name, option, value, monkeypatch, capsys):
    options = parser_of(name, monkeypatch)
    if option not in options._option_string_actions:
        pytest.skip(f"{name} has no {option}")
    with pytest.raises(SystemExit) as e:
        options.parse_args([f"{option}={value}"])
    assert e.value.code == 2
    told = f"invalid choice: {value!r}" if option == "--rungs" else f"{value!r} is no"
    assert f"argument {option}: {told}" in capsys.readouterr().err


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_folder_that_cannot_be_written_is_a_usage_error(name, tmp_path, monkeypatch, capsys):
    options = parser_of(name, monkeypatch)
    known = {"--out", "--checkpoint"} & options._option_string_actions.keys()
    if not known:
        pytest.skip(f"{name} writes nothing")
    (tmp_path / "file").write_text("")
    for option in known:
        for wrong in (tmp_path / "file", tmp_path / "file" / "folder"):
            with pytest.raises(SystemExit) as e:
                options.parse_args([option, str(wrong)])
            assert e.value.code == 2
            assert "is no folder" in capsys.readouterr().err
        given = vars(options.parse_args([option, str(tmp_path / "new" / "folder")]))
        assert given[option.strip("-")] == tmp_path / "new" / "folder"
    assert not (tmp_path / "new").exists()  # asking makes nothing


def test_a_folder_without_permission_is_a_usage_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(argparse.ArgumentTypeError, match="no permission"):
        commands.folder(str(tmp_path))
    with pytest.raises(argparse.ArgumentTypeError, match="no permission"):
        commands.file(str(tmp_path / "log.json"))
    with pytest.raises(argparse.ArgumentTypeError, match="it is a folder"):
        commands.file(str(tmp_path))


def test_an_error_comes_before_any_training(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_example("burgers", "--out", str(tmp_path / "file" / "folder"))
    assert done.returncode == 2
    assert "usage: burgers.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    with pytest.raises(NotADirectoryError):
        pinn.run(small(), ["float32"], steps=100, out=tmp_path / "file" / "folder")


# --- Tables ----------------------------------------------------------------------------------


def result(precision, errors=1, scalers="tx", rungs=()):
    names = ["rel. L2 error", "u", "v", "against Ghia et al."][:errors]
    half = precision != "float32"
    return pinn.Result(
        precision=precision,
        mode="predictive",
        rungs=rungs,
        errors=dict.fromkeys(names, 0.0037312),
        loss=np.ones(100),
        scale=np.full(100, 2.0**-14),
        skipped=np.arange(100) % 2 == 1,
        derivative_scales=dict.fromkeys(scalers, 2.0 ** (-11)) if half else {},
        history=[],
        ms_per_step=123.456,
        temp_bytes=12345 * 2**20,
        model=None,
    )


def printed(table):
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("errors", [1, 4])
@pytest.mark.parametrize(
    "scalers", [("t", "x"), ("nu_x", "nu_y", "order 1", "order 2")], ids=["direction", "order"]
)
def test_a_table_of_results_fits_into_80_columns(errors, scalers):
    precisions = ("float32", "float16", "bfloat16", "naive-float16")
    results = [result(p, errors, scalers) for p in precisions]
    text = printed(report.table("A title", results))
    assert "…" not in text
    assert text.count("3.73e-03") == errors * len(results)
    for name in (*results[0].errors, *(f"scale of {s}" for s in scalers), "ms a step"):
        assert sum(line.strip().startswith(name) for line in text.splitlines()) == 1, name
    assert text.count("2^-11") == 3 * len(scalers)
    assert text.count("2^-14") == 3
    assert text.count("12345.00") == 4
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_table_of_results_tells_late_skips_and_leaves_out_what_float32_has_not():
    text = printed(report.table("A title", [result("float32"), result("float16")]))
    cells = {
        line.rsplit(None, 2)[0].strip(): line.rsplit(None, 2)[1:]
        for line in text.splitlines()
        if len(line.split()) > 2
    }
    assert cells["steps skipped"] == ["–", "50"]
    assert cells["skipped late"] == ["–", "48"]  # of the last 95
    assert cells["ms a step"] == ["123.46", "123.46"]


# --- Ctrl-C ----------------------------------------------------------------------------------


def test_ctrl_c_is_waited_for_once(capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), commands.stop_on_interrupt() as stop:  # noqa: PT012
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop()
        told = "yes"
    assert told == "yes"
    assert "Ctrl-C again" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), commands.stop_on_interrupt():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("The second one is not waited for.")
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_of_the_main_thread_signals_are_left_alone():
    stopped = []

    def work():
        with commands.stop_on_interrupt() as stop:
            stopped.append(stop())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stopped == [False]


def test_main_ends_without_a_traceback():
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as e:
        commands.run_main(main, commands.parser("An example."), [])
    assert e.value.code == 130


def test_ctrl_c_keeps_the_picture_so_far(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pinn, "STEPS_PER_CALL", 4)
    calls = []

    def interrupted(figure, results):
        calls.append([(r.label, len(r.loss)) for r in results])

    train = pinn.train

    def press(*args, stop, **options):
        """Ctrl-C in the second call of the second training."""
        asked = []

        def pressed():
            asked.append(None)
            if args[1] == "float16" and len(asked) == 2:
                signal.raise_signal(signal.SIGINT)
            return stop()

        return train(*args, stop=pressed, **options)

    monkeypatch.setattr(pinn, "train", press)
    problem = dataclasses.replace(small(), draw=interrupted)
    with pytest.raises(KeyboardInterrupt):
        pinn.run(problem, ["float32", "float16", "bfloat16"], steps=20, out=tmp_path)
    assert calls == [[("float32", 20), ("float16", 8)]]
    assert (tmp_path / "small.png").exists()
    out = capsys.readouterr().out
    assert "float16: stopped after 8 steps." in out
    assert "bfloat16" not in out
