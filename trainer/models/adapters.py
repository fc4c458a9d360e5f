"""PEFT's adapters (Hu et al., "LoRA", 2021): found by attributes, as PEFT is imported only to add them to a model in files."""

import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file
from torch import nn
from torch.func import functional_call

from zeromesh.checkpoint.io.format import parse_json
from zeromesh.checkpoint.store import newest_at
from zeromesh.errors import ConfigError, counted, library_errors, some
from zeromesh.files import read_whole
from zeromesh.flat.codec import CODECS, Codec
from zeromesh.options import EncodedWeights
from zeromesh.trainer.config.sections.base import nearest_of
from zeromesh.trainer.config.sections.model import Head, ModelSection, WeightsSection
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.models.unread_weights import unread_weights
from zeromesh.units.plan import embedding_of, encoded_names
from zeromesh.weight_init import weight_sources
from zeromesh.weight_init.weight_sources import BuiltModel, ParameterSource, is_pretrained_model, seeded_cpu

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def is_peft_model(model: nn.Module) -> bool:
    return callable(getattr(type(model), "get_base_model", None)) and bool(getattr(model, "peft_config", None))


def is_adapted(model: nn.Module) -> bool:
    """Return True if `model` is a `PeftModel`, or a Hugging Face model that adapters were added to (`model.add_adapter`)."""
    return is_peft_model(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def pretrained_of(model: Any) -> Any | None:
    """Return the Hugging Face model that a module is or wraps with adapters; None for any other module."""
    inside = model.get_base_model() if is_peft_model(model) else model
    return inside if is_pretrained_model(inside) else None


def output_layer(model: Any) -> Any:
    """Return the output embedding of a Hugging Face model, or the copy that PEFT trains of it (`modules_to_save`)."""
    head: Any = embedding_of(model, "output")
    copies = getattr(head, "modules_to_save", None)
    active: list[str] = list(getattr(head, "active_adapters", ()))
    return copies[active[0]] if isinstance(copies, nn.ModuleDict) and len(active) == 1 and active[0] in copies else head


def learns_prompts(model: Any) -> bool:
    """Return True if an adapter of `model` learns prompt tokens or prefixes of keys and values."""
    return any(getattr(settings, "is_prompt_learning", False) for settings in model.peft_config.values())


def adapter_names(model: Any) -> frozenset[str]:
    """Return the names of the parameters and buffers of a saved adapter: its tensors and other trained ones."""
    adapters = set(model.peft_config)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return frozenset(name for name, tensor in tensors if tensor.requires_grad or adapters & set(name.split(".")))


def description_of_adapters(model: Any) -> dict[str, Any]:
    """Return the settings of a model's adapters that a resumed run must match, by flat keys."""
    passing = {"base_model_name_or_path", "revision", "inference_mode", "peft_version"}
    return {
        f"adapter.{name}.{key}": sorted(value) if isinstance(value, set) else value
        for name, settings in model.peft_config.items()
        for key, value in settings.to_dict().items()
        if key not in passing and value is not None
    }


def require_adapters_fit(model: Any, stages: int) -> None:
    """Raise `ConfigError` for adapters whose layers share what one of several pipeline stages would have."""
    if stages == 1 or not is_adapted(model):
        return
    if shared := sorted({str(each.peft_type).rpartition(".")[2] for each in model.peft_config.values()} & _SHARED):
        why = f"the layers of {some(shared)} share tensors, and each stage has but its own"
        raise ConfigError(f"{why}; set it to 1, or use LORA", where="parallel.pipeline")


_TABLES = read_texts(Path(__file__).with_suffix(".yaml"))
_METHODS, _SHARED, _BASE_HEADS, MERGED = (frozenset(_TABLES[each].split()) for each in ("methods", "shared", "heads", "merged"))
CHANGING = ("pissa", "olora")
"""The beginnings of initialisations that subtract the adapters from the base, of which the rest is then encoded."""


def adapter_configs(section: ModelSection) -> dict[str, Any]:
    """Return PEFT's configuration of each adapter that a `model` section asks for, by name, the trained one first. Raises
    `ConfigError` without PEFT, for methods that are not trained here, and for settings that PEFT does not have or take."""
    names = sorted(wanted := section.wanted_adapters, key=lambda name: name != section.trained_adapter)
    return {name: _config_of(wanted[name], adapters_key(section, name)) for name in names}


def adapters_key(section: ModelSection, name: str) -> str:
    return "model.lora" if section.lora is not None else f"model.adapters.{name}"


def _config_of(wanted: str | Mapping[str, Any], where: str) -> Any:
    peft = import_peft(where)
    with library_errors(where), warnings.catch_warnings(action="ignore"):
        settings = settings_of_saved(wanted, where) if isinstance(wanted, str) else {"peft_type": "LORA", **wanted}
        method = str(settings["peft_type"]).upper()
        if method not in _METHODS or method not in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING:
            why = _TABLES["methods refused"].get(method, "nothing shows that it is trained here as by PEFT alone")
            raise ConfigError(f"peft_type {method}: {why}; there are {', '.join(sorted(_METHODS))}", where=where)
        kind = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[method]
        if not isinstance(wanted, str):
            _check_settings(kind, wanted, where)
        made = peft.PeftConfig.from_peft_type(**{**settings, "peft_type": method})
    start = getattr(made, "init_lora_weights", None)
    refused = {f"init_lora_weights: {each}": why for each, why in _TABLES["initialisations"].items() if each == start}
    untried = (each for each in _TABLES["untried"].split() if getattr(made, each, None))
    refused |= dict.fromkeys(untried, "it changes more than is trained; leave it out")
    if refused:
        raise ConfigError([f"{name} is refused, as {why}" for name, why in refused.items()], where=where)
    return made


def _check_settings(kind: Any, wanted: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for settings that PEFT's class has not, or not of this type; PEFT itself would ignore or keep them."""
    types, problems = get_type_hints(kind) | {"peft_type": str}, []
    types |= {"lora_alpha": float} if "lora_alpha" in types else {}  # PEFT multiplies by it.
    for name, value in wanted.items():
        if name not in types:
            problems.append(f"{name} is not a field of {kind.__name__}{nearest_of(name, types)}")
            continue
        try:  # Files have lists where PEFT has tuples.
            TypeAdapter(types[name]).validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems.append(f"{name}: got {value!r:.60}; {error.errors()[0]['msg']}")
    if problems:
        raise ConfigError(problems, where=where)


def adapter_directory(path: str, where: str) -> Path:
    """Return the directory of a saved adapter: `path`, or the newest checkpoint of a run. Raises `ConfigError` without one."""
    found = Path(path).expanduser()
    for each in (found, newest_at(found)):
        if (each / ADAPTER_CONFIG).is_file():
            if not (each / ADAPTER_WEIGHTS).is_file():
                raise ConfigError(f"{each} has no {ADAPTER_WEIGHTS}; save the adapter again", where=where)
            return each
    raise ConfigError(f"{path!r} is no directory with {ADAPTER_CONFIG}, and no run with adapters", where=where)


def saved_with_base(directory: Path) -> dict[str, Any]:
    """Return the keys of `model` by which a saved adapter is opened with its base; no `source` if it names none."""
    settings = parse_json(directory / ADAPTER_CONFIG, read_whole(directory / ADAPTER_CONFIG))
    base = {"source": settings.get("base_model_name_or_path"), "revision": settings.get("revision")}
    named = sorted(path.parent for path in directory.glob(f"*/{ADAPTER_CONFIG}"))
    adapters = {"default": str(directory)} | {path.name: str(path) for path in named}
    return {name: each for name, each in base.items() if each} | {"adapters": adapters}


def settings_of_saved(path: str, where: str) -> dict[str, Any]:
    """Return PEFT's settings of a saved adapter, as `model.adapters` takes them."""
    file = adapter_directory(path, where) / ADAPTER_CONFIG
    settings = {name: each for name, each in parse_json(file, read_whole(file)).items() if each is not None}
    return {**settings, "inference_mode": False}


def add_adapters(
    built: BuiltModel, section: ModelSection, seed: int, compute: torch.dtype = torch.float32, *, inside: bool = False
) -> BuiltModel:
    """Return `built` with the adapters of a `model` section, drawn from `seed` or read from their directories; only the trained one
    and a classifier's head are trained. An initialisation that reads frozen weights reads them from the source of `built`, one at a
    time, with the values that they have once they are encoded in the dtype `compute`, which the adapters' buffers get. With
    `inside`, the model stays one of transformers, without PEFT's wrapper, as by its `add_adapter`. Raises `ConfigError` without
    PEFT, for a model that is not of transformers or has adapters, for targets that it lacks, and for adapters of another base."""
    if not section.wanted_adapters:
        return built
    configs = adapter_configs(section)
    base: Any = built.model
    where = "model.lora" if section.lora is not None else "model.adapters"
    if is_adapted(base):
        raise ConfigError("the model has adapters already; leave this out, or give the model without them", where=where)
    if not is_pretrained_model(base):
        raise ConfigError(f"adapters are for models of transformers, and this is a {type(base).__name__}", where=where)
    names = {id(tensor): name for name, tensor in [*base.named_parameters(), *base.named_buffers()]}
    left_out = _complete(configs, base, section.head)
    base.requires_grad_(False)
    changing = any(str(getattr(each, "init_lora_weights", "")).startswith(CHANGING) for each in configs.values())
    read = _frozen_values(base, built.source, compute, None if changing else encoded_weights(section.weights))
    with unread_weights(base, read) as weights:
        model = _with_adapters(base, configs, seed, section)
    for buffer in model.buffers():
        if id(buffer) not in names and buffer.is_floating_point():  # PEFT gives them the base's dtype.
            buffer.data = buffer.data.to(compute)
    changed = [each.changed for each in weights.values() if each.changed is not None]
    for name, layer in model.named_modules():
        is_wrapped = hasattr(layer, "get_base_layer") and hasattr(layer, "base_layer")
        if is_wrapped and not _maps_last_dim(plain := layer.get_base_layer()):
            what = f"{name.removeprefix('base_model.model.')} cannot have adapters"
            why = f"a {type(plain).__name__} does more than to multiply by its weight; name other layers"
            raise ConfigError(f"{what}, as {why}", where=f"{where}.targets" if where == "model.lora" else where)
    for name, wanted in section.wanted_adapters.items():
        if isinstance(wanted, str):
            _load_adapter(model, name, wanted, adapters_key(section, name), read)
        else:
            _check_matches(wanted, model, adapters_key(section, name))
    alone = [name for name in left_out if not [*base.get_submodule(name).children()]]
    notes = [f"no adapters on {some(alone)}"] if alone else []
    if changed:
        size = sum(each.nbytes for each in changed)
        what = f"the adapters' initialisation changes {counted(len(changed), 'weight')} of the base"
        notes.append(f"{what}, which each rank holds ({human_bytes(size)}) until it has its part")
    if inside:
        if learns_prompts(model):
            problem = "adapters that learn prompts are no part of the model itself; load them with PEFT (PeftModel.from_pretrained)"
            raise ConfigError(problem, where=where)
        base._hf_peft_config_loaded, model = True, base
    return BuiltModel(model=model, source=AdaptedSource(built.source, model, names), notes=(*built.notes, *notes))


def _complete(configs: Mapping[str, Any], base: Any, head: Head) -> list[str]:
    """Complete PEFT's configurations: the task, a head that is trained whole, and layers without adapters, which are returned."""
    children = [(name, each) for name, each in base.named_children() if name != base.base_model_prefix]
    heads = [name for name, each in children if not is_pretrained_model(each) and [*each.parameters()]]
    left_out: list[str] = []
    for each in configs.values():
        each.task_type = each.task_type or _TABLES["tasks"].get(head)
        if head not in _BASE_HEADS and getattr(each, "modules_to_save", "") is None:
            each.modules_to_save = heads
        if getattr(each, "target_modules", None) == "all-linear" and getattr(each, "exclude_modules", "") is None:
            left_out = _excluded_modules(base)
            each.exclude_modules = left_out or None
    return left_out


def _with_adapters(base: Any, configs: Mapping[str, Any], seed: int, section: ModelSection) -> Any:
    peft, (first, *others) = import_peft("model.lora"), configs
    name = first
    try:
        with seeded_cpu(seed, "adapters"), warnings.catch_warnings(action="ignore", category=FutureWarning):
            # PEFT may overwrite an adapter with such a name when it loads it.
            warnings.filterwarnings("error", message="Adapter name .* should not be contained")
            model = peft.get_peft_model(base, configs[first], adapter_name=first, autocast_adapter_dtype=False)
            for name in others:
                model.add_adapter(name, configs[name], autocast_adapter_dtype=False)
            if others:
                model.set_adapter(first)
    except (*weight_sources.INITIALISER_ERRORS, UserWarning) as error:
        reason, targets = str(error).splitlines()[0], getattr(configs[name], "target_modules", None)
        if reason.startswith("No modules were targeted"):
            reason = f"no module that {targets} means is in {type(base).__name__}, beside a head that is trained whole"
        key = adapters_key(section, name)
        named = f"{key}.targets" if key == "model.lora" else f"{key}.target_modules"
        hint = f"; name modules in {named} that can have them" if "module" in reason else ""
        raise ConfigError(f"no adapters can be added: {reason}{hint}", where=key) from error
    return model


def encoded_weights(section: WeightsSection | None) -> EncodedWeights | None:
    """Return the engine's option of a section `model.weights`, None for none."""
    if section is None:
        return None
    row = CODECS[section.codec]
    codec = Codec(name=section.codec, block=section.block or row.block, nested=section.nested and row.nests)
    return EncodedWeights(codec=codec, skip=section.skip)


def _frozen_values(
    base: nn.Module, source: ParameterSource, compute: torch.dtype, encoded: EncodedWeights | None
) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a parameter of the base model in its dtype, which may be written to. Those that are `encoded`
    once PEFT has put a layer around theirs have the values that the run computes with in the dtype `compute`."""
    parameters, decoded = dict(base.named_parameters(remove_duplicate=False)), set[str]()
    first = {each: name for name, each in base.named_parameters()}  # A tied one is in the source once.
    for name in () if encoded is None else encoded_names(base, replace(encoded, skip=()), of_experts=False):
        later = f"base_model.model.{name.removesuffix('.weight')}.base_layer.weight"
        if encoded is not None and not any(fnmatchcase(later, pattern) for pattern in encoded.skip):
            decoded.add(name)

    def read(name: str) -> torch.Tensor:
        like = parameters[name]
        name = first[like]

        def part(start: int, end: int) -> torch.Tensor:
            return source.read(name, start, end).to(device="cpu", dtype=compute)

        if encoded is None or name not in decoded:
            return source.read(name, 0, like.numel()).to(device="cpu", dtype=like.dtype, copy=True).view(like.shape)
        found = source.encoded(name, encoded.codec, compute) or encoded.codec.encode(part, like.numel())
        # A copy has been written to by nobody.
        return encoded.codec.decoded(found, like.shape, compute).to(like.dtype, copy=True)

    return read


def _check_matches(wanted: Mapping[str, Any], model: Any, where: str) -> None:
    """Raise `ConfigError` for a name in an adapter's settings that matches nothing; those of layers may, in small copies."""
    modules, tuner = [name for name, _ in model.named_modules()], model.base_model
    adapted = [*getattr(tuner, "targeted_module_names", modules), *getattr(tuner, "targeted_parameter_names", ())]
    for key, what in _TABLES["matched"].items():
        begin = ".*" if key == "modules_to_save" else r"(.*\.)?"  # As PEFT matches.
        names = modules if what == "module" else adapted
        for each in given if isinstance(given := wanted.get(key), list | dict) else ():
            pattern = each if key.endswith("pattern") else re.escape(each)
            if not re.search(r"\b\d+\b", each) and not any(re.fullmatch(f"{begin}({pattern})", name) for name in names):
                there = [*modules, *(name for name, _ in model.named_parameters())]
                near = nearest_of(each, {".".join(name.split(".")[-1 - each.count(".") :]) for name in there})
                raise ConfigError(f"{key}: {each!r} matches no {what} of the model{near}", where=where)


def _load_adapter(model: Any, name: str, saved: str, where: str, read: Callable[[str], torch.Tensor]) -> None:
    """Give an adapter the values of a saved one; `read` reads the base. Raises `ConfigError` for an adapter of another base."""
    peft, directory = import_peft(where), adapter_directory(saved, where)
    path = directory / ADAPTER_WEIGHTS
    with library_errors(where, f"{path}: "):
        from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers as convert

        own = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        stored = convert(model, model.peft_config[name], load_file(path), name)  # Files of transformers 4 have one for each expert.
    base: Any = pretrained_of(model)
    of = f"{type(base).__name__} {getattr(base, 'name_or_path', '')}".rstrip()
    problems = []
    for key in sorted(own.keys() | stored.keys()):
        # PEFT saves an embedding of the base beside adapters of it.
        inside = key.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if key not in stored:
            problems.append(f"no {key}, which {of} needs")
        elif key in own and own[key].shape != stored[key].shape:
            problems.append(f"{key} of {list(stored[key].shape)}, and {of} needs {list(own[key].shape)}")
        elif key not in own and not _is_same(stored[key], read, inside):
            problems.append(f"{key}, for which {of} has no place, or other values")
    if problems:
        raise ConfigError(f"{directory} is an adapter of another base: it has {some(problems, 2)}", where=where)
    # A copy of a module of the base has its values in the source, so that it takes no memory; these are others.
    for key, parameter in [*model.named_parameters()]:
        if parameter.is_meta and f".{name}." in key:
            owner, _, leaf = key.rpartition(".")
            copy = nn.Parameter(torch.empty(parameter.shape), requires_grad=parameter.requires_grad)
            model.get_submodule(owner)._parameters[leaf] = copy
    with library_errors(where, f"{path}: "):
        peft.set_peft_model_state_dict(model, {key: stored[key] for key in own}, adapter_name=name)


def _is_same(stored: torch.Tensor, read: Callable[[str], torch.Tensor], name: str) -> bool:
    """Return True if a parameter of the base has the values that are stored."""
    try:
        values = read(name)
    except KeyError:
        return False
    return values.shape == stored.shape and torch.equal(values.to(stored.dtype), stored)


def _excluded_modules(base: nn.Module) -> list[str]:
    """Return the modules that PEFT would match for "all-linear" and that cannot have adapters: linear layers with another
    computation, and modules with children that share the last part of a linear layer's name."""
    linear = {name for name, each in base.named_modules() if isinstance(each, nn.Linear)}
    leaves = {name.rpartition(".")[2] for name in linear}
    alike = [(name, each) for name, each in base.named_modules() if name.rpartition(".")[2] in leaves]
    return [name for name, each in alike if (not _maps_last_dim(each) if name in linear else [*each.children()])]


def _maps_last_dim(layer: nn.Module) -> bool:
    """Return False for a linear layer that does not map [..., in] to [..., out], such as a router or a grouped layer."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return True
    meta = {name: torch.empty_like(each, device="meta") for name, each in layer.named_parameters()}
    try:
        out = functional_call(layer, meta, layer.weight.new_empty(1, 1, layer.in_features, device="meta"))
    except weight_sources.INITIALISER_ERRORS:
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 1, layer.out_features)


def import_peft(where: str = "model.lora") -> Any:
    try:
        import peft
        import peft.tuners.lora
    except ImportError as error:
        raise ConfigError("adapters need the package peft: pip install peft", where=where) from error
    return peft


class AdaptedSource(ParameterSource):
    """The values of adapters, which are kept here, and of their base from its `source`; `names` are those there, by their ids."""

    def __init__(self, source: ParameterSource, model: nn.Module, names: Mapping[int, str]) -> None:
        self._source = source
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        # The trained copy of a head, `head.modules_to_save.default.weight`, starts from `head.original_module.weight`.
        origins = {name: getattr(each, "copied_from", each) if each.is_meta else each for name, each in tensors.items()}
        self._inside = {name: names[id(each)] for name, each in origins.items() if id(each) in names}
        self._adapters = weight_sources.BuiltSource(model, without=self._inside)
        self._readers = Counter(self._inside[name] for name, _ in model.named_parameters() if name in self._inside)

    def origin(self, fqn: str) -> tuple[ParameterSource, str]:
        return (self._source, self._inside[fqn]) if fqn in self._inside else (self._adapters, fqn)

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        source, name = self.origin(fqn)
        return source.read(name, start, end)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        self._source.expect((self._inside[name], start, end) for name, start, end in ranges if name in self._inside)

    def buffer(self, name: str) -> torch.Tensor | None:
        return self._source.buffer(self._inside[name]) if name in self._inside else None

    def release(self, fqn: str) -> None:
        source, name = self.origin(fqn)
        self._readers[name] -= source is self._source
        if self._readers[name] <= 0:
            source.release(name)

    def close(self) -> None:
        self._source.close()
        self._adapters.close()
