"""The table of derivatives of many networks."""

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


networks = Table(
    "networks",
    _cases,
    """
    network  {mpx_pde.network}
    of       {mpx_pde.problem}
    GFLOP    {mpx_pde.flops:G.3g}
    over nested `jvp`  {mpx_pde.flops/nested jvp.flops:.2f}
    over jet           {mpx_pde.flops/jet.flops:.2f}
    over folx          {mpx_pde.flops/folx.flops:.2f}
    bytes              {mpx_pde.bytes_accessed/nested jvp.bytes_accessed:.2f}
    temp memory        {mpx_pde.temp_bytes/nested jvp.temp_bytes:.2f}
    H100: temp memory  {h100.mpx_pde float32/h100.nested jvp float32:.2f}
    float16            {h100.mpx_pde float16/h100.nested jvp float32:.2f}
    error              {mpx_pde.error:.1e}
    of nested `jvp`    {nested jvp.error:.1e}
    float16            {mpx_pde.error_float16:.1e}
    bfloat16           {mpx_pde.error_bfloat16:.1e}
    """,
    "{width} units. A step is the mean square of the derivative at 64 to 2,048 points, and its "
    "gradient with respect to the parameters. All costs are of the compiled program; bytes, and "
    "memory on a CPU and an H100 (compiled, not run), are over those of nested `jvp` in float32. "
    "Errors are of the derivative, over that of the same parameters in float64; those in half "
    "contain the rounding of parameters. Below 1 is in favor of `mpx_pde`; a dash is what a rival "
    "cannot do, or was not compiled.",
)

coordinate_mlp = Table(
    "networks",
    lambda data: (row for row in _cases(data) if row["mpx_pde"]["network"] == "CoordinateMLP"),
    """
    of                 {mpx_pde.problem}
    GFLOP              {mpx_pde.flops:G.3g}
    over nested `jvp`  {mpx_pde.flops/nested jvp.flops:.2f}
    over jet           {mpx_pde.flops/jet.flops:.2f}
    over folx          {mpx_pde.flops/folx.flops:.2f}
    ms                 {mpx_pde.seconds.median:ms.0f}
    over nested `jvp`  {mpx_pde.seconds.median/nested jvp.seconds.median:.2f}
    error in float16   {mpx_pde.error_float16:.1e}
    of bfloat16        {mpx_pde.error_bfloat16:.1e}
    """,
    "{width} × 4; the mean square of the derivative, and its gradient with respect to the "
    "parameters, in float32.",
)

times = Table(
    "networks",
    lambda data: (row for row in _cases(data) if "seconds" in row["mpx_pde"]),
    """
    network            {mpx_pde.network}
    of                 {mpx_pde.problem}
    ms                 {mpx_pde.seconds.median:ms.1f}
    over nested `jvp`  {mpx_pde.seconds.median/nested jvp.seconds.median:.2f}
    over jet           {mpx_pde.seconds.median/jet.seconds.median:.2f}
    over folx          {mpx_pde.seconds.median/folx.seconds.median:.2f}
    tracing and compiling, s     {mpx_pde.compile_seconds:.1f}
    over nested `jvp`            {mpx_pde.compile_seconds/nested jvp.compile_seconds:.2f}
    """,
    "The median of 7 rounds in float32, in turns within one process, on two idle cores.",
)
