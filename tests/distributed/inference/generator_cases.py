"""Cases on `Generator`, against transformers' own `generate` in one process."""

import copy
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.distributed.parallel.parallel_cases import MIXTRAL
from tests.support.plain import like
from tests.support.trainer_cases import LLAMA, VOCABULARY, gpt2, llama, seeded, sentences, settings
from zeromesh import Generator, Trainer
from zeromesh.checkpoint.io import reader as readers
from zeromesh.checkpoint.io.reader import TensorFiles
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CollectiveError, NonFiniteError, PhaseError, WeightsDifferError, ZeromeshError
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import FileSlot, peak_bytes, resident_bytes
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.trainer.generation.requests import Inbox, Progress
from zeromesh.units import build
from zeromesh.units.unit import all_buckets

_ENDS = {"pad_token_id": 0, "eos_token_id": 5, "bos_token_id": None}
_STARTS = {"pad_token_id": 0, "eos_token_id": 5, "decoder_start_token_id": 1}
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}  # fmt: skip
_BERT = {**SIZES, "initializer_range": 0.3}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
_LED = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY, "init_std": 0.3,
}  # fmt: skip
_BART = {**_LED, "max_position_embeddings": 32}
_HEADS = {**LLAMA, "head_dim": 8}
_EXPERTS = {**_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LAYERS = ["sliding_attention", "full_attention"]
_T5_GEMMA = {**_HEADS, **_ENDS, "sliding_window": 4, "query_pre_attn_scalar": 8}


def _made(head: str, kind: str, fields: dict[str, Any], **more: Any) -> Callable[[], Any]:
    """Builds a model of a kind, with experts in a loop: the library's grouped product knows no float64."""

    def build() -> Any:
        config = tf.AutoConfig.for_model(kind, **{**fields, **more})
        config._experts_implementation = "eager"
        return getattr(tf, f"AutoModelFor{head}").from_config(config)

    return build


causal, seq2seq = partial(_made, "CausalLM"), partial(_made, "Seq2SeqLM")


def _roped(kind: str, **more: Any) -> Callable[[], Any]:
    rope = {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 8}
    return lambda: llama(**_ENDS, rope_parameters=rope, use_cache=True, **more)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(**_ENDS),
    "llama-deep": lambda: llama(**_ENDS, num_hidden_layers=4),
    "llama-heads": lambda: llama(**_ENDS, num_key_value_heads=1),
    "gpt2": gpt2,
    "qwen3": causal("qwen3", _HEADS, tie_word_embeddings=True),
    "mixtral": causal("mixtral", MIXTRAL),
    "qwen3_moe": causal("qwen3_moe", _EXPERTS),
    "mistral": causal("mistral", LLAMA, sliding_window=4),
    "gemma2": causal("gemma2", _HEADS, sliding_window=4, query_pre_attn_scalar=8),
    "neox": causal("gpt_neox", LLAMA),
    "opt": causal("opt", SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "phi3": causal("phi3", {**LLAMA, **_ENDS}),
    "t5": seq2seq("t5", {**_T5, **_STARTS}),
    "bart": seq2seq("bart", {**_BART, **_STARTS}, bos_token_id=2),
    "recurrent_gemma": causal(
        "recurrent_gemma", LLAMA, num_hidden_layers=6, lru_width=32, attention_window_size=4
    ),
    "ctrl": causal("ctrl", {"vocab_size": VOCABULARY, "n_embd": 32, "n_positions": 32}, dff=48, n_layer=2, n_head=4),
    "led": seq2seq(
        "led", {**_LED, **_STARTS}, bos_token_id=2, attention_window=4, max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
    ),
    "bart-decoder": causal("bart", _BART, pad_token_id=0, eos_token_id=5, bos_token_id=2, forced_eos_token_id=5),
    "bert": causal("bert", _BERT, is_decoder=False),
    "longrope": _roped("longrope"),
    "dynamic": _roped("dynamic", max_position_embeddings=6),
    "qwen3_next": causal(
        "qwen3_next", _EXPERTS, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, shared_expert_intermediate_size=24, layer_types=["linear_attention", "full_attention"],
    ),
    "llama4": causal(
        "llama4_text", _HEADS, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], attention_chunk_size=4,
        num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, intermediate_size_mlp=48,
    ),
    # It sees pictures, in which attention looks at all places, in one stage of a pipeline alone.
    "git": causal(
        "git", {**_BERT, **_ENDS},
        vision_config={**SIZES, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8},
    ),
    "moshi": lambda: tf.MoshiForCausalLM(tf.MoshiConfig(**_HEADS, ffn_dim=48, sliding_window=4)),
    "t5gemma": seq2seq(
        "t5gemma", {"encoder": _T5_GEMMA, "decoder": _T5_GEMMA, "vocab_size": VOCABULARY}, **_ENDS,
        decoder_start_token_id=1,
    ),
    "gemma4": causal(
        "gemma4_text", _HEADS, global_head_dim=12, sliding_window=4, hidden_size_per_layer_input=0, layer_types=_LAYERS
    ),
}  # fmt: skip
NEW = 7
PROMPTS = [[9, 3, 11, 60], [4], [17, 8], [22, 41, 33, 9, 12, 30, 2], [40, 7, 7], [1, 2, 3, 4, 5]]


