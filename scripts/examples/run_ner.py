"""Fine-tune a model to label the words of texts, such as named entities, in the form of transformers' examples.

    python scripts/examples/run_ner.py --model_name_or_path DIRECTORY --train_file train.json --validation_file held.json \\
        --test_file test.json --do_train --do_eval --do_predict --output_dir runs/ner
    torchrun --nproc-per-node 2 scripts/examples/run_ner.py ...    # the same on two ranks

Files are .json, a record a line: `{"tokens": ["Ada", "wrote"], "ner_tags": ["B-PER", "O"]}`.
"""

import logging
import os
import sys
from dataclasses import dataclass, field

import datasets
import numpy as np
import transformers
from datasets import ClassLabel, load_dataset
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    TrainingArguments,
    set_seed,
)

from zeromesh.transformers import Trainer

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model and tokenizer."""

    model_name_or_path: str = field(metadata={"help": "A directory or a name on the Hub."})
    config_name: str | None = field(default=None, metadata={"help": "If it is not the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "If it is not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads and prepared data are kept."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Begin with a new head where that of the model has other labels."}
    )


@dataclass
class DataTrainingArguments:
    """The data that a model is trained, evaluated and tried on."""

    task_name: str = field(default="ner", metadata={"help": "The column TASK_tags has the labels, if there is one."})
    train_file: str | None = field(default=None, metadata={"help": "Records to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "Records to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "Records whose labels are to be predicted."})
    text_column_name: str | None = field(default=None, metadata={"help": "The column with the words."})
    label_column_name: str | None = field(default=None, metadata={"help": "The column with a label for each."})
    max_seq_length: int | None = field(default=None, metadata={"help": "Tokens of a text; longer ones are cut."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad to it, and not to the longest of a batch."})
    label_all_tokens: bool = field(default=False, metadata={"help": "Label all tokens of a word, and not its first one alone."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Records to train on at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Records to evaluate on at most."})
    max_predict_samples: int | None = field(default=None, metadata={"help": "Records to predict at most."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that prepare the data."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Prepare the data anew."})


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


def load_records(model_args, data_args):
    data_files = {"train": data_args.train_file, "validation": data_args.validation_file, "test": data_args.test_file}
    data_files = {split: name for split, name in data_files.items() if name is not None}
    if not data_files:
        raise ValueError("give --train_file, --validation_file or --test_file")
    extension = next(iter(data_files.values())).split(".")[-1]
    return load_dataset(extension, data_files=data_files, cache_dir=model_args.cache_dir)


def main():
    model_args, data_args, training_args = parse_arguments()
    set_up_logging(training_args)
    set_seed(training_args.seed)

    records = load_records(model_args, data_args)
    some = next(iter(records.values()))
    columns = some.column_names
    text_column = data_args.text_column_name or ("tokens" if "tokens" in columns else columns[0])
    tags = f"{data_args.task_name}_tags"
    label_column = data_args.label_column_name or (tags if tags in columns else columns[1])

    kind = some.features[label_column].feature
    if isinstance(kind, ClassLabel):
        label_list = kind.names
        label_to_id = {number: number for number in range(len(label_list))}
    else:
        label_list = sorted({label for part in records.values() for labels in part[label_column] for label in labels})
        label_to_id = {label: number for number, label in enumerate(label_list)}

    config = AutoConfig.from_pretrained(
        model_args.config_name or model_args.model_name_or_path,
        num_labels=len(label_list),
        finetuning_task=data_args.task_name,
        cache_dir=model_args.cache_dir,
    )
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.tokenizer_name or model_args.model_name_or_path, cache_dir=model_args.cache_dir
    )
    if not tokenizer.is_fast:
        raise TypeError("this script needs a fast tokenizer, which knows the words of its tokens")
    model = AutoModelForTokenClassification.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        cache_dir=model_args.cache_dir,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        dtype="float32",
    )
    model.config.label2id = {label: number for number, label in enumerate(label_list)}
    model.config.id2label = dict(enumerate(label_list))

    # Inside of a word a B- label goes on as its I- label, if there is one.
    b_to_i_label = [
        label_list.index(f"I-{label[2:]}") if label.startswith("B-") and f"I-{label[2:]}" in label_list else number
        for number, label in enumerate(label_list)
    ]

    def labels_of(words, word_ids):
        previous, found = None, []
        for word in word_ids:
            if word is None:  # A special token, which is no target.
                found.append(-100)
            elif word != previous:
                found.append(label_to_id[words[word]])
            else:
                found.append(b_to_i_label[label_to_id[words[word]]] if data_args.label_all_tokens else -100)
            previous = word
        return found

    def tokenize_and_align_labels(examples):
        tokenized = tokenizer(
            examples[text_column],
            padding="max_length" if data_args.pad_to_max_length else False,
            truncation=True,
            max_length=data_args.max_seq_length,
            is_split_into_words=True,
        )
        tokenized["labels"] = [
            labels_of(words, tokenized.word_ids(batch_index=number)) for number, words in enumerate(examples[label_column])
        ]
        return tokenized

    def of(split, limit):
        if split not in records:
            raise ValueError(f"there is no file for {split}")
        chosen = records[split] if limit is None else records[split].select(range(min(len(records[split]), limit)))
        with training_args.main_process_first(desc=f"tokens of {split}"):
            return chosen.map(
                tokenize_and_align_labels,
                batched=True,
                num_proc=data_args.preprocessing_num_workers,
                load_from_cache_file=not data_args.overwrite_cache,
                desc=f"Tokenizing {split}",
            )

    train_dataset = of("train", data_args.max_train_samples) if training_args.do_train else None
    eval_dataset = of("validation", data_args.max_eval_samples) if training_args.do_eval else None
    predict_dataset = of("test", data_args.max_predict_samples) if training_args.do_predict else None

    data_collator = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None)
    outside = label_list.index("O") if "O" in label_list else -1

    def compute_metrics(p):
        predictions, labels = p
        predictions = np.argmax(predictions, axis=2)
        known = labels != -100
        predictions, labels = predictions[known], labels[known]
        right = predictions == labels
        hits = int((right & (labels != outside)).sum())
        precision = hits / max(1, int((predictions != outside).sum()))
        recall = hits / max(1, int((labels != outside).sum()))
        return {
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall) if hits else 0.0,
            "accuracy": float(right.mean()),
        }

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        metrics = train_result.metrics
        trainer.save_model()
        metrics["train_samples"] = len(train_dataset)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        predictions, labels, metrics = trainer.predict(predict_dataset, metric_key_prefix="predict")
        predictions = np.argmax(predictions, axis=2)
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)
        if trainer.is_world_process_zero():
            with open(os.path.join(training_args.output_dir, "predictions.txt"), "w", encoding="utf-8") as writer:
                for row, known in zip(predictions, labels != -100, strict=True):
                    writer.write(" ".join(label_list[number] for number in row[known]) + "\n")

    kwargs = {"finetuned_from": model_args.model_name_or_path, "tasks": "token-classification"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
