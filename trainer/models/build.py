"""Builds models of transformers, on meta where that is exact. The Hub's are fetched once per host, at one commit on all ranks."""

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from zeromesh.checkpoint.io.format import MANIFEST
from zeromesh.errors import ConfigError, library_errors, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.memory.ledger import machine_bytes
from zeromesh.settings.keys import int_if_whole
from zeromesh.telemetry.status_board import Activity
from zeromesh.trainer.config.sections.base import REPOSITORY, nearest_of
from zeromesh.trainer.config.sections.model import AUTO_CLASSES, Head, ModelSection, WeightsSection
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import BYTES, Tokenizer, has_tokenizer, special_ids
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.models.adapters import ADAPTER_CONFIG, pretrained_of
from zeromesh.trainer.models.user_model import integer, numbers, text_part
from zeromesh.trainer.weights.quantized_files import QuantizedFiles, open_files
from zeromesh.trainer.weights.safetensors_source import SafetensorsSource, match
from zeromesh.weight_init.weight_sources import BuiltModel, build_deferred, canonical_names
from zeromesh.zero.hooks import on_registration

T = TypeVar("T")
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
MODEL_FILES = ("*.safetensors", "*.py", *TOKENIZER_FILES)


def pin_sources(
    config: TrainerConfig,
    mesh: Mesh,
    *,
    model_given: bool,
    came_from: str | None = None,
    reads_text: bool = False,
    trains: bool = True,
) -> TrainerConfig:
    """Fetch the model and tokenizer on the Hub; all ranks call it and get the same result, in which `model.revision` is the fetched
    commit, and `data.tokenizer` bytes or a directory, by default the model's if the run `reads_text`. A given model (`model_given`)
    was loaded from `came_from`. Raises `ConfigError` for what is neither a directory nor reachable."""
    model, data = config.model, config.data
    if model.source is not None and not model_given:
        commit = _fetch(model.source, model.revision, MODEL_FILES, mesh, where="model.source")
        model = _with_stored_codec(model.model_copy(update={"revision": commit}), trains=trains)
        if model.trust_remote_code:
            directory = directory_of(config.model.source or "", commit)
            turn = 0 if mesh.rank == 0 else 1 if mesh.environment.local_rank == 0 else 2
            # transformers copies a model's code to its module cache; other ranks wait, as they might read half a file.
            for number in range(3):
                if number == turn and (directory / "config.json").is_file():
                    made = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=True)
                    for reference in (getattr(made, "auto_map", None) or {}).values():
                        get_class_from_dynamic_module(reference, directory, local_files_only=True)
                mesh.wait_for_all_ranks(f"code of {directory}")
    own = (came_from if model_given else model.source) if reads_text else None
    named = data.tokenizer or own or (BYTES if reads_text else None)
    if named not in (None, BYTES):
        commit = _fetch(named, model.revision if named == model.source else None, TOKENIZER_FILES, mesh, where="data.tokenizer")
        found = directory_of(named, commit, TOKENIZER_FILES, where="data.tokenizer")
        # A missing tokenizer is reported when text is loaded, after errors of the model.
        named = str(found) if data.tokenizer is not None or has_tokenizer(found) else None
    return config.model_copy(update={"model": model}).changed(data={"tokenizer": named})


def _with_stored_codec(model: ModelSection, *, trains: bool) -> ModelSection:
    """Return the section with the codec of a directory in 4 bits whose matrices are frozen, unless `weights` names another."""
    if model.weights is not None or not (model.wanted_adapters or model.trains_nothing or not trains):
        return model
    directory = directory_of(model.source or "", model.revision)
    if not (directory / "config.json").is_file():
        return model
    with closing(open_files(directory)[0]) as files:
        found = files.section() if isinstance(files, QuantizedFiles) else None
    return model if found is None else model.model_copy(update={"weights": WeightsSection(**found)})


def directory_of(source: str, revision: str | None, files: Sequence[str] = MODEL_FILES, *, where: str = "model.source") -> Path:
    """Return the local directory of `source` without downloading. Raises `ConfigError` without one, with what was tried."""
    directory = Path(source).expanduser()
    return directory if directory.is_dir() else _snapshot(source, revision, files, where=where, download=False)


