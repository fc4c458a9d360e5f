"""Offload of activations: what recomputed blocks keep rests elsewhere, comes back bit by bit and in time, and leaves nothing."""

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.support.devices import DEVICE, accelerated, one_race
from tests.support.waiting import wait_for
from tests.unit.models.test_activation_checkpointing import Net, gpt2, llama
from tests.unit.offload.file_cases import SECONDS, Gate, made_tiers, refusing
from zeromesh.errors import ConfigError, StorageError
from zeromesh.intervals import Interval
from zeromesh.offload import FileSettings, Ledger, Purpose, Tier, TierChoice, Tiers, allocate_lasting, resident_bytes
from zeromesh.offload import activation_store as activations
from zeromesh.offload.activation_store import ActivationStore, BlockCall, FreeRanges, SavedTensor
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.trainer.models.prepare import Mode, enable_activation_checkpointing

FILE = TierChoice(tier="file")
HOST = TierChoice(tier="host")
LABEL = "file tier, kept inputs of blocks: "


def kept(tiers: Tiers, tier: Tier) -> int:
    return tiers.ledger.by_purpose(tier).get(Purpose.ACTIVATIONS, 0)


def room(store: ActivationStore) -> int:
    """Bytes of the file that saved tensors hold, or transfers on behalf of saved tensors that are gone."""
    store._advance_transfers()
    free = sum(each.length for each in store._free.ranges)
    return kept(store._tiers, Tier.FILE) - free


def settled(store: ActivationStore, tiers: Tiers) -> int:
    """The store's room when nothing is on its way out."""
    wait_for(lambda: room(store) >= 0 and kept(tiers, Tier.HOST) == 0)
    return room(store)


def nothing_left(store: ActivationStore, tiers: Tiers) -> None:
    wait_for(lambda: room(store) == 0 and kept(tiers, Tier.HOST) == kept(tiers, Tier.DEVICE) == 0)


@pytest.fixture
def store(tiers: Tiers, request: pytest.FixtureRequest) -> Iterator[ActivationStore]:
    """A store by the test's `choice`, else on files, of which nothing is left after the test."""
    choice = request.getfixturevalue("choice") if "choice" in request.fixturenames else FILE
    found = ActivationStore(tiers, choice)
    yield found
    nothing_left(found, tiers)


def computed(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A tensor that autograd has computed, as hidden states are."""
    generator = torch.Generator().manual_seed(seed)
    values: torch.Tensor = torch.randn(*shape, generator=generator).requires_grad_().to(dtype) * 1
    return values


def packed(store: ActivationStore, tensor: torch.Tensor) -> SavedTensor:
    """What autograd would keep of a block's input."""
    call = BlockCall(offloaded=True)
    saved = store._pack(call, tensor)
    call.inputs.clear()
    return saved


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


class Wide(nn.Module):
    """Blocks with little to compute and a large input."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.ParameterList(torch.rand(width) for _ in range(blocks))
        self.blocks = nn.ModuleList(Scaled(scale) for scale in self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scales[0]
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Scaled(nn.Module):
    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.scale = scale
        self.before: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        out: torch.Tensor = x * self.scale
        return out


def wide(store: ActivationStore | None, blocks: int = 4, mode: Mode = "block") -> Wide:
    net = Wide(blocks)
    enable_activation_checkpointing(net, mode, blocks=list(net.blocks), store=store)
    return net


INPUT = torch.ones(64, 64, 8)
ROOM = INPUT.nbytes  # whole blocks


# Bits


def trained(model: Any, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Two microbatches of each length; losses and gradients."""
    found = []
    for length in lengths:
        torch.manual_seed(length)
        for batch in range(2):
            ids = (torch.arange(2 * length).reshape(2, length) * (3 + batch)) % 50
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append(loss.detach())
        found += [parameter.grad.clone() for parameter in model.parameters()]
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("mode", ["block", "selective"])
def test_no_bit_changes(build: Any, mode: Mode, tmp_path: Path) -> None:
    lengths = (20, 7, 31)
    expected = trained(build(), lengths)
    choices = [HOST, FILE, TierChoice(tier="file", fraction=0.4), TierChoice(tier="host", fraction=0.7)]
    for number, choice in enumerate(choices):
        with closing(made_tiers(tmp_path / str(number), checksums=number == 1)) as tiers:
            store = ActivationStore(tiers, choice)
            model = build()
            assert enable_activation_checkpointing(model, mode, store=store) == 3
            found = trained(model, lengths)
            assert all(map(torch.equal, found, expected)), choice
            assert (kept(tiers, Tier.FILE) > 0) == (choice.tier == "file")
            nothing_left(store, tiers)


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_no_bit_changes_in_plain_blocks(mode: Mode, store: ActivationStore) -> None:
    results = []
    for used in (None, store):
        net = Net()
        enable_activation_checkpointing(net, mode, blocks=list(net.blocks), store=used)
        torch.manual_seed(3)
        net(computed(4, 8)).backward()
        results.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *results))