def sharp(name: str) -> Any:
    """The model in float64, the same on every rank, with larger weights than it begins with, so that prompts matter."""
    model = seeded(MODELS[name]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


def alone(model: Any, prompt: list[int], **fields: Any) -> tuple[list[int], list[float]]:
    """The new tokens of one prompt by itself, greedily, and their log-probabilities."""
    # What a model keeps of earlier texts is none of this one's.
    model, fields = copy.deepcopy(model), {"max_new_tokens": NEW, "pad_token_id": 0, **fields}
    ids, logits = torch.tensor([prompt]), []
    begin = 1 if model.config.is_encoder_decoder else len(prompt)
    watch = model.register_forward_hook(lambda module, arguments, outputs: logits.append(outputs.logits[0, -1]))
    with torch.no_grad():
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **fields)[0, begin:]
    watch.remove()
    logprobs = torch.stack(logits).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs.tolist()


def stored(mesh: Mesh, folder: str, model: Any, **how: Any) -> Path:
    """The directory in which rank 0 has saved a model."""
    directory = Path(folder, "model")
    if mesh.rank == 0:
        model.save_pretrained(directory, **how)
    mesh.world.barrier("the model's directory")
    return directory


def patient(sections: dict[str, Any]) -> dict[str, Any]:
    """Sections whose ranks wait for each other longer than usual."""
    return {**sections, "parallel": {"timeout_seconds": 30, **sections.get("parallel", {})}}


@contextmanager
def _unexpected_reads() -> Iterator[list[Any]]:
    """Collects what is read of a model's files without having been expected, once something is."""
    found: list[Any] = []
    expected: dict[str, list[tuple[int, int]]] = {}
    expect, fill = TensorFiles.expect, TensorFiles.fill

    def note(files: TensorFiles, ranges: Any) -> None:
        ranges = list(ranges)
        for name, start, end in ranges:
            expected.setdefault(name, []).append((start, end))
        expect(files, ranges)

    def look(files: TensorFiles, name: str, rows: StridedRows, interval: Interval, out: torch.Tensor) -> None:
        hull = rows.hull(interval)
        if expected and not any(begin <= hull.start and hull.end <= end for begin, end in expected.get(name, ())):
            found.append([name, hull.start, hull.end])
        fill(files, name, rows, interval, out)

    TensorFiles.expect, TensorFiles.fill = note, look  # type: ignore[method-assign]
    try:
        yield found
    finally:
        TensorFiles.expect, TensorFiles.fill = expect, fill  # type: ignore[method-assign]


def agrees(
    mesh: Mesh, folder: str, model: str, sections: dict[str, Any], batch: int = 2, prompts: int = len(PROMPTS)
) -> list[list[int]]:
    """Tokens and log-probabilities are those of one process, and memory is for parameters alone; the rounds of results."""
    reference = sharp(model)
    build._CHUNK = readers._WINDOW = 500  # A parameter comes in many parts.
    directory = stored(mesh, folder, reference)
    sections = {**patient(sections), "run": {"output_dir": folder}}
    if model in ("mixtral", "qwen3_moe", "qwen3_next", "llama4"):
        sections["model"] = {"config": {"experts_implementation": "eager"}}
    rounds: list[list[int]] = []
    with _unexpected_reads() as unexpected, Generator(directory, **sections) as generator:
        found = generator.generate(
            PROMPTS[:prompts], batch=batch, max_new_tokens=NEW, on_results=lambda results: rounds.append(sorted(results))
        )
        again = generator.generate(PROMPTS[:1], max_new_tokens=NEW)
        memory = {purpose.name for purpose, nbytes in generator.engine.ledger.by_purpose().items() if nbytes}
        assert not any(parameter.requires_grad for parameter in generator.engine.model.parameters())
    assert not unexpected
    # Nothing but the parameters: no gradients, no moments, no master weights beside them.
    assert memory <= {"PARAMETERS", "STAGING", "COMMUNICATORS"}
    for result, prompt in zip([*found, *again], [*PROMPTS[:prompts], PROMPTS[0]], strict=True):
        tokens, logprobs = alone(reference, prompt)
        finish = "stop" if tokens[-1] == reference.generation_config.eos_token_id else "length"
        like(result.tokens, tokens, where=str(prompt))
        assert (result.prompt_tokens, result.new_tokens, result.finish) == (len(prompt), len(tokens), finish)
        if result.logprobs:
            like(result.logprobs, logprobs, rel=0, abs_=1e-9)
    several = len({tuple(each.tokens) for each in found}) > 1
    assert several or prompts == 1, "prompts are continued by one text, which any mistake would give too"
    assert sorted(number for numbers in rounds for number in numbers) == list(range(prompts))
    return rounds


