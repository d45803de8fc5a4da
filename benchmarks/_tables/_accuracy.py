"""Tables of the errors of solvers, operators and a transformer, and of the time to an error."""

import itertools
import math
import statistics
from collections.abc import Iterator

from ._format import NONE, Record, Result, Table, groups, listed, load
from ._outside import beside, judged_by


def _vit(data: Result) -> Iterator[Record]:
    """Yields the means over the seeds."""
    for precision, runs in groups(data["trainings"], "precision").items():
        fields = ("accuracy", "loss", "test_loss", "skipped_steps", "temp_bytes")
        means = {name: statistics.mean(run[name] for run in runs) for name in fields}
        skipped = NONE if precision == "float32" else f"{means['skipped_steps']:.0f}"
        yield {**runs[0], **means, "skipped": skipped} | {"seeds": listed(runs, "seed")}


vit = Table(
    "vit",
    _vit,
    """
    training          {precision}
    test accuracy     {accuracy:.1%}
    test loss         {test_loss:.3f}
    skipped steps     {skipped}
    temp memory, MiB  {temp_bytes:MiB.1f}
    """,
    "{steps:,} steps, means over seeds {seeds}.",
)


def _by_problem(data: Result) -> Iterator[Record]:
    """Yields for each problem the errors of the first seed by precision and steps, and for each
    seed the error with a float32 Jacobian relative to float64."""
    for runs in groups(data["trainings"], "problem").values():
        at = {(run["precision"], run["steps"], run["seed"]): run["error"] for run in runs}
        told = {f"{name}, {n}": x for (name, n, seed), x in at.items() if seed == runs[0]["seed"]}
        both = [(at.get(("float64-float32", *k)), x) for (p, *k), x in at.items() if p == "float64"]
        ratios = ", ".join(f"{narrow / wide:.2f}" for narrow, wide in both if narrow)
        last = [f"{x:.1e}" for k, x in sorted(at.items()) if k[:2] == ("float64", 1200)]
        title = runs[0]["title"] + beside(judged_by(runs[0]))
        yield {**runs[0], **told, "title": title, "ratios": ratios, "last": ", ".join(last) or None}


second_order = Table(
    "second_order",
    _by_problem,
    """
    problem                            {title}
    float64                            {float64, 300:.1e}
    Jacobian in float32                {float64-float32, 300:.1e}
    ratio to float64, by seed          {ratios}
    in bfloat16_x3                     {float64-bfloat16_x3, 300:.1e}
    in bfloat16                        {float64-bfloat16, 300:.1e}
    float32 throughout                 {float32, 300:.1e}
    float64, 1,200 steps, by seed      {last}
    """,
    "Relative L2 errors after 300 steps, in the last column after 1,200 (`--steps`); seed {seed}. "
    "In brackets: the error of a numerical reference.",
)


def _published(data: Result) -> Iterator[Record]:
    """Yields the errors of each problem by seed, beside the published one."""
    for runs in groups(data["trainings"], "problem").values():
        errors = ", ".join(f"{run['error']:.1e}" for run in runs)
        minutes = statistics.median(run["cpu_minutes"] for run in runs)
        title = runs[0]["title"]
        if accuracy := runs[0].get("reference_error"):
            title += f" ({accuracy:.0e})"
        yield {**runs[0], "title": title, "errors": errors, "minutes": minutes}


published = Table(
    "published",
    _published,
    """
    problem               {title}
    published             {published:.1e}, {source}
    error, by seed        {errors}
    parameters            {parameters:,}
    steps                 {steps:,}
    processor minutes     {minutes:.0f}
    """,
    "Relative L2 errors. In brackets: the error of a numerical reference.",
)


def _by_kind(data: Result) -> Iterator[Record]:
    """Yields for each step its seconds by kind of kernel, and those of the step in float64."""
    full = next(s["seconds"] for s in data["steps"] if s["precision"] == "float64")
    there = load("second_order-steps-nvidia-h100-80gb-hbm3")
    measured = {s["precision"]: s for s in there["steps"]}
    for step in data["steps"]:
        residual, _, jacobian = step["precision"].partition("-")
        told = {"residual": residual, "jacobian": jacobian or residual, "full": full}
        told |= {"measured": measured[step["precision"]], "there": there["environment"]}
        kinds = {kind: found["seconds"] for kind, found in step["by_kind"].items()}
        kinds["rest"] = step["seconds"] - kinds["products"] - kinds["layout"]
        yield {**step, **kinds, **told}


