"""The display of a run: a progress bar on a terminal, a single updated line in a notebook, plain lines elsewhere."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TextIO

from rich.console import Console as RichConsole
from rich.errors import ConsoleError
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from zeromesh.errors import counted, printable, printable_lines
from zeromesh.trainer.formatting import Detail, human_bytes, human_count, human_seconds, wrapped
from zeromesh.trainer.monitoring.step_metrics import STEP_FIELDS

_LOG = logging.getLogger(__name__)
_REFRESH_SECONDS = 0.25
_SILENCE_SECONDS = 5.0  # Seconds of silence after which a log file gets a status line.
_DISPLAY_ERRORS = (OSError, ValueError, ConsoleError)
_P = ParamSpec("_P")


class _Terminal(RichConsole):
    """rich's console, except that a closed pipe raises an error, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("the reader of the output has gone")


def _never_raising(method: Callable[Concatenate["Console", _P], None]) -> Callable[Concatenate["Console", _P], None]:
    """Decorate a method of `Console`: a display error is logged, not raised, and silences all its methods."""

    @wraps(method)
    def draw(console: "Console", /, *arguments: _P.args, **named: _P.kwargs) -> None:
        if not console._shown:
            return
        try:
            method(console, *arguments, **named)
        except _DISPLAY_ERRORS as error:
            console._shown = False
            _LOG.warning("nothing more is shown of this run: %s", error)

    return draw


