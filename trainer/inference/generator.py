"""`Generator`: text generation on all ranks of a launch, in any layout, with nothing but parameters in memory.

with Generator("runs/quickstart", parallel={"tensor": 2}) as generator:
    for result in generator.generate(["Once upon"], max_new_tokens=32):
        print(result.text)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self

import xxhash
from transformers import GenerationConfig

from zeromesh.errors import CollectiveError, ConfigError, DataError, NonFiniteError, PhaseError, counted, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.rng import number_of
from zeromesh.trainer.config.load import ConfigSource
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer
from zeromesh.trainer.inference.prompts import Prompt, split_prompt, tokens_of
from zeromesh.trainer.inference.request_loop import RequestLoop
from zeromesh.trainer.inference.requests import Inbox, Progress, Request
from zeromesh.trainer.inference.rounds import generate_in_rounds
from zeromesh.trainer.inference.source import ServedModel, layout_of, place_model
from zeromesh.trainer.model_on_mesh import ModelOnMesh
from zeromesh.trainer.models.generation import decoder_positions
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.setup.build import connect
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.weight_digests import require_same_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The generated continuation of one prompt."""

    text: str | None
    """The text of the new tokens without special ones; None if the model has no tokenizer."""
    tokens: list[int]
    """The new tokens, including the end token."""
    logprobs: list[float] | None
    """The log-probability of each token under the model, before temperature and the like. None for decoding methods that choose
        tokens in hindsight, such as beam search."""
    prompt_tokens: int
    new_tokens: int
    finish: str
    """The reason for the end: `stop` at an end token, `length` at `max_new_tokens`."""


