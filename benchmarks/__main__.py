"""Runs a benchmark: `python -m benchmarks NAME [--out DIR] [--quick] [options of NAME]`.

`python -m benchmarks level LEVEL` runs everything that a CPU, compilers without their devices, or a
GPU can answer. `python -m benchmarks tables` rewrites the tables of README and documentation from
`results/*.json` and redraws the figures; with `--check` it only lists those that are out of date.
Both also count how many commits have changed the library since each result was taken.
"""

import argparse
import ast
import importlib
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path


_HERE = Path(__file__).parent


_TRAINED = "burgers_1d allen_cahn helmholtz cavity cavity_zero_equation heat_sink"
_TIMED = [f"time_to_error --problem {name}" for name in ("cavity", "burgers")]
_CHIPS = ("h100", "v5e")
_STEPS = ("compile_time", "pinn_step", "foreign_step", "fno_step", "vit_step")

LEVELS = {
    # Ratios that hold on a CPU, and accuracy. The trainings of `breadth`, `time_to_error`,
    # `operators` and `vit` take hours there and have commands of their own.
    "cpu": (*_STEPS, *(f"{name} --time" for name in _TIMED), "spectral", "second_order"),
    # What compilers report about absent hardware: memory, products, collectives.
    "deviceless": ("overhead", *(f"weak_scaling --platform {p}" for p in _CHIPS), "predicted"),
    "gpu": (
        "predicted --measure --jobs 8",
        *(*_STEPS, *(f"{name} {o}" for o in ("--time", "--seeds 0") for name in _TIMED)),
        *("spectral", f"breadth --resume --seeds 0 --problems {_TRAINED}"),
        "operators --size full --seeds 0",
    ),
}
"""The commands after `python -m benchmarks`."""


def questions() -> dict[str, str]:
    """Returns each benchmark with the question that it answers: the first line of its docstring.

    Reads the source, so listing the benchmarks imports neither JAX nor the library.
    """
    text = lambda path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return {p.stem: text(p).split("\n", 1)[0] for p in sorted(_HERE.glob("[!_]*.py"))}


def _choose_platform() -> None:
    """Keeps JAX on the CPU if the machine shows no accelerator.

    With the CUDA plugin but no GPU, JAX would report a broken driver and then refuse to compile for
    a GPU as well.
    """
    nodes = ("nvidiactl", "dxg", "accel*", "vfio/[0-9]*", "kfd")
    if not any(any(Path("/dev").glob(node)) for node in nodes) and sys.platform == "linux":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _level(argv: list[str]) -> int:
    """Runs a level, each benchmark in its own process.

    If a benchmark fails, the others still run; the exit status is then 1.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks level", description=_level.__doc__)
    parser.add_argument("level", choices=LEVELS)
    parser.add_argument("--list", action="store_true", help="say what would run")
    args, rest = parser.parse_known_args(argv)  # the rest goes to each benchmark
    environment = {**os.environ, **({} if args.level == "gpu" else {"JAX_PLATFORMS": "cpu"})}
    failed = []
    for name in LEVELS[args.level]:
        print(f"  {name}", flush=True)
        command = [sys.executable, "-m", "benchmarks", *name.split(), *rest]
        if not args.list and subprocess.run(command, env=environment).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _tables(argv: list[str]) -> int:
    from . import _figures, _tables
    from ._report import changes_since

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tables",
        description="Writes the tables and figures of README and documentation.",
    )
    parser.add_argument(
        "--check", action="store_true", help="only say what is out of date; exit status 1 if any is"
    )
    check = parser.parse_args(argv).check
    pages = _tables.stale(write=not check) + _figures.stale(write=not check)
    for page in pages:
        print(f"{'stale' if check else 'written'}: {page}")
    for name, commits in _tables.taken().items():
        if count := changes_since(commits[0]):
            print(f"{name}: taken at {commits[0]}; {count} commits have changed the library since")
    return int(check and bool(pages))


def main(argv: list[str]) -> int:
    known = questions()
    listing = "\n".join(f"  {name:<12} {question}" for name, question in known.items())
    usage = (
        "python -m benchmarks NAME [--out DIR] [--quick] [options of NAME]\n"
        "python -m benchmarks level cpu|deviceless|gpu [--help]\n"
        "python -m benchmarks tables [--check]"
    )
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{usage}\n\n{listing}")
        return 0
    name = argv[0]
    if name in ("tables", "level"):
        return {"tables": _tables, "level": _level}[name](argv[1:])
    if name not in known:
        print(f"There is no benchmark `{name}`. {usage}\n\n{listing}", file=sys.stderr)
        return 2

    _choose_platform()
    from ._report import Report, TargetUnavailable

    module = importlib.import_module(f"{__package__}.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=_HERE / "results", help="folder for the JSON file"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few repeats")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    asked = [w for before, w in pairwise(["", *argv]) if "--out" not in (before, w)]
    # Others have their files elsewhere.
    asked = ["DIR" if before == "--data" else w for before, w in pairwise(["", *asked])]
    command = shlex.join(["python", "-m", "benchmarks", *asked])
    report = Report(name, command=command, folder=args.out)
    try:
        status = module.run(report, args)
    except TargetUnavailable as error:
        raise SystemExit(str(error)) from error
    report.save()
    report.show()
    print(f"\nwritten: {report.path}")
    return int(status or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
