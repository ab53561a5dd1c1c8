"""The progress bar of ``LLM.generate``: requests done and generated tokens a second, on stderr."""

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

__all__ = ["ProgressBar"]


class ProgressBar:
    """Shown while it is entered, if ``show``; else it does nothing.

    Args:
        total: number of requests.
    """

    def __init__(self, total: int, show: bool) -> None:
        self._total = total
        self._progress: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None
        self._num_tokens = 0
        if show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]:.1f} tokens/s"),
                console=Console(stderr=True),
            )

    def __enter__(self) -> "ProgressBar":
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("Processed prompts", total=self._total, rate=0.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, num_finished: int, num_tokens: int) -> None:
        """So many more requests are finished, so many more tokens are there."""
        if self._progress is None or self._task is None:
            return
        self._num_tokens += num_tokens
        elapsed = self._progress.tasks[self._task].elapsed
        rate = self._num_tokens / elapsed if elapsed else 0.0
        self._progress.update(self._task, advance=num_finished, rate=rate)
