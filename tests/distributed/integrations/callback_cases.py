"""Cases of callbacks that workers run: the same ones under transformers' Trainer and under zeromesh's, on one process or more."""

import ast
import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from transformers.integrations import TensorBoardCallback, WandbCallback

from tests.distributed.integrations import user_callbacks
from tests.distributed.integrations.user_callbacks import Recorder, timeless
from tests.support import wandb_log
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
    length = (
        {"max_steps": fields["max_steps"]} if "max_steps" in fields else {"epochs": fields.get("num_train_epochs", 3)}
    )
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


def under_both(folder: str, case: Callable[[Any, Path], Any]) -> dict[str, Any]:
    """What a case says of transformers' Trainer and of zeromesh's, in a folder each, without what they print."""
    found = {}
    for name, kind in (("theirs", tf.Trainer), ("ours", Trainer)):
        with quiet():
            found[name] = case(kind, Path(folder) / name)
    return found


def closed(trainer: Any) -> None:
    """Close a trainer of zeromesh."""
    if isinstance(trainer, Trainer):
        trainer.close()


def both(
    mesh: Mesh,
    folder: str,
    fields: Mapping[str, Any],
    callbacks: Sequence[Sequence[Any]] = (),
    scores: Sequence[float] = (),
    after: bool = False,
) -> dict[str, list[Any]]:
    """What callbacks see, the recorder last, under transformers' Trainer and under zeromesh's."""

    def case(kind: Any, root: Path) -> list[Any]:
        chosen = [*(made(*each) for each in callbacks), Recorder()]
        trainer = run(kind, root, fields, chosen, scores)
        if after:
            trainer.evaluate()
            trainer.predict(whole(5))
        closed(trainer)
        return [getattr(each, "seen", None) for each in chosen]

    return under_both(folder, case)


def ignoring(mesh: Mesh, folder: str, keys: Sequence[str] | None, never: Sequence[str]) -> dict[str, list[Any]]:
    """Shapes of what `compute_metrics` is given. The model returns its hidden states too; `keys` are ignored, `never` is what its
    configuration says."""

    def case(kind: Any, root: Path) -> list[Any]:
        seen: list[Any] = []
        ours = {"run": {"output_dir": str(root)}}
        trainer = kind(
            llama(output_hidden_states=True, keys_to_ignore_at_inference=list(never)),
            ours if kind is Trainer else tf.TrainingArguments(output_dir=str(root), report_to="none"),
            train_dataset=whole(4),
            eval_dataset=whole(7),
            compute_metrics=lambda prediction: seen.append(shapes(prediction.predictions)) or {},
        )
        trainer.evaluate(ignore_keys=keys)
        closed(trainer)
        return seen

    return under_both(folder, case)


def shapes(tree: Any) -> Any:
    """Of arrays in tuples."""
    return [shapes(each) for each in tree] if isinstance(tree, tuple) else list(tree.shape)


def recorded(mesh: Mesh, folder: str, fields: Mapping[str, Any], callbacks: Sequence[Sequence[Any]]) -> list[Any]:
    """What callbacks see, the recorder last, under zeromesh's Trainer on all ranks."""
    chosen = [*(made(*each) for each in callbacks), Recorder()]
    with quiet():
        run(Trainer, Path(folder), fields, chosen, ranks=mesh.world_size).close()
    return [each.seen for each in chosen]


def resumed(mesh: Mesh, folder: str, fields: Mapping[str, Any], scores: Sequence[float]) -> dict[str, list[Any]]:
    """What the recorder sees of a run of six steps that goes on after its second, by transformers' name of the checkpoint."""

    def case(kind: Any, root: Path) -> list[Any]:
        recorder = Recorder()
        first, second = {**fields, "max_steps": 2}, {**fields, "max_steps": 6}
        closed(run(kind, root, first, [made("EarlyStoppingCallback", 2)], scores))
        callbacks = [recorder, made("EarlyStoppingCallback", 2)]
        closed(run(kind, root, second, callbacks, scores[2:], resume="checkpoint-2"))
        return [recorder.seen[1:]]  # The first is the end of the construction.

    return under_both(folder, case)


def linked(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Names of checkpoints in a run's directory, where old ones are removed, and what a run says that is to begin at another."""
    fields = {"eval_strategy": "no", "save_steps": 1, "save_total_limit": 2, "lr_scheduler_type": "constant"}
    root = Path(folder) / "run"
    if mesh.rank == 0:
        (root / "checkpoint-1").mkdir(parents=True)  # Somebody's own.
        (root / "checkpoint-2").symlink_to("nowhere")
    mesh.world.barrier("directories that are there before")
    found: dict[str, Any] = {"names": []}
    for steps, resume in ((4, None), (6, "checkpoint-3")):
        with quiet() as out:
            trainer = run(
                Trainer,
                Path(folder),
                {**fields, "max_steps": steps},
                [Recorder()],
                resume=resume,
                ranks=mesh.world_size,
            )
            found["step"] = trainer.state.step
            trainer.close()
        links = [path for path in root.glob("checkpoint-*") if path.is_symlink()]
        found["names"].append(sorted(path.name for path in links))
        found["loads"] = [type(tf.AutoModelForCausalLM.from_pretrained(path)).__name__ for path in links]
        found["said"] = [line for line in out.getvalue().splitlines() if "goes on from step" in line]
    found["own"] = (root / "checkpoint-1").is_dir() and not (root / "checkpoint-1").is_symlink()
    return found


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Keeps what is printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out


EVERY_OTHER = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}


def shown(mesh: Mesh, folder: str, name: str) -> dict[str, list[Any]]:
    """What a callback of transformers prints under either; transformers' Trainer has it by itself."""
    fields = {**EVERY_OTHER, "max_steps": 3, "logging_steps": 1, "disable_tqdm": name == "PrinterCallback"}

    def case(kind: Any, root: Path) -> list[Any]:
        with quiet() as out:
            run(kind, root, fields, [made(name)] if kind is Trainer else [])
        return [timeless(ast.literal_eval(line)) for line in re.findall(r"\{.*?\}", out.getvalue())]

    return under_both(folder, case)


def tensorboard(mesh: Mesh, folder: str) -> dict[str, Any]:
    """The scalars that TensorBoard's callback writes under either, and the names of its texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def case(kind: Any, root: Path) -> list[Any]:
        logs = str(root / "logs")
        with patch.dict(os.environ, {"TENSORBOARD_LOGGING_DIR": logs}):
            run(kind, root, EVERY_OTHER, [TensorBoardCallback()])
        events = EventAccumulator(logs).Reload()
        kept = [tag for tag in events.Tags()["scalars"] if not tag.endswith(("runtime", "per_second"))]
        scalars = {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in kept}
        return [scalars, sorted(events.Tags()["tensors"])]

    return under_both(folder, case)


def wandb_offline(mesh: Mesh, folder: str) -> dict[str, Any]:
    """The rows and the configuration that wandb's callback keeps under either."""
    import wandb

    def case(kind: Any, root: Path) -> list[Any]:
        root.mkdir()
        offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(root), "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
        with patch.dict(os.environ, offline):
            run(kind, root, EVERY_OTHER, [WandbCallback()])
            wandb.finish()
            wandb.teardown()
        (path,) = wandb_log.files(root)
        rows = [
            {key: value for key, value in timeless(row).items() if not key.startswith("_") and value is not None}
            for row in wandb_log.rows(path)
        ]
        _, settings = wandb_log.started(path)
        return [rows, {key: settings[key] for key in ("max_steps", "model_type") if key in settings}]

    return under_both(folder, case)
