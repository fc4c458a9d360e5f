"""The subject of a verification: the user's model and configuration, small enough for a plain process to train, and its samples.
Small sizes keep the divisibility by tensor ranks, heads, key-value heads, experts and stages. The layout stays as it is."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError, counted
from zeromesh.intervals import round_up
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.sections.model import AUTO_CLASSES
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.data.collate import IGNORED_LABEL, Collate
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.models.adapters import pretrained_of, settings_of_saved
from zeromesh.trainer.models.build import pin_sources, read_configuration
from zeromesh.trainer.models.small_copy import InFloat64, first_copy, named_sizes, perturb
from zeromesh.trainer.models.user_model import ForwardInputs, integer, text_part, unwrap
from zeromesh.weight_init.weight_sources import seeded_cpu

_MOST_PARAMETERS = 2_000_000
"""The most parameters of a model that is verified as it is; a larger one is made smaller."""
_VOCABULARY = 128
_LENGTH = 16
_EPSILON = 1e-6
"""The least epsilon of the exact pass. Some gradients are zero except for rounding, which Adam would turn into whole steps."""
_HEADS = ("causal_lm", "masked_lm", "seq2seq_lm", "question_answering")
_CLASSES = ("token_classification", "sequence_classification")
"""The heads whose inputs are known, without and with labels that are classes."""
_MOST_MICRO = 2  # samples of a microbatch


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallRun:
    """The model, the configuration and the samples that the user's layout and the plain process train."""

    model: nn.Module  # The model with its initial values, in float32 or in the dtype that it was given in.
    config: TrainerConfig  # The configuration of the small run, in the user's precision.
    samples: list[dict[str, Any]]
    collate: Collate | None
    notes: tuple[str, ...]  # Sentences about the model and the samples.


def shrink(config: TrainerConfig, inputs: UserInputs, mesh: Mesh, folder: Path, *, dropout: bool = False) -> SmallRun:
    """Make the small run of `config`, with its files in `folder`, the same on all ranks, which all call it. `dropout` keeps dropout
    on. Raises `ConfigError` for a model that can neither be trained whole nor be made smaller, and for one with unknown inputs."""
    model, notes = _small_model(config, inputs, mesh)
    perturb(model)
    off = [] if dropout or not without_dropout(model) else ["dropout is off; --check dropout compares what is drawn"]
    off += ["biases of routers stay"] if config.optimizer.expert_bias_rate else []
    small = small_config(config, mesh, folder, dropout=dropout)
    count = small.run.max_steps * small.batch.global_size
    if inputs.train_dataset is not None and not notes:
        data: Any = inputs.train_dataset
        rows = (data[index] for index in range(len(data))) if hasattr(data, "__len__") else data
        given = list(islice(rows, count))
        return SmallRun(model=model, config=small, samples=given, collate=inputs.collate, notes=("its own data", *off))
    length = round_up(_LENGTH, mesh.tensor.size * (2 * mesh.context.size if mesh.context.size > 1 else 1))
    samples = _make_samples(model, small, count, length)
    data_note = f"{counted(len(samples), 'sample')} of {length} random tokens, with other numbers of targets in each"
    return SmallRun(model=model, config=small, samples=samples, collate=None, notes=(*notes, data_note, *off))


