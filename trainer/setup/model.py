"""The model of a run: building, checks, division among ranks and initial values."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import DataCollatorForLanguageModeling

from zeromesh.checkpoint.loader import candidates
from zeromesh.checkpoint.store import FOLDER, CheckpointStore
from zeromesh.comm.transport import choose_transport
from zeromesh.environment import number_of_start
from zeromesh.errors import ConfigError, DataError, LayoutError, counted, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Tier, Tiers, hex_digest, prevent_fragmentation, reuse_freed_memory, tensor_bytes
from zeromesh.options import ZeroOptions
from zeromesh.overrides import override
from zeromesh.parallelize import Divided, divide
from zeromesh.telemetry.status_board import Activity
from zeromesh.trainer.checkpoints.trainer_state import description_of
from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements
from zeromesh.trainer.data.collate import BatchRules
from zeromesh.trainer.data.feed import Feeds
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.data.tokenizer import ByteTokenizer, Tokenizer
from zeromesh.trainer.formatting import Detail, human_bytes, human_count
from zeromesh.trainer.generation.settings import add_end_tokens
from zeromesh.trainer.loop.context import RunContext, UserInputs
from zeromesh.trainer.loop.judging import Judge
from zeromesh.trainer.loop.recovery import Recovery
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.losses.losses import Loss, make_loss
from zeromesh.trainer.losses.share_trial import require_divisible_sequences
from zeromesh.trainer.losses.trial import require_separate_documents
from zeromesh.trainer.models.adapters import add_adapters, pretrained_of
from zeromesh.trainer.models.build import build_model, class_names
from zeromesh.trainer.models.flops import ModelFlops
from zeromesh.trainer.models.hub_form import HubForm
from zeromesh.trainer.models.prepare import keep_attributes, prepare_model, use_attention, use_float8_linear
from zeromesh.trainer.models.quantized_layers import codes_of, make_plain
from zeromesh.trainer.models.tensor_trial import require_equal_when_divided, require_equal_when_spread
from zeromesh.trainer.models.user_model import ForwardInputs, first_position, require_layout_fits, source_of, text_part, unwrap
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.expert_load import ExpertLoads
from zeromesh.trainer.monitoring.step_stats import StepStats
from zeromesh.trainer.setup.engine_options import choose_trained, options_for_model
from zeromesh.trainer.setup.memory_check import HostMemory, pinned_notes
from zeromesh.trainer.weights.safetensors_source import keep_encoded
from zeromesh.units.build import open_tiers
from zeromesh.weight_init.weight_sources import BuiltModel, build_deferred, materialize_buffers, wrap_passed_model
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.hooks import cast_inputs

_TRANSPORT_TEXTS = {"shared": "through host-shared memory", "gloo": "over gloo", "nccl": "over NCCL"}
_MIXING = frozenset(["deepseek_v4", "fnet", "minimax", "mra", "openai-gpt", "xlstm"])  # types of the library that mix dtypes
_MESSAGE_BYTES = 64 * 2**20  # of a weight, in one message to the other ranks


def build_trained_model(run: RunContext, options: ZeroOptions, recovery: Recovery | None) -> TrainedModel:
    """Build the model of a run, check it and the data, leave this rank its part of the model with initial values, and make the
    run's `stats`. Raises a `ZeromeshError` for what cannot be trained before anything large is allocated."""
    config, mesh, inputs, data, console = run.config, run.mesh, run.inputs, run.data, run.console
    console.status("building the model")
    model = (built := build_whole_model(inputs.model, config, data.tokenizer)).model
    _adapt_to_data(model, run)
    options, described = options_for_model(options, config, model), description_of(model)
    with ExitStack() as undone:
        changes = undone.enter_context(ExitStack())
        changes.callback(keep_attributes(model))
        if config.model.attention is not None:
            changes.callback(use_attention(model, config.model.attention, options.precision.compute, mesh.device))
        tiers = undone.enter_context(closing(open_tiers(mesh, options)))
        if options.offload.durable:
            tiers.checkpoint = max(candidates(mesh, CheckpointStore(config.run.directory / FOLDER)), default=-1)
        require_layout_fits(model, mesh.shape, trains=True)
        console.note(*synchronize_initial_values(built, mesh, config.run.seed))
        console.note(*keep_encoded(built, options, config.model.weights, mesh, console.status))
        count, form = getattr(model, "num_parameters", None), HubForm(model)  # as transformers' FLOPs estimate counts
        whole: dict[str, Any] = {"flop_parameters": count(exclude_embeddings=True) if callable(count) else 0, "hub_form": form}
        parameters, flops = sum(each.numel() for each in model.parameters()), ModelFlops.of(model)
        learnt = sum(each.numel() for each in model.parameters() if each.requires_grad)
        run.start_times.end("model")
        loss, feeds, notes = _loss_and_feeds(model, run)
        run.start_times.end("loss")
        divided = divide_model(model, mesh, config, feeds.example, loss_of(config, inputs))
        undone.callback(divided.close)
        console.note(*notes)
        engine = fill_engine(built, config, mesh, options, tiers, divided, console, feeds, recovery)
        undone.callback(engine.close)
        judge, compute = _judge_of(run, engine), torch.float32 if loss.narrow else options.precision.compute
        loads = ExpertLoads(model, engine.ranks, config.optimizer.expert_bias_rate)
        changes.callback(loads.close)
        run.start_times.end("engine")
        run.stats = StepStats(flops, mesh, options.precision.compute, config.batch.global_size, engine.ledger)
        run.start_times.end("figures")
        trained = TrainedModel(
            config=config,
            mesh=mesh,
            console=console,
            steps_made=partial(getattr, run.progress, "step"),
            processing_class=inputs.processing_class if data.processing_class is None else data.processing_class,
            module=model,
            parameters=parameters,
            description=described,
            divided=divided,
            restore_modules=changes.close,
            feeds=feeds,
            engine=engine,
            stepper=Stepper(model, loss, mesh, compute, engine, divided.pipeline, divided.context, judge, loads),
            **whole,
        )
        if engine.lacks_parameters or mesh.model_size > 1:
            trained.replace_save_pretrained()
        console.note(*_notes_on_engine(trained, engine, learnt), *pinned_notes(tiers.pinned), *map(Detail, run.stats.notes))
        undone.pop_all()
    return trained