second_order_step = Table(
    "second_order-h100",
    _by_kind,
    """
    residual               {residual}
    Jacobian               {jacobian}
    ms                     {seconds:ms.0f}
    speedup over float64   {full/seconds:.1f}
    products, ms           {products:ms.0f}
    layout, ms             {layout:ms.0f}
    rest, ms               {rest:ms.0f}
    measured, ms           {measured.seconds.median:ms.0f}
    """,
    "{parameters:,} parameters, {points:,} points. Predicted for an H100; measured on one by "
    "`--time 3`, with JAX {there.jax}.",
)


def _in_dual(data: Result) -> Iterator[Record]:
    """Yields for each dual step its seconds by kind of kernel, and those of the float64 step."""
    full = next(s["seconds"] for s in data["steps"] if s["precision"] == "float64")
    for step in sorted(data["steps"], key=lambda step: step["seconds"]):
        kinds = {kind: found["seconds"] for kind, found in step["by_kind"].items()}
        kinds["rest"] = sum(s for kind, s in kinds.items() if kind not in ("products", "layout"))
        matrix = step["precision"].rpartition("-")[2]
        yield {**step, **kinds, "matrix": f"`{matrix}`", "full": full}


second_order_dual_step = Table(
    "second_order-dual-h100",
    _in_dual,
    """
    `jacobian=`            {matrix}
    s                      {seconds:.2f}
    relative to float64    {seconds/full:.2f}
    products, s            {products:.2f}
    layout, s              {layout:.2f}
    rest, s                {rest:.2f}
    memory, GB             {temp_bytes:GB.0f}
    """,
    "A step of the dual method with a float64 residual, {parameters:,} parameters and {points:,} "
    "points. Predicted for an H100, with one conjugate gradient a solve.",
)


def _by_matrix(data: Result) -> Iterator[Record]:
    """Yields the medians over the seeds by problem and precision of the matrix."""
    for problem, runs in groups(data["narrow"], "problem").items():
        at = groups(runs, "jacobian")
        full = {run["seed"]: run["error"] for run in at["float64"]}
        for jacobian, own in at.items():
            ratio = statistics.median(run["error"] / full[run["seed"]] for run in own)
            counts = [n for run in own for n in run["iterations"]]
            yield {
                **own[0],
                "problem": f"{problem}: {own[0]['parameters']:,}, {own[0]['rows']:,}",
                "jacobian": f"`{jacobian}`",
                "error": statistics.median(run["error"] for run in own),
                "ratio": ratio,
                "most": max(counts),
                "five": sum(n <= 5 for n in counts) / len(counts),
                "seeds": listed(own, "seed"),
            }


second_order_narrow = Table(
    "second_order-narrow",
    _by_matrix,
    """
    problem: parameters, residuals   {problem}
    `jacobian=`                      {jacobian}
    error                            {error:.1e}
    relative to float64              {ratio:.2f}
    most iterations                  {most}
    steps of at most five            {five:.0%}
    seeds                            {seeds}
    """,
    "Dual steps with a float64 residual; points are drawn anew every five of {steps} steps. "
    "Relative L2 errors are medians over the seeds, of each the median of the last four draws.",
)


def _by_draws(data: Result) -> Iterator[Record]:
    """Yields the medians over the seeds by the number of steps between draws of points."""
    for problem, runs in groups(data["draws"], "problem").items():
        for redraw, own in groups(runs, "redraw").items():
            told = {n: statistics.median(run[n] for run in own) for n in ("error", "loss")}
            size = f"{problem}: {own[0]['parameters']:,}, {own[0]['rows']:,}"
            often = "never" if not redraw else f"{redraw}"
            yield {**own[0], **told, "problem": size, "often": often, "seeds": listed(own, "seed")}