def small_config(config: TrainerConfig, mesh: Mesh, folder: Path, *, dropout: bool = False) -> TrainerConfig:
    """Return the configuration of the small run: five steps of two complete rounds of microbatches and an incomplete one."""
    values = config.model_dump(mode="json")
    for name, section in read_texts(Path(__file__).with_name("small_run.yaml")).items():
        values[name].update(section)
    micro, schedule = min(config.batch.micro_size, _MOST_MICRO), config.schedule
    complete = micro * mesh.data.size
    values["batch"] |= {"global_size": 2 * complete + max(1, complete - 1), "micro_size": micro}
    values["model"]["tile_tokens"] = config.model.tile_tokens and min(config.model.tile_tokens, _LENGTH // 3)
    values["run"]["output_dir"] = str(folder)
    values["schedule"]["warmup_steps"] = min(schedule.warmup_of(config.run.max_steps), 1)
    values["schedule"]["decay_steps"] = schedule.decay_steps and min(schedule.decay_steps, 2)
    values["ema"] |= {"start_step": min(config.ema.start_step, 1), "every_steps": min(config.ema.every_steps, 2)}
    for name, given in (values["model"]["adapters"] or {}).items():
        # Saved adapters have the sizes of the whole model; the small one gets new ones like them.
        settings = settings_of_saved(given, f"model.adapters.{name}") if isinstance(given, str) else given
        values["model"]["adapters"][name] = settings if dropout else _without_dropout(settings)
    if config.model.lora is not None and not dropout:
        values["model"]["lora"] = _without_dropout(values["model"]["lora"])
    return TrainerConfig.model_validate(values)


def _without_dropout(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: 0.0 if name.endswith("dropout") else each for name, each in settings.items()}


def exact(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration with float64 everywhere, so that rounding explains no difference."""
    roles, eps = dict.fromkeys(("compute", "master", "reduce"), "float64"), config.optimizer.eps
    optimizer = {} if eps is None else {"eps": max(eps, _EPSILON)}
    values = config.changed(precision={**roles, "linear": None}, optimizer=optimizer, parallel={"wire": "exact"})
    return values.changed(model={"compile": False})


def without_dropout(model: nn.Module) -> bool:
    """Disable dropout and other random numbers of training in the model; returns True if it had any."""
    rates = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            drops = "dropout" in name or name.endswith(("_pdrop", "layerdrop"))
            drops |= name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
            if drops and isinstance(value, float):
                rates.append(value)
                setattr(module, name, 0.0)
    for config in {id(each): each for module in model.modules() if (each := vars(module).get("config")) is not None}.values():
        for name in ("apply_spec_augment", "layerdrop"):
            if hasattr(config, name):
                setattr(config, name, type(getattr(config, name))(0))
    return any(rates)


def _small_model(config: TrainerConfig, inputs: UserInputs, mesh: Mesh) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model with its initial values, and notes on its reduction; no notes for an unchanged model."""
    if inputs.model is None:
        pinned = pin_sources(config, mesh, model_given=False).model
        if pinned.trust_remote_code:
            why = "a model whose code comes with it is verified as an object"
            raise ConfigError(f"{why}: give it to Trainer, and call verify()", where="model.trust_remote_code")
        whole, automatic, _ = read_configuration(pinned)
        options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
        if config.model.attention is not None:
            options["attn_implementation"] = config.model.attention
        return _first_working_copy(whole, partial(automatic.from_config, **options), config, mesh)
    given: Any = inputs.model
    is_function = not isinstance(given, nn.Module)
    with torch.device("meta") if is_function else nullcontext():
        given = unwrap(given() if is_function else given)[0]
    count = sum(parameter.numel() for parameter in given.parameters())
    if count <= _MOST_PARAMETERS and is_function:
        with seeded_cpu(config.run.seed, "verification"):
            return unwrap(inputs.model())[0], ()
    if count <= _MOST_PARAMETERS and not any(parameter.is_meta for parameter in given.parameters()):
        return copy.deepcopy(given).cpu(), ()
    inside = pretrained_of(given)
    if inside is None or inside is not given:
        why = f"{type(given).__name__} has {count:,} parameters, and only a model of transformers can be made small"
        cure = f"give one of at most {_MOST_PARAMETERS:,}, such as the same class with fewer and narrower layers"
        raise ConfigError(f"{why} by its configuration; {cure}", where="verify")
    return _first_working_copy(given.config, type(given), config, mesh)


def _first_working_copy(
    config_of_model: Any, build: Callable[[Any], nn.Module], config: TrainerConfig, mesh: Mesh
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the first small model that can be built and has a loss, and notes on its reduction."""
    layers = max(2, mesh.pipeline.size * config.parallel.chunks)
    sizes = _sizes(text_part(config_of_model), mesh.tensor.size, mesh.experts.size)
    headless = {name: size for name, size in sizes.items() if name != "head_dim"}
    reductions = ((sizes, layers), (headless, layers), (sizes, max(layers, 8)), (dict[str, int](), layers))

    def require_loss(model: nn.Module) -> None:
        sample = _make_samples(model, config, 2, _LENGTH)[1]
        with InFloat64(), torch.no_grad():
            outputs: Any = copy.deepcopy(model).double()(**{name: value[None] for name, value in sample.items()})
            loss = getattr(outputs, "loss", None)
            if loss is not None and not bool(torch.isfinite(loss)):
                raise ValueError("its loss is not finite")

    small = first_copy(config_of_model, build, reductions, require_loss, most=_MOST_PARAMETERS, seed=config.run.seed)
    if isinstance(small, list):  # The reasons why no copy works.
        why = f"{type(config_of_model).__name__} cannot be made small: {'; '.join(dict.fromkeys(small))}"
        cure = f"Give Trainer a small model of its class, of at most {_MOST_PARAMETERS:,} parameters, and call verify()"
        raise ConfigError(f"{why}. {cure}", where="verify")
    parts, count = [], sum(each.numel() for each in small.parameters())
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        before, after = (integer(text_part(each), name) for each in (config_of_model, small.config))
        if before is not None:
            parts.append(f"{name} {before:,}" + ("" if before == after else f" -> {after:,}"))
    return small, (f"{type(small).__name__} of {count:,} parameters: {', '.join(parts)}",)


def _sizes(text: Any, ranks: int, expert_ranks: int = 1) -> dict[str, int]:
    """Return small sizes that `ranks` (experts: `expert_ranks`) divide just where they divide those of the configuration `text`."""

    def small(name: str, size: int) -> int:
        """Return `size` rounded up to a number with the remainder modulo `ranks` of the model's size `name`."""
        whole = integer(text, name) or 0
        return size + -size % ranks + (whole % ranks if ranks > 1 else 0)

    heads, groups = integer(text, "num_attention_heads") or 4, integer(text, "num_key_value_heads")
    few = small("num_key_value_heads", 2) if groups else 0
    ratio = min(heads // groups, 2) if groups and heads % groups == 0 else 1
    many = few * ratio if groups else small("num_attention_heads", 4)
    sizes = {"layers": 2, "head width": 8, "rotary width": 4, "state": 8, "positions": 64, "chosen experts": 2}
    sizes |= {"width": many * 8, "inner width": small("intermediate_size", 48), "heads": many}
    sizes |= {"key-value heads": few} if groups else {}
    sizes |= {"experts": round_up(max(4, ranks), expert_ranks), "expert width": 16 + -16 % ranks}
    return named_sizes({**sizes, "vocabulary": small("vocab_size", _VOCABULARY)})


def _make_samples(model: nn.Module, config: TrainerConfig, count: int, length: int) -> list[dict[str, Tensor]]:
    """Return `count` deterministic, distinct samples of `length` tokens. Some of the first tokens of a sample have no label, and in
    one of eight samples no token has one. Raises `ConfigError` for a task whose inputs are not known."""
    inside = pretrained_of(model)
    name, head = type(inside).__name__, None
    conditional = name.endswith("ForConditionalGeneration")
    if name.endswith("LMHeadModel"):
        head = "causal_lm"
    elif inside is not None and conditional and text_part(inside.config).is_encoder_decoder:
        head = "seq2seq_lm"
    elif inside is not None:
        # The class name of a model ends with that of its automatic class.
        endings = {each.removeprefix("AutoModel"): head for head, each in AUTO_CLASSES.items()}
        head = next((head for ending, head in endings.items() if ending and name.endswith(ending)), None)
    takes = ForwardInputs.of(model, users_loss=False)
    if inside is None or head not in (*_HEADS, *_CLASSES) or takes.vocab_size is None:
        why = f"nothing is known of what {type(model).__name__} is fed with"
        cure = "give train_dataset to Trainer, with a model that is small enough to be taken as it is, and call verify()"
        raise ConfigError(f"{why}; {cure}", where="verify")
    separates = config.data.separates and "position_ids" in (takes.fields or ())
    classes = integer(inside.config, "num_labels") or 2
    generator, samples = torch.Generator().manual_seed(1), []
    for index in range(count):
        ids = torch.randint(3, takes.vocab_size, (length,), generator=generator)
        sample, begin = {"input_ids": ids}, index % (length - 2)
        if separates:
            first = 3 + index % (length - 5)
            sample["position_ids"] = torch.cat((torch.arange(first), torch.arange(length - first)))
        if head == "question_answering":
            sample |= {"start_positions": torch.tensor(begin), "end_positions": torch.tensor(length - 1)}
        elif head == "sequence_classification":
            sample["labels"] = torch.tensor(index % classes)
        else:
            labels = torch.randint(0, classes, ids.shape, generator=generator) if head in _CLASSES else ids
            unlabelled = torch.arange(length) < (length if index % 8 == 5 else begin)
            sample["labels"] = labels.masked_fill(unlabelled, IGNORED_LABEL)
        samples.append(sample)
    return samples
