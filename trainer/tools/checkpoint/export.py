"""A checkpoint's model as a plain Hugging Face model directory, or an adapter for PEFT; a few weights are in memory at a time."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from zeromesh.checkpoint.io.format import TensorSpec, parse_json, spec_of
from zeromesh.checkpoint.io.reader import CheckpointReader, copy_file
from zeromesh.checkpoint.store import write_directory, write_weights
from zeromesh.errors import CheckpointError, ConfigError, counted, some
from zeromesh.files import read_whole, write_whole
from zeromesh.flat.codec import CODECS, GROUP, Codec, EncodedParameter
from zeromesh.options import EncodedWeights
from zeromesh.trainer.checkpoints.trainer_state import EVALUATED, NAME, evaluates_average
from zeromesh.trainer.config.load import Consent, load_config
from zeromesh.trainer.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, encoded_weights, import_peft, pretrained_of
from zeromesh.trainer.models.hub_form import HubForm, HubNames, in_files
from zeromesh.trainer.models.save_pretrained import BASE_MODEL
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.step_metrics import CONFIG
from zeromesh.trainer.tools.checkpoint.reading import Throughput, read_tensors
from zeromesh.trainer.weights.handoff import Named
from zeromesh.trainer.weights.quantized_files import stored_form
from zeromesh.trainer.weights.safetensors_source import quiet_library, read_class
from zeromesh.units.plan import encoded_names, parts_in_fp32
from zeromesh.weight_init.weight_sources import canonical_names

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PREFIX = "base_model.model."
"""The prefix of module names in PEFT's files, which adapters that are inserted in place lack."""

OnRead = Callable[[int], object]
_ChosenTensors = dict[str, tuple[TensorSpec, torch.dtype]]
"""The stored tensor and the target dtype of every tensor of the model, in the order of reading."""


def export_checkpoint(
    directory: Path, out: Path, dtype: str, console: Console, *, merge: bool = False, decoded: bool = False, ema: bool = False
) -> None:
    """Write the model of a checkpoint to `out`: `dtype` is a name, or `keep` for the weights in the compute dtype. Other dtypes are
    converted from the master weights, where there are any. Of a model with adapters only these are written, or with `merge` the
    model with merged weights: frozen ones as their source has them, or `decoded` from the codes that the run computed with. A
    `dtype` nf4 or fp4 writes matrices of linear layers of a merged model as bitsandbytes does, and experts in 16 bits. `ema` takes
    averages. Raises `ConfigError` where the dtype cannot hold a weight, `CheckpointError` for damage, and as `write_directory`."""
    reader = CheckpointReader(directory)
    rows = ((name, row) for name, row in CODECS.items() if name == dtype and row.codes_in_byte == 2)
    codec = next((Codec(name=name, block=row.block, nested=True) for name, row in rows), None)
    if (codec or decoded) and not merge:
        raise ConfigError(f"{f'--dtype {dtype}' if codec else '--base decoded'} is for merged models; give --merge too")
    dtype = "keep" if codec else dtype
    chosen = _choose_tensors(reader, dtype, ema=ema)
    adapted = ADAPTER_CONFIG in reader.manifest.files
    if merge and not adapted:
        raise ConfigError(f"--merge is for runs with adapters, and {directory} has none; leave it out")
    if ema and adapted and not merge:
        raise ConfigError("--ema writes whole models: with adapters, give --merge too")
    moved = Throughput(console, "exporting", sum(source.nbytes for source, _ in chosen.values()))
    nbytes = sum(source.numel * to.itemsize for source, to in chosen.values())
    with write_directory(out, nbytes) as folder, quiet_library():
        for path in reader.manifest.files:
            weights = path.endswith((".safetensors", ".safetensors.index.json")) and path != ADAPTER_WEIGHTS
            if not (weights or path in (NAME, EVALUATED) or reader.manifest.is_elsewhere(path)):
                copy_file([reader], path, folder)
        if adapted and not merge:
            _convert_adapter(folder, _DTYPES.get(dtype))
            what = "the adapter alone"
        else:
            if merge:
                tensors, values = _merged_tensors(reader, chosen, folder, dtype, moved, decoded=decoded)
            else:
                tensors, values = _hub_tensors(reader, chosen, folder, moved, console)
            if dtype != "keep" and (folder / "config.json").is_file():
                # `from_pretrained` loads the weights in this dtype.
                _set_keys(folder / "config.json", dtype=dtype)
            if codec is not None:
                tensors, values = _in_four_bits(codec, folder, tensors, values)
            specs = [spec_of(name, each) for name, each in tensors.items()]
            count = sum(path.endswith(".safetensors") for path in write_weights(folder, specs, values, lambda: None))
            what = f"{'merged into ' if merge else ''}{counted(count, 'file')}, read {moved}"
    console.note(f"{out}: step {reader.manifest.step}, {codec.name if codec else dtype}, {what}")


