"""Cases on what of `GenerationConfig` works in a layout, each against transformers' own `generate` in one process."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import DynamicCache, PreTrainedTokenizerFast, WatermarkingConfig
from transformers.generation import BaseStreamer

from tests.distributed.inference.generator_cases import patient, sharp, stored
from tests.support.trainer_cases import sentences, settings
from zeromesh import Generator, Trainer
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh

NEW = 5
PROMPT = [9, 3, 11, 60]
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20}
FEATURES: dict[str, dict[str, Any]] = {
    "greedy search": {},
    "sampling": SAMPLED,
    "logits processors (repetition_penalty, bad_words_ids, ...)": {"repetition_penalty": 1.3, "bad_words_ids": [[7]]},
    "several eos_token_id, min_new_tokens": {"eos_token_id": [5, 6], "min_new_tokens": 3},
    "use_cache: false": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, **SAMPLED},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[7]]},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
    "assistant_model": {"assistant_model": True},
    "num_return_sequences": {"num_return_sequences": 2, **SAMPLED},
    "output_scores, output_logits": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "output_hidden_states, output_attentions": {"return_dict_in_generate": True, "output_hidden_states": True},
    "streamer": {"streamer": True},
    "stop_strings": {"stop_strings": [*"bcdefghijklmnop"]},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}},
    "max_time": {"max_time": 1000.0},
    "cache_implementation: static": {"cache_implementation": "static"},
    "past_key_values": {"past_key_values": True},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
}


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def tokenizer() -> PreTrainedTokenizerFast:
    """A character for each token of the vocabulary."""
    characters = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"]
    known = Tokenizer(models.BPE({each: number for number, each in enumerate(characters)}, []))
    known.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="a")


def arguments_of(name: str) -> dict[str, Any]:
    """New arguments of `generate` for a feature."""
    fields = {"max_new_tokens": NEW, "pad_token_id": 0, "use_cache": True, **FEATURES[name]}
    made: dict[str, Any] = {
        "assistant_model": lambda: sharp("llama"),
        "streamer": Kept,
        "past_key_values": DynamicCache,
        "watermarking_config": lambda: WatermarkingConfig(**FEATURES[name]["watermarking_config"]),
    }
    fields |= {each: made[each]() for each in made if each in fields}
    return {**fields, "tokenizer": tokenizer()} if "stop_strings" in fields else fields


def plain(found: Any) -> Any:
    """Tokens, and scores and logits where there are some, as numbers."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    kept = {name: found[name] for name in ("sequences", "scores", "logits") if found.get(name) is not None}
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else [each.round(decimals=6).tolist() for each in value]
        for name, value in kept.items()
    }


def outcome(call: Any, arguments: Mapping[str, Any]) -> Any:
    """What a call gives, with what it streamed, or why it is refused."""
    torch.manual_seed(11)
    try:
        found = plain(call(**arguments))
    except ConfigError as error:
        return f"refused: {error}"
    return [found, arguments["streamer"].tokens] if "streamer" in arguments else [found]


def of_a_trainer(mesh: Mesh, folder: str, sections: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Of each feature `works`, why it is refused, or what differs from one process."""
    reference, ids = sharp("llama"), torch.tensor([PROMPT])
    config = settings(folder, **patient(sections))
    results: dict[str, str] = {}
    with Trainer(sharp("llama").train(), config, train_dataset=sentences()) as trainer:
        for name in names:
            found = outcome(trainer.generate, {"input_ids": ids, "seed": 11, **arguments_of(name)})
            if not isinstance(found, str):
                wanted = outcome(reference.generate, {"inputs": ids, **arguments_of(name)})
                found = "works" if found == wanted else f"differs: {found} for {wanted}"
            results[name] = found
    return results


def _whole(generator: Generator, **fields: Any) -> torch.Tensor:
    """The prompt and its new tokens, as the library gives them."""
    (found,) = generator.generate([{"input_ids": PROMPT, "seed": 11}], **fields)
    return torch.tensor([PROMPT + found.tokens])


def of_a_generator(mesh: Mesh, folder: str, sections: dict[str, Any], names: list[str]) -> dict[str, str]:
    """Of each feature `running batch`, `by length`, why it is refused, or what differs from one process."""
    reference, ids = sharp("llama"), torch.tensor([PROMPT])
    directory = stored(mesh, folder, reference)
    reference.generation_config.use_cache = True
    results: dict[str, str] = {}
    with Generator(directory, **patient(sections), run={"output_dir": folder}) as generator:
        for name in names:
            fields = arguments_of(name)
            found = outcome(partial(_whole, generator), fields)
            if not isinstance(found, str):
                wanted = outcome(reference.generate, {"inputs": ids, **arguments_of(name)})
                way = "running batch" if generator.can_serve(fields) else "by length"
                found = way if found == wanted else f"differs: {found} for {wanted}"
            results[name] = found
    return results
