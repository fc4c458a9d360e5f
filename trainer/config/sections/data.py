"""The section `data`.

The section `batch`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeromesh.trainer.config.sections.base import Allowed, Count, Fraction, Section, Text, Texts


class BatchSection(Section):
    """Sequences in a step. Gradient accumulation follows from these and the number of data-parallel ranks."""

    global_size: Count = Field(default=16, description="Sequences that make one optimizer step, over all ranks.")
    micro_size: Count = Field(default=2, description="Sequences in one forward and backward of one rank.")
    eval_micro_size: Count | None = Field(
        default=None, description="The same for evaluation and prediction; null: as `micro_size`."
    )
    last: Literal["carry", "partial", "drop"] = Field(
        default="carry",
        description="Samples at the end of an epoch that fill no global batch: go on into the next epoch's (carry), make a smaller "
        "one (partial), or are left out (drop).",
    )
    average: Literal["tokens", "samples"] = Field(
        default="tokens",
        description="What the loss of a global batch is a mean over: its targets, or its samples, where each microbatch counts by "
        "how many it has.",
    )


class DataSection(Section):
    """What it is trained on. Datasets that are given to `Trainer` itself replace `train` and `eval`."""

    train: Text | Texts = Field(
        default="stdlib",
        description="stdlib (the source of Python's standard library), or paths of text, .jsonl, "
        ".parquet, .csv, .tsv or directories.",
    )
    eval: Text | Texts | None = Field(
        default=None,
        description="Paths of the evaluation text; null holds `eval_fraction` of the training documents out.",
    )
    eval_fraction: Fraction = Field(
        default=0.05,
        description="Part of the training documents that is held out when `eval` is null. 0 holds none out.",
    )
    eval_samples: Count | None = Field(
        default=None,
        description="Samples of each evaluation set that are evaluated, spread evenly over it; null: all.",
    )
    text_field: Text = Field(
        default="text", description="The column of .jsonl, .parquet, .csv and .tsv files that holds the text."
    )
    tokenizer: Text = Field(
        default="bytes", description="bytes, a local directory that save_pretrained wrote, or a name on the Hub."
    )
    cache: Text | None = Field(
        default=None,
        description="Directory where tokens of texts are kept for other runs; null: `zeromesh/tokens` in the user's cache folder.",
    )
    sequence_length: Annotated[int, Field(ge=2)] = Field(default=256, description="Tokens in a packed sequence.")
    shuffle: bool = Field(
        default=True, description="Shuffle the sequences of each epoch, by the seed and the epoch's number."
    )
    shuffle_window: Count = Field(
        default=1024,
        description="Samples of a streamed dataset that are shuffled among each other; others are as a whole.",
    )
    separate_documents: bool = Field(
        default=False,
        description="Positions begin anew with each document of a packed sequence, and none attends to another. Needs a model that "
        "takes position_ids.",
    )
    remove_unused: bool = Field(
        default=False,
        description="Leave out what the model does not take before a data_collator sees a sample, as transformers does; false: "
        "after it.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63), Allowed("an integer >= 0 and < 2**63")] | None = Field(
        default=None, description="Seed of the order of the data; null: that of the run."
    )
