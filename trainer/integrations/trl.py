"""`train.method`: TRL's trainers over the engine. Set keys without an argument of TRL are refused; unset ones have its defaults."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerState
from transformers.trainer_utils import get_last_checkpoint, set_seed

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, errors_as, library_errors
from zeromesh.files import read_whole, write_whole
from zeromesh.offload.accelerator import current_accelerator as accelerator_kind
from zeromesh.trainer.checkpoints.trainer_state import differences
from zeromesh.trainer.config.foreign_names import ARGUMENTS, STEP_INTERVALS, training_arguments
from zeromesh.trainer.config.sections.base import find_object
from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.data.streaming import digest
from zeromesh.trainer.data.tokenizer import ByteTokenizer, PretrainedTokenizer
from zeromesh.trainer.formatting import print_lines
from zeromesh.trainer.integrations.transformers import on_zeromesh
from zeromesh.trainer.models.adapters import adapter_configs
from zeromesh.trainer.models.build import read_configuration

_TABLE: dict[str, Any] = read_texts(Path(__file__).with_suffix(".yaml"))
_SECTIONS, _FILES = _TABLE["sections"].split(), _TABLE["files"]
_KNOWN_KEYS = {*ARGUMENTS, *STEP_INTERVALS, *_TABLE["keys"].split()}


def _keys(config: TrainerConfig) -> dict[str, Any]:
    given = config.model_dump(mode="json", exclude_unset=True)
    return {f"{section}.{key}": value for section in given for key, value in given[section].items()}


def _require_settings(config: TrainerConfig, given: Any, train: Any, *, resumes: bool) -> None:
    """Raise `ConfigError` where a run that is resumed has other settings that decide its result; note those of a new run."""
    path, keys, count = config.run.directory / "settings.json", _keys(config), len(train)
    now = {key: getattr(given, ARGUMENTS.get(key, ""), keys.get(key)) for key in _TABLE["settings"].split()}
    size = given.per_device_train_batch_size * given.gradient_accumulation_steps * given.world_size
    now["batch.global_size"] = size // config.parallel.model_size
    seen = digest([train[each] for each in range(0, count, count // 64 + 1)])
    now["data.train"] = f"{count} rows with the checksum {seen:x}"
    written = json.dumps(now, indent=1).encode()
    if resumes and path.is_file():
        if differ := differences(json.loads(read_whole(path)), json.loads(written)):
            cure = "undo these changes, or give this run another run.name"
            raise ConfigError(differ, where=f"{path.parent} is of a run with other settings; {cure}")
    elif given.process_index == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, written)


def arguments_of(config: TrainerConfig, ranks: int) -> dict[str, Any]:
    """Return the arguments of TRL's configuration class for `ranks` ranks. Raises `ConfigError` with all keys that it lacks."""
    keys = _keys(config)
    unknown = f"train.method {config.train.method} hands the run to TRL, which has no such setting; leave it out"
    known = _KNOWN_KEYS | {key for key, value in keys.items() if value is None or key.partition(".")[0] in _SECTIONS}
    problems = [f"{key}: {unknown}" for key in keys if key not in known]
    arguments = training_arguments(keys)
    if "model.activation_checkpointing" in keys:
        arguments["gradient_checkpointing"] = config.model.activation_checkpointing != "none"
    problems += disagreements(config, under="TRL")
    problems += [f"{key}: {_TABLE['code']}" for key in ("data.train", "data.eval") if isinstance(keys.get(key), dict)]
    if config.train.method == "grpo" and "max_length" in arguments:
        problems.append("data.sequence_length: GRPO has no such limit; set train.options.max_completion_length")
    if "batch.global_size" in keys:
        once = config.batch.micro_size * (ranks // config.parallel.model_size)
        if config.batch.global_size % once:
            problems.append(f"batch.global_size: {config.batch.global_size} is no multiple of {once}, all ranks' batch")
        arguments["per_device_train_batch_size"] = config.batch.micro_size
        arguments["gradient_accumulation_steps"] = config.batch.global_size // once
    half = {"bf16": config.precision.compute == "bfloat16", "fp16": config.precision.compute == "float16"}
    twice = sorted(config.train.options.keys() & {**half, **arguments}.keys())
    problems += [f"train.options.{name}: is set by a key of its own" for name in twice]
    if problems:
        raise ConfigError(problems)
    said = {"log_level": "info"} if config.run.verbose else {}
    return {**half, "use_cpu": accelerator_kind() is None, **said, **arguments, **config.train.options}


def train(config: TrainerConfig) -> None:
    """Train by TRL into the run's folder `model`, on all ranks. Raises `ConfigError` for unsupported settings, or without it."""
    arguments, kind = arguments_of(config, read_environment().world_size), _TABLE["kinds"][config.train.method]
    directory = config.run.directory
    last = get_last_checkpoint(directory) if directory.is_dir() and config.checkpoint.resume == "auto" else None
    needed = f"train.method {config.train.method} needs TRL: pip install 'zeromesh[trl]' ("
    refused = f"train: TRL's {kind}Config does not take this: "
    with errors_as(ConfigError, needed, ImportError, after=")"), errors_as(ConfigError, refused, TypeError, ValueError):
        import trl

        trl_config = getattr(trl, f"{kind}Config")(str(directory), **arguments)
    rewards = [find_object(each.python, "train.rewards", config.folders) for each in config.train.rewards]
    source = config.model.source or str(directory / "base")
    with trl_config.main_process_first(local=False):
        tokenizer = _tokenizer(config.data.tokenizer or config.model.source)
        files, forms = {"train": config.data.train, "eval": config.data.eval}, _TABLE["columns"][config.train.method]
        rows = {name: _rows(spec, forms) for name, spec in files.items() if spec is not None}
        _require_settings(config, trl_config, rows["train"], resumes=last is not None)
        is_there = last is not None and Path(source).is_dir()
        if config.model.source is None and trl_config.process_index == 0 and not is_there:
            # TRL's trainers load models, a reference model too, by name, so a new one is written first, once.
            set_seed(config.run.seed)
            new, *_ = read_configuration(config.model, PretrainedTokenizer(tokenizer=tokenizer))
            AutoModelForCausalLM.from_config(new, trust_remote_code=False).save_pretrained(source)
    kwargs = {"dtype": "float32", "revision": config.model.revision, "attn_implementation": config.model.attention}
    trl_config.model_init_kwargs = {name: value for name, value in kwargs.items() if value is not None}
    named: dict[str, Any] = {f"{name}_dataset": dataset for name, dataset in rows.items()}
    if config.model.lora is not None:
        named["peft_config"] = adapter = adapter_configs(config.model)["default"]
        adapter.task_type = "SEQ_CLS" if config.train.method == "reward" else "CAUSAL_LM"
        adapter.target_modules = adapter.target_modules or "all-linear"
    named |= {"reward_funcs": rewards} if rewards else {}
    sections = {name: value for name in _SECTIONS if (value := getattr(config, name).model_dump(exclude_unset=True))}
    trainer = on_zeromesh(getattr(trl, f"{kind}Trainer"))(
        source, args=trl_config, processing_class=tokenizer, zeromesh=sections, **named
    )
    if last is not None and _is_complete(Path(last), trl_config) and (directory / "model").is_dir():
        if trl_config.process_index == 0:
            name, step = config.run.name, Path(last).name.rpartition("-")[2]
            advice = "raise run.max_steps or run.epochs, or choose another run.name"
            print_lines([f"nothing was trained: run {name!r} is complete at step {step}; {advice}"])
        return
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model(str(directory / "model"))
    if trl_config.process_index == 0:
        print_lines([f"the model is in {directory / 'model'}"])


def _is_complete(checkpoint: Path, arguments: Any) -> bool:
    """Return True if a checkpoint is of the last step: transformers' trainer would train one step more from there."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    if arguments.max_steps > 0:
        return bool(state.global_step >= arguments.max_steps)
    return bool((state.epoch or 0.0) >= arguments.num_train_epochs)


def _tokenizer(spec: str | None) -> Any:
    if spec is None:
        raise ConfigError("data.tokenizer: missing; give bytes, a directory, or model.source, which has its own")
    if spec == "bytes":
        plain = ByteTokenizer()  # Its ids are the bytes here too, and one that no text has ends and pads it.
        ids = {f"<0x{byte:02X}>": byte for byte in range(plain.end_of_text)} | {"</s>": plain.end_of_text}
        bytewise, decoders = tokenizers.Tokenizer(tokenizers.models.BPE(ids, [], byte_fallback=True)), tokenizers.decoders
        bytewise.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="</s>", pad_token="</s>")
    with library_errors("data.tokenizer", f"{spec!r} cannot be loaded: "):
        return AutoTokenizer.from_pretrained(spec, trust_remote_code=False)


def _rows(spec: Any, forms: Sequence[str] = ("",)) -> Any:
    """Return the rows of files. Raises `ConfigError` unless they have the columns of one of the `forms`, as words of a line."""
    from datasets import load_dataset

    files = [spec] if isinstance(spec, str) else list(spec)
    kinds = {_FILES.get(Path(each).suffix) for each in files}
    if None in kinds or len(kinds) > 1:
        raise ConfigError(f"data.train and data.eval: {files} are not files of one of {', '.join(_FILES)}")
    if missing := [each for each in files if not Path(each).expanduser().is_file()]:
        raise ConfigError(f"data.train and data.eval: {missing[0]!r} does not exist")
    with library_errors("data.train and data.eval", f"{files} cannot be read: "):
        rows = load_dataset(kinds.pop(), data_files=[str(Path(each).expanduser()) for each in files], split="train")
    if not any(set(each.split()) <= set(rows.column_names or ()) for each in forms):
        found = f"{len(rows)} rows with the columns {', '.join(rows.column_names or ())}"
        raise ConfigError(f"data.train and data.eval: {files} have {found}; needed are {' or '.join(forms)}")
    return rows
