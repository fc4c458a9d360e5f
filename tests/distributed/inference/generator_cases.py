"""Cases on `Generator`, against transformers' own `generate` in one process."""

import copy
import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.distributed.parallel.parallel_cases import MIXTRAL
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
_QWEN3_MOE = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
_OPT = {
    "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "word_embed_proj_dim": 32,
}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "init_std": 0.3,
}  # fmt: skip


def _eager(config: Any) -> Any:
    """Experts in a loop: the library's grouped product knows no float64."""
    config._experts_implementation = "eager"
    return config


_LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 8}
_ROPE: dict[str, Any] = {
    "longrope": {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, **_LONGROPE},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
}
_BERT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 32, "initializer_range": 0.3,
}  # fmt: skip
_QWEN3_NEXT = {
    **_QWEN3_MOE, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_LLAMA4 = {
    **LLAMA, "head_dim": 8, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 4,
    "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48,
}  # fmt: skip
_GEMMA4 = {
    **LLAMA, "head_dim": 8, "global_head_dim": 12, "sliding_window": 4, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip

_PICTURES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
_T5_GEMMA = {**LLAMA, **_ENDS, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}


MODELS: dict[str, Any] = {
    "llama": lambda: llama(**_ENDS),
    "llama-deep": lambda: llama(**_ENDS, num_hidden_layers=4),
    "llama-heads": lambda: llama(**_ENDS, num_key_value_heads=1),
    "gpt2": gpt2,
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**LLAMA, head_dim=8, tie_word_embeddings=True)),
    "mixtral": lambda: tf.MixtralForCausalLM(_eager(tf.MixtralConfig(**MIXTRAL))),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(_eager(tf.Qwen3MoeConfig(**_QWEN3_MOE))),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**LLAMA, sliding_window=4)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**LLAMA, head_dim=8, sliding_window=4, query_pre_attn_scalar=8)
    ),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**LLAMA)),
    "opt": lambda: tf.OPTForCausalLM(tf.OPTConfig(**_OPT)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{**LLAMA, **_ENDS})),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(**_T5, pad_token_id=0, eos_token_id=5, decoder_start_token_id=1)
    ),
    "bart": lambda: tf.BartForConditionalGeneration(
        tf.BartConfig(**_BART, pad_token_id=0, eos_token_id=5, bos_token_id=2, decoder_start_token_id=1)
    ),
}
_RECURRENT_GEMMA = {
    **{name: value for name, value in LLAMA.items() if name != "rms_norm_eps"}, "num_hidden_layers": 6, "num_key_value_heads": 2,
    "lru_width": 32, "attention_window_size": 4,
}  # fmt: skip
_LED = {
    **{name: value for name, value in _BART.items() if name != "max_position_embeddings"}, "attention_window": 4,
    "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32,
}  # fmt: skip
MODELS |= {
    "recurrent_gemma": lambda: tf.RecurrentGemmaForCausalLM(tf.RecurrentGemmaConfig(**_RECURRENT_GEMMA)),
    "ctrl": lambda: tf.CTRLLMHeadModel(
        tf.CTRLConfig(vocab_size=VOCABULARY, n_embd=32, dff=48, n_layer=2, n_head=4, n_positions=32)
    ),
    "led": lambda: tf.LEDForConditionalGeneration(
        tf.LEDConfig(**_LED, pad_token_id=0, eos_token_id=5, bos_token_id=2, decoder_start_token_id=1)
    ),
    "bart-decoder": lambda: tf.BartForCausalLM(
        tf.BartConfig(**_BART, pad_token_id=0, eos_token_id=5, bos_token_id=2, forced_eos_token_id=5)
    ),
    "bert": lambda: tf.BertLMHeadModel(tf.BertConfig(**_BERT, is_decoder=False)),
    "longrope": lambda: llama(**_ENDS, rope_parameters=_ROPE["longrope"], use_cache=True),
    "dynamic": lambda: llama(**_ENDS, rope_parameters=_ROPE["dynamic"], max_position_embeddings=6, use_cache=True),
    "qwen3_next": lambda: tf.Qwen3NextForCausalLM(_eager(tf.Qwen3NextConfig(**_QWEN3_NEXT))),
    "llama4": lambda: tf.Llama4ForCausalLM(_eager(tf.Llama4TextConfig(**_LLAMA4))),
    # It sees pictures, in which attention looks at all places, in one stage of a pipeline alone.
    "git": lambda: tf.GitForCausalLM(
        tf.GitConfig(**_BERT, **_ENDS, vision_config={**_PICTURES, "num_hidden_layers": 1})
    ),
    "moshi": lambda: tf.MoshiForCausalLM(tf.MoshiConfig(**LLAMA, head_dim=8, ffn_dim=48, sliding_window=4)),
    "t5gemma": lambda: tf.T5GemmaForConditionalGeneration(
        tf.T5GemmaConfig(encoder=_T5_GEMMA, decoder=_T5_GEMMA, vocab_size=VOCABULARY, **_ENDS, decoder_start_token_id=1)
    ),
    "gemma4": lambda: tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**_GEMMA4)),
}
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
) -> dict[str, Any]:
    """What differs from one process, how far log-probabilities are apart, and what memory is for."""
    reference, directory = sharp(model), Path(folder, model)
    build._PASSING = readers._WINDOW = 500  # A parameter comes in many parts.
    if mesh.rank == 0:
        reference.save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    sections = {**sections, "parallel": {"timeout_seconds": 20, **sections.get("parallel", {})}}
    sections["run"] = {"output_dir": folder}
    if model in ("mixtral", "qwen3_moe", "qwen3_next", "llama4"):
        sections["model"] = {"config": {"experts_implementation": "eager"}}
    rounds: list[list[int]] = []
    with _unexpected_reads() as unexpected, Generator(directory, **sections) as generator:
        found = generator.generate(
            PROMPTS[:prompts],
            batch=batch,
            max_new_tokens=NEW,
            on_results=lambda results: rounds.append(sorted(results)),
        )
        again = generator.generate(PROMPTS[:1], max_new_tokens=NEW)
        memory = {purpose.name: nbytes for purpose, nbytes in generator.engine.ledger.by_purpose().items() if nbytes}
        trained = [parameter.requires_grad for parameter in generator.engine.model.parameters()]
    wrong, apart = [], 0.0
    for result, prompt in zip([*found, *again], [*PROMPTS[:prompts], PROMPTS[0]], strict=True):
        tokens, logprobs = alone(reference, prompt)
        if result.tokens != tokens or result.prompt_tokens != len(prompt) or result.new_tokens != len(tokens):
            wrong.append(f"{prompt}: {result.tokens} for {tokens}")
        elif result.finish != ("stop" if tokens[-1] == reference.generation_config.eos_token_id else "length"):
            wrong.append(f"{prompt}: {result.finish}")
        else:
            apart = max(apart, *(abs(a - b) for a, b in zip(result.logprobs or [], logprobs, strict=True)))
    return {
        "wrong": wrong,
        "apart": apart,
        "memory": memory,
        "trained": any(trained),
        "rounds": rounds,
        "whole": sum(parameter.nbytes for parameter in reference.parameters()),
        "unexpected": unexpected,
        "kinds": len({tuple(each.tokens) for each in found}),
    }


