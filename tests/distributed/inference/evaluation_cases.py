"""Cases on evaluations that generate, against transformers' own `generate` in one process."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.distributed.inference.feature_cases import tokenizer
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


class Predictions:
    """A `compute_metrics` that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, Any]] = []

    def __call__(self, prediction: Any) -> dict[str, int]:
        self.seen.append((prediction.predictions, prediction.label_ids))
        return {"samples": len(prediction.predictions)}


def own_loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Cross entropy of the next token, as a user writes it."""
    logits, labels = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
    total = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    return total, int((labels[:, 1:] != -100).sum())


def configured(folder: str, sections: dict[str, Any], **run: Any) -> dict[str, Any]:
    """A configuration whose evaluations generate greedily."""
    return settings(
        folder,
        **{
            **sections,
            "parallel": {"timeout_seconds": 30, **sections.get("parallel", {})},
            "run": {
                "max_steps": 2, "predict_with_generate": True, "generation": {"pad_token_id": PAD, **GREEDY}, **run,
            },
        },
    )  # fmt: skip


def averages(mesh: Mesh, folder: str, sections: dict[str, Any]) -> dict[str, Any]:
    """With `ema.evaluate` averaged weights generate, and the trained ones are there again afterwards."""
    samples, metrics = questions(5, whole=False), Predictions()
    config = configured(folder, {**sections, "ema": {"decay": 0.9, "evaluate": True}, "optimizer": {"lr": 0.3}})
    data: dict[str, Any] = {"train_dataset": samples, "eval_dataset": samples, "data_collator": collate}
    wrong: list[str] = []
    with Trainer(sharp("llama").train(), config, compute_metrics=metrics, **data) as trainer:
        trainer.fit()
        trainer.evaluate()
        averaged, trained = sharp("llama"), sharp("llama")
        averaged.load_state_dict(dict(trainer.state_dict(ema=True)), strict=False)
        trained.load_state_dict(dict(trainer.state_dict()), strict=False)
        wanted = wanted_of(averaged, samples, {})
        for predictions, labels in metrics.seen:
            wrong += differences(predictions, labels, samples, wanted)
        prompt = torch.tensor([[9, 3, 11]])
        now = trainer.generate(prompt, **GREEDY, pad_token_id=PAD)
        wrong += [] if torch.equal(now, trained.generate(prompt, **GREEDY, pad_token_id=PAD)) else ["the weights"]
    return {"wrong": wrong, "evaluations": len(metrics.seen), "apart": wanted != wanted_of(trained, samples, {})}


def several(mesh: Mesh, folder: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Two sets by name, of which one has fewer samples than there are ranks, with a loss of one's own."""
    sets, metrics = {"one": questions(1, whole=False), "three": questions(3, whole=False)}, Predictions()
    reference, wrong = sharp("llama"), []
    config = configured(folder, sections)
    with Trainer(
        sharp("llama").train(), config, eval_dataset=sets, data_collator=collate, compute_metrics=metrics,
        compute_loss=own_loss,
    ) as trainer:  # fmt: skip
        values = trainer.evaluate()
        for (predictions, labels), samples in zip(metrics.seen, sets.values(), strict=True):
            wrong += differences(predictions, labels, samples, wanted_of(reference, samples, {}))
    batch = collate(sets["three"])
    total, count = own_loss(reference, batch)
    return {
        "wrong": wrong,
        "samples": [values["eval_one_samples"], values["eval_three_samples"]],
        "loss": abs(values["eval_three_loss"] - float(total) / count),
    }


def beams(mesh: Mesh, folder: str, sections: dict[str, Any], model: str) -> dict[str, Any]:
    """Beams give what each sample gives by itself in one process: padding behind its end is the pad token, which is 0.

    A decoder starts with the token that ends, as that of BART does.
    """
    reference, trained, fields = sharp(model), sharp(model).train(), {"num_beams": 3, "max_new_tokens": 4}
    whole = reference.config.is_encoder_decoder
    if whole:
        for each in (reference, trained):
            each.generation_config.decoder_start_token_id = each.generation_config.eos_token_id
    samples = questions(5, whole=whole)
    with Trainer(trained, configured(folder, sections), eval_dataset=samples, data_collator=collate) as trainer:
        found = trainer.predict(samples, **fields)
    wanted = wanted_of(reference, samples, fields)
    return {"wrong": differences(found.predictions, found.label_ids, samples, wanted), "wanted": wanted}


def draws(mesh: Mesh, folder: str, sections: dict[str, Any]) -> list[Any]:
    """What sampling draws, which is the same in every call."""
    samples, fields = questions(5, whole=False), {"do_sample": True, "temperature": 1.5, "top_k": 20}
    with Trainer(
        sharp("llama").train(), configured(folder, sections), eval_dataset=samples, data_collator=collate
    ) as trainer:
        first, second = (trainer.predict(samples, **fields).predictions.tolist() for _ in range(2))
    return [first, first == second or second]


def tokenized(mesh: Mesh, folder: str) -> dict[str, Any]:
    """The tokenizer that the configuration names knows where texts end, and what pads them."""
    text, directory = Path(folder, "text.txt"), Path(folder, "tokenizer")
    known = tokenizer()
    known.eos_token = "f"
    if mesh.rank == 0:
        text.write_text("once upon a time there was a text of letters " * 20)
        known.save_pretrained(directory)
    mesh.world.barrier("the tokenizer")
    samples, fields = questions(5, whole=False), {"stop_strings": [*"bcdefghijklmnopqrstuvwxyz"], **GREEDY}
    config = settings(
        folder,
        data={"train": str(text), "tokenizer": str(directory), "sequence_length": 8},
        run={"name": "tokenized"},
        parallel={"timeout_seconds": 30},
    )
    model = sharp("llama").train()
    model.generation_config.pad_token_id = None
    with Trainer(model, config, data_collator=collate) as trainer:
        found = trainer.predict(samples, predict_with_generate=True, **fields)
    wanted = wanted_of(sharp("llama"), samples, {**fields, "tokenizer": known})
    return {
        "wrong": differences(found.predictions, found.label_ids, samples, wanted),
        "ended": min(map(len, wanted)) < GREEDY["max_new_tokens"],
    }
