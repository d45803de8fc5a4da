"""What half precision does, by version of JAX."""

from collections.abc import Iterator

from ._format import Record, Result, Table, load


OLD, NEW = "halves-jax0_10", "halves-jax0_12"
SHOWN = (
    "`segment_sum`",
    "the gradient of a gather",
    "`psum`, float16",
    "`sigmoid`",
    "`silu`",
    "`gelu` at 148",
    "`sinc` at 20856",
    "`random.normal`, bfloat16",
    "`cosine_similarity` of 300s",
    "`clip_by_global_norm` of 300, 400",
    "`BF16_BF16_F32`",
    "`rfft`",
)
"""The rows on the page; the file has all."""


def _beside(data: Result) -> Iterator[Record]:
    """Yields the rows, with what the newer version does beside them."""
    newer = {(r["group"], r["what"]): r["in_half"] for r in load(NEW)["rows"]}
    for row in data["rows"]:
        told = {"new": newer.get((row["group"], row["what"])), "old": data["environment"]["jax"]}
        here = row["here"] and f"{row['here']} ({row['mode']})"
        yield {**row, **told, "there": load(NEW)["environment"]["jax"], "told": here}


def _columns(data: Result) -> list[str]:
    old, new = data["environment"]["jax"], load(NEW)["environment"]["jax"]
    ours = "here  {told}"
    return [
        "of  {group}",
        "operation  {what}",
        f"JAX {old}  {{in_half}}",
        f"JAX {new}  {{new}}",
        ours,
    ]


halves = Table(OLD, lambda data: [r for r in _beside(data) if r["what"] in SHOWN], _columns)
every = Table(OLD, _beside, _columns)


def changed() -> str:
    """Returns a sentence with the rows that differ between the versions."""
    rows = list(_beside(load(OLD)))
    told = [
        f"{r['what']} ({r['in_half']}, now {r['new']})" for r in rows if r["new"] != r["in_half"]
    ]
    first = rows[0]
    return (
        f"Of {len(rows)} rows, {len(told)} differ between JAX {first['old']} and "
        f"{first['there']}: {'; '.join(told)}.\n"
    )
