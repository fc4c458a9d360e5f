"""Trainers of transformers over the engine, beside the same trainers alone, and what people do with them on one process."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
import transformers as tf
from datasets import Dataset
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset

from tests.distributed.integrations.accelerate_cases import Timed, fresh_state
from tests.support.plain import error_of, like
from tests.support.trainer_cases import VOCABULARY, WIDE, llama, seeded, sentences
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.transformers import on_zeromesh

_KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_size", "eval_mean", "step")


class Overridden(tf.Trainer):  # type: ignore[misc]  # transformers' types are skipped.
    """A trainer of a user's own with groups of its own, which notes the calls that come to it."""

    called: set[str]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.called = set()
        super().__init__(*arguments, **named)

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        self.called.add("create_optimizer")
        groups = [{"params": [each], "lr": 1e-2 / (1 + index % 2)} for index, each in enumerate(self.model.parameters())]
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW([each for each in groups if each["params"][0].requires_grad])
        return self.optimizer


def noting(name: str) -> Any:
    """An override that notes its call in `called`."""
    plain = getattr(tf.Trainer, name)

    @wraps(plain)
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        self.called.add(name)
        return plain(self, *arguments, **named)

    return method


_OVERRIDDEN = ("training_step", "compute_loss", "log", "get_train_dataloader", "prediction_step")
for _name in _OVERRIDDEN:
    setattr(Overridden, _name, noting(_name))


def arguments_of(folder: Path, kind: Any = tf.Trainer, **changes: Any) -> Any:
    """Two epochs with accumulation, evaluations and checkpoints."""
    generates = issubclass(kind, tf.Seq2SeqTrainer)
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
    return (tf.Seq2SeqTrainingArguments if generates else tf.TrainingArguments)(str(folder), **{**asked, **changes})


TRAINS_ALONE = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
_GENERATES = {"predict_with_generate": True, "save_strategy": "no", "load_best_model_at_end": False}


def _measure(prediction: Any) -> dict[str, float]:
    return {"size": len(prediction.predictions), "mean": float(abs(prediction.predictions).mean())}


@contextmanager
def trainer_of(kind: Any, model: Any, folder: Path, zeromesh: Any = None, *, inputs: Any = None, **changes: Any) -> Iterator[Any]:
    """A trainer of transformers, over the engine where there is a configuration of it, with a state of accelerate of its own."""
    data = {"train_dataset": sentences(), "eval_dataset": sentences(7, seed=4), **(inputs or {})}
    with fresh_state():
        arguments = arguments_of(folder, kind, **changes)
        if zeromesh is None:
            yield kind(model, arguments, **data)
        else:
            yield on_zeromesh(kind)(model, arguments, **data, zeromesh=zeromesh)


