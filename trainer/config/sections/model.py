"""The section `model`, and the class of transformers that builds a model for each task."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, JsonValue, model_validator

from zeromesh.settings.keys import Allowed, CodecName, ConvertedBy, Count, Fraction, Names, Positive, Text
from zeromesh.trainer.config.sections.base import Named, NamedFunction, PythonName, Section, Texts

Head = Literal[
    "causal_lm", "masked_lm", "seq2seq_lm", "sequence_classification", "token_classification", "question_answering",
    "multiple_choice", "next_sentence_prediction", "image_classification", "video_classification", "semantic_segmentation",
    "image_text_to_text", "audio_classification", "speech_seq2seq", "ctc", "base",
]  # fmt: skip
"""Values of `model.head`; `base` is the model without a head, which needs a `compute_loss`."""

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]

AUTO_CLASSES: dict[Head, str] = {
    head: f"AutoModelFor{head.title().replace('_', '').replace('Lm', 'LM').replace('Ctc', 'CTC')}" for head in get_args(Head)
} | {"base": "AutoModel"}
"""The class of transformers for each head, such as AutoModelForCausalLM."""

DEFAULT_MODEL: dict[str, JsonValue] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip


class LoraSection(Section):
    """Low-rank adapters: `W x + (alpha / rank) B A x`, of which A and B alone are trained."""

    rank: Count = 8
    """Rows of A, and columns of B."""
    alpha: Positive | None = None
    """Scale of the adapters, divided by `rank`; null: twice the rank."""
    dropout: Fraction = 0.0
    """Dropout of the adapters' inputs."""
    targets: Literal["all-linear"] | Texts | None = None
    """Suffixes of the names of layers that get adapters, or all-linear; null: PEFT's defaults for the architecture."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further fields of PEFT's LoraConfig, such as `{use_rslora: true, modules_to_save: [embed_tokens]}`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of PEFT's LoraConfig."""
        targets = list(self.targets) if isinstance(self.targets, tuple) else self.targets
        alpha = self.alpha or 2 * self.rank
        own = {"r": self.rank, "lora_alpha": alpha, "lora_dropout": self.dropout, "target_modules": targets}
        return {"peft_type": "LORA", **own, **self.options}


class WeightsSection(Section):
    """The codec of frozen matrices of linear layers and experts, decoded around their use; as bitsandbytes encodes them."""

    codec: CodecName = "nf4"
    """The codec: 4 bits of normal floats (nf4) or of floats (fp4), or 8 bits (int8, fp8)."""
    block: Annotated[Literal[32, 64, 128, 256, 512, 1024, 2048, 4096], Allowed("a power of 2 from 32 to 4096")] | None = None
    """Elements with one scale; null: 64 with 4 bits, 256 for int8, 128 for fp8."""
    nested: bool = True
    """Keep scales in 8 bits too (double quantization), but those of fp8, and of a matrix that a tensor axis divides."""
    skip: Names = ()
    """Patterns of the names of parameters that are not encoded, such as `*.lm_head.*`."""
    cache: Text | None = None
    """Directory of the cache of encoded weights of a `model.source`; null: `zeromesh/weights` in the user's cache folder."""


class ModelSection(Section):
    """The model to train. A model that is given to `Trainer` itself replaces `source` and `config`."""

    python: PythonName | None = None
    """A function of Python code that returns the model, in place of `source`; `config` holds its arguments."""
    source: Text | None = None
    """Hugging Face model to start from: a local directory, or a name on the Hub; its safetensors are streamed into shards."""
    revision: Text | None = None
    """Branch, tag or commit of a `source` on the Hub; null: its main branch. The commit is in the resolved configuration."""
    trust_remote_code: bool = False
    """Run the Python code that comes with `source`; false: run none of it."""
    config: Annotated[dict[str, JsonValue] | None, Allowed("a mapping with model_type, or null")] = Field(
        default_factory=lambda: dict(DEFAULT_MODEL)
    )
    """Hugging Face configuration of a model with random weights. With `source`: fields to override, such as num_labels."""
    head: Head = "causal_lm"
    """The task, and so the class of the model; base is the model without a head."""
    lora: Annotated[LoraSection | None, Allowed("null, or a mapping such as {rank: 8}")] = None
    """Train low-rank adapters of linear layers (LoRA, by PEFT) and freeze the rest; null: none."""
    adapters: Annotated[
        dict[Text, Text | dict[str, JsonValue]] | None,
        Allowed("null, a directory, or a mapping of names to directories and settings of PEFT"),
    ] = None
    """Adapters of PEFT by name, such as `{default: {peft_type: IA3}}`: the fields of an adapter_config.json, or a directory with a
    saved adapter, or a run, from which training goes on. A directory alone is the adapter `default`. null: none."""
    trained_adapter: Text | None = None
    """The name of the one of several `adapters` that is active and trained; null: the first."""
    train: Annotated[Texts | None, Allowed("null, or a list of patterns")] = None
    """Patterns of the names of the parameters that are trained, such as `["*.layers.3.*", "!*norm*"]`, of which a later one counts
    more and ! freezes; null: all, or the adapters."""
    weights: Annotated[
        WeightsSection | None,
        ConvertedBy(lambda value: {"codec": value} if isinstance(value, str) else value),
        Allowed("null, nf4, fp4, int8, fp8, or a mapping such as {codec: nf4}"),
    ] = None
    """Keep frozen matrices encoded, as for QLoRA: nf4, fp4, int8 or fp8, or a mapping; null: in the compute dtype."""
    attention: Attention | None = None
    """Attention by transformers' names; flash attention needs a package. null: as the model was given, or transformers' choice."""
    activation_checkpointing: Literal["none", "block", "selective"] = "none"
    """Activations recomputed in backward: none, whole blocks (block), or all of a block but its matrix products (selective)."""
    tile_tokens: Count | None = None
    """Tokens that pass at once through token-wise modules of a block, such as its MLP, which backward computes again. null: all."""
    compile: bool = False
    """Compile each block's forward with torch.compile."""
    loss: Literal["auto", "native"] | Named = "auto"
    """The loss. auto: cross entropy in chunks of tokens if a trial finds it equal to the model's; native: the model's;
    `{python: package.module:function}`: a function of the model and a batch: the sum of the losses and the number of targets."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Let a source replace the default model, and name a single adapter."""
        if not isinstance(data, dict):
            return data
        replaced = {} if data.get("source") is data.get("python") is None else {"config": None}
        named = {"adapters": {"default": data["adapters"]}} if isinstance(data.get("adapters"), str) else {}
        return {**replaced, **data, **named}

    @property
    def wanted_adapters(self) -> dict[str, Any]:
        """The directory or the settings of each adapter, by name."""
        return {"default": self.lora.settings} if self.lora is not None else dict(self.adapters or {})

    @property
    def trains_nothing(self) -> bool:
        """True if `train` freezes all parameters, so that the model can be evaluated alone."""
        return all(pattern.startswith("!") for pattern in self.train or ("all",))

    @property
    def named(self) -> NamedFunction | None:
        return None if self.python is None else NamedFunction(python=self.python, **(self.config or {}))