second_order_draws = Table(
    "second_order-draws",
    _by_draws,
    """
    problem: parameters, residuals   {problem}
    steps between draws of points    {often}
    loss                             {loss:.1e}
    error                            {error:.1e}
    seeds                            {seeds}
    """,
    "Relative L2 errors and losses after {steps} dual steps in float64, medians over the seeds.",
)


def _by_points(data: Result) -> Iterator[Record]:
    """Yields where a wide network is after the steps with each number of points."""
    for run in data["wide"]:
        for points, rows in itertools.groupby(run["curve"], lambda row: row[2]):
            *_, (steps, seconds, _, loss, error) = rows
            told = {"points": points, "steps": steps, "until": seconds, "loss": loss}
            yield {**run, **told, "error": error}


second_order_wide = Table(
    "second_order-wide",
    _by_points,
    """
    parameters   {parameters:,}
    points       {points:,}
    seconds      {until:.0f}
    steps        {steps:,}
    loss         {loss:.1e}
    error        {error:.1e}
    seed         {seed}
    """,
    "Relative L2 errors of Burgers' equation by dual steps in float64, on all cores. Points are "
    "drawn anew at each step. Compilation does not count.",
)


def _by_dampings(data: Result) -> Iterator[Record]:
    """Yields the medians over the seeds by the way in which dampings are tried."""
    for problem, runs in groups(data["dampings"], "problem").items():
        for way, own in groups(runs, "dampings").items():
            names = ("error", "loss", "rejected")
            told = {name: statistics.median(run[name] for run in own) for name in names}
            size = f"{problem}: {own[0]['parameters']:,}, {own[0]['rows']:,}"
            yield {**own[0], **told, "problem": size, "way": way, "seeds": listed(own, "seed")}


second_order_dampings = Table(
    "second_order-dampings",
    _by_dampings,
    """
    problem: parameters, residuals   {problem}
    dampings                         {way}
    error                            {error:.1e}
    loss                             {loss:.1e}
    rejected                         {rejected:.0f}
    seeds                            {seeds}
    """,
    "After {steps} dual steps in float64, medians over the seeds; new points every five steps.",
)


def _by_rival(data: Result) -> Iterator[Record]:
    """Yields the medians over the seeds of each method on each problem, smallest error first."""
    for runs in groups(data["race"], "problem").values():
        size = f"{runs[0]['problem']}: {runs[0]['parameters']:,}, {runs[0]['rows']:,}"
        found = []
        for rival, own in groups(runs, "rival").items():
            told = {n: statistics.median(r[n] for r in own) for n in ("steps", "loss", "error")}
            until = statistics.median(_seconds_to(1e-4, run["curve"]) for run in own)
            told["until"] = f"{until:.1f}" if until < math.inf else None
            name = own[0]["version"] or f"`{rival}`"
            name += {"randngd-dense": ", dense", "lbfgs": ", L-BFGS"}.get(rival, "")
            most = max(run["bytes"] for run in own)
            seeds = listed(sorted(own, key=lambda r: r["seed"]), "seed")
            row = {"size": size, "name": name, "bytes": most, "seeds": seeds}
            found.append({**own[0], **told, **row})
        yield from sorted(found, key=lambda row: row["error"])


def _best_rivals(data: Result) -> Iterator[Record]:
    """Yields for each problem `auto`, the low-rank method, and the best of other libraries."""
    for size, rows in groups(list(_by_rival(data)), "size").items():
        ours = {row["rival"]: row for row in rows if row["rival"] in ("auto", "low_rank")}
        best = next(row for row in rows if row["version"])
        yield {"size": size, "best": best, **ours}


def _seconds_to(loss: float, curve: list) -> float:
    return next((seconds for _, seconds, reached, _ in curve if reached <= loss), math.inf)


