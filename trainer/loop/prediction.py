"""Outputs of a model for an evaluation set, gathered from all ranks in the dataset's order, for `compute_metrics` and `predict`."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import load, save
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import EvalPrediction

from zeromesh.errors import DataError, errors_as, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.data.sampler import Blocks
from zeromesh.trainer.generation.evaluation_prompts import BatchGeneration

Tree = Any  # An array, or a tuple, list or mapping of trees.
PreprocessLogits = Callable[[Any, Any], Any]  # `preprocess_logits_for_metrics(logits, labels)`, as transformers has it.

PADDING = -100  # The padding value after the end of sequences shorter than the longest one.
_LABELS = ("labels", "label_ids", "label", "start_positions", "end_positions")


@dataclass
class Collector:
    """Gathers the outputs of microbatches for one evaluation; all ranks make the same calls of `add`."""

    mesh: Mesh
    ignored: Sequence[str]
    preprocess: PreprocessLogits | None
    generation: BatchGeneration | None = None  # Generates the tokens that are gathered instead of outputs.
    blocks: Blocks | None = None  # The samples of all microbatches, in turn; None: they are in the dataset's order.
    nbytes: int = 0  # Bytes gathered so far, on each rank.
    _parts: list[Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size_noted = self.preprocess is not None or self.generation is not None
        """True if the note about the size of the outputs is not needed, or has been shown."""

    def part_of(self, outputs: Any, batch: Mapping[str, Any]) -> Tree:
        """Return a microbatch's outputs without the loss, or its generated tokens, and its labels, as arrays on the CPU."""
        labels = _single_or_tuple([batch[name] for name in _LABELS if name in batch])
        if self.generation is None:
            if isinstance(outputs, Mapping):
                known = {"loss", *self.ignored}
                outputs = [value for name, value in outputs.items() if name not in known and value is not None]
            elif isinstance(outputs, tuple | list):
                # A tuple with a loss begins with it: the only scalar among batched outputs.
                outputs = [value for value in outputs if not isinstance(value, Tensor) or value.dim()]
            else:
                outputs = [outputs]
            outputs = _single_or_tuple(outputs)
            if self.preprocess is not None:
                outputs = self.preprocess(outputs, labels)
        return {"predictions": _array(outputs), "label_ids": _array(labels)}

    def add(self, parts: Sequence[Tree | None]) -> None:
        """Add this rank's outputs of one round of microbatches; None stands for no output."""
        for part in parts:
            gathered = self.mesh.world.gather_bytes(b"" if part is None else _encode(part), "predictions of a microbatch")
            rows = zip(map(self.mesh.shape.data_index, self.mesh.world.ranks), gathered, strict=True)
            self._parts += [_decode(each) for _, each in sorted(rows) if each]
            self.nbytes += sum(map(len, gathered))

    def result(self) -> EvalPrediction:
        """Return `predictions`, as the model returned them without loss, and `label_ids`. Raises `DataError` if kinds differ."""
        whole: dict[str, Tree] = {}
        tokens = PADDING if self.generation is None else self.generation.padding
        unlike = "what the model returned for two microbatches cannot be put together: "
        with errors_as(DataError, unlike, ValueError, KeyError, TypeError):
            for name, padding in (("predictions", tokens), ("label_ids", PADDING)):
                flat = [pytree.tree_flatten(each.pop(name)) for each in self._parts]
                structure = flat[0][1]
                if any(other != structure for _, other in flat):
                    raise ValueError(f"{name} of several structures")
                columns = [list(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
                del flat  # Each piece is released once it is copied.
                whole[name] = pytree.tree_unflatten([_concatenate(column, padding) for column in columns], structure)
        if self.blocks is not None:
            rows = np.argsort(np.concatenate(self.blocks))
            whole = pytree.tree_map_only(np.ndarray, lambda each: each[rows] if len(each) == len(rows) else each, whole)
        return EvalPrediction(**whole)


def _encode(tree: Tree) -> bytes:
    """Serialize a tree: its arrays as safetensors, and its structure as JSON in their metadata."""
    leaves, structure = pytree.tree_flatten(tree)
    arrays = {str(number): np.asarray(leaf, order="C") for number, leaf in enumerate(leaves) if leaf is not None}
    return bytes(save(arrays, {"tree": pytree.treespec_dumps(structure)}))


def _decode(content: bytes) -> Tree:
    length, arrays = int.from_bytes(content[:8], "little"), load(content)
    structure = pytree.treespec_loads(json.loads(content[8 : 8 + length])["__metadata__"]["tree"])
    return pytree.tree_unflatten([arrays.get(str(number)) for number in range(structure.num_leaves)], structure)


def _single_or_tuple(found: Sequence[Any]) -> Any:
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def _array(tree: Any) -> Tree:
    """Convert tensors to NumPy arrays; 16-bit floats become float32, as NumPy has no bfloat16."""
    if isinstance(tree, Mapping):
        return {name: _array(value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return type(tree)(_array(value) for value in tree) if type(tree) in (tuple, list) else tuple(map(_array, tree))
    if isinstance(tree, Tensor):
        return (tree.float() if tree.is_floating_point() and tree.dtype.itemsize < 4 else tree).detach().cpu().numpy()
    return tree if tree is None else np.asarray(tree)


def _concatenate(parts: list[Any], padding: int) -> Any:
    """Concatenate one output along dim 0, padded where dim 1 differs. The list is emptied meanwhile."""
    if parts[0] is None or parts[0].ndim < 2:
        return None if parts[0] is None else np.concatenate(parts) if parts[0].ndim else np.stack(parts)
    if len({part.shape[2:] for part in parts}) > 1:
        raise ValueError(f"shapes {some([part.shape for part in parts])}")
    size = (sum(map(len, parts)), max(part.shape[1] for part in parts), *parts[0].shape[2:])
    whole, end = np.empty(size, dtype=np.result_type(*{part.dtype for part in parts})), size[0]
    while parts:
        part = parts.pop()
        place = whole[end - len(part) : end]
        place[:, : part.shape[1]], place[:, part.shape[1] :] = part, padding
        end -= len(part)
    return whole
