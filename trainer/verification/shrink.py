"""What is verified: the user's model class and configuration, shrunk in width and depth, and a configuration of a few steps of it.

Sizes that are shrunk keep what a layout can see of them: whether tensor ranks divide heads, key-value heads, features, tokens and
experts, whether stages have equal numbers of blocks, whether the global batch fills its microbatches, and if there are several.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError, summary
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.trainer.config.sections.model import LoraSection
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import Collate, default_collate
from zeromesh.trainer.data.streaming import is_stream
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.losses.losses import ComputeLoss
from zeromesh.trainer.losses.trial import InFloat64, smaller
from zeromesh.trainer.models.adapters import import_peft, pretrained_of
from zeromesh.trainer.models.build import directory_of, from_configuration, read_configuration
from zeromesh.trainer.models.user_model import ForwardInputs, integer, unwrap
from zeromesh.weight_init.weight_sources import INITIALISER_ERRORS, seeded_cpu

STEPS = 5
LENGTH = 16
"""Tokens of a synthetic sequence, at least."""
_WIDTH, _INNER, _VOCABULARY = 32, 48, 160
_AS_IT_IS = 300_000
"""Parameters up to which a model of few blocks need not be shrunk."""
_LARGEST = 4_000_000
"""Parameters of a model that is verified as it is because it cannot be shrunk."""
_BLOCKS = 4
_CLIP = 0.25
"""The largest norm that is clipped to: gradients of the small model are larger."""
_SCALE = 1024.0
"""The loss scale of float16, which no gradient of the small model makes overflow."""
_RATES = ("dropout", "pdrop", "drop_rate", "layerdrop", "drop_path")


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallRun:
    """What both sides train: the same weights, the same samples, the same settings."""

    config: TrainerConfig
    """Of the small run, in the user's layout and precision."""
    model: nn.Module
    """With its initial values, in float32 on the CPU; both sides train copies of it."""
    samples: Sequence[Mapping[str, Any]]
    """In the order in which they are trained on."""
    fields: frozenset[str] | None
    """What the model takes of a batch; None: anything."""
    collate: Collate | None
    compute_loss: ComputeLoss | None
    data_ranks: int
    changes: tuple[str, ...]
    """What is otherwise than in the user's run."""

    @property
    def micro(self) -> int:
        """Samples of a microbatch."""
        return self.config.batch.micro_size

    def blocks(self) -> int:
        """Microbatches of a step, over all ranks."""
        return ceil(self.config.batch.global_size / self.micro)

    def batch(self, step: int, block: int) -> dict[str, Any]:
        """Microbatch `block` of the global batch of a step."""
        size = self.config.batch.global_size
        chosen = range(step * size + block * self.micro, step * size + min(size, (block + 1) * self.micro))
        rows = [self.samples[index] for index in chosen]
        made = self.collate(rows) if self.collate is not None else default_collate(rows, list(chosen))
        return {name: each for name, each in made.items() if self.fields is None or name in self.fields}


def make_subject(config: TrainerConfig, inputs: UserInputs, shape: MeshShape, folder: Path) -> SmallRun:
    """Make what is verified of a run on a mesh of this shape; its files will lie in `folder`.

    Raises:
        ConfigError: for a model that is too large and cannot be shrunk, and where there is nothing to train it on.
    """
    ranks = shape.replicate * shape.shard
    changed, changes = _short(config, shape, ranks, folder)
    own = inputs.train_dataset is not None
    model, shrunk = _small_model(config, inputs, shape, keeps_data=own)
    changes += shrunk
    if config.model.lora is not None:
        model = _adapted(model, config.model.lora)
    _randomise(model)
    rates = _without_dropout(model)
    if rates:
        changes += (f"dropout is 0 (it was {', '.join(rates)}); its random numbers are a check of their own: dropout",)
    users_loss = inputs.compute_loss is not None
    forward = ForwardInputs.of(model, users_loss=users_loss)
    count = STEPS * changed.batch.global_size
    samples = _first(inputs.train_dataset, count) if own else _synthetic(model, config, shape, count)
    return SmallRun(
        config=changed,
        model=model,
        samples=samples,
        fields=None if users_loss or forward.fields is None else frozenset(forward.fields),
        collate=inputs.collate if own else None,
        compute_loss=inputs.compute_loss,
        data_ranks=ranks,
        changes=changes,
    )