class OfALibrary(tf.Trainer):  # type: ignore[misc]  # transformers' types are skipped.
    """A trainer of another library, whose models save themselves."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        return model(inputs["input_ids"][:, :8].float(), inputs["input_ids"][:, 0].float(), torch.zeros(4))

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(Path(output_dir) / "model.pt")


def saved_by_its_library(mesh: Mesh, folder: str) -> None:
    """A model that takes no weights to save, in checkpoints and afterwards: whole, in float32, without what does not persist."""
    config = {"zero": {"stage": 3}}
    changes = {
        **TRAINS_ALONE,
        "save_strategy": "steps",
        "save_steps": 1,
        "bf16": True,
        "max_steps": 3,
        "remove_unused_columns": False,
    }
    with trainer_of(OfALibrary, seeded(Timed), Path(folder), config, **changes) as trainer:
        trainer.train()
        wanted = trainer.accelerator.get_state_dict(trainer.model)
        trainer.save_model(f"{folder}/last")
    if mesh.rank == 0:
        for name in ("checkpoint-3", "last"):
            kind, found = torch.load(Path(folder) / name / "model.pt", weights_only=False)
            assert kind is Timed
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], value) for name, value in wanted.items())


def history(trainer: Any, first: int = 0, *more: str) -> list[list[Any]]:
    """What it has logged of the steps after `first`, by the names of values that are no times, and of `more`."""
    rows = [row for row in trainer.state.log_history if row["step"] > first]
    return [[name, row[name]] for row in rows for name in (*_KEPT, *more) if name in row]


def losses_of(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def _model(adapted: bool) -> Any:
    model = seeded(llama)
    if not adapted:
        return model
    torch.manual_seed(12)
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"])
    )


def as_original(mesh: Mesh, folder: str, stage: int, adapted: bool = False) -> None:
    """A trainer with overrides over DDP and over the engine, resumed in the middle, evaluated and saved."""
    root, config, inputs = Path(folder), {"zero": {"stage": stage}}, {"compute_metrics": _measure}
    seen, late, close = list[Any](), list[Any](), partial(like, rel=0, abs_=2e-5)
    for name, zeromesh in (("plain", None), ("mine", config)):
        with trainer_of(Overridden, _model(adapted), root / name, zeromesh, inputs=inputs) as trainer:
            if zeromesh:
                trainer.evaluate()
            trainer.train()
            predicted, best = trainer.predict(sentences(5)).predictions, trainer.state.best_model_checkpoint
            seen.append([history(trainer), torch.from_numpy(predicted), Path(best).name])
            late.append(history(trainer, 3))
            trainer.save_model(root / name / "model")
    assert trainer.called == {"create_optimizer", *_OVERRIDDEN}
    close(seen[1], seen[0])
    with trainer_of(Overridden, _model(adapted), root / "mine", config, inputs=inputs) as trainer:
        trainer.train(resume_from_checkpoint=str(root / "mine/checkpoint-3"))
        close(history(trainer, 3), late[0])
    if mesh.rank == 0:
        name = "adapter_model.safetensors" if adapted else "model.safetensors"
        mine, plain = (dict(sorted(load_file(root / each / "model" / name).items())) for each in ("mine", "plain"))
        close(mine, plain)
        files = [{path.name for path in (root / each / "checkpoint-3").iterdir()} for each in ("mine", "plain")]
        assert files[0] - files[1] == {"zeromesh"}


def twice(mesh: Mesh, folder: str) -> None:
    """A user's own optimizer and schedule, in two trainings one after the other, whose second goes on with the states."""
    found = []
    for zeromesh in (None, {"zero": {"stage": 3}}):
        model = seeded(llama)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        own = (optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step)))
        with trainer_of(tf.Trainer, model, Path(folder), zeromesh, inputs={"optimizers": own}, **TRAINS_ALONE) as trainer:
            rows = []
            for _ in range(2):
                trainer.train()
                rows += history(trainer)
            found.append(rows)
    like(found[1], found[0], rel=0, abs_=2e-5)
    assert len(found[0]) > 20


def unfreezing(mesh: Mesh, folder: str) -> None:
    """Parts that are frozen and unfrozen after an evaluation, between trainings, and before another trainer of the model."""
    found = []
    for zeromesh in (None, {"zero": {"stage": 3}}):
        model, rows = seeded(llama), list[Any]()
        for names in (["lm_head", "model.norm"], ["lm_head", "model.layers"], ["model"]):
            with trainer_of(tf.Trainer, model, Path(folder), zeromesh, **TRAINS_ALONE, max_steps=3) as trainer:
                trainer.evaluate()
                for name in names:
                    model.requires_grad_(False).get_submodule(name).requires_grad_(True)
                    trainer.optimizer = trainer.lr_scheduler = None
                    trainer.train()
                    rows.append([history(trainer), [each.requires_grad for each in model.parameters()]])
        found.append(rows)
    like(found[1], found[0], rel=0, abs_=2e-5)


