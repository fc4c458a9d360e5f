"""`Trainer.generate` gives the tokens of the library's own `generate` in one process, under every layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.support.architectures import tiny
from tests.support.trainer_cases import VOCABULARY, gpt2, llama, seeded, sentences, settings
from tests.support.workers import PoolOptions, Workers
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh

MODELS = {
    "llama": llama,
    "llama-deep": lambda: llama(num_hidden_layers=4),
    "gpt2": lambda: gpt2(resid_pdrop=0.3),
    "t5": lambda: tiny("t5", vocab_size=VOCABULARY),
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


ALL = ["greedy", "sampling", "beams", "uncached"]
STAGED = ["greedy", "sampling", "uncached"]
LAYOUTS: list[Any] = [
    (2, "llama", 3, {"tensor": 2, "sequence": True}, ["sampling", "beams"]),
    pytest.param(2, "llama", 3, {"tensor": 2}, ["sampling", "beams"], marks=pytest.mark.full),
    (2, "gpt2", 3, {"pipeline": 2}, ["sampling", "uncached"]),
    pytest.param(2, "llama", 3, {}, ["beams"], marks=pytest.mark.full),
    pytest.param(4, "gpt2", 2, {"pipeline": 2, "tensor": 2, "sequence": True}, ["sampling", "greedy"], marks=pytest.mark.full),
    (2, "t5", 3, {"tensor": 2}, ["greedy"]),
    pytest.param(
        *(2, "llama-deep", 2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}, ["greedy"]), marks=pytest.mark.full
    ),
    pytest.param(4, "llama", 1, {"pipeline": 2, "tensor": 2}, STAGED, marks=pytest.mark.full),
    pytest.param(4, "llama", 3, {"pipeline": 2}, STAGED, marks=pytest.mark.full),
    pytest.param(4, "gpt2", 3, {"tensor": 2}, ALL, marks=pytest.mark.full),
    pytest.param(4, "gpt2", 2, {"tensor": 2, "sequence": True}, ALL, marks=pytest.mark.full),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "model", "stage", "parallel", "ways"), LAYOUTS)
def test_generation_is_that_of_one_process(
    workers: Workers, tmp_path: Path, ranks: int, model: str, stage: int, parallel: dict[str, Any], ways: list[str]
) -> None:
    arguments = {"folder": str(tmp_path), "model": model, "ways": ways, "stage": stage, "parallel": parallel}
    results = workers.run(ranks, "test_generate:agrees", timeout=120.0, **arguments)
    assert all(found["drawn"] == results[0]["drawn"] for found in results)
    lengths = {tuple(found["lengths"]) for found in results}
    divided = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    assert len(lengths) == ranks // divided, "data-parallel ranks have generated as much as each was asked for"


def agrees(mesh: Mesh, folder: str, model: str, ways: list[str], stage: int, parallel: dict[str, Any]) -> dict[str, Any]:
    """Before, during and after two steps; and twice the same without a seed."""
    build = MODELS[model]
    parallel = {"timeout_seconds": 30, **parallel}
    config = settings(folder, parallel=parallel, zero={"stage": stage}, run={"max_steps": 2, "name": model})
    asker = Asker(mesh, seeded(build), ways, alone=model == "t5")
    with Trainer(seeded(build), config, train_dataset=sentences(), callbacks=[asker]) as trainer:
        asker.ask(trainer, "before")
        before = torch.get_rng_state()
        drawn = [trainer.generate(**prompts(2), **WAYS["sampling"], pad_token_id=0).tolist() for _ in range(2)]
        assert torch.equal(before, torch.get_rng_state())
        assert drawn[0] != drawn[1]
        trainer.fit()
        assert trainer.engine is None
        asker.ask(trainer, "after")
        assert type(trainer.model).__call__ is torch.nn.Module.__call__
        assert trainer.model.training
    assert not asker.wrong, asker.wrong
    return {"lengths": asker.lengths, "drawn": drawn}


def test_what_the_layout_does_not_allow(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        pool.run("test_generate:refuses", folder=str(tmp_path))


def refuses(mesh: Mesh, folder: str) -> None:
    """What cannot be asked of a pipeline."""
    config = settings(folder, parallel={"pipeline": 2, "timeout_seconds": 10}, run={"name": "refused"})
    ids, where = prompts(2)["input_ids"], "is not possible under parallel.pipeline"
    asked: list[tuple[dict[str, Any], str]] = [
        ({"num_beams": 2}, "beam_search is not"),
        ({"output_hidden_states": True}, f"output_hidden_states {where}"),
        ({"max_time": 1.0}, "max_time ends ranks"),
        ({"synced_gpus": True}, "synced_gpus is decided here"),
        ({"inputs_embeds": ids}, f"inputs_embeds {where}"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation is not"),
        ({"cache_implementation": "static"}, f"cache_implementation: static {where}"),
        ({"attention_mask": ids * 0}, "pad prompts on the left"),
        (
            {"max_new_tokens": 2 + mesh.rank},
            r"compute one batch together \(parallel.tensor, parallel.context, parallel.pipeline\); give all",
        ),
    ]
    with Trainer(seeded(llama), config, train_dataset=sentences()) as trainer:
        for arguments, said in asked:
            with pytest.raises(ValueError, match=said):
                trainer.generate(ids, **arguments)