# The configuration


def _short(config: TrainerConfig, shape: MeshShape, ranks: int, folder: Path) -> tuple[TrainerConfig, tuple[str, ...]]:
    """The configuration of a few steps in the same layout, and what was changed beside lengths and sizes."""
    batch, parallel, offload = config.batch, config.parallel, config.offload
    micro = min(batch.micro_size, 2)
    turns = ceil(batch.global_size / (batch.micro_size * ranks))
    turns = min(turns, max(2, 2 * shape.pipeline * (parallel.schedule != "1f1b" or shape.pipeline > 1)))
    idle = batch.global_size % (batch.micro_size * ranks) != 0
    size = max(micro, micro * ranks * turns - idle)
    stripes = len(offload.directory) if isinstance(offload.directory, tuple) else 1
    directories = tuple(str(folder / f"offload-{number}") for number in range(stripes))
    changes = []
    if config.model.compile:
        changes.append("blocks are not compiled")
    fused = config.model.attention not in (None, "eager", "sdpa")
    if fused:
        changes.append(f"attention is computed by sdpa ({config.model.attention} has no float64)")
    model = {"lora": None, "compile": False, "attention": "sdpa" if fused else config.model.attention}
    sections: dict[str, dict[str, Any]] = {
        "model": {"source": None, "config": None, "loss": "auto" if config.model.loss == "liger" else config.model.loss}
        | model,
        "data": {"shuffle": False, "workers": 0, "seed": None},
        "batch": {"global_size": size, "micro_size": micro, "eval_micro_size": None, "last": "carry"},
        "schedule": {"warmup_steps": 0, "warmup_ratio": None},
        "run": {"name": "exact", "output_dir": str(folder), "max_steps": STEPS, "epochs": None, "log_every": 1}
        | {"clip_norm": min(config.run.clip_norm, _CLIP)}
        | {"eval_every": 0, "eval_at_start": False, "eval_at_end": False, "load_best": False, "patience": 0},
        "checkpoint": {"every_steps": 0, "resume": "never", "keep_best": 0},
        "hub": {"push": False},
        "profile": {"steps": None, "memory": False, "allocations": False, "step_figures": False},
        "tracking": {"backends": ()},
        "precision": {
            "tf32": False,
            "linear": None,
            "loss_scale": config.precision.loss_scale.model_copy(
                update={"initial_scale": min(_SCALE, config.precision.loss_scale.initial_scale)}
            ),
        },
        "offload": {"directory": directories if stripes > 1 else directories[0]},
        "parallel": {"timeout_seconds": min(parallel.timeout_seconds, 30.0)}
        | {"stages": _uneven(parallel.stages), "numa_binding": None},
        "ema": {"start_step": min(config.ema.start_step, 2), "every_steps": min(config.ema.every_steps, 2)},
    }
    if config.run.clip_norm > _CLIP:
        changes.append(f"run.clip_norm is {_CLIP}, so that gradients of the small model are clipped")
    if config.precision.linear is not None:
        changes.append(f"linear layers multiply in the compute dtype, not in {config.precision.linear}")
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=update).with_notes(()), tuple(changes)


def _uneven(stages: Sequence[int] | None) -> tuple[int, ...] | None:
    """Few blocks for each stage, of which one has more where one has more now."""
    if stages is None:
        return None
    least = min(stages)
    return tuple(1 + (each > least) for each in stages)


# The model


