"""What a user of the examples types and sees: options, tables at 80 columns, Ctrl-C."""

import argparse
import importlib
import io
import os
import signal
import subprocess
import sys
import threading
import types

import pytest
from pages import ROOT, jax_defaults
from rich.console import Console


commands = importlib.import_module("_command_line")
solitons = importlib.import_module("solitons")
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
    monkeypatch.setattr(commands, "run_main", lambda main, options: found.append(options))
    # A module of that name, for its dataclasses.
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    exec(
        compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(sys.modules["__main__"])
    )
    return found[0]


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
    ("--precision", "float8"),
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
    told = f"invalid choice: {value!r}" if option == "--precision" else f"{value!r} is no"
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


@pytest.mark.slow
def test_an_error_comes_before_any_training(tmp_path):
    (tmp_path / "file").write_text("")
    done = run_example("solitons", "--out", str(tmp_path / "file" / "folder"))
    assert done.returncode == 2
    assert "usage: solitons.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    with pytest.raises(NotADirectoryError):
        solitons.main(["float32"], steps=100, out=tmp_path / "file" / "folder")


# --- Tables ----------------------------------------------------------------------------------


def test_a_table_of_results_fits_into_80_columns(monkeypatch):
    precisions = ("float32", "float16", "naive-float16", "forward-float32-bfloat16")
    given = {"optimizer": "adam", "seed": 0, "errors": {}, "loss": 1.0, "skipped_after_warm_up": 0}
    given |= {"error": 0.0037312, "steps": 15_000, "skipped": 1234, "loss_scale": 2.0**-14}
    log = [(100, 1.0, 0.0, {}), (15_000, 0.1, 14.9 * 123.456, {})]
    trainings = [
        solitons.Training(name, log, None, solitons.Outcome(precision=name, **given))
        for name in precisions
    ]
    console = Console(width=80, file=io.StringIO())
    console.print(solitons.table(trainings))
    text = console.file.getvalue()
    assert "…" not in text
    counts = {"3.73e-03": 4, "2^-14": 3, "1234": 3, "123.46": 4}
    assert {told: text.count(told) for told in counts} == counts
    assert all(len(line) <= 80 for line in text.splitlines())


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")
def test_ctrl_c_keeps_what_was_trained(tmp_path, monkeypatch, capsys):
    run = solitons.Training.run

    def press(self, steps, seed, progress, stop):
        """Ctrl-C after the first call of the second training."""

        def pressed():
            if self.precision == "float32-rounded":
                signal.raise_signal(signal.SIGINT)
            return stop()

        run(self, steps, seed, progress, pressed)

    monkeypatch.setattr(solitons.Training, "run", press)
    drawn = []
    monkeypatch.setattr(solitons, "draw", lambda done, path: drawn.extend(done))
    with jax_defaults(), pytest.raises(KeyboardInterrupt):
        solitons.main(["float32", "float32-rounded", "float32-dropped"], steps=200, out=tmp_path)
    done = [(t.precision, t.outcome.steps) for t in drawn]
    assert done == [("float32", 200), ("float32-rounded", 100)]
    assert "float32-dropped" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_main_job_trains_tells_and_draws(tmp_path, capsys):
    with jax_defaults():
        [training] = solitons.main(["float16"], steps=4, out=tmp_path).values()
    assert training.outcome.skipped == 0
    assert 0 < training.outcome.error < 10
    assert f"{training.outcome.error:.2e}" in capsys.readouterr().out
    assert (tmp_path / "solitons.png").stat().st_size > 10_000
