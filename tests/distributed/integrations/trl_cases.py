"""TRL's trainers over the engine, whose losses are of our kernel's log-probabilities, beside themselves with their own."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf
from datasets import Dataset

from tests.distributed.integrations.accelerate_cases import fresh_state
from tests.support.plain import like
from zeromesh.kernels.chunked_head import _ScoresPass
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.integrations.trl import _tokenizer
from zeromesh.transformers import on_zeromesh

_WORDS = [f"the number {number} is before {number + 1}, " for number in range(16)]
_ROWS: dict[str, dict[str, Any]] = {
    "SFT": {"text": _WORDS},
    "DPO": {"prompt": _WORDS, "chosen": [f"yes {each}" for each in _WORDS], "rejected": [each[:9] for each in _WORDS]},
    "GRPO": {"prompt": [each[:9] for each in _WORDS]},
}
_OWN: dict[str, dict[str, Any]] = {"GRPO": {"num_generations": 2, "max_completion_length": 5, "beta": 0.1}}
_ARGUMENTS: dict[str, Any] = {
    "model_init_kwargs": {"dtype": "float32"},
    "max_steps": 3,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
_METRICS = {
    "SFT": ("mean_token_accuracy", "num_tokens", "entropy"),
    "DPO": ("logits/chosen", "mean_token_accuracy", "entropy", "num_tokens", "rewards/chosen"),
    "GRPO": ("entropy", "kl"),
}


def as_trl(mesh: Mesh, folder: str, kind: str, zeromesh: dict[str, Any], model: str = "llama", **options: Any) -> None:
    """Three steps: losses, norms of gradients, metrics of tokens and weights are those of TRL alone on the same ranks."""
    import trl

    logs, weights = [], []
    # Tensor ranks have one batch in common, which is that of all ranks without them.
    size = 1 if "parallel" in zeromesh else 2
    for name in ("plain", "mine"):
        with fresh_state():
            trainer_class, own = getattr(trl, f"{kind}Trainer"), dict[str, Any]()
            if name == "mine":
                trainer_class, own = on_zeromesh(trainer_class), {"zeromesh": zeromesh}
            if kind == "GRPO":
                own["reward_funcs"] = lambda completions, **_: [float(len(set(each))) for each in completions]
            arguments = getattr(trl, f"{kind}Config")(
                str(Path(folder) / name),
                per_device_train_batch_size=2 if name == "mine" else size,
                **_ARGUMENTS,
                **_OWN.get(kind, {}),
                **options,
            )
            tokenizer = _tokenizer("bytes")
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            ids = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "pad_token_id": 0}
            torch.manual_seed(0)
            if mesh.rank == 0:
                made = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(model, **sizes, **ids))
                made.save_pretrained(folder)  # TRL loads the reference model by its name.
            mesh.world.barrier("base")
            torch.manual_seed(3)
            trainer = trainer_class(
                folder, args=arguments, train_dataset=Dataset.from_dict(_ROWS[kind]), processing_class=tokenizer, **own
            )
            with patch.object(_ScoresPass, "scores", autospec=True, side_effect=_ScoresPass.scores) as ours:
                trainer.train()
            assert ours.called == (name == "mine")
            logs.append([line for line in trainer.state.log_history if "loss" in line])
            found = trainer.accelerator.get_state_dict(trainer.model)
            weights.append({key.removeprefix("module."): value.clone() for key, value in sorted(found.items())})
    for line, wanted in zip(*reversed(logs), strict=True):
        for metric in ("loss", "grad_norm", *_METRICS[kind]):
            assert line[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=3e-6), (metric, line, wanted)
    if mesh.rank == 0:  # The others get none.
        like(weights[1], weights[0], rel=0, abs_=1e-6)
