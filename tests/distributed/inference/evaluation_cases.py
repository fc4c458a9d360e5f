"""Cases on evaluations that generate, against transformers' own `generate` in one process."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.distributed.inference.feature_cases import tokenizer
from tests.distributed.inference.generator_cases import patient, sharp, stored
from tests.support.trainer_cases import VOCABULARY, settings
from zeromesh import Trainer
from zeromesh.errors import CollectiveError, ConfigError, DataError
from zeromesh.mesh.process_mesh import Mesh

IGNORED = -100
PAD = 0
GREEDY = {"max_new_tokens": 6}


def padded(rows: list[Any], value: int, *, left: bool = False) -> torch.Tensor:
    """Rows of tokens as one tensor [rows, longest]."""
    longest = max(map(len, rows))
    return torch.tensor(
        [[value] * (longest - len(each)) * left + list(each) + [value] * (longest - len(each)) * (not left) for each in rows]
    )


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right, as for training."""
    ids = [each["input_ids"] for each in samples]
    batch = {"input_ids": padded(ids, PAD), "attention_mask": padded([[1] * len(each) for each in ids], 0)}
    if "labels" in samples[0]:
        batch["labels"] = padded([each["labels"] for each in samples], IGNORED)
    return batch


def questions(count: int, *, whole: bool, labels: bool = True) -> list[dict[str, Any]]:
    """Samples with prompts and answers of many lengths. `whole`: the prompt is what the encoder sees, and labels the answer."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for number in range(count):
        prompt, answer = (
            torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
            for length in (1 + number * 3 % 7, 1 + number * 5 % 4)
        )
        ids = prompt if whole else prompt + answer
        targets = answer if whole else [IGNORED] * len(prompt) + answer
        found.append({"input_ids": ids, "labels": targets} if labels else {"input_ids": prompt})
    return found


def wanted_of(model: Any, samples: list[dict[str, Any]], fields: dict[str, Any]) -> list[list[int]]:
    """The prediction of each sample by itself, in one process."""
    found = []
    for sample in samples:
        ids, labels = list(sample["input_ids"]), sample.get("labels")
        whole = model.config.is_encoder_decoder
        if not whole and labels is not None:
            ids = ids[: next(place for place, label in enumerate(labels) if label != IGNORED)]
        inputs = torch.tensor([ids])
        with torch.no_grad():
            tokens = model.generate(inputs, attention_mask=torch.ones_like(inputs), **{"pad_token_id": PAD, **GREEDY, **fields})[0]
        found.append(tokens[0 if whole else len(ids) :].tolist())
    return found


def require_like(prediction: Any, samples: list[dict[str, Any]], wanted: list[list[int]]) -> None:
    """Assert that predictions and labels, which are padded to one width each, are those of the samples by themselves."""
    assert prediction.predictions.tolist() == padded(wanted, PAD).tolist()
    if "labels" in samples[0]:
        assert prediction.label_ids.tolist() == padded([each["labels"] for each in samples], IGNORED).tolist()
    else:
        assert prediction.label_ids is None


class Predictions:
    """A `compute_metrics` that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, prediction: Any) -> dict[str, int]:
        self.seen.append(prediction)
        return {"samples": len(prediction.predictions)}


def trainer_of(
    folder: str, sections: dict[str, Any], model: Any = None, *, run: dict[str, Any] | None = None, **inputs: Any
) -> Trainer:
    """A trainer, by default of a Llama, whose evaluations generate greedily."""
    how = {"max_steps": 2, "predict_with_generate": True, "generation": {"pad_token_id": PAD, **GREEDY}, **(run or {})}
    model = sharp("llama") if model is None else model
    return Trainer(model.train(), settings(folder, **patient(sections), run=how), data_collator=collate, **inputs)