def _fetch(source: str, revision: str | None, files: Sequence[str], mesh: Mesh, *, where: str) -> str | None:
    """Download a repository to every host's cache; returns its commit, or None for a directory."""
    rows = [row[0] for row in mesh.world.gather_integers([int(Path(source).expanduser().is_dir())])]
    if all(rows):
        if revision is not None:
            problem = f"{revision!r} is of a repository, and {source!r} is a directory; leave it out"
            raise ConfigError(problem, where="model.revision")
        return None
    if any(rows):
        lacking = ", ".join(str(rank) for rank, found in enumerate(rows) if not found)
        raise ConfigError(f"{source!r} is a directory on some hosts and not on those of ranks {lacking}", where=where)

    def download(commit: str | None) -> str:
        return _snapshot(source, commit or revision, files, where=where, download=True).name

    first = while_posting(mesh, lambda: download(None)) if mesh.rank == 0 else ""
    commit = mesh.world.gather_bytes(first.encode(), f"commit of {source}")[0].decode()
    if mesh.rank and mesh.environment.local_rank == 0:
        while_posting(mesh, lambda: download(commit))
    mesh.wait_for_all_ranks(f"download of {source}")
    return commit


def _snapshot(source: str, revision: str | None, files: Sequence[str], *, where: str, download: bool) -> Path:
    path = Path(source).expanduser()
    if path.is_file() or not REPOSITORY.fullmatch(source):
        raise ConfigError(f"{path} is not a directory on this machine, and cannot be the name of a model on the Hub", where=where)
    at = f" at {revision}" if revision else ""
    offline = " (HF_HUB_OFFLINE is set, so that it was not asked)" if constants.HF_HUB_OFFLINE else ""
    sources = f"the cache {constants.HF_HUB_CACHE} or from the Hub{offline}"
    absent = f"{source!r} is neither a directory here ({path.absolute()}) nor a model{at} that can be had from {sources}: "
    which: dict[str, Any] = {"revision": revision, "allow_patterns": [*files], "ignore_patterns": ["*/*"]}
    with library_errors(where, absent):
        return Path(huggingface_hub.snapshot_download(source, **which, local_files_only=not download))


def while_posting(mesh: Mesh, call: Callable[[], T]) -> T:
    """Return the result of `call`, run in a thread while this rank posts heartbeats, so that waiting ranks do not time out."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(call)
        while not wait([future], timeout=1.0).done:
            mesh.post(Activity.IDLE)
        return future.result()


_COUNTS = (*("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"), "vocab_size")
_EXTRA_KEYS = {
    "attn_implementation", "auto_map", "decoder_start_token_id", "experts_implementation", "model_type", "num_labels",
    "partial_rotary_factor", "rope_scaling", "rope_theta", "torch_dtype", "_attn_implementation", "_name_or_path",
}  # fmt: skip
"""Keys that every configuration accepts though its class has no such field, and older names of fields."""
_MODULE_COUNTS = re.compile(r"^n(um)?_\w*(layer|block|expert|stage)s?|_(layers|blocks|experts|stages)$|^depth$")
_MOST_MODULES = 10_000  # layers, experts or stages; more take minutes to build, and no model has them
_MOST_ELEMENTS = 2**62
_MOST_MEMORY_RATIO = 1000
"""The largest model in 16 bits, as a multiple of this machine's memory; many ranks and disks may share a model."""
_MOST_SECONDS = 30  # of CPU time for building a model's modules on meta
_SHOWN_NUMBERS = 3
_MOST_LABELS = 1_000_000  # as a configuration holds a name for each


