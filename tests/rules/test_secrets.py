"""No secret of the environment, the arguments, the configuration or an error is in any file of a run."""

import os
from pathlib import Path

import pytest

from tests.support.tracking_cases import ENVIRONMENT, SECRETS
from tests.support.workers import PoolOptions, Workers
from zeromesh.environment import kept_environment, secret_values
from zeromesh.trainer.config.messages import known_paths
from zeromesh.trainer.config.redact import REDACTED, Redaction, is_secret


def test_no_secret_is_in_any_file_of_a_run(workers: Workers, tmp_path: Path) -> None:
    backends = ["wandb", "noted", "tensorboard"]
    found = workers.run(2, "tracking_cases:planted", folder=str(tmp_path), backends=backends)[0]
    assert "WARNING" not in found["said"]
    paths = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    names = {path.name for path in paths}
    assert {"metrics.jsonl", "config.resolved.yaml", "tracking.json", "trainer_state.json"} <= names
    assert any(name.endswith(".wandb") for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert "output.log" not in names  # what is printed
    for path in paths:
        content = path.read_bytes()
        assert [secret for secret in SECRETS if secret.encode() in content] == [], path
    assert REDACTED in (tmp_path / "run" / "config.resolved.yaml").read_text()


@pytest.mark.parametrize("memory", [False, True])
def test_no_secret_of_an_error_is_in_any_file(workers: Workers, tmp_path: Path, memory: bool) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=3.0)) as pool:
        outcomes = pool.outcomes("tracking_cases:leaking", folder=str(tmp_path), memory=memory)
    assert all(outcome.error for outcome in outcomes)
    written = {path.name: path.read_text() for path in (tmp_path / "run").rglob("*.json*")}
    assert "no entry with <redacted> to https://<redacted>@host" in written["ranks.json"]
    assert ("memory-rank-1.json" in written) == memory
    assert not [name for name, text in written.items() if "planted" in text]


def test_what_is_a_secret() -> None:
    assert not [path for path in known_paths() if is_secret(path.rpartition(".")[2])]
    secret = ["api_key", "apiKey", "hf_token", "hub_token", "SECRET", "password", "db_pass", "aws_secret_access_key", "key"]
    for key in (*secret, "github_token", "signing-key", "credentials", "Authorization"):
        assert is_secret(key, "x"), key
    for key in ("tokenizer", "pad_token_id", "num_key_value_heads", "tokenizer_class", "keys", "compass", "bypass"):
        assert not is_secret(key, "x"), key
    of_a_vocabulary = {"pad_token": "<pad>", "cls_token": "[CLS]"}
    for key, value in {**of_a_vocabulary, "token": 7, "password": None, "auth_key": True}.items():
        assert not is_secret(key, value), key
    redaction = Redaction(["known-secret"])
    values = {
        "a": ["with known-secret inside", 3, None],
        "api_key": "x",
        "token": 7,
        "deep": {"password": "y", "n": 1.5, "pin_password": 4711},
        "credentials": {"user": "me", "parts": ["x", 3]},
    }
    assert redaction.values(values) == {
        "a": [f"with {REDACTED} inside", 3, None],
        "api_key": REDACTED,
        "token": 7,
        "deep": {"password": REDACTED, "n": 1.5, "pin_password": REDACTED},
        "credentials": {"user": REDACTED, "parts": [REDACTED, REDACTED]},
    }
    assert redaction.text("s3://user:pass@host/path hf_" + "a" * 30) == f"s3://{REDACTED}@host/path {REDACTED}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("https://hush-hush:@host/x", f"https://{REDACTED}@host/x"),
        ("https://hush-hush@host/x", f"https://{REDACTED}@host/x"),
        ("https://me:hu@sh@host/x", f"https://{REDACTED}@host/x"),
        ("https://me:hu/sh@host/x", f"https://{REDACTED}@host/x"),
        ("redis://:hush@host:6379/0", f"redis://{REDACTED}@host:6379/0"),
        ("https://host/x?token=hush&y=1", f"https://host/x?token={REDACTED}&y=1"),
        ("https://host/x?y=1&X-Amz-Signature=hush", f"https://host/x?y=1&X-Amz-Signature={REDACTED}"),
        ("AccountName=a;AccountKey=hu+sh==;Suffix=b", f"AccountName=a;AccountKey={REDACTED};Suffix=b"),
        ("host=h password=hush dbname=d", f"host=h password={REDACTED} dbname=d"),
        ("Authorization: Bearer hush-hush", f"Authorization: Bearer {REDACTED}"),
        ("sk_live_hushhushhush, glpat-hushhushhushhush", f"{REDACTED}, {REDACTED}"),
        ("a -----BEGIN RSA PRIVATE KEY-----\nhush\nhush", f"a {REDACTED}"),
        # Texts without secrets stay.
        *(
            (text, text)
            for text in (
                "ssh://git@host/path, http://host:80/a@b",
                "https://host/x?lines=1#key",
                "0123456789abcdef0123456789abcdef01234567",
                "data/key=5/part, tokens=3",
            )
        ),
    ],
)
def test_secrets_inside_of_texts(text: str, found: str) -> None:
    assert Redaction().text(text) == found
    assert Redaction().text(found) == found


def test_secrets_of_the_environment_are_known_by_the_names_of_their_variables() -> None:
    environ = {
        **ENVIRONMENT,
        "AWS_SECRET_ACCESS_KEY": "planted-aws",
        "SHORT_TOKEN": "1234567",
        "PGPASSFILE": "not-secret",
        "DB_PASSWORD": "planted-pg\n",
        "MYSQL_PWD": "planted-mysql",
        "GITHUB_PAT": "12345678",
        "SENTRY_DSN": "planted-dsn",
        "TOKENIZERS_PARALLELISM": "not-secret",
        "KEYBOARD_LAYOUT": "not-secret",
        "COMPASS": "not-secret",
        "PWD": "/not/secret",
        "OLDPWD": "/not/secret",
    }
    planted = {"planted-aws", "planted-pg", "planted-mysql", "12345678", "planted-dsn"}
    assert set(secret_values(environ)) == {*ENVIRONMENT.values(), *planted}


def test_the_environment_is_put_back() -> None:
    before = dict(os.environ)
    with kept_environment():
        os.environ["ZEROMESH_TEST"] = "1"
        os.environ.pop("PATH", None)
    assert dict(os.environ) == before
