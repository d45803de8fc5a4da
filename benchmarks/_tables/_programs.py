"""What compiled programs tell: operations, memory, products, collectives."""

from typing import Any

from ._format import NOT_RUN, load, markdown, source


def overhead() -> str:
    data = load("overhead-cpu")
    rows = []
    for program in data["programs"]:
        if program["step"] in ("by hand", "float32"):
            continue
        key = {k: program[k] for k in ("problem", "size", "target", "dtype")}
        [by_hand] = [
            p for p in data["programs"] if p["step"] == "by hand" and key.items() <= p.items()
        ]

        def ratio(field, program=program, by_hand=by_hand):
            if program[field] is None:
                return "not told"
            if by_hand[field] == 0:  # a TPU keeps small arrays on its chip
                return "none" if program[field] == 0 else f"{program[field]:,} over 0"
            return f"{program[field] / by_hand[field]:.4f}"

        rows.append(
            [
                f"{program['problem']} {program['size']}",
                {"cpu": "CPU"}.get(program["target"], f"{program['target']}, not run"),
                program["step"],
                *(ratio(f) for f in ("operations", "bytes_accessed", "temp_bytes")),
            ]
        )
    columns = ["problem", "compiled for", "step", "operations", "bytes accessed", "temp memory"]
    return f"{markdown(columns, rows)}\n\n{source(data)}\n"


def collectives() -> str:
    """Of the cavity on four devices."""
    steps, sources = _scaled()
    rows = []
    for step in steps:
        if step["problem"] != "cavity" or step["devices"] != 4:
            continue
        sent = {}
        for kind, traffic in step["collectives"].items():
            name, dtype = kind.split()
            if dtype != "pred":
                sent.setdefault(name, []).append(f"{traffic['bytes'] / 2**10:,.0f} {dtype}")
        rows.append(
            [
                step["target"],
                step["layout"],
                step["precision"],
                step["sum_dtype"] or "float32",
                *(
                    " + ".join(sent.get(name, ["–"]))
                    for name in ("all-gather", "reduce-scatter", "all-reduce")
                ),
            ]
        )
    columns = [
        "compiled for",
        "layout",
        "precision",
        "sums in",
        "all-gather, KiB",
        "reduce-scatter, KiB",
        "all-reduce, KiB",
    ]
    return f"{markdown(columns, rows)}\n\n{sources}\n"


def _scaled() -> tuple[list[dict[str, Any]], str]:
    """The steps on several devices of both platforms, and where they come from."""
    platforms = [load(f"weak_scaling-{name}-cpu") for name in ("h100", "v5e")]
    found = [step for data in platforms for step in data["steps"] if step["devices"] > 1]
    note = "Compiled for devices that are not there, not run."
    return found, "\n".join([note, "", *(f"- {source(data)}" for data in platforms)])


def weak_scaling() -> str:
    steps, sources = _scaled()
    names = {"cavity": "cavity", "fno": "FNO"}
    targets = list(dict.fromkeys(s["target"] for s in steps))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for s in steps:
        key = names[s["problem"]], s["layout"], s["precision"], s["sum_dtype"] or "float32"
        sent = f"{s['wire_bytes'] / 2**10:,.0f} KiB"
        memory = f"{s['temp_over_one']:.2f} + {s['argument_over_one']:.2f}"
        lines.setdefault(key, {})[s["target"]] = f"{sent}; {memory}"
    rows = [[*key, *(cells.get(t, "–") for t in targets)] for key, cells in lines.items()]
    columns = ["network", "layout", "precision", "sums in", *targets]
    return f"{markdown(columns, rows)}\n\n{sources}\n"


def compile_time() -> str:
    data = load("compile_time-cpu")
    rows = []
    for b in data["builds"]:
        if "failed" in b:
            rows.append([b["problem"], b["step"], b["failed"], *["–"] * 5])
            continue
        seconds = (f"{b[stage]['median']:.2f}" for stage in ("trace", "lower", "compile"))
        ratio, error = f"{b['trace_over_by_hand']:.2f}", f"{b['loss_error']:.1e}"
        rows.append([b["problem"], b["step"], *seconds, ratio, f"{b['equations']:,}", error])
    columns = ["network", "step", "trace, s", "lower, s", "compile, s"]
    columns += ["trace over by hand", "equations", "first loss against float32"]
    return f"{markdown(columns, rows)}\n\n{source(data)}\n"


