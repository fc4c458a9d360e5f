"""Trainers of transformers over the engine, beside the same trainers over DDP."""

from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf
from datasets import Dataset
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR

from tests.distributed.integrations.accelerate_cases import fresh_state
from tests.support.trainer_cases import VOCABULARY, WIDE, llama, seeded, sentences
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.transformers import on_zeromesh

_KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_size", "eval_mean", "step")


class Overridden(tf.Trainer):  # type: ignore[misc]  # transformers' types are skipped.
    """A trainer of a user's own, which notes the calls that come to it."""

    called: set[str]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.called = set()
        super().__init__(*arguments, **named)

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        self.called.add("training_step")
        return super().training_step(*arguments, **named)

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        self.called.add("create_optimizer")
        groups = [
            {"params": [each], "lr": 1e-2 / (1 + index % 2)} for index, each in enumerate(self.model.parameters())
        ]
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([each for each in groups if each["params"][0].requires_grad])
        return self.optimizer

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        self.called.add("compute_loss")
        return super().compute_loss(*arguments, **named)

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        self.called.add("log")
        super().log(logs, *arguments, **named)

    def get_train_dataloader(self) -> Any:
        self.called.add("get_train_dataloader")
        return super().get_train_dataloader()

    def prediction_step(self, *arguments: Any, **named: Any) -> Any:
        self.called.add("prediction_step")
        return super().prediction_step(*arguments, **named)


def arguments_of(folder: Path, kind: Any = tf.TrainingArguments, **changes: Any) -> Any:
    """Two epochs with accumulation, evaluations and checkpoints."""
    asked = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "max_grad_norm": 0.5,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(str(folder), **{**asked, **changes})


def _measure(prediction: Any) -> dict[str, float]:
    return {"size": len(prediction.predictions), "mean": float(abs(prediction.predictions).mean())}


def _trainer(kind: Any, folder: Path, model: Any, *, zeromesh: Any = None, **changes: Any) -> Any:
    over = on_zeromesh(kind) if zeromesh is not None else kind
    named = {"zeromesh": zeromesh} if zeromesh is not None else {}
    data = {"train_dataset": sentences(), "eval_dataset": sentences(7, seed=4), "compute_metrics": _measure}
    return over(model, arguments_of(folder, **changes), **data, **named)


def _history(trainer: Any, first: int = 0) -> list[tuple[str, float]]:
    rows = [row for row in trainer.state.log_history if row["step"] > first]
    return [(name, row[name]) for row in rows for name in _KEPT if name in row]


def _apart(mine: list[tuple[str, float]], wanted: list[tuple[str, float]]) -> float:
    """How far two histories are from each other; infinitely, where they are not of the same values."""
    if [name for name, _ in mine] != [name for name, _ in wanted]:
        return float("inf")
    return max(abs(a - b) for (_, a), (_, b) in zip(mine, wanted, strict=True))


def _model(adapted: bool) -> Any:
    model = seeded(llama)
    if not adapted:
        return model
    torch.manual_seed(12)
    return peft.get_peft_model(
        model,
        peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"]),
    )