_RACED = (
    "Relative L2 errors and losses after 8 processor seconds on one thread of an idle core, from "
    "the same weights and at the same fixed points, in float64; medians over the seeds. "
    "Compilation does not count."
)
second_order_best = Table(
    "second_order-race",
    _best_rivals,
    """
    problem: parameters, residuals   {size}
    `auto`                           {auto.error:.1e}
    memory, MB                       {auto.bytes:MB.0f}
    `low_rank`                       {low_rank.error:.1e}
    memory, MB                       {low_rank.bytes:MB.0f}
    the best of others               {best.name}: {best.error:.1e}
    """,
    _RACED,
)
second_order_race = Table(
    "second_order-race",
    _by_rival,
    """
    problem: parameters, residuals   {size}
    method                           {name}
    error                            {error:.1e}
    loss                             {loss:.1e}
    seconds to a loss of 1e-4        {until}
    steps                            {steps:.0f}
    memory, MB                       {bytes:MB.0f}
    seeds                            {seeds}
    """,
    f"{_RACED} Names in code are methods of `LevenbergMarquardt`, with the Jacobian's precision "
    "where it is not float64.",
)


def _by_size(data: Result) -> Iterator[Record]:
    """Yields what `auto` takes beside the faster method."""
    for row in data["methods"]:
        counted = {f"{name}_counted": x for name, x in row["operations"].items()}
        yield {**row, **counted, "over": row[row["auto"]] / min(row["primal"], row["dual"])}


second_order_methods = Table(
    "second_order-methods",
    _by_size,
    """
    parameters             {parameters:,}
    residuals              {rows:,}
    primal, operations     {primal_counted:.1e}
    dual, operations       {dual_counted:.1e}
    primal, ms             {primal:ms.1f}
    dual, ms               {dual:ms.1f}
    primal, MB             {primal_bytes:MB.1f}
    dual, MB               {dual_bytes:MB.1f}
    taken by auto          {auto}
    its time to the faster  {over:.2f}
    """,
    "Processor time of a float64 step, the fewest of several, one thread.",
)


def _by_width(data: Result) -> Iterator[Record]:
    """Yields dual steps beside that with a float64 Jacobian."""
    for width, rows in groups(data["widths"], "width").items():
        full = next(row["seconds"] for row in rows if row["jacobian"] == "float64")
        for row in sorted(rows, key=lambda row: row["seconds"]):
            size = f"{width}: {row['parameters']:,}, {row['rows']:,}"
            yield {**row, "size": size, "matrix": f"`{row['jacobian']}`", "full": full}


second_order_widths = Table(
    "second_order-widths",
    _by_width,
    """
    width: parameters, residuals  {size}
    `jacobian=`                   {matrix}
    s                             {seconds:.2f}
    relative to float64           {seconds/full:.2f}
    memory, MB                    {bytes:MB.0f}
    """,
    "Processor time of a dual step with a float64 residual, the fewest of several. Poisson's "
    "equation in three dimensions, three hidden layers.",
)

# --- Neural operators ------------------------------------------------------------------------

OPERATORS = {"darcy": "Darcy", "navier_stokes": "Navier–Stokes"}
# From the text of Tu et al., Speeding up Fourier Neural Operators via Mixed Precision.
PAPER: dict[tuple[str, str, str | None], str] = {
    ("darcy", "float16", "tanh"): "no increase",
    ("navier_stokes", "float16", "tanh"): "1.06–1.11",
}


def operator_variants(data: Result) -> Iterator[Record]:
    """Yields each variant's medians with the most modes, and their ratios to float32's."""
    most = max(t["modes"] for t in data["trainings"])
    of_most = [t for t in data["trainings"] if t["modes"] == most]
    variants = groups(of_most, "problem", "precision", "stabilizer")
    error = lambda runs, norm: statistics.median(
        t["errors"][str(t["resolution"])][norm] for t in runs
    )
    for (problem, precision, stabilizer), runs in variants.items():
        if stabilizer in (None, "tanh"):
            full = variants[problem, "float32", None]
            yield {
                **runs[0],
                "title": OPERATORS[problem],
                "name": ", ".join(filter(None, (precision, stabilizer))),
                "h1": error(runs, "h1"),
                **{f"over {n}": error(runs, n) / error(full, n) for n in ("h1", "l2")},
                "paper": PAPER.get((problem, precision, stabilizer)),
                "seeds": listed(sorted(runs, key=lambda t: t["seed"]), "seed"),
            }