def generating(mesh: Mesh, folder: str) -> None:
    """`Seq2SeqTrainer` with generation in evaluation, in bfloat16: the same tokens, and what is saved keeps float32."""
    found = []
    config = tf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    asked = {"generation_max_length": 7, "bf16": True, **_GENERATES}
    for name, zeromesh in (("plain", None), ("mine", {})):
        model = seeded(lambda: tf.BartForConditionalGeneration(config))
        with trainer_of(tf.Seq2SeqTrainer, model, Path(folder) / name, zeromesh, **asked) as trainer:
            trainer.train()
            found.append([losses_of(trainer), trainer.predict(sentences(5)).predictions.tolist()])
            trainer.save_model(Path(folder) / name)
    like(found[1], found[0], rel=0, abs_=0.02)
    if mesh.rank == 0:
        assert tf.AutoModelForSeq2SeqLM.from_pretrained(Path(folder) / "mine").dtype == torch.float32


def generating_together(mesh: Mesh, folder: str) -> None:
    """`Seq2SeqTrainer` on a tensor axis of all ranks, whose evaluations see each of five samples once, as in one process."""
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=5,
        decoder_start_token_id=1,
    )  # fmt: skip
    found, divided = [], {"parallel": {"tensor": 2}, "precision": WIDE}
    inputs = {"eval_dataset": sentences(5), "compute_metrics": _measure}
    for zeromesh in (None, divided):
        model = seeded(lambda: tf.T5ForConditionalGeneration(config)).double()
        with trainer_of(tf.Seq2SeqTrainer, model, Path(folder), zeromesh, inputs=inputs, **_GENERATES) as trainer:
            size = trainer.evaluate(max_new_tokens=6)["eval_size"]
            tokens = trainer.predict(sentences(5), max_new_tokens=6).predictions.tolist()
            beams = trainer.predict(sentences(5), max_new_tokens=4, num_beams=3).predictions.tolist()
            found.append([size, tokens, beams])
    plain, mine = found
    # transformers itself has samples twice where processes do not divide them, after all of them.
    assert mine == [5, plain[1][:5], plain[2][:5]]
    assert plain[0] == 8
    assert len({tuple(each) for each in mine[1]}) > 1


def streams(mesh: Mesh, folder: str) -> None:
    """The losses of a run over three epochs of a stream that is shuffled in a buffer, and of one that was stopped in the second."""

    class Stop(tf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop |= state.global_step == 4

    def losses(name: str, resume: bool = False, **named: Any) -> list[float]:
        stream = Dataset.from_list(sentences(11)).to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4)
        sizes = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "max_steps": 6, "save_steps": 4}
        changes = {**TRAINS_ALONE, "save_strategy": "steps", **sizes}
        inputs = {"train_dataset": stream, **named}
        with trainer_of(tf.Trainer, seeded(llama), Path(folder) / name, {}, inputs=inputs, **changes) as trainer:
            trainer.train(resume_from_checkpoint=resume)
            return losses_of(trainer)

    whole = losses("whole")
    losses("part", callbacks=[Stop()])
    assert losses("part", resume=True) == whole


def refused(mesh: Mesh, folder: str, name: str) -> str:
    changes = {"torch_compile": True} if name == "compiled" else {}
    config = {"parallel": {"pipeline": 2}} if name == "pipeline" else {}
    config |= {"parallel": {"tensor": 2}} if name == "of TRL" else {}
    kind: Any = dict if name == "no trainer" else tf.Trainer
    if name == "of TRL":
        kind = type("DPOTrainer", (tf.Trainer,), {"__module__": "trl.trainer.dpo_trainer"})
    try:
        with trainer_of(kind, seeded(llama), Path(folder), config, **changes):
            return ""
    except ConfigError as error:
        return str(error)


