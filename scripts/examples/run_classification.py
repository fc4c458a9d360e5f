"""Fine-tune a model to classify texts, or pairs of them, in the form of transformers' examples.

    python scripts/examples/run_classification.py --model_name_or_path DIRECTORY --train_file train.csv \\
        --validation_file held.csv --test_file test.csv --do_train --do_eval --do_predict --output_dir runs/classes
    torchrun --nproc-per-node 2 scripts/examples/run_classification.py ...    # the same on two ranks

Files are .csv or .json (a record a line) with a column `label`; the other columns hold text.
"""

import logging
import os
import sys
from dataclasses import dataclass, field

import datasets
import numpy as np
import transformers
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
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

    model_name_or_path: str = field(metadata={"help": "A directory or a name on the Hub."})
    config_name: str | None = field(default=None, metadata={"help": "If it is not the model's own."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "If it is not the model's own."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads and prepared data are kept."})
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Begin with a new head where that of the model has other classes."}
    )


@dataclass
class DataTrainingArguments:
    """The data that a model is trained, evaluated and tried on."""

    train_file: str | None = field(default=None, metadata={"help": "Records to train on."})
    validation_file: str | None = field(default=None, metadata={"help": "Records to evaluate on."})
    test_file: str | None = field(default=None, metadata={"help": "Records whose labels are to be predicted."})
    text_column_names: str | None = field(
        default=None, metadata={"help": "Columns with text, separated by commas; none: all but the label."}
    )
    label_column_name: str = field(default="label", metadata={"help": "The column with the label."})
    max_seq_length: int = field(default=128, metadata={"help": "Tokens of a text; longer ones are cut."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad to it, and not to the longest of a batch."})
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
    records = load_dataset(extension, data_files=data_files, cache_dir=model_args.cache_dir)
    if data_args.label_column_name != "label":
        records = records.rename_column(data_args.label_column_name, "label")
    return records


def main():
    model_args, data_args, training_args = parse_arguments()
    set_up_logging(training_args)
    set_seed(training_args.seed)

    records = load_records(model_args, data_args)
    some = next(iter(records.values()))
    is_regression = some.features["label"].dtype in ("float32", "float64")
    label_list = [] if is_regression else sorted({str(label) for part in records.values() for label in part["label"]})
    text_columns = (data_args.text_column_names or "").split(",")
    if text_columns == [""]:
        text_columns = [name for name in some.column_names if name not in ("label", "id", "idx")]

    config = AutoConfig.from_pretrained(
        model_args.config_name or model_args.model_name_or_path,
        num_labels=1 if is_regression else len(label_list),
        finetuning_task="text-classification",
        cache_dir=model_args.cache_dir,
    )
    config.problem_type = "regression" if is_regression else "single_label_classification"
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.tokenizer_name or model_args.model_name_or_path, cache_dir=model_args.cache_dir
    )
    model = AutoModelForSequenceClassification.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        cache_dir=model_args.cache_dir,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        dtype="float32",
    )
    label_to_id = {label: number for number, label in enumerate(label_list)}
    if not is_regression:
        model.config.label2id = label_to_id
        model.config.id2label = dict(enumerate(label_list))
    max_seq_length = min(data_args.max_seq_length, tokenizer.model_max_length)

    def preprocess_function(examples):
        result = tokenizer(
            *(examples[name] for name in text_columns[:2]),
            padding="max_length" if data_args.pad_to_max_length else False,
            max_length=max_seq_length,
            truncation=True,
        )
        result["labels"] = [label if is_regression else label_to_id[str(label)] for label in examples["label"]]
        return result

    with training_args.main_process_first(desc="tokens of the texts"):
        records = records.map(
            preprocess_function,
            batched=True,
            remove_columns=["label"],
            num_proc=data_args.preprocessing_num_workers,
            load_from_cache_file=not data_args.overwrite_cache,
            desc="Tokenizing",
        )

    def of(split, limit):
        if split not in records:
            raise ValueError(f"there is no file for {split}")
        return records[split] if limit is None else records[split].select(range(min(len(records[split]), limit)))

    train_dataset = of("train", data_args.max_train_samples) if training_args.do_train else None
    eval_dataset = of("validation", data_args.max_eval_samples) if training_args.do_eval else None
    predict_dataset = of("test", data_args.max_predict_samples) if training_args.do_predict else None

    def compute_metrics(p: EvalPrediction):
        predictions = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        if is_regression:
            return {"mse": ((np.squeeze(predictions) - p.label_ids) ** 2).mean().item()}
        return {"accuracy": (np.argmax(predictions, axis=1) == p.label_ids).astype(np.float32).mean().item()}

    # Where none is given, the tokenizer pads each batch to its longest text.
    data_collator = None
    if data_args.pad_to_max_length:
        data_collator = default_data_collator
    elif training_args.fp16:
        data_collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=data_collator,
    )

    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        metrics = trainer.evaluate(eval_dataset=eval_dataset)
        metrics["eval_samples"] = len(eval_dataset)
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)

    if training_args.do_predict:
        # What is to be predicted may have no labels.
        predictions = trainer.predict(predict_dataset.remove_columns("labels"), metric_key_prefix="predict").predictions
        predictions = np.squeeze(predictions) if is_regression else np.argmax(predictions, axis=1)
        if trainer.is_world_process_zero():
            with open(os.path.join(training_args.output_dir, "predict_results.txt"), "w", encoding="utf-8") as writer:
                writer.write("index\tprediction\n")
                for index, item in enumerate(predictions):
                    writer.write(f"{index}\t{f'{item:3.3f}' if is_regression else label_list[item]}\n")

    kwargs = {"finetuned_from": model_args.model_name_or_path, "tasks": "text-classification"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
