"""`Generator`: text from a model on all ranks of a launch, in any layout, with nothing in memory but its parameters.

with Generator("runs/quickstart", parallel={"tensor": 2}) as generator:
    for result in generator.generate(["Once upon"], max_new_tokens=32):
        print(result.text)
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any, Self

import xxhash
from transformers import GenerationConfig

from zeromesh.errors import ConfigError, DataError, PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.process_set import require_same
from zeromesh.rng import number_of
from zeromesh.trainer.config.load import ConfigSource
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.inference.placed_model import NewTokens, PlacedModel, decoder_positions, ends_of
from zeromesh.trainer.inference.prompts import Prompt, deal, problem_of
from zeromesh.trainer.inference.source import layout_of
from zeromesh.trainer.setup.build import connect
from zeromesh.trainer.setup.engine_options import errors_with_user_keys
from zeromesh.zero.engine import ZeroEngine

_NEW_TOKENS = 128
"""New tokens where neither the caller nor the model's `generation_config.json` says how many."""
_DECIDED_HERE = {
    "num_return_sequences": "give a prompt several times",
    "stop_strings": "give eos_token_id, or cut the text",
    "return_dict_in_generate": "results have tokens and logprobs",
    "output_scores": "results have logprobs",
    "output_logits": "results have logprobs",
    "output_attentions": "results have none",
    "output_hidden_states": "results have none",
}
"""Fields of `GenerationConfig` that are refused, and what to do instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """What a model made of one prompt."""

    text: str | None
    """That of the new tokens, without special ones; None where the model has no tokenizer."""
    tokens: list[int]
    """The new tokens, with the one that ended it."""
    logprobs: list[float] | None
    """Of each token the logarithm of the probability that the model gives it, before temperature and the like. None for ways of
    searching that choose tokens later than they see them, such as beams."""
    prompt_tokens: int
    new_tokens: int
    finish: str
    """`stop` where a token ended it, `length` where it came to `max_new_tokens`."""


class Generator:
    """Generates with a model over the ranks of the launch, laid out as a configuration says; all ranks make the same calls.

    Args:
        source: a Hugging Face directory, the name of a model on the Hub, a run's directory (which stands for its newest checkpoint)
            or a checkpoint of one.
        config: a path, a mapping or a `TrainerConfig`, of which `parallel`, `zero`, `offload`, `precision.compute` and `model`
            count; None: the defaults. Without `precision.compute` the model computes in the dtype that its `config.json` names.
        sections: sections on top of `config`, such as `parallel={"tensor": 2}`.
        overrides: keys on top of all, such as `zero.stage=0`, as on the command line.

    Raises:
        ConfigError: for what is no model, and for a configuration that cannot be.
        LayoutError: for a model that cannot be divided so.
        StorageError: where memory is short.
    """

    def __init__(
        self,
        source: str | PathLike[str],
        config: ConfigSource = None,
        *,
        overrides: Sequence[str] = (),
        **sections: Mapping[str, Any],
    ) -> None:
        asked: TrainerConfig = layout_of(source, config, sections, overrides)
        self.mesh: Mesh = connect(asked)
        try:
            with errors_with_user_keys(), self.mesh.call("zeromesh.Generator()"):
                self._placed: PlacedModel = PlacedModel.build(asked, self.mesh)
        except BaseException as error:
            self.mesh.refuse(error)
            raise
        self._calls = 0
        self._failure = ""

    @property
    def config(self) -> TrainerConfig:
        """The configuration, with what was found out about the model."""
        return self._placed.config

    @property
    def engine(self) -> ZeroEngine:
        """The engine that holds the parameters."""
        return self._placed.engine

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        batch: int = 8,
        seed: int | None = None,
        on_results: Callable[[Mapping[int, Generated]], object] = lambda results: None,
        **fields: Any,
    ) -> list[Generated]:
        """Continue prompts and return what came of each, in their order, on every rank; all ranks give the same prompts.

        Prompts are sorted by length and dealt out to the data ranks, `batch` at a time to each, so that all have about as many
        tokens.

        Args:
            prompts: text, token ids, or messages of a conversation, which the chat template makes text of.
            batch: prompts that a data rank continues together.
            seed: of what sampling draws; None: of `run.seed` and how often this was called.
            on_results: called on every rank with the results of each round, by the number of their prompt.
            fields: of transformers' `GenerationConfig`, on top of the model's own; without any number of new tokens 128, or as many
                as the model has positions for.

        Raises:
            ConfigError: for fields that do not exist or that the layout does not allow.
            DataError: for prompts that are none, are too long, or differ between ranks.
        """
        if self._failure:
            raise PhaseError(f"this generator ended with {self._failure}; make a new one")
        encoded = [self._encoded(prompt, number) for number, prompt in enumerate(prompts)]
        if not encoded:
            raise DataError("there are no prompts; give at least one")
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be 1 or more prompts")
        settings = self._settings(fields, encoded)
        self._calls += 1
        number = number_of(f"{self.config.run.seed}/{self._calls}/generator") if seed is None else seed
        content = xxhash.xxh3_64_hexdigest(repr(encoded).encode())
        given = {"prompts": content, "generation": settings.to_json_string(), "batch": batch, "seed": number}
        with self.mesh.call("generator.generate()"):
            require_same(self.mesh.world, given, DataError, advice="All ranks give the same prompts and arguments")
        with self._guarded():
            return self._run(encoded, settings, batch, number, on_results)

    def _run(
        self,
        prompts: Sequence[list[int]],
        settings: GenerationConfig,
        batch: int,
        seed: int,
        on_results: Callable[[Mapping[int, Generated]], object],
    ) -> list[Generated]:
        data, index = self.mesh.data, self.mesh.data_index
        # A rank without prompts in the last round takes part in it, as others need its parameters.
        idle = copy.deepcopy(settings)
        idle.update(max_new_tokens=1, min_new_tokens=None, min_length=0, max_length=None)
        found: dict[int, Generated] = {}
        rounds = deal([len(prompt) for prompt in prompts], ranks=data.size, batch=batch)
        began, made = time.monotonic(), 0
        for place, dealt in enumerate(rounds):
            own = dealt[index]
            draws = number_of(f"{seed}/{place}/{index}")
            new = self._placed.generate([prompts[each] for each in own] or [[0]], settings if own else idle, draws)
            rows = data.gather_json([asdict(each) for each in new[: len(own)]], "results of a round")
            results = {
                number: self._result(NewTokens(**each), len(prompts[number]))
                for numbers, row in zip(dealt, rows, strict=True)
                for number, each in zip(numbers, row, strict=True)
            }
            found |= results
            made += sum(each.new_tokens for each in results.values())
            rate = made / max(time.monotonic() - began, 1e-9)
            self._placed.console.status(f"generated {len(found)} of {len(prompts)} prompts, {rate:.1f} tokens/s")
            on_results(results)
        return [found[number] for number in range(len(prompts))]

    def _result(self, new: NewTokens, prompt_tokens: int) -> Generated:
        tokenizer = self._placed.tokenizer
        return Generated(
            text=None if tokenizer is None else tokenizer.decode(new.tokens),
            tokens=new.tokens,
            logprobs=new.logprobs,
            prompt_tokens=prompt_tokens,
            new_tokens=len(new.tokens),
            finish="stop" if new.ended else "length",
        )

    def _encoded(self, prompt: Any, number: int) -> list[int]:
        """The tokens of a prompt. Raises `DataError` for one that cannot be continued."""
        where, tokenizer = f"prompt {number}", self._placed.tokenizer
        problem = problem_of(prompt)
        if problem:
            raise DataError(f"{where} {problem}")
        if isinstance(prompt, str) or isinstance(prompt[0], Mapping):
            if tokenizer is None:
                raise DataError(
                    f"{where} is text, and the model's directory has no tokenizer; give token ids, or set data.tokenizer"
                )
            try:
                ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tokenizer.encode_messages(prompt)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        else:
            ids = list(prompt)
        size = self._placed.module.config.get_text_config().vocab_size
        if not ids or max(ids) >= size:
            raise DataError(
                f"{where} has {f'token {max(ids)}, and the model knows {size}' if ids else 'no token'}; give others"
            )
        return ids

    def _settings(self, fields: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> GenerationConfig:
        """How to generate: the model's own settings, with `fields` on top."""
        refused = [f"{name} is not taken; {cure}" for name, cure in _DECIDED_HERE.items() if fields.get(name)]
        settings: GenerationConfig = copy.deepcopy(self._placed.module.generation_config)
        settings.update(**{"use_cache": True, **dict.fromkeys(_DECIDED_HERE)})
        unknown = settings.update(**{name: value for name, value in fields.items() if name not in _DECIDED_HERE})
        refused += [f"{name} is no field of transformers' GenerationConfig" for name in unknown]
        if refused:
            raise ConfigError([f"generate: {each}" for each in refused])
        if settings.pad_token_id is None:
            settings.pad_token_id = next(iter(ends_of(settings)), 0)
        longest = 0 if self._placed.is_encoder_decoder else max(map(len, prompts))
        positions = decoder_positions(self._placed.module)
        if settings.max_new_tokens is None and "max_length" not in fields:
            settings.max_new_tokens = (
                _NEW_TOKENS if positions is None else min(_NEW_TOKENS, max(1, positions - longest))
            )
        wanted = longest + settings.max_new_tokens if settings.max_new_tokens is not None else settings.max_length
        if positions is not None and wanted > positions:
            raise DataError(
                f"the longest prompt has {longest} tokens, which with the new ones become {wanted}, and the model has {positions} "
                "positions; shorten it, or lower max_new_tokens"
            )
        self._placed.check(settings)
        return settings

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A call that all ranks make: after an error amid it the other ranks learn of it, and the generator is over."""
        watch = self.mesh.watch
        begun = watch.begun
        try:
            with errors_with_user_keys(), self.mesh.call("generator.generate()"):
                yield
        except BaseException as error:
            if watch.begun != begun or watch.in_doubt or not self.engine.abandon_pass():
                self._failure = f"{type(error).__name__}: {error}"
                self.mesh.fail(error)
            raise

    def close(self) -> None:
        """Leave the process groups, and give files and shared memory back. The generator is over."""
        self._placed.close()
        self._placed.console.close()
        self.mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
