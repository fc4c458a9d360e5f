"""The display of a run: a progress bar on a terminal, a single updated line in a notebook, plain lines elsewhere.

Display errors never end training: after a lost terminal or a closed pipe the console is silent.
"""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.errors import ConsoleError
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from zeromesh.errors import counted, printable, printable_lines
from zeromesh.trainer.formatting import Detail, human_bytes, human_count, human_seconds, wrapped
from zeromesh.trainer.monitoring.step_metrics import StepMetrics

_LOG = logging.getLogger(__name__)
_REFRESH_SECONDS = 0.25
_SILENCE_SECONDS = 5.0  # Seconds of silence after which a log file gets a status line.
_DISPLAY_ERRORS = (OSError, ValueError, ConsoleError)


class _Terminal(RichConsole):
    """rich's console, except that a closed pipe raises an error, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has gone")


class Console(AbstractContextManager["Console"]):
    """Shows a run on `stream` (standard output if None). Without `shown`, as on ranks above 0, it shows nothing.

    A terminal gets a bar with steps, remaining time and the numbers of the last logged step, drawn at most a few times a second,
    with notes above it. A notebook gets one line with the latest step or status. Other streams get a line per logged step, and a
    status line after some silence. Methods may be called in any order, and none raises.
    """

    def __init__(self, stream: TextIO | None = None, *, shown: bool = True, verbose: bool = False) -> None:
        """`verbose` shows details on terminals too; logs always have them."""
        self._rich = _Terminal(file=stream, highlight=False, markup=False, emoji=False, force_jupyter=False)
        interactive = sys.modules.get("IPython") if stream is None else None
        self._notebook = interactive is not None and hasattr(interactive.get_ipython(), "kernel")
        # A kernel's output claims to be a terminal.
        self._is_terminal = self._rich.is_terminal and not (self._rich.is_dumb_terminal or self._notebook)
        self._live_line: Any = None  # IPython's handle of the line
        self._details = verbose or not (self._is_terminal or self._notebook)
        # Output of other code is printed above the display only if it goes to the same terminal.
        own = self._rich.file is sys.stdout
        self._redirected: dict[str, Any] = {
            "redirect_stdout": own,
            "redirect_stderr": sys.stderr is not None and sys.stderr.isatty(),
        }
        self._shown = shown
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._part: TaskID | None = None
        self._total_steps = self._first_step = 0
        self._after = 0.0
        self._started = self._printed = time.monotonic()
        self._drawn = -math.inf
        self._live: Live | None = None
        self._numbers = ""

    def note(self, *lines: str | None) -> None:
        """Show lines once; None stands for no line. A `Detail` is shown in logs, and on terminals if `verbose`."""
        for line in filter(None, lines):
            if isinstance(line, Detail) and not self._details:
                continue
            self._attempt(partial(self._print, line))

    def status(self, text: str) -> None:
        """Show the current activity until the next output."""
        self._attempt(partial(self._show_status, text))

    def start(self, *, total_steps: int, first_step: int = 0, after: float = 0.0) -> None:
        """Start to show progress: `first_step` of `total_steps` are done, and the work after the last step takes about `after`
        steps."""
        self._attempt(self._end_status, always=True)
        self._total_steps, self._first_step, self._started = total_steps, first_step, time.monotonic()
        self._after = after
        if self._is_terminal and self._task is None:
            self._attempt(self._start_steps)

    def evaluating(self, done: int, total: int) -> None:
        """Show the number of finished batches of an evaluation: on a terminal by a second bar, which disappears at the end."""
        shown = partial(self._show_status, f"evaluating: {done} of {counted(total, 'batch')}")
        self._attempt(partial(self._move_part, done, total) if self._is_terminal else shown)

    def advance(self, step: int) -> None:
        """Show that `step` steps are done."""
        if self._progress is not None:
            self._attempt(lambda: self._move_bar(step))

    def step(self, metrics: StepMetrics) -> None:
        """Show a logged step."""
        if self._progress is not None:
            # Short enough for 80 columns beside the bar.
            self._numbers = (
                f"loss {metrics.loss:.3f}  {human_count(metrics.tokens_per_second)} {metrics.unit.replace('tokens', 'tok')}/s  "
                f"{human_bytes(metrics.peak_memory_bytes)}"
            )
            self._attempt(lambda: self._move_bar(metrics.step, self._numbers))
        elif self._notebook:
            self._numbers = self._line(metrics)
            self._attempt(lambda: self._update_line(self._numbers))
        else:
            self._attempt(lambda: self._print(self._line(metrics)))

    def close(self) -> None:
        """Stop showing progress and restore the terminal. Closing twice is allowed."""
        self._attempt(self._end_status, always=True)
        if self._notebook:
            self._drawn = -math.inf
            self._attempt(lambda: self._update_line(self._numbers))
        progress, self._progress, self._task, self._part = self._progress, None, None, None
        if progress is not None:
            self._attempt(progress.stop, always=True)  # This also restores standard output.

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, action: Callable[[], None], *, always: bool = False) -> None:
        """Run an output action; after the first failure, only those with `always`."""
        if not (self._shown or always):
            return
        try:
            action()
        except _DISPLAY_ERRORS as error:
            self._shown = False
            _LOG.warning("nothing more is shown of this run: %s", error)

    def _print(self, text: str) -> None:
        self._end_status()
        self._printed = time.monotonic()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, numbers=self._numbers)
        lines = printable_lines(text).split("\n")
        # Lines of a log file are not wrapped, whatever width rich assumes.
        shown = wrapped(lines, self._rich.width if self._is_terminal else None)
        self._rich.print(Text("\n".join(shown)), soft_wrap=True)
        self._rich.file.flush()

    def _show_status(self, text: str) -> None:
        now = time.monotonic()
        if self._notebook:
            self._update_line(text)
        elif not self._is_terminal:
            if now - self._printed >= _SILENCE_SECONDS:
                self._print(text)
        elif now - self._drawn >= _REFRESH_SECONDS:
            if self._progress is not None:
                self._move_bar(None, printable(text))
                return
            self._drawn = now
            if self._live is None:
                self._live = Live(console=self._rich, auto_refresh=False, transient=True, **self._redirected)
                self._live.start()
            self._live.update(Text(printable(text), overflow="ellipsis", no_wrap=True), refresh=True)

    def _end_status(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()  # This also restores standard output.
            self._drawn = -math.inf

    def _start_steps(self) -> None:
        bar = self._progress = self._progress or self._started_bar()
        self._task = bar.add_task("", total=self._total_steps, completed=self._first_step, numbers="")

    def _move_part(self, done: int, total: int) -> None:
        self._end_status()
        bar = self._progress = self._progress or self._started_bar()
        if self._part is None:
            self._part = bar.add_task("", total=total, numbers="evaluating")
        bar.update(self._part, completed=done)
        if done < total:
            self._refresh(bar)
            return
        bar.remove_task(self._part)
        self._part = None
        if self._task is None:
            self._progress = None
            bar.stop()

    def _started_bar(self) -> Progress:
        # The bar has no thread: it would take time from training, and not survive a fork.
        bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=self._rich,
            auto_refresh=False,
            expand=True,
            **self._redirected,
        )
        bar.start()
        return bar

    def _update_line(self, text: str) -> None:
        now = time.monotonic()
        if now - self._drawn < _REFRESH_SECONDS:
            return
        self._drawn, shown = now, {"text/plain": printable(text)}
        if self._live_line is None:
            from IPython.display import display

            self._live_line = display(shown, raw=True, display_id=True)
        else:
            self._live_line.update(shown, raw=True)

    def _move_bar(self, step: int | None, numbers: str | None = None) -> None:
        if self._progress is None or self._task is None:
            return
        fields: dict[str, Any] = {} if numbers is None else {"numbers": numbers}
        self._progress.update(self._task, completed=step, **fields)
        self._refresh(self._progress)

    def _refresh(self, bar: Progress) -> None:
        now = time.monotonic()
        if now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            bar.refresh()

    def _line(self, metrics: StepMetrics) -> str:
        line = step_line(metrics, total_steps=self._total_steps)
        done = metrics.step - self._first_step
        left = self._total_steps + self._after - metrics.step
        if done > 0 and left > 0:
            pace = (time.monotonic() - self._started) / done
            line += f"  {human_seconds(pace * left)} left"
        return line


def step_line(metrics: StepMetrics, *, total_steps: int = 0) -> str:
    """Return a logged step as plain text, numbers with units, extras last."""
    of_total = f"/{total_steps}" if total_steps else ""
    extras = {name: f"{value:.1%}" if name == "mfu" else value for name, value in metrics.extras.items()}
    parts = [f"step {metrics.step}{of_total}", f"loss {metrics.loss:.4f}"]
    if metrics.grad_norm is not None:
        parts.append(f"grad {metrics.grad_norm:.3g}")
    parts += [
        f"lr {metrics.lr:.3g}",
        f"{human_count(metrics.tokens_per_second)} {metrics.unit}/s",
        f"{human_seconds(metrics.step_seconds)}/step",
        human_bytes(metrics.peak_memory_bytes),
        *(f"{name} {value}" for name, value in extras.items() if not isinstance(value, Mapping)),
    ]
    return "  ".join(parts)
