"""`Generator`: text from a model on all ranks of a launch, in any layout, with nothing in memory but its parameters.

with Generator("runs/quickstart", parallel={"tensor": 2}) as generator:
    for result in generator.generate(["Once upon"], max_new_tokens=32):
        print(result.text)
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from typing import Any, Self

import xxhash
from torch import Tensor
from transformers import GenerationConfig

from zeromesh.errors import CollectiveError, ConfigError, DataError, NonFiniteError, PhaseError, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.rng import number_of
from zeromesh.trainer.config.load import ConfigSource
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer
from zeromesh.trainer.inference.batching.lane import LaneWork
from zeromesh.trainer.inference.placed_model import NewTokens, PlacedModel
from zeromesh.trainer.inference.prompts import Prompt, deal, deal_alike, problem_of, split_prompt
from zeromesh.trainer.inference.requests import Inbox, Progress, Request
from zeromesh.trainer.inference.source import layout_of
from zeromesh.trainer.models.generation import decoder_positions
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.setup.build import connect
from zeromesh.trainer.weights.handoff import PartOf, parts_of_weights, send_weights
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.weight_digests import require_same_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The result of one prompt."""

    text: str | None
    """The text of the new tokens without special ones; None if the model has no tokenizer."""
    tokens: list[int]
    """The new tokens, with the one that ended it."""
    logprobs: list[float] | None
    """The logarithm of the probability that the model gives each token, before temperature and the like. None for ways of
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
        check: whether all ranks that hold the same weights are compared at the start, which reads them once; None: they are, but
            for weights in files.
        sections: sections on top of `config`, such as `parallel={"tensor": 2}`.
        overrides: keys on top of all, such as `zero.stage=0`, as on the command line.

    Raises:
        ConfigError: for what is no model, and for a configuration that cannot be.
        LayoutError: for a model that cannot be divided so.
        StorageError: where memory is short.
        WeightsDifferError: where ranks hold other values of the same weights.
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
        self._failure = ""
        try:
            console = Console(sys.stderr, shown=self.mesh.rank == 0)
            with self.mesh.call("zeromesh.Generator()"), console:
                self._model: PlacedModel | None = PlacedModel.build(asked, self.mesh, console)
                if check or (check is None and not self.engine.options.offload.parameters.away):
                    require_same_weights(self.engine)
        except BaseException as error:
            self.mesh.refuse(error)
            raise
        self.work = LaneWork()
        """The work of this rank in the latest `generate` whose prompts joined a running batch."""
        self._calls = 0

    def check(self) -> None:
        """Compare the weights of all ranks that hold the same ones; all ranks call it.

        Raises:
            WeightsDifferError: with the tensors and the ranks that differ.
        """
        self._require_alive()
        with self.mesh.call("generator.check()"):
            require_same_weights(self.engine)

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
        batch: int = 16,
        seed: int | None = None,
        on_results: Callable[[Mapping[int, Generated]], object] = lambda results: None,
        **fields: Any,
    ) -> list[Generated]:
        """Continue prompts and return what came of each, in their order, on every rank; all ranks give the same prompts.

        Prompts join a running batch as others leave it, on the replica of the model that has the fewest tokens open. What cannot be
        generated so (beams, models with an encoder or another cache) is, in batches of one length, or about one for an encoder.

        Args:
            prompts: text, token ids, messages of a conversation, which the chat template makes text of, or mappings with one of
                these as `text`, `input_ids` or `messages`, and fields of `GenerationConfig` or `seed` for this prompt alone.
            batch: prompts that a replica of the model continues at a time.
            seed: the seed of what sampling draws for each prompt, whatever else is in its batch; None: one of `run.seed` and the
                number of calls so far.
            on_results: called on every rank with results as they come, by the number of their prompt.
            fields: of transformers' `GenerationConfig`, on top of the model's own; without any number of new tokens 128, or as many
                as the model has positions for.

        Raises:
            ConfigError: for fields that do not exist or that the layout does not allow.
            DataError: for prompts that are none, are too long, or differ between ranks.
            NonFiniteError: after all other results, for prompts whose logits are NaN or infinite; with beams nobody looks.
        """
        self._require_alive()
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be 1 or more prompts")
        requests, settings = self._requests(prompts, fields, seed)
        why = next(filter(None, (self._placed.why_unbatched(each) for each in settings)), "")
        given = {
            "prompts": xxhash.xxh3_64_hexdigest(repr(requests).encode()),
            "generation": settings[0].to_json_string(),
            "batch": batch,
        }
        with self.mesh.call("generator.generate()"):
            self.mesh.world.require_same(given, DataError, advice="All ranks give the same prompts and arguments")
        if why and any(request.fields != requests[0].fields for request in requests):
            raise ConfigError(f"generate: {why}, so all prompts are generated alike; give all of them the same fields")
        with self._guarded():
            if why:
                alike = self._placed.needs_one_length(settings[0])
                lengths = "one length" if alike else "about one length"
                self._placed.console.note(f"prompts are generated in batches of {lengths}: {why}")
                found = self._in_rounds(requests, settings, batch, on_results)
            else:
                found = self._together(requests, fields, batch, on_results)
        return _all_of(requests, found)

    def serve(self, inbox: Inbox | None, *, batch: int = 16, **fields: Any) -> None:
        """Continue what comes into the inbox of rank 0 until it is stopped; all ranks call it, the others with None.

        Args:
            inbox: where other threads submit requests that `check_request` has found good.
            batch: requests that a replica of the model runs at a time.
            fields: of transformers' `GenerationConfig`, on top of which are those of a request.

        Raises:
            ConfigError: for a model that requests cannot join while it generates.
            CollectiveError: when a rank is gone or late.
        """
        self._require_alive()
        self.require_serving(fields)
        with self._guarded():
            self._placed.request_loop(fields, rows=batch, on_progress=lambda progress: None).run(inbox)

    def stream_weights(self, part_of: PartOf = lambda name: None) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` of weights in the compute dtype, as `save_pretrained` would write them; all ranks iterate to its end.

        Names and shapes are those of files on the Hub, and adapters are merged. Beside its part a rank has one bucket in memory at
        a time, and where weights are converted or merged, those that belong together. `part_of(name)` is `(dim, index, parts)`
        where a rank wants a part of a tensor. A tensor may change with the next step: copy it to keep it.

        Raises:
            ConfigError: for a part that a tensor does not have, and for adapters that cannot be merged.
        """
        weights = self._placed.hub_form.of(self.engine.state.stored(), self.engine.options.precision.compute)
        return parts_of_weights(weights, part_of)

    def send_weights(self, *addresses: str, token: str | None = None, timeout_seconds: float = 30.0) -> int:
        """Send the weights to processes that listen with `zeromesh.receive_weights`; all ranks call it. Returns how many tensors.

        No rank has more of the model than its own part and what `stream_weights` keeps.

        Args:
            addresses: paths of Unix sockets, or `HOST:PORT`.
            token: the one that receivers were given.
            timeout_seconds: how long a receiver may be silent.

        Raises:
            TransferError: on all ranks, when a receiver is not there, refuses, or is gone.
        """
        weights = self.stream_weights()
        return send_weights(weights, self.mesh, addresses, token=token, timeout_seconds=timeout_seconds)

    def check_fields(self, fields: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for fields of `GenerationConfig` that no prompt can be continued with."""
        self._placed.checked_settings(fields, 1)

    def require_serving(self, fields: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a model that requests with these fields cannot join while it generates."""
        why = self._placed.why_unbatched(self._placed.settings(fields, 1))
        if why:
            raise ConfigError(f"serve: requests cannot join a running batch: {why}; use generate")
        self.check_fields(fields)
        if isinstance(self.tokenizer, PretrainedTokenizer):
            self.tokenizer.try_template()

    def check_request(self, tokens: Sequence[int], fields: Mapping[str, Any]) -> None:
        """Check that `serve` can go on from these tokens with these fields of `GenerationConfig`; any thread may call it.

        Raises:
            ConfigError: for fields that do not exist, that the layout does not allow, or that are for other ways of searching.
            DataError: for tokens that the model does not know, for none, and for too many.
        """
        self._require_known(tokens, "the prompt")
        why = self._placed.why_unbatched(self._placed.checked_settings(fields, len(tokens)))
        if why:
            raise ConfigError(f"{why}, which requests that join a running batch cannot")

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. Raises `DataError` for one that is none, or that the model does not know."""
        return self._encoded(prompt, "the prompt")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones. Raises `DataError` where the model has no tokenizer."""
        if self._placed.tokenizer is None:
            raise DataError("the model's directory has no tokenizer; set data.tokenizer")
        return self._placed.tokenizer.decode(tokens)

    def request_of(self, prompt: Mapping[str, Any]) -> tuple[list[int], dict[str, Any], int]:
        """The tokens, the fields of `GenerationConfig` and the seed of a prompt that is a mapping. Raises `DataError`."""
        text, own = split_prompt(prompt, "the prompt")
        seed = own.pop("seed", 0)
        return self._encoded(text, "the prompt"), own, seed

    def require_prompt(self, prompt: Mapping[str, Any]) -> None:
        """Raise `DataError` or `ConfigError` for a prompt, a mapping, that cannot be continued."""
        tokens, own, _ = self.request_of(prompt)
        self._placed.checked_settings(own, len(tokens))

    def can_serve(self, fields: Mapping[str, Any]) -> bool:
        """Return True if requests with these fields may join a running batch of this model, so that `serve` takes them."""
        return not self._placed.why_unbatched(self._placed.settings(fields, 1))

    @property
    def model_type(self) -> str:
        """The `model_type` of the model's `config.json`."""
        return str(self._placed.module.config.model_type)

    @property
    def positions(self) -> int | None:
        """The most tokens that a prompt and its continuation may have together; None if the model does not say."""
        return decoder_positions(self._placed.module)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the model; None if it has none."""
        return self._placed.tokenizer

    @property
    def _placed(self) -> PlacedModel:
        """The model. Raises `PhaseError` after `close`."""
        if self._model is None:
            raise self._over()
        return self._model

    def _require_alive(self) -> None:
        if self._failure:
            raise self._over()

    def _over(self) -> PhaseError:
        return PhaseError(f"this generator ended with {self._failure}; make a new one")

    def _requests(
        self, prompts: Sequence[Prompt], fields: Mapping[str, Any], seed: int | None
    ) -> tuple[list[Request], list[GenerationConfig]]:
        """The requests of prompts, and their settings."""
        if not prompts:
            raise DataError("there are no prompts; give at least one")
        self._calls += 1
        number = number_of(f"{self.config.run.seed}/{self._calls}/generator") if seed is None else seed
        requests = []
        for index, prompt in enumerate(prompts):
            text, own = split_prompt(prompt, f"prompt {index}")
            tokens = self._encoded(text, f"prompt {index}")
            draws = own.pop("seed", None)
            draws = number_of(f"{number}/{index}") if draws is None else draws
            requests.append(Request(number=index, tokens=tokens, fields=own, seed=draws))
        return requests, [self._settings(each, fields) for each in requests]

    def _settings(self, request: Request, fields: Mapping[str, Any]) -> GenerationConfig:
        """Return the settings of a request. Raises `ConfigError` and `DataError` with its number."""
        try:
            return self._placed.checked_settings({**fields, **request.fields}, len(request.tokens))
        except DataError as error:
            raise DataError(f"prompt {request.number}: {error}") from error

    def _together(
        self,
        requests: Sequence[Request],
        fields: Mapping[str, Any],
        batch: int,
        on_results: Callable[[Mapping[int, Generated]], object],
    ) -> dict[int, Generated]:
        """Have requests join and leave a running batch. Returns results by number, but of those whose logits are not finite."""
        found: dict[int, Generated] = {}
        made = {request.number: NewTokens(tokens=[], logprobs=[], finish=None) for request in requests}
        began = time.monotonic()

        def on_progress(progress: Sequence[Progress]) -> None:
            results = {}
            for each in progress:
                new = made[each.number]
                new = made[each.number] = NewTokens(
                    tokens=new.tokens + each.tokens,
                    logprobs=(new.logprobs or []) + each.logprobs,
                    finish=each.finish,
                )
                if each.finish in _WHOLE:
                    results[each.number] = self._result(new, len(requests[each.number].tokens))
            found.update(results)
            rate = sum(len(each.tokens) for each in made.values()) / max(time.monotonic() - began, 1e-9)
            self._placed.console.status(f"generated {len(found)} of {len(requests)} prompts, {rate:.1f} tokens/s")
            if results:
                self._placed.console.close()  # Results go to the same terminal, perhaps.
                on_results(results)

        inbox = Inbox(streams=False) if self.mesh.rank == 0 else None
        if inbox is not None:
            for request in requests:
                inbox.submit(request.tokens, lambda progress: None, fields=request.fields, seed=request.seed)
            inbox.stop()
        loop = self._placed.request_loop(fields, rows=batch, on_progress=on_progress)
        with _naming_missing(requests, found):
            loop.run(inbox)
        self.work = loop.work()
        return found

    def _in_rounds(
        self,
        requests: Sequence[Request],
        settings: Sequence[GenerationConfig],
        batch: int,
        on_results: Callable[[Mapping[int, Generated]], object],
    ) -> dict[int, Generated]:
        """As `_together`; requests of about one length and the same fields begin and end together, by the library's loop."""
        data, index = self.mesh.data, self.mesh.data_index
        # A rank without prompts in the last round takes part in it, as others need its parameters.
        idle = copy.deepcopy(settings[0])
        idle.update(max_new_tokens=1, min_new_tokens=None, min_length=0, max_length=None)
        found: dict[int, Generated] = {}
        dealt_by: Callable[..., list[list[list[int]]]] = deal
        if self._placed.needs_one_length(settings[0]):
            # Prompts before an encoder are padded to the longest of all ranks.
            dealt_by = partial(deal_alike, whole_rounds=self._placed.is_encoder_decoder)
        rounds = dealt_by([len(request.tokens) for request in requests], ranks=data.size, batch=batch)
        began, made = time.monotonic(), 0
        for dealt in rounds:
            own = [requests[number] for number in dealt[index]]
            with _naming_missing(requests, found):
                asked = settings[own[0].number] if own else idle
                new = self._placed.generate(
                    [each.tokens for each in own] or [[0]], asked, [each.seed for each in own] or [0]
                )
                rows = data.gather_json([asdict(each) for each in new[: len(own)]], "results of a round")
            results = {
                number: self._result(NewTokens(**each), len(requests[number].tokens))
                for numbers, row in zip(dealt, rows, strict=True)
                for number, each in zip(numbers, row, strict=True)
                if each["finish"] in _WHOLE
            }
            found |= results
            made += sum(each.new_tokens for each in results.values())
            rate = made / max(time.monotonic() - began, 1e-9)
            self._placed.console.status(f"generated {len(found)} of {len(requests)} prompts, {rate:.1f} tokens/s")
            self._placed.console.close()
            on_results(results)
        return found

    def _result(self, new: NewTokens, prompt_tokens: int) -> Generated:
        tokenizer = self._placed.tokenizer
        return Generated(
            text=None if tokenizer is None else tokenizer.decode(new.tokens),
            tokens=new.tokens,
            logprobs=new.logprobs,
            prompt_tokens=prompt_tokens,
            new_tokens=len(new.tokens),
            finish=str(new.finish),
        )

    def _encoded(self, prompt: Any, where: str) -> list[int]:
        """The tokens of a prompt. Raises `DataError` for one that cannot be continued."""
        tokenizer, problem = self._placed.tokenizer, problem_of(prompt)
        if problem:
            raise DataError(f"{where} {problem}")
        if not isinstance(prompt, str) and not isinstance(prompt[0], Mapping):
            ids = list(prompt)
        elif tokenizer is None:
            raise DataError(
                f"{where} is text, and the model's directory has no tokenizer; give token ids, or set data.tokenizer"
            )
        else:
            try:
                json.dumps(prompt, ensure_ascii=False, default=str).encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{where} has half of a character or bytes that are no UTF-8, which is no text"
                ) from error
            try:
                ids = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tokenizer.encode_messages(prompt)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        self._require_known(ids, where)
        return ids

    def _require_known(self, ids: Sequence[int], where: str) -> None:
        """Raise `DataError` for tokens that the model does not know, and for none."""
        size = self._placed.module.config.get_text_config().vocab_size
        if not ids or max(ids) >= size or min(ids) < 0:
            raise DataError(
                f"{where} has {f'token {max(ids)}, and the model knows {size}' if ids else 'no token'}; give others"
            )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A call that all ranks make: after an error amid it the other ranks learn of it, and the generator is over."""
        watch = self.mesh.watch
        begun = watch.begun
        try:
            with self.mesh.call("generator.generate()"):
                yield
        except BaseException as error:
            if watch.begun != begun or watch.in_doubt or not self.engine.abandon_pass():
                self._failure = f"{type(error).__name__}: {error}"
                self.mesh.fail(error)
            raise

    def close(self) -> None:
        """Leave the process groups, and give memory and files back. The generator is over; closing twice is allowed."""
        self._failure = self._failure or "close()"
        model, self._model = self._model, None
        if model is not None:
            model.close()
            model.console.close()
            self.mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_WHOLE = ("stop", "length")
"""How texts end that are results."""


def _all_of(requests: Sequence[Request], found: Mapping[int, Generated]) -> list[Generated]:
    """Return the results in order. Raises `NonFiniteError` where there is none because logits are NaN or infinite."""
    missing = [request.number for request in requests if request.number not in found]
    if missing:
        raise NonFiniteError(
            f"the model's logits are NaN or infinite for prompt{'' if len(missing) == 1 else 's'} {some(missing, 100)}; the other "
            f"{len(found)} have a result, which on_results was given. Look at the weights, or compute in another dtype "
            "(precision.compute: float32)"
        )
    return [found[request.number] for request in requests]


@contextmanager
def _naming_missing(requests: Sequence[Request], found: Mapping[int, Generated]) -> Iterator[None]:
    """Have an error that other ranks are the cause of say inside the block which prompts have no result."""
    try:
        yield
    except CollectiveError as error:
        missing = [request.number for request in requests if request.number not in found]
        raise CollectiveError(
            f"{error}\n{len(found)} of {len(requests)} prompts have a result; without one are {some(missing, 100)}"
        ) from error
