"""Token-wise modules in tiles train, on any ranks, as a plain loop without tiles does."""

from typing import Any

import pytest

from tests.support.tables import row, tried

FULL = pytest.mark.full
BLOCK = {"activation_checkpointing": "block"}
HOST = {"optimizer": "host", "parameters": "host", "activations": "host"}
AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, {}),
    "tensor": (2, {"tensor": 2}),
    "sequence": (2, {"tensor": 2, "sequence": True}),
    "pipeline": (2, {"pipeline": 2}),
}


def case(kind: str, axes: str, stage: int = 3, *, quick: bool = False, **more: Any) -> Any:
    size, parallel = AXES[axes]
    return row(size, "trained", *(() if quick else (FULL,)), kind=kind, stage=stage, axes=parallel, **more)


test_tiles_change_nothing = pytest.mark.sampled(4)(
    tried(
        "tile_cases",
        [
            case("adapted", "data", quick=True, model=BLOCK),
            case("llama", "sequence", quick=True, model=BLOCK, tokens=2),
            case("gpt2", "tensor", quick=True),
            case("unused", "data", quick=True),
            case("experts", "data", quick=True),
            case("experts", "tensor", quick=True),
            row(2, "encoded"),
            *(case("llama", "data", stage) for stage in (0, 1, 2, 3)),
            *(case(kind, "pipeline", model=BLOCK) for kind in ("llama", "frozen", "adapted")),
            *(case(kind, "tensor") for kind in ("llama", "frozen", "adapted")),
            case("llama", "data", model=BLOCK, offload=HOST),
            case("frozen", "data"),
        ],
    )
)
