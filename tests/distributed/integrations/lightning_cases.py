"""Runs of Lightning's Trainer over the engine, beside the same runs over Lightning alone."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import zeromesh
from tests.support.plain import clones, error_of, like
from zeromesh.environment import kept_environment
from zeromesh.errors import ConfigError
from zeromesh.lightning import ZeromeshStrategy
from zeromesh.mesh.process_mesh import Mesh

SAMPLES, BATCH = 32, 8


class Regression(pl.LightningModule):  # type: ignore[misc]  # Lightning has no types here.
    """A model that uses its layers in its steps, with a scheduler by steps; `seen` are its losses, over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.seen: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.seen.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        inputs = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        rank, ranks = self.trainer.global_rank, self.trainer.world_size
        mine = Subset(TensorDataset(inputs, inputs.roll(1, 1).tanh()), range(rank, SAMPLES, ranks))
        return DataLoader(mine, batch_size=BATCH // ranks)

    val_dataloader = train_dataloader


def trainer(strategy: Any, ranks: int, folder: Path | None = None, more: Sequence[Any] = (), **arguments: Any) -> Any:
    warnings.simplefilter("ignore")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    keeping = [ModelCheckpoint(folder, save_last=True, monitor="val")] if folder else []
    plain = {"accelerator": "cpu", "devices": ranks, "strategy": strategy, "use_distributed_sampler": False}
    given = {"precision": "64-true", "gradient_clip_val": 0.05, "max_epochs": 4, **arguments}
    settings = {**plain, **quiet, **given, "callbacks": [*keeping, *more]}
    return pl.Trainer(**settings, enable_checkpointing=bool(keeping))


@kept_environment()  # Lightning takes variables away at the end of a run.
def as_lightning(mesh: Mesh, folder: str, stage: int, accumulation: int) -> None:
    """Losses and parameters of two epochs, and of two more after resuming, against four epochs of Lightning alone."""
    ranks, place = mesh.world_size, Path(folder)
    first, second, alone = Regression(), Regression(), Regression()
    for each in (second, alone):
        each.net[0].bias.requires_grad_(False)
    half = trainer(ZeromeshStrategy(stage), ranks, place, max_epochs=2, accumulate_grad_batches=accumulation)
    half.validate(first, verbose=False)
    first.net[0].bias.requires_grad_(False)
    half.fit(first)
    whole = trainer(ZeromeshStrategy(stage), ranks, place, accumulate_grad_batches=accumulation)
    whole.fit(second, ckpt_path=str(place / "last.ckpt"))
    steps = 16 // accumulation
    kept = sorted(each.name for each in (place / "last.ckpt").iterdir() if each.name[0] != ".")
    assert kept == [f"lightning-{steps}.ckpt", f"step-{steps:08d}"]
    values = whole.validate(second, verbose=False)[0]
    zeromesh.unshard(second)
    if mesh.rank:
        return
    one = trainer("auto", 1, accumulate_grad_batches=accumulation)
    one.fit(alone)
    found = [[*first.seen, *second.seen], clones(second), values["val"]]
    like(found, [alone.seen, clones(alone), one.validate(alone, verbose=False)[0]["val"]], rel=0, abs_=1e-9)
    assert [each.requires_grad for each in second.parameters()] == [True, False, True, True]


class Cycled(Regression):
    """Asks for the length of training in `configure_optimizers`, which makes Lightning load data there, and deal them to ranks."""

    def __init__(self, data_ranks: int) -> None:
        super().__init__()
        self.data_ranks = data_ranks

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        inputs = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(inputs, inputs.roll(1, 1).tanh())
        one = DistributedSampler(data, 1, 0) if self.trainer.world_size == 1 else None  # Lightning shuffles for several ranks.
        return DataLoader(data, BATCH // self.data_ranks, sampler=one)

    val_dataloader = test_dataloader = train_dataloader
    test_step = Regression.validation_step


@kept_environment()
def asked_early(mesh: Mesh, folder: str, **options: Any) -> None:
    """A schedule as long as training, and a test of the best weights, and of the latest, with the trainer that has trained."""
    place, found, data_ranks = Path(folder), [], 1 if options else mesh.world_size
    for strategy, ranks in ((ZeromeshStrategy(**options), mesh.world_size), ("auto", 1))[: 1 if mesh.rank else 2]:
        module = Cycled(data_ranks if ranks > 1 else 1)
        one = trainer(strategy, ranks, place / str(ranks), use_distributed_sampler=True)
        one.fit(module)
        found.append([one.test(module, ckpt_path=which, verbose=False)[0]["val"] for which in (None, "last", "best")])
        one.save_checkpoint(place / f"later-{ranks}.ckpt")
        if ranks > 1:
            zeromesh.unshard(module)
        found.append([*map(float, module.seen), clones(module)])
    if mesh.rank == 0:
        like(found[:2], found[2:], rel=0, abs_=1e-9)


class Partial(Regression):
    """Leaves the first layer out of checkpoints, or renames it, as hooks of users do."""

    strict_loading = False

    def __init__(self, rename: bool = False) -> None:
        super().__init__()
        self.rename = rename

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        taken = checkpoint["state_dict"].pop("net.0.weight")
        if self.rename:
            checkpoint["state_dict"]["first.weight"] = taken


@kept_environment()
def in_part(mesh: Mesh, folder: str) -> None:
    """A checkpoint whose hook has deleted an entry, loaded again; and the rates that LearningRateMonitor has logged."""
    module, again, place = Partial(), Partial(), Path(folder)
    with torch.no_grad():
        again.net[0].weight.fill_(0.25)
    monitor = LearningRateMonitor()
    logged = {"logger": CSVLogger(place / str(mesh.rank)), "log_every_n_steps": 1}
    trainer(ZeromeshStrategy(), mesh.world_size, place, max_epochs=1, more=[monitor], **logged).fit(module)
    later = trainer(ZeromeshStrategy(), mesh.world_size, place, max_epochs=1)
    later.fit(again, ckpt_path=str(place / "last.ckpt"))
    zeromesh.unshard(module)
    zeromesh.unshard(again)
    wanted = clones(module) | {"net.0.weight": torch.full_like(again.net[0].weight, 0.25)}
    like(clones(again), wanted, rel=0)
    assert list(monitor.lrs) == ["lr-AdamW"]


class Finetuning(BaseFinetuning):  # type: ignore[misc]
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer)


CALLBACKS = {
    "WeightAveraging": WeightAveraging,
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(1e-2),
    "Finetuning": Finetuning,
}


@kept_environment()
def refused(mesh: Mesh, folder: str, callback: str = "", rename: bool = False, **arguments: Any) -> str:
    more = [CALLBACKS[callback]()] if callback else []
    place = Path(folder) if rename else None
    module = Partial(rename) if rename else Regression()
    return error_of(lambda: trainer(ZeromeshStrategy(), 1, place, more=more, **arguments).fit(module), ConfigError)
