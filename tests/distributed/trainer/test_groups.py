"""What is trained, and by which rate and decay, by patterns of the configuration."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.trainer.lora_cases import adapted
from tests.support.tables import row, tried
from tests.support.trainer_cases import llama, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.trainer.setup.engine_options import choose_trained

test_patterns_choose_as_in_a_plain_loop = tried(
    "group_cases",
    [
        row(1, "grouped", stage=0),
        row(2, "grouped", stage=3),
        row(2, "grouped", stage=1, axes={"tensor": 2}),
        row(2, "grouped", pytest.mark.full, stage=2, axes={"pipeline": 2}),
    ],
)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"train": ["*.layer.0.*"]}},
            r"model\.train: '\*\.layer\.0\.\*' matches no parameter .*nearest: model\.layers\.0",
        ),
        ({"optimizer": {"groups": [{"match": "embed"}]}}, r"optimizer\.groups: 'embed' matches no trained .*embed_tokens\.weight"),
        (
            {"model": {"train": ["lm_head.*"]}, "optimizer": {"groups": [{"match": "*norm*", "lr_factor": 2}]}},
            r"optimizer\.groups: '\*norm\*' matches no trained parameter of the model; nearest: lm_head\.weight",
        ),
        (
            {"optimizer": {"no_decay": ["*.nrom.*"]}},
            r"optimizer\.no_decay: '\*\.nrom\.\*' matches no parameter of the model; nearest: ",
        ),
        (
            {"optimizer": {"no_decay": ["*.nrom.*"], "groups": [{"match": "*norm*", "lr_factor": 2}]}},
            r"optimizer\.no_decay: '\*\.nrom\.\*' matches no parameter of the model",
        ),
        (
            {"model": {"lora": {"rank": 2}, "weights": {"skip": ["*.layer.*", "*lm_head*"]}}},
            r"model\.weights\.skip: '\*\.layer\.\*' matches no parameter .*nearest: .*model\.layers\.0",
        ),
        ({"model": {"train": ["!*"]}}, r"model\.train: .* freezes all parameters; unfreeze some"),
        ({"optimizer": {"groups": [{"lr_factor": 2}]}}, r"optimizer\.groups"),
    ],
)
def test_patterns_that_choose_nothing_are_refused(sections: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message), Trainer(llama(), settings(str(tmp_path), **sections), sentences()) as t:
        t.fit()


def test_a_part_of_an_adapter_is_trained_and_no_weight_that_it_would_not_save() -> None:
    model = adapted()
    choose_trained(model, ["*lora_B*"])
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained
    assert all("lora_B" in name for name in trained)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is of the base, .*modules_to_save"):
        choose_trained(model, ["*.norm.weight"])
