"""Fine-tune a causal language model on text files, or train one from its configuration, in the form of transformers' examples.

    python scripts/examples/run_clm.py --model_name_or_path DIRECTORY --train_file train.txt --validation_file held.txt \\
        --do_train --do_eval --output_dir runs/clm
    torchrun --nproc-per-node 2 scripts/examples/run_clm.py ...    # the same on two ranks

Files are .txt, .csv or .json (a record a line); of the latter two the column `text`, or else the first, is taken.
"""

import logging
import math
import sys
from dataclasses import dataclass, field
from itertools import chain

import datasets
import transformers
from datasets import load_dataset
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from zeromesh.transformers import Trainer

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model and tokenizer."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A directory or a name on the Hub; none: random weights of model_type."}
    )
    model_type: str | None = field(default=None, metadata={"help": "An architecture, such as llama."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "Fields of its configuration: hidden_size=64,num_hidden_layers=2"}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "If it is not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads and prepared data are kept."})


@dataclass
class DataTrainingArguments:
    """The data that a model is trained and evaluated on."""

    train_file: str | None = field(default=None, metadata={"help": "Text to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "Text to evaluate on."})
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Part of the training text that is held out where there is no validation_file."}
    )
    block_size: int | None = field(default=None, metadata={"help": "Tokens in a sequence; none: what the model takes."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Sequences to train on at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Sequences to evaluate on at most."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that prepare the data."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Prepare the data anew."})
    keep_linebreaks: bool = field(default=True, metadata={"help": "Keep line breaks of .txt files."})

    def __post_init__(self):
        if self.train_file is None and self.validation_file is None:
            raise ValueError("give --train_file, --validation_file or both")
        for name in (self.train_file, self.validation_file):
            if name is not None and name.split(".")[-1] not in ("txt", "csv", "json"):
                raise ValueError(f"{name} is no .txt, .csv or .json file")


def parse_arguments():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(json_file=sys.argv[1])
    return parser.parse_args_into_dataclasses()


def set_up_logging(training_args):
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S", handlers=[logging.StreamHandler(sys.stdout)]
    )
    level = training_args.get_process_log_level()
    logger.setLevel(level)
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(level)
    logger.info("device %s, distributed: %s", training_args.device, training_args.parallel_mode.value == "distributed")


def load_texts(model_args, data_args):
    data_files = {"train": data_args.train_file, "validation": data_args.validation_file}
    data_files = {split: name for split, name in data_files.items() if name is not None}
    extension = next(iter(data_files.values())).split(".")[-1]
    dataset_args = {}
    if extension == "txt":
        extension, dataset_args = "text", {"keep_linebreaks": data_args.keep_linebreaks}
    texts = load_dataset(extension, data_files=data_files, cache_dir=model_args.cache_dir, **dataset_args)
    if "validation" not in texts:
        parts = texts["train"].train_test_split(data_args.validation_split_percentage / 100, shuffle=False)
        texts["train"], texts["validation"] = parts["train"], parts["test"]
    return texts


def load_model(model_args):
    tokenizer_name = model_args.tokenizer_name or model_args.model_name_or_path
    if tokenizer_name is None:
        raise ValueError("give --tokenizer_name: this script trains none")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, cache_dir=model_args.cache_dir)
    if model_args.model_name_or_path:
        config = AutoConfig.from_pretrained(model_args.model_name_or_path, cache_dir=model_args.cache_dir)
        model = AutoModelForCausalLM.from_pretrained(
            model_args.model_name_or_path, config=config, cache_dir=model_args.cache_dir, dtype="float32"
        )
    else:
        config = CONFIG_MAPPING[model_args.model_type](vocab_size=len(tokenizer))
        if model_args.config_overrides is not None:
            config.update_from_string(model_args.config_overrides)
        model = AutoModelForCausalLM.from_config(config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    return config, tokenizer, model


def main():
    model_args, data_args, training_args = parse_arguments()
    set_up_logging(training_args)
    set_seed(training_args.seed)

    texts = load_texts(model_args, data_args)
    config, tokenizer, model = load_model(model_args)

    column_names = list(texts["train" if training_args.do_train else "validation"].features)
    text_column_name = "text" if "text" in column_names else column_names[0]
    longest = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", 1024))
    block_size = min(data_args.block_size or 1024, longest)

    def tokenize_function(examples):
        return tokenizer(examples[text_column_name])

    def group_texts(examples):
        # One long text of them all, cut into blocks; what fills no block is left out.
        joined = {name: list(chain(*rows)) for name, rows in examples.items()}
        length = len(joined["input_ids"]) // block_size * block_size
        blocks = {name: [row[start : start + block_size] for start in range(0, length, block_size)] for name, row in joined.items()}
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    shared = {
        "batched": True,
        "num_proc": data_args.preprocessing_num_workers,
        "load_from_cache_file": not data_args.overwrite_cache,
    }
    with training_args.main_process_first(desc="tokens of the texts"):
        tokenized = texts.map(tokenize_function, remove_columns=column_names, desc="Tokenizing", **shared)
    with training_args.main_process_first(desc="blocks of tokens"):
        lm_datasets = tokenized.map(group_texts, desc=f"Blocks of {block_size}", **shared)

    train_dataset, eval_dataset = None, None
    if training_args.do_train:
        if "train" not in lm_datasets:
            raise ValueError("--do_train needs a --train_file")
        train_dataset = lm_datasets["train"]
        if data_args.max_train_samples is not None:
            train_dataset = train_dataset.select(range(min(len(train_dataset), data_args.max_train_samples)))
    if training_args.do_eval:
        eval_dataset = lm_datasets["validation"]
        if data_args.max_eval_samples is not None:
            eval_dataset = eval_dataset.select(range(min(len(eval_dataset), data_args.max_eval_samples)))

    def preprocess_logits_for_metrics(logits, labels):
        # Some models give more than logits, which come first.
        if isinstance(logits, tuple):
            logits = logits[0]
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds):
        predictions, labels = eval_preds
        # Position i predicts the token at i + 1.
        predictions, labels = predictions[:, :-1].reshape(-1), labels[:, 1:].reshape(-1)
        return {"accuracy": float((predictions == labels).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        try:
            metrics["perplexity"] = math.exp(metrics["eval_loss"])
        except OverflowError:
            metrics["perplexity"] = float("inf")
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    kwargs = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-generation"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