def agrees(
    mesh: Mesh, folder: str, model: str, sections: dict[str, Any], count: int = 11, fields: dict[str, Any] | None = None
) -> None:
    """`evaluate`, `predict` with and without labels, and evaluations of a run give what one process does."""
    reference, given, metrics = sharp(model), fields or {}, Predictions()
    whole = reference.config.is_encoder_decoder
    samples, bare = questions(count, whole=whole), questions(3, whole=whole, labels=False)
    run = {"max_steps": 1, "generation": {"pad_token_id": PAD, **GREEDY, **given}}
    data: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples, "compute_metrics": metrics}
    with trainer_of(folder, sections, sharp(model), run=run, **data) as trainer:
        wanted = wanted_of(reference, samples, given)
        values = trainer.evaluate()
        require_like(metrics.seen[-1], samples, wanted)
        plain = trainer.evaluate(predict_with_generate=False)
        logits = metrics.seen[-1].predictions
        assert (logits[0] if isinstance(logits, tuple) else logits).ndim == 3
        # A model's own loss, which comes with logits, is in float32.
        assert values["eval_loss"] == pytest.approx(plain["eval_loss"], rel=0, abs=1e-6)
        output = trainer.predict(samples, predict_with_generate=True, max_new_tokens=3)
        require_like(output, samples, wanted_of(reference, samples, {**given, "max_new_tokens": 3}))
        require_like(trainer.predict(bare), bare, wanted_of(reference, bare, given))
        trainer.fit()
        after = sharp(model)
        after.load_state_dict(dict(trainer.state_dict()), strict=False)
        require_like(metrics.seen[-1], samples, wanted_of(after, samples, given))
    assert given or len(set(map(tuple, wanted))) > 1, "one text for all prompts, which any mistake would give too"


def refuses(mesh: Mesh, folder: str) -> None:
    """What is refused of one trainer, which outlives it."""
    samples = questions(5, whole=False)
    sections, run = {"parallel": {"pipeline": 2}}, {"predict_with_generate": False, "generation": None}
    asked: dict[str, dict[str, Any]] = {
        "max_new_tokens: an evaluation generates with predict_with_generate=True": {
            "predict_with_generate": None, "max_new_tokens": 3,
        },
        "max_new_token is no field of transformers' GenerationConfig": {"max_new_token": 3},
        "num_return_sequences: 2: a sample has one prediction": {"num_return_sequences": 2},
        "max_length counts the padding of prompts; give max_new_tokens": {"max_length": 9},
        "stop_strings needs a tokenizer": {"stop_strings": ["a"]},
        "beam_search is not possible under parallel.pipeline": {"num_beams": 2},
    }  # fmt: skip
    with trainer_of(folder, sections, run=run, eval_dataset=samples) as trainer:
        with pytest.raises(ConfigError, match="predict_with_generate: what is generated is for compute_metrics"):
            trainer.evaluate(predict_with_generate=True)
        for message, fields in asked.items():
            with pytest.raises(ConfigError, match=re.escape(message)):
                trainer.predict(samples, **{"predict_with_generate": True, **fields})
        assert trainer.predict(samples, predict_with_generate=True, **GREEDY).predictions.shape == (5, 6)


def lacks_a_prompt(mesh: Mesh, folder: str) -> None:
    """A sample that one rank reads has no prompt, which all say."""
    samples = questions(5, whole=False)
    samples[3]["labels"] = samples[3]["input_ids"]
    with (
        trainer_of(folder, {"parallel": {"timeout_seconds": 10}}, eval_dataset=samples) as trainer,
        pytest.raises((DataError, CollectiveError), match="sample 3 has no prompt"),
    ):
        trainer.predict(samples)