def _choose_tensors(reader: CheckpointReader, dtype: str, *, ema: bool) -> _ChosenTensors:
    kinds: tuple[str, ...] = ("model",) if dtype == "keep" else ("model", "master")
    kept = {t.name: t.dtype for t in reader.manifest.tensors if t.kind == "model"}
    # Frozen weights in their source directory may have another dtype than the compute dtype.
    away = [t for t in reader.manifest.tensors if reader.manifest.is_elsewhere(t.path)]
    compute = getattr(torch, str(reader.manifest.layout.get("compute")), torch.float32)
    kept |= {spec.name: compute for spec in away if spec.dtype.is_floating_point}
    if ema or evaluates_average(reader):
        kinds += ("ema",)
        if not any(t.kind == "ema" for t in reader.manifest.tensors):
            raise ConfigError(f"{reader.directory} has no averaged weights (ema.decay); leave --ema out")
    found = {t.name: t for kind in kinds for t in reader.manifest.tensors if t.kind == kind}
    if not found:
        raise CheckpointError(f"{reader.directory} holds no model")
    wanted = _DTYPES.get(dtype)
    stored = sorted(found.values(), key=lambda tensor: (tensor.path, tensor.begin))
    return {t.name: (t, wanted if wanted is not None and t.dtype.is_floating_point else kept[t.name]) for t in stored}


def _in_four_bits(
    codec: Codec, folder: Path, tensors: Mapping[str, torch.Tensor], values: Named
) -> tuple[Mapping[str, torch.Tensor], Named]:
    """Return the meta tensors, and names and values, of a model in `folder` with its linear layers in 4 bits as bitsandbytes writes
    them, and mark its configuration. Raises `ConfigError` for a model that transformers cannot build."""
    cls, config, reason = read_class(folder)
    if cls is None:
        raise ConfigError(f"{reason}; export the model in 16 bits", where="--dtype")
    with torch.device("meta"):
        model: Any = cls(config).requires_grad_(False)
    chosen = encoded_names(model, EncodedWeights(codec=codec), of_experts=False) & tensors.keys()
    # transformers puts linear layers of bitsandbytes in the place of GPT-2's, which have their weights transposed.
    turned = chosen & {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, Conv1D)}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": codec.name}
    settings |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": str(config.dtype).removeprefix("torch.")}
    _set_keys(folder / "config.json", quantization_config=settings)

    def encoded(given: Iterable[tuple[str, torch.Tensor]]) -> Named:
        for name, each in given:
            value = each.t() if name in turned else each
            yield from (_in_codes(name, value, codec) if name in chosen else {name: each}).items()

    return dict(encoded(tensors.items())), encoded(values)


