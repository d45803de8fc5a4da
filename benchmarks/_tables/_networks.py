"""The table of derivatives of many networks."""

from typing import Any

from ._format import load, markdown, source


def networks() -> str:
    data = load("networks-cpu")
    costs = {(r["network"], r["problem"], r["rival"]): r for r in data["costs"]}
    h100 = {
        (r["network"], r["problem"], r["rival"], r["precision"]): r["temp_bytes"]
        for r in data.get("h100", [])
    }
    rows = []
    for network, problem, rival in costs:
        if rival != "mpx_pde":
            continue
        at = lambda rival, n=network, p=problem: costs.get((n, p, rival), {})
        here, nested = at("mpx_pde"), at("nested jvp")
        memory = lambda rival, precision, n=network, p=problem: h100.get((n, p, rival, precision))
        base = memory("nested jvp", "float32")
        rows.append(
            [
                network,
                problem,
                f"{here['flops'] / 1e9:.3g}",
                *(_over(here, at(rival), "flops") for rival in ("nested jvp", "jet", "folx")),
                _over(here, nested, "bytes_accessed"),
                _over(here, nested, "temp_bytes"),
                *(_share(memory("mpx_pde", p), base) for p in ("float32", "float16")),
                *(
                    _error(x)
                    for x in (
                        here["error"],
                        nested.get("error"),
                        here["error_float16"],
                        here["error_bfloat16"],
                    )
                ),
            ]
        )
    columns = ["network", "of", "GFLOP", "over nested `jvp`", "over jet", "over folx", "bytes"]
    columns += ["temp memory", "H100: temp memory", "float16"]
    columns += ["error", "of nested `jvp`", "float16", "bfloat16"]
    width = data["width"][0]["width"]
    return (
        f"{markdown(columns, rows)}\n\n{width} units. A step is the mean square of the derivative "
        "at 64 to 2,048 points, and its gradient with respect to the parameters. All costs are of "
        "the compiled program; bytes, and memory on a CPU and an H100 (compiled, not run), are "
        "over those of nested `jvp` in float32. Errors are of the derivative, over that "
        "of the same parameters in float64; those in half contain the rounding of parameters. "
        "Below 1 is in favor of `mpx_pde`; a dash is what a rival cannot do, or was not compiled. "
        f"{source(data)}\n"
    )


def _over(here: dict[str, Any], rival: dict[str, Any], key: str) -> str:
    return _share(here.get(key), rival.get(key))


def _share(value: float | None, base: float | None) -> str:
    return "–" if not value or not base else f"{value / base:.2f}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
