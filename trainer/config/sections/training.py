"""The sections `data`, `batch`, `train` and `ema`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Predicate
from pydantic import Field, JsonValue, model_validator

from zeromesh.settings import keys
from zeromesh.trainer.config.sections.base import Named, NamedFunction, NamedList, Seconds, Section, Texts
from zeromesh.trainer.config.sections.formats import COLUMNS, FORMATS, RowFormat


class BatchSection(Section):
    """The batch sizes of a step. Gradient accumulation follows from these and the number of data-parallel ranks."""

    global_size: Annotated[keys.Whole, Field(ge=1, le=1_000_000)] = 16
    """Sequences of one optimizer step, over all ranks."""
    micro_size: keys.Count = 2
    """Sequences in one forward and backward of one rank; 1 with `tokens`."""
    tokens: keys.Count | None = None
    """Tokens, padding included, in one forward and backward of one rank at most, in place of `micro_size`, for samples of different
    lengths that are not packed. null: microbatches have `micro_size` sequences."""
    eval_micro_size: keys.Count | None = None
    """Sequences of a microbatch in evaluation and prediction; null: as `micro_size`, or `tokens`."""
    last: Literal["carry", "partial", "drop"] = "carry"
    """Treatment of the last samples of an epoch that fill no global batch: into the next (carry), a smaller one (partial), drop."""
    balance: Annotated[
        Literal["even", "speed"] | keys.Listed[tuple[keys.Positive, ...]], keys.Allowed("even, speed or a list of positive numbers")
    ] = "even"
    """The samples that data ranks take of each round of microbatches: `micro_size` each (even), in the proportions of a list with a
    number for each, or by measured speed, at most twice `micro_size` (speed); the result is the same. Or `shares`, alone."""
    average: Literal["tokens", "samples"] = "tokens"
    """The unit of the mean loss of a global batch: targets, or samples, where a microbatch is weighted by its number of samples."""

    @model_validator(mode="before")
    @classmethod
    def _count_tokens(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "shares" in data and "balance" not in data:  # The other spelling of the key.
            given = "speed" if data["shares"] == "measured" else data["shares"]
            data = {"balance": given, **{name: each for name, each in data.items() if name != "shares"}}
        return {"micro_size": 1, **data} if isinstance(data, Mapping) and data.get("tokens") is not None else data


DataFormat = Literal[*FORMATS]  # type: ignore[valid-type]
Column = Literal[*COLUMNS]  # type: ignore[valid-type]
Columns = Annotated[dict[Column, keys.Text], keys.Allowed("a mapping of columns to their names in the files")]
Source = keys.Text | Texts | Named
SetName = Annotated[str, Field(pattern=r"^\w[\w.-]*$"), Predicate(lambda name: name != "python")]
Sources = Annotated[dict[SetName, Source], Field(min_length=1)]


def paths_of(source: Any) -> tuple[str, ...]:
    """Return the paths, patterns and names in a `data.train` or `data.eval` value; none for code."""
    if isinstance(source, Mapping):
        return tuple(path for each in source.values() for path in paths_of(each))
    if source is None or isinstance(source, NamedFunction):
        return ()
    return tuple(source) if isinstance(source, list | tuple) else (source,)


class MixturePart(Section):
    """A part of a mixture; null keys take their values from `data`."""

    train: keys.Text | Texts
    weight: keys.Positive = 1.0
    format: DataFormat | None = None
    text_field: keys.Text | None = None
    encoding: keys.Text | None = None
    columns: Columns | None = None


AUTO_EVAL_SAMPLES = 256
EVAL = "data.eval"


class DataSection(Section):
    """The data to train on. Datasets that are given to `Trainer` itself replace `train`, `mixture` and `eval`."""

    train: Source = "stdlib"
    """stdlib (the source of Python's standard library), paths of text, .jsonl, .parquet, .csv, .tsv, or patterns and directories of
    those, compressed or not (.gz, .bz2, .xz, .lzma, .zst); directories that `save_to_disk` of datasets wrote; or a dataset of the
    Hub: hub:OWNER/NAME, hub:OWNER/NAME/CONFIG, either with :SPLIT (train). `{python: package.module:function}`, or `data.python`,
    is what a function returns: samples of the model's arguments, by index or as a stream; further keys are its arguments."""
    collator: Named | None = None
    """A Python function that makes a batch of a list of samples, or a class of such; null: samples are padded or stacked."""
    encoding: keys.Text = "utf-8"
    """Encoding of text, .jsonl, .csv and .tsv files by Python's names, such as cp1252. A byte order mark takes precedence."""
    mixture: Annotated[
        dict[str, MixturePart] | None,
        Field(min_length=1),
        keys.Allowed("a mapping of names to mappings with train and weight, or null"),
    ] = None
    """Several datasets in place of `train`, by names of your choice. Each has its `train`, its `weight` (its share of the
    sequences; 1), and optionally `format`, `text_field`, `encoding` and `columns`. A dataset restarts after its last sequence."""
    format: DataFormat = "text"
    """Contents of rows: text, the messages of a conversation (chat), prompt and completion (pairs), instruction, input and output
    (alpaca), or conversations of from and value (sharegpt), which become messages; text and its class (labels), for a model.head of
    sequence_classification; or folders with a sub-folder of pictures for each class (pictures), for image_classification."""
    columns: Columns = Field(default_factory=dict)
    """Names in the files of a format's columns (messages, prompt, completion, tools, chat_template_kwargs, instruction, input,
    output, conversations, system, label), if they differ: `{messages: turns}`."""
    chat_template: keys.Text | None = None
    """The Jinja chat template of conversations, or a file with it; null: the tokenizer's."""
    loss_on: Literal["answers", "all"] = "answers"
    """The tokens of conversations and pairs that the loss covers: the assistant's turns and completions (answers), or all."""
    packing: bool = True
    """Pack several whole conversations or pairs into a sequence; false: one per sequence."""
    mask_fraction: Annotated[keys.Fraction, Field(gt=0.0)] = 0.15
    """Fraction of tokens that are masked for a masked language model."""
    eval: Annotated[
        Source | Sources | None, keys.Allowed("text, a list of at least one text, a mapping of names to those, or null")
    ] = None
    """The data to evaluate on, or several by name, evaluated apart; null holds `eval_fraction` of the training documents out."""
    eval_fraction: keys.Fraction = 0.05
    """Fraction of the training documents that is held out if `eval` is null. 0 = none."""
    eval_samples: Literal["auto"] | keys.Count | None = "auto"
    """Samples to evaluate of each evaluation set, spread evenly. auto: 256 at most, or all of one given to `Trainer`; null: all."""
    text_field: keys.Text = "text"
    """The column of .jsonl, .parquet, .csv and .tsv files that holds the text."""
    tokenizer: keys.Text | None = None
    """The tokenizer: bytes, a local directory that save_pretrained wrote, or a name on the Hub; null: that of the model's
    directory, or bytes for a model that is built from a configuration."""
    cache: keys.Text | None = None
    """Directory of the cache of tokenized text; null: `zeromesh/tokens` in the user's cache folder."""
    sequence_length: Annotated[keys.Whole, Field(ge=2)] = 256
    """Tokens in a packed sequence. Conversations and pairs that are longer are cut."""
    shuffle: bool = True
    """Shuffle the sequences of each epoch, by the seed and the epoch's number."""
    shuffle_window: keys.Count = 1024
    """The shuffle window of a streamed dataset in samples; other datasets are shuffled as a whole."""
    separate_documents: bool | None = None
    """Restart position ids with each document of a packed sequence, so that no document attends to another. Needs a model that a
    trial finds to keep them apart. null: where conversations or pairs are packed."""
    remove_unused: bool | None = None
    """Drop fields that the model does not take before the data_collator, as transformers does (true), or after it (false). null:
    before it for text beside tokens, and for all such fields if the collator is one of transformers."""
    resume: Literal["exact", "state"] = "exact"
    """The resumption of a streamed dataset. exact: at the very next sample; if the stream's state does not lead there, as with a
    shuffle buffer, the stream is read again from its beginning. state: from the stream's state, as it is."""
    seed: keys.Seed | None = None
    """Seed of the data order; null: `run.seed`."""
    workers: Literal["auto"] | keys.CountOrOff = "auto"
    """Worker processes of each rank that prefetch batches; their number changes no batch. 0: the rank makes them itself; auto: up
    to 4 with an accelerator, 0 on CPUs. A streamed dataset has at most one."""
    timeout_seconds: Seconds = 600.0
    """Seconds that a worker may take for one microbatch; after that the run ends with the worker's stack."""

    @model_validator(mode="before")
    @classmethod
    def _move_python_to_train(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "python" not in data or "train" in data:
            return data
        return {**{name: each for name, each in data.items() if name != "python"}, "train": {"python": data["python"]}}

    def parts(self) -> dict[str, "DataSection"]:
        """Return a section for each part of the mixture by name, or this section as `train` without a mixture."""
        if self.mixture is None:
            return {"train": self}
        given = {name: part.model_dump(exclude={"weight"}, exclude_none=True) for name, part in self.mixture.items()}
        return {name: self.model_copy(update={"mixture": None, **part}) for name, part in given.items()}

    def eval_sets(self) -> dict[str, Any]:
        """Return the data of `eval` by the config key of each set; empty for null."""
        if isinstance(self.eval, Mapping):
            return {f"{EVAL}.{name}": each for name, each in self.eval.items()}
        return {} if self.eval is None else {EVAL: self.eval}

    @property
    def separates(self) -> bool:
        """The resolved `separate_documents`, with the default in place of null."""
        if self.separate_documents is not None:
            return self.separate_documents
        return self.packing and any(each.has_answers for each in self.formats)

    @property
    def rows(self) -> RowFormat:
        return FORMATS[self.format]

    @property
    def formats(self) -> list[RowFormat]:
        """The row formats of all parts of the mixture."""
        return [part.rows for part in self.parts().values()]


class TrainSection(Section):
    """The training method. Preferences and rewards are learnt by TRL's trainers (extra `zeromesh[trl]`)."""

    method: Literal["sft", "dpo", "kto", "reward", "grpo"] = "sft"
    """`sft`: supervised, from the targets of `data`. `dpo`, `kto`: from preferences. `reward`: a reward model. `grpo`: from rewards
    of generated texts. Rows have TRL's form, and keys without a TRL equivalent are refused."""
    rewards: NamedList = ()
    """Reward functions of `grpo`, such as `[{python: package.module:function}]`, each called as TRL calls them."""
    options: Annotated[dict[str, JsonValue], keys.Allowed("a mapping")] = Field(default_factory=dict)
    """Further arguments of TRL's configuration of the method, by their names there: `beta`, `loss_type`, `num_generations`."""


class EmaSection(Section, keys.AverageSettings):  # type: ignore[misc]  # pydantic freezes it too
    """An exponential moving average of the weights, in shards."""

    evaluate: bool = False
    """Evaluate and predict with averaged weights."""
