"""What error messages about keys are made of: values, nearest names, secrets, and the words of other trainers."""

from pathlib import Path
from typing import Any

import pytest

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.foreign_names import foreign_problems, training_arguments
from zeromesh.trainer.config.load import Consent, load_config, suggestion, tracker_problems
from zeromesh.trainer.config.messages import nearest_path, quote, takes_text, unknown_key
from zeromesh.trainer.config.redact import REDACTED, Redaction, is_secret

KNOWN = ("a.rate", "b.rate", "b.ratio", "c.steps")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("x", None, "null"),
        ("x", True, "true"),
        ("x", False, "false"),
        ("x", {"a": 1}, "a mapping of 1 key"),
        ("x", {"a": 1, "b": 2}, "a mapping of 2 keys"),
        ("x", [1, {}], "a list of 2 items"),
        ("x", (None, 1.5, "a"), "[None, 1.5, 'a']"),
        ("x", "y" * 78, "'" + "y" * 78 + "'"),
        ("x", "y" * 79, "'" + "y" * 59 + "... (81 characters)"),
        ("x", "https://me:hush@host", f"'https://{REDACTED}@host'"),
        ("my.api_key", "hush", REDACTED),
        ("my.token", 7, "7"),
    ],
)
def test_a_value_is_shown_short_and_without_secrets(path: str, value: Any, text: str) -> None:
    assert quote(path, value) == text


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("x.rate", "a.rate"),  # The first of those with the same name.
        ("b.rato", "b.ratio"),
        ("a.ra", "a.rate"),
        ("c.rati", "b.ratio"),
        ("c.ra", None),  # What is elsewhere has to be more alike than what is beside it.
        ("B.RATIO", "b.ratio"),
        ("qwerty", None),
    ],
)
def test_the_nearest_key_is_one_of_the_same_name_or_beside_it_or_very_alike(path: str, near: str | None) -> None:
    assert nearest_path(path, KNOWN) == near


def test_an_unknown_key_has_a_hint_or_a_list_of_those_beside_it() -> None:
    assert unknown_key("b.rato", 3, KNOWN) == "b.rato: unknown key (got 3); did you mean b.ratio?"
    assert unknown_key("b.qwerty", {"a": 3}, KNOWN) == "b.qwerty: unknown key; allowed are rate, ratio"
    assert unknown_key("b.rato", 3, KNOWN, "a hint") == "b.rato: unknown key (got 3); a hint"


def test_keys_of_any_text_are_told_from_those_of_words_and_numbers() -> None:
    assert [path for path in ("run.name", "data.train", "optimizer.no_decay", "tracking.tags") if takes_text(path)] == [
        *("run.name", "data.train", "optimizer.no_decay", "tracking.tags")
    ]
    assert not any(map(takes_text, ("run.max_steps", "zero.overlap", "run", "run.nothing")))


SERVICE_KEYS = (
    *("hf_" + "a" * 20, "sk-" + "a" * 20, "sk_test_" + "a" * 10, "rk_live_" + "a" * 10, "ghp_" + "a" * 20),
    *("gho_" + "a" * 20, "ghs_" + "a" * 20, "ghu_" + "a" * 20, "ghr_" + "a" * 20, "github_pat_" + "a" * 20),
    *("glpat-" + "a" * 16, "AKIA" + "A" * 16, "AIza" + "a" * 30, "xoxb-" + "a" * 10, "xoxp-" + "a" * 10),
    *("npm_" + "a" * 20, "pypi-" + "a" * 20, "nvapi-" + "a" * 20, "wandb_v1_" + "a" * 20),
    "eyJ" + "a" * 10 + ".eyJ" + "a" * 10 + ".a",
    "-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----",
)


@pytest.mark.parametrize("secret", SERVICE_KEYS, ids=lambda secret: secret[:12])
def test_keys_of_services_are_known_by_their_form(secret: str) -> None:
    assert Redaction().text(f"with {secret} inside") == f"with {REDACTED} inside"
    if "\n" not in secret:  # One character less makes it another text.
        assert Redaction().text(secret[:-1]) == secret[:-1]


