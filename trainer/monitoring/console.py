"""The display of a run for a person: a progress bar on a terminal, one line that changes in a notebook, plain lines elsewhere.

Training never fails for the sake of its display: a terminal that goes away or a closed pipe makes the console
silent.
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
_SILENCE_SECONDS = 5.0  # after which a log file gets a line of status
_DISPLAY_ERRORS = (OSError, ValueError, ConsoleError)


class _Terminal(RichConsole):
    """rich's console, but a closed pipe is an error of this file's, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has gone")


class Console(AbstractContextManager["Console"]):
    """Shows a run to a person, on `stream` (standard output if None). Without `shown`, as on ranks above 0, it shows nothing.

    On a terminal: a bar with steps, time left and the numbers of the last logged step, drawn a few times a second at most; notes
    stand above it. In a notebook: one line with the latest step or status. Elsewhere: a line per logged step, and a line of status
    where nothing has been shown for a while. Methods may be called in any order, and none raises.
    """

    def __init__(self, stream: TextIO | None = None, *, shown: bool = True, verbose: bool = False) -> None:
        """`verbose`: show details to a person too; a log has them always."""
        self._rich = _Terminal(file=stream, highlight=False, markup=False, emoji=False, force_jupyter=False)
        interactive = sys.modules.get("IPython") if stream is None else None
        self._notebook = interactive is not None and hasattr(interactive.get_ipython(), "kernel")
        # The output of a kernel says of itself that it is a terminal.
        self._is_terminal = self._rich.is_terminal and not (self._rich.is_dumb_terminal or self._notebook)
        self._live_line: Any = None  # IPython's handle of it
        self._details = verbose or not (self._is_terminal or self._notebook)
        # Of what others print, only what goes to the same terminal is put above the display.
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
        """Show lines once; None stands for no line. A `Detail` is shown in a log, and to those who asked for it."""
        for line in filter(None, lines):
            if isinstance(line, Detail) and not self._details:
                continue
            self._attempt(partial(self._print, line))

    def status(self, text: str) -> None:
        """Show what goes on now, until anything else is shown."""
        self._attempt(partial(self._show_status, text))

    def start(self, *, total_steps: int, first_step: int = 0, after: float = 0.0) -> None:
        """Begin to show progress: `first_step` of `total_steps` are done, and what comes `after` them takes as long as so many."""
        self._attempt(self._end_status, always=True)
        self._total_steps, self._first_step, self._started = total_steps, first_step, time.monotonic()
        self._after = after
        if self._is_terminal and self._task is None:
            self._attempt(self._start_steps)

    def evaluating(self, done: int, total: int) -> None:
        """Show how many batches of an evaluation are done: on a terminal by a bar of its own, which goes when all are."""
        shown = partial(self._show_status, f"evaluating: {done} of {counted(total, 'batch')}")
        self._attempt(partial(self._move_part, done, total) if self._is_terminal else shown)

    def advance(self, step: int) -> None:
        """Show that `step` steps are done."""
        if self._progress is not None:
            self._attempt(lambda: self._move_bar(step))

    def step(self, metrics: StepMetrics) -> None:
        """Show a logged step."""
        if self._progress is not None:
            # Short enough for 80 columns, beside the bar.
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
        """Stop showing progress and leave the terminal as it was. Closing twice is allowed."""
        self._attempt(self._end_status, always=True)
        if self._notebook:
            self._drawn = -math.inf
            self._attempt(lambda: self._update_line(self._numbers))
        progress, self._progress, self._task, self._part = self._progress, None, None, None
        if progress is not None:
            self._attempt(progress.stop, always=True)  # it also gives standard output back

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempt(self, action: Callable[[], None], *, always: bool = False) -> None:
        """Run an action on the stream; after the first that fails, only those to be tried `always`."""
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
        # A log file's lines are not wrapped, whatever width rich assumes of it.
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
            live.stop()  # it also gives standard output back
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
        # No thread draws the bar: it would take time from those that train, and not live through a fork.
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
        """Change the line of a notebook, a few times a second at most."""
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
        """A logged step as one line, with the time left at the pace since the start."""
        line = step_line(metrics, total_steps=self._total_steps)
        done = metrics.step - self._first_step
        left = self._total_steps + self._after - metrics.step
        if done > 0 and left > 0:
            pace = (time.monotonic() - self._started) / done
            line += f"  {human_seconds(pace * left)} left"
        return line


def step_line(metrics: StepMetrics, *, total_steps: int = 0) -> str:
    """A logged step in plain text, numbers in units for people, extras last."""
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
