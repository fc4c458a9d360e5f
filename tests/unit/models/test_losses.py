"""A loss is a sum and a count; the chunked head stands for a model's own loss only where it is that loss."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.support.architectures import on_meta, small_model
from zeromesh.errors import ConfigError, DataError, PhaseError
from zeromesh.kernels import chunked_head as chunked
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.losses.trial import examine
from zeromesh.trainer.models.small_copy import InFloat64

KV = {"num_key_value_heads": 2}
EAGER = {"num_local_experts": 4, "experts_implementation": "eager"}  # fused experts have no float64
OPT = {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32, "max_position_embeddings": 32}
T5 = {"d_kv": 8, "d_ff": 48, "decoder_start_token_id": 0, "dropout_rate": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", KV),
    "llama-tied": ("llama", {**KV, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "qwen2": ("qwen2", KV),
    "mistral": ("mistral", KV),
    "mixtral": ("mixtral", {**KV, **EAGER}),
    "mixtral-auxiliary": ("mixtral", {**KV, **EAGER, "output_router_logits": True}),
    "opt": ("opt", OPT),
    "bert-masked": ("bert", {}),
    "t5": ("t5", T5),
    "gemma2": ("gemma2", {**KV, "head_dim": 8}),
    "granite": ("granite", {**KV, "logits_scaling": 8.0}),
    "cohere": ("cohere", KV),
    "cohere2": ("cohere2", {**KV, "logit_scale": 0.3}),
    "gemma3": ("gemma3_text", {**KV, "head_dim": 8, "final_logit_softcapping": 0.5}),
    "granite by 13": ("granite", {**KV, "logits_scaling": 13.0}),
    "nanochat": ("nanochat", {**KV, "final_logit_softcapping": 0.5}),
}
HEADS: dict[str, Any] = {"bert-masked": "masked_lm", "t5": "seq2seq_lm"}
CHANGED = {
    "gemma2": "a factor of 1, capped at 30",
    "gemma3": "a factor of 1, capped at 0.5",
    "nanochat": "a factor of 1, capped at 0.5",
    "granite": "a factor of 0.125",
    "granite by 13": "a factor of 0.0769231",
    "cohere": "a factor of 0.0625",
    "cohere2": "a factor of 0.3",
}


def built(name: str, **changes: Any) -> Any:
    kind, fields = MODELS[name]
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), None)
    return small_model(
        kind, HEADS.get(name, "causal_lm"), vocab_size=90, **{**(ids if kind == "gpt2" else {}), **fields, **changes}
    )


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    return built(name).double().eval()


def batch_of(*, masked: bool = True) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 90, (3, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(1, 1).clone()
    if masked:
        labels[0, :6] = -100
        labels[1] = -100
        labels[2, 9:] = -100
    return {"input_ids": ids, "labels": labels}


def expected_count(model: Any, batch: Mapping[str, torch.Tensor]) -> int:
    shifts = "Masked" not in type(model).__name__ and not model.config.is_encoder_decoder
    labels = batch["labels"][:, 1:] if shifts else batch["labels"]
    return int((labels != -100).sum())


def gradients(model: Any, loss: torch.Tensor, seed: float) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), torch.tensor(seed, dtype=loss.dtype), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), grads, strict=True)}


class DoubledHead(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(hidden)


def subclassed(model: Any) -> None:
    head = DoubledHead(32, 90, bias=False, dtype=torch.float64)
    head.weight = model.lm_head.weight
    model.lm_head = head


def hooked(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda head, inputs, logits: 2.0 * logits)


def replaced(model: Any) -> None:
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden, 2.0 * model.lm_head.weight)


@pytest.mark.parametrize("change", [subclassed, hooked, replaced])
def test_a_head_that_is_not_its_class_own_keeps_its_loss(change: Callable[[Any], None]) -> None:
    """The trial is of the class; a model whose head was changed since then has another loss."""
    model, batch = model_of("llama"), batch_of()
    before = float(model(**batch).loss.detach())
    change(model)
    loss = make_loss(model)
    assert loss.kind == "labels"
    assert loss.causal
    assert "in chunks of tokens" not in str(loss.notes)
    assert "the model's own, with all logits in memory, because" in loss.notes[0]
    with InFloat64():
        own = float(model(**batch).loss.detach())
        found = float(loss(model, batch, seed=1.0).detach()) / loss.count(batch)
    assert found == pytest.approx(own, rel=1e-12)
    assert own != pytest.approx(before, rel=1e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.full), 4, pytest.param(1000, marks=pytest.mark.full), None])
@pytest.mark.parametrize("name", MODELS)
def test_the_chunked_loss_is_the_models_own(name: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, seed = model_of(name), batch_of(), 1 / 64
    count = expected_count(model, batch)
    with InFloat64():
        own = model(**batch).loss * count
        theirs = gradients(model, own, seed)
        loss = make_loss(model)
        changed = f", of logits changed by {CHANGED[name]}" if name in CHANGED else ""
        assert loss.notes[0] == f"loss: cross entropy in chunks of tokens{changed}, equal to the model's own in a trial"
        assert any("auxiliary" in note for note in loss.notes) == (name == "mixtral-auxiliary")
        assert (loss.kind, loss.causal) == ("labels", name not in ("bert-masked", "t5"))
        if chunk is not None:
            monkeypatch.setattr(chunked, "chunk_for", lambda *sizes, **given: chunk)
        assert loss.count(batch) == count
        ours, _, found, _ = loss.run(model, batch, seed=seed)
        torch.testing.assert_close(ours, own, rtol=1e-12, atol=0)
        assert found == count
        largest = max(float(gradient.norm()) for gradient in theirs.values())
        for parameter, gradient in gradients(model, ours, seed).items():
            error = float((gradient - theirs[parameter]).norm())
            assert error <= 1e-12 * (float(theirs[parameter].norm()) + 1e-3 * largest), parameter


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_native_is_mean_times_count(name: str) -> None:
    model, batch = model_of(name), batch_of()
    loss = make_loss(model, mode="native")
    ours = loss(model, batch, seed=1.0)
    assert torch.equal(ours, model(**batch).loss * expected_count(model, batch))


@pytest.mark.parametrize("mode", ["auto", "native"])
@pytest.mark.parametrize("name", ["llama", "mixtral-auxiliary", "bert-masked"])
def test_a_batch_without_targets_gives_zero(name: str, mode: Any) -> None:
    model, batch = model_of(name), batch_of()
    batch["labels"].fill_(-100)
    loss = make_loss(model, mode=mode)
    assert loss.count(batch) == 0
    total = loss(model, batch, seed=1.0)
    assert float(total.detach()) == 0.0
    assert all(bool((gradient == 0).all()) for gradient in gradients(model, total, 1.0).values())


def test_microbatches_add_up() -> None:
    model, batch = model_of("llama"), batch_of()
    loss = make_loss(model)
    parts = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(3)]
    with torch.no_grad():
        total = sum(float(loss(model, part, seed=0.0)) for part in parts)
        assert total == pytest.approx(float(loss(model, batch, seed=0.0)), rel=1e-6)
    assert sum(loss.count(part) or 0 for part in parts) == loss.count(batch)


def test_evaluation_and_other_calls_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "chunk_for", lambda *sizes, **given: 4)
    model, batch = model_of("llama"), batch_of()
    with torch.no_grad():
        before = model(**batch)
        ids = model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False)
        loss = make_loss(model)
        total, _, count, _ = loss.run(model, batch, seed=0.0)
        assert not total.requires_grad
        torch.testing.assert_close(total, (before.loss * count).double(), rtol=1e-6, atol=0)
        assert torch.equal(model(**batch).logits, before.logits)
        assert torch.equal(model(**batch).loss, before.loss)
        assert torch.equal(model.generate(batch["input_ids"][:1], max_new_tokens=4, do_sample=False), ids)


def test_the_head_computes_inside_its_own_call() -> None:
    """An engine's hooks on the head gather its weight before, and release it after: it must not be read elsewhere."""
    model, batch = model_of("llama"), batch_of()
    weight = model.lm_head.weight.data
    model.lm_head.weight.data = torch.full_like(weight, float("nan"))

    def gather(module: Any, _args: Any) -> None:
        module.weight.data = weight

    def release(module: Any, _args: Any, _output: Any) -> None:
        module.weight.data = torch.full_like(weight, float("nan"))

    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(release)
    loss = make_loss(model)
    total = loss(model, batch, seed=0.5)
    grads = gradients(model, total, 0.5)
    assert all(bool(torch.isfinite(gradient).all()) for gradient in grads.values())