def build_model(section: ModelSection, seed: int, tokenizer: Tokenizer | None = None, *, trains: bool = True) -> BuiltModel:
    """Build the model of a `model` section; weights that are in no file are drawn from `seed`, and the sizes of `tokenizer` apply
    where section and source give none. Code of the source runs with `trust_remote_code` alone. Parameters are fp32 and on meta, and
    `BuiltModel.source` has their values; a model that would lose some is built whole on CPU, and a note says so. Raises
    `ConfigError` for an unknown model type, field or value, a missing source, and one without the head where nothing `trains`."""
    made, automatic, directory = read_configuration(section, tokenizer)
    files, quantizer = (None, None) if directory is None else open_files(directory)

    def stored_names(model: Any) -> frozenset[str]:
        matched, canonical = match(model, files.entries if files else {}, quantizer), canonical_names(model)
        return frozenset(canonical.get(name, name) for name in (*matched.direct, *matched.converted))

    def build() -> Any:
        with _limited_size(made):
            return automatic.from_config(made, dtype=torch.float32, trust_remote_code=section.trust_remote_code)

    with _library_errors("model.config", f"{made.model_type} cannot be built: "):
        built = build_deferred(build, seed, stored=None if files is None else stored_names)
    if directory is None or files is None:
        return built
    model: Any = built.model
    streamed = SafetensorsSource(files, model, built.source, quantizer)
    if streamed.drawn and not section.wanted_adapters and (section.trains_nothing or not trains):
        why = f"{directory} ({some(made.architectures or '?')}) lacks {some(streamed.drawn, 6)}, and nothing is trained"
        raise ConfigError(f"{why}; set this to what it is for, or give a {section.head} model", where="model.head")
    generation = directory / "generation_config.json"
    # The model keeps the generation settings, since saving it writes them again.
    if generation.is_file() and model.can_generate():
        with _library_errors("model.source", f"{generation}: "):
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return BuiltModel(model=model, source=streamed, notes=built.notes + streamed.notes)


@contextmanager
def _limited_size(made: Any) -> Iterator[None]:
    """Raise `ConfigError`, with the configuration's largest numbers, once modules that are built in the block take too much."""
    began, memory, total = time.process_time(), machine_bytes(), 0

    def refused(size: str) -> ConfigError:
        whole = [each for each in numbers(made.to_dict()) if type(each[1]) is int]
        most = sorted(whole, key=lambda each: -each[1])[:_SHOWN_NUMBERS]
        named = ", ".join(f"{name} {value}" for name, value in most)
        return ConfigError(f"the model would have {size}; its largest numbers are {named}", where="model.config")

    def count(parameter: torch.nn.Parameter | None) -> None:
        nonlocal total
        total += 0 if parameter is None else parameter.numel()
        if 2 * total > _MOST_MEMORY_RATIO * memory > 0:
            raise refused(f"{total:,} parameters and more, and this machine has {human_bytes(memory)} of memory")
        if time.process_time() - began > _MOST_SECONDS:
            raise refused(f"parts that take more than {_MOST_SECONDS} s to describe")

    try:
        with on_registration(count):
            yield
    except RuntimeError as error:
        if "overflow" in str(error):  # torch raises for a weight of more than 2**63 bytes.
            raise refused("a weight of more than 2**63 bytes") from error
        raise


def check_model(section: ModelSection) -> None:
    """Check the model's configuration, as `build_model` does, before anything else is read; a `source` on the Hub is skipped."""
    if section.source is None or Path(section.source).expanduser().is_dir():
        read_configuration(section)