def _judge_of(run: RunContext, engine: ZeroEngine) -> Judge | None:
    settings = run.config.recovery
    if settings.audit_steps and engine.mesh.data.size == 1 and number_of_start():
        run.console.note("recovery.audit_steps is left out: one data rank is left, and no other computes the same")
        settings = settings.model_copy(update={"audit_steps": 0})
    if not (settings.spike_factor or settings.audit_steps):
        return None
    streams, recent = isinstance(run.data.train, StreamedDataset), partial(getattr, run.progress, "accepted")
    return Judge(settings=settings, mesh=engine.mesh, engine=engine, streams=streams, accepted=recent)


def _adapt_to_data(model: nn.Module, run: RunContext) -> None:
    """Add the data's end tokens to the generation settings. Raises `ConfigError` for a model that the data cannot train."""
    config, data = run.config, run.data
    learns = any(each.requires_grad and each.numel() for each in model.parameters())
    if data.train is not None and not learns and not config.model.trains_nothing:
        why = "has only frozen parameters (requires_grad is False)" if [*model.parameters()] else "has no parameters"
        raise ConfigError(f"{type(model).__name__} {why}; there is nothing to train")
    name = source_of(model)
    if name is not None and config.data.tokenizer is None and isinstance(data.tokenizer, ByteTokenizer):
        why = f"null means bytes for a model that a callable builds, and this one comes from {name!r}"
        raise ConfigError(f"{why}; give its tokenizer", where="data.tokenizer")
    inside, text = pretrained_of(model), data.tokenizer is not None
    if data.classes:
        what, head = ("labels", "sequence") if text else ("pictures", "image")
        if inside is None or not type(inside).__name__.endswith(f"For{head.title()}Classification"):
            why = f"{what} are for a model that has classes, and {type(model).__name__} has none"
            raise ConfigError(f"{why}; set model.head: {head}_classification", where="data.format")
        if (count := inside.config.num_labels) < len(data.classes):
            raise ConfigError(f"num_labels is {count}, and the data has {len(data.classes)} classes", where="model.config")
        if (own := class_names(config.model, model))[1] and own[0] != data.classes:  # of a callable
            why = f"it is built with classes {some(own[0], 8)}, and the data is numbered as {some(data.classes, 8)}"
            raise ConfigError(f"{why}; pass the model itself", where="model")
        if data.tokenizer is not None and not first_position(inside):
            text_part(inside.config).pad_token_id = data.tokenizer.padding  # The class is read from the last token before it.
    if data.tokenizer is not None:
        run.console.note(*add_end_tokens(model, data.answer_ends, data.tokenizer.decode_raw))


