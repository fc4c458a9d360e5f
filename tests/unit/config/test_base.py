"""`base`: a file that a configuration inherits, whose keys are known by their file."""

from pathlib import Path

import pytest
import yaml

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.consent import Consent
from zeromesh.trainer.config.load import load_config


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "top.yaml"


def test_a_chain_of_files_is_summed(tmp_path: Path) -> None:
    top = write(
        tmp_path,
        top_yaml="base: sub/middle.yaml\nrun: {max_steps: 3}\nmodel: {lora: null}\ndata:\n",
        sub__middle_yaml="base: ../root.json\noptimizer: {betas: [0.1, 0.2]}\nrun: {seed: 4, max_steps: 5}",
        root_json='{"model": {"lora": {"rank": 2}}, "optimizer": {"lr": 0.5, "betas": [0.3, 0.4]}, "data": {"shuffle": false}}',
    )
    config = load_config(top)
    assert (config.run.max_steps, config.run.seed, config.run.name) == (3, 4, "top")
    assert (config.optimizer.lr, config.optimizer.betas) == (0.5, (0.1, 0.2))
    assert (config.model.lora, config.data.shuffle) == (None, False)
    assert config.folders == (str(tmp_path), str(tmp_path / "sub"), str(tmp_path))
    assert load_config(yaml.safe_load(config.to_yaml())).model_dump() == config.model_dump()
    assert load_config({"base": str(top), "run": {"seed": 1}}).run.seed == 1
    assert load_config(top, ["optimizer.lr=0.25"]).optimizer.lr == 0.25


def test_another_kind_replaces_what_was_of_the_first(tmp_path: Path) -> None:
    top = write(
        tmp_path,
        top_yaml="base: root.yaml\nmodel: {config: {model_type: gpt2, n_embd: 8}}\ndata: {train: {python: 'a:c'}}",
        root_yaml="model: {config: {model_type: llama, hidden_size: 8}}\ndata: {train: {python: 'a:b', rows: 3}}",
    )
    with pytest.raises(ConfigError, match=r"data.train.python: would run code"):
        load_config(top)
    config = load_config(top, consent=Consent.GIVEN)
    assert config.model.config == {"model_type": "gpt2", "n_embd": 8}
    assert config.data.model_dump()["train"] == {"python": "a:c"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"root_yaml": "optimizer: {lr: -1}"}, r"optimizer.lr: got -1; .*\(set in .*root.yaml\)"),
        ({"root_yaml": "batch: {micro_size: 99}"}, r"batch.micro_size: 99 is more .*\(set in .*root.yaml\)"),
        ({"root_yaml": "data: {mixture: {a: {trian: x}}}"}, r"data.mixture.a.*\(set in .*root.yaml\)"),
        (
            {"root_yaml": "base: top.yaml"},
            r"root.yaml: base: 'top.yaml' inherits itself: .*top.yaml -> .*root.yaml -> .*top",
        ),
        ({"root_yaml": "base: none.yaml"}, r"root.yaml: base: '.*none.yaml' does not exist"),
        ({"root_yaml": "base: [a, b]"}, r"root.yaml: base: got \['a', 'b'\]; allowed is the path"),
        ({"root_yaml": "run: {max_steps: ${NOT_SET_HERE}}"}, "root.yaml"),
    ],
)
def test_errors_name_the_file_that_set_the_key(tmp_path: Path, files: dict[str, str], said: str) -> None:
    top = write(tmp_path, top_yaml="base: root.yaml\nrun: {max_steps: 3}", **files)
    with pytest.raises(ConfigError, match=said):
        load_config(top)


def test_a_key_of_the_file_itself_is_its_own(tmp_path: Path) -> None:
    top = write(tmp_path, top_yaml="base: root.yaml\noptimizer: {lr: -2}", root_yaml="optimizer: {lr: -1}")
    with pytest.raises(ConfigError) as raised:
        load_config(top)
    assert "root.yaml" not in str(raised.value)
