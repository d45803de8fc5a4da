"""What steps would take on an H100, predicted from their compiled programs."""

from typing import Any

from ._format import Result, load, markdown, older, source


OURS = "mpx_pde float16"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def _range(record: dict[str, Any]) -> str:
    """From memory and products alone, over arithmetic, to XLA's estimates."""
    keys = ("seconds", "seconds_with_arithmetic", "seconds_by_xla")
    return " – ".join(_ms(record[key]) for key in keys)


def _problems(data: Result) -> dict[str, dict[str, dict[str, Any]]]:
    out: dict[str, dict[str, dict[str, Any]]] = {}
    for record in data["steps"]:
        out.setdefault(record["title"], {})[record["rival"]] = record
    return out


def speedups(data: Result, rival: str) -> list[float]:
    """Of our half-precision steps over a rival, by problem."""
    key = "seconds_with_arithmetic"
    return [steps[rival][key] / steps[OURS][key] for steps in _problems(data).values()]


def assumptions() -> str:
    data = load("predicted-h100-cpu")
    rows = [[a["rate"], a["data_sheet"], a["share"]] for a in data["assumptions"]]
    return f"{markdown(['rate', 'data sheet', 'share of it assumed'], rows)}\n"


def steps() -> str:
    data = load("predicted-h100-cpu")
    key, rows = "seconds_with_arithmetic", []
    for title, found in _problems(data).items():
        for name, r in found.items():
            shares = (
                f"{kind} {v['seconds'] / r['seconds']:.0%}" for kind, v in r["by_kind"].items()
            )
            rows.append(
                [
                    title,
                    name,
                    _range(r),
                    f"{found['float32'][key] / r[key]:.2f}",
                    f"{found['TF32'][key] / r[key]:.2f}",
                    f"{_ms(r['ideal_seconds'])} ({r[key] / r['ideal_seconds']:.1f})",
                    f"{r['kernels']:,}",
                    f"{r['bytes'] / 1e9:.3g}",
                    ", ".join(share for share in shares if not share.endswith(" 0%")),
                ]
            )
    columns = [
        *("problem", "step", "predicted, not run: ms", "float32 over it", "TF32 over it"),
        *("ideal, ms (over it)", "kernels", "GB", "shares"),
    ]
    note = "Compiled for an H100, predicted, not run."
    return f"{markdown(columns, rows)}\n\n{note} {source(data)}\n"


def kernels() -> str:
    """The largest of our half-precision steps."""
    data = load("predicted-h100-cpu")
    out = []
    for title, found in _problems(data).items():
        rows = [
            [
                f"{1e3 * r['seconds_with_arithmetic']:.3f}",
                f"{r['kernels']}",
                r["kind"],
                r["bound"],
                f"{r['bytes'] / 1e9:.2f}",
                f"`{r['line']}`" if r["line"] else "–",
            ]
            for r in found[OURS]["largest"]
        ]
        columns = ["predicted ms", "kernels", "kind", "bound by", "GB", "line"]
        out.append(f"### {title}\n\n{markdown(columns, rows)}\n")
    return "\n".join(out)


def commands() -> str:
    """What settles each prediction."""
    data = load("predicted-h100-cpu")
    rows = [[title, f"`{found[OURS]['command']}`"] for title, found in _problems(data).items()]
    return f"{markdown(['problem', 'on an H100'], rows)}\n{older(data)}\n"
