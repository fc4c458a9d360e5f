"""Weights that a trainer hands to a thread of rank 0, which listens as another process would."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf
from safetensors.torch import load_file

from tests.distributed.parallel.parallel_cases import MIXTRAL
from tests.distributed.trainer.lora_cases import adapted
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
    """Wait until the sockets are there."""
    while mesh.rank == 0 and not all(path.exists() for path in paths):
        threading.Event().wait(0.01)
    mesh.world.barrier("receivers listen")


def arrive(mesh: Mesh, folder: str, sections: dict[str, Any], model: str = "llama") -> dict[str, Any]:
    """What differs between the weights of two receivers, one of which wants halves, and those that the trainer has."""
    build = {"llama": llama, "gpt2": gpt2}[model]
    config = settings(folder, run={"max_steps": 2}, **sections)
    halves = {"*.weight": (0, 1, 2), "*embed*": (1, 0, 2)}
    paths = [Path(folder, "whole.sock"), Path(folder, "half.sock")]
    listeners: list[_Listener] = []
    found: dict[str, Any] = {}

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
            assert trainer.send_weights(str(paths[1]), token="t0ken") == found["count"]
            found["wanted"] = {name: tensor.clone() for name, tensor in trainer.stream_weights()}
            found["masters"] = {name: tensor.clone() for name, tensor in trainer.state_dict()}
            found["own"] = {
                name: tensor.clone()
                for name, tensor in trainer.stream_weights(
                    lambda name: (0, mesh.rank % 2, 2) if name.endswith("weight") else None
                )
            }

    with Trainer(seeded(build), config, train_dataset=sentences(), callbacks=[HandsOver()]) as trainer:
        trainer.fit()
    count, wanted, masters, own = (found[name] for name in ("count", "wanted", "masters", "own"))
    wrong = [name for name in masters if not torch.equal(wanted[name], masters[name])]
    for listener in listeners:
        listener.join()
        wrong += [listener.error] if listener.error or len(listener.found) != count else []
    for name, tensor in wanted.items():
        part = tensor.tensor_split(2)[mesh.rank % 2] if name.endswith("weight") else tensor
        wrong += [f"{name}, streamed"] if not torch.equal(own[name], part) else []
        if not listeners:
            continue
        whole, half = (listener.found.get(name) for listener in listeners)
        # The first pattern that fits says which part.
        wished = tensor.tensor_split(2)[1] if name.endswith(".weight") else tensor
        wrong += [name] if whole is None or not torch.equal(whole, tensor) else []
        wrong += [f"{name}, half"] if half is None or not torch.equal(half, wished) else []
    left = [path.name for path in Path(folder).glob("*.sock")] if mesh.rank == 0 else []
    return {"wrong": wrong, "count": count, "left": left}


def _neox() -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=64))


def _mixtral() -> Any:
    config = tf.MixtralConfig(**MIXTRAL)
    config._experts_implementation = "eager"
    return tf.MixtralForCausalLM(config)


FORMS: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: seeded(_mixtral),
    "neox": lambda: seeded(_neox),
    "lora": adapted,
    "dora": lambda: adapted(use_dora=True),
    "head": lambda: adapted(modules_to_save=["lm_head"]),
    "embedding": lambda: adapted({"tie_word_embeddings": True}, modules_to_save=["embed_tokens"]),
    "tokens": lambda: adapted({"tie_word_embeddings": True}, trainable_token_indices=[3, 5]),
    "moe-lora": lambda: peft.get_peft_model(seeded(_mixtral), peft.LoraConfig(target_modules=["q_proj"])),
}


def has_the_form_of_files(mesh: Mesh, folder: str, sections: dict[str, Any], model: str) -> dict[str, Any]:
    """What differs between the weights that are streamed and those in the files that `save_pretrained` writes of a plain model."""
    root, build = Path(folder), FORMS[model]
    config = settings(folder, run={"max_steps": 2}, **sections)
    found: dict[str, dict[str, torch.Tensor]] = {}

    class Streams(Callback):
        def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
            found["sent"] = {name: tensor.clone() for name, tensor in trainer.stream_weights()}
            found["trained"] = {name: tensor.clone() for name, tensor in trainer.state_dict()}

    with Trainer(build(), config, train_dataset=sentences(), callbacks=[Streams()]) as trainer:
        trainer.fit()
        found["whole"] = dict(trainer.stream_weights())
    plain = build().double()
    before = {name: parameter.clone() for name, parameter in plain.named_parameters()}
    plain.load_state_dict(found["trained"], strict=False)
    changed = [name for name, value in plain.named_parameters() if not torch.equal(value, before[name])]
    if isinstance(plain, peft.PeftModel):
        plain = plain.merge_and_unload()
    if mesh.rank == 0:
        plain.save_pretrained(root / "plain")
    mesh.world.barrier("files")
    files = [load_file(path) for path in (root / "plain").glob("*.safetensors")]
    wanted = {name: tensor for file in files for name, tensor in file.items()}
    wrong = [f"names: {sorted(set(wanted) ^ set(found['sent']))}"] if set(wanted) != set(found["sent"]) else []
    wrong += [
        f"{name}, {when}"
        for when in ("sent", "whole")
        for name, tensor in found[when].items()
        if name in wanted and not torch.allclose(tensor, wanted[name], rtol=0, atol=1e-14)
    ]
    return {"wrong": wrong, "changed": len(changed), "names": sorted(wanted)}


def fails(mesh: Mesh, folder: str) -> dict[str, Any]:
    """What is said when receivers are not there, leave, or do not know the token; and that training goes on."""
    config = settings(folder, run={"max_steps": 3})
    said: dict[str, Any] = {}

    def attempt(name: str, trainer: Any, path: Path, **options: Any) -> None:
        try:
            trainer.send_weights(str(path), timeout_seconds=2, **options)
            said[name] = ""
        except TransferError as error:
            said[name] = str(error)

    with Trainer(seeded(llama), config, train_dataset=sentences()) as trainer:
        attempt("nobody", trainer, Path(folder, "none.sock"))
        for name, options, sent in (("leaves", {"most": 3}, {}), ("token", {"token": "a"}, {"token": "b"})):
            path, listener = Path(folder, f"{name}.sock"), None
            if mesh.rank == 0:
                listener = _Listener(str(path), **options)
            _ready(mesh, [path])
            attempt(name, trainer, path, **sent)
            if listener is not None:
                listener.join()
                said[f"{name}, receiver"] = listener.error
        trainer.fit()
        said["steps"] = trainer.state.step
    return said


def _small(config_class: Any, **more: Any) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return config_class(**shape, vocab_size=VOCABULARY, max_position_embeddings=64, **more)


DIRECTORIES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    # The first name of its tied weight is not the one in files.
    "camembert": lambda: tf.CamembertForCausalLM(_small(tf.CamembertConfig, is_decoder=True)),
    # Positions of sines are not in files.
    "marian": lambda: tf.MarianMTModel(
        tf.MarianConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=VOCABULARY, pad_token_id=0, max_position_embeddings=64,
        )
    ),
}  # fmt: skip


def from_generator(mesh: Mesh, folder: str, model: str) -> dict[str, Any]:
    """What differs between the weights of a generator and those in the files of the model's directory."""
    directory = Path(folder, "model")
    if mesh.rank == 0:
        seeded(DIRECTORIES[model]).double().save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    with Generator(directory, run={"output_dir": folder}) as generator:
        found = {name: tensor.clone() for name, tensor in generator.stream_weights()}
    wanted = load_file(directory / "model.safetensors")
    wrong = sorted(found.keys() ^ wanted.keys())
    return {"wrong": wrong or [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]}


def is_slow(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A receiver that rests longer than ranks wait for each other, but not longer than it may be silent."""
    model, path, listener = seeded(wide), Path(folder, "slow.sock"), None
    config = settings(folder, run={"max_steps": 1}, parallel={"timeout_seconds": 2})
    with Trainer(model, config, train_dataset=sentences()) as trainer:
        if mesh.rank == 0:
            listener = _Listener(str(path), pause=4.0)
        _ready(mesh, [path])
        count = trainer.send_weights(str(path), timeout_seconds=15)
        if listener is not None:
            listener.join()
        trainer.fit()
        return {"count": count, "found": len(listener.found) if listener else count, "steps": trainer.state.step}
