"""The process that all workers of the tests are forked from: it imports the heavy libraries once, and starts no thread.

Reads one JSON line for each worker to start, or for the process of `programs.py`, and answers with its process id. All die with
it, and it dies when its input ends or its parent does.
"""

import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def import_once() -> None:
    """What every worker needs, so that forked workers share its pages and start at once."""
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed
    import trainer_cases  # noqa: F401
    from transformers import (
        BertForSequenceClassification,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        MixtralForCausalLM,
        PreTrainedTokenizerFast,
    )

    import zeromesh.trainer.trainer  # noqa: F401
    from tests.conformance import cases  # noqa: F401

    torch.set_num_threads(1)
    _ = (BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM, PreTrainedTokenizerFast)
    # What is here stays, so collections in workers need not look at it, nor copy its pages.
    gc.collect()
    gc.freeze()


def become_worker(request: dict[str, Any]) -> None:
    """In the child: set the stage, serve cases, end. Never returns."""
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.environ.update(request["environment"])
        from tests.support.worker import serve

        serve(request["address"], request["options"])
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    die_with_parent()
    import_once()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes ended workers away
    print("ready", flush=True)
    for line in os.fdopen(os.dup(0)):  # Programs find the stream itself as it was opened.
        request = json.loads(line)
        pid = os.fork()
        if pid == 0 and "programs" in request:
            from tests.support.programs import serve

            serve(**request["programs"])
            return
        if pid == 0:
            become_worker(request)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
