"""Cases on evaluations that generate, against transformers' own `generate` in one process."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.distributed.inference.generator_cases import sharp
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
        [
            [value] * (longest - len(each)) * left + list(each) + [value] * (longest - len(each)) * (not left)
            for each in rows
        ]
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
            tokens = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), **{"pad_token_id": PAD, **GREEDY, **fields}
            )[0]
        found.append(tokens[0 if whole else len(ids) :].tolist())
    return found


def differences(predictions: Any, label_ids: Any, samples: list[dict[str, Any]], wanted: list[list[int]]) -> list[str]:
    """What is wrong with predictions and labels, which are padded to one width each."""
    wrong = []
    if predictions.tolist() != padded(wanted, PAD).tolist():
        wrong.append(f"{predictions.tolist()} for {wanted}")
    if "labels" in samples[0]:
        if label_ids.tolist() != padded([each["labels"] for each in samples], IGNORED).tolist():
            wrong.append(f"labels are {label_ids.tolist()}")
    elif label_ids is not None:
        wrong.append("labels that nobody gave")
    return wrong


def agrees(
    mesh: Mesh, folder: str, model: str, sections: dict[str, Any], count: int = 11, fields: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What differs from one process in `evaluate`, in `predict` with and without labels, and in evaluations of a run."""
    reference, given = sharp(model), fields or {}
    whole = reference.config.is_encoder_decoder
    samples, bare = questions(count, whole=whole), questions(3, whole=whole, labels=False)
    wrong: list[str] = []
    seen: list[tuple[Any, Any]] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions, prediction.label_ids))
        return {"samples": len(prediction.label_ids)}

    config = settings(
        folder,
        **{
            **sections,
            "parallel": {"timeout_seconds": 30, **sections.get("parallel", {})},
            "run": {
                "max_steps": 1, "name": model, "predict_with_generate": True,
                "generation": {"pad_token_id": PAD, **GREEDY, **given},
            },
        },
    )  # fmt: skip
    arguments: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples, "data_collator": collate}
    with Trainer(sharp(model).train(), config, compute_metrics=compute_metrics, **arguments) as trainer:
        wanted = wanted_of(reference, samples, given)
        values = trainer.evaluate()
        wrong += differences(*seen[-1], samples, wanted)
        plain = trainer.evaluate(predict_with_generate=False)
        logits = seen[-1][0][0] if isinstance(seen[-1][0], tuple) else seen[-1][0]
        wrong += [] if logits.ndim == 3 else ["no logits without generation"]
        # A model's own loss, which comes with logits, is in float32.
        if abs(values["eval_loss"] - plain["eval_loss"]) > 1e-6:
            wrong.append(f"loss {values['eval_loss']} for {plain['eval_loss']}")
        output = trainer.predict(samples, predict_with_generate=True, max_new_tokens=3)
        wrong += differences(
            output.predictions, output.label_ids, samples, wanted_of(reference, samples, {**given, "max_new_tokens": 3})
        )
        output = trainer.predict(bare)
        wrong += differences(output.predictions, output.label_ids, bare, wanted_of(reference, bare, given))
        trainer.fit()
        after = sharp(model)
        after.load_state_dict(dict(trainer.state_dict()), strict=False)
        wrong += differences(*seen[-1], samples, wanted_of(after, samples, given))
    return {"wrong": wrong, "kinds": len({tuple(each) for each in wanted})}


def refuses(mesh: Mesh, folder: str) -> dict[str, str]:
    """What is refused, by what was asked, of one trainer, which outlives it."""
    config = settings(folder, parallel={"pipeline": 2, "timeout_seconds": 10}, run={"name": "refused"})
    samples = questions(5, whole=False)
    asked: dict[str, dict[str, Any]] = {
        "no generation": {"predict_with_generate": None, "max_new_tokens": 3},
        "field": {"max_new_token": 3},
        "several": {"num_return_sequences": 2},
        "length": {"max_length": 9},
        "stop": {"stop_strings": ["a"]},
        "beams": {"num_beams": 2},
    }
    messages: dict[str, str] = {}
    with Trainer(sharp("llama").train(), config, eval_dataset=samples, data_collator=collate) as trainer:
        calls: dict[str, Any] = {
            name: partial(trainer.predict, samples, **{"predict_with_generate": True, **fields})
            for name, fields in asked.items()
        }
        for name, call in {"no metrics": partial(trainer.evaluate, predict_with_generate=True), **calls}.items():
            try:
                call()
                messages[name] = ""
            except ConfigError as error:
                messages[name] = str(error)
        messages["afterwards"] = str(trainer.predict(samples, predict_with_generate=True, **GREEDY).predictions.shape)
    return messages


def lacks_a_prompt(mesh: Mesh, folder: str) -> str:
    """What a rank says of a set in which a sample that one rank reads has no prompt."""
    samples = questions(5, whole=False)
    samples[3]["labels"] = samples[3]["input_ids"]
    config = settings(folder, parallel={"timeout_seconds": 10}, run={"name": "refused"})
    with Trainer(sharp("llama").train(), config, eval_dataset=samples, data_collator=collate) as trainer:
        try:
            trainer.predict(samples, predict_with_generate=True, **GREEDY)
        except (DataError, CollectiveError) as error:
            return str(error)
    return ""


def samples_prompts(mesh: Mesh, folder: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights of runs with and without `run.prompts`, with dropout, and what the model wrote in the first."""
    text = Path(folder) / "text.txt"
    if not mesh.rank:
        text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(400)))
    mesh.meet("text")
    sizes = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    how = {"prompts": ["2 times", "7 "], "prompts_every": 2, "generation": {"do_sample": True, "max_new_tokens": 4}}
    found: dict[str, Any] = {"weights": [], "losses": [], "states": []}
    for name, run in {"with": how, "without": {}}.items():
        config = settings(
            folder,
            model={"config": {**sizes, "eos_token_id": 255, "bos_token_id": None}},
            data={"train": str(text), "tokenizer": "bytes", "sequence_length": 16, "cache": folder},
            **{**sections, "parallel": {"timeout_seconds": 30, **sections.get("parallel", {})}},
            run={"name": name, "eval_every": 2, **run},
        )
        torch.manual_seed(3)
        with Trainer(config=config) as trainer:
            report = trainer.fit()
            found["states"].append(torch.get_rng_state().tolist())
            found["losses"].append(report.losses)
            found["weights"].append({name: each.tolist() for name, each in trainer.state_dict()})
    lines = (Path(folder) / "with" / "samples.jsonl").read_text().splitlines()
    alike = {name: one == other for name, (one, other) in found.items()}
    return {"alike": alike, "lines": [json.loads(line) for line in lines]}
