"""Ranks over which experts are spread compute what one process does."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tables import row, tried
from tests.support.workers import Workers

FULL = pytest.mark.full
MATRICES = ("experts.gate_up_proj", "experts.down_proj")
BIASES = ("experts.gate_up_proj_bias", "experts.down_proj_bias")
MODELS = ("mixtral", "qwen", "biased", "latent", "skewed")
UNCLIPPED = {"name": "skewed", "max_steps": 5, "clip_norm": 0.0, "on_nonfinite": "stop"}
TWO, RECOMPUTED = {"expert": 2}, {"activation_checkpointing": "block"}
test_a_model_trains_with_spread_experts = pytest.mark.sampled(4)(
    tried(
        "expert_cases",
        [
            *(row(2, "exact", kind=kind, axes=TWO) for kind in MODELS),
            *(row(2, "exact", FULL, kind=kind, axes=TWO, stage=stage) for kind in MODELS for stage in (0, 1, 2)),
            *(row(4, "exact", FULL, kind=kind, axes=TWO) for kind in MODELS),
            *(row(4, "exact", FULL, kind=kind, axes={"expert": 4}) for kind in MODELS),
            row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "tensor": 2}),
            row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "pipeline": 2}),
            row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "replicate": 2}),
            row(4, "exact", FULL, kind="mixtral", axes={"expert": 2, "context": 2}),
            row(4, "exact", FULL, kind="mixtral", axes={"expert": 4, "context": 2}),
            *(
                row(2, "exact", *marks, kind="skewed", axes=TWO, stage=stage, offload=offload, model=RECOMPUTED)
                for stage, offload, marks in (
                    (2, {"optimizer": "host"}, (FULL,)),
                    (3, {"optimizer": "file", "parameters": "file"}, ()),
                    (3, {"optimizer": "host", "activations": "host"}, (FULL,)),
                    (3, {"gradients": "file", "optimizer": "file"}, (FULL,)),
                )
            ),
            row(2, "exact", FULL, kind="mixtral", axes=TWO, model=RECOMPUTED),
            # A rank without a token keeps up with the others, whose reductions and updates wait for its own.
            row(2, "exact", kind="deep", axes=TWO, stage=2),
            row(2, "exact", FULL, kind="deep", axes=TWO),
            row(2, "exact", kind="skewed", axes=TWO, optimizer={"in_backward": True}, run=UNCLIPPED),
            # The auxiliary loss is of a microbatch, whose tokens are on both ranks.
            row(2, "exact", kind="losing", axes={"expert": 2, "context": 2}, batch={"global_size": 10, "micro_size": 10}),
        ],
        timeout=120,
    )
)
test_loops_and_ways_to_compute = pytest.mark.sampled(6)(
    tried(
        "expert_cases",
        [
            row(2, "loop", kind="mixtral"),
            # Ranks read parameters at different speeds while they exchange tokens, over groups of equal ranks.
            *(row(2, "penalties", kind="qwen", axes=TWO, stage=stage) for stage in (0, 3)),
            *(row(2, "penalties", kind="qwen", axes={axis: 2}, stage=2) for axis in ("tensor", "context")),
            row(2, "uneven_reads", kind="qwen", axes=TWO),
            row(2, "uneven_reads", kind="mixtral", axes={"context": 2}),
            row(2, "uneven_reads", FULL, kind="qwen", axes={"context": 2, "context_method": "heads"}),
            row(4, "uneven_reads", FULL, kind="qwen", axes={"context": 2, "expert": 4}),
            row(2, "exact", kind="tied", axes=TWO),
            row(2, "adapters", stage=3, axes=TWO),
            row(4, "adapters", FULL, stage=2, axes=TWO),
            row(2, "adapters_alone", kind="skewed", matrices=MATRICES, axes=TWO),
            row(2, "adapters_alone", kind="square", matrices=MATRICES[1:], axes=TWO),
            row(2, "adapters_alone", kind="biased", matrices=(BIASES[0], MATRICES[1]), axes=TWO),
            row(2, "adapters_alone", FULL, kind="square", matrices=BIASES, axes=TWO),
            row(2, "merged", axes=TWO),
            row(4, "merged", FULL, axes={"expert": 4}),
            row(2, "loop", FULL, kind="latent"),
            row(2, "stages_alike", axes=TWO),
            row(4, "stages_alike", FULL, axes=TWO),
            row(2, "saved", axes=TWO),
            *(row(2, "between_steps", *marks, axes=TWO, stage=n) for n, marks in enumerate(((), (FULL,), (), (FULL,)))),
            row(2, "judged", axes=TWO),
            *(row(2, "bytes_told", recompute=recompute) for recompute in ("none", "block")),
            row(2, "refused"),
            row(1, "own_form"),
            row(1, "narrow_biases"),
            row(1, "biases_of_adapters"),
            *(row(2, "implementations", kind=kind) for kind in ("qwen", "skewed")),
        ],
    )
)


def test_a_run_goes_on_over_other_axes(workers: Workers, tmp_path: Path) -> None:
    """Experts on 4 ranks, 2 and 1, then tensor 2: as if nothing had happened."""
    folder, found = str(tmp_path / "moved"), list[float]()
    for number, (size, axes) in enumerate(((4, {"expert": 4}), (2, TWO), (1, {}), (2, {"tensor": 2}))):
        arguments = {"folder": folder, "axes": axes, "steps": 2 * number + 2}
        found += workers.run(size, "expert_cases:resumed", timeout=120, **arguments)[0][-2:]
    (wanted,) = workers.run(1, "expert_cases:resumed", folder=str(tmp_path / "one"), axes={}, steps=8)
    assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("axes", "sections"),
    [({}, {"batch": {"global_size": 3, "micro_size": 1}}), ({"context": 2}, {"length": 9})],
    ids=["a short round", "a padded share"],
)
def test_only_tokens_of_the_batch_move_biases(workers: Workers, tmp_path: Path, axes: Any, sections: Any) -> None:
    (one,) = workers.run(1, "expert_cases:balanced", folder=str(tmp_path / "one"), axes={}, **sections)
    for each in workers.run(2, "expert_cases:balanced", folder=str(tmp_path / "two"), axes=axes, **sections):
        assert each["losses"] == pytest.approx(one["losses"], rel=1e-9)
        assert each["biases"] == one["biases"]


def test_padding_moves_no_biases(workers: Workers, tmp_path: Path) -> None:
    """Padding is told by a mask or by a document of its own, also to ranks that share sequences, and in tiles."""

    def run(ranks: int, name: str, **given: Any) -> Any:
        folder = str(tmp_path / name)
        return workers.run(ranks, "expert_cases:balanced", folder=folder, **{"axes": {}, "ragged": "mask", **given})[0]

    one = run(1, "alone", ragged="alone", batch={"micro_size": 1})
    assert any(*one["biases"])
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "mask": (1, {}),
        "document": (1, {"ragged": "document"}),
        "tiles": (1, {"model": {"tile_tokens": 5}}),
        "shared": (2, {"axes": {"context": 2}}),
        "shared documents": (2, {"axes": {"context": 2}, "ragged": "document"}),
    }
    for name, (ranks, given) in ways.items():
        found = run(ranks, name, batch={"micro_size": 4}, **given)
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-9), name
        assert (found["biases"], found["loads"]) == (one["biases"], one["loads"]), name


def test_biases_of_routers_even_out_the_loads_of_all_ranks(workers: Workers, tmp_path: Path) -> None:
    (one,) = workers.run(1, "expert_cases:balanced", folder=str(tmp_path / "one"), axes={})
    two, _ = workers.run(2, "expert_cases:balanced", folder=str(tmp_path / "two"), axes=TWO)
    parts = workers.run(2, "expert_cases:balanced", folder=str(tmp_path / "parts"), axes={"pipeline": 2})
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-9)
    assert two["biases"] == one["biases"]
    assert two["loads"] == parts[0]["loads"] == one["loads"]
    (biases,) = one["biases"]
    assert any(biases)
    loads = [row["model.layers.1.mlp.experts"] for row in one["loads"]]
    wanted = [sum(0.01 * ((row[str(at)] < 1) - (row[str(at)] > 1)) for row in loads) for at in range(len(biases))]
    assert biases == pytest.approx(wanted, abs=1e-7)
