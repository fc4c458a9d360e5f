"""Weights that a trainer hands to a thread of rank 0, which listens as another process would."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.inference.generator_cases import MODELS, SIZES, causal, seq2seq, stored
from tests.distributed.trainer.lora_cases import adapted
from tests.support.plain import after_steps, clones, fitted, like
from tests.support.trainer_cases import VOCABULARY, gpt2, llama, seeded, sentences, settings
from zeromesh import Callback, Generator, Trainer, receive_weights
from zeromesh.errors import TransferError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh


def wide() -> Any:
    """A Llama whose weights do not fit into what sockets hold."""
    return llama(intermediate_size=1 << 15)


class _Listener:
    """Takes weights in a thread, up to `most` tensors."""

    def __init__(self, address: str, *, most: int | None = None, pause: float = 0.0, **options: Any) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.error = ""
        self._arguments = (address, most, options)
        self._pause = pause
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        address, most, options = self._arguments
        try:
            weights = receive_weights(address, timeout_seconds=5, **options)
            for name, tensor in weights:
                self.found[name] = tensor
                threading.Event().wait(self._pause if len(self.found) == 1 else 0.0)
                if len(self.found) == most:
                    weights.close()  # type: ignore[attr-defined]  # It is a generator.
                    return
        except ZeromeshError as error:
            self.error = f"{type(error).__name__}: {error}"

    def join(self) -> None:
        self._thread.join(20)


def _ready(mesh: Mesh, paths: list[Path]) -> None:
    while mesh.rank == 0 and not all(path.exists() for path in paths):
        threading.Event().wait(0.01)
    mesh.world.barrier("receivers listen")


def arrive(mesh: Mesh, folder: str, sections: dict[str, Any], model: str = "llama") -> None:
    """Two receivers, one of which wants halves, get the weights that the trainer has."""
    config = settings(folder, run={"max_steps": 2}, **sections)
    halves = {"*.weight": (0, 1, 2), "*embed*": (1, 0, 2)}
    paths = [Path(folder, "whole.sock"), Path(folder, "half.sock")]
    listeners: list[_Listener] = []
    found: dict[str, Any] = {}

    def part_of(name: str) -> Any:
        return (0, mesh.rank % 2, 2) if name.endswith("weight") else None

    class HandsOver(Callback):
        """After the first step, when weights are those of shards."""

        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if found:
                return
            if mesh.rank == 0:
                listeners.append(_Listener(str(paths[0])))
                listeners.append(_Listener(str(paths[1]), parts=halves, token="t0ken"))
            _ready(mesh, paths)
            trainer.check_weights()
            found["count"] = trainer.send_weights(str(paths[0]))
            assert trainer.send_weights(str(paths[1]), token="t0ken") == found["count"] > 10
            found["wanted"] = {name: tensor.clone() for name, tensor in trainer.stream_weights()}
            masters = {name: tensor.clone() for name, tensor in trainer.state_dict()}
            like({name: found["wanted"][name] for name in masters}, masters, rel=0)
            found["own"] = {name: tensor.clone() for name, tensor in trainer.stream_weights(part_of)}

    fitted(seeded({"llama": llama, "gpt2": gpt2}[model]), config, sentences(), callbacks=[HandsOver()])
    wanted = found["wanted"]
    parts = {name: tensor.tensor_split(2)[mesh.rank % 2] if part_of(name) else tensor for name, tensor in wanted.items()}
    like(found["own"], parts, rel=0)
    for listener in listeners:
        listener.join()
        assert (listener.error, len(listener.found)) == ("", found["count"])
    if listeners:
        whole, half = (listener.found for listener in listeners)
        like({name: whole[name] for name in wanted}, wanted, rel=0)
        # The first pattern that fits says which part.
        wished = {name: tensor.tensor_split(2)[1] if name.endswith(".weight") else tensor for name, tensor in wanted.items()}
        like({name: half[name] for name in wanted}, wished, rel=0)
        assert not list(Path(folder).glob("*.sock")), "sockets are removed"


FORMS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: seeded(MODELS["mixtral"]),
    "neox": lambda: seeded(MODELS["neox"]),
    "lora": adapted,
    "dora": lambda: adapted(use_dora=True),
    "head": lambda: adapted(modules_to_save=["lm_head"]),
    "embedding": lambda: adapted({"tie_word_embeddings": True}, modules_to_save=["embed_tokens"]),
    "tokens": lambda: adapted({"tie_word_embeddings": True}, trainable_token_indices=[3, 5]),
    "moe-lora": lambda: peft.get_peft_model(seeded(MODELS["mixtral"]), peft.LoraConfig(target_modules=["q_proj"])),
}


def has_the_form_of_files(mesh: Mesh, folder: str, sections: dict[str, Any], model: str) -> None:
    """The weights that are streamed are those in the files that `save_pretrained` writes of a plain model."""
    build = FORMS[model]
    config = settings(folder, run={"max_steps": 2}, **sections)
    found: dict[str, dict[str, torch.Tensor]] = {}

    def stream(trainer: Any, step: int) -> None:
        found["sent"] = {name: tensor.clone() for name, tensor in trainer.stream_weights()}
        found["trained"] = {name: tensor.clone() for name, tensor in trainer.state_dict()}

    with Trainer(build(), config, train_dataset=sentences(), callbacks=[after_steps(stream)]) as trainer:
        trainer.fit()
        found["whole"] = dict(trainer.stream_weights())
    plain = build().double()
    before = clones(plain)
    plain.load_state_dict(found["trained"], strict=False)
    assert sum(not torch.equal(value, before[name]) for name, value in plain.named_parameters()) > 3
    if isinstance(plain, peft.PeftModel):
        plain = plain.merge_and_unload()
    files = [load_file(path) for path in stored(mesh, folder, plain).glob("*.safetensors")]
    wanted = dict(sorted((name, tensor) for file in files for name, tensor in file.items()))
    for when in ("sent", "whole"):
        like(dict(sorted(found[when].items())), wanted, rel=0, abs_=1e-14)
    assert model != "mixtral" or "model.layers.0.block_sparse_moe.experts.0.w1.weight" in wanted


def fails(mesh: Mesh, folder: str) -> None:
    """Receivers that are not there, leave, or do not know the token end nothing: training goes on."""
    rows: tuple[tuple[str, dict[str, Any] | None, dict[str, Any], str], ...] = (
        ("none", None, {}, "nobody receives weights at"),
        ("leaves", {"most": 3}, {}, "weights were not handed over"),
        ("token", {"token": "a"}, {"token": "b"}, "has another token"),
    )
    with Trainer(seeded(llama), settings(folder, run={"max_steps": 3}), train_dataset=sentences()) as trainer:
        for name, options, sent, said in rows:
            path, listener = Path(folder, f"{name}.sock"), None
            if mesh.rank == 0 and options is not None:
                listener = _Listener(str(path), **options)
            _ready(mesh, [path] if options is not None else [])
            with pytest.raises(TransferError, match=said):
                trainer.send_weights(str(path), timeout_seconds=2, **sent)
            if listener is not None:
                listener.join()
                assert name != "token" or "has another token" in listener.error
        trainer.fit()
        assert trainer.state.step == 3


DIRECTORIES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    # The first name of its tied weight is not the one in files.
    "camembert": causal("camembert", SIZES, is_decoder=True),
    # Positions of sines are not in files.
    "marian": seq2seq(
        "marian",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        vocab_size=VOCABULARY,
        pad_token_id=0,
        max_position_embeddings=64,
    ),
}


def from_generator(mesh: Mesh, folder: str, model: str) -> None:
    """The weights of a generator are those in the files of the model's directory."""
    directory = stored(mesh, folder, seeded(DIRECTORIES[model]).double())
    with Generator(directory, run={"output_dir": folder}) as generator:
        found = {name: tensor.clone() for name, tensor in generator.stream_weights()}
    like(dict(sorted(found.items())), dict(sorted(load_file(directory / "model.safetensors").items())), rel=0)


def is_slow(mesh: Mesh, folder: str) -> None:
    """A receiver that rests longer than ranks wait for each other, but not longer than it may be silent."""
    model, path, listener = seeded(wide), Path(folder, "slow.sock"), None
    config = settings(folder, run={"max_steps": 1}, parallel={"timeout_seconds": 2})
    with Trainer(model, config, train_dataset=sentences()) as trainer:
        if mesh.rank == 0:
            listener = _Listener(str(path), pause=4.0)
        _ready(mesh, [path])
        count = trainer.send_weights(str(path), timeout_seconds=15)
        assert count > 10
        if listener is not None:
            listener.join()
            assert len(listener.found) == count
        trainer.fit()
        assert trainer.state.step == 1
