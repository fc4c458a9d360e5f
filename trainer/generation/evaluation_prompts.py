"""Generation in evaluations, for `predict_with_generate`, as in transformers' `Seq2SeqTrainer`, under every layout."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from zeromesh.errors import ConfigError, DataError, some
from zeromesh.rng import seed_all, seed_of
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.generation.library_loop import generate
from zeromesh.trainer.generation.settings import FIELDS, check_arguments, decoder_positions, ends_of, settings_with
from zeromesh.trainer.model_on_mesh import PlacedModel

_NEW_TOKENS = 64  # `max_new_tokens` where the caller, the configuration and `generation_config.json` give none


class BatchGeneration:
    """Generates for the batches of one evaluation; all ranks create it, and call `tokens` for equally many batches. Sampling is
    seeded by `seed` and a batch's first index. Raises `ConfigError`, which begins with `where`, for a model that does not generate,
    and for `fields` of `GenerationConfig` that do not go with it, with evaluations or with the layout."""

    def __init__(self, placed: PlacedModel, fields: Mapping[str, Any], *, seed: str, where: str = "predict_with_generate") -> None:
        model, tokenizer = placed.module, placed.processing_class
        if not isinstance(getattr(model, "generation_config", None), GenerationConfig):
            raise ConfigError(f"{where}: {type(model).__name__} does not generate; use a Hugging Face model that does")
        rules, lengths = FIELDS["evaluation"], FIELDS["evaluation"]["total_lengths"]
        refused = {name: f"{name}: {fields.get(name)}: {why}; leave it out" for name, why in rules["refused"].items()}
        for name in () if model.config.is_encoder_decoder else lengths.keys() & fields.keys():
            refused[name] = f"{name} counts the padding of prompts; give {lengths[name]}"
        self.settings = settings = settings_with(model, fields, refused, where, beyond=rules["beyond"])
        if settings.stop_strings and tokenizer is None:
            raise ConfigError(f"{where}: stop_strings needs a tokenizer; pass processing_class")
        if settings.pad_token_id is None:
            candidates = [getattr(tokenizer, "pad_token_id", None), *ends_of(settings), 0]
            settings.pad_token_id = next(each for each in candidates if each is not None)
        if settings.max_new_tokens is None and "max_length" not in fields:
            settings.max_new_tokens = _NEW_TOKENS
        self.padding = int(settings.pad_token_id)  # The padding token after the end of a prediction.
        self._placed, self._seed, self._where = placed, seed, where
        self._fixed: dict[str, Any] = {"generation_config": settings}
        if settings.stop_strings:
            self._fixed["tokenizer"] = tokenizer
        check_arguments(model, self._fixed, placed.mesh if placed.engine is not None else None)

    def tokens(self, batch: Mapping[str, Any], samples: Sequence[int], compute: torch.dtype) -> Tensor:
        """Return tokens [samples, length] for a batch on the CPU, on the mesh's device: new ones, for an encoder-decoder model the
        start token too. `samples` are the dataset's indices, `compute` is the dtype of the model's inputs. Raises `DataError` for a
        sample without a prompt, with one that is too long, or that shares its row with others."""
        placed, has_encoder = self._placed, bool(self._placed.module.config.is_encoder_decoder)
        inputs = self.inputs(batch, samples)
        arguments: dict[str, Any] = {
            name: value.to(compute) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        seed = seed_of(f"{self._seed}/{samples[0]}/predict_with_generate")
        tokens: Tensor = generate(placed, {**arguments, **self._fixed}, seed=partial(seed_all, seed))
        begun = inputs.get("decoder_input_ids")
        given = inputs["input_ids"].shape[1] if not has_encoder else begun.shape[1] if isinstance(begun, Tensor) else 1
        new = tokens[:, given:]
        if self.settings.eos_token_id is not None:
            # transformers' beam search pads with another token if the padding token is 0.
            ends = torch.isin(new, torch.tensor(self.settings.eos_token_id, device=new.device)).int()
            new.masked_fill_(ends.cumsum(1) - ends > 0, self.padding)
        return tokens if has_encoder else new

    def inputs(self, batch: Mapping[str, Any], samples: Sequence[int]) -> dict[str, Any]:
        """Return the prompts of a batch, as passed to `tokens`. Raises `DataError` as `tokens` does."""
        if self._placed.module.config.is_encoder_decoder:
            return without_targets(batch)
        inputs, lengths = prompts_of(batch, samples, self.padding)
        positions, new = decoder_positions(self._placed.module), self.settings.max_new_tokens or 0
        longest = int(lengths.argmax())
        if positions is not None and int(lengths[longest]) + new > positions:
            has = f"has {int(lengths[longest])} tokens, which with {new} new ones are more than the model's {positions}"
            why = f"{self._where}: the prompt of sample {samples[longest]} {has} positions"
            raise DataError(f"{why}; shorten it, or lower max_new_tokens")
        return inputs


def without_targets(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without labels and the decoder inputs derived from them, for an encoder-decoder model."""
    labels, begun, targets = batch.get("labels"), batch.get("decoder_input_ids"), {"labels"}
    if isinstance(labels, Tensor) and isinstance(begun, Tensor) and labels.shape == begun.shape:
        targets |= {"decoder_input_ids", "decoder_attention_mask"}
    return {name: value for name, value in batch.items() if name not in targets}


