"""`run.prompts`: sample completions during training, shown on the console, in trackers and in a file of the run.

All ranks generate all prompts, one at a time, so that a completion depends neither on the other prompts nor on the layout. Sampling
is seeded by the step and the prompt, and the run's random number generators are restored afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeromesh.errors import ConfigError, counted, library_errors
from zeromesh.files import read_whole
from zeromesh.trainer.data.collate import check_batch
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer
from zeromesh.trainer.generation.prompts import parse_prompts, split_prompt, tokens_of
from zeromesh.trainer.loop.context import RunContext
from zeromesh.trainer.loop.evaluation import generation_by

_KEY = "run.prompts"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSamples:
    """The tokenized prompts of a run."""

    batches: tuple[tuple[str, dict[str, torch.Tensor]], ...]
    """The label of each prompt for display, and its batch of one row."""
    tokenizer: Tokenizer

    @classmethod
    def of(cls, run: RunContext) -> PromptSamples | None:
        """Return the prompts of a run; None where it has none.

        Raises:
            ConfigError: for a model that does not generate in this layout, a run without a tokenizer or without a time to generate,
                and a file that cannot be read.
        """
        section, tokenizer = run.config.run, run.data.tokenizer
        if section.prompts is None:
            return None
        if section.prompts_every is None and run.data.eval is None:
            raise ConfigError(
                "are continued at evaluations, and there is no evaluation data; set run.prompts_every", where=_KEY
            )
        if tokenizer is None:
            if run.model.processing_class is None:
                raise ConfigError("need a tokenizer; pass processing_class", where=_KEY)
            tokenizer = PretrainedTokenizer(tokenizer=run.model.processing_class)
        generation = generation_by(run, section.generation or {}, _KEY)
        generation.check()
        with library_errors(_KEY):
            prompts: list[Any] = list(section.prompts)
            if isinstance(section.prompts, str):
                path = Path(section.prompts).expanduser()
                prompts = [split_prompt(each.prompt, each.where) for each in parse_prompts(read_whole(path), str(path))]
            found = []
            for number, prompt in enumerate(prompts):
                given, fields = prompt if isinstance(prompt, tuple) else (prompt, {})
                if fields:
                    raise ConfigError(
                        f"prompt {number} has {', '.join(fields)}; run.generation says how, for all prompts"
                    )
                ids = torch.tensor([tokens_of(given, tokenizer, f"prompt {number}")])
                batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                check_batch(batch, vocab_size=run.model.feeds.rules.vocab_size, causal=False, indices=[number])
                generation.inputs(batch, [number])
                found.append((given if isinstance(given, str) else json.dumps(given, ensure_ascii=False), batch))
        return cls(batches=tuple(found), tokenizer=tokenizer)

    def generate(self, run: RunContext) -> list[dict[str, Any]]:
        """Generate and show the completions of all prompts; all ranks call it. Returns `step`, `prompt` and `completion` of
        each."""
        step, lines = run.progress.step, []
        generation = generation_by(run, run.config.run.generation or {}, _KEY)
        for number, (prompt, batch) in enumerate(self.batches):
            run.console.status(f"generating {number + 1} of {counted(len(self.batches), 'prompt')}")
            new = generation.tokens(batch, [number], torch.float32)[0].tolist()
            lines.append({"step": step, "prompt": prompt, "completion": self.tokenizer.decode(new)})
            run.console.note(f"step {step}: {prompt!r} goes on {lines[-1]['completion']!r}")
        return lines