def loss_of(config: TrainerConfig, inputs: UserInputs) -> Callable[[nn.Module], Loss]:
    """Return the function that makes the loss of a model, by the configuration or by the user's own."""
    mode = config.model.loss if isinstance(config.model.loss, str) else "native"
    compute = getattr(torch, config.precision.compute)

    def make(model: nn.Module) -> Loss:
        loss = make_loss(model, mode=mode, compute_loss=inputs.compute_loss, smoothing=config.run.label_smoothing)
        inside: Any = pretrained_of(model)
        mixes, buffers = inside is None or inside.config.model_type in _MIXING, model.named_buffers()
        # Float buffers of a library's model, such as sinusoidal positions, meet layers too; those of rotary ones are cast by it.
        if compute.itemsize < 4 and (mixes or any(each.is_floating_point() and "inv_freq" not in name for name, each in buffers)):
            cast_inputs(model)
        return replace(loss, narrow=compute if compute.itemsize < 4 and mixes else None)

    return make


def _loss_and_feeds(model: nn.Module, run: RunContext) -> tuple[Loss, Feeds, list[str]]:
    """Try the loss on a small copy of the undivided model and check the first batches; returns notes too."""
    config, inputs, data = run.config, run.inputs, run.data
    run.console.status("trying the loss on a small copy")
    forward = ForwardInputs.of(model, users_loss=inputs.compute_loss is not None)
    loss = loss_of(config, inputs)(model)
    normed = any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
    if config.batch.balance != "even" and data.train is not None and (loss.auxiliary or normed):
        why = "the loss has terms over whole microbatches, whose sizes would change it (losses of experts, BatchNorm)"
        raise ConfigError(f"{why}; set it to even", where="batch.balance")
    of_text = data.tokenizer is not None and inputs.collate is None
    length_multiple = None
    if config.data.separates if data.tokenizer is not None else config.data.separate_documents:
        require_separate_documents(model)
    if pretrained_of(model) is not None and forward.fields is not None:
        # Position ids tell the documents also where the model does not take them.
        forward = replace(forward, fields=forward.fields | {"position_ids"}, named=forward.named | {"position_ids"})
    if of_text and type(pretrained_of(model)).__name__.endswith("ForMaskedLM"):
        if getattr(data.processing_class, "mask_token", None) is None:
            why = "a masked language model learns text by a tokenizer with a mask_token, and data.tokenizer has none"
            raise DataError(f"{why}; give one that has, or a data_collator")
        masking = DataCollatorForLanguageModeling(data.processing_class, mlm_probability=config.data.mask_fraction)
        inputs = replace(inputs, collate=masking)
    elif of_text and not all(each.is_joined for each in config.data.formats):  # Joined text has no padding.
        length_multiple = config.parallel.tensor if config.parallel.sequence else 1
    feeds = Feeds(
        config=config,
        data=data,
        plan=run.plan,
        rules=BatchRules(
            collate=inputs.collate,
            vocab_size=forward.vocab_size,
            causal=loss.causal,
            classes=loss.classes,
            fields=forward.fields,
            named=forward.named,
            unused=config.data.remove_unused,
            length_multiple=length_multiple,
        ),
    )
    return loss, feeds, [*loss.notes, *_check_first(feeds, config, forward, loss, inputs)]


def _notes_on_engine(trained: TrainedModel, engine: ZeroEngine, learnt: int) -> list[str | None]:
    here = " on this rank" if trained.divided.pipeline is not None else ""
    fetched = sum(unit.is_fetched for unit in engine.units)
    units = f"{counted(len(engine.units), 'unit')}{f', {fetched} of experts by need' if fetched else ''}{here}"
    reduced = f", gradients reduced {_TRANSPORT_TEXTS[engine.groups[0].reduction.name]}" if trained.mesh.shard.size > 1 else ""
    shown = f"{human_count(trained.parameters)} parameters"
    if learnt < trained.parameters:
        shown = f"trained {human_count(learnt)} of {shown} ({learnt / trained.parameters:.2%})"
    parts = [f"{human_bytes(engine.ledger.total(tier))} on {tier.value}" for tier in Tier if engine.ledger.total(tier)]
    kept = ", ".join(parts).replace("device", trained.mesh.device.type)
    return [
        f"model    {type(trained.module).__name__}, {shown}",
        Detail(f"model: {units}{reduced}"),
        f"memory   states of each rank: {kept}",
        engine.optimizer_step.note,
        engine.optimizer_step.gradients.replicas.note,
        *(engine.durable.notes if engine.durable is not None else ()),
    ]


def synchronize_initial_values(built: BuiltModel, mesh: Mesh, seed: int) -> list[str]:
    """Initialize the buffers of an undivided model, and copy rank 0's in-memory weights and buffers to ranks that differ; all ranks
    call it. Returns notes. Raises `ConfigError` for buffers whose values are lost, and `LayoutError` if models differ."""
    model = built.model
    if lost := materialize_buffers(model, mesh.device, seed, source=built.source):
        cure = "pass the model built (a Trainer also takes a callable)"
        raise ConfigError(f"buffers {some(lost, 8)} were lost by building on the meta device; {cure}")
    tensors: dict[str, Tensor] = {f"parameter {name}": each for name, each in model.named_parameters()}
    tensors |= {f"buffer {name}": each for name, each in model.named_buffers()}
    for layer in codes_of(model).values():
        tensors |= {f"parameter {name}": each for name, each in layer.tensors().items()}
    if divided := [name for name, each in tensors.items() if hasattr(each, "placements")]:
        cure = "load the model without distributed_config or tp_plan, and give zero.stage and the section parallel"
        raise LayoutError(f"{some(divided)} is divided over ranks already (a DTensor), which zeromesh does itself; {cure}")
    kinds = {True: "trained", False: "frozen"}
    plan = {name: f"{list(t.shape)} {t.dtype} {kinds[t.requires_grad]}" for name, t in tensors.items()}
    advice = "All ranks must build one model, with the same shapes, dtypes and frozen parameters"
    mesh.wait_for_all_ranks("comparison of models")
    mesh.world.require_same({"model": type(model).__name__, **plan}, LayoutError, advice=advice)
    if mesh.world_size == 1:
        return []
    held = {name: tensor for name, tensor in tensors.items() if not (tensor.is_meta or hasattr(tensor, "stored"))}
    digests = [int(hex_digest(tensor), 16) >> 1 for tensor in held.values()]
    rows = mesh.world.gather_integers(digests)
    differing = [name for index, name in enumerate(held) if len({row[index] for row in rows}) > 1]
    if not differing:
        return []
    for tensor in map(held.__getitem__, differing):
        content = tensor_bytes(tensor).clone()
        for part in torch.split(content, _MESSAGE_BYTES):
            mesh.world.broadcast(part, 0, "initial weights of rank 0")
        if mesh.world.index:
            tensor.detach().copy_(content.view(tensor.dtype).view(tensor.shape))
    others = ", ".join(str(rank) for rank, row in enumerate(rows) if row != rows[0])
    return [f"initial weights differed on ranks {others} ({some(differing)}): every rank begins with those of rank 0"]