def takes(mesh: Mesh, folder: str, tier: str) -> dict[str, int]:
    """Bytes of memory that a start and a generation take at most, those that are left when the generator is closed and its name
    still there, those of the model, and those that are copied to other files."""
    sizes = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes)).bfloat16()
    model.save_pretrained(folder)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    del model
    sections: Any = {"offload": {"parameters": tier}, "run": {"output_dir": folder}}
    Generator(folder, **sections).close()  # Imports what it needs.
    gc.collect()
    base = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # The highest mark starts again.
    with Generator(folder, **sections) as generator:
        starting = peak_bytes() - base
        generator.generate(PROMPTS, max_new_tokens=3)
        copied = generator.engine._tiers.file().nbytes if tier == "file" else 0
        generating = peak_bytes() - base
        gc.disable()
    left = resident_bytes() - base
    gc.enable()
    with pytest.raises(PhaseError, match=r"ended with close\(\)"):
        generator.encode("a")
    return {"whole": whole, "starting": starting, "generating": generating, "left": left, "copied": copied}


def reads_into_place(mesh: Mesh, folder: str, shard: str) -> dict[str, Any]:
    """Whether tokens are those of one process, what part of the weights in the model's own files goes through buffers, and whether
    a copy of them gives the log-probabilities that they give in memory.

    Each weight has the length of some blocks, and begins in the middle of a block of its file.
    """
    sizes = {
        **LLAMA,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "vocab_size": 1024,
        "num_key_value_heads": 4,
        **_ENDS,
    }
    reference, directory = seeded(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))), Path(folder, "straight")
    if mesh.rank == 0:
        reference.save_pretrained(directory, max_shard_size=shard)
    mesh.world.barrier("the model's directory")
    begins = sorted({entry.begin % BLOCK for entry in TensorFiles(directory).entries.values()})
    copied: dict[int, int] = {}
    with _noting(copied), Generator(directory, offload={"parameters": "file"}, run={"output_dir": folder}) as generator:
        found = generator.generate(PROMPTS, max_new_tokens=NEW)
    logprobs = []
    for offload in ({}, {"parameters": "file", "directory": str(Path(folder, "swap"))}):
        with Generator(directory, offload=offload, run={"output_dir": folder}) as generator:
            logprobs.append([result.logprobs for result in generator.generate(PROMPTS, max_new_tokens=NEW)])
    tokens = [result.tokens == alone(reference, prompt)[0] for result, prompt in zip(found, PROMPTS, strict=True)]
    whole = sum(parameter.nbytes for parameter in reference.parameters())
    return {
        "same": all(tokens),
        "begins": begins,
        "copied": sum(copied.values()) / whole,
        "bits": logprobs[0] == logprobs[1],
    }


