"""What is wrong with a configuration, a file, a model or a dataset is said once, in one message, before anything is trained."""

import sys
from pathlib import Path

import pytest
import yaml

from tests.support.waiting import ended
from tests.support.workers import Workers

pytestmark = pytest.mark.usefixtures("at_once")

SMALL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def table(text: str) -> dict[str, tuple[str, list[str]]]:
    """Rows `name: change -> words & words`, which go on in lines that are indented."""
    rows = [row.split(" -> ") for row in text.strip().replace("\n    ", " ").splitlines()]
    return {head.partition(": ")[0]: (head.partition(": ")[2], words.split(" & ")) for head, words in rows}


# What is changed in a configuration that runs, with | between, and words of the message. {here} is a folder with files.
COMMANDS = table("""
unknown key: optimizer.learning_rate=0.1 -> optimizer.learning_rate: unknown key & did you mean optimizer.lr?
wrong type: run.max_steps=ten -> run.max_steps: got 'ten'; allowed is an integer >= 1
stage: zero.stage=5 -> zero.stage: got 5; allowed is an integer >= 0 and <= 3
mesh: parallel.shard=3 -> shard 3 & = 3, but the run has 1 rank; set parallel.shard to 1 or auto
microbatch: batch.micro_size=8 -> batch.micro_size: 8 is more than batch.global_size 4
nan: optimizer.lr=.nan -> optimizer.lr: got nan; allowed is a number >= 0
budget: zero.gathered_budget=-5 -> zero.gathered_budget: got -5 & such as 268435456 or 256MiB
warm-up: schedule.warmup_steps=9 -> schedule.warmup_steps: 9 is more than run.max_steps 2
in backward: optimizer.in_backward=true -> run.clip_norm: 1.0 does not go with optimizer.in_backward
transport: parallel.transport=nccl -> parallel.transport is nccl, but no accelerator is here; use auto, shared or gloo
missing data: data.train=/nowhere.txt ->
    data.train: '/nowhere.txt' does not exist; give stdlib, files and directories of this machine
missing tokenizer: data.tokenizer=/nowhere -> data.tokenizer: '/nowhere' does not exist; give bytes, a local directory
not a tokenizer: data.tokenizer={here} -> holds no tokenizer (tokenizer.json & save_pretrained of a
no text: data.train={here}/empty.txt -> holds 0 tokens & give more text, or lower data.sequence_length
not text: data.train={here}/binary.txt -> binary.txt' is not text (its start holds NUL bytes)
column: data.train={here}/rows.jsonl -> row 0 has no field 'text', only 'body'; set data.text_field
broken rows: data.train={here}/broken.jsonl -> broken.jsonl' is not valid json
vocabulary: model.config.vocab_size=100 -> the text has token id 255 but & vocabulary has 100 tokens & raise vocab_size in
length: data.sequence_length=128 -> data.sequence_length: 128 is more than model.config.max_position_embedd
default length: model.config={{model_type: gpt2, n_embd: 32, n_layer: 1, n_head: 2}} | data.sequence_length=2048 ->
    sequences of 2048 tokens are longer than the 1024 positions of GPT2LMHeadModel & lower data.sequence_length
architecture: model.config.model_type=lama -> model.config: model_type: 'lama' is not known & nearest: llama
field: model.config.hiden_size=32 -> hiden_size is not a field of LlamaConfig; nearest: hidden_size
field type: model.config.hidden_size=big -> model.config: Field 'hidden_size' expected int, got str
heads: model.config.num_attention_heads=5 -> The hidden size (32) is not a multiple of the number of attention
head groups: model.config.num_key_value_heads=3 -> num_key_value_heads 3 does not divide num_attention_heads
no layers: model.config.num_hidden_layers=-1 -> model.config: num_hidden_layers is -1; give 1 or more
activation: model.config.hidden_act=gellu -> hidden_act 'gellu' is not known to transformers; nearest: gelu
memory: model.config.hidden_size=400000 -> parameters at stage 3 need at least & TiB optimizer moments
head: model.head=masked_lm -> model.head: LlamaConfig has no masked_lm model; it has causal_lm
labels: model.head=sequence_classification -> does not predict the next token, so plain text has no labels
decay: optimizer.no_decay=['*nrom*'] -> optimizer.no_decay: '*nrom*' matches no parameter of the model
output: run.output_dir={here}/file -> file/run' cannot be written: Not a directory; change run.outp
no source: model.source=/nowhere | model.config=null -> model.source: '/nowhere' does not exist; give a local dire
two models: model.source={here}/good -> model.config: given beside model.source & set it to null
no weights: model.source={here}/none | model.config=null | data.tokenizer=bytes ->
    none has neither model.safetensors.index.json nor
pickle: model.source={here}/pickle | model.config=null | data.tokenizer=bytes ->
    pytorch_model.bin is pickle, which runs code when
cut weights: model.source={here}/cut | model.config=null | data.tokenizer=bytes ->
    cut/model.safetensors has 20000 bytes, but its head
bad config.json: model.source={here}/config | model.config=null -> config/config.json & is not a valid JSON
shapes: model.source={here}/shapes | model.config=null | data.tokenizer=bytes ->
    6 problems & has shape [32, 48], the model has [32, 64]
bytes: model.source={here}/good | model.config=null | data.tokenizer=bytes ->
    vocabulary has 64 tokens & use the model's own tokenizer
""")


