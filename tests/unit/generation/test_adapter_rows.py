"""Rows of one batch have different adapters of PEFT, and each gets what PEFT alone computes with its own."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf

from zeromesh import Generator
from zeromesh.trainer.generation.adapter_rows import BASE

TARGETS = ["q_proj", "down_proj", "lm_head"]
PROMPTS = [[5, 6], [9, 7, 11, 13, 4], [8], [20, 3, 17], [30, 31, 32, 33, 34, 35, 36]]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "target_modules": TARGETS},
    "rank-stabilized": {"r": 4, "target_modules": TARGETS, "use_rslora": True, "lora_alpha": 3},
    "dora": {"r": 4, "target_modules": TARGETS, "use_dora": True},
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "v_proj"]},
    "biased": {"r": 4, "target_modules": TARGETS, "lora_bias": True},
    "whole modules": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 20]},
    **{
        name: {"peft_type": name, "target_modules": ["q_proj", "v_proj"]}
        for name in ("LOHA", "LOKR", "VERA", "HRA", "RANDLORA", "DELORA", "SHIRA")
    },
    "IA3": {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "OFT": {"peft_type": "OFT", "target_modules": ["q_proj"], "oft_block_size": 4, "r": 0},
    "BOFT": {"peft_type": "BOFT", "target_modules": ["q_proj"], "boft_block_size": 4},
    "LN_TUNING": {"peft_type": "LN_TUNING", "target_modules": ["norm", "input_layernorm"]},
}


def base_of(folder: Path, kind: str = "llama", **fields: Any) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None}
    model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(kind, **{**sizes, **ends, **fields}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    return folder


def saved(base: Path, out: Path, seed: int, **settings: Any) -> Any:
    """PEFT's model of a base and an adapter with values drawn from `seed`, which is saved."""
    torch.manual_seed(seed)
    config = peft.PeftConfig.from_peft_type(**{"peft_type": "LORA", "task_type": "CAUSAL_LM", **settings})
    made: Any = peft.get_peft_model(tf.AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    made.save_pretrained(out)
    return peft.PeftModel.from_pretrained(tf.AutoModelForCausalLM.from_pretrained(base), out).eval()


def alone(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The tokens that greedy decoding without a cache chooses, and their log-probabilities."""
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            scores = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            logprobs.append(float(scores[tokens[-1]]))
    return tokens[len(prompt) :], logprobs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", METHODS)
def test_each_row_has_its_own_adapter(name: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base")
    shared = {"projection_prng_key": 3} if name in ("VERA", "RANDLORA") else {"r": 2} if name == "SHIRA" else {}
    first = saved(base, tmp_path / "style", 1, **METHODS[name], **shared)
    other = {**METHODS[name], **shared}
    if "peft_type" not in other:  # The second one has another rank, and is on other layers too.
        # PEFT puts no adapter around an embedding with another one.
        same = {"tokens": {"trainable_token_indices": [6, 9]}, "whole modules": {}}.get(name)
        other = {"r": 2, "target_modules": ["q_proj", "gate_proj", *(["embed_tokens"] if same is None else [])], **(same or {})}
    models = {"style": first, "task": saved(base, tmp_path / "task", 2, **other)}
    models[BASE] = tf.AutoModelForCausalLM.from_pretrained(base).eval()
    names = ["style", "task", BASE, "task", "style"]
    wanted = [alone(models[name], prompt, 7) for name, prompt in zip(names, PROMPTS, strict=True)]
    assert len({tuple(alone(model, PROMPTS[1], 7)[0]) for model in models.values()}) == 3
    keys = [f"model.adapters={{style: {tmp_path / 'style'}, task: {tmp_path / 'task'}}}"]
    with Generator(base, overrides=keys) as made:
        prompts = [{"input_ids": prompt, "adapter": name} for name, prompt in zip(names, PROMPTS, strict=True)]
        for batch in (5, 2):
            found = made.generate(prompts, max_new_tokens=7, batch=batch)
            assert [each.tokens for each in found] == [tokens for tokens, _ in wanted]
            logprobs = [pytest.approx(each.logprobs, abs=1e-5) for each in found]
            assert [logs for _, logs in wanted] == logprobs
        # Without a name the active one answers, in batches of transformers' loop too.
        assert made.generate([PROMPTS[1]], max_new_tokens=7)[0].tokens == alone(first, PROMPTS[1], 7)[0]
        beams = made.generate([{"input_ids": PROMPTS[1], "adapter": "task"}] * 2, max_new_tokens=3, num_beams=2)
        ids = torch.tensor([PROMPTS[1]])
        (rows,) = models["task"].generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, num_beams=2)
        assert beams[0].tokens == rows[len(PROMPTS[1]) :].tolist()
        with torch.no_grad():  # And nothing of it is left.
            torch.testing.assert_close(made.engine.model(input_ids=ids).logits, first(input_ids=ids).logits)
