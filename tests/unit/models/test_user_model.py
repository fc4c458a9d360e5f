"""What the trainer asks of a user's model: the model inside of wrappers, its source, its layout, and what its forward takes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tests.support.architectures import on_meta, small_model
from zeromesh.errors import ConfigError, DataError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.trainer.generation.settings import decoder_positions
from zeromesh.trainer.models.user_model import ForwardInputs, integer, positive, require_layout_fits, source_of, text_part, unwrap


class OptimizedModule(nn.Module):
    """What `torch.compile` makes of a module, as far as it is looked at."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._orig_mod, self.dynamo_ctx = module, lambda function: function


def test_wrappers_are_taken_off_and_the_compiler_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert unwrap(model) == (model, None)
    assert unwrap(DataParallel(model)) == (model, None)
    inner = OptimizedModule(model)
    for wrapped in (inner, DataParallel(inner), OptimizedModule(DataParallel(model))):
        inside, compiler = unwrap(wrapped)
        assert inside is model
        assert compiler is (wrapped if isinstance(wrapped, OptimizedModule) else inner).dynamo_ctx
    not_compiled = OptimizedModule(3)
    assert unwrap(not_compiled) == (not_compiled, None)


def test_wrappers_that_cannot_be_taken_off_are_refused() -> None:
    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(ddp)
    with pytest.raises(ConfigError, match=r"DistributedDataParallel, which reduces gradients itself"):
        unwrap(ddp)
    parts = nn.Sequential(*(OptimizedModule(nn.Linear(1, 1)) for _ in range(5)))
    with pytest.raises(ConfigError, match=r"^0, 1, 2: torch.compile was applied to a part"):
        unwrap(parts)


def test_the_source_of_a_model_is_what_its_configuration_names() -> None:
    model = on_meta("llama", vocab_size=8)
    assert source_of(model) is None
    model.config.name_or_path = "someone/model"
    assert source_of(model) == source_of(DataParallel(model)) == "someone/model"
    other = nn.Linear(1, 1)
    other.config = model.config
    assert source_of(other) is source_of("someone/model") is None


def test_layers_that_are_left_out_at_random_and_hooks_bound_the_mesh() -> None:
    drops = on_meta("bart", "seq2seq_lm", d_model=16, decoder_layers=1, encoder_layers=1, decoder_layerdrop=0.25)
    one, data = MeshShape(), MeshShape(shard=2)
    require_layout_fits(drops, one, trains=True)
    require_layout_fits(drops, data, trains=False)
    require_layout_fits(drops, MeshShape(tensor=2), trains=True)
    for mesh, ranks in ((data, 2), (MeshShape(replicate=3, tensor=2), 3)):
        with pytest.raises(ConfigError, match=rf"^model\.config: decoder_layerdrop is 0\.25: each of {ranks} data ranks"):
            require_layout_fits(drops, mesh, trains=True)
    nested = on_meta("llama", vocab_size=8)
    nested.config.inside = {"name": {"layerdrop": True, "other": 3}, "text_layerdrop": 1, "layerdrops": 1}
    with pytest.raises(ConfigError, match=r"layerdrop is True, text_layerdrop is 1: each"):
        require_layout_fits(nested, data, trains=True)
    hooked: Any = nn.Sequential(nn.Linear(1, 1))
    hooked[0].weight.register_hook(lambda gradient: gradient)
    require_layout_fits(hooked, data, trains=True)
    for axis in ("tensor", "pipeline"):
        with pytest.raises(ConfigError, match=r"^0\.weight has a hook on its gradient"):
            require_layout_fits(hooked, MeshShape(**{axis: 2}), trains=False)


class Own(nn.Module):
    def forward(self, a: Any, /, images: Any, *rest: Any, size: int, scale: float = 1.0) -> None: ...


class Anything(nn.Module):
    def forward(self, images: Any, **fields: Any) -> None: ...


