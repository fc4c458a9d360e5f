"""`zeromesh generate` and `zeromesh serve`: start the ranks of a generation or of a server, or run as one of them."""

from __future__ import annotations

import argparse
import io
import json
import queue
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from zeromesh.environment import kept_environment, read_environment, setting
from zeromesh.errors import ConfigError, DataError, NonFiniteError, ZeromeshError, errors_as, some
from zeromesh.files import write_whole
from zeromesh.trainer.cli import train
from zeromesh.trainer.config.yaml_reader import parse_yaml
from zeromesh.trainer.data.tokenizer import TextStream
from zeromesh.trainer.generation.prompts import PromptLine, parse_prompts, read_prompts
from zeromesh.trainer.generation.requests import Inbox, Progress, Request
from zeromesh.trainer.inference.journal import ResultJournal

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generated, Generator
    from zeromesh.trainer.inference.server.app import HttpServer

_FIELD_PREFIX = "generation."
_PROMPTS = "ZEROMESH_PROMPTS"  # The workers' environment variable with the path of a copy of standard input.
TOKEN = "ZEROMESH_SERVE_TOKEN"  # The environment variable with the API key that clients have to send.
_FAREWELL_SECONDS = 1.0  # The seconds in which clients can read the error of a failed generator.


def run_generate(options: argparse.Namespace) -> int:
    processes, starts = train.ranks_of(options)
    if options.chat and (options.prompts or options.out):
        raise ConfigError("--chat reads from the terminal and writes to it; leave --prompts and --out out")
    if options.chat and sys.stdin is None:
        raise ConfigError("--chat reads from standard input, which is closed; leave it open")
    fields, keys = _split_fields(options.overrides, options.max_new_tokens)
    if not starts:
        return _generate(options, fields, keys, [] if options.chat else _prompts_of(options.prompts))
    from zeromesh.launch.leader import Nodes

    with tempfile.TemporaryDirectory(prefix="zeromesh-prompts-") as folder:
        kept = {}
        if not options.chat and options.prompts in (None, "-"):
            kept[_PROMPTS] = str(Path(folder, "prompts.jsonl"))
            write_whole(kept[_PROMPTS], _standard_input(), sync=False)
        with kept_environment(kept):
            if not options.chat:
                _prompts_of(options.prompts)  # Invalid prompts are refused before ranks start.
            # A restart generates only the results that --out lacks. Without --out it would lose all, so there is none.
            nodes = Nodes(max_restarts=options.max_restarts if options.out else 0, restarts_from="the results that are there")
            return train.report(train.launch_this_command(options, processes, nodes=nodes, talks=options.chat))


