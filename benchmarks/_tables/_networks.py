"""The table of derivatives of many networks."""

import statistics
from collections.abc import Iterator

from ._format import Record, Result, Table, groups


def _cases(data: Result) -> Iterator[Record]:
    """Of each network and problem the records of all rivals, and their memory on an H100."""
    h100 = groups(data.get("h100", []), "network", "problem")
    for at, records in groups(data["costs"], "network", "problem").items():
        rivals = {record["rival"]: record for record in records}
        memory = {f"{r['rival']} {r['precision']}": r["temp_bytes"] for r in h100.get(at, [])}
        if "mpx_pde" in rivals:
            yield {**rivals, "h100": memory, **data["width"][0]}


def seconds_over(data: Result, problem: str, rival: str) -> float:
    """Returns the time of a step relative to a rival: the median over the networks."""
    found = [c for c in _cases(data) if c["mpx_pde"]["problem"] == problem and rival in c]
    seconds = lambda case, name: case[name]["seconds"]["median"]
    return statistics.median(seconds(c, "mpx_pde") / seconds(c, rival) for c in found)


everything = Table(
    "networks",
    _cases,
    """
    network  {mpx_pde.network}
    of       {mpx_pde.problem}
    GFLOP    {mpx_pde.flops:G.3g}
    GFLOP over nested jvp  {mpx_pde.flops/nested jvp.flops:.2f}
    GFLOP over jet         {mpx_pde.flops/jet.flops:.2f}
    GFLOP over folx        {mpx_pde.flops/folx.flops:.2f}
    ms                     {mpx_pde.seconds.median:ms.1f}
    ms over nested jvp     {mpx_pde.seconds.median/nested jvp.seconds.median:.2f}
    ms over jet            {mpx_pde.seconds.median/jet.seconds.median:.2f}
    ms over folx           {mpx_pde.seconds.median/folx.seconds.median:.2f}
    tracing and compiling, s      {mpx_pde.compile_seconds:.1f}
    the same over nested jvp      {mpx_pde.compile_seconds/nested jvp.compile_seconds:.2f}
    bytes over nested jvp         {mpx_pde.bytes_accessed/nested jvp.bytes_accessed:.2f}
    temp memory over nested jvp   {mpx_pde.temp_bytes/nested jvp.temp_bytes:.2f}
    the same compiled for an H100  {h100.mpx_pde float32/h100.nested jvp float32:.2f}
    the same in float16           {h100.mpx_pde float16/h100.nested jvp float32:.2f}
    error                  {mpx_pde.error:.1e}
    error of nested jvp    {nested jvp.error:.1e}
    error in float16       {mpx_pde.error_float16:.1e}
    error in bfloat16      {mpx_pde.error_bfloat16:.1e}
    """,
)


def _by_network(data: Result) -> Iterator[Record]:
    """Yields the cases of each network by the derivative."""
    for network, cases in groups(
        ({**c, "network": c["mpx_pde"]["network"]} for c in _cases(data)), "network"
    ).items():
        yield {"network": network, "width": cases[0]["width"]} | {
            case["mpx_pde"]["problem"]: case for case in cases
        }


def _over(problem: str, rival: str = "nested jvp") -> str:
    at = "{0}.{1}.seconds.median"
    return f"{{{at.format(problem, 'mpx_pde')}/{at.format(problem, rival)}:.2f}}"


networks = Table(
    "networks",
    _by_network,
    [
        "network  {network}",
        f"order 2  {_over('order 2')}",
        f"order 4  {_over('order 4')}",
        f"Laplacian  {_over('laplacian 2')}",
        f"biharmonic  {_over('biharmonic 2')}",
        f"Laplacian, relative to folx  {_over('laplacian 2', 'folx')}",
    ],
    "Time of a step relative to nested `jvp`, in float32: the mean square of the derivative and "
    "its gradient, networks of {width} units. The median of 7 rounds, in turns within one process.",
)
