"""TRL's trainers over zeromesh beside themselves: `scripts/suites/trl_suite.py [sft dpo reward grpo]`; needs trl and peft.

Each is trained on a tiny Llama in float32, whole and with LoRA: as it is on one process, and over zeromesh on 2 ranks at stages 2
and 3, on the same samples. GRPO draws its completions on each rank, and is compared with itself on 2 ranks. Printed are the largest
difference of losses, which has to be below 1e-5, and of the logits of the models that are saved, read by `from_pretrained`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_KINDS = ("sft", "dpo", "reward", "grpo")
_STEPS = 4
_NEAR = 1e-5


def _save_base(folder: Path, kind: str) -> None:
    """A model with random weights, and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(60))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    whole.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    whole.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
    config = LlamaConfig(vocab_size=len(words), **sizes, **ids)
    (LlamaForSequenceClassification if kind == "reward" else LlamaForCausalLM)(config).save_pretrained(folder)


def _rows(kind: str) -> list[dict[str, str]]:
    import torch

    generator = torch.Generator().manual_seed(1)

    def text(length: int) -> str:
        return " ".join(f"w{word}" for word in torch.randint(0, 60, (length,), generator=generator).tolist())

    made = {
        "sft": lambda n: {"text": text(5 + n % 8)},
        "dpo": lambda n: {"prompt": text(4), "chosen": " " + text(5), "rejected": " " + text(4)},
        "reward": lambda n: {"chosen": text(5), "rejected": text(4)},
        "grpo": lambda n: {"prompt": text(4)},
    }[kind]
    return [made(number) for number in range(32)]


def train(kind: str, base: Path, out: Path, stage: int, lora: bool) -> None:
    """Train as one rank of the launch; stage -1: without zeromesh. Rank 0 writes what was logged."""
    import peft
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from zeromesh.transformers import on_zeromesh

    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    own: dict[str, Any] = {
        "sft": {"max_length": 16, "gradient_accumulation_steps": 2},
        "dpo": {"max_length": 24},
        "reward": {"max_length": 24},
        "grpo": {"num_generations": 4, "max_completion_length": 6, "beta": 0.1},
    }[kind]
    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "grpo": "GRPO"}[kind]
    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(out),
        per_device_train_batch_size=4 if kind == "grpo" else 4 // ranks,
        max_steps=_STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=3,
        **own,
    )
    model = (AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM).from_pretrained(base)
    trainer: Any = getattr(trl, f"{name}Trainer")
    more: dict[str, Any] = {}
    if stage >= 0:
        trainer, more = on_zeromesh(trainer), {"zeromesh": {"zero": {"stage": stage}}}
    if kind == "grpo":
        more["reward_funcs"] = lambda completions, **_: [float(len(set(each))) for each in completions]
    task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
    adapter = peft.LoraConfig(task_type=task, r=2, target_modules=["q_proj", "v_proj"]) if lora else None
    made = trainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(_rows(kind)),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=adapter,
        **more,
    )
    made.train()
    made.save_model(str(out / "model"))
    if made.accelerator.is_main_process:
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        (out / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


def _logits(kind: str, folder: Path) -> Any:
    """Return the logits of a saved model, or adapter, that plain transformers and peft read."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    adapted = (folder / "adapter_config.json").exists()
    if kind == "reward":
        kinds: Any = peft.AutoPeftModelForSequenceClassification if adapted else AutoModelForSequenceClassification
    else:
        kinds = peft.AutoPeftModelForCausalLM if adapted else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kinds.from_pretrained(folder, **({"num_labels": 1} if kind == "reward" else {})).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(4, 20)[None]).logits


def _run(kind: str, base: Path, out: Path, stage: int, ranks: int, lora: bool) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--train", kind, str(base), str(out), str(stage), str(int(lora))]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-6000:])
        return [float("nan")]
    found: list[float] = json.loads((out / "losses.json").read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Run and compare; 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="*", default=list(_KINDS), help=f"of {', '.join(_KINDS)}")
    parser.add_argument("--train", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        kind, base, out, stage, lora = options.train
        train(kind, Path(base), Path(out), int(stage), lora == "1")
        return 0
    wrong = 0
    for kind in options.kind:
        for lora in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                base = Path(folder, "base")
                _save_base(base, kind)
                plain = _run(kind, base, Path(folder, "plain"), -1, 2 if kind == "grpo" else 1, lora)
                for stage in (2, 3):
                    out = Path(folder, str(stage))
                    losses = _run(kind, base, out, stage, 2, lora)
                    apart = max(abs(one - other) for one, other in zip(plain, losses, strict=False))
                    saved = _logits(kind, out / "model") - _logits(kind, Path(folder, "plain/model"))
                    right = len(losses) == len(plain) == _STEPS and apart < _NEAR
                    wrong += not right
                    print(
                        f"{kind:6} {'LoRA' if lora else 'whole':5} stage {stage}: losses {apart:.1e}, logits of what was saved "
                        f"{float(saved.abs().max()):.1e}{'' if right else '  WRONG'}",
                        flush=True,
                    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
