"""`zeromesh generate`: it starts the ranks of a generation, or is one of them."""

from __future__ import annotations

import argparse
import io
import json
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import xxhash

from zeromesh.environment import kept_environment
from zeromesh.errors import ConfigError, DataError, NonFiniteError, ZeromeshError, some
from zeromesh.files import write_whole
from zeromesh.trainer.cli import train
from zeromesh.trainer.config.yaml_reader import parse_yaml
from zeromesh.trainer.data.tokenizer import TextStream
from zeromesh.trainer.inference.journal import ResultJournal
from zeromesh.trainer.inference.prompts import PromptLine, parse_prompts, read_prompts
from zeromesh.trainer.inference.requests import Finish, Inbox, Progress

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generated, Generator

_FIELDS = "generation."
"""Begins a key of `GenerationConfig` on the command line."""
_PROMPTS = "ZEROMESH_PROMPTS"
"""In the workers' environment: where prompts from standard input were put."""


def run_generate(options: argparse.Namespace) -> int:
    """Generate in this process or in ranks that it starts; returns the exit code.

    Raises:
        ConfigError, DataError: for a source, prompts or settings that cannot be.
        StorageError: where results cannot be written.
    """
    processes, starts = train.ranks_of(options)
    if options.chat and (options.prompts or options.out):
        raise ConfigError("--chat reads from the terminal and writes to it; leave --prompts and --out out")
    if options.chat and sys.stdin is None:
        raise ConfigError("--chat reads from standard input, which is closed; leave it open")
    fields, keys = split_fields(options.overrides, options.max_new_tokens)
    if not starts:
        prompts = [] if options.chat else _prompts_of(options.prompts)
        return _generate(options, fields, keys, prompts)
    with tempfile.TemporaryDirectory(prefix="zeromesh-prompts-") as folder:
        kept = {}
        if not options.chat and options.prompts in (None, "-"):
            kept[_PROMPTS] = str(Path(folder, "prompts.jsonl"))
            write_whole(kept[_PROMPTS], _standard_input(), sync=False)
        with kept_environment(kept):
            if not options.chat:
                _prompts_of(options.prompts)  # What is wrong with them is said before anything starts.
            return _launch(options, processes)


def _launch(options: argparse.Namespace, processes: int) -> int:
    from zeromesh.launch.rendezvous import Nodes, launch_workers

    # With results on disk the rest is generated again after a rank has died; without them nothing would be kept.
    nodes = Nodes(max_restarts=options.max_restarts if options.out else 0, begins_with="the results that are there")
    arguments = train.same_command(options)
    return train.report(
        launch_workers(arguments, processes=processes, nodes=nodes, notify=train.say, talks=options.chat)
    )


def split_fields(overrides: Sequence[str], max_new_tokens: int | None) -> tuple[dict[str, Any], list[str]]:
    """Split what was given as key=value into fields of transformers' `GenerationConfig` and keys of the configuration.

    Raises:
        ConfigError: for a field without a value.
    """
    fields: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    keys = []
    for word in overrides:
        if not word.startswith(_FIELDS):
            keys.append(word)
            continue
        name, given, value = word.removeprefix(_FIELDS).partition("=")
        if not (given and name):
            raise ConfigError(f"{word}: a field of GenerationConfig is given as {_FIELDS}temperature=0.7")
        fields[name] = parse_yaml(value, where=word)
    return fields, keys


def _standard_input() -> bytes:
    # It is None where it was closed.
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("there are no prompts: give --prompts FILE, lines on standard input, or --chat")
    return sys.stdin.buffer.read()


def _prompts_of(source: str | None) -> list[PromptLine]:
    """The prompts of a file; None or `-`: of standard input."""
    from zeromesh.environment import setting

    kept = setting(_PROMPTS)
    if kept is not None:
        return parse_prompts(Path(kept).read_bytes(), "standard input")
    if source in (None, "-"):
        return parse_prompts(_standard_input(), "standard input")
    return read_prompts(Path(str(source)))


def _generate(
    options: argparse.Namespace, fields: Mapping[str, Any], keys: Sequence[str], prompts: list[PromptLine]
) -> int:
    """The part of one rank."""
    from zeromesh.rng import number_of
    from zeromesh.trainer.inference.generator import Generator

    with Generator(options.config, options.config_file, overrides=keys) as generator:
        leads = generator.mesh.rank == 0
        if options.check:
            generator.check()
        generator.check_fields(fields)
        if options.chat:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(
                    errors="surrogateescape"
                )  # Bytes that are no text are refused with their line alone.
            _talk(generator, _Chat(generator, sys.stdin, sys.stdout, fields) if leads else None)
            return 0
        seed = generator.config.run.seed if options.seed is None else options.seed
        asked = [{"seed": number_of(f"{seed}/{number}/prompt"), **line.prompt} for number, line in enumerate(prompts)]
        for line, prompt in zip(prompts, asked, strict=True):
            _check(generator, line, {**fields, **prompt})
        alone = len(asked) == 1 and options.out is None and generator.tokenizer is not None
        if alone and generator.can_serve({**fields, **generator.request_of(asked[0])[1]}):
            _stream(generator, asked[0], fields)
            return 0
        # A run stands for its newest checkpoint, which may be another one when the command is given again.
        of_results = generator.config.model_dump(mode="json", include={"model", "precision", "data"})
        content = json.dumps([of_results, asked, sorted(fields.items())], default=str)
        results = _Results(options.out, xxhash.xxh3_64_hexdigest(content.encode()), prompts, leads=leads)
        missing = generator.mesh.world.gather_json(results.missing(), "prompts without a result")[0]
        try:
            if missing:
                generator.generate(
                    [asked[number] for number in missing],
                    batch=options.batch,
                    on_results=lambda found: results.add({missing[number]: each for number, each in found.items()}),
                    **fields,
                )
        except ZeromeshError:
            results.close()
            raise
        results.finish()
    return 0