def test_names_of_secrets_of_all_kinds() -> None:
    names = ("passphrase", "bearer", "authorisation", "cookie", "signature", "connection_string", "connectionstring")
    keys = ("access-key", "private_key", "auth_token", "hf_key", "wandb_key", "my_pat", "db-pwd", "pass")
    for key in (*names, *keys):
        assert is_secret(key, 7), key
    for key in ("my_key", "my.token", "my-token", "my token", "myToken", "TOKEN"):
        assert is_secret(key, "x"), key
        assert not is_secret(key, 7), key
    for key in ("monkey", "patience", "path", "spawned"):
        assert not is_secret(key, "x"), key


def test_known_secrets_are_replaced_whole_in_texts_and_keys() -> None:
    redaction = Redaction(["abcd", "abcdefgh"])
    assert redaction.text("x abcdefgh abcd") == f"x {REDACTED} {REDACTED}"
    assert redaction.values({"abcd": 1, 3: ("abcd", True), "password": ""}) == {REDACTED: 1, 3: [REDACTED, True], "password": ""}
    assert redaction.values({"password": {"a": None, "b": False, "c": 0}}) == {"password": {"a": None, "b": False, "c": REDACTED}}


def test_a_configuration_of_another_trainer_is_known_by_two_of_its_keys() -> None:
    given = {"model_name_or_path": "x", "stage": "sft", "Template": "a", "lora_rank": 3, "cutoff_len": 8}
    first, *rest = foreign_problems(given)
    assert first.startswith("this is a configuration of LLaMA-Factory, whose keys have other names here")
    assert rest == [
        "model_name_or_path: here model.source",
        "Template: here data.chat_template",
        "lora_rank: here model.lora.rank",
        "cutoff_len: here data.sequence_length",
        "without a name here that is known: stage",
    ]
    assert len(foreign_problems({"base_model": "x"})) == 2
    assert foreign_problems({"learning_rate": 1}) == foreign_problems({"template": "x"}) == []
    assert "transformers or TRL" in foreign_problems({"learning_rate": 1, "num_train_epochs": 1})[0]


def test_keys_become_arguments_of_transformers() -> None:
    keys = {"run.log_every": 0, "run.eval_every": "epoch", "checkpoint.every_steps": 5, "run.seed": 0}
    keys |= {"optimizer.betas": (0.1, 0.2), "run.max_steps": None, "schedule.warmup_ratio": 0.5, "run.output_dir": "x"}
    steps = {"logging_strategy": "no", "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 5}
    assert training_arguments(keys) == {"seed": 0, "warmup_steps": 0.5, "adam_beta1": 0.1, "adam_beta2": 0.2, **steps}
    assert training_arguments({}) == {}
    assert training_arguments({"optimizer.betas": None}) == {}, "an optimizer without them"


def test_a_name_that_deepspeed_alone_has_leads_to_its_key() -> None:
    found = {name: suggestion(f"x.{name}") for name in ("nvme_path", "AUTOTP_SIZE", "profile_step")}
    assert found == {"nvme_path": "offload.directory", "AUTOTP_SIZE": "parallel.tensor", "profile_step": "profile.steps"}


def test_trackers_are_suggested_by_similar_names() -> None:
    (near,) = tracker_problems(["tensorbord"])
    assert near.startswith("tracking.backends: got 'tensorbord'; allowed are ")
    assert near.endswith("; did you mean tensorboard?")
    (other,) = tracker_problems(["qqqq"])
    assert "did you mean" not in other


def problems_of(source: Any, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"data": {"mixture": {"a": {"weight": 1}}}}, "data.mixture.a: has no train; give the paths of its data"),
        ({"data": {"mixture": {"a": 3}}}, "data.mixture.a: got 3; allowed is a mapping of train, weight"),
        ({"data": {"mixture": {"a": {"train": ".", "x": 1}}}}, "data.mixture.a.x: unknown; allowed are train, weight"),
        ({"data": {"mixture": {"a": {"train": ".", "weight": 0}}}}, "data.mixture.a.weight: got 0; allowed is a number > 0"),
        ({"data": {"columns": {"txt": "a"}}}, "data.columns.txt: unknown; allowed are "),
        ({"data": {"columns": {"prompt": 3}}}, "data.columns.prompt: got 3; allowed is text"),
        ({"data": {"train": "~nobody-of-this-name/x"}}, "data.train: '~nobody-of-this-name/x' cannot be reached"),
        ({"data": {"eval": "/nowhere"}}, "data.eval: '/nowhere' does not exist; give null, files"),
        ({"data": {"train": "owner/name"}}, "data.train: 'owner/name' does not exist"),
        ({"checkpoint": {"resume": "/nowhere"}}, "checkpoint.resume: '/nowhere' does not exist; give auto, never"),
        ({"model": {"source": "owner/name/more"}}, "model.source: 'owner/name/more' does not exist"),
        ({"run": {"name": 1.5}}, "run.name: got 1.5"),
        ({"run": {"max_steps": " 3 "}}, "run.max_steps: got ' 3 '; allowed is an integer >= 1; write it without quotes"),
        ({"optimizer": {"name": "Adamw"}}, "; did you mean adamw?"),
        ({"optimizer": {"name": "float32"}}, "optimizer.name: got 'float32'; allowed are "),
    ],
)
def test_one_problem_says_which_key_and_what_it_allows(source: dict[str, Any], said: str) -> None:
    (problem,) = problems_of(source)
    assert said in problem
    if "float32" in said:
        assert "did you mean" not in problem  # It is a word of another key.