def prompts_of(batch: Mapping[str, Any], samples: Sequence[int], padding: int) -> tuple[dict[str, Any], Tensor]:
    """Return the fields of a batch with the prompts of its rows, the tokens before the first label that is not ignored, if any, and
    the length of each prompt, [samples]. `input_ids`, `attention_mask` and other per-token fields are cut and padded on the left,
    [samples, longest]. Raises `DataError` for a row without a prompt, and a batch without a row of tokens per sample."""
    ids, labels, mask = map(batch.get, ("input_ids", "labels", "attention_mask"))
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != len(samples):
        shape = list(ids.shape) if isinstance(ids, Tensor) else "none"
        why = f"predict_with_generate: samples {some(samples, 8)} need one row of input_ids each"
        raise DataError(f"{why}, [{len(samples)}, length]; the batch has {shape}. Use a data_collator that pads")
    kept = torch.ones_like(ids, dtype=torch.bool)
    if isinstance(mask, Tensor):
        if mask.shape != ids.shape:
            why = f"predict_with_generate: attention_mask has shape {list(mask.shape)}, and input_ids {list(ids.shape)}"
            raise DataError(f"{why}; a prompt is cut out of masks of that shape alone")
        kept &= mask.bool()
    if isinstance(labels, Tensor):
        kept &= (labels != IGNORED_LABEL).cumsum(1) == 0
    lengths = kept.sum(1)
    if missing := [sample for sample, length in zip(samples, lengths.tolist(), strict=True) if not length]:
        who = f"sample {some(missing)} has" if len(missing) == 1 else f"samples {some(missing, 8)} have"
        why = f"predict_with_generate: {who} no prompt: it is what stands before the first label that is not {IGNORED_LABEL}"
        raise DataError(f"{why}. Set the labels of prompts to {IGNORED_LABEL}")
    # A stable sort moves kept positions to the end, in order.
    order = kept.int().argsort(dim=1, stable=True)[:, -int(lengths.max()) :]
    kept = kept.gather(1, order)
    inputs: dict[str, Any] = {"input_ids": ids.gather(1, order).masked_fill(~kept, padding), "attention_mask": kept.long()}
    for name, value in batch.items():
        if name in inputs or name in ("labels", "position_ids"):
            continue
        of_tokens = isinstance(value, Tensor) and value.shape == ids.shape
        inputs[name] = value.gather(1, order).masked_fill(~kept, 0) if of_tokens else value
    return inputs, lengths
