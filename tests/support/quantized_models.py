"""Models with layers of bitsandbytes, as people load them, and the adapters that they put on."""

from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf

from tests.support.trainer_cases import llama, seeded

SIZES = {"hidden_size": 64, "intermediate_size": 128}
"""On CPU, bitsandbytes 0.50 is right where rows are whole blocks."""
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def narrow() -> Any:
    return llama(**SIZES)


def written(folder: Path, build: Any = narrow) -> None:
    """Write a model into a directory, if it is not there."""
    if not folder.exists():
        seeded(build).save_pretrained(folder)


def loaded(folder: Path, *, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    """A model of a directory, which is written if it is not there, quantized by bitsandbytes while it is loaded."""
    written(folder)
    settings = tf.BitsAndBytesConfig(**(how or NF4))
    return tf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=dtype)


def adapted(model: Any, settings: Any = None, **prepared: Any) -> Any:
    """The model as it is prepared for adapters, with those of PEFT's `settings`, or LoRA on all linear layers."""
    model = peft.prepare_model_for_kbit_training(model, **prepared)
    torch.manual_seed(12)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, settings or lora).train()