def other_groups(mesh: Mesh, folder: str) -> None:
    """A checkpoint that is resumed with groups of other parameters, or with another optimizer, before its scheduler is read."""
    asked, config = {**TRAINS_ALONE, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}, {"zero": {"stage": 3}}
    with trainer_of(tf.Trainer, seeded(llama), Path(folder), config, **asked) as trainer:
        trainer.train()
    for said, make in {
        "has other parameters in the checkpoint than here": lambda model: torch.optim.AdamW(
            [{"params": [each]} for each in model.parameters()], lr=1e-3
        ),
        "of another kind than the one here": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    }.items():
        model = seeded(llama)
        inputs = {"optimizers": (make(model), None)}
        with trainer_of(tf.Trainer, model, Path(folder), config, inputs=inputs, **{**asked, "max_steps": 3}) as trainer:
            assert said in error_of(partial(trainer.train, resume_from_checkpoint=True), LayoutError)


def weights_alone(mesh: Mesh, folder: str, zeromesh: dict[str, Any], adapted: bool = False) -> None:
    """Checkpoints without states of the optimizer: the best one at the end, and what loading one into a divided model gives."""
    alone = {"save_only_model": True, "learning_rate": 0.5, "metric_for_best_model": "eval_loss"}
    with trainer_of(tf.Trainer, _model(adapted), Path(folder), zeromesh, **alone) as trainer:
        trainer.train()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-6)
        prefix, given = "base_model.model." if adapted else "", torch.full((VOCABULARY, 32), 0.5)
        trainer.model.load_state_dict({f"{prefix}model.embed_tokens.weight": given}, strict=False)
        values = dict(trainer.accelerator.get_state_dict(trainer.model))
        loaded = [value for name, value in values.items() if name.endswith("embed_tokens.weight")]
        assert all(torch.equal(value, given) for value in loaded)
        assert loaded or mesh.rank
        with pytest.raises(RuntimeError, match=r"(?s)Missing key.*Unexpected key"):
            trainer.model.load_state_dict({"unknown": given})


Make = Callable[..., Any]
_NOTED = """
    training_step compute_loss create_optimizer create_scheduler get_train_dataloader _get_train_sampler get_eval_dataloader
    _prepare_inputs log evaluate prediction_step evaluation_loop _save_checkpoint _maybe_log_save_evaluate save_model _save
    get_batch_samples _clip_grad_norm create_optimizer_and_scheduler
"""
_ATTRIBUTES = """
    optimizer lr_scheduler accelerator model_wrapped callback_handler control data_collator compute_metrics label_names
    is_in_train model_init hyperparameter_search floating_point_ops num_examples get_optimizer_group
"""


def _trained(trainer: Any) -> Any:
    trainer.train()
    return history(trainer, -1, "train_loss")


