"""Tests the command lines of the examples: options, usage errors, Ctrl-C."""

import argparse
import importlib
import signal
import sys
import types

import pytest
from pages import ROOT


commands = importlib.import_module("_command_line")
solitons = importlib.import_module("solitons")
PATHS = sorted((ROOT / "examples").glob("[!_]*.py"))
# The one-page examples have no options.
EXAMPLES = [path.stem for path in PATHS if not path.stem.startswith("minimal_")]


def parser_of(name, monkeypatch):
    """Returns the parser of an example's command line."""
    found = []
    path = ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(commands, "run_main", lambda main, options: found.append(options))
    # The dataclasses of the example need a module of this name.
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    exec(code, vars(sys.modules["__main__"]))
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


WRONG = [("--steps", "0"), ("--steps", "-3"), ("--steps", "many"), ("--precision", "float8")]


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
    assert not (tmp_path / "new").exists()  # parsing creates no folder


# --- Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::mpx_pde.PrecisionWarning")
@pytest.mark.usefixtures("standard_promotion")
def test_ctrl_c_keeps_what_was_trained(tmp_path, monkeypatch, capsys):
    run = solitons.Training.run

    def press(self, steps, seed, progress, stop):
        """Runs the training and presses Ctrl-C after the first call of the second one."""

        def pressed():
            if self.precision == "float32-rounded":
                signal.raise_signal(signal.SIGINT)
            return stop()

        run(self, steps, seed, progress, pressed)

    monkeypatch.setattr(solitons.Training, "run", press)
    drawn = []
    monkeypatch.setattr(solitons, "draw", lambda done, path: drawn.extend(done))
    with pytest.raises(KeyboardInterrupt):
        solitons.main(["float32", "float32-rounded", "float32-dropped"], steps=200, out=tmp_path)
    done = [(t.precision, t.outcome.steps) for t in drawn]
    assert done == [("float32", 200), ("float32-rounded", 100)]
    assert "float32-dropped" not in capsys.readouterr().out
