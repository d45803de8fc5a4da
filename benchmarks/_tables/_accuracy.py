"""Errors of products and layers, and what a transformer learns with them."""

import statistics

from ._format import load, markdown, source


def products() -> str:
    data = load("products-cpu")
    records = data["products"]
    problems = list(dict.fromkeys(r["problem"] for r in records))
    rows = []
    for algorithm in dict.fromkeys(r["algorithm"] for r in records):
        runs = {r["problem"]: r for r in records if r["algorithm"] == algorithm}
        rows.append(
            [
                f"`{algorithm}`",
                f"{runs[problems[0]]['products']}",
                *(f"{runs[p]['emulated_error']:.1e}" for p in problems),
                "not measured"
                if runs[problems[0]]["seconds"] is None
                else f"{1e3 * runs[problems[0]]['seconds']['median']:.3f}",
            ]
        )
    columns = ["algorithm", "products", *problems, "ms on a GPU"]
    return f"{markdown(columns, rows)}\n\nEmulated. {source(data)}\n"


def float8() -> str:
    data = load("float8-cpu")
    names = ("u", "u_x", "u_xx", "gradient")
    rows = [[e["format"], *(f"{e[name]:.1e}" for name in names)] for e in data["errors"]]
    columns = ["format", "u", "u_x", "u_xx", "gradient of the residual"]
    return f"{markdown(columns, rows)}\n\nRelative errors against float64. {source(data)}\n"


def spectral_layers() -> str:
    data = load("spectral-cpu")
    rows = []
    for layer in data["layers"]:
        # Of the quarter of rounds that other programs on the machine disturbed least.
        dft, fft = layer["seconds_dft"]["lower"], layer["seconds_fft"]["lower"]
        rows.append(
            [
                f"{layer['size']}²",
                str(layer["modes"]),
                f"{layer['channels']} × {layer['batch']}",
                f"{fft / dft:.1f}",
                layer["auto"],
                f"{layer['temp_bytes_dft'] / 2**20:.1f} / {layer['temp_bytes_fft'] / 2**20:.1f}",
                *(f"{layer[f'error_{k}']:.1e}" for k in ("dft", "fft", "float16", "bfloat16")),
            ]
        )
    columns = [
        "grid",
        "modes",
        "channels × batch",
        "FFT time over matrices",
        "`auto`",
        "temp memory, MiB",
        "error, matrices",
        "error, FFT",
        "matrices, float16",
        "matrices, bfloat16",
    ]
    return f"{markdown(columns, rows)}\n\n{source(data)}\n"


def vit() -> str:
    data = load("vit-cpu")
    trainings = data["trainings"]
    rows = []
    for precision in dict.fromkeys(t["precision"] for t in trainings):
        runs = [t for t in trainings if t["precision"] == precision]

        def mean(field, runs=runs):
            return statistics.mean(run[field] for run in runs)

        skipped = f"{mean('skipped_steps'):.0f}" if precision != "float32" else "–"
        rows.append(
            [
                precision,
                f"{mean('accuracy'):.1%}",
                " ".join(f"{run['accuracy']:.1%}" for run in runs),
                f"{mean('loss'):.4f}",
                f"{mean('test_loss'):.3f}",
                skipped,
                f"{mean('temp_bytes') / 2**20:.1f}",
            ]
        )
    columns = [
        "training",
        "test accuracy",
        "by seed",
        "loss",
        "test loss",
        "skipped steps",
        "temp memory, MiB",
    ]
    runs = [t for t in trainings if t["precision"] == "float32"]
    return (
        f"{markdown(columns, rows)}\n\n{runs[0]['steps']:,} steps, means over seeds "
        f"{', '.join(str(run['seed']) for run in runs)}. {source(data)}\n"
    )