def _in_codes(name: str, tensor: torch.Tensor, codec: Codec) -> dict[str, torch.Tensor]:
    """Return the tensors by which one is stored, without values for one on the meta device."""
    if tensor.is_meta:
        numel, device = tensor.numel(), tensor.device
        codes = torch.empty(codec.code_bytes(numel), dtype=torch.uint8, device=device)
        scales = torch.empty(codec.blocks(numel), dtype=codec.scale_dtype, device=device)
        parameter = EncodedParameter(codes=codes, scales=scales, tables=torch.zeros(-(-codec.blocks(numel) // GROUP) + 1))
    else:
        parameter = codec.encode_whole(tensor)
    return stored_form(name, tensor.shape, tensor.dtype, codec, parameter, checked=False)


def _set_keys(path: Path, **keys: Any) -> None:
    """Set keys of a model's configuration, a dtype also in the configurations of its parts."""
    content = {**parse_json(path, read_whole(path)), **keys}
    if "dtype" in keys:
        _replace_dtype(content, keys["dtype"])
    write_whole(path, json.dumps(content, indent=2).encode() + b"\n")


def _replace_dtype(content: dict[str, Any], dtype: str) -> None:
    for name, value in content.items():
        if name in ("dtype", "torch_dtype") and isinstance(value, str):
            content[name] = dtype
        elif name.endswith("config") and isinstance(value, dict):
            _replace_dtype(value, dtype)


def _convert(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype. Raises `ConfigError` where a finite number would become infinite."""
    found = tensor.to(dtype)
    if tensor.is_floating_point() and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max:
        lost = tensor[found.isinf() & tensor.isfinite()].abs()
        if lost.numel():
            most = f"{name} has {lost.numel():,} numbers up to {float(lost.max()):.4g}"
            ends = f"{str(dtype).removeprefix('torch.')} ends at {torch.finfo(dtype).max:.4g}"
            raise ConfigError(f"{most}, and {ends}; give --dtype bfloat16, float32 or keep")
    return found


def _hub_tensors(
    reader: CheckpointReader, chosen: _ChosenTensors, folder: Path, moved: OnRead, console: Console
) -> tuple[Mapping[str, torch.Tensor], Named]:
    """Return the meta tensors of the model by their names on the Hub, and an iterator of names and values."""
    names = HubNames.of_directory(folder, {name: torch.empty(s.shape, dtype=to, device="meta") for name, (s, to) in chosen.items()})
    console.note(names.note)
    if len(names.outputs) != sum(len(group.outputs) for group in names.groups):
        raise CheckpointError(f"{reader.directory}: two tensors would have one name on the hub")
    order = {name: place for place, name in enumerate(chosen)}
    places = sorted(names.groups, key=lambda each: (each.converted, 0 if each.converted else order[each.names[0]]))
    members = [name for group in places for name in group.names]
    read = read_tensors(reader, [chosen[name][0] for name in members], moved)
    weights = ((name, _convert(name, each, names.dtypes[name])) for name, (_, each) in zip(members, read, strict=True))
    return names.outputs, names.convert(weights)


def _convert_adapter(folder: Path, dtype: torch.dtype | None) -> None:
    """Convert the adapter in `folder`, which has all small files of a checkpoint, to another dtype, unless that is None."""
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"the checkpoint has {ADAPTER_CONFIG}, not {ADAPTER_WEIGHTS}; an older version wrote it")
    shutil.rmtree(folder / BASE_MODEL, ignore_errors=True)
    if dtype is not None:
        tensors = load_file(path)
        tensors |= {name: _convert(name, each, dtype) for name, each in tensors.items() if each.is_floating_point()}
        save_file(tensors, path, metadata={"format": "pt"})


def _merged_tensors(
    reader: CheckpointReader, chosen: _ChosenTensors, folder: Path, dtype: str, moved: OnRead, *, decoded: bool
) -> tuple[Mapping[str, torch.Tensor], Named]:
    """Return what `_hub_tensors` does, with adapters merged into weights, `decoded` ones if asked; `folder` is then the model's."""
    peft = import_peft()
    cls, config, reason = read_class(folder / BASE_MODEL)
    if cls is None:
        raise ConfigError(f"{reason}; load the adapter with PEFT and use its merge_and_unload", where="--merge")
    others = [path.parent.name for path in folder.glob(f"*/{ADAPTER_CONFIG}")]
    with torch.device("meta"):
        trained = peft.get_peft_model(cls(config), peft.PeftConfig.from_pretrained(folder)).state_dict()
        parts = ((given, part) for given in chosen for part in given.split(".")[1:-1] if part not in others)
        own = next((part for given, part in parts if given.replace(f".{part}.", ".default.") in trained), "default")
        model: Any = peft.get_peft_model(cls(config), peft.PeftConfig.from_pretrained(folder), adapter_name=own)
        for name in others:
            model.add_adapter(name, peft.PeftConfig.from_pretrained(folder / name))
    first, state = canonical_names(model), model.state_dict()
    missing = {first.get(name, name) for name, _ in model.named_parameters()}
    names = {given: given if given.startswith(_PREFIX) else f"{_PREFIX}{given}" for given in chosen}
    for given, (source, _) in chosen.items():
        tensor = state.get(names[given])
        if tensor is None or tuple(tensor.shape) != source.shape:
            raise CheckpointError(f"{given} of {reader.directory} has no place in {type(model).__name__}")
        missing.discard(first.get(names[given], names[given]))
    if missing:
        raise CheckpointError(f"{reader.directory} has no {', '.join(sorted(missing)[:4])}; the adapter's name differs")
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md"):
        (folder / name).unlink(missing_ok=True)
    for name in others:
        shutil.rmtree(folder / name)
    for path in (folder / BASE_MODEL).iterdir():
        path.rename(folder / path.name)
    (folder / BASE_MODEL).rmdir()
    wanted = _DTYPES.get(dtype) or next(source.dtype for source, _ in chosen.values() if source.kind == "model")
    form = HubForm(model)
    outputs, wide_parts = form.hub_names.outputs, parts_in_fp32(pretrained_of(model))
    tensors = {name: in_files(wide_parts, name, each, wanted) for name, each in outputs.items()}
    place: dict[str, int] = {}
    for name in names.values():
        place.setdefault(form.layer_of.get(name, name), len(place))
    order = sorted(chosen, key=lambda given: place[form.layer_of.get(names[given], names[given])])
    read = read_tensors(reader, [chosen[given][0] for given in order], moved)
    widest = max((to.dtype for to, _ in chosen.values() if to.dtype.is_floating_point), key=lambda each: each.itemsize)
    base = _base_values(reader, model, decoded=decoded)
    pairs = ((names[stored.name], base(stored, each)) for stored, each in read)
    weights = form.convert(pairs, torch.promote_types(torch.float32, widest), CheckpointError)
    return tensors, ((name, _convert(name, each, tensors[name].dtype)) for name, each in weights)


def _base_values(reader: CheckpointReader, model: Any, *, decoded: bool) -> Callable[[TensorSpec, torch.Tensor], torch.Tensor]:
    """Return a function that gives tensors of the source the values that the run encoded, if they are to be `decoded`. Raises
    `ConfigError` if it did not encode any, and for the original values of tensors that the checkpoint holds decoded."""
    resolved = reader.directory.parent.parent / CONFIG
    section = load_config(resolved, consent=Consent.GIVEN).model.weights if resolved.is_file() else None
    if (weights := encoded_weights(section)) is None:
        if decoded:
            raise ConfigError(f"--base decoded is for runs with model.weights, and {resolved} has none; leave it out")
        return lambda stored, values: values
    encoded = {each.removeprefix(_PREFIX) for each in encoded_names(model, weights)}
    compute = getattr(torch, str(reader.manifest.layout.get("compute")))
    here = {each.name for each in reader.manifest.tensors if not reader.manifest.is_elsewhere(each.path)}
    base = (each for each in here if model.peft_config.keys().isdisjoint(each.split(".")))
    if not decoded and (held := sorted(each for each in base if each.removeprefix(_PREFIX) in encoded)):
        why = f"{reader.directory} holds {some(held, 2)} as the run computed with them, and not as their source has them"
        raise ConfigError(f"{why}; give --base decoded")

    def decode(stored: TensorSpec, values: torch.Tensor) -> torch.Tensor:
        if not decoded or stored.name.removeprefix(_PREFIX) not in encoded or not reader.manifest.is_elsewhere(stored.path):
            return values
        return weights.codec.rounded(values.to(compute)).to(values.dtype)

    return decode
