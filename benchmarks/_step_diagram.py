"""The diagram of a training step, for the landing page and *Full-precision answers*."""

from typing import Any


FULL, HALF, CHECK = "#cfe2f3", "#fce0c4", "#e8e8e8"
SIZE = 1.75, 0.78

# Place of the center, text, color. The forward pass runs to the right, the backward pass below it
# to the left, the update back up.
BOXES = {
    "masters": (0.0, 2.0, "master weights\nfloat32", FULL),
    "forward": (2.6, 2.0, "forward pass\nvalues and derivatives\nfloat32", FULL),
    "loss": (5.2, 2.0, "loss\nfloat32", FULL),
    "kept": (2.6, 0.9, "kept for the\nbackward pass\nfloat16 or bfloat16", HALF),
    "scale": (5.2, 0.9, "× loss scale", CHECK),
    "backward": (5.2, -0.2, "backward pass\nproducts half × half\nfloat32 sums", HALF),
    "unscale": (2.6, -0.2, "gradients ÷ loss scale\nfloat32", FULL),
    "finite": (0.0, -0.2, "all finite?", CHECK),
    "update": (0.0, 0.9, "yes: optimizer update\nfloat32", FULL),
}
ARROWS = [
    ("masters", "forward"),
    ("forward", "loss"),
    ("forward", "kept"),
    ("loss", "scale"),
    ("scale", "backward"),
    ("kept", "backward"),
    ("backward", "unscale"),
    ("unscale", "finite"),
    ("finite", "update"),
    ("update", "masters"),
]
SKIP = "no: the step changes nothing,\nand the scale that overflowed falls"


def draw(figure: Any, data: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    del data
    axes = figure.subplots()
    width, height = SIZE
    for x, y, text, color in BOXES.values():
        corner = (x - width / 2, y - height / 2)
        style: Any = {"boxstyle": "round,pad=0.06", "facecolor": color, "edgecolor": "#555555"}
        axes.add_patch(FancyBboxPatch(corner, width, height, **style))
        axes.text(x, y, text, ha="center", va="center")
    for start, end in ARROWS:
        a, b = (BOXES[name][:2] for name in (start, end))
        level = a[1] == b[1]
        sign = (b[0] > a[0]) - (b[0] < a[0]) if level else (b[1] > a[1]) - (b[1] < a[1])
        reach = (width / 2 + 0.1) * sign if level else (height / 2 + 0.1) * sign
        tail = (a[0] + reach, a[1]) if level else (a[0], a[1] + reach)
        head = (b[0] - reach, b[1]) if level else (b[0], b[1] - reach)
        if not level and a[0] != b[0]:  # diagonally, from side to side
            tail, head = (a[0] + width / 2 + 0.1, a[1]), (b[0] - width / 2 - 0.1, b[1])
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": "#333333"})
    axes.text(0, -0.72, SKIP, ha="center", va="top", color="#555555")
    axes.set(xlim=(-1.2, 6.4), ylim=(-1.25, 2.55))
    axes.set_axis_off()