def _on(event: str, call: Callable[..., None]) -> list[tf.TrainerCallback]:
    def method(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        call(**named)

    return [type("Callback", (tf.TrainerCallback,), {event: method})()]


def overrides(make: Make) -> Any:
    kind = type("Noting", (tf.Trainer,), {"called": set(), **{name: noting(name) for name in _NOTED.split()}})
    found = _trained(make(kind, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2))
    return found, sorted(kind.called)


def two_backwards(make: Make) -> Any:
    class Twice(tf.Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            return super().training_step(*arguments, **named) + super().training_step(*arguments, **named)

    return _trained(make(Twice, gradient_accumulation_steps=2))


def losses(make: Make) -> Any:
    class Own(tf.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **named: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    def measure(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        return outputs.logits.pow(2).sum() / num_items_in_batch

    own = _trained(make(Own, gradient_accumulation_steps=2))
    return own, _trained(make(given={"compute_loss_func": measure}, gradient_accumulation_steps=2))


def callbacks(make: Make) -> Any:
    found: list[Any] = []

    def rate(optimizer: Any, **_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3

    def in_place(model: Any, **_: Any) -> None:
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(0.9)

    def data(model: Any, **_: Any) -> None:
        for each in model.parameters():
            each.data = each.data * 0.9

    def weights(model: Any, **_: Any) -> None:
        found.append([float(each.sum()) for each in model.state_dict().values()])

    for event, call in (("on_step_begin", rate), ("on_step_end", in_place), ("on_step_end", data), ("on_step_end", weights)):
        found.append(_trained(make(given={"callbacks": _on(event, call)})))
    return found


def models(make: Make) -> Any:
    trainer = make(given={"model_init": lambda: llama()})
    found = [_trained(trainer), trainer.evaluate()["eval_loss"], _trained(trainer)]
    trainer.model = trainer.model_wrapped = seeded(llama)
    return found, trainer.evaluate()["eval_loss"], [name for name in _ATTRIBUTES.split() if not hasattr(trainer, name)]


def changes(make: Make) -> Any:
    trainer = make(include_num_input_tokens_seen=True)
    trainer.args.learning_rate, trainer.args.max_steps = 1e-3, 3
    trainer.compute_metrics = lambda prediction: {"mean": float(prediction.predictions.mean())}
    result, *_ = trainer.train()
    groups = trainer.optimizer.state_dict()["param_groups"]
    shown = [trainer.get_learning_rates(), trainer.get_num_trainable_parameters(), [each["lr"] for each in groups]]
    return (result, history(trainer, -1, "train_loss"), trainer.evaluate()["eval_mean"], trainer.state.num_input_tokens_seen, shown)


def full_eval(make: Make) -> Any:
    trainer = make(bf16_full_eval=make is not _plain)
    trainer.train()
    trainer.evaluate()
    return _trained(trainer)


def read_streams(make: Make) -> Any:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __init__(self, count: int = 23) -> None:
            self.count = count

        def __iter__(self) -> Any:
            return iter(sentences(self.count))

    # Of ten rows the accumulation has a rest, which is added to the next step.
    rests = make(given={"train_dataset": Stream(10)}, gradient_accumulation_steps=2, max_steps=6)
    trainer = make(given={"train_dataset": Stream(), "eval_dataset": Stream()})
    return _trained(trainer), trainer.evaluate()["eval_loss"], _trained(rests)


def options(make: Make) -> Any:
    named: list[dict[str, Any]] = [
        {"optim": "adafactor", "neftune_noise_alpha": 0.1},
        {"train_sampling_strategy": "group_by_length", "max_grad_norm": 0.0},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "eval_delay": 1},
    ]
    return [_trained(make(**each)) for each in named]


def nothing_to_resume(make: Make) -> Any:
    try:
        make().train(resume_from_checkpoint=True)
    except ValueError as error:
        return str(error)[:20]
    return None


PROBES = (
    overrides, two_backwards, losses, callbacks, models, changes, full_eval, read_streams, options, nothing_to_resume,
)  # fmt: skip


def _plain(kind: Any = tf.Trainer, *, over: Any = None, given: Any = None, **changes: Any) -> Any:
    torch.manual_seed(3)
    given = {"train_dataset": sentences(), "eval_dataset": sentences(5, seed=4), **(given or {})}
    asked = {"max_steps": 3, "gradient_accumulation_steps": 1, "learning_rate": 1e-2, **TRAINS_ALONE, **changes}
    model = None if "model_init" in given else seeded(llama)
    return (over or kind)(model, arguments_of(Path(tempfile.mkdtemp()), **asked), **given)


def alike(mesh: Mesh, folder: str, stage: int) -> None:
    """All probes find over the engine what they find in the original."""

    def mine(kind: Any = tf.Trainer, *, given: Any = None, **changes: Any) -> Any:
        given = {**(given or {}), "zeromesh": {"zero": {"stage": stage}}}
        return _plain(over=on_zeromesh(kind), given=given, **changes)

    with patch.object(tempfile, "tempdir", folder):
        for probe in PROBES:
            found = []
            for make in (_plain, mine):
                with fresh_state():
                    found.append(probe(make))
            like(found[1], found[0], rel=2e-5, abs_=2e-5, where=probe.__name__)


def shared(mesh: Mesh, folder: str, config: Mapping[str, Any]) -> list[list[Any]]:
    """What a trainer has logged whose ranks, if there are several, share sequences."""
    with trainer_of(tf.Trainer, seeded(llama).double(), Path(folder), {**config, "precision": WIDE}) as trainer:
        trainer.train()
        return history(trainer)
