"""`Generator`: text generation on all ranks of a launch, in any layout, with nothing but parameters in memory.

with Generator("runs/quickstart", parallel={"tensor": 2}) as generator:
    for result in generator.generate(["Once upon"], max_new_tokens=32):
        print(result.text)
"""

import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import GenerationConfig

from zeromesh import errors
from zeromesh.checkpoint.io.format import MANIFEST
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.errors import CollectiveError, ConfigError, DataError, PhaseError, StorageError, counted, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import Precision
from zeromesh.rng import seed_of
from zeromesh.trainer.checkpoints.trainer_state import evaluates_average
from zeromesh.trainer.config.load import ConfigSource, Consent, foreign_code, load_config
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import parse_yaml
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer, Tokenizer, has_tokenizer, load_tokenizer
from zeromesh.trainer.generation.adapter_rows import BASE, AdapterRows
from zeromesh.trainer.generation.library_loop import generate_in_rounds
from zeromesh.trainer.generation.prompts import Prompt, split_prompt, tokens_of
from zeromesh.trainer.generation.request_loop import RequestLoop
from zeromesh.trainer.generation.requests import Inbox, Progress, Request
from zeromesh.trainer.generation.settings import ModelSettings, ServedModel, check_arguments, decoder_positions
from zeromesh.trainer.loop.trained_model import is_out_of_memory
from zeromesh.trainer.model_on_mesh import ModelOnMesh
from zeromesh.trainer.models.adapters import ADAPTER_CONFIG, add_adapters, saved_with_base
from zeromesh.trainer.models.build import build_model, directory_of, pin_sources, read_configuration
from zeromesh.trainer.models.hub_form import HubForm
from zeromesh.trainer.models.prepare import use_attention
from zeromesh.trainer.models.user_model import require_layout_fits
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.step_metrics import CONFIG
from zeromesh.trainer.setup.build import connect, require_same_settings, set_tf32
from zeromesh.trainer.setup.engine_options import adapters_spared, engine_options, require_directories
from zeromesh.trainer.setup.model import divide_model, fill_engine, synchronize_initial_values
from zeromesh.trainer.tools.checkpoint.reading import checkpoint_at
from zeromesh.trainer.weights.safetensors_source import keep_encoded
from zeromesh.units.build import open_tiers
from zeromesh.zero.engine import ZeroEngine

