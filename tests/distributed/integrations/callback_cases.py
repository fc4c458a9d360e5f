"""Cases of callbacks that workers run: the same ones under transformers' Trainer and under zeromesh's, on one process or more."""

import ast
import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from transformers.integrations import TensorBoardCallback, WandbCallback

from tests.distributed.integrations import user_callbacks
from tests.distributed.integrations.user_callbacks import Recorder, timeless
from tests.support.plain import like
from tests.support.trainer_cases import llama, sentences
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh

_THEIRS = (tf.DefaultFlowCallback, tf.ProgressCallback, tf.PrinterCallback, tf.EarlyStoppingCallback)
_CLASSES = {each.__name__: each for each in _THEIRS}


def made(name: str, *values: Any) -> Any:
    """A callback of transformers, or one of the user's."""
    kind = _CLASSES.get(name) or getattr(user_callbacks, name)
    return kind(*(tuple(value) if isinstance(value, list) else value for value in values))


def whole(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences that are all target: of these the mean of batches, which transformers takes for a loss, is that of all targets."""
    return [{**sample, "labels": sample["input_ids"]} for sample in sentences(count, seed=4)]


def model() -> Any:
    torch.manual_seed(1)
    return llama()


_WHEN = {"logging": "steps", "eval": "no", "save": "steps"}


def configured(folder: Path, fields: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """A configuration that says what fields of `TrainingArguments` say, and what transformers does where they say nothing."""
    when = {kind: fields.get(f"{kind}_strategy", usual) for kind, usual in _WHEN.items()}
    every = {kind: fields.get(f"{kind}_steps", 500) if how == "steps" else how for kind, how in when.items()}
    every = {kind: 0 if how == "no" else how for kind, how in every.items()}
    length = {"max_steps": fields["max_steps"]} if "max_steps" in fields else {"epochs": fields.get("num_train_epochs", 3)}
    return {
        "run": {
            "output_dir": str(folder), "name": "run", "seed": 5, "clip_norm": 1.0, **length, "log_every": every["logging"],
            "eval_every": every["eval"], "eval_at_end": when["eval"] != "no",
            "eval_at_start": fields.get("eval_on_start", False), "log_first_step": fields.get("logging_first_step", False),
            "load_best": fields.get("load_best_model_at_end", False), "metric": fields.get("metric_for_best_model", "loss"),
        },
        "batch": {
            "micro_size": 2, "eval_micro_size": 4, "last": "partial",
            "global_size": 2 * fields.get("gradient_accumulation_steps", 1) * ranks,
        },
        "optimizer": {
            "lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-4, "weight_decay": fields.get("weight_decay", 0.0),
            "exempt": "biases_and_norms",
        },
        "schedule": {
            "name": fields.get("lr_scheduler_type", "linear"), "warmup_steps": fields.get("warmup_steps", 0),
        },
        "checkpoint": {"every_steps": every["save"], "keep_last": fields.get("save_total_limit") or 0},
        "data": {"shuffle": False},
        "precision": {"compute": "float32"},
    }  # fmt: skip


def run(
    kind: Any,
    folder: Path,
    fields: Mapping[str, Any],
    callbacks: Sequence[Any],
    scores: Sequence[float] = (),
    resume: str | None = None,
    ranks: int = 1,
) -> Any:
    """A run of a few steps in the order of the data, its own evaluation and prediction after it; the trainer."""
    given, checkpoint = iter(scores), resume and str(folder / "run" / resume)
    inputs: dict[str, Any] = {
        "train_dataset": sentences(22),
        "eval_dataset": whole(7),
        "compute_metrics": (lambda prediction: {"score": next(given)}) if scores else None,
        "callbacks": list(callbacks),
    }
    if kind is Trainer:
        trainer: Any = Trainer(model(), configured(folder, fields, ranks), **inputs)
        trainer.fit(checkpoint)
        return trainer
    arguments = tf.TrainingArguments(
        output_dir=str(folder / "run"),
        **{
            "learning_rate": 1e-2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "adam_epsilon": 1e-4,
            "train_sampling_strategy": "sequential", "report_to": "none", "disable_tqdm": True, "seed": 5, **fields,
        },
    )  # fmt: skip
    trainer = tf.Trainer(model(), arguments, **inputs)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


KINDS = {"theirs": tf.Trainer, "ours": Trainer}
near = partial(like, rel=2e-4, abs_=1e-7)


def same_events(mine: list[dict[str, Any]], theirs: list[dict[str, Any]], *, judged: bool = False) -> None:
    """Assert that two recorders saw the same, and name the first event in which they did not."""
    for each in (*mine, *theirs) if not judged else ():
        each["best"] = None  # Which transformers looks for only where it is to load it.
    names = [[f"{each['event']} {each['state'][0]}" for each in seen] for seen in (mine, theirs)]
    assert names[0] == names[1]
    for number, (own, other) in enumerate(zip(mine, theirs, strict=True)):
        near(own, other, where=f"{number}: {names[0][number]}")


def seen_by(
    kind: Any,
    folder: Path,
    fields: Mapping[str, Any],
    callbacks: Sequence[Sequence[Any]] = (),
    scores: Sequence[float] = (),
    after: bool = False,
    ranks: int = 1,
) -> list[Any]:
    """What callbacks see of a run, the recorder last."""
    chosen = [*(made(*each) for each in callbacks), Recorder()]
    with quiet():
        trainer = run(kind, folder, fields, chosen, scores, ranks=ranks)
        if after:
            trainer.evaluate()
            trainer.predict(whole(5))
    if kind is Trainer:
        trainer.close()
    return [getattr(each, "seen", None) for each in chosen]


def both(mesh: Mesh, folder: str, fields: Mapping[str, Any], callbacks: Any = (), **more: Any) -> list[str]:
    """Callbacks see and do under zeromesh's Trainer what they do under transformers', as a recorder sees; the events."""
    theirs, ours = (seen_by(kind, Path(folder) / name, fields, callbacks, **more) for name, kind in KINDS.items())
    assert not callbacks or theirs[0] is None or theirs[0], "the callback has seen nothing"
    near(ours[:-1], theirs[:-1])
    same_events(ours[-1], theirs[-1], judged="load_best_model_at_end" in fields)
    return [each["event"] for each in ours[-1]]


def ignoring(mesh: Mesh, folder: str, keys: Sequence[str] | None, never: Sequence[str], gathered: int) -> None:
    """Shapes of what `compute_metrics` is given of a model that returns its hidden states too, under both trainers.

    `keys` are ignored in place of `never`, which the model's configuration names.
    """
    for name, kind in KINDS.items():
        root, seen = f"{folder}/{name}", list[Any]()
        ours = kind is Trainer
        trainer: Any = kind(
            llama(output_hidden_states=True, keys_to_ignore_at_inference=list(never)),
            {"run": {"output_dir": root}} if ours else tf.TrainingArguments(output_dir=root, report_to="none"),
            train_dataset=whole(4),
            eval_dataset=whole(7),
            compute_metrics=lambda prediction, seen=seen: seen.append(shapes(prediction.predictions)) or {},
        )
        with quiet():
            trainer.evaluate(ignore_keys=keys)
        if ours:
            trainer.close()
        logits, states = [7, 12, 64], [[7, 12, 32]] * 3
        assert seen == [logits if gathered == 1 else [logits, states]], name


def shapes(tree: Any) -> Any:
    return [shapes(each) for each in tree] if isinstance(tree, tuple) else list(tree.shape)


def single(mesh: Mesh, folder: str, fields: Mapping[str, Any], callbacks: Any) -> list[Any]:
    """What callbacks see under transformers' Trainer, the recorder last."""
    return seen_by(tf.Trainer, Path(folder), fields, callbacks)


def recorded(mesh: Mesh, folder: str, fields: Mapping[str, Any], callbacks: Any, theirs: list[Any]) -> None:
    """What callbacks see under zeromesh's Trainer on all ranks is what one process sees of the same global batch."""
    ours = seen_by(Trainer, Path(folder), fields, callbacks, ranks=mesh.world_size)
    near(ours[:2], theirs[:2])
    assert all(each["first"] == [mesh.rank == 0] * 2 for each in ours[-1])
    # All but whether a rank is the first, and how large and how many its microbatches are.
    common = [
        [{**each, "first": None, "every": None} for each in seen[-1] if each["event"] != "on_prediction_step"]
        for seen in (ours, theirs)
    ]
    same_events(*common)


def resumed(mesh: Mesh, folder: str, fields: Mapping[str, Any], scores: Sequence[float]) -> None:
    """A run of six steps goes on after its second, by transformers' name of the checkpoint, with what was logged, which was best,
    and what callbacks had kept before: one bad evaluation more ends the run."""
    found = {}
    for name, kind in KINDS.items():
        root, recorder = Path(folder) / name, Recorder()
        for steps, given, callbacks in ((2, scores, []), (6, scores[2:], [recorder])):
            with quiet():
                stopping, resume = made("EarlyStoppingCallback", 2), "checkpoint-2" if callbacks else None
                trainer = run(kind, root, {**fields, "max_steps": steps}, [*callbacks, stopping], given, resume=resume)
            if kind is Trainer:
                trainer.close()
        found[name] = recorder.seen[1:]  # The first is the end of the construction.
        assert [each["event"] for each in found[name][:2]] == ["on_train_begin", "on_epoch_begin"]
        for each in found[name][:2]:
            each["flags"] = None  # transformers brings back those that stood when the checkpoint was written.
    same_events(found["ours"], found["theirs"], judged=True)
    assert [each["state"][0] for each in found["ours"] if each["event"] == "on_step_end"] == [3]


def linked(mesh: Mesh, folder: str) -> None:
    """Checkpoints have the names of transformers, those that are kept alone; a run is told to begin at another one."""
    fields = {"eval_strategy": "no", "save_steps": 1, "save_total_limit": 2, "lr_scheduler_type": "constant"}
    root = Path(folder) / "run"
    if mesh.rank == 0:
        (root / "checkpoint-1").mkdir(parents=True)  # Somebody's own.
        (root / "checkpoint-2").symlink_to("nowhere")
    mesh.world.barrier("directories that are there before")
    for steps, resume, names in ((4, None, [3, 4]), (6, "checkpoint-3", [5, 6])):
        changes = {**fields, "max_steps": steps}
        with quiet() as out:
            trainer = run(Trainer, Path(folder), changes, [Recorder()], resume=resume, ranks=mesh.world_size)
        assert trainer.state.step == steps
        trainer.close()
        links = sorted(path for path in root.glob("checkpoint-*") if path.is_symlink())
        assert [path.name for path in links] == [f"checkpoint-{number}" for number in names]
        for path in links:
            assert isinstance(tf.AutoModelForCausalLM.from_pretrained(path), tf.LlamaForCausalLM)
    said = [line for line in out.getvalue().splitlines() if "goes on from step" in line]
    named = "checkpoint.resume names step-00000003, and this run has gone on since: it goes on from step 4."
    assert [line.startswith(named) for line in said] == [True] * (mesh.rank == 0)
    assert (root / "checkpoint-1").is_dir()
    assert not (root / "checkpoint-1").is_symlink()


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


SHORT = {"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}


def shown(mesh: Mesh, folder: str, name: str) -> None:
    """What a callback of transformers prints under either; transformers' Trainer has it by itself."""
    found = {}
    fields = {**SHORT, "max_steps": 3, "logging_steps": 1, "disable_tqdm": name == "PrinterCallback"}
    for which, kind in KINDS.items():
        with quiet() as out:
            run(kind, Path(folder) / which, fields, [] if which == "theirs" else [made(name)])
        lines = [timeless(ast.literal_eval(line)) for line in re.findall(r"\{.*?\}", out.getvalue())]
        found[which] = [{key: None if value is None else float(value) for key, value in sorted(line.items())} for line in lines]
    assert len(found["theirs"]) == 6
    like(found["ours"], found["theirs"], rel=2e-3)


def tensorboard(mesh: Mesh, folder: str) -> None:
    """The scalars that TensorBoard's callback writes under either."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for name, kind in KINDS.items():
        logs = Path(folder) / name / "logs"
        with quiet(), patch.dict(os.environ, {"TENSORBOARD_LOGGING_DIR": str(logs)}):
            run(kind, Path(folder) / name, {**SHORT, "max_steps": 4}, [TensorBoardCallback()])
        events = EventAccumulator(str(logs))
        events.Reload()
        scalars = {
            tag: [[event.step, event.value] for event in events.Scalars(tag)]
            for tag in sorted(events.Tags()["scalars"])
            if not tag.endswith(("runtime", "per_second"))
        }
        found[name] = [scalars, sorted(events.Tags()["tensors"])]
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "eval/loss"} <= set(found["theirs"][0])
    near(found["ours"], found["theirs"])


def wandb_offline(mesh: Mesh, folder: str) -> None:
    """The rows and the configuration that wandb's callback keeps under either."""
    import wandb

    from tests.support.wandb_log import files, rows, started

    found = {}
    how = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    for name, kind in KINDS.items():
        directory = Path(folder) / name
        directory.mkdir()
        with quiet(), patch.dict(os.environ, {**how, "WANDB_DIR": str(directory)}):
            run(kind, directory, {**SHORT, "max_steps": 4}, [WandbCallback()])
            wandb.finish()
            wandb.teardown()
        (path,) = files(directory)
        kept = [dict(sorted(timeless(row).items())) for row in rows(path)]
        kept = [{key: each for key, each in row.items() if key[0] != "_" and each is not None} for row in kept]
        found[name] = [kept, {key: started(path)[1].get(key) for key in ("max_steps", "model_type")}]
    assert len(found["theirs"][0]) == 5
    near(found["ours"], found["theirs"])