def test_blocks_to_be_compiled_run_as_they_are(store: ActivationStore, tiers: Tiers) -> None:
    expected, model = trained(llama(), (20,)), llama()
    enable_activation_checkpointing(model, "block", store=store)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    assert all(map(torch.equal, trained(model, (20,)), expected))
    assert kept(tiers, Tier.FILE) > 0


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]
SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: computed(1).sum(),
    "odd": lambda: computed(3, 7, 5),
    "long": lambda: computed(1100, 301),
    "turned": lambda: computed(33, 70).t(),
    "sparse rows": lambda: computed(64, 64)[::2, 1:],
    "expanded": lambda: computed(1, 70).expand(40, 70),
    "conjugated": lambda: computed(40, 5, dtype=torch.complex64).conj(),
    "no numbers": lambda: computed(40, 5) / 0 * 0,
    **{f"of {dtype}": lambda dtype=dtype: computed(1000, 33, dtype=torch.float32).to(dtype) for dtype in DTYPES},
}


@pytest.mark.parametrize("choice", [HOST, FILE])
@pytest.mark.parametrize("name", SHAPES)
def test_the_same_bits_come_back(name: str, choice: TierChoice, store: ActivationStore, tiers: Tiers) -> None:
    tensor = SHAPES[name]()
    expected = bits(tensor.detach().resolve_conj())
    for wait in (False, True):  # while it is being written, and from the file
        handle = packed(store, tensor)
        if wait and choice is FILE:
            settled(store, tiers)
        for _ in range(2):
            found = store.unpack(handle)
            assert found.shape == tensor.shape
            assert found.dtype == tensor.dtype
            assert torch.equal(bits(found), expected)


def test_what_is_no_hidden_state_stays(store: ActivationStore, tiers: Tiers) -> None:
    leaf, mask, empty = torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bool), computed(0, 4)
    for tensor in (leaf, mask, empty, nn.Parameter(torch.ones(2)), computed(3).to_sparse()):
        assert store.unpack(packed(store, tensor)) is tensor
    assert kept(tiers, Tier.FILE) == 0


def test_a_tensor_changed_later_was_copied(store: ActivationStore) -> None:
    tensor = computed(500, 100)
    expected = tensor.detach().clone()
    handle = packed(store, tensor)
    with torch.no_grad():
        tensor.zero_()
    assert torch.equal(store.unpack(handle), expected)


def test_hooks_of_any_operation(store: ActivationStore) -> None:
    gradients = []
    for pack, unpack in ((lambda t: t, lambda t: t), (partial(packed, store), store.unpack)):
        leaf = torch.linspace(0, 1, 6000).requires_grad_()
        with saved_tensors_hooks(pack, unpack):
            out = (leaf * leaf).exp().sin().prod()
        gradients.append(torch.autograd.grad(out, leaf, retain_graph=True)[0])
        gradients.append(torch.autograd.grad(out, leaf)[0])
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


class SavedByFunction(torch.autograd.Function):
    """How torch 2.11 and 2.12 save the inputs of a checkpoint; 2.13 makes saved tensors itself."""

    @staticmethod
    def forward(*_args: Any) -> torch.Tensor:
        return torch.empty((0,))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)


