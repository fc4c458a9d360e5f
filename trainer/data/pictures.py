"""Folders of pictures whose sub-folders are labels (`data.format: pictures`), as the `imagefolder` of datasets takes them.

The library decides which files are pictures and decodes them; files are listed here, so that nothing is copied into a
cache. A picture is read when its sample is asked for, and becomes `pixel_values` by the image processor of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeromesh.errors import DataError, counted, library_errors, some
from zeromesh.trainer.config.sections.training import EVAL, DataSection, paths_of
from zeromesh.trainer.data.datasets import is_held_out
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.text_sources import files_below, picture_endings

_KEY = "data.format"


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureDataset:
    """A map-style dataset of pictures and their class numbers."""

    files: Sequence[tuple[Path, int]]
    processor: Any
    mode: str
    """Pillow's mode of the model's input, such as RGB."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `pixel_values`, float `[channels, height, width]`, and `labels`. Raises `DataError` for a file that is broken."""
        from datasets import Image

        path, label = self.files[index]
        with library_errors(before=f"{str(path)!r} cannot be read as a picture: ", kind=DataError):
            picture = Image().decode_example({"path": str(path), "bytes": None}).convert(self.mode)
        pixels = self.processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": pixels, "labels": torch.tensor(label)}


def load_pictures(section: DataSection, processor: Any, mode: str) -> RunData:
    """List the pictures that `section` names; without `data.eval`, `data.eval_fraction` of them are held out by name. Raises
    `DataError` for folders without pictures in sub-folders, labels that the training pictures lack, files that are no pictures, and
    without Pillow."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise DataError(f"{_KEY}: pictures need Pillow: pip install Pillow ({error})") from error
    found = {key: _listed(source, key) for key, source in {"data.train": section.train, **section.evaluated()}.items()}
    listed = found.pop("data.train")
    classes = sorted({label for _, label, _ in listed})
    sets: dict[str, PictureDataset] = {}
    if not found and section.eval_fraction:
        found[EVAL] = [each for each in listed if is_held_out(each[2], section.eval_fraction)]
        held = {each[0] for each in found[EVAL]}
        listed = [each for each in listed if each[0] not in held]
    for key, files in {"data.train": listed, **found}.items():
        if unknown := {label for _, label, _ in files} - set(classes):
            raise DataError(f"{key} has classes that the training pictures do not have: {some(sorted(unknown))}")
        numbered = [(path, classes.index(label)) for path, label, _ in files]
        sets[key.removeprefix(f"{EVAL}.")] = PictureDataset(files=numbered, processor=processor, mode=mode)
    train = sets.pop("data.train")
    notes = (f"data.train: {len(train):,} pictures in {len(classes)} classes: {some(classes, 8)}",)
    chosen: Any = sets.get(EVAL, sets or None)
    evaluated = chosen if len(chosen or ()) else None
    return RunData(train=train, eval=evaluated, classes=tuple(classes), processor=processor, notes=notes)


def _listed(source: Any, where: str) -> list[tuple[Path, str, str]]:
    """Return the path, label and name of each picture, sorted by name, after checking the file headers."""
    import PIL.Image

    kinds, broken, found = picture_endings(), list[str](), list[tuple[Path, str, str]]()
    for root in map(Path, paths_of(source)):
        folder = root.expanduser()
        if not folder.is_dir():
            raise DataError(
                f"{where}: {str(root)!r} is no folder; give one whose sub-folders, with pictures in them, are the labels"
            )
        names = [name for name in files_below(folder) if name.lower().endswith(kinds)]
        if wrong := [name for name in names if name.count("/") != 1]:
            raise DataError(
                f"{where}: {str(folder / wrong[0])!r} does not lie in a sub-folder of {str(root)!r} that is its label; "
                "a folder of splits is given split by split (data.train, data.eval)"
            )
        found += [(folder / name, name.partition("/")[0], name) for name in names]
    for path, _, _ in found:
        try:
            with PIL.Image.open(path):
                pass
        except (OSError, ValueError, PIL.Image.DecompressionBombError):
            broken.append(str(path))
    if broken:
        raise DataError(
            f"{where}: {len(broken)} of {counted(len(found), 'file')} cannot be read as pictures: {some(broken, 8)}"
        )
    if not found:
        raise DataError(f"{where}: no picture in sub-folders of {', '.join(map(str, paths_of(source)))}")
    return found