def as_original(mesh: Mesh, folder: str, stage: int, adapted: bool = False) -> dict[str, Any]:
    """A trainer with overrides over DDP and over the engine, resumed in the middle, evaluated and saved."""
    root, found = Path(folder), {}
    config = {"zero": {"stage": stage}}
    with fresh_state():
        plain = _trainer(Overridden, root / "plain", _model(adapted))
        plain.train()
        wanted, predicted = _history(plain), plain.predict(sentences(5)).predictions
        plain.save_model(root / "plain/model")
    with fresh_state():
        trainer = _trainer(Overridden, root / "mine", _model(adapted), zeromesh=config)
        trainer.evaluate()
        trainer.train()
        found["history"] = _apart(_history(trainer), wanted)
        found["predictions"] = float(abs(trainer.predict(sentences(5)).predictions - predicted).max())
        found["best"] = Path(trainer.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name
        found["called"] = sorted(trainer.called)
        trainer.save_model(root / "mine/model")
    with fresh_state():
        trainer = _trainer(Overridden, root / "mine", _model(adapted), zeromesh=config)
        trainer.train(resume_from_checkpoint=str(root / "mine/checkpoint-3"))
        found["resumed"] = _apart(_history(trainer, 3), _after(wanted, 3))
    if mesh.rank == 0:
        name = "adapter_model.safetensors" if adapted else "model.safetensors"
        saved = [load_file(root / each / "model" / name) for each in ("mine", "plain")]
        found["names"] = sorted(saved[0]) == sorted(saved[1])
        found["weights"] = max(float((saved[0][key] - saved[1][key]).abs().max()) for key in saved[1])
        found["files"] = sorted(
            set(map(_name, (root / "mine/checkpoint-3").iterdir())) - _of(root / "plain/checkpoint-3")
        )
    return found


def _name(path: Path) -> str:
    return path.name


def _of(directory: Path) -> set[str]:
    return set(map(_name, directory.iterdir()))


def _after(history: list[tuple[str, float]], step: int) -> list[tuple[str, float]]:
    """The part of a history of the steps after `step`: each row ends with its number."""
    last = max(index for index, (name, value) in enumerate(history) if name == "step" and value <= step)
    return history[last + 1 :]


def twice(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A user's own optimizer and schedule, in two trainings one after the other, whose second goes on with the states."""
    found: dict[str, list[tuple[str, float]]] = {}
    for name, config in (("plain", None), ("mine", {"zero": {"stage": 3}})):
        with fresh_state():
            model = seeded(llama)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
            kind, named = (on_zeromesh(tf.Trainer), {"zeromesh": config}) if config else (tf.Trainer, {})
            trainer = kind(
                model,
                arguments_of(Path(folder), eval_strategy="no", save_strategy="no", load_best_model_at_end=False),
                train_dataset=sentences(),
                optimizers=(optimizer, schedule),
                **named,
            )
            trainer.train()
            found[name] = _history(trainer)
            trainer.train()
            found[name] += _history(trainer)
    return {"history": _apart(found["mine"], found["plain"]), "rows": len(found["mine"])}


def generating(mesh: Mesh, folder: str) -> dict[str, Any]:
    """`Seq2SeqTrainer` with generation in evaluation, in bfloat16: the same tokens, and what is saved keeps float32."""
    found: dict[str, Any] = {}
    config = tf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    for name, over in (("plain", lambda kind: kind), ("mine", on_zeromesh)):
        with fresh_state():
            root = Path(folder) / name
            asked = {"predict_with_generate": True, "generation_max_length": 7, "load_best_model_at_end": False}
            settings = arguments_of(root, tf.Seq2SeqTrainingArguments, save_strategy="no", bf16=True, **asked)
            trainer = over(tf.Seq2SeqTrainer)(
                seeded(lambda: tf.BartForConditionalGeneration(config)),
                settings,
                train_dataset=sentences(),
                eval_dataset=sentences(7, seed=4),
            )
            trainer.train()
            found[name] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
            found[f"{name} tokens"] = trainer.predict(sentences(5)).predictions.tolist()
            trainer.save_model(root)
    if mesh.rank == 0:
        found["dtype"] = str(tf.AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / "mine").dtype)
    return found


def generating_together(mesh: Mesh, folder: str) -> dict[str, Any]:
    """`Seq2SeqTrainer` on a tensor axis of all ranks, whose evaluations see each of five samples once, as in one process."""
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=5,
        decoder_start_token_id=1,
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name, over in (("plain", lambda kind: kind), ("mine", on_zeromesh)):
        with fresh_state():
            asked = {"predict_with_generate": True, "save_strategy": "no", "load_best_model_at_end": False}
            trainer = over(tf.Seq2SeqTrainer)(
                seeded(lambda: tf.T5ForConditionalGeneration(config)).double(),
                arguments_of(Path(folder) / name, tf.Seq2SeqTrainingArguments, **asked),
                eval_dataset=sentences(5),
                compute_metrics=_measure,
                **({"zeromesh": {"parallel": {"tensor": 2}, "precision": WIDE}} if over is on_zeromesh else {}),
            )
            size = trainer.evaluate(max_new_tokens=6)["eval_size"]
            found[name] = {
                "size": size,
                "tokens": trainer.predict(sentences(5), max_new_tokens=6).predictions.tolist(),
                "beams": trainer.predict(sentences(5), max_new_tokens=4, num_beams=3).predictions.tolist(),
            }
    return found


def streams(mesh: Mesh, folder: str) -> dict[str, Any]:
    """The losses of a run over three epochs of a stream that is shuffled in a buffer, and of one that was stopped in the second."""

    class Stop(tf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop |= state.global_step == 4

    def losses(name: str, resume: bool = False, **named: Any) -> list[float]:
        fresh_state()
        stream = Dataset.from_list(sentences(11)).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4)
        changes = {"eval_strategy": "no", "load_best_model_at_end": False, "max_steps": 6, "save_steps": 4}
        arguments = arguments_of(Path(folder) / name, gradient_accumulation_steps=1, **changes)
        arguments.per_device_train_batch_size = 4
        trainer = on_zeromesh(tf.Trainer)(seeded(llama), arguments, train_dataset=stream, **named)
        trainer.train(resume_from_checkpoint=resume)
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    whole = losses("whole")
    losses("part", callbacks=[Stop()])
    return {"whole": whole, "resumed": losses("part", resume=True)}


def refused(mesh: Mesh, folder: str, name: str) -> str:
    """What is said to what cannot be right."""
    with fresh_state():
        try:
            if name == "no trainer":
                on_zeromesh(dict)
            changes = {"torch_compile": True} if name == "compiled" else {}
            config = {"parallel": {"pipeline": 2}} if name == "pipeline" else {}
            _trainer(tf.Trainer, Path(folder), seeded(llama), zeromesh=config, **changes)
        except ConfigError as error:
            return str(error)
    return ""


def weights_alone(mesh: Mesh, folder: str, zeromesh: dict[str, Any], adapted: bool) -> dict[str, Any]:
    """Checkpoints without states of the optimizer: the best one at the end, and what loading one into a divided model gives."""
    alone = {"save_only_model": True, "learning_rate": 0.5, "metric_for_best_model": "eval_loss"}
    with fresh_state():
        trainer = _trainer(tf.Trainer, Path(folder), _model(adapted), zeromesh=zeromesh, **alone)
        trainer.train()
        last = next(row["eval_loss"] for row in reversed(trainer.state.log_history[:-1]) if "eval_loss" in row)
        found = {"loaded": trainer.evaluate()["eval_loss"], "best": trainer.state.best_metric, "last": last}
        prefix, given = "base_model.model." if adapted else "", torch.full((VOCABULARY, 32), 0.5)
        trainer.model.load_state_dict({f"{prefix}model.embed_tokens.weight": given}, strict=False)
        values = {name: tensor.clone() for name, tensor in trainer.accelerator.get_state_dict(trainer.model).items()}
        name = next((each for each in values if each.endswith("embed_tokens.weight")), None)
        found["part"] = float((values[name] - given).abs().max()) if name else 0.0
        try:
            trainer.model.load_state_dict({"unknown": given})
        except RuntimeError as error:
            found["strict"] = "Unexpected key" in str(error) and "Missing key" in str(error)
    return found
