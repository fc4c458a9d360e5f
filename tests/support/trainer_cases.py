"""Cases of the trainer that workers run: each trains something tiny and says what it saw."""

import hashlib
import json
import re
from collections.abc import Callable as Function
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from tests.support.plain import (
    Gradients,
    Plain,
    after_steps,
    apart,
    clones,
    compare,
    distance,
    error_of,
    like,
    plain_fit,
    sentence_loss,
    stacked,
)
from zeromesh import Callback, Trainer
from zeromesh.errors import CollectiveError, NonFiniteError, PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import tensor_bytes
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.monitoring.step_metrics import read_metrics

VOCABULARY = 64
LENGTH = 12
WIDE = {"compute": "float64", "master": "float64", "reduce": "float64"}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA = {**_SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 32, **_NO_IDS}


def llama(**changes: Any) -> Any:
    """A tiny Llama, initialised from torch's generator."""
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**LLAMA, "tie_word_embeddings": False, "use_cache": False, **changes}))


def gpt2(**changes: Any) -> Any:
    """A tiny GPT-2 with tied embeddings."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, **_NO_IDS, use_cache=False, **changes))


def sentences(count: int = 23, seed: int = 3) -> list[dict[str, torch.Tensor]]:
    """Token ids, and labels of which each sample masks another number."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: index % (LENGTH - 2)] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def settings(folder: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of 4 steps of 8 samples in float64, with `sections` on top."""
    base: dict[str, dict[str, Any]] = {
        "precision": WIDE,
        "optimizer": {"lr": 1e-2},
        "schedule": {"name": "linear", "warmup_steps": 1},
        "batch": {"global_size": 8, "micro_size": 2},
        "run": {"output_dir": folder, "name": "run", "max_steps": 4, "clip_norm": 0.5, "seed": 5},
        "parallel": {"timeout_seconds": 10},
        "checkpoint": {"every_steps": 0},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return base


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, dtypes and bits."""
    made = hashlib.blake2b(digest_size=12)
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype}".encode())
        made.update(tensor_bytes(tensor).numpy().tobytes())
    return made.hexdigest()


def seeded(build: Function[[], Any]) -> Any:
    """What `build` builds, from one seed."""
    torch.manual_seed(11)
    return build()


# The whole story


FIELDS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "peak_memory_bytes"]
EVENTS = [
    *("evaluated 0", "begin", "step 1", "update 1", "end 1", "step 2", "update 2", "end 2", "evaluated 2", "step 3"),
    *("update 3", "end 3", "evaluated 3", "step 4", "update 4", "end 4", "evaluated 4", "finish", "evaluated 4"),
]


class Witness(Gradients):
    """Notes every event, and looks at the model from inside the run."""

    def __init__(self, plain: Plain, reference: Any) -> None:
        super().__init__(plain)
        self.reference = reference
        self.events: list[str] = []

    def on_train_begin(self, trainer: Trainer) -> None:
        self.events.append("begin")

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        self.events.append(f"step {step}")

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        super().on_pre_optimizer_step(trainer, step)
        self.events.append(f"update {step}")

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self.events.append(f"end {step}")
        like(metrics["loss"], self.plain.losses[step - 1])
        if step == 2:
            self.look(trainer, step)

    def on_evaluate(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(f"evaluated {step}")

    def on_train_end(self, trainer: Trainer) -> None:
        self.events.append("finish")

    def look(self, trainer: Trainer, step: int) -> None:
        """Everything that may be done between steps, compared with the plain loop's model after `step` steps."""
        self.reference.load_state_dict(self.plain.states[step], strict=True)
        self.reference.eval()
        ids = sentences()[1]["input_ids"][None]
        greedy = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad():
            like(trainer.model(input_ids=ids).logits, self.reference(input_ids=ids).logits, abs_=1e-9)
            found, wanted = (model.generate(ids[:, :4], **greedy) for model in (trainer.model, self.reference))
        assert found.tolist() == wanted.tolist()
        assert distance({name: tensor.clone() for name, tensor in trainer.state_dict()}, self.plain.states[step]) <= 1e-9
        names = ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
        with trainer.gathered(names):
            whole = {name: trainer.model.get_parameter(name).detach().clone() for name in names}
        assert distance(whole, {name: self.plain.states[step][name] for name in names}) <= 1e-9
        total, count = sentence_loss(self.reference, stacked(sentences(5, seed=4), range(5)))
        like(trainer.evaluate()["eval_loss"], float(total) / count)


def story(mesh: Mesh, folder: str, stage: int) -> None:
    """A run with all that a person may do before, in and after it, and its files."""
    config = settings(folder, zero={"stage": stage}, run={"eval_every": 3})
    data, held = sentences(), sentences(5, seed=4)
    reference = seeded(llama)
    plain = plain_fit(reference, data, config)
    witness, model = Witness(plain, reference), seeded(llama)
    with Trainer(model, config, data, held, callbacks=[witness]) as trainer:
        witness.look(trainer, 0)
        report = trainer.fit()
        assert trainer.fit() is report
        witness.look(trainer, 4)
        assert distance(clones(model), plain.states[4]) <= 1e-9
    assert witness.events == EVENTS
    assert witness.worst <= 1e-9
    assert apart(report.losses, plain.losses) <= 1e-9
    figures = [report.final_step, report.final_loss, report.skipped_steps, report.tokens]
    assert figures == [4, report.losses[-1], 0, 4 * 8 * LENGTH]
    assert min(report.tokens_per_second, report.peak_memory_bytes) > 0
    assert model.training
    assert not any(each._forward_hooks or each._forward_pre_hooks or "forward" in vars(each) for each in model.modules())
    if mesh.rank == 0:
        _check_files(Path(folder) / "run", config, plain.norms, mesh.world_size)


def _check_files(folder: Path, config: Any, norms: list[float], size: int) -> None:
    records = lines_of(folder)
    more = [*["communication"] * (size > 1), "mfu", "phases", "memory"]
    assert [list(record) for record in records] == [[*FIELDS, *more, "start", "time"], *[[*FIELDS, *more, "time"]] * 3]
    assert records == read_metrics(folder / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["tokens"] for record in records] == [96, 192, 288, 384]
    assert [record["lr"] for record in records] == pytest.approx([0.0, 0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-9)
    assert load_config(folder / "config.resolved.yaml") == load_config(config)


# Batches and losses


class Pictures(nn.Module):
    """A convolutional classifier without any library's conventions; `loss` chooses what forward returns."""

    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        self.loss = loss
        self.stem = nn.Conv2d(2, 12, 3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(12, 12, 1), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(12, 3)

    def forward(self, images: torch.Tensor, classes: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
        if not self.loss or classes is None:
            return logits
        return F.cross_entropy(logits, classes)


def pictures(count: int = 13) -> list[dict[str, Any]]:
    """Images, classes, and fields that no model takes."""
    generator = torch.Generator().manual_seed(9)
    return [
        {
            "images": torch.randn(2, 6, 6, generator=generator, dtype=torch.float64),
            "classes": torch.tensor(index % 3),
            "name": f"picture {index}",
            "row": index,
        }
        for index in range(count)
    ]


def picture_loss(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Sum and count, whose count only the batch's own values tell: class 0 counts for nothing."""
    losses = F.cross_entropy(model(batch["images"]), batch["classes"], reduction="none")
    wanted = batch["classes"] != 0
    return losses[wanted].sum(), int(wanted.sum())


def _every_picture(model: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(model(batch["images"]), batch["classes"], reduction="sum"), len(batch["classes"])


def uneven(mesh: Mesh, folder: str, kind: str, micro: int) -> None:
    """A global batch of 10 that neither microbatches nor ranks divide, over two epochs of the data."""
    config = settings(folder, batch={"global_size": 10, "micro_size": micro}, zero={"stage": 2})
    text = kind == "text"
    data: Any = sentences() if text else pictures()
    build = llama if text else lambda: Pictures(loss=kind == "mean")
    plain_data = data if text else [{name: row[name] for name in ("images", "classes")} for row in data]
    plain_build = llama if text else lambda: Pictures(loss=False)
    loss_sum: Any = {"text": sentence_loss, "mean": _every_picture, "sum": picture_loss}[kind]
    plain = plain_fit(seeded(plain_build), plain_data, config, loss_sum)
    loss = picture_loss if kind == "sum" else None
    model, after = seeded(build), list[float]()

    def evaluate(trainer: Trainer) -> None:
        after.append(trainer.evaluate(data[:3])["eval_loss"])

    found, _ = compare(model, config, data, plain, eval_dataset=data[:7], compute_loss=loss, after=evaluate)
    with torch.no_grad():
        total, count = loss_sum(model, stacked(plain_data, range(3)))
    found |= {"model": distance(clones(model), plain.states[4]), "after": abs(after[0] - float(total) / count)}
    assert all(value <= 1e-9 for value in found.values()), found


def initial(mesh: Mesh, folder: str, stage: int) -> dict[str, str]:
    """Bits of initial weights, for models given in each way that leaves them to the trainer."""
    config = settings(folder, zero={"stage": stage})
    named = settings(folder, zero={"stage": stage}, model={"config": {"model_type": "llama", **LLAMA}})
    with torch.device("meta"):
        bare = llama()
    given = {"config": (None, named), "callable": (llama, config), "meta": (bare, config), "tied": (gpt2, config)}
    found = {}
    for name, (model, source) in given.items():
        with Trainer(model, source, train_dataset=sentences()) as trainer:
            found[name] = digest({key: tensor.clone() for key, tensor in trainer.state_dict()})
    return found


def recompute(mesh: Mesh, folder: str, compiled: bool = False) -> None:
    """A model with dropout and one without conventions, with activations recomputed or blocks compiled: nothing changes."""
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    found: list[list[float]] = []
    for mode in ("none", "none") if compiled else ("none", "block", "selective"):
        config = settings(folder, model={"activation_checkpointing": mode, "compile": compiled and bool(found)})
        models = [(seeded(lambda: gpt2(**rates)), sentences()), (seeded(lambda: Pictures(loss=True)), pictures())]
        found.append([])
        for model, data in models[compiled:]:
            with Trainer(model, config, data) as trainer:
                found[-1] += trainer.fit().losses
            left = ("forward" in vars(m) or getattr(m, "gradient_checkpointing", False) for m in model.modules())
            assert not any(left)
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-9 if compiled else 1e-12)


# Precision


def half(mesh: Mesh, folder: str) -> None:
    """float16 from a scale that overflows at first, beside float32; the learning rate is 0, so all steps are alike."""
    precision = {"compute": "float16", "master": "float32", "reduce": "float32"}
    scale = {"initial_scale": 2.0**23, "growth_interval": 4}
    runs = {"max_steps": 10, "name": "half"}
    still = {"optimizer": {"lr": 0.0}}
    config = settings(folder, precision={**precision, "loss_scale": scale}, run=runs, **still)
    exact = settings(folder, precision={**precision, "compute": "float32"}, run={**runs, "name": "exact"}, **still)
    reports = []
    for each in (config, exact):
        with Trainer(seeded(llama), each, sentences()) as trainer:
            reports.append(trainer.fit())
    mesh.world.barrier("metrics")
    lines, exactly = (lines_of(Path(folder) / name) for name in ("half", "exact"))
    first = next(index for index, line in enumerate(lines) if "skipped" not in line)
    assert 1 <= first <= 6
    assert all(line["skipped"] is True and line["grad_norm"] in ("nan", "inf") for line in lines[:first])
    assert not any("skipped" in line for line in lines[first : first + 4])
    assert reports[0].skipped_steps == sum("skipped" in line for line in lines)
    scales = [line["loss_scale"] for line in lines]
    assert scales[: first + 4] == [2.0 ** (23 - min(step, first)) for step in range(first + 4)]
    assert scales[first + 4 :][:1] == [2.0 ** (24 - first)] or first == 6
    for line, same in zip(lines[first : first + 4], exactly[first : first + 4], strict=True):
        assert line["loss"] == pytest.approx(same["loss"], rel=1e-3)
        assert line["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-2)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics in a run's directory, as strict JSON."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


class Spoiler:
    """A loss that is infinite in chosen calls of a rank."""

    def __init__(self, calls: Sequence[int]) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        self.count += 1
        total, count = sentence_loss(model, batch)
        return total * (float("inf") if self.count in self.calls else 1.0), count


def spoiled(mesh: Mesh, folder: str, calls: Sequence[int], message: str = "", steps: int = 5, **section: Any) -> None:
    """Rank 0's loss is infinite in some calls: all skip the step, or the run ends after some `steps` with a message."""
    batch = {"micro_size": 4, "global_size": 4 * mesh.world_size}
    config = settings(folder, run={"max_steps": 5, **section}, batch=batch)
    with Trainer(seeded(llama), config, sentences(), compute_loss=Spoiler(calls if mesh.rank == 0 else ())) as trainer:
        if message:
            with pytest.raises(NonFiniteError, match=re.escape(message)) as caught:
                trainer.fit()
            assert "the loss is not finite on rank 0" in str(caught.value)
        else:
            assert trainer.fit().skipped_steps == 1
            weights = mesh.world.gather_json(digest(clones(trainer.model)), "weights")
            assert weights == weights[:1] * mesh.world_size
    mesh.world.barrier("metrics")
    lines = lines_of(Path(folder) / "run")
    assert len(lines) == steps
    if not message:
        assert [index for index, line in enumerate(lines) if "skipped" in line] == [1]
        assert (lines[1]["skipped"], lines[1]["loss"]) == (True, "inf")
        assert lines[1]["grad_norm"] in ("nan", "inf")
        assert "gradients of unit" in lines[1]["cause"]
        assert lines[1]["cause"].endswith("; the loss is not finite on rank 0")


# When it is interrupted


class Stop(Callback):
    """Raises once, at an event of a step, on chosen ranks."""

    def __init__(self, event: str, step: int, error: BaseException, *, here: bool = True) -> None:
        self.event, self.step, self.error, self.here = event, step, error, here

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        self._raise("begin", step)

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        self._raise("update", step)

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self._raise("end", step)

    def _raise(self, event: str, step: int) -> None:
        if self.here and (event, step) == (self.event, self.step):
            self.here = False
            raise self.error


class Fuse(nn.Module):
    """Breaks once in forward or backward of a chosen call."""

    def __init__(self, call: int, *, backward: bool) -> None:
        super().__init__()
        self.left, self.backward = call, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and not self.backward:
            raise KeyboardInterrupt
        if self.left == 0 and x.requires_grad:
            x.register_hook(self._blow)  # type: ignore[no-untyped-call]
        return x

    def _blow(self, _gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt


def interrupted(mesh: Mesh, folder: str, where: str) -> None:
    """One rank: a run that is interrupted, looked at, and goes on, against one that is not."""
    data, states = sentences(), []
    for how in (where, ""):
        model = seeded(llama)
        if how in ("forward", "backward"):
            model.model.layers[1].mlp.down_proj = nn.Sequential(
                model.model.layers[1].mlp.down_proj, Fuse(10, backward=how == "backward")
            )
        callbacks = [Stop(how, 3, KeyboardInterrupt())] if how in ("begin", "update", "end") else []
        trainer = Trainer(model, settings(folder, run={"name": how or "whole"}), data, callbacks=callbacks)
        if how:
            with pytest.raises(KeyboardInterrupt):
                trainer.fit()
            with torch.no_grad():
                assert bool(model(input_ids=data[0]["input_ids"][None]).logits.isfinite().all())
            trainer.save(Path(folder) / "interrupted")
        assert len(trainer.fit().losses) == 4
        assert [line["step"] for line in lines_of(trainer.run_directory)] == [1, 2, 3, 4]
        states.append({name.replace("down_proj.0", "down_proj"): tensor for name, tensor in clones(model).items()})
    assert digest(states[0]) == digest(states[1])


def broken(mesh: Mesh, folder: str) -> None:
    """Several ranks: one fails, all know why, and no call afterwards waits for what will not come."""
    stop = Stop("end", 2, ValueError("no more"), here=mesh.rank == 1)
    trainer = Trainer(seeded(llama), settings(folder), sentences(), callbacks=[stop])
    why = (ValueError, "^no more") if mesh.rank == 1 else (CollectiveError, "rank 1 failed with ValueError: no more")
    with pytest.raises(why[0], match=why[1]):
        trainer.fit()
    for call in (trainer.fit, trainer.evaluate, lambda: trainer.save(folder), trainer.state_dict):
        with pytest.raises(PhaseError, match=r"^this run ended after 2 whole steps .*make a new Trainer"):
            call()
    trainer.close()


# Saving


MANY = 1 << 30
"""Bytes that no file has."""


def saved(mesh: Mesh, folder: str, kind: str, compute: str, largest: int) -> None:
    """Save before, in and after a run, in files of at most `largest` bytes; load with transformers, and as `model.source`."""
    wide = "float64" if compute == "float64" else "float32"
    precision = {"compute": compute, "master": wide, "reduce": wide}
    build = {"llama": llama, "gpt2": gpt2}[kind]
    root, data = Path(folder), sentences()

    def save(trainer: Trainer, step: int) -> None:
        if step == 2:
            trainer.save(root / "during")
            states["during"] = digest({name: tensor.clone() for name, tensor in trainer.state_dict()})

    states, model = dict[str, str](), seeded(build)
    if compute == "bfloat16":
        model = seeded(lambda: type(model)._from_config(model.config, dtype=torch.bfloat16))
    with (
        patch("zeromesh.checkpoint.io.format._LARGEST_FILE", largest),
        Trainer(model, settings(folder, precision=precision), data, callbacks=[after_steps(save)]) as trainer,
    ):
        trainer.save(root / "before")
        trainer.fit()
        trainer.save(root / "after")
        trainer.save(root / "after")
    if mesh.rank == 0:
        model.save_pretrained(root / "theirs")
    mesh.world.barrier("saving")
    ids = data[3]["input_ids"][None].to(mesh.device)
    with torch.no_grad():
        wanted = model.eval()(input_ids=ids).logits
        for name in ("after", "theirs"):
            loaded = tf.AutoModelForCausalLM.from_pretrained(root / name).to(mesh.device)
            assert digest({"": loaded(input_ids=ids).logits}) == digest({"": wanted}), name
            assert loaded.dtype == getattr(torch, wide)
    base, config = tf.AutoModel.from_pretrained(root / "after"), json.loads((root / "after/config.json").read_text())
    name = type(base).__name__.replace("Model", {"llama": "ForCausalLM", "gpt2": "LMHeadModel"}[kind])
    assert (config["dtype"], config["architectures"]) == (wide, [name])
    for name, state in (states | {"after": digest(clones(model))}).items():
        config = settings(folder, model={"source": str(root / name)}, precision=precision)
        with Trainer(None, config, data) as trainer:
            assert digest({key: value.clone() for key, value in trainer.state_dict()}) == state, name
            trainer.fit()
    if mesh.rank == 0:
        assert sorted(path.name for path in root.iterdir()) == ["after", "before", "during", "run", "theirs"]
        *weights, last = sorted(path.name for path in (root / "after").glob("*model*"))
        count = len(weights)
        assert weights == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        assert last == ("model.safetensors.index.json" if weights else "model.safetensors")
        assert (count > 1) == (largest < MANY)


def resaved(mesh: Mesh, folder: str, tokenizer: str) -> dict[str, Any]:
    """Save where something is already, and where nothing can be, in the order that `folder` was prepared for."""
    root = Path(folder)
    data = {"train": str(root / "text.txt"), "tokenizer": tokenizer, "sequence_length": LENGTH}
    moe = {"model_type": "mixtral", **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
    config = settings(
        folder,
        data=data,
        model={"config": moe},
        precision={**WIDE, "compute": "bfloat16", "master": "float32", "reduce": "float32"},
    )
    with Trainer(None, config) as trainer:
        paths = (root / "file", root / "file/below", Path("/proc/nothing"))
        said = [error_of(partial(trainer.save, path), RuntimeError) for path in paths]
        trainer.save(root / "out")
        report = trainer.fit()
        wanted = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        trainer.save(root / "out")
        again = _source_digest(folder, root / "out", data)
    found: dict[str, Any] = {"said": said, "losses": report.losses, "again": again == digest(wanted)}
    if mesh.rank == 0:
        loaded, note = tf.AutoModelForCausalLM.from_pretrained(root / "out", output_loading_info=True)
        found["loaded"] = digest(clones(loaded)) == digest(wanted)
        found["problems"] = [name for name, values in note.items() if values]
        found["tokens"] = tf.AutoTokenizer.from_pretrained(root / "out")("one two")["input_ids"]
    return found


def _source_digest(folder: str, source: Path, data: dict[str, Any]) -> str:
    with Trainer(None, settings(folder, model={"source": str(source)}, data=data)) as trainer:
        return digest({name: tensor.float() for name, tensor in trainer.state_dict()})
