"""What the prediction takes a chip to do in a second. Data sheets, and the share of them that
programs get."""

from typing import NamedTuple


class Chip(NamedTuple):
    """**Attributes:**

    - `memory`: bytes a second, of the data sheet.
    - `products`: operations a second by kind of product, of the data sheet.
    - `arithmetic`: elementwise operations a second.
    - `launch`: seconds that a kernel takes at least.
    - `memory_share`, `product_share`, `arithmetic_share`: what a good kernel gets of each.
    """

    memory: float
    products: dict[str, float]
    arithmetic: float
    launch: float
    memory_share: float
    product_share: dict[str, float]
    arithmetic_share: float

    def product_rate(self, kind: str) -> float:
        return self.products[kind] * self.product_share[kind]

    def assumptions(self) -> list[tuple[str, str, str]]:
        """What is assumed, as rows of a table: quantity, data sheet, share of it."""
        rate = lambda x: f"{x / 1e12:,.4g} TFLOP/s"
        rows = [("memory", f"{self.memory / 1e9:,.0f} GB/s", f"{self.memory_share:.0%}")]
        for kind, peak in self.products.items():
            rows.append((f"products, {NAMES[kind]}", rate(peak), f"{self.product_share[kind]:.0%}"))
        share = f"{self.arithmetic_share:.0%}"
        rows.append(("elementwise arithmetic", rate(self.arithmetic), share))
        rows.append(("a kernel, at least", f"{self.launch * 1e6:g} µs", "–"))
        return rows


NAMES = {
    "half": "half precision",
    "tf32": "TF32",
    "f32": "float32",
    "f64": "float64",
    "f8": "float8",
    "int": "integers",
}

_TENSOR_CORES = 0.6  # of dense peak: what cuBLAS gets for products of these sizes

H100 = Chip(  # SXM
    memory=3.35e12,
    products={
        "half": 989e12,
        "tf32": 494e12,
        "f32": 67e12,
        "f64": 67e12,
        "f8": 1979e12,
        "int": 33e12,
    },
    # 132 multiprocessors of 128 lanes at the clock they keep; an instruction is one operation.
    arithmetic=132 * 128 * 1.755e9,
    launch=2.5e-6,
    memory_share=0.85,
    product_share={
        **dict.fromkeys(("half", "tf32", "f8"), _TENSOR_CORES),
        **dict.fromkeys(("f32", "f64"), 0.8),
        "int": 1.0,
    },
    arithmetic_share=0.75,
)

CHIPS = {"h100": H100}


WEIGHTS = {
    "tanh": 20,
    "exponential": 8,
    "exponential-minus-one": 14,
    "log": 12,
    "log-plus-one": 16,
    "erf": 25,
    "divide": 8,
    "sqrt": 6,
    "rsqrt": 6,
    "cbrt": 20,
    "power": 30,
    "sine": 20,
    "cosine": 20,
    "logistic": 14,
    "convert": 2,
    "remainder": 20,
    "atan2": 40,
    "rng-bit-generator": 20,
}
"""How many operations an elementwise instruction takes; one for all others."""