@contextmanager
def _noting(lengths: dict[int, int]) -> Iterator[None]:
    """Note the lengths of what goes through buffers of the file tier, by its address in memory."""
    around = FileSlot._around

    def noted(slot: FileSlot, at: int, data: torch.Tensor) -> tuple[int, torch.Tensor]:
        begin, memory = around(slot, at, data)
        if memory is not data:
            lengths[data.data_ptr()] = data.numel()
        return begin, memory

    FileSlot._around = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSlot._around = around  # type: ignore[method-assign]


def from_a_run(mesh: Mesh, folder: str) -> dict[str, Any]:
    """What differs from the trained model, by the run's directory and by that of its checkpoint."""
    config = settings(folder, checkpoint={"every_steps": 2}, run={"max_steps": 2, "name": "trained"})
    with Trainer(seeded(lambda: llama(**_ENDS)), config, train_dataset=sentences()) as trainer:
        trainer.fit()
        reference = seeded(lambda: llama(**_ENDS)).double().eval()
        reference.load_state_dict(dict(trainer.state_dict()), strict=False)
    wanted = [alone(reference, prompt)[0] for prompt in PROMPTS[:2]]
    wrong = []
    checkpoint = CheckpointStore(Path(folder, "trained", "checkpoints")).path(2)
    for source in (Path(folder, "trained"), checkpoint):
        for tensor in (1, mesh.world_size):
            sections: Any = {"parallel": {"tensor": tensor}, "run": {"output_dir": folder}}
            with Generator(source, precision={"compute": "float64"}, **sections) as generator:
                found = [each.tokens for each in generator.generate(PROMPTS[:2], max_new_tokens=NEW)]
                if found != wanted:
                    wrong.append(f"{source} under tensor {tensor}: {found} for {wanted}")
    return {"wrong": wrong}


def penalises(mesh: Mesh, folder: str) -> list[Any]:
    """The continuations of prompts whose tokens an encoder-decoder is not to repeat, and what they are by themselves.

    What they would be padded with is the token that the first one is continued by.
    """
    reference, directory = sharp("t5"), Path(folder, "t5")
    if mesh.rank == 0:
        reference.save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    fields = {"pad_token_id": alone(reference, PROMPTS[0])[0][0], "encoder_no_repeat_ngram_size": 1}
    with Generator(directory, zero={"stage": 0}, run={"output_dir": folder}) as generator:
        found = generator.generate(PROMPTS, batch=2, max_new_tokens=NEW, **fields)
    return [[each.tokens, alone(reference, prompt, **fields)[0]] for each, prompt in zip(found, PROMPTS, strict=True)]


def refuses(mesh: Mesh, folder: str) -> dict[str, Any]:
    """What is refused, by what was asked, which the generator outlives; and what it draws by a seed."""
    directory = Path(folder, "gpt2")
    if mesh.rank == 0:
        sharp("gpt2").save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    messages: dict[str, Any] = {}
    with Generator(directory, run={"output_dir": folder}, parallel={"timeout_seconds": 10}) as generator:
        asked: dict[str, tuple[Any, dict[str, Any]]] = {
            "none": ([], {}),
            "text": (["Once"], {}),
            "no prompt": ([[]], {}),
            "token": ([[1], [VOCABULARY]], {}),
            "long": ([[1] * 30], {"max_new_tokens": 5}),
            "field": ([[1]], {"max_new_token": 5}),
            "several": ([[1]], {"num_return_sequences": 2}),
            "differ": ([[1 + mesh.rank]], {}),
        }
        for name, (prompts, fields) in asked.items():
            try:
                generator.generate(prompts, **fields)
                messages[name] = ""
            except ValueError as error:
                messages[name] = f"{type(error).__name__}: {error}"
        drawn: Any = {"do_sample": True, "max_new_tokens": 9}
        messages["sampled"] = [generator.generate([[1, 2]], seed=seed, **drawn)[0].tokens for seed in (3, 3, 4)]
        # By requests that join a running batch, by length together, and one by one.
        ways: tuple[dict[str, Any], ...] = ({}, {"use_cache": False}, {"use_cache": False, "batch": 1})
        alike: list[Any] = [
            {"input_ids": prompt, "seed": seed} for seed, prompt in enumerate([[1, 2], [3, 4], [5, 6], [7]])
        ]
        messages["ways"] = [[each.tokens for each in generator.generate(alike, **drawn, **way)] for way in ways]
        messages["ways"].append([_drawn(sharp("gpt2"), prompt["input_ids"], prompt["seed"], drawn) for prompt in alike])
    try:
        generator.generate([[1]])
    except PhaseError as error:
        messages["closed"] = str(error)
    return messages


