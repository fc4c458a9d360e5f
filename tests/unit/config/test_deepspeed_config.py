"""DeepSpeed configurations in place of one of zeromesh: every key is mapped, without effect or refused, and said to be."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.commands import ended
from tests.unit.config.deepspeed_configs import DOCUMENTED
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.deepspeed import is_deepspeed, nested, read_deepspeed
from zeromesh.trainer.config.foreign_names import TABLE, Fate, SettingRow
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.messages import known_paths
from zeromesh.trainer.config.trainer_config import TrainerConfig, schedule_of

RANKS = 4
BASE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
ADAM = {"optimizer.type": "Adam"}
WARMUP = {"scheduler.type": "WarmupLR"}
LEAST = {"scheduler.params.warmup_min_lr": 1e-5}
DECAY = {"scheduler.type": "WarmupDecayLR"}
COSINE = {"scheduler.type": "WarmupCosineLR"}
CYCLE = {
    "scheduler.type": "OneCycle",
    "scheduler.params.cycle_min_lr": 0.1,
    "scheduler.params.cycle_max_lr": 0.2,
    "scheduler.params.cycle_momentum": False,
}
HALF = {"fp16.enabled": True}
Z = "zero_optimization."
NO_ADAM_W = ADAM | {"optimizer.params.adam_w_mode": False}
AUTO_MOST = {"scheduler.params.warmup_max_lr": "auto"}
CAST = {"torch_autocast.enabled": True, "torch_autocast.dtype": "torch.float16"}
NVME = {f"{Z}offload_optimizer.device": "nvme", f"{Z}offload_optimizer.nvme_path": "/disk"}
CHECKPOINTS = "activation_checkpointing."
BLOCKS = {"model.activation_checkpointing": "block"}
TENSOR_2 = {"tensor_parallel.autotp_size": 2}
MICRO_AUTO = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}

# For every key that is mapped: a value other than its default, and what else has to be set for it to matter.
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "train_batch_size": (32, {"gradient_accumulation_steps": "auto"}),
    "train_micro_batch_size_per_gpu": (3, {}),
    "gradient_accumulation_steps": (2, {}),
    "gradient_clipping": (0.5, {}),
    "dataloader_drop_last": (True, {}),
    "steps_per_print": (10, {}),
    "optimizer.type": ("Adagrad", ADAM),
    "optimizer.params.lr": (0.25, ADAM),
    "optimizer.params.betas": ([0.8, 0.9], ADAM),
    "optimizer.params.eps": (1e-6, ADAM),
    "optimizer.params.weight_decay": (0.1, ADAM),
    "optimizer.params.momentum": (0.9, {"optimizer.type": "SGD"}),
    "optimizer.params.adam_w_mode": (False, ADAM),
    "optimizer.params.torch_adam": (True, ADAM),
    "scheduler.type": ("WarmupLR", {}),
    "scheduler.params.warmup_min_lr": (0.1, {**WARMUP, "scheduler.params.warmup_max_lr": 0.2}),
    "scheduler.params.warmup_max_lr": (0.2, WARMUP),
    "scheduler.params.warmup_num_steps": (7, WARMUP),
    "scheduler.params.warmup_type": ("linear", WARMUP),
    "scheduler.params.total_num_steps": (70, DECAY),
    "scheduler.params.warmup_min_ratio": (0.1, COSINE),
    "scheduler.params.cos_min_ratio": (0.1, COSINE),
    "scheduler.params.cycle_min_lr": (0.05, CYCLE),
    "scheduler.params.cycle_max_lr": (0.4, CYCLE | {"scheduler.params.cycle_min_lr": 0}),
    "scheduler.params.cycle_first_step_size": (10, {**CYCLE, "scheduler.params.cycle_second_step_size": 30}),
    "scheduler.params.cycle_second_step_size": (20, CYCLE),
    "bf16.enabled": (True, {}),
    "bfloat16.enabled": (True, {}),
    "fp16.enabled": (True, {"fp16.enabled": False}),
    "fp16.initial_scale_power": (8, HALF),
    "fp16.loss_scale_window": (500, HALF),
    "torch_autocast.enabled": (True, {}),
    "torch_autocast.dtype": ("bfloat16", {"torch_autocast.enabled": True, "torch_autocast.dtype": "torch.float16"}),
    f"{Z}stage": (2, {}),
    f"{Z}overlap_comm": (False, {}),
    f"{Z}offload_optimizer.device": ("cpu", {}),
    f"{Z}offload_optimizer.nvme_path": ("/disk", {f"{Z}offload_optimizer.device": "nvme"}),
    f"{Z}offload_optimizer.ratio": (0.5, {f"{Z}offload_optimizer.device": "cpu"}),
    f"{Z}offload_param.device": ("cpu", {f"{Z}stage": 3}),
    f"{Z}offload_param.nvme_path": ("/disk", {f"{Z}stage": 3, f"{Z}offload_param.device": "nvme"}),
    f"{Z}cpu_offload": (True, {}),
    f"{Z}cpu_offload_param": (True, {f"{Z}stage": 3}),
    f"{Z}zero_hpz_partition_size": (2, {}),
    f"{Z}mics_shard_size": (2, {}),
    "activation_checkpointing.partition_activations": (True, {}),
    "activation_checkpointing.cpu_checkpointing": (True, {}),
    "activation_checkpointing.number_checkpoints": (4, {}),
    "flops_profiler.enabled": (True, {}),
    "flops_profiler.profile_step": (5, {"flops_profiler.enabled": True}),
    "tensorboard.enabled": (True, {}),
    "wandb.enabled": (True, {}),
    "wandb.project": ("mine", {"wandb.enabled": True}),
    "comet.enabled": (True, {}),
    "comet.project": ("mine", {"comet.enabled": True}),
    "tensor_parallel.autotp_size": (2, {}),
    "tensor_parallel.tp.tp_size": (2, {}),
    "tensor_parallel.tensor_parallel.tp_size": (2, {}),
}
# Keys that change nothing by themselves, or are decided by where they are.
BESIDE = {"scheduler.params.cycle_momentum"}
TENSOR = {"batch.global_size"}
"""What tensor ranks leave fewer data ranks for."""


def source(flat: dict[str, Any]) -> dict[str, Any]:
    return BASE | nested(flat)


def leaves(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in ROWS:
            yield from leaves(value, f"{path}.")
        else:
            yield path


ROWS = {row.name: row for row in TABLE}


def problems_of(source: Any, overrides: tuple[str, ...] = (), ranks: int = 2) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides, ranks=ranks)
    return caught.value.problems


def test_rows_name_keys_that_exist_and_each_setting_once() -> None:
    assert [key for row in TABLE for key in row.keys if key not in known_paths()] == []
    assert len(ROWS) == len(TABLE) > 200
    assert {row.name for row in TABLE if row.fate is Fate.MAPPED} == {*OTHER, *BESIDE}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_a_key_does_what_its_row_says(row: SettingRow) -> None:
    if row.name in BESIDE:
        return
    where = {"optimizer": ADAM, "scheduler": WARMUP}.get(row.name.partition(".")[0], {})
    value, with_it = OTHER.get(row.name, (3.5, where))
    before = read_deepspeed(source(with_it), RANKS)
    after = read_deepspeed(source(with_it | {row.name: value}), RANKS)
    assert not before.problems
    changed = {key for key in {*before.values, *after.values} if before.values.get(key) != after.values.get(key)}
    if row.fate is Fate.REFUSED:
        assert [problem.partition(":")[0] for problem in after.problems] == [row.name]
        assert not changed
        return
    assert not after.problems
    if row.fate is Fate.IDLE:
        assert not changed
        assert [note for note in after.notes if row.name in note and "no effect" in note]
    else:
        assert changed
        extra = TENSOR if row.name.startswith("tensor_parallel") else {"schedule.warmup_steps", "schedule.warmup_shape"}
        assert changed <= {*row.keys, *extra} or row.name.endswith(".type")
        assert [note for note in after.notes if note.startswith(f"DeepSpeed: {row.name}: ")]


@pytest.mark.parametrize("name", DOCUMENTED)
@pytest.mark.parametrize("as_file", [False, True])
def test_documented_configurations_load_and_account_for_every_key(name: str, as_file: bool, tmp_path: Path) -> None:
    source: Any = DOCUMENTED[name]
    if as_file:
        source = tmp_path / "ds.json"
        source.write_text(json.dumps(DOCUMENTED[name]), encoding="utf-8")
    config = load_config(source, ranks=2)
    report = "\n".join(config.notes)
    settings = {key: value for key, value in DOCUMENTED[name].items() if key != "zeromesh"}
    for path in leaves(settings):
        assert f"{path}:" in report or f"{path}," in report or path == "zero_optimization", path
    assert load_config(config).notes == config.notes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zero1", {"zero.stage": 1, "offload.optimizer.tier": "none", "batch.micro_size": 2, "batch.global_size": 16}),
        ("zero2", {"zero.stage": 2, "zero.overlap": True, "offload.optimizer.tier": "host"}),
        ("zero3", {"zero.stage": 3, "offload.optimizer.tier": "host", "offload.parameters.tier": "host"}),
        ("nvme", {"offload.optimizer.tier": "file", "offload.parameters.tier": "file", "offload.directory": "/local_nvme"}),
        ("zero2-whole", {"schedule.name": "constant_with_warmup", "schedule.warmup_shape": "log", "optimizer.lr": 3e-4}),
        ("zero3-whole", {"schedule.name": "linear", "run.log_every": 2000, "precision.compute": "bfloat16"}),
        ("fp16", {"precision.compute": "float16", "precision.loss_scale.growth_interval": 1000, "batch.global_size": 8}),
        ("bf16", {"precision.compute": "bfloat16", "precision.reduce": "float32"}),
        ("optimizer", {"optimizer.lr": 3e-5, "optimizer.weight_decay": 0.0, "optimizer.betas": (0.9, 0.999)}),
        ("deepspeed-readme", {"zero.stage": 1, "batch.micro_size": 4, "optimizer.name": "adamw"}),
        ("deepspeed-cifar", {"precision.loss_scale.initial_scale": 2.0**15, "run.max_steps": 3000, "zero.stage": 0}),
        ("inference", {"precision.compute": "float32", "batch.global_size": 2, "schedule.name": "constant"}),
    ],
)  # fmt: skip
def test_documented_configurations_mean_what_they_say(name: str, expected: dict[str, Any]) -> None:
    config = load_config(DOCUMENTED[name], ranks=2)
    for key, value in expected.items():
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


@pytest.mark.parametrize(
    ("flat", "expected"),
    [
        ({}, {"run.clip_norm": 1.0, "precision.compute": "float32", "zero.stage": 0, "schedule.warmup_steps": 0}),
        (ADAM, {"optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0}),
        (ADAM | {"optimizer.params.torch_adam": True, **DECAY}, {"optimizer.weight_decay": 0.01, "optimizer.lr": 1e-3}),
        ({"optimizer.type": "SGD"} | COSINE, {"optimizer.lr": 1e-3, "optimizer.momentum": 0.0, "schedule.min_ratio": 1e-4}),
        ({"optimizer.type": "Adagrad"} | CYCLE, {"optimizer.eps": 1e-10, "optimizer.lr": 0.2, "schedule.min_ratio": 0.5}),
        ({"optimizer.type": "Adagrad"} | WARMUP, {"optimizer.lr": 1e-2, "schedule.warmup_steps": 1000}),
        (WARMUP | {"scheduler.params.warmup_num_steps": 1}, {"schedule.warmup_steps": 2, "schedule.warmup_shape": "log"}),
        (WARMUP | ADAM | {"optimizer.params.lr": 2e-3} | LEAST, {"optimizer.lr": 2e-3, "schedule.start_ratio": 0.005}),
        (CYCLE | {"scheduler.params.cycle_min_lr": 0.2}, {"schedule.warmup_steps": 2000, "run.max_steps": 4000}),
        (HALF, {"precision.loss_scale.initial_scale": 65536, "precision.loss_scale.growth_interval": 1000}),
        (HALF | {"fp16.initial_scale_power": 0}, {"precision.loss_scale.initial_scale": 1}),
        (HALF | {"fp16.initial_scale_power": 126}, {"precision.loss_scale.initial_scale": 2.0**126}),
        ({"dataloader_drop_last": True, "zero_optimization": True}, {"batch.last": "drop", "zero.stage": 1}),
        ({"dataloader_drop_last": False, f"{Z}mics_shard_size": 1}, {"batch.last": "carry", "parallel.replicate": 4}),
        ({"flops_profiler.enabled": True, f"{Z}mics_shard_size": 4}, {"profile.steps": [1, 1], "parallel.replicate": 1}),
        (NO_ADAM_W, {"optimizer.name": "adam", "optimizer.weight_decay": 0.0, "optimizer.exempt": "none"}),
        (NO_ADAM_W | {"optimizer.params.torch_adam": True}, {"optimizer.name": "adam", "optimizer.weight_decay": 0.0}),
        (NO_ADAM_W | {"optimizer.type": "adamW"}, {"optimizer.name": "adamw", "optimizer.exempt": "none"}),
        (ADAM | {"optimizer.params.lr": 2e-3} | DECAY, {"optimizer.lr": 1e-3, "run.max_steps": None}),
        (ADAM | {"optimizer.params.lr": 2e-3} | DECAY | AUTO_MOST, {"optimizer.lr": 2e-3, "schedule.min_ratio": None}),
        (DECAY | LEAST, {"schedule.start_ratio": 0.01}),
        (ADAM | WARMUP | LEAST, {"schedule.start_ratio": 0.01, "schedule.warmup_ratio": None}),
        ({"optimizer.type": "Adagrad"} | WARMUP | LEAST, {"schedule.start_ratio": 1e-3}),
        (WARMUP | {"scheduler.params.warmup_num_steps": "auto"}, {"schedule.warmup_steps": None}),
        (WARMUP | {"scheduler.params.total_num_steps": 70}, {"run.max_steps": None}),
        (COSINE | {"scheduler.params.total_num_steps": 70}, {"run.max_steps": 70, "schedule.start_ratio": None}),
        (CYCLE | {"scheduler.params.cycle_first_step_size": 10}, {"schedule.warmup_steps": 10, "run.max_steps": 20}),
        (HALF | {"torch_autocast.enabled": False}, {"precision.compute": "float16"}),
        ({"bf16.enabled": True} | CAST, {"precision.compute": "bfloat16", "precision.loss_scale.initial_scale": None}),
        (CAST, {"precision.compute": "float16", "precision.loss_scale.initial_scale": 65536}),
        ({"bf16.enabled": "auto"}, {"precision.compute": None}),
        ({f"{Z}stage": "auto", f"{Z}overlap_comm": None}, {"zero.stage": None, "zero.overlap": None}),
        ({f"{Z}zero_hpz_partition_size": 1, "gradient_clipping": "auto"}, {"parallel.shard": None, "run.clip_norm": None}),
        ({f"{Z}zero_hpz_partition_size": 2}, {"parallel.shard": 2, "parallel.replicate": 2, "parallel.tensor": None}),
        ({f"{Z}mics_shard_size": 2, **TENSOR_2}, {"parallel.shard": 2, "parallel.replicate": 1, "parallel.tensor": 2}),
        ({f"{Z}cpu_offload": True, f"{Z}offload_optimizer.device": "none"}, {"offload.optimizer": "none"}),
        ({f"{Z}cpu_offload": True, f"{Z}cpu_offload_param": False}, {"offload.optimizer": "host", "offload.parameters": "none"}),
        (NVME | {f"{Z}offload_optimizer.ratio": 0}, {"offload.optimizer": "none", "offload.directory": None}),
        (NVME | {f"{Z}offload_optimizer.ratio": 1}, {"offload.optimizer": "file", "offload.directory": "/disk"}),
        (NVME | {f"{Z}offload_optimizer.device": "CPU"}, {"offload.optimizer": "host", "offload.directory": None}),
        ({f"{CHECKPOINTS}cpu_checkpointing": True}, BLOCKS | {"offload.activations": "host"}),
        ({f"{CHECKPOINTS}partition_activations": True}, BLOCKS | {"offload.activations": None}),
        ({f"{CHECKPOINTS}cpu_checkpointing": False}, {"model.activation_checkpointing": None, "offload.activations": None}),
        ({"tensorboard.enabled": True, "wandb.project": "a"}, {"tracking.backends": ["tensorboard"], "tracking.mode": None}),
        ({"wandb.enabled": True, "wandb.project": "a"}, {"tracking.mode": "online", "tracking.project": "a"}),
        ({"comet.enabled": True, "wandb.project": "a"}, {"tracking.backends": ["comet_ml"], "tracking.project": None}),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}, {"batch.micro_size": 2, "batch.global_size": 16}),
        ({"gradient_accumulation_steps": "auto"}, {"batch.micro_size": 2, "batch.global_size": 8}),
        (MICRO_AUTO | {"train_batch_size": 24}, {"batch.micro_size": 2, "batch.global_size": 24}),
        (MICRO_AUTO | {"train_batch_size": 12}, {"batch.micro_size": 1, "batch.global_size": 12}),
        (MICRO_AUTO | {"train_batch_size": 32, "gradient_accumulation_steps": 2}, {"batch.micro_size": 4}),
        ({"zero_optimization": False}, {"zero.stage": 0}),
    ],
)  # fmt: skip
def test_defaults_and_bounds_are_those_of_deepspeed(flat: dict[str, Any], expected: dict[str, Any]) -> None:
    """None stands for a key that is not set, or that is set to null."""
    read = read_deepspeed(source(flat), RANKS)
    assert not read.problems
    assert {key: read.values.get(key) for key in expected} == expected


def test_a_report_says_of_every_setting_what_becomes_of_it() -> None:
    given = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False, "loss_scale_window": 500},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "allgather_bucket_size": 5},
        "amp": {"enabled": False},
    }
    *mapped, done, idle, batch, optimizer, schedule = read_deepspeed(given, RANKS).notes
    assert sorted(mapped) == [
        "DeepSpeed: bf16.enabled: auto -> zeromesh's default",
        "DeepSpeed: fp16.enabled: false -> nothing, by what else is set",
        "DeepSpeed: fp16.loss_scale_window: 500 -> nothing, by what else is set",
        "DeepSpeed: zero_optimization.stage: 2 -> zero.stage: 2",
    ]
    assert done == "DeepSpeed: amp: what is done here anyway"
    names = "zero_optimization.reduce_bucket_size, zero_optimization.allgather_bucket_size"
    assert idle.startswith(f"DeepSpeed: {names}: no effect: ")
    assert batch.startswith("DeepSpeed: without train_batch_size and train_micro_batch_size_per_gpu")
    assert optimizer == "DeepSpeed: no optimizer is given: zeromesh's default replaces it"
    assert schedule == "DeepSpeed: no scheduler is given: the learning rate is constant"


def test_automatic_values_are_zeromeshs_defaults_and_said_to_be() -> None:
    config = load_config(DOCUMENTED["zero3-whole"], ranks=2)
    default = TrainerConfig()
    assert config.optimizer.model_dump() == default.optimizer.model_dump()
    assert (config.batch.global_size, config.batch.micro_size) == (default.batch.global_size, default.batch.micro_size)
    assert (config.run.clip_norm, config.run.max_steps) == (default.run.clip_norm, default.run.max_steps)
    assert "DeepSpeed: optimizer.params.lr: auto -> zeromesh's default" in config.notes


@settings(max_examples=80, deadline=None)
@given(
    micro=st.integers(1, 16),
    accumulation=st.integers(1, 16),
    ranks=st.integers(1, 16),
    given_names=st.sets(st.sampled_from(["train", "micro", "accumulation"]), min_size=1),
    wrong=st.integers(0, 1),
)
def test_the_batch_equation(micro: int, accumulation: int, ranks: int, given_names: set[str], wrong: int) -> None:
    whole = micro * accumulation * ranks
    names = {
        "train": ("train_batch_size", whole + wrong),
        "micro": ("train_micro_batch_size_per_gpu", micro),
        "accumulation": ("gradient_accumulation_steps", accumulation),
    }
    source = dict(names[name] for name in given_names)
    source["zero_optimization"] = {"stage": 1}
    if "train" in given_names and (whole + wrong) % (
        ranks * (micro if "micro" in given_names else 1) * (accumulation if "accumulation" in given_names else 1)
    ):
        (problem,) = problems_of(source, ranks=ranks)
        assert "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size" in problem
        return
    if given_names == {"train", "micro", "accumulation"} and wrong:
        return  # divisible by chance: refused too, but with other numbers
    config = load_config(source, ranks=ranks)
    if "train" in given_names:
        assert config.batch.global_size == whole + wrong
    elif given_names == {"micro", "accumulation"}:
        assert config.batch.global_size == whole
    if "micro" in given_names:
        assert config.batch.micro_size == micro
    assert config.batch.global_size % (config.batch.micro_size * ranks) == 0


def test_a_batch_that_does_not_add_up_is_refused_as_deepspeed_does() -> None:
    source = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    assert load_config(source, ranks=2).batch.global_size == 32
    (problem,) = problems_of(source, ranks=1)
    assert "Check batch related parameters" in problem
    assert "32 != 4 * 4 * 1" in problem
    # Tensor and context ranks, and the stages of a pipeline, work on one batch together.
    assert load_config({**source, "tensor_parallel": {"autotp_size": 2}}, ranks=4).batch.global_size == 32
    for parallel in ({"pipeline": 2}, {"tensor": 2}, {"context": 2}):
        assert load_config({**source, "zeromesh": {"parallel": parallel}}, ranks=4).batch.global_size == 32


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"zero_optimization": {"stag": 3}}, ["zero_optimization.stag: unknown key (got 3)", "zero_optimization.stage"]),
        ({"zero_optimisation": {"stage": 3}, "fp16": {}}, ["zero_optimisation: unknown key", "did you mean zero_optimization?"]),
        ({"zero_optimization": {"gradient_clippin": 1}}, ["did you mean gradient_clipping?"]),
        ({"fp16": {"enabled": True, "scale": 3}}, ["fp16.scale: unknown key", "loss_scale"]),
        ({"fp16": {"enabled": True, "initial_scale_power": 127}}, ["got 127; allowed is an integer >= 0 and <= 126"]),
        ({"fp16": 3}, ["fp16: got 3; allowed is a mapping of enabled"]),
        ({"zero_optimization": {"stage": 4}}, ["zero.stage: got 4", "(DeepSpeed zero_optimization.stage)"]),
        ({"zero_optimization": {"stage": 2.5}}, ["zero_optimization.stage: got 2.5; allowed is an integer"]),
        ({"zero_optimization": {"stage": "2"}}, ["zero_optimization.stage: got '2'; allowed is an integer"]),
        ({"train_batch_size": "32"}, ["train_batch_size: got '32'; allowed is an integer >= 1"]),
        ({"gradient_clipping": None}, ["run.clip_norm: got null", "(DeepSpeed gradient_clipping)"]),
        ({"optimizer": {"type": "Lamb", "params": {}}}, ["optimizer.type: got 'Lamb'", "AdamW"]),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, ["got 'OneBitAdam'"]),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, ["bias_correction: false is not available"]),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, ["optimizer.lr: got -1", "(DeepSpeed optimizer.params.lr)"]),
        ({"scheduler": {"type": "LRRangeTest", "params": {}}}, ["got 'LRRangeTest'", "WarmupLR"]),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}},
            ["cycle_momentum: momentum does not cycle; set it to false"],
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_momentum": False, "cycle_max_lr": 0.2}}},
            ["OneCycle needs cycle_min_lr and cycle_max_lr"],
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4], "warmup_num_steps": 5}}},
            ["scheduler.params.warmup_max_lr: got [0.001, 0.0001]; allowed is a number"],
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_momentum": False, "cycle_min_lr": 0.3, "cycle_max_lr": 0.2}}},
            ["of which it is the higher"],
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_momentum": False, "cycle_min_lr": 0, "cycle_max_lr": 0}}},
            ["OneCycle needs cycle_min_lr and cycle_max_lr"],
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["cannot be simultaneously enabled"]),
        (
            {"torch_autocast": {"enabled": True, "dtype": "int8"}},
            ["torch_autocast.dtype: got 'int8'; allowed is bfloat16 or float16"],
        ),
        ({"fp16": True}, ["fp16: got true; allowed is a mapping of enabled"]),
        ({"scheduler": {"params": {"warmup_num_steps": 5}}}, ["scheduler.type: got null; allowed is WarmupLR, "]),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, ["fp16.loss_scale: 128 is not available", "set it to 0"]),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ["master weights are in float32"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, ["allowed is none, cpu or nvme"]),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            ["offload.parameters: host does not go with zero.stage 2"],
        ),
        ({"zero_optimization": {"zero_hpz_partition_size": 3}}, ["3 does not divide the 2 data ranks"]),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, ["zero_optimization.zenflow:", "is not available"]),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, ["amp:", "set bf16 or fp16"]),
        ({"compression_training": {"weight_quantization": {}}}, ["compression_training:"]),
        ({"elasticity": {"enabled": True}}, ["elasticity:", "--nnodes MIN:MAX"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op: 'sum' is not available"]),
        ({"checkpoint": {"use_node_local_storage": True}, "bf16": {"enabled": True}}, ["use_node_local_storage"]),
        ({"comet": {"enabled": False, "api_key": "k123"}}, ["comet.api_key: <redacted> is not available"]),
        ({"bf16": {"enabled": True}, "zeromesh": {"run": {"max_step": 3}}}, ["run.max_step: unknown key", "run.max_steps"]),
        ({"bf16": {"enabled": True}, "zeromesh": 3}, ["zeromesh: got 3; allowed is a mapping"]),
        ({"bf16": {"enabled": True}, "steps_per_print": "often"}, ["steps_per_print: got 'often'; allowed is an integer >= 1"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_refused_says_what_to_do(source: dict[str, Any], words: list[str]) -> None:
    (problem,) = problems_of(source)
    for word in words:
        assert word in problem


def test_all_problems_come_at_once() -> None:
    source = {"zero_optimization": {"stage": 9, "bucket": 1}, "optimizer": {"type": "Lion"}, "amp": {"enabled": True}}
    problems = problems_of(source, ("run.sed=3",))
    for word in ("zero.stage", "zero_optimization.bucket", "optimizer.type", "amp", "run.sed"):
        assert [problem for problem in problems if problem.startswith(f"{word}:")], word


def test_sections_that_are_off_ask_for_nothing() -> None:
    zero = {"stage": 3, "offload_param": None, "offload_optimizer": "none", "zenflow": None}
    quiet = {"compression_training": {}, "sparse_attention": None, "zero_optimization": zero}
    quiet |= {name: {"enabled": False} for name in ("amp", "autotuning", "elasticity")}
    quiet |= {"gradient_allreduce_op": "mean", "steps_per_print": float("inf"), "train_micro_batch_size_per_gpu": 1}
    config = load_config(quiet, ranks=2)
    assert (config.offload.optimizer.tier, config.offload.parameters.tier) == ("none", "none")
    assert (config.zero.stage, config.run.log_every) == (3, 0)


def test_offload_to_two_disks_and_in_part() -> None:
    source = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/one", "ratio": 0.3},
            "offload_param": {"device": "nvme", "nvme_path": "/two"},
        }
    }
    offload = load_config(source, ranks=1).offload
    assert (offload.optimizer.tier, offload.optimizer.fraction) == ("file", 0.3)
    assert offload.directory == ("/one", "/two")


def test_what_is_no_deepspeed_configuration_is_read_as_ours() -> None:
    for source in ({}, {"optimizer": {"lr": 1e-3}}, {"run": {"seed": 1}, "zero_optimization": {}}, {"checkpoint": {}}):
        assert not is_deepspeed(source)
    for source in ({"zero_optimization": {}}, {"optimizer": {"type": "Adam"}}, {"train_batch_size": 8}):
        assert is_deepspeed(source)
    (problem,) = problems_of({"run": {"seed": 1}, "zero_optimization": {"stage": 2}})
    assert "zero_optimization: unknown key" in problem
    assert "zero.stage" in problem


def test_own_keys_go_on_top(tmp_path: Path) -> None:
    source = {**DOCUMENTED["zero2"], "zeromesh": {"run": {"max_steps": 7}, "zero": {"stage": 1}}}
    config = load_config(source, ["run.seed=5"], ranks=1)
    assert (config.run.max_steps, config.zero.stage, config.run.seed) == (7, 1, 5)
    assert config.offload.optimizer.tier == "host"


def test_the_command_prints_the_report_and_yaml_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    source = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    path.write_text(json.dumps({**source, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}))
    said = ended(capsys, ["config", str(path), "--nproc", "2", "run.seed=3"]).out
    assert "# DeepSpeed: zero_optimization.stage: 2 -> zero.stage: 2\n" in said
    assert "# DeepSpeed: zero_optimization.reduce_bucket_size: no effect: a block is gathered and reduced" in said
    yaml = tmp_path / "run.yaml"
    yaml.write_text(said, encoding="utf-8")
    again = load_config(yaml)
    assert again.model_dump() == load_config(path, ["run.seed=3"], ranks=2).model_dump()
    assert not again.notes
    assert "Check batch related parameters" in ended(capsys, ["config", str(path)], 2).err


# Against DeepSpeed itself, where it is installed

_UP_TO = {"warmup_max_lr": 0.3, "warmup_num_steps": 9}
_OF_60 = {"total_num_steps": 60, "warmup_num_steps": 9}
_CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 20, "cycle_second_step_size": 40}
CURVES: list[dict[str, Any]] = [
    {"type": "WarmupLR", "params": {"warmup_min_lr": 0.01, **_UP_TO}},
    {"type": "WarmupLR", "params": {**_UP_TO, "warmup_num_steps": 1}},
    {"type": "WarmupLR", "params": {**_UP_TO, "warmup_type": "linear"}},
    {"type": "WarmupDecayLR", "params": {**_OF_60, "warmup_max_lr": 0.3}},
    {"type": "WarmupDecayLR", "params": {**_OF_60, "warmup_type": "linear"}},
    {"type": "WarmupDecayLR", "params": {**_OF_60, "warmup_max_lr": 0.3, "warmup_min_lr": 0.03}},
    {"type": "WarmupCosineLR", "params": _OF_60},
    {"type": "WarmupCosineLR", "params": {**_OF_60, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}},
    {"type": "OneCycle", "params": {**_CYCLE, "cycle_momentum": False}},
]


@pytest.mark.parametrize("scheduler", CURVES, ids=lambda value: "-".join([value["type"], *value["params"]]))
def test_learning_rates_are_those_of_deepspeed(scheduler: dict[str, Any]) -> None:
    schedulers = pytest.importorskip("deepspeed.runtime.lr_schedules")
    optimized = {"optimizer": {"type": "AdamW", "params": {"lr": 0.3}}, "zeromesh": {"run": {"seed": 1}}}
    config = load_config({**optimized, "scheduler": scheduler}, ["run.max_steps=60"], ranks=1)
    schedule = schedule_of(config)
    rates = [config.optimizer.lr * schedule.factor(step) for step in range(60)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = getattr(schedulers, scheduler["type"])(optimizer, **scheduler["params"])
    expected = []
    if scheduler["type"] == "OneCycle":  # which is ahead of its own count by one
        expected.append(optimizer.param_groups[0]["lr"])
    while len(expected) < 60:
        theirs.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_rate_falls_to_where_it_began() -> None:
    """Also where DeepSpeed is not installed: `WarmupDecayLR` is `warmup_min_lr` and a share of what is above it."""
    scheduler = {"type": "WarmupDecayLR", "params": {**_OF_60, "warmup_max_lr": 0.3, "warmup_min_lr": 0.03}}
    config = load_config({"scheduler": scheduler, "optimizer": {"type": "AdamW"}, "zeromesh": {"run": {"seed": 1}}}, ranks=1)
    schedule, start = schedule_of(config), _OF_60["warmup_num_steps"]
    rates = [config.optimizer.lr * schedule.factor(step) for step in range(start, 61)]
    assert rates == pytest.approx([0.03 + 0.27 * (60 - step) / (60 - start) for step in range(start, 61)], rel=1e-12)


def test_every_key_of_the_installed_deepspeed_has_a_row() -> None:
    zero = pytest.importorskip("deepspeed.runtime.zero.config")
    offload = pytest.importorskip("deepspeed.runtime.zero.offload_config")
    precision = pytest.importorskip("deepspeed.runtime.precision_config")
    monitor = pytest.importorskip("deepspeed.monitor.config")
    tensor = pytest.importorskip("deepspeed.runtime.tensor_parallel.config")
    checkpointing = pytest.importorskip("deepspeed.runtime.activation_checkpointing.config")
    models = {
        "zero_optimization": zero.DeepSpeedZeroConfig,
        "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": precision.DeepSpeedFP16Config,
        "bf16": precision.DeepSpeedBF16Config,
        "tensorboard": monitor.TensorBoardConfig,
        "wandb": monitor.WandbConfig,
        "csv_monitor": monitor.CSVConfig,
        "comet": monitor.CometConfig,
        "tensor_parallel": tensor.TPTrainingConfig,
    }
    names = {
        f"{section}.{name}"
        for section, model in models.items()
        for field, info in model.model_fields.items()
        for name in {field, info.alias or field}
    }
    names |= {f"activation_checkpointing.{name}" for name in checkpointing.ACT_CHKPT_DEFAULT}
    missing = [name for name in names if name not in ROWS and not any(row.startswith(f"{name}.") for row in ROWS)]
    assert not missing