class Generator(ModelOnMesh):
    """Generates with a model on the ranks of the launch, in the layout of a configuration; all ranks make the same calls.

    Args:
        source: a Hugging Face directory, the name of a model on the Hub, a run's directory (which stands for its newest checkpoint)
            or a checkpoint of one.
        config: a path, a mapping or a `TrainerConfig`, of which `parallel`, `zero`, `offload`, `precision.compute` and `model`
            are used; None: the defaults. The default of `precision.compute` is the dtype in the model's `config.json`.
        check: compare replicated weights between ranks at the start, which reads them once; None: compare all except those
            in files.
        sections: sections on top of `config`, such as `parallel={"tensor": 2}`.
        overrides: keys on top of all, such as `zero.stage=0`, as on the command line.

    Raises:
        ConfigError: for a source without a model, and for an invalid configuration.
        LayoutError: for a model that cannot be divided in this layout.
        StorageError: where memory is short.
        WeightsDifferError: where replicated weights differ between ranks.
    """

    def __init__(
        self,
        source: str | PathLike[str],
        config: ConfigSource = None,
        *,
        overrides: Sequence[str] = (),
        check: bool | None = None,
        **sections: Mapping[str, Any],
    ) -> None:
        asked: TrainerConfig = layout_of(source, config, sections, overrides)
        self.mesh: Mesh = connect(asked)
        self._over = ""
        try:
            console = Console(sys.stderr, shown=self.mesh.rank == 0)
            with self.mesh.call("zeromesh.Generator()"), console:
                self._model: ServedModel | None = place_model(asked, self.mesh, console)
                if check or (check is None and not self.engine.options.offload.parameters.away):
                    require_same_weights(self.engine)
        except BaseException as error:
            self.mesh.refuse(error)
            raise
        self.computed = 0
        """The number of tokens that this rank computed in the latest `generate` whose prompts joined a running batch."""
        self._calls = 0

    @property
    def placed(self) -> ServedModel:
        """The model. Raises `PhaseError` after `close`."""
        if self._model is None:
            raise PhaseError(self._over)
        return self._model

    @property
    def config(self) -> TrainerConfig:
        """The configuration, completed with the model's own task and dtype."""
        return self.placed.config

    @property
    def engine(self) -> ZeroEngine:
        """The engine that holds the parameters."""
        return self.placed.require_engine()

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        batch: int = 16,
        seed: int | None = None,
        on_results: Callable[[Mapping[int, Generated]], object] = lambda results: None,
        **fields: Any,
    ) -> list[Generated]:
        """Generate continuations, and return them in the order of the prompts on every rank; all ranks pass the same prompts.

        Prompts join a running batch as others leave it, on the replica with the fewest open tokens. Requests that
        cannot (beams, encoder models, other caches) are generated in static batches of one length, or similar for an encoder.

        Args:
            prompts: text, token ids, messages of a conversation for the chat template, or mappings with one of
                these as `text`, `input_ids` or `messages`, and fields of `GenerationConfig` or `seed` for this prompt alone.
            batch: prompts that a replica of the model continues at a time.
            seed: the seed of sampling for each prompt, independent of its batch; None: derived from `run.seed` and the
                number of calls so far.
            on_results: called on every rank with new results, by index of their prompt.
            fields: of transformers' `GenerationConfig`, on top of the model's own; by default with 128 new tokens, or as many
                as the model has positions for.

        Raises:
            ConfigError: for fields that do not exist or that the layout does not allow.
            DataError: for prompts that are invalid, too long, or different between ranks.
            NonFiniteError: after all other results, for prompts whose logits are NaN or infinite; beam search does not check.
        """
        placed = self.placed
        placed.require_sound()
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be 1 or more prompts")
        if not prompts:
            raise DataError("there are no prompts; give at least one")
        self._calls += 1
        number = number_of(f"{self.config.run.seed}/{self._calls}/generator") if seed is None else seed
        checked = [
            self.request_of(prompt, fields, number=index, seed=number_of(f"{number}/{index}"), where=f"prompt {index}")
            for index, prompt in enumerate(prompts)
        ]
        return self._generate(*map(list, zip(*checked, strict=True)), fields, batch, on_results)

    def _generate(
        self,
        requests: list[Request],
        settings: list[GenerationConfig],
        fields: Mapping[str, Any],
        batch: int,
        on_results: Callable[[Mapping[int, Generated]], object],
    ) -> list[Generated]:
        placed = self.placed
        why = next(filter(None, map(placed.settings.why_unbatched, settings)), "")
        given = {
            "prompts": xxhash.xxh3_64_hexdigest(repr(requests).encode()),
            "generation": settings[0].to_json_string(),
            "batch": batch,
        }
        # Prompts that differ between ranks are refused on all of them.
        with self.mesh.call("generator.generate()"):
            self.mesh.world.require_same(given, DataError, advice="All ranks give the same prompts and arguments")
        if why and any(request.fields != requests[0].fields for request in requests):
            raise ConfigError(f"generate: {why}, so all prompts are generated alike; give all of them the same fields")
        results = _Results(requests, placed, on_results)
        try:
            with placed.guarded("generator.generate()"):
                if why:
                    generate_in_rounds(placed, requests, settings, batch, results.add, why)
                else:
                    loop = RequestLoop(placed, fields, rows=batch, on_progress=results.add)
                    self.computed = loop.run(Inbox.of(requests) if self.mesh.rank == 0 else None)
        except CollectiveError as error:
            found = f"{len(results.found)} of {counted(len(requests), 'prompt')} have a result"
            raise CollectiveError(f"{error}\n{found}; without one are {some(results.missing, 100)}") from error
        if missing := results.missing:
            raise NonFiniteError(
                f"the model's logits are NaN or infinite for prompt{'s' if missing[1:] else ''} {some(missing, 100)}; the other "
                f"{len(results.found)} have a result, which on_results was given. Look at the weights, or compute in another "
                "dtype (precision.compute: float32)"
            )
        return [results.found[request.number] for request in requests]

    def serve(self, inbox: Inbox | None, *, batch: int = 16, **fields: Any) -> None:
        """Generate for the requests in rank 0's inbox until it is stopped; all ranks call it, the others with None.

        Args:
            inbox: the inbox to which other threads submit requests that `check_request` has accepted.
            batch: requests that a replica of the model runs at a time.
            fields: of transformers' `GenerationConfig`, on top of which are those of a request.

        Raises:
            ConfigError: for a model whose requests cannot join a running batch.
            CollectiveError: when a rank is gone or late.
        """
        self.require_serving(fields)
        with self.placed.guarded("generator.serve()"):
            deliver = inbox.deliver if inbox is not None else lambda progress: None
            RequestLoop(self.placed, fields, rows=batch, on_progress=deliver).run(inbox)

    def check_fields(self, fields: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for fields of `GenerationConfig` that are invalid for every prompt."""
        self.placed.settings.checked(fields, 1)

    def can_serve(self, fields: Mapping[str, Any]) -> bool:
        """Return True if requests with these fields may join a running batch of this model, so that `serve` takes them."""
        return not self.placed.settings.why_unbatched(self.placed.settings.of(fields, 1))

    def require_serving(self, fields: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a model whose requests with these fields cannot join a running batch."""
        why = self.placed.settings.why_unbatched(self.placed.settings.checked(fields, 1))
        if why:
            raise ConfigError(f"serve: requests cannot join a running batch: {why}; use generate")
        if isinstance(self.tokenizer, PretrainedTokenizer):
            self.tokenizer.try_template()

    def check_request(self, tokens: Sequence[int], fields: Mapping[str, Any]) -> None:
        """Check that `serve` can continue these tokens with these fields of `GenerationConfig`; any thread may call it.

        Raises:
            ConfigError: for fields that do not exist, that the layout does not allow, or that select another decoding method.
            DataError: for unknown tokens, for none, and for too many.
        """
        self.encode(tokens)
        why = self.placed.settings.why_unbatched(self.placed.settings.checked(fields, len(tokens)))
        if why:
            raise ConfigError(f"{why}, which requests that join a running batch cannot")

    def request_of(
        self, prompt: Prompt, fields: Mapping[str, Any], *, number: int = 0, seed: int = 0, where: str = ""
    ) -> tuple[Request, GenerationConfig]:
        """Return the request and the settings of a prompt, whose own fields override `fields`.

        Raises:
            ConfigError, DataError: for an invalid prompt, which they call `where`.
        """
        name = where or "the prompt"
        text, own = split_prompt(prompt, name)
        own_seed = own.pop("seed", seed)
        request = Request(number=number, tokens=self.encode(text, name), fields=own, seed=own_seed)
        try:
            return request, self.placed.settings.checked({**fields, **own}, len(request.tokens))
        except DataError as error:
            raise DataError(f"{where}: {error}" if where else str(error)) from error

    def encode(self, prompt: Any, where: str = "the prompt") -> list[int]:
        """Return the tokens of a prompt, which errors call `where`. Raises `DataError` for an invalid one and for unknown
        tokens."""
        ids = tokens_of(prompt, self.tokenizer, where)
        size = self.placed.module.config.get_text_config().vocab_size
        if not ids or max(ids) >= size:
            raise DataError(
                f"{where} has {f'token {max(ids)}, and the model knows {size}' if ids else 'no token'}; give others"
            )
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones. Raises `DataError` where the model has no tokenizer."""
        if self.tokenizer is None:
            raise DataError("the model's directory has no tokenizer; set data.tokenizer")
        return self.tokenizer.decode(tokens)

    @property
    def model_type(self) -> str:
        """The `model_type` of the model's `config.json`."""
        return str(self.placed.module.config.model_type)

    @property
    def positions(self) -> int | None:
        """The maximal number of tokens of a prompt and its continuation together; None if the model has no limit."""
        return decoder_positions(self.placed.module)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None if it has none."""
        return self.placed.tokenizer

    def close(self) -> None:
        """Leave the process groups, and release memory and files. The generator cannot be used afterwards; closing twice is
        allowed."""
        model, self._model = self._model, None
        if model is not None:
            model.failure = model.failure or "close()"
            self._over = model.over()
            model.close()
            model.console.close()
            self.mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Results:
    """The results of one `generate`: those that are complete, and what has come so far of the others."""

    def __init__(
        self, requests: Sequence[Request], placed: ServedModel, on_results: Callable[[Mapping[int, Generated]], object]
    ) -> None:
        self._requests, self._placed, self._on_results = requests, placed, on_results
        self._partial: dict[int, tuple[list[int], list[float]]] = {}
        self.found: dict[int, Generated] = {}
        """The results by request number, without those whose logits are not finite."""
        self._began, self._tokens = time.monotonic(), 0

    @property
    def missing(self) -> list[int]:
        return [request.number for request in self._requests if request.number not in self.found]

    def add(self, progress: Sequence[Progress]) -> None:
        results, console, tokenizer = {}, self._placed.console, self._placed.tokenizer
        for each in progress:
            tokens, logprobs = self._partial.setdefault(each.number, ([], []))
            tokens += each.tokens
            logprobs += each.logprobs or ()
            self._tokens += len(each.tokens)
            if each.finish in ("stop", "length"):
                results[each.number] = Generated(
                    text=None if tokenizer is None else tokenizer.decode(tokens),
                    tokens=tokens,
                    logprobs=each.logprobs and logprobs,
                    prompt_tokens=len(self._requests[each.number].tokens),
                    new_tokens=len(tokens),
                    finish=each.finish,
                )
        self.found |= results
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        console.status(f"generated {len(self.found)} of {counted(len(self._requests), 'prompt')}, {rate:.1f} tokens/s")
        if results:
            console.close()  # Results may go to the same terminal.
            self._on_results(results)