class Console(AbstractContextManager["Console"]):
    """Shows a run on `stream` (standard output if None), and without `shown` nothing. A terminal gets a bar, drawn at most a few
    times a second, with notes above it, other streams a line per logged step, and a status line after some silence. Methods may be
    called in any order, and none raises: after a lost terminal or a closed pipe the console is silent."""

    def __init__(self, stream: TextIO | None = None, *, shown: bool = True, verbose: bool = False) -> None:
        """`verbose` shows details on terminals too; logs always have them."""
        self._rich = _Terminal(file=stream, highlight=False, markup=False, emoji=False, force_jupyter=False)
        interactive = sys.modules.get("IPython") if stream is None else None
        self._notebook = interactive is not None and hasattr(interactive.get_ipython(), "kernel")
        # A kernel's output claims to be a terminal.
        self._is_terminal = self._rich.is_terminal and not (self._rich.is_dumb_terminal or self._notebook)
        self._live_line: Any = None  # IPython's handle of the line
        self._shows_details = verbose or not (self._is_terminal or self._notebook)
        # Output of other code is printed above the display only if it goes to the same terminal.
        own, errors = self._rich.file is sys.stdout, sys.stderr is not None and sys.stderr.isatty()
        self._redirected: dict[str, Any] = {"redirect_stdout": own, "redirect_stderr": errors}
        self._shown = shown
        self._progress: Progress | None = None
        self._steps_task: TaskID | None = None
        self._evaluation_task: TaskID | None = None
        self._total_steps = self._first_step = 0
        self._work_after = 0.0
        self._started = self._printed_at = time.monotonic()
        self._drawn_at = -math.inf
        self._live: Live | None = None
        self._numbers = ""

    @_never_raising
    def note(self, *lines: str | None) -> None:
        """Show lines once; None stands for no line. A `Detail` is shown in logs, and on terminals if `verbose`."""
        for line in filter(None, lines):
            if isinstance(line, Detail) and not self._shows_details:
                continue
            self._end_status()
            self._printed_at = time.monotonic()
            if self._steps_task is not None:
                self._bar().update(self._steps_task, numbers=self._numbers)
            # Lines of a log file are not wrapped, whatever width rich assumes.
            width = self._rich.width if self._is_terminal else None
            text = line if line.isprintable() else printable_lines(line)
            self._rich.print(Text("\n".join(wrapped(text.split("\n"), width))), soft_wrap=True)
            self._rich.file.flush()

    @_never_raising
    def status(self, text: str) -> None:
        """Show the current activity until the next output."""
        if self._notebook:
            self._update_line(text)
        elif not self._is_terminal:
            if time.monotonic() - self._printed_at >= _SILENCE_SECONDS:
                self.note(text)
        elif not self._may_redraw():
            return
        elif self._progress is None:
            if self._live is None:
                self._live = Live(console=self._rich, auto_refresh=False, transient=True, **self._redirected)
                self._live.start()
            self._live.update(Text(printable(text), overflow="ellipsis", no_wrap=True), refresh=True)
        elif self._steps_task is not None:
            self._progress.update(self._steps_task, numbers=printable(text), refresh=True)

    @_never_raising
    def start(self, *, total_steps: int, first_step: int = 0, after: float = 0.0) -> None:
        """Show progress from now on: `first_step` steps are done, and the work after the last step takes about `after` steps."""
        self._end_status()
        self._total_steps, self._first_step, self._started = total_steps, first_step, time.monotonic()
        self._work_after = after
        if self._is_terminal and self._steps_task is None:
            self._steps_task = self._bar().add_task("", total=total_steps, completed=first_step, numbers="")

    @_never_raising
    def show_evaluation(self, done: int, total: int) -> None:
        """Show the number of finished batches of an evaluation: on a terminal by a second bar, which disappears at the end."""
        if not self._is_terminal:
            self.status(f"evaluating: {done} of {counted(total, 'batch')}")
            return
        self._end_status()
        bar = self._bar()
        if self._evaluation_task is None:
            self._evaluation_task = bar.add_task("", total=total, numbers="evaluating")
        bar.update(self._evaluation_task, completed=done, refresh=done < total and self._may_redraw())
        if done == total:
            bar.remove_task(self._evaluation_task)
            self._evaluation_task = None
            if self._steps_task is None:
                self.close()

    @_never_raising
    def advance(self, step: int) -> None:
        if self._steps_task is not None:
            self._bar().update(self._steps_task, completed=step, numbers=self._numbers, refresh=self._may_redraw())

    @_never_raising
    def step(self, line: Mapping[str, Any]) -> None:
        """Show a logged step, given its line in `metrics.jsonl`."""
        if self._progress is not None:
            # Short enough for 80 columns beside the bar.
            unit = line.get("unit", "tokens").replace("tokens", "tok")
            rate, peak = f"{human_count(line['tokens_per_second'])} {unit}/s", human_bytes(line["peak_memory_bytes"])
            self._numbers = f"loss {line['loss']:.3f}  {rate}  {peak}"
            self.advance(line["step"])
            return
        self._numbers = step_line(line, total_steps=self._total_steps)
        done, left = line["step"] - self._first_step, self._total_steps + self._work_after - line["step"]
        if done > 0 and left > 0:
            self._numbers += f"  {human_seconds((time.monotonic() - self._started) / done * left)} left"
        (self._update_line if self._notebook else self.note)(self._numbers)

    def close(self) -> None:
        """Stop showing progress and restore the terminal. Closing twice is allowed."""
        with suppress(*_DISPLAY_ERRORS):
            self._end_status()
        if self._notebook:
            self._drawn_at = -math.inf
            self._update_line(self._numbers)
        progress, self._progress, self._steps_task, self._evaluation_task = self._progress, None, None, None
        if progress is not None:
            with suppress(*_DISPLAY_ERRORS):
                progress.stop()  # This also restores standard output.

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_status(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()  # This also restores standard output.
            self._drawn_at = -math.inf

    def _may_redraw(self) -> bool:
        now = time.monotonic()
        if now - self._drawn_at < _REFRESH_SECONDS:
            return False
        self._drawn_at = now
        return True

    def _bar(self) -> Progress:
        if self._progress is None:
            # The bar has no thread: it would take time from training, and not survive a fork.
            self._progress = Progress(
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[numbers]}", markup=False),
                console=self._rich,
                auto_refresh=False,
                expand=True,
                **self._redirected,
            )
            self._progress.start()
        return self._progress

    @_never_raising
    def _update_line(self, text: str) -> None:
        if not self._may_redraw():
            return
        shown = {"text/plain": printable(text)}
        if self._live_line is None:
            from IPython.display import display

            self._live_line = display(shown, raw=True, display_id=True)
        else:
            self._live_line.update(shown, raw=True)


def step_line(line: Mapping[str, Any], *, total_steps: int = 0) -> str:
    """Return a logged step as plain text, numbers with units, values beyond `STEP_FIELDS` last."""
    parts = [f"step {line['step']}{f'/{total_steps}' if total_steps else ''}", f"loss {line['loss']:.4f}"]
    parts += [] if line["grad_norm"] is None else [f"grad {line['grad_norm']:.3g}"]
    parts += [
        f"lr {line['lr']:.3g}",
        f"{human_count(line['tokens_per_second'])} {line.get('unit', 'tokens')}/s",
        f"{human_seconds(line['step_seconds'])}/step",
        human_bytes(line["peak_memory_bytes"]),
    ]
    for name, value in line.items():
        if name not in STEP_FIELDS and not isinstance(value, Mapping):
            parts.append(f"{name} {value:.1%}" if name == "mfu" else f"{name} {value}")
    return "  ".join(parts)
