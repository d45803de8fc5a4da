"""The progress bar of the examples."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(console: Console, width: int) -> Progress:
    """A bar for each task: its description, in `width` columns, steps, and the field `loss`."""
    return Progress(
        TextColumn(f"{{task.description:>{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )
