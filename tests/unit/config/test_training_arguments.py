"""TrainingArguments in place of a configuration: every field is mapped, without effect or refused, as transformers means it."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    get_scheduler,
)

from zeromesh.errors import ConfigError
from zeromesh.trainer.callbacks.transformers_callbacks import arguments_of
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.messages import known_paths
from zeromesh.trainer.config.migration.training_arguments import read_training_arguments
from zeromesh.trainer.config.migration.training_arguments_table import TABLE
from zeromesh.trainer.config.migration.translate import Fate, LaunchFacts, SettingRow
from zeromesh.trainer.config.trainer_config import TrainerConfig, schedule_of
from zeromesh.trainer.setup.engine_options import biases_and_norms

PLACE = LaunchFacts(ranks=4, samples=1000)
_BASE = Seq2SeqTrainingArguments(output_dir="runs/base", use_cpu=True)


def arguments(**fields: Any) -> Any:
    """TrainingArguments with some fields changed; making new ones asks for devices each time, which takes long."""
    made = copy.copy(_BASE)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Sizes:
    """Stands in for accelerate's ParallelismConfig, which wants a world of as many ranks."""

    def __init__(self, **sizes: int) -> None:
        vars(self).update(sizes)


@pytest.fixture(autouse=True)
def _no_wandb_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)


# For every field: another value than its default, and what else has to be set for it to matter.
OTHER: dict[str, Any] = {
    "output_dir": "elsewhere/other",
    "per_device_train_batch_size": 3,
    "num_train_epochs": 1.5,
    "max_steps": 70,
    "learning_rate": 0.25,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": ({"num_cycles": 2}, {"lr_scheduler_type": "cosine"}),
    "warmup_steps": 12,
    "optim": "sgd",
    "optim_args": ("momentum=0.9", {"optim": "sgd"}),
    "weight_decay": 0.1,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-6,
    "optim_target_modules": ["q_proj"],
    "gradient_accumulation_steps": 2,
    "average_tokens_across_devices": False,
    "max_grad_norm": 0.5,
    "label_smoothing_factor": 0.1,
    "bf16": True,
    "fp16": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "tf32": True,
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": ({"offload": True}, {"activation_checkpointing": True}),
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": ({"offload": True}, {"activation_checkpointing": True}),
    "torch_compile": True,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "use_cache": True,
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 10,
    "auto_find_batch_size": True,
    "logging_strategy": "no",
    "logging_steps": 10,
    "logging_first_step": True,
    "log_on_each_node": False,
    "logging_nan_inf_filter": False,
    "include_num_input_tokens_seen": "all",
    "log_level": "info",
    "log_level_replica": "info",
    "disable_tqdm": True,
    "report_to": ["wandb"],
    "run_name": "a name",
    "project": "a project",
    "trackio_space_id": "space",
    "trackio_bucket_id": "bucket",
    "trackio_static_space_id": "static",
    "eval_strategy": ("epoch", {"eval_steps": 500}),
    "eval_steps": (30, {"eval_strategy": "steps", "eval_steps": 500}),
    "eval_delay": 2,
    "per_device_eval_batch_size": 5,
    "prediction_loss_only": True,
    "eval_on_start": True,
    "eval_do_concat_batches": False,
    "eval_use_gather_object": True,
    "eval_accumulation_steps": 3,
    "include_for_metrics": ["inputs"],
    "batch_eval_metrics": True,
    "save_only_model": True,
    "save_strategy": "epoch",
    "save_steps": 40,
    "save_on_each_node": True,
    "save_total_limit": 2,
    "enable_jit_checkpoint": (True, {"save_strategy": "no"}),
    "push_to_hub": (True, {"hub_strategy": "end"}),
    "hub_token": "hf_of_nobody",
    "hub_private_repo": True,
    "hub_model_id": "me/model",
    "hub_strategy": ("checkpoint", {"push_to_hub": True, "hub_strategy": "end"}),
    "hub_always_push": True,
    "hub_revision": "main",
    "load_best_model_at_end": (True, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
    "ignore_data_skip": True,
    "restore_callback_states_from_checkpoint": True,
    "full_determinism": True,
    "seed": 7,
    "data_seed": 8,
    "use_cpu": True,
    "accelerator_config": {"split_batches": True},
    "parallelism_config": Sizes(tp_size=2),
    "dataloader_drop_last": True,
    "dataloader_num_workers": 2,
    "dataloader_pin_memory": (False, {"use_cpu": False, "dataloader_pin_memory": True}),
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 2,
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_in_order": False,
    "remove_unused_columns": False,
    "label_names": ["target"],
    "train_sampling_strategy": "sequential",
    "length_column_name": "size",
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "ddp_backend": "gloo",
    "ddp_timeout": 30,
    "fsdp": True,
    "fsdp_config": ({"reshard_after_forward": False}, {"fsdp": True}),
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "debug": ["underflow_overflow"],
    "skip_memory_metrics": False,
    "do_train": True,
    "do_eval": True,
    "do_predict": True,
    "resume_from_checkpoint": str(Path(__file__).parent),  # a directory that is there
    "local_rank": 3,
    "sortish_sampler": True,
    "predict_with_generate": True,
    "generation_max_length": 20,
    "generation_num_beams": 2,
    "generation_config": "model",
}
# Fields that are mapped where they can be, and refused as they are set above.
REFUSED_SO = {"bf16_full_eval", "fp16_full_eval", "accelerator_config", "hub_strategy"}
# Fields whose values are read elsewhere.
ELSEWHERE = {"deepspeed", "use_cpu", "hub_token"}


def test_every_field_of_the_installed_version_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
    assert {field.name for field in dataclasses.fields(TrainingArguments) if field.init} <= fields
    names = [row.name for row in TABLE]
    assert set(names) == fields
    assert len(names) == len(set(names)) > 110
    assert set(OTHER) == fields, "a value other than the default, for the test below"


def test_rows_name_keys_that_exist() -> None:
    assert [key for row in TABLE for key in row.keys if key not in known_paths()] == []
    assert [row.name for row in TABLE if row.fate is not Fate.MAPPED and (row.keys or row.convert)] == []


@pytest.mark.parametrize("row", [row for row in TABLE if row.name not in ELSEWHERE], ids=lambda row: row.name)
def test_a_field_does_what_its_row_says(row: SettingRow) -> None:
    value, with_it = OTHER[row.name] if isinstance(OTHER[row.name], tuple) else (OTHER[row.name], {})
    before = read_training_arguments(arguments(**with_it), PLACE)
    after = read_training_arguments(arguments(**with_it | {row.name: value}), PLACE)
    assert not before.problems
    changed = {key for key in {*before.values, *after.values} if before.values.get(key) != after.values.get(key)}
    said = [note for note in after.notes if note not in before.notes]
    if row.fate is Fate.REFUSED or row.name in REFUSED_SO:
        assert [problem.partition(":")[0] for problem in after.problems] == [row.name]
        assert not changed
        return
    assert not after.problems
    if row.fate is Fate.IDLE:
        assert not changed
        assert [note for note in said if row.name in note and "no effect" in note], after.notes
    else:
        # A curve with fewer options also lets the others go.
        assert changed
        assert changed <= set(row.keys)
        assert [note for note in said if note.startswith(f"TrainingArguments: {row.name}: ")]
    assert load_config(None, arguments=arguments(**with_it | {row.name: value}), ranks=4, samples=1000)


def test_what_nobody_asked_for_is_as_in_transformers() -> None:
    config = load_config(arguments(), ranks=2)
    assert config.batch.model_dump() == {
        "global_size": 16,
        "micro_size": 8,
        "eval_micro_size": 8,
        "last": "partial",
        "average": "tokens",
    }
    optimizer, schedule = config.optimizer, config.schedule
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.eps) == ("adamw", 5e-5, (0.9, 0.999), 1e-8)
    assert (optimizer.weight_decay, optimizer.exempt) == (0.0, "none")
    assert (schedule.name, schedule.warmup_steps, schedule.warmup_ratio) == ("linear", 0, None)
    assert config.precision.compute == "float32"
    assert (config.run.epochs, config.run.clip_norm, config.run.seed) == (3.0, 1.0, 42)
    assert (config.run.output_dir, config.run.name) == ("runs", "base")
    assert (config.run.log_every, config.run.eval_every) == (500, 0)
    assert (config.checkpoint.every_steps, config.checkpoint.keep_last, config.checkpoint.resume) == (500, 0, "never")
    assert config.tracking.backends == ()
    assert config.zero.stage == TrainerConfig().zero.stage
    assert [note.split(": ")[1] for note in config.notes] == ["output_dir"]


@settings(max_examples=60, deadline=None)
@given(
    micro=st.integers(1, 64),
    accumulation=st.integers(1, 32),
    ranks=st.integers(1, 32),
    tensor=st.sampled_from([None, 1, 2, 4]),
    named=st.booleans(),
)
def test_a_global_batch_is_microbatch_times_accumulation_times_data_ranks(
    micro: int, accumulation: int, ranks: int, tensor: int | None, named: bool
) -> None:
    asked = arguments(per_device_train_batch_size=micro, gradient_accumulation_steps=accumulation)
    if named:
        asked.parallelism_config = Sizes(tp_size=tensor or 1)
    own = {} if named or tensor is None else {"parallel": {"tensor": tensor}}
    config = load_config(own, arguments=asked, ranks=ranks * (tensor or 1))
    assert config.batch.global_size == micro * accumulation * ranks
    assert config.batch.micro_size == micro
    assert config.parallel.tensor == (tensor or 1)


@pytest.mark.parametrize("warmup", [0, 1, 7, 100, 0.03, 0.5, 0.999])
@pytest.mark.parametrize("steps", [100, 333])
def test_a_warm_up_is_as_long_as_in_transformers(warmup: float, steps: int) -> None:
    asked = arguments(warmup_steps=warmup, max_steps=steps)
    assert load_config(asked, ranks=1).schedule.warmup_steps == asked.get_warmup_steps(steps)


def test_a_part_of_unknown_steps_stays_a_part() -> None:
    schedule = load_config(arguments(warmup_steps=0.1), ranks=1).schedule
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (0, 0.1)


CURVES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.25}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("polynomial", {}),
    ("polynomial", {"power": 2.0, "lr_end": 0.01}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 50}),
    ("cosine_with_min_lr", {"min_lr": 0.03}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", {"min_lr": 0.01, "warmup_lr_rate": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 15}),
    ("warmup_stable_decay", {"num_decay_steps": 15, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
    ("warmup_stable_decay", {"num_decay_steps": 15, "warmup_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 15, "warmup_type": "1-sqrt", "decay_type": "linear"}),
]


@pytest.mark.parametrize("warmup", [0, 1, 8])
@pytest.mark.parametrize(("name", "options"), CURVES, ids=[f"{name}-{'-'.join(options)}" for name, options in CURVES])
def test_learning_rates_are_those_of_transformers(name: str, options: dict[str, Any], warmup: int) -> None:
    asked = arguments(
        lr_scheduler_type=name, lr_scheduler_kwargs=options, warmup_steps=warmup, max_steps=60, learning_rate=0.3
    )
    config = load_config(asked, ranks=1)
    schedule = schedule_of(config)
    rates = [config.optimizer.lr * schedule.factor(step) for step in range(60)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = get_scheduler(name, optimizer, asked.get_warmup_steps(60), 60, scheduler_specific_kwargs=options)
    expected = []
    for _ in range(60):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


MODELS = {
    "gpt2": {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11},
    "bert": {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8},
    "llama": {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8},
    "qwen3": {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8},
    "t5": {"num_layers": 1, "d_model": 8, "d_ff": 8, "num_heads": 2},
    "clip": {},
    "dinov2": {"num_hidden_layers": 1, "hidden_size": 12, "num_attention_heads": 2},
}


@pytest.mark.parametrize("kind", MODELS)
def test_weight_decay_leaves_out_what_transformers_leaves_out(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **MODELS[kind]))
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    names = {name for name, _ in model.named_parameters()}
    assert set(biases_and_norms(model)) == names - decayed
    assert decayed & names
    assert names - decayed


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"eval_strategy": "steps", "eval_steps": 20}, {"run.eval_every": 20}),
        ({"eval_strategy": "steps", "eval_steps": 0.25}, {"run.eval_every": 50}),
        ({"eval_strategy": "steps", "eval_steps": 0.301}, {"run.eval_every": 61}),
        ({"eval_strategy": "epoch"}, {"run.eval_every": "epoch", "run.eval_at_end": True}),
        ({"eval_strategy": "no"}, {"run.eval_every": 0, "run.eval_at_end": False}),
        ({"save_strategy": "steps", "save_steps": 0.5}, {"checkpoint.every_steps": 100}),
        ({"save_strategy": "epoch"}, {"checkpoint.every_steps": "epoch"}),
        ({"save_strategy": "no"}, {"checkpoint.every_steps": 0}),
        ({"save_strategy": "no", "enable_jit_checkpoint": True}, {"checkpoint.every_steps": 10**9}),
        ({"save_strategy": "epoch", "enable_jit_checkpoint": True}, {"checkpoint.every_steps": "epoch"}),
        (
            {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 20},
            {"checkpoint.every_steps": 20, "checkpoint.keep_best": 1, "checkpoint.keep_last": 1},
        ),
        ({"logging_strategy": "steps", "logging_steps": 0.1}, {"run.log_every": 20}),
        ({"logging_strategy": "no"}, {"run.log_every": 0}),
        ({"logging_strategy": "epoch"}, {"run.log_every": "epoch"}),
        ({"save_total_limit": 2}, {"checkpoint.keep_last": 2}),
        ({"metric_for_best_model": "eval_f1", "greater_is_better": True}, {"run.metric": "f1", "run.metric_goal": "highest"}),
        ({"metric_for_best_model": "loss", "greater_is_better": False}, {"run.metric": "loss", "run.metric_goal": "lowest"}),
        ({"output_dir": "out"}, {"run.output_dir": ".", "run.name": "out"}),
        ({"output_dir": "/a/b/c-1/"}, {"run.output_dir": "/a/b", "run.name": "c-1"}),
        ({"output_dir": "a/.."}, {}),
        ({"resume_from_checkpoint": True}, {"checkpoint.resume": "auto"}),
        ({"bf16": True, "bf16_full_eval": True}, {"precision.compute": "bfloat16"}),
        ({"mixed_precision": "fp16"}, {"precision.compute": "float16"}),
        ({"mixed_precision": "fp16", "bf16": True}, {"precision.compute": "bfloat16"}),
        ({"optim": "adagrad"}, {"optimizer.name": "adagrad", "optimizer.eps": 1e-10}),
        ({"optim": "sgd", "optim_args": "momentum=0.9"}, {"optimizer.name": "sgd", "optimizer.momentum": 0.9}),
        ({"report_to": ["none"]}, {"tracking.backends": ()}),
        ({"report_to": ["wandb", "tensorboard"]}, {"tracking.backends": ("wandb", "tensorboard")}),
        ({"fsdp": True, "fsdp_config": {"fsdp_cpu_offload": "true"}}, {"zero.stage": 3, "offload.parameters.tier": "host"}),
        ({"fsdp": True, "fsdp_config": {"reshard_after_forward": "shard_grad_op"}}, {"zero.stage": 2}),
        ({"gradient_checkpointing": True}, {"model.activation_checkpointing": "block"}),
        ({"average_tokens_across_devices": False}, {"batch.average": "samples"}),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_fields_of_many_values(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    # 200 steps in 10 epochs of 20.
    config = load_config(arguments(num_train_epochs=10, per_device_train_batch_size=5, **fields), ranks=2, samples=195)
    for key, value in expected.items():
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optim": "adafactor"}, ["optim: got 'adafactor'", "adamw_torch"]),
        ({"optim": "sgd", "optim_args": "nesterov=true"}, ["optim_args: nesterov of sgd cannot be set"]),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ["lr_scheduler_type: reduce_lr_on_plateau needs the metric"]),
        ({"lr_scheduler_kwargs": {"power": 2}}, ["lr_scheduler_kwargs: linear has no option power"]),
        ({"lr_scheduler_type": "warmup_stable_decay"}, ["num_decay_steps is missing"]),
        ({"learning_rate": -1.0}, ["optimizer.lr: got -1.0", "(TrainingArguments learning_rate)"]),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, ["eval_steps: 0.5 is a part of a run", "set max_steps"]),
        ({"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps: got 0"]),
        ({"output_dir": "out/my run"}, ["output_dir: the last part of 'out/my run' names the run"]),
        ({"report_to": ["azure_ml"]}, ["report_to: azure_ml is not available", "wandb"]),
        ({"ddp_backend": "mpi"}, ["ddp_backend: got 'mpi'; allowed is gloo or nccl"]),
        ({"train_sampling_strategy": "group_by_length"}, ["train_sampling_strategy: got 'group_by_length'"]),
        ({"torch_compile_backend": "eager"}, ["torch_compile_backend: got 'eager'"]),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 2}}, ["every_n_layers 2"]),
        ({"parallelism_config": Sizes(cp_size=2)}, ["parallelism_config: cp_size"]),
        (
            {"fsdp": True, "fsdp_config": {"reshard_after_forward": "hybrid_shard"}},
            ["fsdp_config: reshard_after_forward"],
        ),
        ({"save_strategy": "best"}, ["save_strategy: best needs evaluations"]),
        (
            {"push_to_hub": True, "hub_strategy": "all_checkpoints"},
            ["hub_strategy: all_checkpoints: checkpoints are not uploaded; set it to end"],
        ),
        ({"hub_model_id": "me/my model"}, ["hub.repository: got 'me/my model'", "(TrainingArguments hub_model_id)"]),
        (
            {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
            ["average_tokens_across_devices: false makes the loss depend on which rank"],
        ),
        ({"deepspeed": {"nothing": 1}}, ["deepspeed: is no DeepSpeed configuration"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_says_what_to_do(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments(**fields), ranks=2)
    assert len(caught.value.problems) == 1
    for word in words:
        assert word in str(caught.value)


def test_a_default_that_is_taken_otherwise_is_said() -> None:
    config = load_config(arguments(push_to_hub=True), ranks=1)
    assert config.hub.push
    said = "hub_strategy: every_save: the model is uploaded when the training has ended, not at each save"
    assert any(said in note for note in config.notes)


def test_all_problems_come_at_once() -> None:
    hub = {"push_to_hub": True, "hub_strategy": "checkpoint"}
    asked = arguments(optim="adafactor", neftune_noise_alpha=5.0, adam_beta1=2.0, eval_delay=3, **hub)
    with pytest.raises(ConfigError) as caught:
        load_config({"zero": {"stage": 7}}, ["run.sed=1"], arguments=asked, ranks=1)
    text = str(caught.value)
    for word in (
        "optim:",
        "hub_strategy:",
        "neftune_noise_alpha:",
        "optimizer.betas:",
        "eval_delay:",
        "zero.stage:",
        "run.sed:",
    ):
        assert f"- {word}" in text


def test_a_configuration_changes_single_keys_on_top_of_arguments(tmp_path: Path) -> None:
    path = tmp_path / "more.yaml"
    path.write_text("zero: {stage: 1}\noptimizer: {weight_decay: 0.5}\n")
    config = load_config(path, ["optimizer.eps=1e-3"], arguments=arguments(learning_rate=0.25), ranks=1)
    assert (config.zero.stage, config.optimizer.lr) == (1, 0.25)
    assert (config.optimizer.weight_decay, config.optimizer.eps) == (0.5, 1e-3)
    with pytest.raises(ConfigError, match="it says every key"):
        load_config(TrainerConfig(), arguments=arguments(), ranks=1)
    with pytest.raises(ConfigError, match="both are TrainingArguments"):
        load_config(arguments(), arguments=arguments(), ranks=1)
    with pytest.raises(ConfigError, match="args: got dict; allowed is transformers' TrainingArguments"):
        load_config(arguments={"learning_rate": 1}, ranks=1)


@dataclasses.dataclass
class OwnArguments(TrainingArguments):
    """As scripts make them."""

    flavour: str = "plain"


def test_fields_of_a_subclass_are_said_to_be_its_own() -> None:
    asked = OwnArguments(output_dir="runs/own", use_cpu=True, flavour="sweet")
    config = load_config(asked, ranks=1)
    assert (
        "TrainingArguments: flavour: no effect: fields of OwnArguments that transformers does not have" in config.notes
    )


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("WANDB_MODE", "offline", (("wandb",), "offline", "huggingface")),
        ("WANDB_MODE", "disabled", ((), "online", "huggingface")),
        ("WANDB_PROJECT", "mine", (("wandb",), "online", "mine")),
    ],
)
def test_variables_of_wandb_count_as_in_transformers(
    variable: str, value: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    tracking = load_config(arguments(report_to=["wandb"]), ranks=1).tracking
    assert (tracking.backends, tracking.mode, tracking.project) == expected


def test_callbacks_are_shown_what_a_configuration_says() -> None:
    """`args` of a run that was given a configuration, and no TrainingArguments."""
    said = {
        "run": {"log_first_step": True, "log_every": 7, "epochs": 2.0},
        "optimizer": {"lr": 0.5},
        "hub": {"push": True, "repository": "me/model", "private": True, "revision": "dev"},
    }
    shown = arguments_of(load_config(said))
    assert (shown.logging_first_step, shown.logging_steps) == (True, 7)
    assert (shown.num_train_epochs, shown.learning_rate) == (2.0, 0.5)
    assert (shown.push_to_hub, shown.hub_strategy, shown.hub_model_id) == (True, "end", "me/model")
    assert (shown.hub_private_repo, shown.hub_revision) == (True, "dev")
    assert not arguments_of(TrainerConfig()).logging_first_step


def test_no_secret_is_in_the_notes() -> None:
    config = load_config(arguments(hub_token="hf_of_nobody"), ranks=1)
    assert "hf_of_nobody" not in " ".join(config.notes)


def test_a_field_that_is_not_known_is_refused_when_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = frozenset(row.name for row in TABLE) - {"torch_empty_cache_steps"}
    monkeypatch.setattr("zeromesh.trainer.config.migration.training_arguments._KNOWN", known)
    assert not read_training_arguments(arguments(), PLACE).problems
    (problem,) = read_training_arguments(arguments(torch_empty_cache_steps=3), PLACE).problems
    assert problem.startswith("torch_empty_cache_steps: this version of zeromesh does not know it")


# DeepSpeed configurations inside of arguments

AUTOMATIC: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2},
}


def test_automatic_values_are_those_of_the_arguments(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(AUTOMATIC))
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "learning_rate": 0.5,
        "adam_beta2": 0.98,
        "weight_decay": 0.1,
        "max_grad_norm": 0.7,
        "warmup_steps": 9,
        "max_steps": 90,
        "bf16": True,
    }
    for source in (path, str(path), AUTOMATIC):
        config = load_config(arguments(deepspeed=source, **fields), ranks=2)
        assert (config.batch.micro_size, config.batch.global_size) == (3, 24)
        assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (0.5, (0.9, 0.98), 0.1)
        assert config.optimizer.exempt == "biases_and_norms"
        assert (config.run.clip_norm, config.run.max_steps) == (0.7, 90)
        assert (config.schedule.name, config.schedule.warmup_steps, config.schedule.warmup_shape) == (
            "linear",
            9,
            "log",
        )
        assert (config.precision.compute, config.zero.stage) == ("bfloat16", 2)
    assert "DeepSpeed: optimizer.params.lr: auto -> optimizer.lr: 0.5" in config.notes
    beside = load_config(AUTOMATIC, arguments=arguments(**fields), ranks=2)
    assert beside.model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, "per_device_train_batch_size of TrainingArguments is 8"),
        ({"train_batch_size": 2}, "TrainingArguments is 16"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps of TrainingArguments is 1"),
        ({"gradient_clipping": 2.0}, "max_grad_norm of TrainingArguments is 1.0"),
        ({"bf16": {"enabled": True}}, "of TrainingArguments is false"),
        ({"fp16": {"enabled": True}}, "of TrainingArguments is false"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, "learning_rate of TrainingArguments is 5e-05"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}},
            "warmup_steps of TrainingArguments is 0",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": 5}}},
            "max_steps of TrainingArguments is not set",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_that_disagree_with_the_arguments_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_config(arguments(deepspeed={**AUTOMATIC, **change}), ranks=2)
    # What DeepSpeed's file does not say, the arguments do.
    config = load_config(arguments(deepspeed={"zero_optimization": {"stage": 1}}, learning_rate=0.25), ranks=2)
    assert (config.optimizer.lr, config.schedule.name, config.batch.global_size) == (0.25, "linear", 16)
    assert config.precision.compute == "float32"


def test_a_part_of_a_run_is_counted_as_transformers_does() -> None:
    asked = arguments(num_train_epochs=2.5, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=0.3)
    steps = math.ceil(2.5 * math.ceil(101 / 8))
    assert load_config(asked, ranks=2, samples=101).run.eval_every == math.ceil(0.3 * steps)


def test_models_are_only_looked_at_for_what_decay_leaves_out() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **MODELS["gpt2"]))
    names = biases_and_norms(model)
    assert "transformer.h.0.ln_1.weight" in names
    assert "transformer.h.0.attn.c_attn.bias" in names
    assert "transformer.wte.weight" not in names
