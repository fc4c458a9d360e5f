"""`zeromesh serve`: starts the ranks that serve a model over HTTP, or runs as one of them."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromesh.environment import read_environment, setting
from zeromesh.errors import ConfigError
from zeromesh.trainer.cli import train
from zeromesh.trainer.cli.generate import split_fields
from zeromesh.trainer.generation.requests import Inbox

if TYPE_CHECKING:
    from zeromesh.trainer.inference.server.app import HttpServer

TOKEN = "ZEROMESH_SERVE_TOKEN"
"""The environment variable with the API key that clients have to send."""
_FAREWELL_SECONDS = 1.0
"""The seconds in which clients can read the error of a failed generator."""


def run_serve(options: argparse.Namespace) -> int:
    """Serve in this process or in ranks that it starts, until a signal; returns the exit code."""
    processes, starts = train.ranks_of(options)
    fields, keys = split_fields(options.overrides, None)
    if not starts:
        return _serve(options, fields, keys)
    from zeromesh.launch.rank_processes import STOP_SIGNALS

    # Ranks get a second signal too, and then end open requests with an answer. A stop by a signal is a success.
    ended = train.launch_same(options, processes, passes=2)
    return 0 if ended in {128 + int(number) for number in STOP_SIGNALS} else train.report(ended)


def _serve(options: argparse.Namespace, fields: Mapping[str, Any], keys: Sequence[str]) -> int:
    from zeromesh.launch.rank_processes import STOP_SIGNALS, handled_signals
    from zeromesh.trainer.inference.generator import Generator

    inbox = Inbox(limit=options.queue) if read_environment().rank == 0 else None
    # The address is bound before the model is loaded, which may take minutes.
    server = _make_server(options, fields, inbox) if inbox is not None else None
    # Any rank may get a signal, but rank 0 decides when all end.
    requested, hurried = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        if requested.is_set():
            hurried.set()
        requested.set()

    with (
        handled_signals(STOP_SIGNALS, stop),
        Generator(options.config, options.config_file, overrides=keys) as generator,
    ):
        generator.require_serving(fields)
        if generator.tokenizer is None:
            raise ConfigError("serve: answers are text, and the model's directory has no tokenizer; set data.tokenizer")
        if server is not None:
            train.say(f"serving {server.name} at {server.start(generator)} (Ctrl-C ends it)")
            arguments = (requested, hurried, server, inbox, options.grace)
            threading.Thread(target=_stop_when, args=arguments, daemon=True).start()
        try:
            generator.serve(inbox, batch=options.batch, **fields)
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
    try:
        from zeromesh.trainer.inference.server.app import NEW_TOKENS, HttpServer, ServerOptions
    except ImportError as error:
        raise ConfigError(f"serve needs more packages: pip install 'zeromesh[serve]' ({error})") from error
    listening = ServerOptions(
        host=options.host,
        port=options.port,
        token=(setting(TOKEN) or "").strip() or None,  # Header values have no surrounding spaces.
        new_tokens=fields.get("max_new_tokens", NEW_TOKENS),
        grace_seconds=options.grace,
    )
    return HttpServer(inbox, options.name or Path(options.config).resolve().name, listening)


def _stop_when(
    requested: threading.Event, hurried: threading.Event, server: HttpServer, inbox: Inbox, grace: float
) -> None:
    """Stop after a signal: refuse new requests first, and end open ones after a grace period, or at a second signal."""
    requested.wait()
    train.say(f"stopping; {len(inbox)} open requests have {grace:g} seconds")
    server.begin_stop()
    hurried.wait(grace)
    inbox.stop(abandon=True)