def refuses_states_in_stages(mesh: Mesh, folder: str) -> str:
    """What is said of a model in stages whose modules keep tensors between tokens."""
    directory = Path(folder, "model")
    if mesh.rank == 0:
        sharp("recurrent_gemma").save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    sections: dict[str, Any] = {"run": {"output_dir": folder}, "parallel": {"pipeline": 2, "timeout_seconds": 5}}
    with Generator(directory, **sections) as generator:
        try:
            generator.generate([[4]], max_new_tokens=3)
        except ZeromeshError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def is_not_finite(mesh: Mesh, folder: str, sections: dict[str, Any]) -> list[Any]:
    """What is said, and which prompts have a result, where the embedding of a token in the second prompt is NaN."""
    directory = Path(folder, "model")
    if mesh.rank == 0:
        model = sharp("llama")
        with torch.no_grad():
            model.model.embed_tokens.weight[7] = float("nan")
        model.save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    said: list[Any] = []
    ways: tuple[dict[str, Any], ...] = ({}, {"do_sample": True}, {"use_cache": False})
    with Generator(directory, run={"output_dir": folder}, **sections) as generator:
        for way in (*ways, {"do_sample": True, "use_cache": False}):
            found: dict[int, Any] = {}
            try:
                prompts = [[9, 3], [7, 2], [4]]
                generator.generate(prompts, on_results=found.update, suppress_tokens=[7], max_new_tokens=3, **way)
            except NonFiniteError as error:
                said.append([str(error), sorted(found)])
    return said


def _drawn(model: Any, prompt: list[int], seed: int, fields: dict[str, Any]) -> list[int]:
    """The new tokens that the library draws for one prompt by itself."""
    ids = torch.tensor([prompt])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **fields)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


def loses_a_rank(mesh: Mesh, folder: str) -> dict[str, Any]:
    """What a generation says whose last rank is killed after the first results, and what came before."""
    directory = Path(folder, "llama")
    if mesh.rank == 0:
        sharp("llama").save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    found: dict[int, Any] = {}

    def on_results(results: Any) -> None:
        found.update(results)
        if mesh.rank == mesh.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    prompts = [{"input_ids": [number, 9], "max_new_tokens": 2 if number < 2 else 25} for number in range(8)]
    sections: dict[str, Any] = {"run": {"output_dir": folder}, "parallel": {"timeout_seconds": 5}}
    with Generator(directory, zero={"stage": 0}, **sections) as generator:
        began = time.monotonic()
        try:
            generator.generate(prompts, batch=4, on_results=on_results, eos_token_id=-1)
        except CollectiveError as error:
            return {"message": str(error), "seconds": time.monotonic() - began, "found": sorted(found)}
    return {"message": "", "seconds": 0.0, "found": sorted(found)}


def finds_flips(mesh: Mesh, folder: str, sections: dict[str, Any]) -> dict[str, Any]:
    """What a check says after one bit of a weight has changed on the last rank, of each bucket in turn, and of a buffer."""
    directory = Path(folder, "gpt2")
    if mesh.rank == 0:
        sharp("gpt2").save_pretrained(directory)
    mesh.world.barrier("the model's directory")
    said: dict[str, Any] = {"flipped": {}}
    with Generator(directory, run={"output_dir": folder}, **sections) as generator:
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
                said["flipped"][name] = str(error)
            if flips:
                places[name] ^= 1
        generator.check_weights()
    return said


def cancels(mesh: Mesh, folder: str, sections: dict[str, Any]) -> list[str]:
    """How requests end of which one is cancelled before any rank has heard of it."""
    model, finishes = sharp("llama"), ["open", "open", "open"]
    if mesh.rank == 0:
        model.save_pretrained(Path(folder, "model"))
    mesh.world.barrier("the model's directory")
    with Generator(Path(folder, "model"), run={"output_dir": folder}, **sections) as generator:
        inbox = Inbox() if mesh.rank == 0 else None
        if inbox is not None:

            def note(progress: Progress) -> None:
                finishes[progress.number] = f"{progress.finish} after {len(progress.tokens)}"

            for _ in finishes:
                inbox.submit([9, 3, 11], note, fields={"max_new_tokens": 4, "eos_token_id": None})
            inbox.cancel(1)
            inbox.stop()
        generator.serve(inbox, batch=2)
    return finishes if mesh.rank == 0 else []