CAPPED = "loss: cross entropy in chunks of tokens, of logits changed by a factor of 1, capped at 30, equal"
NO_MEAN = "neither labels nor shifted labels"


@pytest.mark.parametrize(
    ("logits", "loss", "kind", "words"),
    [
        (lambda logits: 30 * torch.tanh(logits / 30), None, "labels", CAPPED),
        # One by one, and neither by a factor nor by a cap.
        (lambda logits: logits / (1 + logits.square()).sqrt(), None, "labels", ""),
        # A term that the chunked head does not see.
        (None, lambda output, labels: output.loss + 1e-6 * output.logits.square().mean(), "labels", ""),
        # A sum where the library has a mean.
        (None, lambda output, labels: output.loss * (labels[:, 1:] != -100).sum(), "examples", NO_MEAN),
    ],
    ids=["cap", "roots", "term", "sum"],
)
def test_the_loss_of_a_users_own_class(logits: Any, loss: Any, kind: str, words: str) -> None:
    """It changes its logits, or makes another loss of the same ones."""

    class Own(tf.LlamaForCausalLM):
        def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
            output = super().forward(*args, labels=labels if loss else None, **kwargs)
            if logits:
                output.logits = logits(output.logits)
            if labels is not None and logits:
                output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
            elif labels is not None:
                output.loss = loss(output, labels)
            return output

    found = make_loss(Own(built("llama").config))
    assert found.kind == kind
    assert ("in chunks of tokens" in str(found.notes)) == (words == CAPPED)
    assert words in found.notes[0]
    assert words != CAPPED or [note.startswith(CAPPED) for note in found.notes] == [True]


