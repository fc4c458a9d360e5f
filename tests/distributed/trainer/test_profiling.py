"""Where the time of a step goes, traces of steps with named ranges, what holds memory when it runs out, utilisation, slow ranks,
and the rates of the machine."""

import gzip
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.step_lines import check_phases
from tests.support.trainer_cases import LLAMA
from tests.support.workers import PoolOptions, Workers
from zeromesh.errors import CollectiveError, ConfigError, StorageError
from zeromesh.offload import WaitTime
from zeromesh.telemetry.step_recorder import Collective, StepPhase, StepRecorder
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.trained_model import is_out_of_memory
from zeromesh.trainer.models.flops import ModelFlops, peak_flops
from zeromesh.trainer.monitoring.profiler import Profile
from zeromesh.trainer.planning.machine import find_machine
from zeromesh.trainer.planning.measure import TINY_SIZES

CASES = "profiling_cases"

# The clock


class Hand:
    """A clock that is moved by hand, and seconds that a tier was waited for."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, WaitTime()
        self.recorder = StepRecorder(lambda: self.now)

    def go(self, seconds: float, *, waiting: float = 0.0) -> None:
        self.now += seconds
        self.waits.total += waiting


def test_a_moment_belongs_to_the_innermost_span() -> None:
    hand = Hand()
    hand.recorder.begin_step(hand.waits)
    with hand.recorder.span(StepPhase.DATA):
        hand.go(1)
    hand.go(2)
    with hand.recorder.span(StepPhase.FORWARD):
        hand.go(4)
        with hand.recorder.span(StepPhase.COMMUNICATION):
            hand.go(8, waiting=3)
        hand.go(16, waiting=5)

    def fail() -> None:
        with hand.recorder.span(StepPhase.BACKWARD), hand.recorder.span(StepPhase.OPTIMIZER):
            hand.go(32)
            raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        fail()
    hand.go(64)
    assert hand.recorder.take_seconds() == {
        "data": 1,
        "forward": 4 + 11,
        "communication": 5,
        "optimizer": 32,
        "backward": 0,
        "offload_wait": 8,
        "other": 66,
    }
    assert hand.recorder.take_seconds() == {}
    hand.waits.total += 5
    hand.recorder.begin_step(hand.waits)
    hand.go(1)
    assert hand.recorder.take_seconds().get("offload_wait", 0) == 0, "it was waited between two steps"


@given(moves=st.lists(st.tuples(st.sampled_from(["open", "close", "go"]), st.sampled_from(StepPhase)), max_size=60))
def test_the_spans_add_up_to_the_step(moves: list[tuple[str, StepPhase]]) -> None:
    hand = Hand()
    hand.recorder.begin_step()
    went, opened = 0, []
    for move, span in moves:
        if move == "go":
            went += 1
            hand.go(1)
        elif move == "open":
            opened.append(hand.recorder.span(span))
            opened[-1].__enter__()
        elif opened:
            opened.pop().__exit__(None, None, None)
    assert sum(hand.recorder.take_seconds().values()) == went


def test_between_steps_the_clock_stands_still() -> None:
    hand = Hand()
    with hand.recorder.span(StepPhase.COMMUNICATION):
        hand.go(5)
        hand.recorder.begin_step()
        hand.go(1)
    hand.go(2)
    assert hand.recorder.take_seconds() == {"other": 3}
    with hand.recorder.span(StepPhase.COMMUNICATION):
        hand.go(5)
    assert hand.recorder.take_seconds() == {}


def test_what_a_device_has_not_done_yet_belongs_to_the_next_step() -> None:
    made: list[int] = []
    reached = 2

    def mark() -> int:
        made.append(len(made))
        return len(made)

    def between(end: int, begin: int) -> float | None:
        return 1.0 if end <= reached else None

    recorder = StepRecorder(mark, between)
    recorder.begin_step()
    with recorder.span(StepPhase.FORWARD):
        pass
    assert recorder.take_seconds() == {"other": 1.0}  # Marks 1 and 2 have come, 3 and 4 not.
    recorder.begin_step()
    reached = 100
    with recorder.span(StepPhase.OPTIMIZER):
        pass
    assert recorder.take_seconds() == {"forward": 1.0, "optimizer": 1.0, "other": 3.0}


def test_what_is_timed_as_traffic_is_communication_of_the_step() -> None:
    hand = Hand()
    account = hand.recorder.account("shard", 2)
    hand.recorder.begin_step()
    with account.timed(Collective.ALL_GATHER):
        hand.go(3)
    assert hand.recorder.take_seconds() == {"communication": 3, "other": 0}


def test_nothing_is_measured_while_recording_is_off() -> None:
    hand = Hand()
    hand.recorder.enabled = False
    account = hand.recorder.account("shard", 2)
    hand.recorder.begin_step()
    with hand.recorder.span(StepPhase.FORWARD), account.timed(Collective.ALL_GATHER):
        hand.go(3)
    account.count(Collective.ALL_GATHER, 1000)
    assert hand.recorder.take_seconds() == {}
    assert hand.recorder.take_traffic() == {}


def test_phases_of_a_run_show_where_its_time_goes(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, f"{CASES}:timed", folder=str(tmp_path))
    for line in found[0][1:]:
        phases = line["phases"]
        assert list(phases) == ["data", "forward", "backward", "communication", "optimizer", "other"]
        assert phases["data"] >= 4 * 0.004
    check_phases(found[0][1:])
    late = workers.run(2, f"{CASES}:timed", folder=f"{tmp_path}/late", late=1)
    for mine, theirs in zip(late[0][1:], late[1][1:], strict=True):
        assert mine["phases"]["communication"] > 0.09  # It has waited for the other,
        assert theirs["phases"]["other"] > 0.09  # which was busy with something of its own.
    assert min(line["phases"]["other"] for line in late[0]) < 0.09


# Traces


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.parametrize(
    ("size", "kind", "sections", "wanted"),
    [
        (2, "llama", {"zero": {"stage": 3, "gathered_budget": 0}}, "gather model.layers.0"),
        pytest.param(
            *(2, "gpt2", {"zero": {"stage": 2}, "parallel": {"transport": "gloo"}}, "gather transformer.h.1"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(1, "llama", {"model": {"activation_checkpointing": "block"}}, "update model.layers.1/0"), marks=pytest.mark.full
        ),
        (2, "llama", {"parallel": {"pipeline": 2}}, "point to point over pipeline"),
    ],
)
def test_traces_of_the_steps_that_were_asked_for(
    workers: Workers, tmp_path: Path, size: int, kind: str, sections: dict[str, Any], wanted: str
) -> None:
    pipeline = sections.get("parallel", {}).get("pipeline", 1)
    case = {"folder": str(tmp_path), "kind": kind}
    profile = {"steps": [2, 3], "memory": size == 1}
    found = workers.run(size, f"{CASES}:profiled", pipeline=pipeline, sections={**sections, "profile": profile}, **case)[0]
    assert "steps 2 to 3 are recorded in" in found["said"]
    paths = sorted((tmp_path / "run" / "profile").iterdir())
    assert [path.name for path in paths] == [f"steps-2-3-rank-{rank}.json.gz" for rank in range(size)]
    layer = "model.layers.0" if kind == "llama" else "transformer.h.0"
    for rank, path in enumerate(paths):
        events = trace(path)
        names = Counter(event["name"] for event in events)
        own = layer.replace("0", str(rank)) if pipeline > 1 else layer
        assert (names["step 1"], names["step 2"], names["step 3"], names["step 4"]) == (0, 1, 1, 0)
        for name in (wanted, f"forward of {own}", f"backward of {own}", f"update {own}/0", "data", "optimizer"):
            assert names[name], (name, rank, sorted(names))
        if size > pipeline:
            reduced = {f"reduce {own}/0", f"finish reducing {own}/0", "reduce-scatter over shard"}
            assert reduced <= names.keys(), sorted(names)
        require_nested(events, own)
        assert any("Input Dims" in event.get("args", {}) for event in events) is profile["memory"]
    straight = workers.run(size, f"{CASES}:profiled", pipeline=pipeline, sections=sections, **{**case, "folder": f"{tmp_path}/b"})
    assert straight[0]["losses"] == found["losses"]
    assert not (tmp_path / "b" / "run" / "profile").exists()


OURS = (*("step ", "forward", "backward", "gather ", "wait for "), *("reduce ", "finish reducing ", "update ", "data", "optimizer"))


def require_nested(events: list[dict[str, Any]], unit: str) -> None:
    """Viewers drop what is neither inside another event of its row nor beside it."""
    rows: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    checked = 0
    for row in rows.values():
        row.sort(key=lambda event: (event["ts"], -event["dur"]))
        for number, event in enumerate(row):
            end = event["ts"] + event["dur"]
            for later in row[number + 1 :]:
                if later["ts"] >= end - 0.002:  # Times are rounded to nanoseconds.
                    break
                if event["name"].startswith(OURS) or later["name"].startswith(OURS):
                    checked += 1
                    assert later["ts"] + later["dur"] <= end + 0.002, (event["name"], later["name"])
    assert checked > 100
    apart = [row for row in rows.values() if any(event["name"] == f"backward of {unit}" for event in row)]
    assert [{event["name"].partition(" of ")[0] for event in row} for row in apart] == [{"backward"}]


@pytest.mark.parametrize("full", [False, True])
def test_a_run_that_ends_early_writes_what_it_has_and_warns_where_it_cannot(workers: Workers, tmp_path: Path, full: bool) -> None:
    folder = tmp_path / "run" / "profile"
    if full:
        folder.parent.mkdir()
        folder.write_text("a file where the folder should be")
    found = workers.run(1, f"{CASES}:profiled", folder=str(tmp_path), sections={"profile": {"steps": [3, 100]}})[0]
    said = " ".join(found["said"].split())
    assert ("steps-3-4-rank-0.json.gz was not written: " if full else "steps 3 to 4 are recorded in") in said
    assert len(found["losses"]) == 4
    assert full or [path.name for path in folder.iterdir()] == ["steps-3-4-rank-0.json.gz"]


def test_collectives_end_before_the_profiler_does(tmp_path: Path) -> None:
    recorded: list[bool] = []

    def settle() -> None:
        with torch.profiler.record_function("settled"):
            recorded.append(torch.autograd._profiler_enabled())

    mesh: Any = SimpleNamespace(
        rank=0, world_size=1, device=torch.device("cpu"), recorder=StepRecorder(), wait_for_all_ranks=lambda what: None
    )
    section = load_config({"profile": {"steps": [1, 2], "step_figures": False}}).profile
    engine: Any = SimpleNamespace(mesh=mesh, wait_for_gathers=settle)
    with Profile(section, tmp_path, engine, 1, print) as profile:
        for number in (1, 2):
            with profile.step(number):
                torch.ones(3).sum()
    assert recorded == [True]
    assert not torch.autograd._profiler_enabled()
    [path] = (tmp_path / "profile").iterdir()
    assert "settled" in {event["name"] for event in trace(path)}


def test_steps_that_end_before_they_begin_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"profile.steps: \[12, 10\] ends before it begins"):
        load_config({"profile": {"steps": [12, 10]}})


def test_ranges_are_made_while_they_are_recorded_alone() -> None:
    recorder = StepRecorder()
    assert recorder.range("gather", "unit") is recorder.range("update")
    recorder.begin_range("forward of", "unit")
    recorder.end_range()
    with torch.profiler.profile() as profiler, recorder.profiling_ranges():
        recorder.begin_range("forward of", "outer")
        with recorder.range("gather", "inner"):
            torch.ones(3).sum()
        recorder.next_range("b")
        recorder.next_range("a")
        recorder.end_ranges()
        recorder.end_range()
        recorder.begin_range("forward of", "cut short")
    assert recorder.range("gather") is recorder.range("update")
    names = Counter(event.name for event in profiler.events() or ())
    for name in ("forward of outer", "gather inner", "backward of a", "backward of b", "forward of cut short"):
        assert names[name] == 1, names


# Memory that runs out


@pytest.mark.parametrize("kind", ["torch", "python"])
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_memory_that_runs_out_leaves_a_file_that_says_what_held_it(
    workers: Workers, tmp_path: Path, kind: str, size: int, rank: int
) -> None:
    with workers.fresh(PoolOptions(size=size, timeout_seconds=5.0)) as pool:
        outcomes = pool.outcomes(f"{CASES}:exhausted", folder=str(tmp_path), kind=kind, rank=rank)
    path = tmp_path / "run" / f"memory-rank-{rank}.json"
    assert outcomes[rank].error == "StorageError"
    said = outcomes[rank].message
    assert f"rank {rank} ran out of memory after 1 whole step (" in said
    assert f"{path} says what holds the rest; lower batch.micro_size" in said
    assert "KiB optimizer moments" in said
    found = json.loads(path.read_text())
    assert found["purposes"]["device"]["optimizer moments"] > 0
    assert found["counted"] == sum(found["purposes"]["device"].values())
    assert found["uncounted"] == found["process"]["resident"] - found["counted"] > 0
    assert [file.name for file in (tmp_path / "run").glob("memory-*")] == [path.name]
    if size > 1:
        assert outcomes[0].error == "CollectiveError"
        assert f"rank {rank} failed with StorageError" in outcomes[0].message
        assert str(path) in outcomes[0].message


def test_what_is_memory_that_ran_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(StorageError("device tier, master weights: [enforce fail] can't allocate memory"))
    assert not is_out_of_memory(CollectiveError("rank 1 failed with RuntimeError: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))


# Utilisation


def counted(kind: Any, config: Any, *, trained: bool = True) -> tuple[ModelFlops, nn.Module]:
    """The operations of a model without values, and the model."""
    with torch.device("meta"):
        model: nn.Module = kind(config).requires_grad_(trained)
    flops = ModelFlops.of(model)
    assert flops is not None
    return flops, model


def test_operations_of_a_llama_are_counted_as_torch_does() -> None:
    """Against torch's own count of what forward and backward multiply."""
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, attn_implementation="eager"))
    flops, length = ModelFlops.of(model), 16
    assert flops is not None
    ids = torch.zeros(2, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert flops.of_step(2 * length, length) == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_frozen_weights_experts_windows_and_tables() -> None:
    whole, model = counted(tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA))
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1) - 64 * 32  # without the table of embeddings
    assert whole.dense == 6 * weights
    assert counted(tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA), trained=False)[0].dense == 4 * weights
    assert counted(tf.LlamaForCausalLM, tf.LlamaConfig(**LLAMA, tie_word_embeddings=True))[0].dense == whole.dense
    mixtral = tf.MixtralConfig(**LLAMA, num_local_experts=8, num_experts_per_tok=2, sliding_window=5)
    found, experts = counted(tf.MixtralForCausalLM, mixtral)
    inside = sum(p.numel() for name, p in experts.named_parameters() if ".experts." in name)
    outside = sum(p.numel() for p in experts.parameters() if p.ndim > 1) - inside - 64 * 32
    assert found.dense == 6 * (outside + inside * 2 / 8)
    assert found.windows == (5.0, 5.0)
    assert found.of_step(1, 100) - found.of_step(1, 0) == 12 * 32 * 2 * 5