@pytest.fixture(scope="module")
def here(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, a configuration that runs, and files that cannot be used."""
    folder = tmp_path_factory.mktemp("a folder")
    (folder / "text.txt").write_text("one two three four five six seven\n" * 90)
    (folder / "empty.txt").write_text("")
    (folder / "file").write_text("a file")
    (folder / "binary.txt").write_bytes(b"\0\1\2" * 99)
    (folder / "rows.jsonl").write_text('{"body": "x"}\n')
    (folder / "broken.jsonl").write_text('{"text": "x"\n')
    config = {
        "model": {"config": SMALL},
        "data": {"train": str(folder / "text.txt"), "sequence_length": 16},
        "batch": {"global_size": 4, "micro_size": 2},
        "run": {"max_steps": 2, "output_dir": str(folder / "runs")},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "bomb.yaml").write_text(
        "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    )
    workers.run(1, "input_cases:prepare", folder=str(folder))
    return folder


def one_message(text: str) -> str:
    assert text.startswith("zeromesh: ")
    assert text.count("zeromesh: ") == 1
    assert "Traceback" not in text
    assert text.endswith("\n")
    lines = text.splitlines()
    assert all(line.startswith("  - ") for line in lines[1:])
    return text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bad_configuration_is_one_message(workers: Workers, here: Path, name: str) -> None:
    changes, wanted = COMMANDS[name]
    words = ["train", str(here / "run.yaml"), *changes.format(here=here).split(" | ")]
    (found,) = workers.run(1, "input_cases:command", words=words)
    message = one_message(found["err"])
    assert found["code"] in (1, 2)
    assert [word for word in wanted if word not in message] == []
    assert "tokens/s" not in found["out"]


@pytest.mark.parametrize(
    ("file", "wanted"),
    [("gone.yaml", "gone.yaml: no such file"), ("bomb.yaml", "bomb.yaml"), ("text.txt", "text.txt: "), ("a", "")],
)
def test_a_file_that_is_no_configuration(workers: Workers, here: Path, file: str, wanted: str) -> None:
    (found,) = workers.run(1, "input_cases:command", words=["train", str(here / file)])
    assert found["code"] == 2
    assert wanted in one_message(found["err"])


# What is wrong with what is given to `Trainer`, the error's class and words of the message.
REFUSED = table("""
no samples: DataError -> train_dataset is empty; give at least one sample
splits: DataError -> train_dataset is a mapping of splits ('train', 'test'); pass one of them
stream: DataError -> eval_dataset is a IterableDataset without length or indexing & list(dataset)
batches: DataError -> train_dataset is a DataLoader, whose items are batches & with its collate_fn as data_collator
a name: DataError -> train_dataset is 'stdlib'; give a dataset, or name text in the configuration: data.train
tuples: DataError -> is a tuple; give mappings of field names & or pass a data_collator
ragged: DataError -> field 'input_ids' has shape [7], but that of sample & pad or cut samples to one length
masked: DataError -> every label of the first & check how the dataset
masked evaluation: DataError -> every label of the first
vocabulary: DataError -> input_ids[ & the model's vocabulary has 64 tokens (ids 0 to 63)
negative: DataError -> input_ids[ & is - & the model's vocabulary has 64 tokens (ids 0 to 63)
fractions: DataError -> are torch.float32; token ids are integers
no labels: DataError -> the batch has no `labels` tensor; it has input_ids & a copy of input_ids
short labels: DataError -> have shape [2, 5], and input_ids [2, 12]; a causal model has a label for every
no inputs: DataError -> LlamaForCausalLM.forward needs input_ids, and the batch has labels, tokens; name
long: DataError -> sequences of 48 tokens are longer than the 32 positions of GPT2LMHeadModel & cut the
no loss: ConfigError -> NoLoss.forward gave [2, 2] where a scalar loss was expected & or pass compute_loss
frozen: ConfigError -> LlamaForCausalLM has only frozen parameters (requires_grad is False)
model name: ConfigError -> model is 'gpt2'; give an nn.Module & model.source
no model: ConfigError -> the callable that is passed as model returned a NoneType
callback: ConfigError -> callbacks holds the class Callback; give objects of subclasses of
mean: ConfigError -> compute_loss returned a Tensor; it must return (sum, count)
detached: ConfigError -> the loss does not depend on any trained parameter
collator: DataError -> data_collator gave a list for samples & a mapping of the model's argument names
only evaluation: DataError -> there is no train_dataset; give one to Trainer, or name text in data.train
tokenizer: DataError -> processing_class is a str; give a tokenizer & data.tokenizer
fields: DataError -> Pictures.forward needs images, and the batch has x; name the dataset's fields after
blocks: ConfigError -> model.compile compiles repeated blocks, and NoLoss has none & model.compile: false
config: ConfigError -> config: got list; allowed is a path, a mapping or a TrainerConfig
""")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_given_to_the_trainer_is_refused_by_all_ranks(workers: Workers, tmp_path: Path, name: str) -> None:
    kind, wanted = REFUSED[name]
    found = workers.run(2, "input_cases:refused", folder=str(tmp_path), name=name)
    # A sample that one rank alone has read is named by the others as that rank's error.
    assert kind in {each["error"] for each in found} <= {kind, "CollectiveError"}, found
    for each in found:
        assert [word for word in wanted if word not in each["message"]] == []
        assert each["steps"] == []


def test_every_bad_input_is_in_the_table(workers: Workers) -> None:
    (names,) = workers.run(1, "input_cases:names")
    assert sorted(names) == sorted(REFUSED)


def test_forms_of_a_dataset_are_all_the_same(workers: Workers, tmp_path: Path) -> None:
    (found,) = workers.run(1, "input_cases:accepted", folder=str(tmp_path))
    assert len(found) == 5
    assert all(losses == found["tensors"] for losses in found.values())


# With real processes: one message, from the rank that found it, and nobody is left.


@pytest.mark.parametrize(
    ("change", "wanted", "code"),
    [
        ("zero.stage=5", "zero.stage: got 5", 2),
        pytest.param("run.output_dir={here}/file", "file/run' cannot be written: Not a directory", 1, marks=pytest.mark.full),
    ],
)
def test_two_processes_say_it_once_and_end(here: Path, change: str, wanted: str, code: int) -> None:
    words = ["train", str(here / "run.yaml"), "--nproc", "2", change.format(here=here)]
    done = ended([sys.executable, "-m", "zeromesh", *words], ZEROMESH_TEST_MARK=str(here))
    assert wanted in one_message(done.stderr)
    assert done.returncode == code
    assert "tokens/s" not in done.stdout
    assert _processes_with(f"ZEROMESH_TEST_MARK={here}".encode()) == []


def _processes_with(mark: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and mark in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