def divide_model(
    model: nn.Module,
    mesh: Mesh,
    config: TrainerConfig,
    example: Callable[[], Mapping[str, Any] | None] = lambda: None,
    loss_of: Callable[[nn.Module], Loss] = make_loss,
) -> Divided:
    """Leave this rank its part of an undivided model, by the configuration's layout; see `divide`. Raises `LayoutError` for a model
    that cannot be divided, and `ConfigError` for one that would then compute something else, by the loss that `loss_of` makes."""
    parallel = config.parallel
    if mesh.shape.divides("layers"):
        require_equal_when_divided(pretrained_of(model) or model, parallel.plan or {}, sequence=parallel.sequence)
    if mesh.shape.divides("experts"):
        require_equal_when_spread(pretrained_of(model) or model)
    divided = divide(model, mesh, parallel, example)
    if divided.context is not None:
        require_divisible_sequences(model, loss_of, mesh, divided.context)
    return divided


def fill_engine(
    built: BuiltModel,
    config: TrainerConfig,
    mesh: Mesh,
    options: ZeroOptions,
    tiers: Tiers,
    divided: Divided,
    console: Console,
    feeds: Feeds | None = None,
    recovery: Recovery | None = None,
) -> ZeroEngine:
    """Prepare a divided model, build its engine after checking memory, and read its values; all ranks call it. A model that is
    trained has `feeds`. Raises `StorageError` if memory or disk is short."""
    there, hosts = 0, [each.host for each in mesh.locations]
    if recovery is not None and recovery.memory is not None:
        tiers.states, options = recovery.memory, replace(options, gradients_outlive=True)
        rows = mesh.world.gather_integers([recovery.memory.nbytes])
        there = sum(row[0] for row, host in zip(rows, hosts, strict=True) if host == hosts[mesh.rank])
    model, transport = built.model, choose_transport(options.transport, mesh.shard, mesh.device)
    if config.precision.linear is not None:
        console.note(use_float8_linear(model, mesh.device))
    away, prepared = prepare_model(model, config.model, options, tiers, built.compile)
    console.note(*divided.notes, *prepared, *built.notes)
    # The statistics of SyncBatchNorm cover all ranks.
    norms = [(name, each) for name, each in model.named_modules() if isinstance(each, _BatchNorm) and each.training]
    local = [name or type(model).__name__ for name, each in norms if not isinstance(each, nn.SyncBatchNorm)]
    if local and feeds is not None:
        means = "means and variances are those of each rank's own microbatch, not of the global batch"
        console.note(f"BatchNorm ({some(local)}): {means}; every rank keeps running statistics of its own, and rank 0's are saved")
    # The inputs of recomputed blocks that are offloaded, where their size is known.
    sizes = getattr(model, "config", None)
    width: Any = getattr(sizes, "hidden_size", None) or getattr(sizes, "n_embd", None)
    known = feeds is not None and feeds.data.tokenizer is not None and isinstance(width, int)
    tokens = config.batch.tokens or config.batch.micro_size * config.data.sequence_length
    inputs = away * tokens * (width if known else 0) * options.precision.compute.itemsize
    console.note(*HostMemory(model, options, mesh, transport, inputs, divided.cuts, there).check())
    mesh.wait_for_all_ranks("start of the run")
    release, done, total = built.source.release, 0, sum(1 for _ in model.parameters())

    def released(fqn: str) -> None:
        nonlocal done
        release(fqn)
        done += 1
        console.status(f"setting the weights: {done} of {total} parameters")
        mesh.post(Activity.IDLE)

    override(built.source, "release", released)
    engine = ZeroEngine.build(model, mesh, options, built.source, tiers, divided.cuts)
    built.source.close()
    if feeds is not None and mesh.device.type == "cpu":
        prevent_fragmentation()
        if options.weights is not None:  # Who lacks memory: large activations leave holes in the heap.
            reuse_freed_memory(4 << 20)
    return engine