def takes(mesh: Mesh, folder: str, tier: str) -> None:
    """A start and a generation take a rank's part of the model and little more, which is left when the generator is closed and its
    name still there; nothing is copied to other files."""
    sizes = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).bfloat16()
    model.save_pretrained(folder)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert whole > 60 << 20
    del model
    sections: Any = {"offload": {"parameters": tier}, "run": {"output_dir": folder}}
    Generator(folder, **sections).close()  # Imports what it needs.
    gc.collect()
    base, part = resident_bytes(), whole if tier == "none" else 0
    Path("/proc/self/clear_refs").write_text("5")  # The highest mark starts again.
    with Generator(folder, **sections) as generator:
        assert part <= peak_bytes() - base <= part + (12 << 20)
        generator.generate(PROMPTS, max_new_tokens=3)
        assert tier == "none" or generator.engine._tiers.file().nbytes == 0
        assert peak_bytes() - base <= part + (48 << 20)
        gc.disable()
    left = resident_bytes() - base
    gc.enable()
    assert left <= 40 << 20, left
    with pytest.raises(PhaseError, match=r"ended with close\(\)"):
        generator.encode("a")


def reads_into_place(mesh: Mesh, folder: str, shard: str) -> None:
    """Weights in the model's own files are read into place, all of one file and most of two, and give the tokens of one process.

    A copy of them gives the log-probabilities that they give in memory. Each weight has the length of some blocks, and begins in
    the middle of a block of its file.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 4, **_ENDS}
    reference = seeded(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**{**LLAMA, **sizes})))
    directory = stored(mesh, folder, reference, max_shard_size=shard)
    begins = {entry.begin % BLOCK for entry in TensorFiles(directory).entries.values()}
    copied: dict[int, int] = {}
    with _noting(copied), Generator(directory, offload={"parameters": "file"}, run={"output_dir": folder}) as generator:
        found = generator.generate(PROMPTS, max_new_tokens=NEW)
    logprobs = []
    for offload in ({}, {"parameters": "file", "directory": str(Path(folder, "swap"))}):
        with Generator(directory, offload=offload, run={"output_dir": folder}) as generator:
            logprobs.append([result.logprobs for result in generator.generate(PROMPTS, max_new_tokens=NEW)])
    assert [result.tokens for result in found] == [alone(reference, prompt)[0] for prompt in PROMPTS]
    assert logprobs[0] == logprobs[1], "a copy at whole blocks is not what is in memory"
    part = sum(copied.values()) / sum(parameter.nbytes for parameter in reference.parameters())
    if shard == "1GB":
        assert len(begins - {0}) == len(begins) == 1
        assert part == 0
    else:
        assert len(begins) > 1
        assert 0 < part < 0.4


@contextmanager
def _noting(lengths: dict[int, int]) -> Iterator[None]:
    """Note the lengths of what goes through buffers of the file tier, by its address in memory."""
    around = FileSlot._aligned_around

    def noted(slot: FileSlot, at: int, data: torch.Tensor) -> tuple[int, torch.Tensor]:
        begin, memory = around(slot, at, data)
        if memory is not data:
            lengths[data.data_ptr()] = data.numel()
        return begin, memory

    FileSlot._aligned_around = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSlot._aligned_around = around  # type: ignore[method-assign]


def from_a_run(mesh: Mesh, folder: str) -> None:
    """A run's directory and that of its checkpoint give what the trained model gives."""
    config = settings(folder, checkpoint={"every_steps": 2}, run={"max_steps": 2, "name": "trained"})
    with Trainer(seeded(MODELS["llama"]), config, train_dataset=sentences()) as trainer:
        trainer.fit()
        reference = seeded(MODELS["llama"]).double().eval()
        reference.load_state_dict(dict(trainer.state_dict()), strict=False)
    wanted = [alone(reference, prompt)[0] for prompt in PROMPTS[:2]]
    checkpoint = CheckpointStore(Path(folder, "trained", "checkpoints")).path(2)
    for source in (Path(folder, "trained"), checkpoint):
        for tensor in (1, mesh.world_size):
            sections: Any = {"parallel": {"tensor": tensor}, "run": {"output_dir": folder}}
            with Generator(source, precision={"compute": "float64"}, **sections) as generator:
                found = [each.tokens for each in generator.generate(PROMPTS[:2], max_new_tokens=NEW)]
                assert found == wanted, (source, tensor)