def test_a_replaced_loss_function_is_respected() -> None:
    model = model_of("llama")
    model.loss_function = lambda logits, labels, *args, **kwargs: logits.square().mean()
    loss = make_loss(model)
    assert loss.kind == "labels"
    assert "in chunks of tokens" not in str(loss.notes)
    assert "replaced" in loss.notes[0]


def test_the_trial_leaves_no_trace() -> None:
    """And dropout does not disturb it."""
    model = model_of("llama")
    state = torch.get_rng_state()
    before = (set(vars(model)), set(vars(model.lm_head)))
    assert examine(model).route == "loss_function"
    assert (set(vars(model)), set(vars(model.lm_head))) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert examine(built("gpt2", resid_pdrop=0.5, attn_pdrop=0.5)).route == "loss_function"


class NearlyItsOwnLoss(tf.LlamaForCausalLM):
    factor = 1.0

    @property
    def loss_function(self) -> Any:
        return lambda *arguments, **named: ForCausalLMLoss(*arguments, **named) * self.factor


@pytest.mark.parametrize(("factor", "taken"), [(1.0, True), (1 + 1e-8, False)])
def test_the_chunked_head_stands_for_no_loss_that_differs_by_more_than_rounding(factor: float, taken: bool) -> None:
    kind = type("Nearly", (NearlyItsOwnLoss,), {"factor": factor})
    model = kind(tf.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1))
    assert (examine(model).route is not None) is taken


