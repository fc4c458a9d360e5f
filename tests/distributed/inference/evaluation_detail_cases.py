"""Cases on evaluations that generate: averaged weights, few samples, several sets, a loss of one's own, and ways of searching."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.distributed.inference.evaluation_cases import GREEDY, PAD, collate, differences, questions, wanted_of
from tests.distributed.inference.feature_cases import tokenizer
from tests.distributed.inference.generator_cases import sharp
from tests.support.trainer_cases import settings
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh


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
