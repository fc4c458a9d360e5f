"""The loss of a language model's head by liger-kernel's fused kernels (Hsu et al. 2024, arXiv:2410.10989)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from zeromesh.errors import ConfigError
from zeromesh.kernels.chunked_cross_entropy import LogitChange, chunked_cross_entropy
from zeromesh.offload.accelerator import found

_ROWS = 256
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""The largest relative difference of two correct results, by compute dtype."""
_WHERE = "model.loss"


class LigerLoss:
    """Replacement of `chunked_cross_entropy` for an undivided head on one accelerator; the first microbatch checks it. The host
    waits for the device twice a microbatch, because liger-kernel reads the targets' count and the seed."""

    def __init__(self) -> None:
        """Load liger's kernel. Raises `ConfigError` if the package is not installed, or without an accelerator."""
        if found() is None:
            raise ConfigError("liger's kernels run on GPUs, and there is none here; take auto", where=_WHERE)
        try:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
        except ImportError as error:
            raise ConfigError("liger needs the package liger-kernel: pip install liger-kernel", where=_WHERE) from error
        self._fused: Callable[..., torch.Tensor] = liger_fused_linear_cross_entropy
        self._tried = False

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        *,
        change: LogitChange,
        **settings: Any,
    ) -> torch.Tensor:
        """Return the sum of the losses; shapes, dtypes and `settings` are those of `chunked_cross_entropy`. Raises `ConfigError`
        for a head that liger's kernels do not support, and if the trial finds another result."""
        if "exchange" in settings or hidden.dtype not in _TOLERANCES or (bias is not None and change.scale != 1):
            raise ConfigError(
                f"liger has no kernel for this head (tensor parallel, computed in {hidden.dtype}, or logits that are scaled "
                "after a bias); take auto",
                where=_WHERE,
            )

        def compute(
            rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
        ) -> torch.Tensor:
            scaled = rows if change.scale == 1 else rows * change.scale
            cap = change.cap or None
            # Sums over several chunks need more than 16 bits.
            return self._fused(scaled, weight, labels, bias, reduction="sum", softcap=cap, accum_dtype=torch.float32)

        if not self._tried:
            fixed, results = None if bias is None else bias.detach(), []
            for kernel in (partial(chunked_cross_entropy, seed=1.0, chunk_tokens=_ROWS, change=change), compute):
                rows = hidden[:_ROWS].detach().clone().requires_grad_()
                with torch.enable_grad():
                    loss = kernel(rows, weight.detach(), fixed, targets[:_ROWS])
                (gradient,) = torch.autograd.grad(loss, rows)
                results.append((loss.detach().float(), gradient.float()))
            for name, ours, theirs in zip(("loss", "gradient of hidden states"), *results, strict=True):
                apart, allowed = float((theirs - ours).norm() / ours.norm().clamp(min=1e-6)), _TOLERANCES[hidden.dtype]
                if not apart <= allowed:
                    raise ConfigError(
                        f"a trial found liger's {name} apart by {apart:.2g} of it from what is right (allowed in {hidden.dtype} is "
                        f"{allowed:g}); take auto",
                        where=_WHERE,
                    )
            self._tried = True
        return compute(hidden, weight, bias, targets)
