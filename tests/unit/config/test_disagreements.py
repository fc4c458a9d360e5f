"""Rules between keys: which valid values contradict each other, and up to which bound they do not."""

from typing import Any

import pytest

from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements, schedule_of, with_length

FLOAT8 = {"compute": "bfloat16", "linear": "float8"}
IN_BACKWARD: dict[str, Any] = {"optimizer": {"in_backward": True}, "run": {"clip_norm": 0, "on_nonfinite": "stop"}}
LOCAL: dict[str, Any] = {"replicate": 2, "sync_every": 4}
CHAT = {"format": "chat", "packing": True}
SPEED = {"balance": "speed"}
STAGES = {"pipeline": 2, "schedule": "zero_bubble"}
EVALUATED = {"eval_every": 1, "load_best": True}
REWINDS = {"spike_factor": 4, "rewind_steps": 200}
CODE = {"python": "a:b"}
PARTS = {"a": {"train": "x"}}
AWAY = {"activations": "host"}
RECOMPUTED = {"activation_checkpointing": "block"}
TILES = {"tile_tokens": 8}


def problems_of(sections: dict[str, Any]) -> list[str]:
    return disagreements(TrainerConfig.model_validate(sections, context={"rules": False}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"model": {"source": "m", "config": {"model_type": "x"}}}, "model.config: given beside model.source 'm'"),
        ({"model": {"config": {"model_type": 3}}}, "model.config.model_type: missing"),
        ({"model": {"config": {"n_embd": 3}, "python": "a:b"}}, ""),
        ({"model": {"config": {"num_labels": 3}, "source": "m"}}, ""),
        ({"model": {"revision": "a"}}, "model.revision: is about model.source"),
        ({"model": {"revision": "a", "source": "m"}}, ""),
        ({"model": {"trust_remote_code": True}}, "model.trust_remote_code: is about model.source"),
        ({"model": {"trust_remote_code": True, "source": "m"}}, ""),
        ({"model": {"python": "a:b", "source": "m"}}, "model.python returns the model"),
        ({"parallel": {"schedule": "interleaved", "chunks": 2}}, "parallel.schedule is about stages"),
        ({"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2}}, ""),
        ({"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2, "stages": [1, 1]}}, "2 numbers of blocks for 4"),
        ({"parallel": {"pipeline": 2, "schedule": "interleaved", "chunks": 2, "stages": [1, 1, 1, 1]}}, ""),
        ({"parallel": {"tensor": 2, "sequence": True, "plan": {"*.q": "colwise"}}}, ""),
        ({"parallel": STAGES}, ""),
        ({"parallel": {"timeout_seconds": "auto"}}, ""),
        ({"parallel": {"timeout_seconds": "auto"}, "model": {"compile": True}}, "parallel.timeout_seconds: auto does not go with"),
        (IN_BACKWARD, ""),
        (IN_BACKWARD | {"parallel": STAGES}, "optimizer.in_backward does not go with parallel.schedule zero_bubble"),
        (IN_BACKWARD | {"recovery": {"spike_factor": 4}}, "recovery.spike_factor and recovery.audit_steps judge a step before"),
        (IN_BACKWARD | {"recovery": {"audit_steps": 9}}, "recovery.spike_factor and recovery.audit_steps judge a step before"),
        ({"recovery": {"spike_factor": 4}, "run": {"on_nonfinite": "stop"}}, "run.on_nonfinite: stop does not go with"),
        ({"recovery": {"spike_factor": 4, "on_spike": "stop"}, "run": {"on_nonfinite": "stop"}}, ""),
        ({"recovery": {"on_spike": "stop"}}, "recovery.on_spike: stop is about spikes"),
        ({"recovery": {"survivors": "end", "memory": "snapshots"}}, "recovery.memory: snapshots with recovery.copies 0 takes"),
        ({"recovery": {"survivors": "end", "copies": 1}}, "recovery.memory: auto with recovery.copies 1 takes snapshots"),
        ({"recovery": {"rewind_steps": 9}}, "recovery.rewind_steps: 9 is about spikes that are passed over"),
        ({"recovery": REWINDS | {"on_spike": "accept"}}, "spike_factor is 4 with recovery.on_spike accept"),
        ({"recovery": REWINDS, "run": {"max_nonfinite": 0}}, "recovery.rewind_steps: 200 counts from run.max_nonfinite"),
        ({"recovery": REWINDS}, ""),
        ({"recovery": REWINDS | {"rewind_steps": 201}}, "201 steps are beyond what is kept: 200 by checkpoint.every_steps 100"),
        ({"recovery": REWINDS, "checkpoint": {"every_steps": 0, "keep_last": 0}}, "are beyond what is kept: 0"),
        ({"recovery": REWINDS, "checkpoint": {"every_steps": 5, "keep_last": 0}}, ""),
        ({"recovery": REWINDS, "checkpoint": {"every_steps": "epoch"}}, ""),
        (IN_BACKWARD | {"parallel": {"schedule": "zero_bubble"}}, ""),
        (IN_BACKWARD | {"parallel": {"pipeline": 2}}, ""),
        ({"parallel": LOCAL}, ""),
        ({"parallel": LOCAL | {"outer": {"lr": 0.7, "momentum": 0.9}}}, ""),
        ({"parallel": {"sync_every": 4}}, "parallel.sync_every: 4 is about replicas, and parallel.replicate is 1"),
        ({"parallel": {"outer": {"momentum": 0.9}}}, "parallel.outer is about local steps"),
        ({"parallel": {"outer": {"lr": 0.7}}}, "parallel.outer is about local steps"),
        (IN_BACKWARD | {"parallel": LOCAL}, "parallel.sync_every: 4 does not go with optimizer.in_backward"),
        ({"parallel": LOCAL, "zero": {"replicas": "divided"}}, "sync_every: 4 does not go with zero.replicas: divided"),
        ({"parallel": LOCAL, "precision": {"compute": "float16"}}, "not with float16 and precision.master float32"),
        ({"parallel": LOCAL, "precision": {"master": "kahan"}}, "not with bfloat16 and precision.master kahan"),
        ({"parallel": LOCAL, "recovery": {"spike_factor": 4}}, "recovery.spike_factor and recovery.audit_steps compare"),
        ({"parallel": LOCAL, "recovery": {"audit_steps": 4}}, "recovery.spike_factor and recovery.audit_steps compare"),
        ({"parallel": LOCAL, "recovery": {"memory": "snapshots"}}, "recovery.memory: snapshots with recovery.copies 0"),
        ({"parallel": LOCAL, "recovery": {"copies": 1}}, "recovery.memory: auto with recovery.copies 1"),
        ({"parallel": LOCAL, "offload": {"durable": True}}, "parallel.sync_every: 4 does not go with offload.durable"),
        ({"parallel": LOCAL, "batch": {"balance": "speed", "micro_size": 2}}, "does not go with batch.balance speed"),
        ({"parallel": LOCAL, "ema": {"decay": 0.9}}, ""),
        ({"parallel": LOCAL, "ema": {"decay": 0.9, "every_steps": 2}}, "ema.every_steps: 2 does not go with"),
        ({"precision": {"compute": "bfloat16", "reduce": "bfloat16"}}, ""),
        ({"precision": {"compute": "float32", "reduce": "bfloat16"}}, ""),
        ({"precision": {"compute": "float16", "reduce": "bfloat16"}}, "precision.reduce: bfloat16 goes with"),
        ({"precision": {"reduce": "bfloat16", "master": "float64"}}, "set precision.reduce to float64"),
        ({"precision": {"compute": "float64", "reduce": "float64", "master": "float64"}}, ""),
        ({"precision": {"compute": "float64"}}, "precision.master float32, precision.reduce float32: the two have to be"),
        ({"model": TILES}, ""),
        ({"model": TILES | RECOMPUTED}, ""),
        ({"model": TILES | {"activation_checkpointing": "selective"}}, "model.tile_tokens: 8 does not go with"),
        ({"model": TILES, "parallel": STAGES}, "model.tile_tokens: 8 does not go with parallel.schedule zero_bubble"),
        ({"model": TILES, "parallel": {"pipeline": 2}}, ""),
        ({"model": TILES, "parallel": {"expert": 2}}, "model.tile_tokens: 8 does not go with parallel.expert 2"),
        ({"precision": FLOAT8}, ""),
        ({"precision": FLOAT8 | {"compute": "float16"}}, "precision.linear: float8 is for precision.compute bfloat16"),
        ({"precision": FLOAT8, "parallel": {"tensor": 2}}, "precision.linear: float8 is for whole layers"),
        ({"precision": FLOAT8, "parallel": STAGES}, "precision.linear: float8 does not go with parallel.schedule"),
        ({"precision": FLOAT8, "parallel": {"schedule": "zero_bubble"}}, ""),
        ({"precision": FLOAT8, "parallel": {"pipeline": 2}}, ""),
        ({"precision": {"compute": "float16"}}, ""),
        ({"offload": {"parameters": "host"}}, ""),
        ({"offload": {"parameters": "host"}, "zero": {"stage": 2}}, "offload.parameters: host does not go with zero.stage 2"),
        ({"offload": AWAY}, "offload.activations: host moves the inputs of recomputed blocks"),
        ({"offload": AWAY, "model": RECOMPUTED}, ""),
        ({"offload": AWAY, "model": RECOMPUTED | {"compile": True}}, "offload.activations: host does not go with model.compile"),
        ({"model": RECOMPUTED | {"compile": True}}, ""),
        ({"data": {"mixture": PARTS}}, ""),
        ({"data": {"mixture": PARTS, "train": "y"}}, "data.train: 'y' is given beside data.mixture"),
        ({"data": {"mixture": {"a": {"train": "x", "format": "pictures"}}}}, "data.format: pictures is for all data"),
        ({"data": {"format": "pictures"}}, ""),
        ({"data": CHAT}, ""),
        ({"data": CHAT | {"separate_documents": True}}, ""),
        ({"data": CHAT | {"separate_documents": False}}, "data.packing: true puts several conversations"),
        ({"data": CHAT | {"separate_documents": False, "packing": False}}, ""),
        ({"data": CHAT | {"separate_documents": False, "format": "text"}}, ""),
        ({"data": {"train": CODE, "eval": {"a": CODE, "b": "x"}}}, "data.train and data.eval: one is Python code"),
        ({"data": {"train": CODE, "eval": {"a": CODE}}}, ""),
        ({"batch": {"micro_size": 16}}, ""),
        ({"batch": {"micro_size": 17}}, "batch.micro_size: 17 is more than batch.global_size 16"),
        ({"batch": SPEED}, ""),
        ({"batch": {"balance": [2, 1.5]}, "parallel": {"pipeline": 2}}, ""),
        ({"batch": {"balance": [2, 1], "average": "samples"}}, ""),
        ({"batch": SPEED, "parallel": {"pipeline": 2}}, "batch.balance: speed does not go with parallel.pipeline 2"),
        ({"batch": SPEED | {"average": "samples"}}, "batch.balance: speed does not go with batch.average samples"),
        ({"batch": SPEED | {"micro_size": 1}}, "batch.balance: needs microbatches of several samples"),
        ({"batch": {"tokens": 64, "balance": [1, 2]}}, "batch.balance: needs microbatches of several samples"),
        ({"batch": SPEED, "parallel": "auto"}, "batch.balance: shares out to data ranks by batch.micro_size"),
        ({"schedule": {"warmup_steps": 5}, "run": {"max_steps": 5}}, ""),
        ({"schedule": {"warmup_steps": 6}, "run": {"max_steps": 5}}, "schedule.warmup_steps: 6 is more than run.max_steps 5"),
        ({"schedule": {"warmup_steps": 6}, "run": {"epochs": 1}}, ""),
        ({"run": EVALUATED}, ""),
        ({"run": EVALUATED | {"eval_every": 0}}, "run.load_best judges by evaluations"),
        ({"run": {"eval_every": 0, "patience": 2}}, "run.patience judges by evaluations"),
        ({"run": {"eval_every": 1, "patience": 2}}, ""),
        ({"run": EVALUATED, "checkpoint": {"every_steps": 0}}, "run.load_best keeps the best weights in a checkpoint"),
        ({"ema": {"evaluate": True}}, "ema.evaluate: true needs averaged weights"),
        ({"ema": {"evaluate": True, "decay": 0.5}}, ""),
        ({"profile": {"steps": [3, 3]}}, ""),
        ({"profile": {"steps": [4, 3]}}, "profile.steps: [4, 3] ends before it begins"),
    ],
)  # fmt: skip
def test_rules_between_keys(sections: dict[str, Any], said: str) -> None:
    """An empty text stands for values that agree."""
    found = problems_of(sections)
    assert [said in problem for problem in found] == ([True] if said else []), found


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_a_sequence_is_as_long_as_the_positions_of_the_model_at_most(key: str) -> None:
    for length, agrees in ((16, True), (17, False)):
        sections = {"model": {"config": {"model_type": "x", key: 16}}, "data": {"sequence_length": length}}
        said = f"data.sequence_length: {length} is more than model.config.{key} 16; lower the one or raise the other"
        assert problems_of(sections) == ([] if agrees else [said])


def test_a_rule_is_silent_about_a_key_that_is_wrong_by_itself() -> None:
    config = TrainerConfig.model_validate({"batch": {"micro_size": 17}}, context={"rules": False})
    for key in ("batch.micro_size", "batch.global_size"):
        assert disagreements(config, wrong=frozenset({key})) == []
    assert len(disagreements(config, wrong=frozenset({"batch.last"}))) == 1
    half = TrainerConfig.model_validate(IN_BACKWARD | {"precision": {"compute": "float16"}}, context={"rules": False})
    (said,) = disagreements(half, wrong=frozenset({"run.on_nonfinite"}))
    assert said.startswith("optimizer.in_backward: does not go with the loss scale of precision.compute float16")
    odd = TrainerConfig.model_validate({"schedule": {"power": 2}}, context={"rules": False})
    assert len(disagreements(odd)) == 1
    for key in ("run.max_steps", "schedule.power"):
        assert disagreements(odd, wrong=frozenset({key})) == []


def test_the_length_of_a_run_decides_its_warm_up_and_the_end_of_its_curve() -> None:
    by_ratio = TrainerConfig.model_validate({"schedule": {"warmup_ratio": 0.25}, "run": {"epochs": 2}})
    settled = with_length(by_ratio, 40)
    assert (settled.run.max_steps, settled.run.epochs, settled.schedule.warmup_steps) == (40, 2, 10)
    assert schedule_of(settled).total_steps == 40
    section = {"name": "polynomial", "warmup_steps": 0}
    for lr, ratio in ((1e-3, 1e-4), (1e-7, None), (1e-8, None)):
        config = TrainerConfig.model_validate({"schedule": section, "optimizer": {"lr": lr}, "run": {"max_steps": 4}})
        assert schedule_of(config).min_ratio == (None if ratio is None else pytest.approx(ratio))
    config = TrainerConfig.model_validate({"schedule": section | {"min_ratio": 0.5}, "run": {"max_steps": 4}})
    assert schedule_of(config).min_ratio == 0.5


def test_equality_does_not_ask_for_notes_and_folders() -> None:
    config = TrainerConfig.model_validate({"run": {"name": "a"}})
    noted = config.with_notes(("note",), ("folder",))
    assert (noted.notes, noted.folders, config.notes, config.folders) == (("note",), ("folder",), (), ())
    assert noted == config
    assert noted != TrainerConfig.model_validate({"run": {"name": "b"}})