def samples_prompts(mesh: Mesh, folder: str, sections: dict[str, Any]) -> None:
    """Runs with and without `run.prompts` have the same losses, weights and states of dropout; the first has written samples."""
    text = Path(folder) / "text.txt"
    if not mesh.rank:
        text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    mesh.wait_for_all_ranks("text")
    sizes = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    how = {"prompts": ["2 times", "7 "], "prompts_every": 2, "generation": {"do_sample": True, "max_new_tokens": 4}}
    found: list[Any] = []
    for name, run in {"with": how, "without": {}}.items():
        config = settings(
            folder,
            model={"config": {**sizes, "eos_token_id": 255, "bos_token_id": None}},
            data={"train": str(text), "tokenizer": "bytes", "sequence_length": 16, "cache": folder},
            **patient(sections),
            run={"name": name, "eval_every": 2, **run},
        )
        torch.manual_seed(3)
        with Trainer(config=config) as trainer:
            report = trainer.fit()
            weights = {name: each.tolist() for name, each in trainer.state_dict()}
            found.append([report.losses, torch.get_rng_state().tolist(), weights])
    assert found[0] == found[1]
    lines = [json.loads(line) for line in (Path(folder) / "with" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [(n, p) for n in (2, 4) for p in ("2 times", "7 ")]
    assert all(line["completion"] for line in lines)


def own_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Cross entropy of the next token, as a user writes it."""
    logits, labels = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
    total = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total, int((labels[:, 1:] != -100).sum())


def averages(mesh: Mesh, folder: str, sections: dict[str, Any]) -> None:
    """With `ema.evaluate` averaged weights generate, and the trained ones are there again afterwards."""
    samples, metrics = questions(5, whole=False), Predictions()
    sections = {**sections, "ema": {"decay": 0.9, "evaluate": True}, "optimizer": {"lr": 0.3}}
    data: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples, "compute_metrics": metrics}
    with trainer_of(folder, sections, **data) as trainer:
        trainer.fit()
        trainer.evaluate()
        averaged, trained = sharp("llama"), sharp("llama")
        averaged.load_state_dict(dict(trainer.state_dict(ema=True)), strict=False)
        trained.load_state_dict(dict(trainer.state_dict()), strict=False)
        wanted = wanted_of(averaged, samples, {})
        assert wanted != wanted_of(trained, samples, {}), "averages generate what the weights do: nothing is shown"
        assert len(metrics.seen) == 2
        for prediction in metrics.seen:
            require_like(prediction, samples, wanted)
        prompt = torch.tensor([[9, 3, 11]])
        now = trainer.generate(prompt, **GREEDY, pad_token_id=PAD)
        assert torch.equal(now, trained.generate(prompt, **GREEDY, pad_token_id=PAD))


def several(mesh: Mesh, folder: str, sections: dict[str, Any]) -> None:
    """Two sets by name, of which one has fewer samples than there are ranks, with a loss of one's own."""
    sets, metrics = {"one": questions(1, whole=False), "three": questions(3, whole=False)}, Predictions()
    reference = sharp("llama")
    inputs: dict[str, Any] = {"eval_dataset": sets, "compute_metrics": metrics, "compute_loss": own_loss}
    with trainer_of(folder, sections, **inputs) as trainer:
        values = trainer.evaluate()
    for prediction, samples in zip(metrics.seen, sets.values(), strict=True):
        require_like(prediction, samples, wanted_of(reference, samples, {}))
    total, count = own_loss(reference, collate(sets["three"]))
    assert [values["eval_one_samples"], values["eval_three_samples"]] == [1, 3]
    assert values["eval_three_loss"] == pytest.approx(float(total) / count, rel=0, abs=1e-9)


def beams(mesh: Mesh, folder: str, sections: dict[str, Any], model: str) -> None:
    """Beams give what each sample gives by itself in one process: padding behind its end is the pad token, which is 0.

    A decoder starts with the token that ends, as that of BART does.
    """
    reference, trained, fields = sharp(model), sharp(model), {"num_beams": 3, "max_new_tokens": 4}
    whole = reference.config.is_encoder_decoder
    if whole:
        for each in (reference, trained):
            each.generation_config.decoder_start_token_id = each.generation_config.eos_token_id
    samples = questions(5, whole=whole)
    wanted = wanted_of(reference, samples, fields)
    assert not whole or {each[0] for each in wanted} == {5}
    with trainer_of(folder, sections, trained, eval_dataset=samples) as trainer:
        require_like(trainer.predict(samples, **fields), samples, wanted)


def draws(mesh: Mesh, folder: str, sections: dict[str, Any]) -> list[Any]:
    """What sampling draws, which is the same in every call."""
    samples, fields = questions(5, whole=False), {"do_sample": True, "temperature": 1.5, "top_k": 20}
    with trainer_of(folder, sections, eval_dataset=samples) as trainer:
        first, second = (trainer.predict(samples, **fields).predictions.tolist() for _ in range(2))
    assert first == second
    drawn: list[Any] = first
    return drawn


def tokenized(mesh: Mesh, folder: str) -> None:
    """The tokenizer that the configuration names knows where texts end, and what pads them."""
    text, known = Path(folder, "text.txt"), tokenizer()
    known.eos_token = "f"
    if mesh.rank == 0:
        text.write_text("once upon a time there was a text of letters " * 20)
    data = {"train": str(text), "tokenizer": str(stored(mesh, folder, known)), "sequence_length": 8}
    samples, fields = questions(5, whole=False), {"stop_strings": [*"bcdefghijklmnopqrstuvwxyz"], **GREEDY}
    model = sharp("llama")
    model.generation_config.pad_token_id = None
    with trainer_of(folder, {"data": data}, model, run={"generation": None}) as trainer:
        found = trainer.predict(samples, **fields)
    wanted = wanted_of(sharp("llama"), samples, {**fields, "tokenizer": known})
    assert min(map(len, wanted)) < GREEDY["max_new_tokens"], "no text has ended"
    require_like(found, samples, wanted)