def _check(generator: Generator, line: PromptLine, prompt: Mapping[str, Any]) -> None:
    """Raise `DataError` with the line of a prompt that cannot be continued."""
    try:
        generator.require_prompt(prompt)
    except (DataError, ConfigError) as error:
        raise DataError(f"{line.where}: {error}") from error


class _Results:
    """Results of the command, in the order of the prompts: in a file, or on standard output as soon as those before are there."""

    def __init__(self, out: Path | None, content: str, prompts: Sequence[PromptLine], *, leads: bool) -> None:
        self._prompts = prompts
        self._leads = leads
        self._journal = ResultJournal(out, content, len(prompts)) if out is not None and leads else None
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0

    def missing(self) -> list[int]:
        """Prompts without a result."""
        return self._journal.missing() if self._journal is not None else list(range(len(self._prompts)))

    def add(self, found: Mapping[int, Generated]) -> None:
        """Take results, by the numbers of their prompts."""
        for number, each in found.items():
            row = {"number": number, "id": self._prompts[number].id, **asdict(each)}
            if self._journal is not None:
                self._journal.add(row)
            elif self._leads:
                self._waiting[number] = row
        while self._next in self._waiting:
            sys.stdout.write(json.dumps(self._waiting.pop(self._next), ensure_ascii=False) + "\n")
            sys.stdout.flush()
            self._next += 1

    def finish(self) -> None:
        """All results are there."""
        if self._journal is not None:
            self._journal.finish()
            there = ", as they were already" if self._journal.finished else ""
            train.say(f"{len(self._prompts)} results in {self._journal.out}{there}")

    def close(self) -> None:
        """Say what is missing after an error."""
        if self._journal is not None:
            names = [self._prompts[number].id for number in self._journal.missing()]
            train.say(
                f"{self._journal.path} has {len(self._journal.rows)} of {len(self._prompts)} results; the same command goes on "
                f"with the rest. Without one are: {some(names, 100)}"
            )
            self._journal.close()


def _stream(generator: Generator, prompt: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """Continue one prompt, and write its text as it comes. Raises `NonFiniteError` on rank 0."""
    inbox, ends = None, set[Finish | None]()
    if generator.mesh.rank == 0:
        inbox = Inbox()
        tokens, own, seed = generator.request_of(prompt)
        text = TextStream(generator.decode)

        def on_progress(progress: Progress) -> None:
            sys.stdout.write(text.add(progress.tokens, last=progress.finish is not None))
            sys.stdout.write("\n" if progress.finish is not None else "")
            sys.stdout.flush()
            ends.add(progress.finish)

        inbox.submit(tokens, on_progress, fields=own, seed=seed)
        inbox.stop()
    generator.serve(inbox, batch=1, **fields)
    if "not_finite" in ends:
        raise NonFiniteError(_NOT_FINITE)


_NOT_FINITE = "the model's logits for the next token are NaN or infinite, so the text ends here"


def _talk(generator: Generator, chat: _Chat | None) -> None:
    """Serve a conversation until it is over. Ctrl-C reaches all ranks, and rank 0, which has `chat`, does what it means."""
    from zeromesh.launch.rank_processes import handled_signals

    def interrupt(number: int, frame: object) -> None:
        if chat is not None:
            chat.interrupt()

    with handled_signals((signal.SIGINT,), interrupt):
        generator.serve(chat.inbox if chat is not None else None, batch=1)


class _Chat:
    """A conversation on a terminal. `inbox` is what the generator serves; a thread reads lines and writes answers."""

    def __init__(self, generator: Generator, lines: TextIO, out: TextIO, fields: Mapping[str, Any]) -> None:
        self.inbox = Inbox()
        self._generator, self._lines, self._out, self._fields = generator, lines, out, fields
        self._messages: list[dict[str, str]] = []
        self._number: int | None = None
        generator.encode([{"role": "user", "content": "Hi"}])  # Without a template this says so, before anybody types.
        threading.Thread(target=self._run, name="chat", daemon=True).start()

    def interrupt(self) -> None:
        """End the answer, or else the conversation."""
        if self._number is None:
            self.inbox.stop(abandon=True)
        else:
            self.inbox.cancel(self._number)

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _run(self) -> None:
        self._say("Say something; /reset begins anew, /exit or Ctrl-D ends.\n")
        try:
            while True:
                self._say("> ")
                line = self._lines.readline()
                if not line or line.strip() == "/exit":
                    break
                if line.strip() == "/reset":
                    self._messages = []
                elif line.strip():
                    self._answer(line.strip())
        except BrokenPipeError:
            pass  # Whoever read the answers has gone, which ends the conversation.
        finally:
            self.inbox.stop(abandon=True)

    def _answer(self, said: str) -> None:
        messages = [*self._messages, {"role": "user", "content": said}]
        pieces: queue.Queue[Progress] = queue.Queue()
        text = TextStream(self._generator.decode)
        try:
            tokens = self._generator.encode(messages)
            self._generator.check_request(tokens, self._fields)
            self._number = self.inbox.submit(tokens, pieces.put, fields=self._fields)
        except ZeromeshError as error:
            self._say(f"{error}; /reset begins anew\n")
            return
        answer, finish = "", None
        while finish is None:
            made = pieces.get()
            finish = made.finish
            piece = text.add(made.tokens, last=finish is not None)
            answer += piece
            self._say(piece)
        self._number = None
        self._say(f"\n{_NOT_FINITE}\n" if finish == "not_finite" else "\n")
        self._messages = [*messages, {"role": "assistant", "content": answer}]