def test_inputs_that_a_function_saves(store: ActivationStore, tiers: Tiers) -> None:
    hidden, mask, dummy = computed(64, 64), torch.ones(3), torch.empty(0, requires_grad=True)
    with store.saving_inputs(offloaded=True):
        saver = SavedByFunction.apply(dummy, hidden, mask)
    assert settled(store, tiers) == hidden.nbytes
    _, again, same = saver.grad_fn.saved_tensors
    assert torch.equal(again, hidden)
    assert again.grad_fn is hidden.grad_fn
    assert torch.equal(same, mask)


# What is kept, and how long


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_only_the_inputs_of_blocks_are_kept(mode: Mode, store: ActivationStore, tiers: Tiers) -> None:
    model = llama()
    enable_activation_checkpointing(model, mode, store=store)
    ids = torch.zeros(2, 32, dtype=torch.long)
    loss = model(input_ids=ids, labels=ids).loss
    assert settled(store, tiers) == 3 * 2 * 32 * 32 * 8
    loss.backward()


@pytest.mark.parametrize(
    ("choice", "away"),
    [
        *((TierChoice(tier="file", fraction=part), away) for part, away in ((1, 10), (0.7, 7), (0.75, 8), (0.04, 1))),
        (TierChoice(tier="host", fraction=0.5), 5),  # Host and device of a CPU are one memory.
    ],
)
def test_the_last_blocks_stay(choice: TierChoice, away: int, store: ActivationStore, tiers: Tiers) -> None:
    assert store.offloaded_count(10) == away
    loss = wide(store, blocks=10)(INPUT)
    if choice.tier == "file":
        assert settled(store, tiers) == away * ROOM
    else:
        assert kept(tiers, Tier.HOST) == away * ROOM
    assert kept(tiers, Tier.DEVICE) == (10 - away) * ROOM
    assert (tiers._file is None) == (choice.tier == "host")
    loss.backward()


@pytest.mark.parametrize("how", ["whole", "turned", "not aligned as memory of its own is"])
def test_a_block_computes_with_what_it_will_get_again(how: str, tiers: Tiers) -> None:
    block, seen = Scaled(nn.Parameter(torch.rand(1))), []
    given = {"whole": computed(8, 8), "turned": computed(8, 8).t()}.get(how, computed(9, 7)[1:])
    forward = block.forward
    block.forward = lambda x: seen.append((x.data_ptr(), x.stride(), x.data_ptr() % 64)) or forward(x)  # type: ignore[method-assign]
    enable_activation_checkpointing(block, "block", blocks=[block], store=ActivationStore(tiers, FILE))
    block(given).sum().backward()
    assert (seen[0][0] == given.data_ptr()) == (how == "whole")  # and is not copied before it is copied
    assert seen[0][1:] == seen[1][1:]


def test_what_was_given_is_freed(tiers: Tiers) -> None:
    store, given = ActivationStore(tiers, FILE), []
    net = wide(store)
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _module, args: given.append(weakref.ref(args[0])))
    loss = net(INPUT)
    settled(store, tiers)
    gc.disable()
    try:
        assert [ref() for ref in given] == [None] * 4
        loss.backward()
        del loss
        nothing_left(store, tiers)  # without the garbage collector
    finally:
        gc.enable()


