"""Matrices of a directory are encoded once a host: later starts read the codes, and stay on the files where parameters do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.plain import after_steps
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.checkpoint.io.format import read_header
from zeromesh.errors import StorageError
from zeromesh.flat.codec import Codec
from zeromesh.flat.encoded_shard import EncodedTensor
from zeromesh.units.unit import all_buckets

pytest.importorskip("peft")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    seeded(llama).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def losses(base: Path, *, weights: dict[str, Any] | None = None, tier: str = "none") -> list[float]:
    """The losses of two steps of adapters over a directory."""
    config = settings(
        str(base.parent / "runs"),
        model={
            "source": str(base),
            "weights": {"codec": "nf4", "cache": str(base.parent / "cache"), **(weights or {})},
            "lora": {"rank": 2},
        },
        run={"max_steps": 2},
        batch={"global_size": 2},
        checkpoint={"resume": "never"},
        offload={"parameters": {"tier": tier}},
    )
    folders = set()

    def look(trainer: Trainer, step: int) -> None:
        assert trainer.engine is not None
        for bucket in all_buckets(trainer.engine.units):
            if isinstance(bucket.master, EncodedTensor):
                folders.update(Path(part.slot.label).parent.parent for part in bucket.master.encoded.parts if part.slot)

    with Trainer(None, config, sentences(), callbacks=[after_steps(look)]) as trainer:
        found = list(trainer.fit().losses)
    assert folders == ({base.parent / "cache"} if tier == "file" else set())
    return found


def test_the_second_start_encodes_nothing_and_computes_the_same(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, plain = losses(base), Codec.encode
    files = sorted((base.parent / "cache").glob("*/*.safetensors"))
    assert len(files) == 14, "seven matrices of two layers"
    other = losses(base, weights={"codec": "fp8"})
    monkeypatch.setattr(Codec, "encode", lambda *given: pytest.fail("it is encoded already"))
    assert losses(base) == losses(base, tier="file") == first != other == losses(base, weights={"codec": "fp8"})

    # One that was cut short is encoded again, a damaged one is named.
    monkeypatch.setattr(Codec, "encode", plain)
    files[0].write_bytes(files[0].read_bytes()[:-5])
    name = files[1].stem
    for part, message in {
        name: f"{name}.*was damaged, and is removed",
        f"{name}.absmax": f"{name}.*was damaged, and is removed",
        f"{name}.quant_state.bitsandbytes__nf4": "is damaged; remove it",
    }.items():
        data = bytearray(files[1].read_bytes())
        data[read_header(files[1])[part].begin] ^= 1
        files[1].write_bytes(data)
        with pytest.raises(StorageError, match=message):
            losses(base)
        if not files[1].exists():
            assert losses(base) == first
    files[1].unlink()
    assert losses(base) == first


def test_other_values_in_the_directory_are_encoded_anew(base: Path) -> None:
    first = losses(base)
    file = base / "model.safetensors"
    save_file({name: each * 2 if "up_proj" in name else each for name, each in load_file(file).items()}, file, {"format": "pt"})
    assert losses(base) != first


def test_a_cache_that_cannot_be_written_is_one_error(base: Path) -> None:
    (base.parent / "cache").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot be filled with encoded weights: .*; set model\.weights\.cache"):
        losses(base)