operators = Table(
    "operators",
    operator_variants,
    """
    problem  {title}
    variant  {name}
    test H1 error        {h1:.4f}
    relative to float32  {over h1:.3f}
    test L2 error, relative to float32  {over l2:.3f}
    paper                {paper}
    """,
    "{samples} training samples on {resolution}² points, {channels} channels, {steps} steps; "
    "medians over seeds {seeds}.",
)


# --- Time to an error ------------------------------------------------------------------------


LEVEL = 3  # times the final error of float32


def _reached(curves: list[Record], final: dict[int, float], step: Record | None) -> str:
    """Returns the time to each seed's level, and the median of the steps; "never" if a seed does
    not get there."""
    found = [
        next((n for n, e in zip(c["steps"], c["errors"], strict=True) if e <= level), None)
        for c in curves
        for level in [LEVEL * final[c["seed"]]]
    ]
    known = [n for n in found if n is not None]
    if len(known) < len(found):
        return "never"
    steps = statistics.median(known)
    told = f"{steps * step['median']:.1f} s" if step else "not measured"
    return f"{told} ({steps:,.0f})"


def _cavity(data: Result) -> Iterator[Record]:
    rivals = groups(data["curves"], "rival")
    steps = {t["rival"]: t["step"] for t in data["times"]}
    final = {c["seed"]: c["errors"][-1] for c in rivals["float32"]}
    few = [name for name, curves in rivals.items() if len(curves) < len(final)]
    seeds = listed(rivals["float32"], "seed") + (
        f" (only the first for {', '.join(few)})" * bool(few)
    )
    for name, curves in rivals.items():
        over = [c["errors"][-1] / final[c["seed"]] for c in curves]
        spread = f" ({min(over):.2f}–{max(over):.2f})" if len(over) > 1 else ""
        row = {"rival": name, "seeds": seeds, "over": f"{statistics.median(over):.2f}{spread}"}
        row["error"] = statistics.median(c["errors"][-1] for c in curves)
        row["level"] = _reached(curves, final, steps.get(name))
        yield {**data["size"][0], **row, "step": steps.get(name)}


cavity = Table(
    "time_to_error-cavity",
    _cavity,
    f"""
    training     {{rival}}
    final error  {{error:.2e}}
    relative to float32  {{over}}
    ms a step    {{step.median:ms.2f}} || not measured
    to {LEVEL} × float32's error  {{level}}
    """,
    "Seeds {seeds}; width {width}, depth {depth}, points {points:,}, steps {steps:,}.",
)


# --- On other people's data ------------------------------------------------------------------


def _darcy(data: Result) -> Iterator[Record]:
    """Yields for each library and precision the medians and ranges of its errors, over the seeds
    that all were trained from."""
    steps = {(s["library"], s["precision"]): s for s in data.get("steps", [])}
    of = groups(data["trainings"], "library", "precision")
    common = set.intersection(*({run["seed"] for run in runs} for runs in of.values()))
    for key, several in of.items():
        runs = [run for run in several if run["seed"] in common]
        library, precision = key
        amp = " by AMP" * (library == "neuraloperator" and precision != "float32")
        row = {
            "name": f"{library}, {precision}{amp}",
            "seeds": listed(runs, "seed"),
            "step": steps.get(key),
        }
        for grid, norm in itertools.product(("16", "32"), ("l2", "h1")):
            found = [run["errors"][grid][norm] for run in runs]
            spread = f" ({min(found):.3f}–{max(found):.3f})" if len(found) > 1 else ""
            row[f"{norm} {grid}"] = f"{statistics.median(found):.4f}{spread}"
        yield row


darcy = Table(
    "darcy",
    _darcy,
    """
    training              {name}
    L2, 16²               {l2 16}
    L2, 32²               {l2 32}
    H1, 16²               {h1 16}
    processor ms a step   {step.seconds.median:ms.0f} || not measured
    temp memory, MiB      {step.temp_bytes:MiB.1f} || not measured
    """,
    "Relative test errors, medians and ranges over seeds {seeds}; 15 epochs.",
)