def test_paths_are_patterns_names_on_the_hub_or_there(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.txt").touch()
    for train in (f"{tmp_path}/**/*.txt", "hub:owner/name", "stdlib", [f"{tmp_path}/a", f"{tmp_path}/a/*"]):
        assert load_config({"data": {"train": train}})
    for source in ("owner/name", "name", str(tmp_path)):
        assert load_config({"model": {"source": source}, "data": {"tokenizer": source}})
    for resume in ("auto", "never", str(tmp_path)):
        assert load_config({"checkpoint": {"resume": resume}})
    assert "does not exist" in problems_of({"data": {"train": f"{tmp_path}/*/*.txt"}})[0]


def test_an_override_keeps_what_stands_beside_it(tmp_path: Path) -> None:
    source = {"model": {"source": str(tmp_path)}}
    assert load_config(source, ["model.config.num_labels=3"]).model.config == {"num_labels": 3}
    config = load_config({"run": {"seed": 4}, "data": None}, [" run.max_steps = 3 ", "data.shuffle=false"])
    assert (config.run.seed, config.run.max_steps, config.data.shuffle) == (4, 3, False)
    (problem, *_) = problems_of({"zero": 3}, "zero.stage=1")
    assert problem == "the override 'zero.stage=1': zero.stage: zero is 3, which has no keys"


def test_code_runs_on_an_override_of_its_own_key_or_of_one_that_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: {python: 'a:b', rows: 3}, eval: null}")
    for allowed in ("data.train.python=a:c", "data.train={python: 'a:c'}"):
        assert load_config(path, [allowed])
    for other in ("data.train.rows=4", "data.eval=null", "run.seed=1"):
        assert "data.train.python: would run code" in problems_of(path, other)[0]
    with pytest.raises(ConfigError, match=r"data\.train\.python: would run code"):
        load_config({"data": {"train": {"python": "a:b"}}}, consent=Consent.COMMAND_LINE)
    assert load_config({"data": {"train": {"python": "a:b"}}})


def test_defaults_for_tuning_give_way_to_what_is_given() -> None:
    whole, adapters = (load_config({"data": {"shuffle": True}}, tunes=tunes) for tunes in ("whole", "adapters"))
    assert [(each.optimizer.lr, each.optimizer.weight_decay) for each in (whole, adapters)] == [(2e-5, 0.01), (2e-4, 0.0)]
    assert load_config({"model": {"lora": {"rank": 2}}}, tunes="whole").optimizer.lr == 2e-4
    for given, micro in ((16, 4), (6, 2), (5, 1)):
        assert load_config({"batch": {"global_size": given}}, tunes="whole").batch.micro_size == micro
    assert load_config({"batch": {"micro_size": 3}, "optimizer": {"lr": 1.0}}, tunes="whole").batch.micro_size == 3
    translated = load_config({"zero_optimization": {"stage": 1}}, tunes="whole", ranks=1)
    assert translated.optimizer.lr == load_config({}).optimizer.lr
    assert not [note for note in translated.notes if "tuning" in note]