def penalises(mesh: Mesh, folder: str) -> None:
    """Prompts whose tokens an encoder-decoder is not to repeat are continued as by themselves.

    What they would be padded with is the token that the first one is continued by.
    """
    reference = sharp("t5")
    fields = {"pad_token_id": alone(reference, PROMPTS[0])[0][0], "encoder_no_repeat_ngram_size": 1}
    with Generator(stored(mesh, folder, reference), zero={"stage": 0}, run={"output_dir": folder}) as generator:
        found = generator.generate(PROMPTS, batch=2, max_new_tokens=NEW, **fields)
    assert [each.tokens for each in found] == [alone(reference, prompt, **fields)[0] for prompt in PROMPTS]


def refuses(mesh: Mesh, folder: str) -> None:
    """What is refused, which the generator outlives; and what it draws by a seed."""
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        "DataError: there are no prompts": ([], {}),
        "DataError: prompt 0 is text, and the model has no tokenizer": (["Once"], {}),
        "DataError: prompt 0 is text, a list of token ids": ([[]], {}),
        "DataError: prompt 1 has token 64, and the model knows 64": ([[1], [VOCABULARY]], {}),
        "DataError: prompt 0: the prompt has 30 tokens, which with the new ones become 35": (
            [[1] * 30], {"max_new_tokens": 5},
        ),
        "max_new_token is no field of transformers' GenerationConfig": ([[1]], {"max_new_token": 5}),
        "num_return_sequences is not taken": ([[1]], {"num_return_sequences": 2}),
        "ranks were given different things: prompts is": ([[1 + mesh.rank]], {}),
    }  # fmt: skip
    directory = stored(mesh, folder, sharp("gpt2"))
    with Generator(directory, run={"output_dir": folder}, parallel={"timeout_seconds": 10}) as generator:
        for message, (prompts, fields) in asked.items():
            with pytest.raises(ValueError) as caught:
                generator.generate(prompts, **fields)
            assert message in f"{type(caught.value).__name__}: {caught.value}"
        drawn: Any = {"do_sample": True, "max_new_tokens": 9}
        first, again, other = (generator.generate([[1, 2]], seed=seed, **drawn)[0].tokens for seed in (3, 3, 4))
        assert first == again != other
        # By requests that join a running batch, by length together, and one by one.
        ways: tuple[dict[str, Any], ...] = ({}, {"use_cache": False}, {"use_cache": False, "batch": 1})
        alike: list[Any] = [{"input_ids": prompt, "seed": seed} for seed, prompt in enumerate([[1, 2], [3, 4], [5, 6], [7]])]
        wanted = [_drawn(sharp("gpt2"), prompt["input_ids"], prompt["seed"], drawn) for prompt in alike]
        assert len(set(map(tuple, wanted))) == 4
        for way in ways:
            found = [each.tokens for each in generator.generate(alike, **drawn, **way)]
            assert found == wanted, f"what is drawn depends on the prompt's seed alone: {way}"
    with pytest.raises(PhaseError, match=r"this generator ended with close\(\); make a new one"):
        generator.generate([[1]])


def refuses_states_in_stages(mesh: Mesh, folder: str) -> None:
    """A model in stages whose modules keep tensors between tokens."""
    sections: dict[str, Any] = {"run": {"output_dir": folder}, "parallel": {"pipeline": 2, "timeout_seconds": 5}}
    with Generator(stored(mesh, folder, sharp("recurrent_gemma")), **sections) as generator:
        why = r"keeps model\.layers.* in its modules between tokens, which microbatches of a pipeline would share"
        with pytest.raises(ZeromeshError, match=why):
            generator.generate([[4]], max_new_tokens=3)