def build_whole_model(model: Any, config: TrainerConfig, tokenizer: Tokenizer | None) -> BuiltModel:
    """Build the undivided model with its adapters and weight source, from a module, a callable (on meta) or the configuration.
    Raises `ConfigError` for a model that cannot be built, and `LostValuesError` for meta weights without an initialiser."""
    seed, compile_ = config.run.seed, None

    def call() -> nn.Module:
        nonlocal compile_
        made = model() if callable(model) and not isinstance(model, nn.Module) else model
        if not isinstance(made, nn.Module):
            raise ConfigError(f"the callable that is passed as model returned a {type(made).__name__}; return an nn.Module")
        inside, compile_ = unwrap(made)
        make_plain(inside)
        return inside

    if model is None:
        built = build_model(config.model, seed, tokenizer)
    elif isinstance(model, nn.Module):
        built = wrap_passed_model(call(), seed)
    elif callable(model):
        built = build_deferred(call, seed)
    else:
        shown = f"{model!r}" if isinstance(model, str | PathLike) else f"a {type(model).__name__}"
        why = f"model is {shown}; give an nn.Module or a callable that builds one"
        raise ConfigError(f"{why}, or name a local Hugging Face directory in the configuration: model.source")
    built = replace(built, compile=compile_)
    built = add_adapters(built, config.model, seed, getattr(torch, config.precision.compute))
    choose_trained(built.model, config.model.train)
    return built


def _check_first(feeds: Feeds, config: TrainerConfig, inputs: ForwardInputs, loss: Loss, user: UserInputs) -> list[str]:
    """Check settings and each dataset's first batch before anything large is allocated; returns notes."""
    if user.compute_loss is not None and (problems := disagreements(config, under="compute_loss")):
        raise ConfigError(problems)
    if feeds.data.tokenizer is not None:
        inputs.check_length(config.data.sequence_length, "lower data.sequence_length")
        labelled = any(each.label for each in config.data.formats)
        if user.collate is None and loss.kind == "labels" and not loss.causal and not labelled:
            why = f"{inputs.model} does not predict the next token, so plain text has no labels for it"
            raise ConfigError(f"{why}; give train_dataset, or a data_collator that makes labels, or set model.head: causal_lm")
    notes, size = [], feeds.plan.global_size
    resumes, store = config.checkpoint.resume not in ("auto", "never"), CheckpointStore(config.run.directory / FOLDER)
    if config.batch.last == "carry" and (number := feeds.plan.epoch_size or size) < size:
        few = f"train_dataset has {counted(number, 'sample')}, fewer than a global batch of {size}"
        notes.append(f"{few}: samples come again in each")
    for name, feed in feeds.by_name().items():
        if isinstance(feed.dataset, StreamedDataset) and (resumes or store.steps()):
            continue  # A resumed stream was checked when the run began, and does not continue at its beginning.
        batch = feed.first_batch()
        first = feed.dataset[feed.order.dataset_index(0)]
        sample = first if isinstance(first, Mapping) else {}
        if unseen := [field for field in sample if field not in feed.rules.drop_fields(sample)]:
            away = f"which {inputs.model}.forward does not take (data.remove_unused: false keeps them)"
            notes.append(f"{name}: left out before the data_collator {', '.join(unseen)}, {away}")
        inputs.check(batch)
        check_sequence_shards(config, batch)
        loss.count(batch)
        if left_out := [name for name in batch if name not in feed.rules.accepted(batch)]:
            notes.append(f"{name}: left out {', '.join(left_out)}, which {inputs.model}.forward does not take")
    return notes


def check_sequence_shards(config: TrainerConfig, batch: Mapping[str, Any]) -> None:
    """Raise `DataError` for sequences that tensor ranks cannot divide, before a single pipeline stage fails."""
    parallel, ids = config.parallel, batch.get("input_ids")
    if parallel.context > 1:  # Its ranks pad sequences.
        return
    if parallel.sequence and isinstance(ids, torch.Tensor) and ids.ndim > 1 and ids.shape[1] % parallel.tensor:
        why = f"sequences of {ids.shape[1]} tokens cannot be shared out to {parallel.tensor} tensor ranks (parallel.sequence)"
        raise DataError(f"{why}; pad them to a multiple of {parallel.tensor}, or set parallel.sequence: false")