class Embedded(nn.Module):
    """It has a table of embeddings and a configuration, and is no model of a library."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding, self.config = embedding, SimpleNamespace(max_position_embeddings=7)

    def get_input_embeddings(self) -> Any:
        if isinstance(self.embedding, type):
            raise self.embedding
        return self.embedding

    def forward(self, x: Any) -> None: ...


def inputs_of(model: Any, *, users_loss: bool = False) -> ForwardInputs:
    return ForwardInputs.of(model, users_loss=users_loss)


def test_fields_that_a_plain_forward_takes_and_needs() -> None:
    own = {"images", "size", "scale"}
    rows: Any = (
        (Own(), False, own, own, ("images", "size")),
        (Own(), True, None, own, ()),
        (Anything(), False, None, {"images"}, ("images",)),
        (Embedded(None), False, {"x"}, {"x"}, ("x",)),
    )
    for model, users_loss, fields, named, required in rows:
        found = inputs_of(model, users_loss=users_loss)
        said: Any = (found.model, found.fields, found.named, found.required)
        assert said == (type(model).__name__, fields, named, required)
        assert (found.vocab_size, found.positions) == (None, None)


def test_fields_that_a_forward_of_transformers_takes_and_needs() -> None:
    found = inputs_of(on_meta("llama", vocab_size=9, max_position_embeddings=5))
    assert found.fields is not None
    assert {"input_ids", "labels", "position_ids"} <= found.fields
    assert "kwargs" not in found.fields
    assert (found.required, found.vocab_size, found.positions) == (("input_ids",), 9, 5)
    other = inputs_of(on_meta("vit", "image_classification", image_size=16, patch_size=8))
    assert (other.required, other.vocab_size, other.positions) == (("pixel_values",), None, None)
    assert inputs_of(on_meta("llama", vocab_size=9), users_loss=True).fields is None
    for embedding in (NotImplementedError, AttributeError, nn.Linear(2, 2)):
        assert inputs_of(Embedded(embedding)).vocab_size is None
    assert inputs_of(Embedded(nn.Embedding(4, 2))).vocab_size == 4


def test_positions_may_be_counted_from_behind_that_of_padding() -> None:
    sizes = {"vocab_size": 9, "max_position_embeddings": 12}
    for kind, padding, positions in (("roberta", 1, 10), ("roberta", 0, 11), ("bert", 1, 12), ("bert", None, 12)):
        assert inputs_of(on_meta(kind, "masked_lm", **sizes, pad_token_id=padding)).positions == positions
    model = small_model("roberta", **sizes, pad_token_id=1, is_decoder=True)
    model(input_ids=torch.full((1, 10), 5))
    assert decoder_positions(model) == 10


def test_a_batch_is_as_long_as_there_are_positions_and_has_what_is_needed() -> None:
    found = inputs_of(on_meta("llama", vocab_size=9, max_position_embeddings=5))
    ids, batch = torch.zeros(2, 5, dtype=torch.long), dict[str, Any]()
    for batch in ({"input_ids": ids}, {"inputs_embeds": ids}, {"input_ids": torch.zeros(9)}, {"input_ids": [[0] * 9]}):
        found.check(batch)
    for batch, message in (
        ({"labels": ids, "x": 1}, r"LlamaForCausalLM\.forward needs input_ids, and the batch has labels, x; name"),
        ({}, "and the batch has nothing; name"),
        ({"input_ids": torch.zeros(1, 6)}, r"of 6 tokens are longer than the 5 positions .*; cut the samples, or build"),
    ):
        with pytest.raises(DataError, match=message):
            found.check(batch)
    with pytest.raises(DataError, match=r"Own\.forward needs size, and the batch has images, inputs_embeds"):
        inputs_of(Own()).check({"images": 1, "inputs_embeds": 1})


class Varies:
    @property
    def vocab_size(self) -> int:
        raise RuntimeError("it differs from layer to layer")


def test_numbers_of_a_configuration() -> None:
    config = SimpleNamespace(a=0, b=-2, c=3, d=4, e=True, f=2.0, g=None)
    assert [integer(config, name) for name in "abcdefgh"] == [0, -2, 3, 4, None, None, None, None]
    assert (positive(config, "h", "a", "b", "e", "f", "d", "c"), positive(config, "a", "b"), positive(None, "a")) == (4, 0, 0)
    assert integer(Varies(), "vocab_size") is None
    llava = tf.LlavaConfig(text_config={"model_type": "llama", "hidden_size": 64})
    assert text_part(llava).hidden_size == 64
    assert text_part(llava.text_config) is llava.text_config
    assert text_part(config) is config