def is_not_finite(mesh: Mesh, folder: str, sections: dict[str, Any]) -> None:
    """Logits that are no numbers end their prompt alone: the embedding of a token in the second prompt is NaN."""
    model = sharp("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    ways: tuple[dict[str, Any], ...] = ({}, {"do_sample": True}, {"use_cache": False})
    with Generator(stored(mesh, folder, model), run={"output_dir": folder}, **sections) as generator:
        for way in (*ways, {"do_sample": True, "use_cache": False}):
            found: dict[int, Any] = {}
            with pytest.raises(NonFiniteError, match="NaN or infinite for prompt 1; the other 2 have a result"):
                generator.generate([[9, 3], [7, 2], [4]], on_results=found.update, suppress_tokens=[7], max_new_tokens=3, **way)
            assert sorted(found) == [0, 2]


def _drawn(model: Any, prompt: list[int], seed: int, fields: dict[str, Any]) -> list[int]:
    """The new tokens that the library draws for one prompt by itself."""
    ids = torch.tensor([prompt])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **fields)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


def loses_a_rank(mesh: Mesh, folder: str) -> None:
    """The last rank is killed after the first results: those without one are named, and the others were handed over."""
    found: dict[int, Any] = {}

    def on_results(results: Any) -> None:
        found.update(results)
        if mesh.rank == mesh.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    prompts = [{"input_ids": [number, 9], "max_new_tokens": 2 if number < 2 else 25} for number in range(8)]
    sections: dict[str, Any] = {"run": {"output_dir": folder}, "parallel": {"timeout_seconds": 5}}
    with Generator(stored(mesh, folder, sharp("llama")), zero={"stage": 0}, **sections) as generator:
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="rank 1 is gone") as caught:
            generator.generate(prompts, batch=4, on_results=on_results, eos_token_id=-1)
    assert found
    missing = [str(number) for number in range(8) if number not in found]
    assert f"without one are {', '.join(missing)}" in str(caught.value)
    assert time.monotonic() - began < 8


def finds_flips(mesh: Mesh, folder: str, sections: dict[str, Any]) -> None:
    """A check names the weight of which one bit has changed on the last rank, of each bucket in turn, on all ranks."""
    said: dict[str, str] = {}
    with Generator(stored(mesh, folder, sharp("gpt2")), run={"output_dir": folder}, **sections) as generator:
        generator.check_weights()
        places = {}
        for bucket in all_buckets(generator.engine.units):
            for slot in bucket.layout.slots:
                # Of a bucket that is gathered around use a rank has its interval alone.
                kept = bucket.buffer.persistent
                memory = bucket.buffer.full if kept else bucket.master.whole(mesh.device)
                start = slot.where.start if kept else slot.where.start - bucket.interval.start
                if memory is not None and 0 <= start < len(memory):
                    places[slot.spec.name] = memory[start : start + 1].view(torch.int64)
        # Of the last rank, whose stage may be another one.
        for name in mesh.world.gather_json(sorted(places), "names")[-1]:
            flips = mesh.rank == mesh.world_size - 1 and places[name].numel() > 0
            if flips:
                places[name] ^= 1
            try:
                generator.check_weights()
            except WeightsDifferError as error:
                said[name] = str(error)
            if flips:
                places[name] ^= 1
        generator.check_weights()
    assert said
    assert mesh.world.gather_json(said, "what was said") == [said] * mesh.world_size
    for name, message in said.items():
        assert f"ranks hold other values of the same weights:\n{name}" in message
        assert f"rank {mesh.world_size - 1} has " in message
    if "parallel" not in sections:
        assert len(said) == 28, "every parameter"
    if "tensor" in sections.get("parallel", {}):
        # What tensor ranks divide nobody else has.
        assert {"transformer.ln_f.weight", "transformer.h.0.attn.c_proj.bias"} <= set(said)
        assert "transformer.h.0.attn.c_attn.weight" not in said
    if "pipeline" in sections.get("parallel", {}):
        assert any("transformer.wte.weight" in name for name in said)


def cancels(mesh: Mesh, folder: str, sections: dict[str, Any]) -> None:
    """A request is cancelled before any rank has heard of it."""
    finishes: list[str] = []
    with Generator(stored(mesh, folder, sharp("llama")), run={"output_dir": folder}, **sections) as generator:
        inbox = Inbox() if mesh.rank == 0 else None
        if inbox is not None:

            def note(progress: Progress) -> None:
                if progress.finish is not None:
                    finishes.append(f"{progress.number} {progress.finish} after {len(progress.tokens)}")

            for _ in range(3):
                inbox.submit([9, 3, 11], note, fields={"max_new_tokens": 4, "eos_token_id": None})
            inbox.cancel(1)
            inbox.stop()
        generator.serve(inbox, batch=2)
    if mesh.rank == 0:
        assert [each.partition(" after")[0] for each in sorted(finishes)] == ["0 length", "1 cancelled", "2 length"]
        assert sorted(finishes)[1] == "1 cancelled after 0"
