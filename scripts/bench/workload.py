"""The workload that every system trains: a Llama of any size on random tokens, the same tokens for all of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

Dtype = Literal["bf16", "fp32"]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TOKEN_SEED = 1234
_HEAD_SIZE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training problem and how long it runs; the defaults are 34 million parameters on two ranks.

    Steps are of three kinds, in this order: `warmup` and then `timed` and then `sampled` ones. Memory is watched in the first
    and the last kind, time is taken in the second: looking at memory costs processor time.
    """

    dtype: Dtype = "bf16"
    hidden: int = 512
    intermediate: int = 1408
    layers: int = 8
    heads: int = 8
    key_value_heads: int = 0
    """Heads of keys and values; 0: as many as `heads`."""
    vocabulary: int = 8192
    sequence: int = 256
    micro: int = 2
    """Sequences of one rank's step, or of each of its microbatches."""
    microbatches: int = 1
    divided: bool = False
    """True if ranks divide the model, and all of them take the same data."""
    ranks: int = 2
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    seed: int = 0
    checkpointing: bool = False
    """True if blocks are recomputed in backward."""
    in_backward: bool = True
    """True if zeromesh updates inside backward, as soon as a bucket is reduced; others have no choice."""
    loss: str = "auto"
    """Which loss zeromesh's Trainer computes: `auto`, in chunks of tokens, or `native`, the model's own, as all others do."""
    transport: str = "auto"
    """How zeromesh's ranks exchange tensors; others have no choice."""
    checkpoint_every: int = 0
    """Steps between checkpoints that zeromesh writes while it trains; 0: none."""
    checkpoint_folder: str = ""
    """The folder that these checkpoints are written to."""
    offload: str = "none"
    """The tier of zeromesh's and DeepSpeed's states: `none`, `host`, `optimizer` (on file, that alone), `file` (everything)."""
    folder: str = ""
    """The folder of the file tier's files; empty: the temporary directory."""
    clip: float = 0.0
    """Largest norm of gradients; 0: no clipping."""
    timeline: bool = False
    """True if zeromesh's last step is recorded."""
    prefetch: int = 1
    """Units that zeromesh gathers ahead."""
    device: str = "cpu"
    """The kind of device."""
    warmup: int = 3
    timed: int = 8
    sampled: int = 2

    @property
    def steps(self) -> int:
        """All steps of a run."""
        return self.warmup + self.timed + self.sampled

    def is_timed(self, step: int) -> bool:
        """Return True if time is taken in step `step`, counted from 0."""
        return self.warmup <= step < self.warmup + self.timed

    @property
    def compute(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return TORCH_DTYPES[self.dtype]

    def wider(self, factor: int) -> Workload:
        """The same with `factor` times the width of every layer."""
        return replace(
            self, hidden=self.hidden * factor, intermediate=self.intermediate * factor, heads=self.hidden * factor // _HEAD_SIZE
        )

    def model_config(self) -> LlamaConfig:
        """The model's configuration."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads or self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.sequence,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )

    def build_model(self) -> nn.Module:
        """The model in fp32, on whatever device is current."""
        return LlamaForCausalLM(self.model_config())

    def tokens(self) -> Tensor:
        """`[steps, ranks x micro x microbatches, sequence]` token ids, of which a rank takes its rows of each step; where ranks
        divide the model `[steps, micro x microbatches, sequence]`, for all of them."""
        generator = torch.Generator().manual_seed(_TOKEN_SEED)
        shape = ((1 if self.divided else self.ranks) * self.micro * self.microbatches, self.sequence)
        return torch.stack([torch.randint(0, self.vocabulary, shape, generator=generator) for _ in range(self.steps)])

    def to_json(self) -> str:
        """For a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Return the workload that `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "betas": tuple(values["betas"])})

    def __str__(self) -> str:
        more = ", blocks recomputed" if self.checkpointing else ""
        more += f", offload {self.offload}" if self.offload != "none" else ""
        more += f", clipped at {self.clip:g}" if self.clip else ""
        many = f"{self.microbatches} times " if self.microbatches > 1 else ""
        ranks = f"{self.ranks} ranks that divide it," if self.divided else f"{self.ranks} ranks x"
        return (
            f"Llama, hidden {self.hidden}, {self.layers} layers, vocabulary {self.vocabulary}, {ranks} "
            f"{many}micro-batch {self.micro} x {self.sequence} tokens, one thread each, AdamW, {self.dtype}, {self.device}{more}"
        )
