"""Cases on generation by a trainer's ranks, against the library's own in one process."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers as tf

from tests.distributed.parallel.tensor_cases import _T5
from tests.support.trainer_cases import VOCABULARY, gpt2, llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh

T5 = {**_T5, "vocab_size": VOCABULARY}
MODELS = {
    "llama": llama,
    "llama-deep": lambda: llama(num_hidden_layers=4),
    "gpt2": lambda: gpt2(resid_pdrop=0.3),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 6},
    "uncached": {"max_new_tokens": 3, "use_cache": False},
    "sampling": {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "top_k": 20, "repetition_penalty": 1.3},
    "beams": {"max_new_tokens": 5, "num_beams": 3},
}


def prompts(rows: int, seed: int = 3, length: int = 5) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Asker(Callback):
    """Generates before, during and after training; what differs from one process with the same weights."""

    def __init__(self, mesh: Mesh, reference: Any, ways: list[str], alone: bool) -> None:
        self.mesh, self.reference, self.ways, self.alone = mesh, reference.double().eval(), ways, alone
        self.wrong: list[str] = []
        self.lengths: list[int] = []

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step == 1:
            self.ask(trainer, "during")

    def ask(self, trainer: Trainer, when: str) -> None:
        self.reference.load_state_dict(dict(trainer.state_dict()), strict=False)
        self.reference.tie_weights()
        data = 0 if self.alone else trainer.mesh.data_index
        # Of an even length too, that tensor ranks can share out.
        inputs = prompts(3 - data, seed=3 + data, length=6 if when == "during" else 5)
        for way in self.ways if when == "during" else self.ways[:1]:
            arguments = {**WAYS[way], "pad_token_id": 0}
            arguments["max_new_tokens"] += 4 * data
            torch.manual_seed(17 + data)
            wanted = self.reference.generate(**inputs, **arguments)
            found = trainer.generate(**inputs, seed=17 + data, **arguments)
            if found.tolist() != wanted.tolist():
                self.wrong.append(f"{when} {way}: {found.tolist()} for {wanted.tolist()}")
            self.lengths.append(found.shape[1])
        # A token that has come up is an end, too.
        end = int(self.reference.generate(**inputs, max_new_tokens=4, pad_token_id=0)[0, -1])
        processors = tf.LogitsProcessorList([tf.SuppressTokensLogitsProcessor([int(end == 0)])])
        ended = {"max_new_tokens": 9, "pad_token_id": 0, "eos_token_id": end, "logits_processor": processors}
        if trainer.generate(**inputs, **ended).tolist() != self.reference.generate(**inputs, **ended).tolist():
            self.wrong.append(f"{when}: another end")


def agrees(
    mesh: Mesh, folder: str, model: str, ways: list[str], stage: int, parallel: dict[str, Any]
) -> dict[str, Any]:
    """Before, during and after two steps; and twice the same without a seed."""
    build = MODELS[model]
    config = settings(
        folder, parallel={"timeout_seconds": 30, **parallel}, zero={"stage": stage}, run={"max_steps": 2, "name": model}
    )
    asker = Asker(mesh, seeded(build), ways, alone=model == "t5")
    with Trainer(seeded(build), config, train_dataset=sentences(), callbacks=[asker]) as trainer:
        asker.ask(trainer, "before")
        before = torch.get_rng_state()
        drawn = [trainer.generate(**prompts(2), **WAYS["sampling"], pad_token_id=0).tolist() for _ in range(2)]
        undisturbed = torch.equal(before, torch.get_rng_state())
        trainer.fit()
        whole = trainer.engine is None
        asker.ask(trainer, "after")
        plain = type(trainer.model).__call__ is torch.nn.Module.__call__ and trainer.model.training
    return {
        "wrong": asker.wrong,
        "lengths": asker.lengths,
        "drawn": drawn,
        "kept": [undisturbed, whole, plain],
    }


def refuses(mesh: Mesh, folder: str) -> list[str]:
    """What cannot be asked of a pipeline."""
    config = settings(folder, parallel={"pipeline": 2, "timeout_seconds": 10}, run={"name": "refused"})
    ids = prompts(2)["input_ids"]
    asked: list[dict[str, Any]] = [
        {"num_beams": 2}, {"output_hidden_states": True}, {"max_time": 1.0}, {"synced_gpus": True}, {"inputs_embeds": ids},
        {"prompt_lookup_num_tokens": 2}, {"cache_implementation": "static"}, {"attention_mask": ids * 0},
        {"max_new_tokens": 2 + mesh.rank},
    ]  # fmt: skip
    messages = []
    with Trainer(seeded(llama), config, train_dataset=sentences()) as trainer:
        for arguments in asked:
            try:
                trainer.generate(ids, **arguments)
                messages.append("")
            except ValueError as error:
                messages.append(f"{type(error).__name__}: {error}")
    return messages
