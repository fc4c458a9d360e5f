"""`run.prompts`: sample completions. All ranks generate one prompt at a time, seeded by step and prompt, in any layout alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zeromesh.errors import ConfigError, counted, library_errors
from zeromesh.files import read_whole
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer
from zeromesh.trainer.generation.evaluation_prompts import BatchGeneration
from zeromesh.trainer.generation.prompts import parse_prompts, split_prompt, tokens_of
from zeromesh.trainer.loop.context import RunContext

_KEY = "run.prompts"


def prompt_samples(run: RunContext) -> Callable[[RunContext], list[dict[str, Any]]] | None:
    """Return the function that generates and shows the completions of a run's prompts, and returns `step`, `prompt` and
    `completion` of each; all ranks call it. None where the run has no prompts. Raises `ConfigError` for a model that does not
    generate in this layout, a run without a tokenizer or without a time to generate, and a file that cannot be read."""
    section, tokenizer = run.config.run, run.data.tokenizer
    if section.prompts is None:
        return None
    if section.prompts_every is None and run.data.eval is None:
        raise ConfigError("are continued at evaluations, but there are none; set run.prompts_every", where=_KEY)
    if tokenizer is None:
        if run.model.processing_class is None:
            raise ConfigError("need a tokenizer; pass processing_class", where=_KEY)
        tokenizer = PretrainedTokenizer(tokenizer=run.model.processing_class)
    fields, batches = section.generation or {}, list[tuple[str, dict[str, torch.Tensor]]]()
    generation = BatchGeneration(run.model, fields, seed="", where=_KEY)
    with library_errors(_KEY):
        if isinstance(section.prompts, str):
            path = Path(section.prompts).expanduser()
            prompts = [split_prompt(each.prompt, each.where) for each in parse_prompts(read_whole(path), str(path))]
        else:
            prompts = [(text, {}) for text in section.prompts]
        for number, (given, options) in enumerate(prompts):
            if options:
                raise ConfigError(f"prompt {number} has {', '.join(options)}; run.generation says how, for all prompts")
            ids = torch.tensor([tokens_of(given, tokenizer, f"prompt {number}")])
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            run.model.feeds.rules.check(batch, [number])
            generation.inputs(batch, [number])
            batches.append((given if isinstance(given, str) else json.dumps(given, ensure_ascii=False), batch))

    def generate(run: RunContext) -> list[dict[str, Any]]:
        step, lines = run.progress.step, []
        generation = BatchGeneration(run.model, fields, seed=f"{section.seed}/{step}", where=_KEY)
        for number, (prompt, batch) in enumerate(batches):
            run.console.status(f"generating {number + 1} of {counted(len(batches), 'prompt')}")
            text = tokenizer.decode(generation.tokens(batch, [number], torch.float32)[0].tolist())
            lines.append({"step": step, "prompt": prompt, "completion": text})
            run.console.note(f"step {step}: {prompt!r} goes on {text!r}")
        return lines

    return generate