def _split_fields(overrides: Sequence[str], max_new_tokens: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Split key=value arguments into fields of transformers' `GenerationConfig` and keys of the configuration."""
    fields: dict[str, Any] = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    keys = []
    for word in overrides:
        if not word.startswith(_FIELD_PREFIX):
            keys.append(word)
            continue
        name, given, value = word.removeprefix(_FIELD_PREFIX).partition("=")
        if not (given and name):
            raise ConfigError(f"{word}: a field of GenerationConfig is given as {_FIELD_PREFIX}temperature=0.7")
        fields[name] = parse_yaml(value, where=word)
    return fields, keys


def _standard_input() -> bytes:
    # Python sets `sys.stdin` to None if standard input is closed.
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError("there are no prompts: give --prompts FILE, lines on standard input, or --chat")
    return sys.stdin.buffer.read()


def _prompts_of(source: str | None) -> list[PromptLine]:
    if (kept := setting(_PROMPTS)) is None and source not in (None, "-"):
        return read_prompts(Path(str(source)))
    return parse_prompts(_standard_input() if kept is None else Path(kept).read_bytes(), "standard input")


def _generate(options: argparse.Namespace, fields: dict[str, Any], keys: list[str], prompts: list[PromptLine]) -> int:
    from zeromesh.rng import seed_of
    from zeromesh.trainer.inference.generator import Generator

    with Generator(options.config, options.config_file, overrides=keys) as generator:
        if options.check:
            generator.check_weights()
        generator.check_fields(fields)
        seed = generator.config.run.seed if options.seed is None else options.seed
        seeds = (seed_of(f"{seed}/{number}/prompt") for number in count())
        if options.chat:
            _serve_chat(generator, fields, seeds)
            return 0
        asked = [{"seed": each, **line.prompt} for line, each in zip(prompts, seeds, strict=False)]
        for line, prompt in zip(prompts, asked, strict=True):
            with errors_as(DataError, f"{line.where}: ", ConfigError, DataError):
                request, _ = generator.request_of(prompt, fields)
        alone = len(asked) == 1 and options.out is None and generator.tokenizer is not None
        if alone and generator.can_serve({**fields, **request.fields}):
            _stream(generator, request, fields)
        else:
            _write_results(options, fields, prompts, asked, generator)
    return 0


def _write_results(
    options: argparse.Namespace,
    fields: Mapping[str, Any],
    prompts: Sequence[PromptLine],
    asked: Sequence[Mapping[str, Any]],
    generator: Generator,
) -> None:
    # The resolved model identifies the results: the newest checkpoint of a run may be another one when the command is repeated.
    of_results = generator.config.model_dump(mode="json", include={"model", "precision", "data"})
    content = json.dumps([of_results, asked, sorted(fields.items())], default=str)
    digest, journal = xxhash.xxh3_64_hexdigest(content.encode()), None
    if options.out is not None and generator.mesh.rank == 0:
        journal = ResultJournal(options.out, digest, len(prompts))
    missing = list(range(len(prompts))) if journal is None else journal.missing()
    missing = generator.mesh.world.gather_json(missing, "prompts without a result")[0]
    # Results wait until those of all earlier prompts are on standard output.
    shown: dict[int, dict[str, Any]] = {}
    following = 0

    def on_results(results: Mapping[int, Generated]) -> None:
        nonlocal following
        for index, each in results.items() if generator.mesh.rank == 0 else ():
            row = {"number": missing[index], "id": prompts[missing[index]].id, **asdict(each)}
            if journal is not None:
                journal.add(row)
                continue
            shown[index] = row
            while following in shown:
                _write_text(json.dumps(shown.pop(following), ensure_ascii=False) + "\n")
                following += 1

    try:
        if missing:
            generator.generate([asked[number] for number in missing], batch=options.batch, on_results=on_results, **fields)
    except ZeromeshError:
        if journal is not None:
            left = some([prompts[number].id for number in journal.missing()], 100)
            rest = f"the same command goes on with the rest. Without one are: {left}"
            train.say(f"{journal.path} has {len(journal.rows)} of {len(prompts)} results; {rest}")
            journal.close()
        raise
    if journal is not None:
        journal.finish()
        there = ", as they were already" if journal.finished else ""
        train.say(f"{len(prompts)} results in {journal.out}{there}")


def _write_text(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _stream(generator: Generator, request: Request, fields: Mapping[str, Any]) -> None:
    """Continue one prompt, and write its text as it is generated. Raises `NonFiniteError` on rank 0."""
    inbox, finish, text = None, None, TextStream(generator.decode)

    def on_progress(progress: Progress) -> None:
        nonlocal finish
        finish = progress.finish
        _write_text(text.add(progress.tokens, last=finish is not None) + ("\n" if finish is not None else ""))

    if generator.mesh.rank == 0:
        inbox = Inbox()
        inbox.submit(request.tokens, on_progress, fields=request.fields, seed=request.seed, adapter=request.adapter)
        inbox.stop()
    generator.serve(inbox, batch=1, **fields)
    if finish == "not_finite":
        raise NonFiniteError(_NOT_FINITE)


_NOT_FINITE = "the model's logits for the next token are NaN or infinite, so the text ends here"


def _serve_chat(generator: Generator, fields: Mapping[str, Any], seeds: Iterator[int]) -> None:
    """Serve a conversation until its end. Ctrl-C reaches all ranks, and rank 0 handles it."""
    from zeromesh.launch.signals import handled_signals

    if isinstance(sys.stdin, io.TextIOWrapper):
        # Undecodable bytes are refused with the number of their line.
        sys.stdin.reconfigure(errors="surrogateescape")
    chat = _Chat(generator, fields, seeds) if generator.mesh.rank == 0 else None
    with handled_signals((signal.SIGINT,), chat.interrupt if chat is not None else lambda *_: None):
        generator.serve(chat.inbox if chat is not None else None, batch=1)


class _Chat:
    """A conversation on a terminal. The generator serves `inbox`; a thread reads lines and writes answers, by `seeds`."""

    def __init__(self, generator: Generator, fields: Mapping[str, Any], seeds: Iterator[int]) -> None:
        self.inbox = Inbox()
        self._generator, self._fields, self._seeds = generator, fields, seeds
        self._messages: list[dict[str, str]] = []
        self._number: int | None = None
        # A missing template is reported before the first line is typed.
        generator.encode([{"role": "user", "content": "Hi"}])
        threading.Thread(target=self._run, name="chat", daemon=True).start()

    def interrupt(self, *_: object) -> None:
        if self._number is None:
            self.inbox.stop(abandon=True)
        else:
            self.inbox.cancel(self._number)

    def _run(self) -> None:
        _write_text("Say something; /reset begins anew, /exit or Ctrl-D ends.\n> ")
        try:
            while (line := sys.stdin.readline()) and line.strip() != "/exit":
                if line.strip() == "/reset":
                    self._messages = []
                elif line.strip():
                    self._answer(line.strip())
                _write_text("> ")
        except BrokenPipeError:
            pass  # The reader has closed the pipe, which ends the conversation.
        finally:
            self.inbox.stop(abandon=True)

    def _answer(self, user_text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": user_text}]
        pieces: queue.Queue[Progress] = queue.Queue()
        try:
            tokens = self._generator.encode(messages)
            self._generator.check_request(tokens, self._fields)
            self._number = self.inbox.submit(tokens, pieces.put, fields=self._fields, seed=next(self._seeds))
        except ZeromeshError as error:
            _write_text(f"{error}; /reset begins anew\n")
            return
        text, answer, finish = TextStream(self._generator.decode), "", None
        while finish is None:
            progress = pieces.get()
            finish = progress.finish
            piece = text.add(progress.tokens, last=finish is not None)
            answer += piece
            _write_text(piece)
        self._number = None
        _write_text(f"\n{_NOT_FINITE}\n" if finish == "not_finite" else "\n")
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def run_serve(options: argparse.Namespace) -> int:
    processes, starts = train.ranks_of(options)
    fields, keys = _split_fields(options.overrides)
    words = options.adapter or ()
    adapters = dict(word.partition("=")[::2] for word in words)
    if not all(adapters.values()) or any("." in name for name in adapters) or len(adapters) < len(words):
        raise ConfigError(f"--adapter {' --adapter '.join(words)}: give NAME=DIR, each of another name without a dot")
    keys += [f"model.adapters.{name}={json.dumps(directory)}" for name, directory in adapters.items()]
    if not starts:
        return _serve(options, fields, keys)
    from zeromesh.launch.signals import STOP_SIGNALS

    # Ranks get a second signal too, and then end open requests with an answer. A stop by a signal is a success.
    ended = train.launch_this_command(options, processes, passes=2)
    return 0 if ended in {128 + int(number) for number in STOP_SIGNALS} else train.report(ended)


def _serve(options: argparse.Namespace, fields: Mapping[str, Any], keys: Sequence[str]) -> int:
    from zeromesh.launch.signals import STOP_SIGNALS, handled_signals
    from zeromesh.trainer.generation.adapter_rows import why_alone
    from zeromesh.trainer.inference.generator import Generator, layout_of, served_models
    from zeromesh.trainer.models.adapters import adapter_configs

    # Names and addresses are checked before the model is loaded, which may take minutes.
    layout = layout_of(options.config, options.config_file, {}, keys)
    served = partial(served_models, options.config, options.name, layout)
    served(why_alone(adapter_configs(layout.model)))
    inbox = Inbox(limit=options.queue) if read_environment().rank == 0 else None
    server = _make_server(options, fields, inbox) if inbox is not None else None
    # Any rank may get a signal, but rank 0 decides when all end.
    requested, hurried = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        if requested.is_set():
            hurried.set()
        requested.set()

    def stop_when_requested(server: HttpServer, inbox: Inbox) -> None:
        requested.wait()
        # New requests are refused first; open ones end after a grace period, or at a second signal.
        train.say(f"stopping; {len(inbox)} open requests have {options.grace:g} seconds")
        server.begin_stop()
        hurried.wait(options.grace)
        inbox.stop(abandon=True)

    with handled_signals(STOP_SIGNALS, stop), Generator(options.config, options.config_file, overrides=keys) as made:
        made.require_serving(fields)
        if made.tokenizer is None:
            raise ConfigError("serve: answers are text, and the model's directory has no tokenizer; set data.tokenizer")
        models = served(made.placed.adapters.why_alone)
        if server is not None:
            train.say(f"serving {', '.join(models)} at {server.start(made, models)} (Ctrl-C ends it)")
            threading.Thread(target=stop_when_requested, args=(server, inbox), daemon=True).start()
        try:
            made.serve(inbox, batch=options.batch, **fields)
        except BaseException as error:
            if server is not None:
                server.fail(error)
                threading.Event().wait(_FAREWELL_SECONDS)
            raise
        finally:
            if server is not None:
                server.close()
    return 0


def _make_server(options: argparse.Namespace, fields: Mapping[str, Any], inbox: Inbox) -> HttpServer:
    with errors_as(ConfigError, "serve needs more packages: pip install 'zeromesh[serve]' (", ImportError, after=")"):
        from zeromesh.trainer.inference.server.app import NEW_TOKENS, HttpServer, ServerOptions
    token = (setting(TOKEN) or "").strip() or None  # Header values have no surrounding spaces.
    how = {"new_tokens": fields.get("max_new_tokens", NEW_TOKENS), "grace_seconds": options.grace}
    return HttpServer(inbox, ServerOptions(host=options.host, port=options.port, token=token, **how))
