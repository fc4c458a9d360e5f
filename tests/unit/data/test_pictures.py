"""Folders of pictures: what is listed, held out and refused, and a model that learns their classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers as tf
from PIL import Image

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer import Trainer
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import load_pictures

VIT = {"model_type": "vit", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
CAT, DOG = (30, 40, 50), (200, 190, 180)


def folder(root: Path, count: int = 12, **labels: tuple[int, int, int]) -> Path:
    for label, color in (labels or {"cat": CAT, "dog": DOG}).items():
        (root / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (10 + number, 9), color).save(root / label / f"{number}.png")
    return root


def loaded(train: Path, **section: Any) -> Any:
    processor = tf.ViTImageProcessorPil(size={"height": 8, "width": 8})
    return load_pictures(DataSection(train=str(train), format="pictures", **section), processor, "RGB")


def test_sub_folders_are_labels_and_a_part_is_held_out_by_name(tmp_path: Path) -> None:
    root = folder(tmp_path / "all", count=40)
    (root / "cat" / "notes.txt").write_text("no picture")
    found = loaded(root, eval_fraction=0.2)
    assert found.classes == ("cat", "dog")
    assert len(found.train) + len(found.eval) == 80
    assert not {path for path, _ in found.train.files} & {path for path, _ in found.eval.files}
    sample = found.train[0]
    assert (list(sample["pixel_values"].shape), int(sample["labels"])) == ([3, 8, 8], 0)
    again = loaded(root, eval_fraction=0.2)
    assert again.train.files == found.train.files
    named = loaded(root, eval={"a": str(root), "b": str(folder(tmp_path / "b", dog=DOG))})
    assert {name: len(each) for name, each in named.eval.items()} == {"a": 80, "b": 12}
    assert {label for _, label in named.eval["b"].files} == {1}


def test_what_is_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "all")
    with pytest.raises(DataError, match=r"data.eval has classes that the training pictures do not have: .*bird"):
        loaded(root, eval=str(folder(tmp_path / "other", bird=CAT)))
    with pytest.raises(DataError, match=r"'.*all/cat/0.png' does not lie in a sub-folder of '.*' that is its label"):
        loaded(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no picture in sub-folders of"):
        loaded(tmp_path / "empty")
    with pytest.raises(DataError, match=r"one.png' is no folder"):
        loaded(tmp_path / "one.png")
    (root / "dog" / "broken.png").write_bytes(b"none")
    with pytest.raises(DataError, match=r"1 of 25 files cannot be read as pictures: .*dog/broken.png"):
        loaded(root)
    with (
        patch.dict("sys.modules", {"PIL": None, "PIL.Image": None}),
        pytest.raises(DataError, match="pip install Pillow"),
    ):
        loaded(root)
    with pytest.raises(ConfigError, match=r"data.format: pictures is for all data"):
        load_config({"data": {"mixture": {"a": {"train": str(root), "format": "pictures"}}}})


def test_a_picture_that_ends_early_is_named_when_it_is_read(tmp_path: Path) -> None:
    root = folder(tmp_path / "all", count=1)
    picture = root / "cat" / "0.png"
    picture.write_bytes(picture.read_bytes()[:50])
    with pytest.raises(DataError, match=r"cat/0.png' cannot be read as a picture: "):
        loaded(root, eval_fraction=0.0).train[0]


def test_a_model_learns_them_and_is_saved_with_their_names(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model": {"head": "image_classification", "config": {**VIT, "image_size": 8, "patch_size": 4}},
        "data": {
            "train": str(folder(tmp_path / "all")),
            "eval": str(folder(tmp_path / "test", count=3)),
            "format": "pictures",
        },
        "run": {"output_dir": str(tmp_path), "name": "run", "max_steps": 6},
        "optimizer": {"lr": 1e-2},
        "precision": {"compute": "float32"},
    }
    with Trainer(config=config) as trainer:
        learnt = trainer.fit().eval_loss
        trainer.save(tmp_path / "saved")
    assert learnt < 0.69
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["id2label"] == {"0": "cat", "1": "dog"}
    assert tf.AutoImageProcessor.from_pretrained(tmp_path / "saved").size == {"height": 8, "width": 8}
    # The saved directory is a model of its own, with the processor that it was trained with.
    config["model"] = {"head": "image_classification", "source": str(tmp_path / "saved")}
    config["run"]["name"] = "further"
    with Trainer(config=config) as trainer:
        assert trainer.evaluate()["eval_loss"] == pytest.approx(learnt, abs=1e-5)
    config["model"]["head"] = "base"
    with pytest.raises(
        ConfigError,
        match=r"data.format: pictures are for a model that has classes.* set model.head: image_classification",
    ):
        Trainer(config=config).evaluate()