def test_memory_is_lower_by_what_is_kept(tmp_path: Path) -> None:
    nbytes, blocks = 34 << 20, 6  # above glibc's highest threshold: each tensor has pages of its own
    peaks = []
    for choice in (None, FILE):
        tiers = made_tiers(tmp_path)
        store = None if choice is None else ActivationStore(tiers, choice)
        net, given = wide(store, blocks), torch.ones(nbytes // 32, 8)
        net(given).backward()
        before = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        net(given).backward()
        lines = Path("/proc/self/status").read_text().splitlines()
        peaks.append(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 - before)
        tiers.close()
    inputs = blocks * nbytes
    assert peaks[0] > inputs - (1 << 20)  # The kernel counts resident pages up to a few of them late.
    # One is being written while another waits; backward has one and the next one.
    assert peaks[1] < peaks[0] - inputs + 4.5 * nbytes, peaks


def test_few_are_on_their_way_at_a_time(store: ActivationStore, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "_IN_FLIGHT", 3)
    net, writes = wide(store, blocks=10), Gate(monkeypatch, "write")
    forward = threading.Thread(target=net, args=(INPUT,), daemon=True)
    forward.start()
    wait_for(lambda: kept(tiers, Tier.HOST) == 3 * ROOM)
    forward.join(0.1)  # It waits, and takes no more.
    assert forward.is_alive()
    assert kept(tiers, Tier.HOST) == 3 * ROOM
    writes.open()
    forward.join(SECONDS)
    assert not forward.is_alive()


def test_memory_is_given_back_when_it_was_written(store: ActivationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = []

    def noted(*given: Any) -> torch.Tensor:
        made = allocate_lasting(*given)
        memory.append(weakref.ref(made))
        return made

    monkeypatch.setattr(activations, "allocate_lasting", noted)
    handle = packed(store, computed(300, 300))
    wait_for(lambda: memory[0]() is None)  # without asking the store
    assert store.unpack(handle).numel() == 90000
    assert len(memory) == 2


def test_no_room_is_taken_where_nothing_will_be_computed_again(store: ActivationStore, tiers: Tiers) -> None:
    net = wide(store)
    with torch.no_grad():
        net(INPUT)
    net.eval()
    net(INPUT)
    model = llama()
    enable_activation_checkpointing(model, "block", store=store)
    inner = model.model.layers[0].mlp
    inner.forward = torch.enable_grad()(inner.forward)
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert kept(tiers, Tier.FILE) == 0


def check_twice(net: Wide) -> None:
    """The gradients are twice those of one backward."""
    once = wide(None)
    once(INPUT).backward()
    assert all(torch.equal(p.grad, 2 * q.grad) for p, q in zip(net.parameters(), once.parameters(), strict=True))


def test_graphs_that_are_dropped_give_their_room_back(store: ActivationStore, tiers: Tiers) -> None:
    net = wide(store)
    for _ in range(3):
        net(INPUT)  # its loss is dropped
        nothing_left(store, tiers)
    assert kept(tiers, Tier.FILE) == 4 * ROOM
    first, second = net(INPUT), net(INPUT)
    assert settled(store, tiers) == 8 * ROOM
    first.backward()
    second.backward()
    check_twice(net)


def test_an_exception_leaves_nothing(store: ActivationStore, tiers: Tiers) -> None:
    net = wide(store)

    def fail() -> None:
        raise ArithmeticError("on purpose")

    net.blocks[2].before = fail  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            net(INPUT)
        nothing_left(store, tiers)
    net.blocks[2].before = lambda: None  # type: ignore[assignment]
    loss = net(INPUT)
    net.blocks[2].before = fail  # type: ignore[assignment]
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss
    nothing_left(store, tiers)
    assert kept(tiers, Tier.FILE) == 4 * ROOM


def test_backward_twice(store: ActivationStore, tiers: Tiers) -> None:
    net = wide(store)
    loss = net(INPUT)
    loss.backward(retain_graph=True)
    settled(store, tiers)
    loss.backward()
    check_twice(net)


def test_room_is_used_again_whatever_the_size(store: ActivationStore, tiers: Tiers) -> None:
    net = wide(store)
    for length in (1, 3, 2, 5, 4, 1, 7, 6, 7):
        net(INPUT[:length]).backward()
        nothing_left(store, tiers)
    assert kept(tiers, Tier.FILE) == tiers.file().nbytes == 4 * -(-INPUT[:7].nbytes // BLOCK) * BLOCK


def test_states_in_the_same_file_are_left_alone(store: ActivationStore, tiers: Tiers) -> None:
    net, states = wide(store), []
    for number in range(3):
        state = tiers.allocate(5000, torch.float32, FILE, Purpose.MOMENTS, "moments")
        state.write(0, torch.full((5000,), float(number))).wait()
        states.append(state)
        net(INPUT[: 20 * (number + 1)]).backward()
    for number, state in enumerate(states):
        assert torch.equal(state.load(torch.device("cpu")), torch.full((5000,), float(number)))


# In time


def test_reading_begins_before_it_is_asked_for(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ActivationStore(tiers, TierChoice(tier="file", fraction=0.75))
    net = wide(store)
    loss = net(INPUT)
    settled(store, tiers)
    reads = Gate(monkeypatch, "read")
    seen: list[int] = []

    def look() -> None:
        """Block 3, whose input is here, begins while that of block 2 is read, and can be."""
        wait_for(lambda: bool(reads.began))
        seen.append(len(reads.began))
        reads.open()

    net.blocks[3].before = look  # type: ignore[assignment]
    for number in (1, 2):
        net.blocks[number].before = lambda number=number: wait_for(lambda: len(set(reads.began)) > 3 - number)  # type: ignore[assignment]
    loss.backward()
    assert seen == [1]
    assert reads.began == sorted(reads.began, reverse=True)
    assert len(reads.began) == 3


def test_inputs_of_a_block_come_ahead(store: ActivationStore, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Any] = []
    tensors = [computed(64, 64, seed=seed) for seed in range(4)]
    for pair in (tensors[:2], tensors[2:]):
        with store.saving_inputs(offloaded=True):
            handles += [SavedByFunction.apply(*pair)]
    settled(store, tiers)
    reads, second = Gate(monkeypatch, "read"), []
    backward = threading.Thread(target=lambda: second.extend(handles[1].grad_fn.saved_tensors), daemon=True)
    backward.start()
    wait_for(lambda: len(reads.began) == 4)  # while it waits for the first of them
    reads.open()
    backward.join(SECONDS)
    first = handles[0].grad_fn.saved_tensors
    assert len(reads.began) == 4
    assert all(map(torch.equal, [*first, *second], tensors))


def test_what_is_still_here_is_not_read(store: ActivationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = Gate(monkeypatch, "read"), Gate(monkeypatch, "write")
    net = wide(store, blocks=2)
    net(INPUT).backward()
    assert not reads.began
    writes.open()


def test_room_is_kept_while_bytes_move(store: ActivationStore, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = computed(64, 64, seed=1), computed(64, 64, seed=2)
    with monkeypatch.context() as patch:
        writes = Gate(patch, "write")
        packed(store, first)  # dropped while it is being written
        handle = packed(store, second)
        assert room(store) == 2 * first.nbytes
        writes.open()
    assert settled(store, tiers) == first.nbytes
    with monkeypatch.context() as patch:
        reads = Gate(patch, "read")
        handle.fetch()
        wait_for(lambda: bool(reads.began))
        del handle
        assert room(store) == first.nbytes
        again = packed(store, first)
        reads.open()
    settled(store, tiers)
    assert torch.equal(store.unpack(again), first)


# What goes wrong


@pytest.mark.parametrize(
    ("damage", "checksums", "said"),
    [("shortened", False, ""), ("shortened", True, ""), ("changed", True, "bytes .* are not what was written")],
)
def test_a_file_that_was_damaged(damage: str, checksums: bool, said: str, tmp_path: Path) -> None:
    with closing(made_tiers(tmp_path, checksums=checksums)) as tiers:
        store = ActivationStore(tiers, FILE)
        loss = wide(store)(INPUT)
        settled(store, tiers)
        if damage == "shortened":
            os.ftruncate(tiers.file()._files[0]._buffered, ROOM)
        else:
            tiers.file().write(torch.tensor([120], dtype=torch.uint8), 2 * ROOM + 77)
        with pytest.raises(StorageError, match=LABEL + said):
            loss.backward()
        del loss
        nothing_left(store, tiers)


def test_a_disk_without_room(store: ActivationStore, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    net = wide(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC))
        with pytest.raises(StorageError, match=LABEL + ".*No space left on device"):
            net(INPUT)
    nothing_left(store, tiers)
    net(INPUT).backward()


@pytest.mark.parametrize("blocks", [1, 6])
def test_a_disk_that_refuses_writes(blocks: int, store: ActivationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    net = wide(store, blocks)

    def forward_and_backward() -> None:
        loss = net(INPUT)
        time.sleep(0.1)  # Writes have failed.
        loss.backward()

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", refusing(errno.ENOSPC))
        with pytest.raises(StorageError, match=LABEL + ".*No space left"):
            forward_and_backward()
    net.zero_grad()
    wait_for(lambda: _quiet(store))
    net(INPUT).backward()


def _quiet(store: ActivationStore) -> bool:
    """Whether no write that went wrong is left to be told of, and all room is free."""
    try:
        return room(store) == 0
    except StorageError:
        return False


@pytest.mark.parametrize(("fraction", "fits"), [(0.25, False), (0.5, True)])
def test_memory_that_is_limited(fraction: float, fits: bool, tmp_path: Path) -> None:
    files, ledger = FileSettings(directories=(tmp_path,)), Ledger({Tier.DEVICE: 2 * ROOM})
    tiers = Tiers(device=torch.device("cpu"), ledger=ledger, files=files)
    store = ActivationStore(tiers, TierChoice(tier="file", fraction=fraction))
    if fits:
        wide(store)(INPUT).backward()
    else:
        with pytest.raises(StorageError, match=r"kept inputs of blocks: .* do not fit into the device tier"):
            wide(store)(INPUT)
    nothing_left(store, tiers)
    tiers.close()


class Changing(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.add_(1).sin() * mask


@pytest.mark.parametrize("choice", [HOST, FILE])
def test_inputs_that_are_changed_in_place(choice: TierChoice, store: ActivationStore) -> None:
    block = Changing()
    enable_activation_checkpointing(block, "block", blocks=[block], store=store)
    said = r"\[3, 4\] of torch.float32 .* in place by the block that it is the input of"
    with pytest.raises(RuntimeError, match=said):
        block(computed(3, 4), torch.ones(4))
    block = Scaled(nn.Parameter(torch.ones(4)))  # type: ignore[assignment]
    enable_activation_checkpointing(block, "block", blocks=[block], store=store)
    leaf = torch.ones(3, 4)
    out = block(leaf)
    leaf.add_(1)
    with pytest.raises(RuntimeError, match="in place after the block that it is an input of was computed"):
        out.sum().backward()


def test_mistakes_are_named(tmp_path: Path, tiers: Tiers) -> None:
    with pytest.raises(ConfigError, match="none keeps all activations on the device"):
        enable_activation_checkpointing(llama(), "none", store=ActivationStore(tiers, FILE))
    with pytest.raises(StorageError, match="no directory for them is known"):
        ActivationStore(Tiers(device=torch.device("cpu"), ledger=Ledger()), FILE)


@given(st.data())
def test_extents_are_apart_and_become_one_again(data: st.DataObject) -> None:
    extents, length = FreeRanges(), data.draw(st.integers(1, 200))
    extents.free(0, length)
    taken: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(1, 60))):
        if taken and data.draw(st.booleans()):
            extents.free(*taken.pop(data.draw(st.integers(0, len(taken) - 1))))
        else:
            size = data.draw(st.integers(1, 20))
            begin = extents.take(size)
            if begin is not None:
                assert 0 <= begin <= begin + size <= length
                assert all(end <= begin or begin + size <= first for first, end in taken)
                taken.append((begin, begin + size))
        free = sum(each.length for each in extents.ranges)
        assert free == length - sum(end - begin for begin, end in taken)
    for each in taken:
        extents.free(*each)
    assert extents.ranges == [Interval(start=0, end=length)]
    assert extents.take(length) == 0


@accelerated
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_no_bit_changes_on_an_accelerator(tier: Any, fraction: float, tmp_path: Path) -> None:
    files = FileSettings(directories=(tmp_path,))
    tiers = Tiers(device=DEVICE, ledger=Ledger(), files=files)
    store = ActivationStore(tiers, TierChoice(tier=tier, fraction=fraction))
    results = []
    for used in (None, store):
        net = wide(used, blocks=8).to(DEVICE)
        for step in range(3):
            net(INPUT.to(DEVICE) * (step + 1)).backward()
        results.append([p.grad.cpu() for p in net.parameters()])
    assert all(map(torch.equal, *results))
    torch.accelerator.synchronize()
    nothing_left(store, tiers)
    tiers.close()


@accelerated
def test_a_tensor_changed_while_it_is_copied_on_an_accelerator() -> None:
    tiers = Tiers(device=DEVICE, ledger=Ledger())
    store = ActivationStore(tiers, HOST)
    tensor = computed(4096, 4096).to(DEVICE) * 1
    before = tensor.cpu()
    handle = packed(store, tensor)
    with torch.no_grad(), one_race():
        tensor.zero_()
    try:
        found = store.unpack(handle)
    except RuntimeError as error:
        if "while it was copied to the host" not in str(error):
            raise
    else:  # A real device may have copied it before it was changed.
        assert DEVICE.type != "sim"
        assert found.cpu().equal(before)