_FLOAT64_ROLES = ("precision.master=float64", "precision.reduce=float64")
"""Overrides of dtype roles that generation does not use; float64 agrees with every compute dtype."""
_PLAIN = {"max_new_tokens": 1, "num_beams": 1, "do_sample": False, "use_cache": True}  # join any running batch
_TRAINING_ONLY_KEYS = {"model.lora": "adapters that are trained", "precision.linear": "products of training"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """The generated continuation of one prompt."""

    text: str | None
    """The text of the new tokens without special ones; None if the model has no tokenizer."""
    tokens: list[int]
    """The new tokens, including the end token."""
    logprobs: list[float] | None
    """The log-probability of each token before temperature and the like; None where they are chosen in hindsight (beam search)."""
    prompt_tokens: int
    new_tokens: int
    finish: str
    """`stop` at an end token, or `length` at `max_new_tokens`."""


class Generator(ModelOnMesh):
    """Generates with a model on the ranks of the launch, in the layout of a configuration; all ranks make the same calls.

    Args:
        source: a Hugging Face directory, the name of a model on the Hub, a run (its newest checkpoint) or a checkpoint of one.
        config: a path, a mapping or a `TrainerConfig`, of which `parallel`, `zero`, `offload`, `precision.compute` and `model`
            are used; None: the defaults. The default of `precision.compute` is the dtype in the model's `config.json`.
        check: compare replicated weights between ranks at the start, which reads them once; None: all except those in files.
        sections: sections on top of `config`, such as `parallel={"tensor": 2}`.
        overrides: keys on top of all, such as `zero.stage=0`, as on the command line.

    Raises `ConfigError` for a source without a model, and for an invalid configuration, `LayoutError` for a model that cannot
    be divided in this layout, `StorageError` where memory is short, and `WeightsDifferError` where replicated weights differ
    between ranks.
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
        self._unusable_reason = ""
        try:
            console = Console(sys.stderr, shown=self.mesh.rank == 0)
            with self.mesh.call("zeromesh.Generator()"), console:
                self._model: ServedModel | None = build_served_model(asked, self.mesh, console)
                if check or (check is None and not self.engine.options.offload.parameters.uses_tier):
                    self.engine.checkpoint_state.require_same_weights()
                if self._model.adapters.names and not self._why_unserved(_PLAIN):
                    self._try_adapters()
        except BaseException as error:
            self.mesh.publish_failed_start(error)
            raise
        self.computed = 0  # Tokens of this rank in the latest `generate` whose prompts joined a running batch.
        self._calls = 0

    def _try_adapters(self) -> None:
        """Run a forward, which shows whether all layers with adapters know what is of which row."""
        inbox = Inbox.of([Request(number=0, tokens=[0])]) if self.mesh.rank == 0 else None
        RequestLoop(self.placed, _PLAIN, rows=1, on_progress=lambda progress: None).run(inbox)
        (adapters := self.placed.adapters).enter()
        found = self.mesh.world.gather_json(sorted(adapters.unknown), "layers without rows")
        if unknown := sorted({name for names in found for name in names}):
            adapters.why_alone = f"{some(unknown, 2)} computes the tokens of all rows at once"

    @property
    def placed(self) -> ServedModel:
        """The model. Raises `PhaseError` after `close`."""
        if self._model is None:
            raise PhaseError(self._unusable_reason)
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

        Args:
            prompts: text, token ids, messages of a conversation for the chat template, or mappings with one of
                these as `text`, `input_ids` or `messages`, and for this prompt alone fields of `GenerationConfig`, `seed`, or
                `adapter`: one of `model.adapters`, or `__base__` for none of them.
            batch: prompts that a replica of the model continues at a time.
            seed: the seed of sampling for each prompt, whatever its batch; None: from `run.seed` and the number of earlier calls.
            on_results: called on every rank with new results, by index of their prompt.
            fields: of transformers' `GenerationConfig`, on top of the model's own; 128 new tokens, or as many as it has positions.

        Raises `ConfigError` for fields that do not exist or that the layout does not allow, `DataError` for prompts that are
        invalid, too long, or different between ranks, `StorageError` if memory runs out, and `NonFiniteError` after all other
        results, for prompts whose logits are NaN or infinite; beam search does not check.
        """
        placed = self.placed
        placed.require_sound()
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be 1 or more prompts")
        if not prompts:
            raise DataError("there are no prompts; give at least one")
        self._calls += 1
        number = seed_of(f"{self.config.run.seed}/{self._calls}/generator") if seed is None else seed
        checked = [
            self.request_of(prompt, fields, number=index, seed=seed_of(f"{number}/{index}"), where=f"prompt {index}")
            for index, prompt in enumerate(prompts)
        ]
        requests = [request for request, _ in checked]
        results = _Results(requests, placed, on_results)
        self._generate(requests, [settings for _, settings in checked], fields, batch, results)
        if missing := results.missing:
            why = f"the model's logits are NaN or infinite for prompt{'s' if missing[1:] else ''} {some(missing, 100)}"
            others = f"the other {len(results.complete)} have a result, given to on_results"
            raise errors.NonFiniteError(f"{why}; {others}. Check the weights, or set precision.compute: float32")
        return [results.complete[request.number] for request in requests]

    def _generate(
        self, requests: list[Request], settings: list[GenerationConfig], fields: Any, batch: int, results: "_Results"
    ) -> None:
        placed = self.placed
        why = next(filter(None, map(placed.settings.why_unbatched, settings)), "")
        given: dict[str, Any] = {"prompts": xxhash.xxh3_64_hexdigest(repr(requests).encode()), "batch": batch}
        given["generation"] = settings[0].to_json_string()
        # Prompts that differ between ranks are refused on all of them.
        with self.mesh.call("generator.generate()"):
            self.mesh.world.require_same(given, DataError, advice="All ranks give the same prompts and arguments")
        if why and any((each.fields, each.adapter) != (requests[0].fields, requests[0].adapter) for each in requests):
            raise ConfigError(f"generate: {why}, so prompts are generated alike; give all the same fields and adapter")
        try:
            with placed.guarded("generator.generate()"):
                if why:
                    placed.adapters.enter([requests[0].adapter])
                    generate_in_rounds(placed, requests, settings, batch, results.add, why)
                else:
                    loop = RequestLoop(placed, fields, rows=batch, on_progress=results.add)
                    self.computed = loop.run(Inbox.of(requests) if self.mesh.rank == 0 else None)
                placed.adapters.enter()
        except CollectiveError as error:
            complete = f"{len(results.complete)} of {counted(len(requests), 'prompt')} have a result"
            raise CollectiveError(f"{error}\n{complete}; without one are {some(results.missing, 100)}") from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            why = f"generating ran out of memory ({errors.summary(error)})"
            raise StorageError(f"{why}; lower batch (here {batch}), max_new_tokens or num_beams") from error

    def serve(self, inbox: Inbox | None, *, batch: int = 16, **fields: Any) -> None:
        """Generate for the requests in rank 0's inbox, to which other threads submit what `check_request` has accepted, until it
        is stopped; all ranks call it, the others with None. A replica of the model runs `batch` requests at a time; `fields` are
        of transformers' `GenerationConfig`, on top of which are those of a request. Raises `ConfigError` for a model whose
        requests cannot join a running batch, and `CollectiveError` when a rank is gone or late."""
        self.require_serving(fields)
        with self.placed.guarded("generator.serve()"):
            deliver = inbox.deliver if inbox is not None else lambda progress: None
            RequestLoop(self.placed, fields, rows=batch, on_progress=deliver).run(inbox)
            self.placed.adapters.enter()

    def check_fields(self, fields: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for fields of `GenerationConfig` that are invalid for every prompt."""
        self.placed.settings.for_request(fields, 1)

    def _why_unserved(self, fields: Mapping[str, Any], tokens: int = 1, *, trial: bool = False) -> str:
        settings = self.placed.settings
        return settings.why_unbatched(settings.for_request(fields, tokens, trial=trial))

    def can_serve(self, fields: Mapping[str, Any]) -> bool:
        """Return True if requests with these fields may join a running batch of this model, so that `serve` takes them."""
        return not self._why_unserved(fields)

    def require_serving(self, fields: Mapping[str, Any]) -> None:
        """Raise `ConfigError` for a model whose requests with these fields cannot join a running batch."""
        if why := self._why_unserved(fields):
            raise ConfigError(f"serve: requests cannot join a running batch: {why}; use generate")
        self.check_fields(fields)
        if isinstance(self.tokenizer, PretrainedTokenizer):
            self.tokenizer.require_bounded_template()

    def check_request(self, tokens: Sequence[int], fields: Mapping[str, Any], adapter: str | None = None) -> None:
        """Check that `serve` can continue these tokens with these fields of `GenerationConfig` and this adapter, from any thread.
        Raises `ConfigError` for invalid fields and adapters, and `DataError` for unknown tokens, for none, and for too many."""
        self.encode(tokens)
        self.placed.adapters.require(adapter, "the request")
        if why := self._why_unserved(fields, len(tokens), trial=True):
            raise ConfigError(f"{why}, which requests that join a running batch cannot")

    def request_of(
        self, prompt: Prompt, fields: Mapping[str, Any], *, number: int = 0, seed: int = 0, where: str = ""
    ) -> tuple[Request, GenerationConfig]:
        """Return the request and the settings of a prompt, whose options override `fields` and `seed`. Raises `ConfigError` and
        `DataError` for an invalid prompt, which they call `where`."""
        name = where or "the prompt"
        text, options = split_prompt(prompt, name)
        seed, adapter = options.pop("seed", seed), options.pop("adapter", None)
        self.placed.adapters.require(adapter, name)
        request = Request(number=number, tokens=self.encode(text, name), fields=options, seed=seed, adapter=adapter)
        with errors.errors_as(DataError, f"{where}: " if where else "", DataError):
            return request, self.placed.settings.for_request({**fields, **options}, len(request.tokens))

    def encode(self, prompt: Any, where: str = "the prompt") -> list[int]:
        """Return the tokens of a prompt, which errors call `where`. Raises `DataError` for an invalid one."""
        ids = tokens_of(prompt, self.tokenizer, where)
        size = self.placed.module.config.get_text_config().vocab_size
        if not ids or max(ids) >= size:
            found = f"token {max(ids)}, and the model knows {size}" if ids else "no token"
            raise DataError(f"{where} has {found}; give others")
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
        """Leave the process groups, and release memory and files; later calls raise `PhaseError`. Closing twice is allowed."""
        model, self._model = self._model, None
        if model is not None:
            model.failure = model.failure or "close()"
            self._unusable_reason = model.unusable_reason()
            model.close()
            model.console.close()
            self.mesh.close()
            del model
            gc.collect()  # A layer whose `forward` is replaced, as where products are widened, refers to itself.


class _Results:
    """The complete results of one call of `generate`, and the tokens so far of the other requests."""

    def __init__(
        self, requests: Sequence[Request], placed: ServedModel, on_results: Callable[[Mapping[int, Generated]], object]
    ) -> None:
        self._requests, self._placed, self._on_results = requests, placed, on_results
        self._partial: dict[int, tuple[list[int], list[float]]] = {}
        self.complete: dict[int, Generated] = {}  # By request number, without those whose logits are not finite.
        self._began, self._tokens = time.monotonic(), 0

    @property
    def missing(self) -> list[int]:
        return [request.number for request in self._requests if request.number not in self.complete]

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
        self.complete |= results
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        console.status(f"generated {len(self.complete)} of {counted(len(self._requests), 'prompt')}, {rate:.1f} tokens/s")
        if results:
            console.close()  # Results may go to the same terminal.
            self._on_results(results)


def find_source(source: str | PathLike[str]) -> str:
    """Return the directory, or name on the Hub, that `source` stands for, of a run its newest checkpoint. Raises `ConfigError`."""
    path = Path(source).expanduser()
    # Errors about a directory of adapters are raised where models are read.
    if not path.is_dir() or any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return str(path) if path.is_dir() else str(source)
    if (path / CONFIG).is_file() or (path / MANIFEST).is_file():
        return str(checkpoint_at(path))
    why = f"a directory without config.json or {CONFIG}; give a run, a checkpoint of a run, the name of a model on the Hub"
    raise ConfigError(f"{why}, or a model directory (a run of TRL has one: model)", where=str(source))


def layout_of(
    source: str | PathLike[str], config: ConfigSource, sections: Mapping[str, Any], overrides: Sequence[str] = ()
) -> TrainerConfig:
    """Return the configuration to generate with `source`: `config` below `sections` and `overrides`. Raises `ConfigError`."""
    merged: dict[str, Any] = {}
    if config is not None:
        merged = load_config(config, consent=Consent.GIVEN).model_dump(mode="json", exclude_unset=True)
    merged["run"] = {"name": "generate", **merged.get("run", {})}
    for name, section in sections.items():
        merged[name] = {**merged.get(name, {}), **section}
    directory = find_source(source)
    run = Path(directory).parent.parent / CONFIG
    in_checkpoint = Path(directory, MANIFEST).is_file() and run.is_file()
    if in_checkpoint and evaluates_average(CheckpointReader(Path(directory), checked=False)):
        why = "its optimizer evaluates other weights than it trains"
        raise ConfigError(f"{directory}: {why}: zeromesh checkpoint export {source} OUT")
    values = parse_yaml(run.read_text(encoding="utf-8"), where=str(run)) if in_checkpoint else {}
    of_run = {name: each for name, each in (values or {}).items() if isinstance(each, dict)}
    model = merged.get("model", {})
    # Fields of the same kind of model are kept; a configuration of another model is dropped.
    fields = model.get("config") if "model_type" not in (model.get("config") or {}) else None
    found: dict[str, Any] = {"source": directory}
    if adapted := Path(directory, ADAPTER_CONFIG).is_file():
        # The run says what its base was; an adapter alone, where it lies.
        names = {"head", "revision", "weights"} & of_run.get("model", {}).keys()
        found = {name: of_run["model"][name] for name in names} | saved_with_base(Path(directory))
        if "source" not in found and not any(word.startswith("model.source=") for word in overrides):
            why = f"{directory} is an adapter that names no directory of its base; give it as model.source=DIRECTORY"
            raise ConfigError(f"{why}, or for a run merge it: zeromesh checkpoint export {source} OUT --merge")
    merged["model"] = found | {name: each for name, each in model.items() if name != "source"} | {"config": fields}
    # Generation reads no data, only the tokenizer, which a checkpoint may not have itself.
    own = of_run.get("data", {}).get("tokenizer")
    if has_tokenizer(Path(directory)):
        own = directory if adapted else None
    data = {name: value for name, value in merged.get("data", {}).items() if name == "tokenizer"}
    merged["data"] = data or ({"tokenizer": own} if own else {})
    by_file = isinstance(config, str | PathLike) and not any(foreign_code(sections))
    consent = Consent.COMMAND_LINE if by_file else Consent.GIVEN
    layout = load_config(merged, [*overrides, *_FLOAT64_ROLES], consent=consent)
    given = [(key, what) for key, what in _TRAINING_ONLY_KEYS.items() if attrgetter(key)(layout) is not None]
    problems = [f"{key} is for {what}, and nothing is trained here; leave it out" for key, what in given]
    problems += [
        f"model.adapters.{name} has settings of a new adapter, and nothing is trained here; give the directory of a saved one"
        for name, each in (layout.model.adapters or {}).items()
        if not isinstance(each, str)
    ]
    if problems:
        raise ConfigError(problems)
    return layout


def served_models(source: str, name: str | None, layout: TrainerConfig, why_alone: str) -> dict[str, str | None]:
    """Return the adapter of each model that a server of `source` has, by the names that clients give; the first is for those that
    give none. `source` has the name `name`, or that of its directory, the base of an adapter that of its own, and other adapters
    theirs. Raises `ConfigError` for two of one name, and for several adapters of which one runs alone, with the reason for that."""
    own, base, wanted = name or Path(source).resolve().name, str(layout.model.source), layout.model.wanted_adapters
    if not wanted:
        return {own: None}
    inside = next((each for each, directory in wanted.items() if directory == find_source(source)), BASE)
    others = [each for each in wanted if each != inside]
    if why_alone:
        if len(wanted) > 1:
            raise ConfigError(f"{why_alone}; serve it without the other adapters", where="model.adapters")
        return dict.fromkeys(others or [own])
    models: list[tuple[str, str | None]] = [(own, inside), *((each, each) for each in others)]
    if inside != BASE:
        models.append((Path(base).name if Path(base).is_dir() else base, BASE))
    if len({*dict(models)}) < len(models):
        names = ", ".join(each for each, _ in models)
        raise ConfigError(f"two models have one name: {names}; give --name, or name the adapters otherwise")
    return dict(models)


def build_served_model(config: TrainerConfig, mesh: Mesh, console: Console) -> ServedModel:
    """Build the model that a configuration names and read its weights into this rank's part; all ranks call it."""
    require_same_settings(mesh, config, {})
    config = pin_sources(config, mesh, model_given=False, trains=False)
    directory = directory_of(config.model.source or "", config.model.revision)
    set_tf32(config := _with_model_defaults(config), mesh.device)
    named = config.data.tokenizer or (directory if has_tokenizer(directory) else None)
    tokenizer = load_tokenizer(named) if named is not None else None
    console.status("building the model")
    compute, seed = getattr(torch, config.precision.compute), config.run.seed
    built = add_adapters(build_model(config.model, seed, trains=False), config.model, seed, compute, inside=True)
    model = built.model.requires_grad_(False)
    check_arguments(model, {}, None)
    require_directories(config.offload)
    options = adapters_spared(engine_options(config, 1), model)
    # Nothing but parameters is kept. On the file tier they are read from the model's files, without a directory or checksums.
    in_place = config.offload.directory is None and not config.offload.checksums
    sums = torch.float32 if compute is torch.bfloat16 else compute  # Which weights in bfloat16 alone go with.
    roles = Precision(compute=compute, master=compute, reduce=sums)
    offload = replace(options.offload, in_place=in_place, durable=False)
    options = replace(options, precision=roles, offload=offload, average=None)
    if config.model.attention is not None:
        use_attention(model, config.model.attention, compute, mesh.device)
    require_layout_fits(model, mesh.shape, trains=False)
    console.note(*synchronize_initial_values(built, mesh, seed))
    console.note(*keep_encoded(built, options, config.model.weights, mesh, console.status))
    tiers = open_tiers(mesh, options)
    try:
        settings, hub_form = ModelSettings(model, mesh), HubForm(model)
        divided = divide_model(model, mesh, config)
        engine = fill_engine(built, config, mesh, options, tiers, divided, console)
    except BaseException:
        tiers.close()
        raise
    return ServedModel(
        config=config,
        mesh=mesh,
        console=console,
        module=model.eval(),
        hub_form=hub_form,
        divided=divided,
        engine=engine,
        processing_class=getattr(tokenizer, "tokenizer", None),
        settings=settings,
        tokenizer=tokenizer,
        adapters=AdapterRows(model),
    )


def _with_model_defaults(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration with the task and the compute dtype of the model's directory, where they are not set."""
    section, head_given = config.model, "head" in config.model.model_fields_set
    stored_config, *_ = read_configuration(section if head_given else section.model_copy(update={"head": "base"}))
    if not head_given and stored_config.is_encoder_decoder:
        config = config.changed(model={"head": "seq2seq_lm"})
    if "compute" not in config.precision.model_fields_set:
        stored = str(getattr(stored_config, "dtype", None)).removeprefix("torch.")
        known = stored in ("bfloat16", "float16", "float32", "float64")
        config = config.changed(precision={"compute": stored if known else "float32"})
    return config
