"""How large the tensors are that operations make."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the bytes of the largest tensor that an operation inside it has made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = (each.untyped_storage().nbytes() for each in tree_leaves(out) if isinstance(each, torch.Tensor))
        self.nbytes = max(self.nbytes, *sizes, 0)
        return out