@pytest.mark.parametrize(
    ("classes", "head", "labels", "count"),
    [
        (3, "sequence_classification", torch.tensor([2, -100, 0]), 2),
        (3, "token_classification", batch_of()["labels"].clamp(max=2), 14),
        (1, "sequence_classification", torch.tensor([0.5, 1.0, -2.0]), 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_classifiers_count_labels_or_elements(
    dtype: torch.dtype, classes: int, head: str, labels: torch.Tensor, count: int
) -> None:
    """And their losses are computed in float32, as under autocast."""
    torch.manual_seed(0)
    model: Any = small_model("bert", head, vocab_size=90, num_labels=classes).eval().to(dtype)  # type: ignore[arg-type]
    ids = batch_of()["input_ids"]
    loss = make_loss(model)
    assert loss.count({"input_ids": ids, "labels": labels}) == count
    logits = model(input_ids=ids).logits.flatten(0, -2).float()
    if classes == 1:
        expected = (logits.squeeze(1) - labels).square().sum()
    else:
        expected = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss(model, {"input_ids": ids, "labels": labels}, seed=1.0), expected)
    assert not loss.causal
    assert loss.notes == ()


class Net(nn.Module):
    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(self.linear(x).mean())


@pytest.mark.parametrize(
    "form", [lambda t: t, lambda t: SimpleNamespace(loss=t), lambda t: {"loss": t}, lambda t: (t, 1), lambda t: t.reshape(1)]
)
def test_any_module_counts_examples_and_says_so(form: Callable[[torch.Tensor], Any]) -> None:
    net, batch = Net(form), {"x": torch.ones(4, 3)}
    loss = make_loss(net)
    assert loss.kind == "examples"
    assert "Net is taken for a mean over examples" in loss.notes[0]
    assert loss.count(batch) == 4
    torch.testing.assert_close(loss(net, batch, seed=1.0), 4 * net.linear(batch["x"]).mean())


@pytest.mark.parametrize("form", [lambda t: None, lambda t: {"logits": t}, lambda t: torch.ones(2), lambda t: ()])
def test_no_loss_is_named(form: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(ConfigError, match=r"Net\.forward gave .* compute_loss"):
        make_loss(Net(form))(Net(form), {"x": torch.ones(4, 3)}, seed=1.0)


def test_a_users_loss_gives_its_own_count() -> None:
    net, batch = Net(lambda t: t), {"x": torch.ones(4, 3)}
    loss = make_loss(net, compute_loss=lambda model, b: (model.linear(b["x"]).sum(), torch.tensor(7)))
    assert loss.kind == "user"
    assert loss.count(batch) is None
    total, _, count, _ = loss.run(net, batch, seed=1.0)
    torch.testing.assert_close(total, net.linear(batch["x"]).sum())
    assert count == 7


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.tensor(1.0), r"must return \(sum, count\)"),
        ((1.0, 2), "tensor of one element"),
        ((torch.ones(2), 2), "tensor of one element"),
        ((torch.tensor(1.0), 1.5), "whole number"),
        ((torch.tensor(1.0), -1), "whole number"),
        ((torch.tensor(1.0), True), "whole number"),
        ((torch.tensor(1.0), "2"), "whole number"),
    ],
)
def test_bad_results_of_a_users_loss_are_named(result: Any, message: str) -> None:
    loss = make_loss(nn.Linear(1, 1), compute_loss=lambda model, batch: result)
    with pytest.raises(ConfigError, match=message):
        loss(nn.Linear(1, 1), {}, seed=1.0)


def test_missing_labels_are_named() -> None:
    loss = make_loss(model_of("llama"))
    with pytest.raises(DataError, match=r"no `labels`.*input_ids"):
        loss.count({"input_ids": torch.ones(1, 2)})
    with pytest.raises(DataError, match="no tensor"):
        make_loss(nn.Linear(1, 1)).count({"x": 1})


class Largest(TorchDispatchMode):
    """The most elements of any tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return result


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "cohere", "granite"])
def test_no_tensor_holds_all_logits_of_a_large_vocabulary(name: str) -> None:
    torch.manual_seed(0)
    small, tokens = built(name), 1024
    small.config.vocab_size = small.config.max_position_embeddings = 8192
    model = type(small)(small.config)
    loss = make_loss(model)
    ids = torch.randint(1, 8192, (2, tokens // 2))
    with Largest() as largest:
        loss(model, {"input_ids": ids, "labels": ids}, seed=1.0).backward()  # type: ignore[no-untyped-call]
    assert 256 * 8192 <= largest.elements < tokens * 8192 // 2


@pytest.mark.parametrize("change", ["scale", "cap"])
def test_a_model_that_changes_its_logits_otherwise_than_its_copy_is_refused(change: str) -> None:
    """What a copy of fewer layers and smaller sizes has shown is checked on the model itself."""
    model, batch = model_of("granite" if change == "scale" else "gemma3"), batch_of()
    loss = make_loss(model)
    model.config.logits_scaling, model.config.final_logit_softcapping = 3.0, 2.0
    with pytest.raises(PhaseError, match=r"a factor of .* a small copy of it by a factor of .* model\.loss: native"):
        loss(model, batch, seed=1.0)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_model_that_sees_what_it_is_to_predict_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.head: .* to predict the next token and sees it.*is_decoder: true"):
        make_loss(small_model(kind, vocab_size=64, is_decoder=False))
    assert make_loss(small_model(kind, vocab_size=64, is_decoder=True)).causal


@pytest.mark.parametrize(("labels", "kind", "classes"), [(3, None, 3), (1, None, None), (3, "regression", None)])
def test_a_classifier_knows_its_classes(labels: int, kind: str | None, classes: int | None) -> None:
    made = on_meta("bert", "sequence_classification", num_labels=labels, problem_type=kind)
    assert make_loss(made).classes == classes
