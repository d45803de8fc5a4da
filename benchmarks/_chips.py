"""The speed that the prediction assumes for a chip: data sheet rates, and the share of them that
programs reach."""

from typing import NamedTuple


class Rate(NamedTuple):
    """A rate per second from a data sheet, and the share of it that a good kernel reaches."""

    name: str
    peak: float
    share: float

    @property
    def kept(self) -> float:
        return self.peak * self.share


class Chip(NamedTuple):
    """The rates of a chip.

    **Attributes:**

    - `memory`: in bytes.
    - `products`: in operations, by kind of product.
    - `arithmetic`: in elementwise operations.
    - `launch`: the least time that a kernel takes, in seconds.
    """

    memory: Rate
    products: dict[str, Rate]
    arithmetic: Rate
    launch: float

    def assumptions(self) -> list[tuple[str, str, str]]:
        """Returns the assumptions as rows of a table: quantity, data sheet, share of it."""
        rates = [*self.products.values(), self.arithmetic]
        return [
            (self.memory.name, f"{self.memory.peak / 1e9:,.0f} GB/s", f"{self.memory.share:.0%}"),
            *((r.name, f"{r.peak / 1e12:,.4g} TFLOP/s", f"{r.share:.0%}") for r in rates),
            ("a kernel, at least", f"{self.launch * 1e6:g} µs", "–"),
        ]


H100 = Chip(  # SXM
    Rate("memory", 3.35e12, 0.85),
    {
        # Share of the dense peak that cuBLAS reaches for products of these sizes.
        "half": Rate("products, half precision", 989e12, 0.6),
        # In one of XLA's own kernels: measured on an H200 for products of 512 columns.
        "split": Rate("products, split", 989e12, 0.24),
        "tf32": Rate("products, TF32", 494e12, 0.6),
        "f32": Rate("products, float32", 67e12, 0.8),
        "f64": Rate("products, float64", 67e12, 0.8),
        "f8": Rate("products, float8", 1979e12, 0.6),
        "int": Rate("products, integers", 33e12, 1.0),
    },
    # 132 multiprocessors of 128 lanes at their sustained clock; an instruction is one operation.
    Rate("elementwise arithmetic", 132 * 128 * 1.755e9, 0.75),
    launch=2.5e-6,
)

CHIPS = {"h100": H100}

WEIGHTS = (
    {"convert": 2, "log": 12, "log-plus-one": 16, "erf": 25, "power": 30, "atan2": 40}
    | dict.fromkeys(("sqrt", "rsqrt"), 6)
    | dict.fromkeys(("exponential", "divide"), 8)
    | dict.fromkeys(("exponential-minus-one", "logistic"), 14)
    | dict.fromkeys(("tanh", "cbrt", "sine", "cosine", "remainder", "rng-bit-generator"), 20)
)
"""The number of operations of an elementwise instruction; one for those not listed."""
