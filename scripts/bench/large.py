"""A model larger than the memory that it is trained in: `python -m bench.large FOLDER STEPS [LAYERS]`; prints one line of JSON."""

import json
import sys
from typing import Any

import torch

from bench.workload import TORCH_DTYPES
from zeromesh.offload import Tier, peak_bytes
from zeromesh.trainer import Trainer
from zeromesh.trainer.monitoring.step_metrics import read_metrics

_VOCABULARY, _LENGTH = 32000, 512


class Tokens:
    """Random sequences."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int, /) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, _VOCABULARY, (_LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train, and say what it took."""
    folder, steps = sys.argv[1], int(sys.argv[2])
    layers = int(sys.argv[3]) if len(sys.argv) > 3 else 18
    with Trainer(None, configuration(folder, steps, layers), Tokens()) as trainer:
        report = trainer.fit()
        engine = trainer.engine
        assert engine is not None
        lines = read_metrics(f"{folder}/large/metrics.jsonl")
        last: dict[str, Any] = lines[-1]
        print(
            json.dumps(
                {
                    "parameters": sum(
                        slot.spec.numel for unit in engine.units for bucket in unit.buckets for slot in bucket.layout.slots
                    ),
                    "swap_bytes": engine.ledger.total(Tier.FILE),
                    "ledger_peak_bytes": engine.ledger.peak(),
                    "peak_bytes": peak_bytes(),
                    "step_seconds": last["step_seconds"],
                    "file_wait_seconds": last["file_wait_seconds"],
                    "losses": report.losses,
                }
            ),
            flush=True,
        )


def configuration(folder: str, steps: int, layers: int) -> dict[str, Any]:
    """Hidden 2048, 18 layers, vocabulary 32000: 1.06 billion parameters."""
    model = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": _LENGTH,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return {
        "model": {"config": model, "activation_checkpointing": "block"},
        "zero": {"stage": 3},
        "precision": {"compute": str(TORCH_DTYPES["bf16"]).removeprefix("torch.")},
        "offload": {"optimizer": "file", "parameters": "file"},
        "optimizer": {"lr": 1e-4},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "batch": {"global_size": 1, "micro_size": 1},
        "run": {"name": "large", "output_dir": folder, "max_steps": steps, "clip_norm": 1.0},
        "checkpoint": {"every_steps": 0},
    }


if __name__ == "__main__":
    main()
