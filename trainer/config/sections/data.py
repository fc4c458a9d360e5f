"""The sections `data` and `batch`."""

from typing import Annotated, Literal

from pydantic import Field

from zeromesh.trainer.config.sections.base import Count, Fraction, Section, Seed, Text, Texts, Whole


class BatchSection(Section):
    """Sequences in a step. Gradient accumulation follows from these and the number of data-parallel ranks."""

    global_size: Count = 16
    """Sequences that make one optimizer step, over all ranks."""
    micro_size: Count = 2
    """Sequences in one forward and backward of one rank."""
    eval_micro_size: Count | None = None
    """The same for evaluation and prediction; null: as `micro_size`."""
    last: Literal["carry", "partial", "drop"] = "carry"
    """Samples at the end of an epoch that fill no global batch: go on into the next epoch's (carry), make a smaller one (partial),
    or are left out (drop)."""
    average: Literal["tokens", "samples"] = "tokens"
    """What the loss of a global batch is a mean over: its targets, or its samples, where each microbatch counts by how many it
    has."""


class DataSection(Section):
    """What it is trained on. Datasets that are given to `Trainer` itself replace `train` and `eval`."""

    train: Text | Texts = "stdlib"
    """stdlib (the source of Python's standard library), or paths of text, .jsonl, .parquet, .csv, .tsv or directories."""
    eval: Text | Texts | None = None
    """Paths of the evaluation text; null holds `eval_fraction` of the training documents out."""
    eval_fraction: Fraction = 0.05
    """Part of the training documents that is held out when `eval` is null. 0 holds none out."""
    eval_samples: Count | None = None
    """Samples of each evaluation set that are evaluated, spread evenly over it; null: all."""
    text_field: Text = "text"
    """The column of .jsonl, .parquet, .csv and .tsv files that holds the text."""
    tokenizer: Text = "bytes"
    """bytes, a local directory that save_pretrained wrote, or a name on the Hub."""
    cache: Text | None = None
    """Directory where tokens of texts are kept for other runs; null: `zeromesh/tokens` in the user's cache folder."""
    sequence_length: Annotated[Whole, Field(ge=2)] = 256
    """Tokens in a packed sequence."""
    shuffle: bool = True
    """Shuffle the sequences of each epoch, by the seed and the epoch's number."""
    shuffle_window: Count = 1024
    """Samples of a streamed dataset that are shuffled among each other; others are as a whole."""
    separate_documents: bool = False
    """Positions begin anew with each document of a packed sequence, and none attends to another. Needs a model that takes
    position_ids."""
    remove_unused: bool = False
    """Leave out what the model does not take before a data_collator sees a sample, as transformers does; false: after it."""
    seed: Seed | None = None
    """Seed of the order of the data; null: that of the run."""