def image_processor(section: ModelSection, model: Any) -> tuple[Any, str]:
    """Return the model's image processor, or ViT's for its size, and its picture mode (L or RGB). Raises `ConfigError`."""
    if model is not None:
        made, directory = getattr(model, "config", None), None
    else:
        made, _, directory = read_configuration(section)
    mode = "L" if getattr(made, "num_channels", 3) == 1 else "RGB"
    if directory is not None and (directory / "preprocessor_config.json").is_file():
        with _library_errors("model.source"):
            own = transformers.AutoImageProcessor.from_pretrained(
                directory, local_files_only=True, trust_remote_code=section.trust_remote_code
            )
        return own, mode
    size = getattr(made, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    kinds: dict[str, Any] = {} if mode == "RGB" else {"image_mean": [0.5], "image_std": [0.5]}
    return transformers.ViTImageProcessorPil(size={"height": height, "width": width}, **kinds), mode


def class_names(section: ModelSection, model: Any) -> tuple[tuple[str, ...], bool]:
    """Return the names of a classifier's classes by number, and whether these are known: of a trained head, or the user's. There
    are none for a new head without a number of classes, for less than two, and for a model that is built later."""
    made = getattr(pretrained_of(model), "config", None) if model is not None else read_configuration(section)[0]
    names: dict[int, str] = dict(getattr(made, "id2label", None) or {})
    known = any(name != f"LABEL_{number}" for number, name in names.items())
    if model is None:
        given, stored = {*(section.config or {})}, getattr(made, "architectures", None)
        trained = AUTO_CLASSES[section.head].removeprefix("AutoModel") in str(stored)
        trained |= any(isinstance(each, str) for each in section.wanted_adapters.values())
        known = trained or not given.isdisjoint(("id2label", "label2id")) or (known and not stored)
        names = names if known or "num_labels" in given else {}
    return (tuple(str(names[each]) for each in sorted(names)), known) if len(names) > 1 else ((), False)


@contextmanager
def _library_errors(where: str, before: str = "") -> Iterator[None]:
    """Raise the library's errors in the block as `ConfigError` for the key `where`, prefixed by `before`."""
    with library_errors(where, before):
        try:
            yield
        except StrictDataclassError as error:
            if error.__cause__ is None:  # The field's check raised the cause.
                raise
            raise ConfigError(before + str(error.__cause__), where=where) from error


def read_configuration(section: ModelSection, tokenizer: Tokenizer | None = None) -> tuple[Any, Any, Path | None]:
    """Return the library's configuration of a model, the class that builds it, and the directory of its source, or None."""
    settings, trusted = dict(section.config or {}), section.trust_remote_code
    directory = None if section.source is None else directory_of(section.source, section.revision)
    if directory is None:
        made = _from_fields(settings, tokenizer)
    else:
        made = _from_directory(directory, settings, trust_remote_code=trusted)
        # Saved adapters refer to the base model by this name, and code of the directory is found by it.
        made.name_or_path = directory if trusted else section.source
    _check_values(made)
    return made, _automatic_class(made, section.head, trust_remote_code=trusted), directory


def _automatic_class(made: Any, head: Head, *, trust_remote_code: bool) -> Any:
    automatic = getattr(transformers, AUTO_CLASSES[head])
    own_code = getattr(made, "auto_map", None) or {}
    if type(made) in automatic._model_mapping or (trust_remote_code and automatic.__name__ in own_code):
        return automatic
    if automatic.__name__ in own_code:
        why = f"transformers has no {head} model of {made.model_type}, and the code that its directory brings is not run"
        raise ConfigError(f"{why}; read that code, and set model.trust_remote_code: true to have it run", where="model.source")
    heads = [h for h, name in AUTO_CLASSES.items() if type(made) in getattr(transformers, name)._model_mapping]
    raise ConfigError(f"{type(made).__name__} has no {head} model; it has {', '.join(heads) or 'no known one'}", where="model.head")


def _from_fields(settings: dict[str, Any], tokenizer: Tokenizer | None) -> Any:
    where = "model.config"
    known = sorted(transformers.CONFIG_MAPPING)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ConfigError("model_type is missing, and model.source gives no config.json", where=where)
    if kind not in transformers.CONFIG_MAPPING:
        hint = nearest_of(kind, known, cutoff=0.5) or f"; there are {len(known)}, such as llama, gpt2, bert"
        raise ConfigError(f"model_type: {kind!r} is not known to transformers{hint}", where=where)
    cls = transformers.CONFIG_MAPPING[kind]
    _check_fields(cls, settings)
    with _library_errors(where):
        if tokenizer is not None and "vocab_size" in _fields(cls):
            if settings.get("vocab_size") is None:
                settings["vocab_size"] = tokenizer.vocab_size
            # The default special ids of the class are of another vocabulary than the tokenizer's.
            for name, number in special_ids(tokenizer).items():
                if number is None and (_fields(cls).get(name) is int or _NEEDS_PADDING.search(_code_of(cls))):
                    number = getattr(cls, name, None)
                settings.setdefault(name, None if number is None or number >= settings["vocab_size"] else number)
        return AutoConfig.for_model(kind, **settings)


def _from_directory(directory: Path, settings: dict[str, Any], *, trust_remote_code: bool) -> Any:
    if (directory / ADAPTER_CONFIG).is_file():
        merged = f"merge them (`zeromesh checkpoint export {directory} OUT --merge`), and give OUT"
        if not (directory / MANIFEST).is_file():
            load = f"from peft import AutoPeftModelForCausalLM as Model; Model.from_pretrained({str(directory)!r})"
            merge = f"{load}.merge_and_unload().save_pretrained('OUT')"
            merged = f'merge them (`python -c "{merge}"`), and give OUT, with data.tokenizer={directory} if it has a tokenizer'
        raise ConfigError(f"{directory} has adapters, which are not loaded from there; {merged}", where="model.source")
    if not (directory / "config.json").is_file():
        cure = "give a directory that save_pretrained of a transformers model wrote"
        raise ConfigError(f"{directory} has no config.json; {cure}", where="model.source")
    with _library_errors("model.source", f"{directory / 'config.json'}: "):
        stored = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    kind = settings.pop("model_type", stored.model_type)
    if kind != stored.model_type:
        raise ConfigError(f"model_type: {kind!r} is not {stored.model_type!r} of {directory}; leave it out", where="model.config")
    _check_fields(type(stored), settings, vars(stored))
    # The model computes with decoded weights, and the stored head and its names fit their own number of classes.
    differs = settings.get("num_labels") not in (None, stored.num_labels)
    dropped = {"quantization_config", *(("id2label", "label2id", "architectures") if differs else ())}
    values = {name: value for name, value in stored.to_dict().items() if name not in dropped}
    with _library_errors("model.config"):
        return type(stored).from_dict({**values, **settings})


def _fields(cls: type) -> dict[str, Any]:
    declared = {each.name: each.type for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    return dict.fromkeys([*getattr(cls, "attribute_map", {}), *_EXTRA_KEYS]) | declared


def _code_of(cls: type) -> str:
    """Return the source of a configuration's class and its models."""
    return "".join(path.read_text(encoding="utf-8") for path in Path(inspect.getfile(cls)).parent.glob("*.py"))


_NEEDS_PADDING = re.compile(r"def (create_position_ids|_?shift_(tokens_)?right)")  # positions or answers begin at the token
_CONFIG_READS = re.compile(r"""\bconfig\.([a-z]\w*)|\bgetattr\(\s*[\w.]*config,\s*["'](\w+)["']""")


def _check_fields(cls: type, settings: dict[str, Any], stored: Container[str] = ()) -> None:
    """Raise `ConfigError` for settings that neither class, modeling code nor `stored` values know; whole floats become integers."""
    declared, problems = _fields(cls), []
    # The modeling code may read attributes that the class does not declare.
    reads = {one or other for one, other in _CONFIG_READS.findall(_code_of(cls))}
    known = declared.keys() | {name for name in reads if not callable(getattr(cls, name, None))}
    for name, value in settings.items():
        if name not in known and name not in stored:
            problems.append(f"{name} is not a field of {cls.__name__}{nearest_of(name, known)}")
        elif declared.get(name) in (int, int | None):
            settings[name] = int_if_whole(value)
    if (labels := settings.get("num_labels")) is not None:
        settings["num_labels"] = number = int_if_whole(labels)
        if type(number) is not int or not 1 <= number <= _MOST_LABELS:
            problems.append(f"num_labels: got {labels!r:.40}; give a number from 1 to {_MOST_LABELS:,}")
    if problems:
        raise ConfigError(problems, where="model.config")


def _check_values(made: Any) -> None:
    """Raise `ConfigError` for values that the library accepts but that fail later or mean something else."""
    text = text_part(made)
    for each in (made, text):
        if not isinstance(dtype := getattr(each, "dtype", None), str | dict | torch.dtype | None):
            raise ConfigError(f"dtype: got {dtype!r:.40}; give a dtype of torch, such as bfloat16", where="model.config")
    values = {name: integer(text, name) for name in _COUNTS}
    small = {name: value for name, value in values.items() if value is not None and value < 1}
    problems = [f"{name} is {value}; give 1 or more" for name, value in small.items()]
    problems += [
        f"{name} is {value}; at most {most} are built"
        for name, value in numbers(made.to_dict())
        if type(value) is int
        and value > (most := _MOST_MODULES if _MODULE_COUNTS.search(name.rpartition(".")[2]) else _MOST_ELEMENTS)
    ]
    if not getattr(made, "return_dict", True):
        problems.append("return_dict is false, and outputs are read by their names; leave it out, or set it to true")
    heads, groups = values["num_attention_heads"], values["num_key_value_heads"]
    if not problems and heads and groups and heads % groups:
        problems.append(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    for name in ("hidden_act", "activation_function"):
        value = getattr(text, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            near = nearest_of(value, ACT2FN, ("gelu", "relu", "silu"), cutoff=0.5)
            problems.append(f"{name} {value!r} is not known to transformers{near}")
    if problems:
        raise ConfigError(problems, where="model.config")
