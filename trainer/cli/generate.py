"""`zeromesh generate`: starts the ranks of a generation, or runs as one of them."""

from __future__ import annotations

import argparse
import io
import json
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
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
from zeromesh.trainer.inference.requests import Finish, Inbox, Progress, Request

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generated, Generator

_FIELDS = "generation."
_PROMPTS = "ZEROMESH_PROMPTS"
"""The workers' environment variable with the path of a copy of standard input."""


def run_generate(options: argparse.Namespace) -> int:
    """Generate in this process or in ranks that it starts; returns the exit code."""
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
                _prompts_of(options.prompts)  # Invalid prompts are refused before ranks start.
            return _launch(options, processes)


def _launch(options: argparse.Namespace, processes: int) -> int:
    from zeromesh.launch.rendezvous import Nodes

    # With results on disk a restart generates only the missing ones; without them it would lose all.
    nodes = Nodes(max_restarts=options.max_restarts if options.out else 0, begins_with="the results that are there")
    return train.report(train.launch_same(options, processes, nodes=nodes, talks=options.chat))


def split_fields(overrides: Sequence[str], max_new_tokens: int | None) -> tuple[dict[str, Any], list[str]]:
    """Split key=value arguments into fields of transformers' `GenerationConfig` and keys of the configuration."""
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
    # A closed stdin is None.
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("there are no prompts: give --prompts FILE, lines on standard input, or --chat")
    return sys.stdin.buffer.read()


def _prompts_of(source: str | None) -> list[PromptLine]:
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
    from zeromesh.rng import number_of
    from zeromesh.trainer.inference.generator import Generator

    with Generator(options.config, options.config_file, overrides=keys) as generator:
        leads = generator.mesh.rank == 0
        if options.check:
            generator.check_weights()
        generator.check_fields(fields)
        if options.chat:
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(
                    errors="surrogateescape"
                )  # Undecodable bytes are refused with the number of their line.
            _talk(generator, _Chat(generator, sys.stdin, sys.stdout, fields) if leads else None)
            return 0
        seed = generator.config.run.seed if options.seed is None else options.seed
        asked = [{"seed": number_of(f"{seed}/{number}/prompt"), **line.prompt} for number, line in enumerate(prompts)]
        for line, prompt in zip(prompts, asked, strict=True):
            try:
                request, _ = generator.request_of(prompt, fields)
            except (ConfigError, DataError) as error:
                raise DataError(f"{line.where}: {error}") from error
        alone = len(asked) == 1 and options.out is None and generator.tokenizer is not None
        if alone and generator.can_serve({**fields, **request.fields}):
            _stream(generator, request, fields)
            return 0
        _write_results(options, fields, prompts, asked, generator)
    return 0


def _write_results(
    options: argparse.Namespace,
    fields: Mapping[str, Any],
    prompts: Sequence[PromptLine],
    asked: Sequence[Mapping[str, Any]],
    generator: Generator,
) -> None:
    # A run stands for its newest checkpoint, which may have changed when the command is repeated.
    of_results = generator.config.model_dump(mode="json", include={"model", "precision", "data"})
    content = json.dumps([of_results, asked, sorted(fields.items())], default=str)
    digest = xxhash.xxh3_64_hexdigest(content.encode())
    journal = (
        ResultJournal(options.out, digest, len(prompts))
        if options.out is not None and generator.mesh.rank == 0
        else None
    )
    keep = _shown_in_order() if journal is None else journal.add
    missing = list(range(len(prompts))) if journal is None else journal.missing()
    missing = generator.mesh.world.gather_json(missing, "prompts without a result")[0]

    def on_results(found: Mapping[int, Generated]) -> None:
        for number, each in found.items() if generator.mesh.rank == 0 else ():
            keep({"number": missing[number], "id": prompts[missing[number]].id, **asdict(each)})

    try:
        if missing:
            asked = [asked[number] for number in missing]
            generator.generate(asked, batch=options.batch, on_results=on_results, **fields)
    except ZeromeshError:
        if journal is not None:
            left = some([prompts[number].id for number in journal.missing()], 100)
            train.say(
                f"{journal.path} has {len(journal.rows)} of {len(prompts)} results; the same command goes on with the rest. "
                f"Without one are: {left}"
            )
            journal.close()
        raise
    if journal is not None:
        journal.finish()
        there = ", as they were already" if journal.finished else ""
        train.say(f"{len(prompts)} results in {journal.out}{there}")


def _shown_in_order() -> Callable[[dict[str, Any]], None]:
    """Return a function that writes results in the order of their prompts, each as soon as all before are written."""
    waiting: dict[int, dict[str, Any]] = {}
    following = 0

    def show(row: dict[str, Any]) -> None:
        nonlocal following
        waiting[row["number"]] = row
        while following in waiting:
            sys.stdout.write(json.dumps(waiting.pop(following), ensure_ascii=False) + "\n")
            sys.stdout.flush()
            following += 1

    return show


def _stream(generator: Generator, request: Request, fields: Mapping[str, Any]) -> None:
    """Continue one prompt, and write its text as it is generated. Raises `NonFiniteError` on rank 0."""
    inbox, ends = None, set[Finish | None]()
    if generator.mesh.rank == 0:
        inbox = Inbox()
        text = TextStream(generator.decode)

        def on_progress(progress: Progress) -> None:
            sys.stdout.write(text.add(progress.tokens, last=progress.finish is not None))
            sys.stdout.write("\n" if progress.finish is not None else "")
            sys.stdout.flush()
            ends.add(progress.finish)

        inbox.submit(request.tokens, on_progress, fields=request.fields, seed=request.seed)
        inbox.stop()
    generator.serve(inbox, batch=1, **fields)
    if "not_finite" in ends:
        raise NonFiniteError(_NOT_FINITE)


_NOT_FINITE = "the model's logits for the next token are NaN or infinite, so the text ends here"


def _talk(generator: Generator, chat: _Chat | None) -> None:
    """Serve a conversation until its end. Ctrl-C reaches all ranks, and rank 0, which has `chat`, handles it."""
    from zeromesh.launch.rank_processes import handled_signals

    def interrupt(number: int, frame: object) -> None:
        if chat is not None:
            chat.interrupt()

    with handled_signals((signal.SIGINT,), interrupt):
        generator.serve(chat.inbox if chat is not None else None, batch=1)


class _Chat:
    """A conversation on a terminal. The generator serves `inbox`; a thread reads lines and writes answers."""

    def __init__(self, generator: Generator, lines: TextIO, out: TextIO, fields: Mapping[str, Any]) -> None:
        self.inbox = Inbox()
        self._generator, self._lines, self._out, self._fields = generator, lines, out, fields
        self._messages: list[dict[str, str]] = []
        self._number: int | None = None
        generator.encode(
            [{"role": "user", "content": "Hi"}]
        )  # A missing template is reported before the first line is typed.
        threading.Thread(target=self._run, name="chat", daemon=True).start()

    def interrupt(self) -> None:
        """End the current answer, or else the conversation."""
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
            pass  # The reader has closed the pipe, which ends the conversation.
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