def growth() -> str:
    """Memory and kernels on an H100 and flops, which a CPU tells, by size; and their slopes."""
    data = load("growth-cpu")
    h100, cpu = ([c for c in data["costs"] if c["target"] == t] for t in ("h100", "cpu"))
    slopes = {
        (e["target"], e["sweep"], e["way"], e["cost"]): e["exponent"] for e in data["exponents"]
    }
    rows = []
    for sweep, way in dict.fromkeys((c["sweep"], c["way"]) for c in h100):
        key = {"sweep": sweep, "way": way}
        on_gpu, on_cpu = ([c for c in found if key.items() <= c.items()] for found in (h100, cpu))
        told = lambda values, form: " · ".join(format(v, form) for v in values)
        rows.append(
            [
                f"{sweep} {told([c[sweep] for c in on_gpu], ',')}",
                way,
                told([c["temp_bytes"] / 2**20 for c in on_gpu], ",.0f"),
                f"{slopes['h100', sweep, way, 'temp_bytes']:.2f}",
                told([c["kernels"] for c in on_gpu], ","),
                told([c["flops"] / 1e9 for c in on_cpu], ",.1f"),
                f"{slopes['cpu', sweep, way, 'flops']:.2f}",
            ]
        )
    columns = ["size", "step", "temp memory, MiB", "exponent", "kernels", "GFLOP", "exponent"]
    base = data["costs"][1]
    note = f"The base: {base['width']} × {base['depth']}, {base['points']:,} points."
    note += f" Memory and kernels {NOT_RUN}."
    return f"{markdown(columns, rows)}\n\n{note} {source(data)}\n"


def vit_memory() -> str:
    data = load("vit_memory-cpu")
    tracing = {t["precision"]: t for t in data["tracing"]}
    rows = []
    for m in data["memory"]:
        single = sum(n for name, n in m["products"].items() if name.endswith("f32 × f32"))
        rows.append(
            [
                m["precision"],
                f"{m['temp_bytes'] / 2**30:.2f}",
                f"{m['over_float32']:.2f}",
                f"{sum(m['products'].values())}",
                f"{single}",
                f"{tracing[m['precision']]['over_float32']:.1f}",
            ]
        )
    columns = [
        "training",
        "temp memory, GiB",
        "over float32",
        "products",
        "of these float32 × float32",
        "time to trace, over float32",
    ]
    m = data["memory"][0]
    return (
        f"{markdown(columns, rows)}\n\nViT-Base ({m['blocks']} blocks), batch {m['batch']}, one "
        f"training step with AdamW, {NOT_RUN}. {source(data)}\n"
    )


def derivatives() -> str:
    data = load("derivatives-cpu")
    rows = [
        [
            r["rival"],
            str(r["order"]),
            f"{r['forward_flops'] / 1e9:.2f}",
            f"{r['step_flops'] / 1e9:.2f}",
            f"{1e3 * r['step_seconds']['median']:.0f}",
            f"{r['step_temp_mib']:.0f}",
            f"{r['error_half']:.1e}",
        ]
        for r in data["derivatives"]
    ]
    columns = ["by", "order", "values, GFLOP", "step, GFLOP", "step, ms", "temp memory, MiB"]
    columns += ["error of values in float16"]
    size = data["derivatives"][0]
    return (
        f"{markdown(columns, rows)}\n\n{size['width']} × {size['depth']}, two coordinates, "
        f"{size['points']:,} points; a step is the gradient with respect to the parameters, in "
        f"float32. {source(data)}\n"
    )


def cavity_memory() -> str:
    data = load("cavity_memory-cpu")
    rows = []
    for record in data["memory"]:
        base = next(r for r in data["memory"] if r["precision"] == "float32")
        nested = [r for r in data["memory"] if r["derivatives"] == "nested jvp"]
        rows.append(
            [
                record["derivatives"],
                record["precision"],
                f"{record['temp_bytes'] / 2**30:.2f}",
                f"{record['temp_bytes'] / base['temp_bytes']:.2f}",
                f"{record['temp_bytes'] / nested[0]['temp_bytes']:.2f}",
            ]
        )
    columns = [
        "derivatives",
        "precision",
        "temp memory, GiB",
        "over propagated float32",
        "over nested float32",
    ]
    size = data["memory"][0]
    return (
        f"{markdown(columns, rows)}\n\nu, v and p with first and second derivatives and the "
        f"gradient with respect to the parameters: {size['depth']} × {size['width']}, "
        f"{size['points']:,} points; {NOT_RUN}. {source(data)}\n"
    )


def spectral_models() -> str:
    data = load("spectral-cpu")
    models = data["models"]
    first = models[0]
    rows = [
        [
            model["dtype"],
            {"fft": "FFT", "dft": "matrices"}[model["method"]],
            f"{model['temp_bytes'] / 2**30:.2f}",
            f"{model['temp_bytes'] / first['temp_bytes']:.2f}",
            ", ".join(model["products"]),
            str(model["ffts"]),
        ]
        for model in models
    ]
    columns = ["precision", "transform", "temp memory, GiB", "of the first", "products", "FFTs"]
    return (
        f"{markdown(columns, rows)}\n\nFour blocks, {first['size']}², {first['modes']} modes, "
        f"{first['channels']} channels, a batch of {first['batch']}; {NOT_RUN}. {source(data)}\n"
    )
