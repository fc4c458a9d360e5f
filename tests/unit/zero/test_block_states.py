"""Moments in 8 bits: levels, blocks, rounding at random, and tensors that are written in parts."""

from typing import get_args, get_type_hints

import pytest
import torch

from zeromesh.flat.narrow_states import BLOCK, STATE_FORMATS, BlockTensor, random_bits, round_to_levels
from zeromesh.offload import FileSettings, Ledger, Purpose, Tier, TierChoice, Tiers
from zeromesh.settings.keys import OptimizerKeys

CPU = torch.device("cpu")


def test_each_format_that_is_named_has_a_row() -> None:
    assert {*STATE_FORMATS} == {*get_args(get_type_hints(OptimizerKeys)["states"])}


SIGNS = pytest.mark.parametrize("squares", [False, True])


def block_tensor(numel: int, *, squares: bool = False, at: TierChoice | None = None, tiers: Tiers | None = None) -> BlockTensor:
    tiers = tiers or Tiers(device=CPU, ledger=Ledger())
    found, _ = STATE_FORMATS["int8"].allocate(numel, torch.float32, tiers, at or TierChoice(), "m", squares=squares)
    assert isinstance(found, BlockTensor)
    return found


def numbers(numel: int, *, squares: bool, seed: int = 0) -> torch.Tensor:
    """Values over many decades, whose largest in a block is negative as often as not."""
    random = torch.Generator().manual_seed(seed)
    found = torch.randn(numel, generator=random) * 10 ** torch.randint(-6, 3, (numel,), generator=random).float()
    return found.square() if squares else found


@SIGNS
@pytest.mark.parametrize("numel", [1, BLOCK, 5 * BLOCK + 64, (1 << 18) + BLOCK])
def test_values_come_back_near_and_a_second_time_exactly(numel: int, squares: bool) -> None:
    tensor, values = block_tensor(numel, squares=squares), numbers(numel, squares=squares)
    tensor.write(0, values).wait()
    found = tensor.load(CPU)
    most = torch.nn.functional.pad(values, (0, -numel % BLOCK)).view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)[:numel]
    # Half a step of the uppermost decade; of squares, twice that of the root, whose step is half as wide.
    assert ((found - values).abs() <= 0.0071 * most).all()
    assert (found * values >= 0).all()
    assert (values[found == 0].abs() <= (1e-13 if squares else 2e-6) * most[found == 0]).all()
    other = block_tensor(numel, squares=squares)
    other.write(0, found).wait()
    assert torch.equal(other.load(CPU), found)


@SIGNS
def test_zeros_stay_zeros(squares: bool) -> None:
    tensor = block_tensor(2 * BLOCK, squares=squares)
    assert not tensor.load(CPU).any()
    tensor.write(0, torch.zeros(2 * BLOCK)).wait()
    assert not tensor.load(CPU).any()


@SIGNS
@pytest.mark.parametrize("step", [1, 100, BLOCK, 300, 7 * BLOCK - 1])
def test_what_is_written_in_parts_is_what_is_written_whole(step: int, squares: bool) -> None:
    """So a checkpoint may be read in any pieces, in any order."""
    numel = 7 * BLOCK
    whole, values = block_tensor(numel, squares=squares), numbers(numel, squares=squares)
    whole.write(0, values).wait()
    values = whole.load(CPU)
    parts = block_tensor(numel, squares=squares)
    for start in reversed(range(0, numel, step)):
        parts.slice(start, min(start + step, numel)).copy_from(values[start : start + step])
    assert torch.equal(parts.load(CPU), values)
    out = torch.empty(333, dtype=torch.float64)
    parts.slice(100, 433).copy_to(out)
    assert torch.equal(out, values[100:433].double())


def test_a_whole_write_after_a_part_counts() -> None:
    tensor, values = block_tensor(BLOCK), numbers(BLOCK, squares=False)
    tensor.write(3, torch.ones(5)).wait()
    tensor.write(0, values).wait()
    again = block_tensor(BLOCK)
    again.write(0, values).wait()
    assert torch.equal(tensor.load(CPU), again.load(CPU))


@pytest.mark.sampled(5)
@SIGNS
def test_rounding_at_random_keeps_what_is_smaller_than_a_step(squares: bool) -> None:
    """On average; each value becomes a neighbouring level, which is then encoded exactly."""
    rounds, values = 4000, torch.zeros(BLOCK)
    values[:3] = torch.tensor([1.0, 0.503, 0.00271]) if squares else torch.tensor([-1.0, 0.503, -0.00271])
    total = torch.zeros(BLOCK, dtype=torch.float64)
    for number in range(rounds):
        found = torch.empty(BLOCK)
        round_to_levels(found, values, random_bits(torch.arange(BLOCK), 0, "w", number), number % 4, squares=squares)
        total += found
        if number < 20:
            tensor = block_tensor(BLOCK, squares=squares)
            tensor.write(0, found).wait()
            assert torch.equal(tensor.load(CPU), found)
            assert found[0] == values[0]
            assert not found[3:].any()
            assert abs(found[1] - values[1]) < 0.02
    mean = total / rounds
    assert mean[1:3].tolist() == pytest.approx(values[1:3].tolist(), rel=2e-3)


def test_bytes_are_in_the_ledger_and_on_the_tier(tmp_path: object) -> None:
    ledger = Ledger()
    tiers = Tiers(device=CPU, ledger=ledger, files=FileSettings(directories=(tmp_path,)))  # type: ignore[arg-type]
    tensor = block_tensor(8192, at=TierChoice(tier="file"), tiers=tiers)
    assert tensor.nbytes == 8192 + 4 * 32 == ledger.by_purpose(Tier.FILE)[Purpose.MOMENTS]
    values = numbers(8192, squares=False)
    tensor.write(0, values).wait()
    tensor.wait_for_writes()
    here = block_tensor(8192)
    here.write(0, values).wait()
    assert torch.equal(tensor.load(CPU), here.load(CPU))
    tiers.close()
    with pytest.raises(ValueError, match="do not lie in"):
        tensor.slice(0, 8193)


@SIGNS
def test_each_value_rests_as_the_nearest_level(squares: bool) -> None:
    decades = 10 ** torch.linspace(-8, 0, 100 * BLOCK)
    even = torch.linspace(0, 1, 100 * BLOCK)
    blocks = torch.cat([decades, even] if squares else [decades, even, -decades, -even]).view(-1, BLOCK)
    blocks[:, 0] = 1
    tensor = block_tensor(blocks.numel(), squares=squares)
    tensor.write(0, blocks.flatten().square() if squares else blocks.flatten()).wait()
    found = tensor.load(CPU).view_as(blocks).double()
    found = found.sqrt() if squares else found
    levels = found.unique()
    assert len(levels) == 256 - (not squares)
    distances = (blocks.double()[..., None] - levels).abs().amin(-1)
    assert ((found - blocks).abs() <= distances * (1 + 1e-6) + 1e-9).all()