def test_models_whose_samples_are_not_tokens_have_no_utilisation() -> None:
    t5 = tf.T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16, d_kv=8, vocab_size=32)
    assert ModelFlops.of(tf.T5ForConditionalGeneration(t5)) is None
    assert ModelFlops.of(nn.Linear(3, 3)) is None


def test_the_peak_is_measured_or_from_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        peak, how = peak_flops(torch.device("cpu"), dtype)
        assert 1e8 < peak < 1e16
        assert how == "measured by a product of matrices"
    assert peak_flops(torch.device("cpu"), torch.bfloat16)[0] >= peak_flops(torch.device("cpu"), torch.float32)[0]
    monkeypatch.setattr("zeromesh.trainer.models.flops.device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    assert peak_flops(torch.device("cuda", 0), torch.bfloat16)[0] == 312e12


# Ranks that wait


def test_a_run_says_who_is_slow_and_where_everyone_is(workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = workers.run(3, "checkpoint_cases:slowed", folder=str(tmp_path), rank=1, seconds=0.12)
    assert "rank 1 is slow" in found[0]["said"]
    during = found[0]["during"]
    assert [row["rank"] for row in during] == [0, 1, 2]
    assert all(row["pid"] > 0 and row["step"] >= 1 for row in during)
    assert found[0]["communication"] <= 1.0
    after = json.loads((tmp_path / "run" / "ranks.json").read_text())["ranks"]
    assert [row["step"] for row in after] == [13] * 3
    assert main(["status", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())  # lines are broken where the folder's name is long
    assert "step 13" in said
    assert "seconds without progress" in said
    assert main(["status", str(tmp_path / "nowhere")]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_waits_in_evaluations_are_no_part_of_steps(workers: Workers, tmp_path: Path) -> None:
    """A rank that is slow in evaluations alone is not named, and the table of communication has what belongs to steps."""
    for found in workers.run(2, "checkpoint_cases:slowed", folder=str(tmp_path), rank=1, seconds=0.4, evaluations=True):
        assert "is slow" not in found["said"]
        assert found["communication"] <= 1.0


# The machine is measured by all ranks alike, inside of a host and between hosts, and nothing is left behind


@pytest.mark.full
@pytest.mark.parametrize("hosts", [0, 2])
def test_the_ranks_of_a_host_and_a_link_between_hosts_are_measured(workers: Workers, tmp_path: Path, hosts: int) -> None:
    with workers.fresh(PoolOptions(size=3, hosts=hosts)) as pool:
        found = pool.run(f"{CASES}:measured", folder=str(tmp_path))
    assert len({each["machine"] for each in found}) == 1, "all ranks have the same machine"
    assert [bool(each["told"]) for each in found] == [True, False, False]
    assert [each["left"] for each in found] == [[], [], []]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "m.yaml").write_text(str(found[0]["machine"]))
    machine = find_machine(str(tmp_path / "m.yaml"))
    between = machine.links.between.gloo
    if hosts:
        assert between is not None
        assert machine.collective_seconds("all-gather", 1 << 14, ranks=3, hosts=2) > 0
        return
    assert machine.is_cpu
    assert machine.host.devices == 3
    assert between is None
    for link in (machine.links.inside.shared, machine.links.inside.gloo):
        assert link is not None
        assert 0 < link.latency_seconds < 1
    assert set(machine.device.products) == set(TINY_SIZES.dtypes)
    assert 0 < machine.device.launch_seconds < 1e-2
    assert machine.update.device is not None
    assert machine.library.host > 1 << 20
    assert machine.disk is None, "tiny sizes leave the disk out"
