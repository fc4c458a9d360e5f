"""Cases that train on conversations, pairs and text together."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from trainer_cases import llama, seeded, settings

from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh

TEMPLATE = "{% for each in messages %}{{ each.role[0] }}:{{ each.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def write(folder: Path) -> dict[str, Any]:
    """Files of text, conversations and pairs; returns the `data` section that mixes them."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    with (folder / "chats.jsonl").open("w") as chats, (folder / "pairs.jsonl").open("w") as pairs:
        for n in range(9):
            turns = [("user", f"{n}+1?"), ("assistant", f"{n + 1}"), ("user", "sure?"), ("assistant", "yes" * (n % 3))]
            messages = [{"role": role, "content": content} for role, content in turns]
            print(json.dumps({"messages": messages}), file=chats)
            print(json.dumps({"prompt": f"{n}*2=", "completion": f"{2 * n}"}), file=pairs)
    mixture = {
        "text": {"train": str(folder / "text.txt"), "format": "text", "weight": 2},
        "chats": {"train": str(folder / "chats.jsonl"), "weight": 5},
        "pairs": {"train": str(folder / "pairs.jsonl"), "format": "pairs"},
    }
    keys = {"format": "chat", "chat_template": TEMPLATE, "sequence_length": 32, "eval_fraction": 0.1}
    return {"mixture": mixture, **keys, "cache": str(folder / "cache")}


def model() -> Any:
    """A tiny Llama that reads bytes."""
    return seeded(lambda: llama(vocab_size=256))


def loss_sum(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Sum and count of the loss of packed documents."""
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def trained(mesh: Mesh, folder: str, data: dict[str, Any], name: str, resume: str = "auto") -> dict[str, Any]:
    """Losses of 6 steps over the mixture, or of those after the checkpoint `resume`, and the lines of the start."""
    config = settings(
        folder,
        data=data,
        batch={"global_size": 6},
        run={"name": name, "max_steps": 6, "eval_every": 6},
        checkpoint={"every_steps": 2, "resume": resume, "keep_last": 3},
    )
    with contextlib.redirect_stdout(io.StringIO()) as out, Trainer(model(), config) as trainer:
        report = trainer.fit()
    return {"losses": report.losses, "eval": report.eval_loss, "said": out.getvalue()}