def _small_model(
    config: TrainerConfig, inputs: UserInputs, shape: MeshShape, *, keeps_data: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    """The user's model with few parameters, in float32 on the CPU, and what was done to it."""
    given: Any = inputs.model
    if given is None:
        section = config.model
        directory = None if section.source is None else directory_of(section.source, section.revision)
        made, automatic = read_configuration(section, directory)

        def build(values: Any) -> Any:
            return from_configuration(automatic, copy.deepcopy(values), section)
    else:
        if not isinstance(given, nn.Module):
            with torch.device("meta"):
                whole = given()
            given = given() if _numel(whole) <= _AS_IT_IS else whole
        given, _ = unwrap(given)
        inside = pretrained_of(given)
        small = _numel(given) <= _AS_IT_IS
        if inside is None or inside is not given or (small and not any(p.is_meta for p in given.parameters())):
            return _as_it_is(given), ()
        made, kind = given.config, type(given)

        def build(values: Any) -> Any:
            return kind(copy.deepcopy(values))

    return _shrunk(made, build, config, shape, keeps_data=keeps_data)


def _numel(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _as_it_is(model: nn.Module) -> nn.Module:
    """A copy of a model that has no configuration by which it could be shrunk."""
    size, name = _numel(model), type(model).__name__
    if size > _LARGEST or any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(
            f"{name} has {size:,} parameters and no configuration of transformers by which it could be shrunk; verify takes up to "
            f"{_LARGEST:,} as they are: give a smaller one of the same class",
            where="model",
        )
    return copy.deepcopy(model).float()


def _shrunk(
    made: Any, build: Callable[[Any], Any], config: TrainerConfig, shape: MeshShape, *, keeps_data: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    text = getattr(made, "get_text_config", lambda: made)()
    depth = integer(text, "num_hidden_layers") or 2
    stages = shape.pipeline * config.parallel.chunks
    named = _uneven(config.parallel.stages)
    few = sum(named) if named else max(2, stages + (stages > 1 and depth % stages > 0))
    problems = []
    for sizes, layers in _reductions(text, shape.tensor, min(depth, few), keeps_data=keeps_data):
        values = smaller(made, sizes, layers)
        values.use_cache = False
        try:
            with torch.device("meta"):
                if _numel(build(values)) > _LARGEST:
                    continue
            with seeded_cpu(config.run.seed, "verification"):
                model = build(values).float()
            if not keeps_data:
                _require_finite(model)
        except (*INITIALISER_ERRORS, NotImplementedError, AssertionError) as error:
            problems.append(summary(error))
            continue
        small = values.get_text_config() if hasattr(values, "get_text_config") else values
        return model, (_described(text, small),)
    reason = f" ({problems[0]})" if problems else ""
    raise ConfigError(
        f"{made.model_type} cannot be shrunk to {_LARGEST:,} parameters that run{reason}; give a small configuration of its class: "
        "model.config",
        where="model",
    )


_SHOWN = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("num_experts", "num_local_experts", "vocab_size"),
)


def _described(before: Any, after: Any) -> str:
    changed = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for name in _SHOWN
        if isinstance(getattr(before, name, None), int) and getattr(before, name) != getattr(after, name, None)
    ]
    return f"model: {', '.join(changed)}" if changed else "model: as it is"


def _reductions(config: Any, ranks: int, layers: int, *, keeps_data: bool) -> Iterator[tuple[Mapping[str, int], int]]:
    """Sizes to try in turn: what sizes depend on each other differs between architectures."""

    def of(name: str, default: int = 0) -> int:
        return integer(config, name) or default

    heads = of("num_attention_heads", 4)
    keys = min(of("num_key_value_heads", heads), heads)
    few_keys = _fewer(keys, ranks, max(2, ranks))
    few_heads = few_keys * min(max(1, heads // keys), 2) if keys < heads else _fewer(heads, ranks, max(4, ranks))
    few_keys = few_keys if keys < heads else few_heads
    width = max(_WIDTH, 8 * few_heads)
    width = -(-width // few_heads) * few_heads
    inner = {
        name: _fewer(of(name), ranks, _INNER)
        for name in ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
    }  # fmt: skip
    experts = {
        name: _fewer(of(name), ranks, max(4, ranks))
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    }
    sizes = {
        **dict.fromkeys(("hidden_size", "d_model", "word_embed_proj_dim", "embedding_size"), width),
        **inner,
        **experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": _fewer(of("moe_intermediate_size"), ranks, 16),
        "shared_expert_intermediate_size": _fewer(of("shared_expert_intermediate_size"), ranks, 16),
        "num_attention_heads": few_heads,
        "encoder_attention_heads": few_heads,
        "decoder_attention_heads": few_heads,
        "num_key_value_heads": few_keys,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "sliding_window": 4,
        "vocab_size": _fewer(of("vocab_size"), ranks, _VOCABULARY),
        "max_position_embeddings": 64,
    }
    if keeps_data:
        for name in ("vocab_size", "max_position_embeddings"):
            del sizes[name]
    sizes = {name: size for name, size in sizes.items() if size}
    head = width // few_heads
    only = {name: sizes[name] for name in ("vocab_size",) if name in sizes}
    yield from itertools.product(({**sizes, "head_dim": head}, sizes, only, {}), (layers, 2 * layers, 8))


def _fewer(size: int, ranks: int, most: int) -> int:
    """A size of at most about `most` that `ranks` divide if they divide `size`, and else do not."""
    if size <= most:
        return size
    even = max(1, most // ranks) * ranks
    return even if size % ranks == 0 else even + 1


def _require_finite(model: Any) -> None:
    """Raise `ValueError` for a language model whose loss is not finite."""
    vocabulary = _vocabulary(model)
    ids = torch.arange(2 * LENGTH).remainder(vocabulary - 1).view(2, LENGTH) + 1
    with torch.no_grad(), InFloat64():
        loss = copy.deepcopy(model).double().eval()(input_ids=ids, labels=ids).loss
    if not bool(torch.isfinite(loss)):
        raise ValueError("its loss is not finite")


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _adapted(model: nn.Module, section: LoraSection) -> nn.Module:
    """The model with adapters as PEFT makes them."""
    peft = import_peft()
    targets = section.targets
    settings = peft.LoraConfig(
        r=min(section.rank, 4),
        lora_alpha=(section.alpha or 2 * section.rank) * min(section.rank, 4) / section.rank,
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        task_type="CAUSAL_LM",
    )
    try:
        with seeded_cpu(0, "adapters"):
            adapted: nn.Module = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    except INITIALISER_ERRORS as error:
        raise ConfigError(f"no adapters can be added: {summary(error)}", where="model.lora") from error
    return adapted


def _randomise(model: nn.Module) -> None:
    """Give biases, scales and whatever else begins with one value values that differ, so that each shows where it goes."""
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and (parameter.dim() < 2 or parameter.min() == parameter.max()):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def _without_dropout(model: nn.Module) -> list[str]:
    """Set rates of dropout in the model to 0; returns those that there were."""
    found: dict[str, float] = {}
    for module in model.modules():
        holders = [vars(module)]
        if hasattr(module, "config") and hasattr(module.config, "__dict__"):
            holders.append(vars(module.config))
        for holder in holders:
            for name, value in holder.items():
                if isinstance(value, float) and value > 0 and any(rate in name for rate in _RATES):
                    found[name] = value
                    holder[name] = 0.0
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            found.setdefault("p", module.p)
            module.p = 0.0
    return [f"{name} {value:g}" for name, value in found.items()]


# The samples


def _first(dataset: Any, count: int) -> list[Any]:
    """The first samples of the user's data, again and again."""
    if is_stream(dataset):
        rows = list(itertools.islice(iter(dataset), count))
    else:
        rows = [dataset[index] for index in range(min(count, len(dataset)))]
    if not rows:
        raise ConfigError("train_dataset has no sample to verify with", where="train_dataset")
    return [rows[index % len(rows)] for index in range(count)]


def _synthetic(model: Any, config: TrainerConfig, shape: MeshShape, count: int) -> list[dict[str, Tensor]]:
    """Sequences of random tokens, each with another number of labels; with documents where the run separates them."""
    inside = pretrained_of(model)
    if inside is None or getattr(inside, "get_input_embeddings", None) is None or inside.main_input_name != "input_ids":
        raise ConfigError(
            f"verify makes samples for language models alone, and {type(model).__name__} is none; give Trainer a train_dataset, "
            "and call trainer.verify()",
            where="model",
        )
    separates, classes = config.data.separates, _classes(config)
    length = -(-LENGTH // shape.tensor) * shape.tensor
    generator = torch.Generator().manual_seed(29)
    found = []
    for index in range(count):
        ids = torch.randint(1, _vocabulary(inside), (length,), generator=generator)
        labels = ids.clone()
        if classes == "masked":
            labels[1 + index % (length // 2) :] = -100
        else:
            labels[: index * 5 % (length - 3)] = -100
        sample = {"input_ids": ids, "labels": labels}
        if separates:
            cut = 3 + index % (length - 6)
            sample["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)])
        found.append(sample)
    return found


def _classes(config: TrainerConfig) -> str:
    head = config.model.head
    if head == "masked_lm":
        return "masked"
    if head not in ("causal_lm", "seq2seq_lm"):
        raise ConfigError(
            f"verify makes samples for language models, and none for {head}; give Trainer a train_dataset, and call "
            "trainer.verify()",
            where="model.head",
        )
    return "all"
