"""`ZeromeshStrategy`: Lightning starts the processes and process group as for DDP, and `shard` partitions the module."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from zeromesh.environment import kept_environment
from zeromesh.errors import CheckpointError, ConfigError, some
from zeromesh.trainer.config.load import ConfigSource, Consent, load_config
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.shard import is_sharded, load, save, shard, unshard

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REFUSED: dict[str, str] = read_texts(Path(__file__).with_suffix(".yaml"))
_PRECISIONS = ("32-true", "64-true", "bf16-true")


class ZeromeshStrategy(DDPStrategy):  # type: ignore[misc]  # Lightning has no types here.
    """Partitions a LightningModule and its optimizer over the ranks of Lightning's Trainer. A checkpoint is a directory. The module
    stays partitioned after `fit`, for `validate`, `test` and `predict`; `zeromesh.unshard` makes it whole."""

    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False  # `load_checkpoint` restores them.

    def __init__(self, stage: int = 3, *, config: ConfigSource = None, **options: Any) -> None:
        """Take `stage`, `config` and `options` as `zeromesh.shard` does."""
        super().__init__()
        self._shard_arguments: dict[str, Any] = {"config": config, "stage": stage, **options}

    def setup(self, trainer: Any) -> None:
        """Partition the module; for `fit`, with its optimizer. Raises `ConfigError` for unsupported settings."""
        plugin = self.precision_plugin
        if plugin.precision not in _PRECISIONS:
            raise ConfigError(f"precision is {plugin.precision}; allowed are {', '.join(_PRECISIONS)}")
        plugin.clip_gradients = _clip_gradients
        for kind in map(type, trainer.callbacks):
            if why := next((_REFUSED[each.__name__] for each in kind.__mro__ if each.__name__ in _REFUSED), None):
                raise ConfigError(f"{kind.__name__} {why}")
        if is_sharded(self.model):
            unshard(self.model)
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            self.optimizers: list[Any] = []  # Those of a fit before have lost their parameters.
            self._partition(None)

    def configure_ddp(self) -> None:
        """Do not wrap the module, as `setup_optimizers` partitions it."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Partition the module with its optimizer. Raises `ConfigError` unless it has exactly one."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not self.optimizers[0].param_groups:
            raise ConfigError(f"configure_optimizers gave {len(self.optimizers)}; return one optimizer with parameters")
        self.optimizers = [self._partition(self.optimizers[0])]

    def _partition(self, optimizer: Any) -> Any:
        ranks = (self.global_rank, self.world_size, self.local_rank, self.num_processes)
        values = map(str, (*ranks, self.cluster_environment.main_address, self.cluster_environment.main_port))
        with kept_environment(dict(zip(_VARIABLES, values, strict=True))):
            return shard(self.model, optimizer, **self._shard_arguments)[1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of the sampler, which gives tensor ranks the same batches; there may be no mesh yet."""
        given, ranks = self._shard_arguments, self.world_size
        stored = load_config(given["config"], ranks=ranks, consent=Consent.GIVEN).parallel
        parallel = {**stored.model_dump(exclude_unset=True), **given.get("parallel", {})}
        together = load_config({"parallel": parallel}).parallel.model_size
        return {"num_replicas": -(-ranks // together), "rank": self.global_rank // together}

    def teardown(self) -> None:
        """Tear down, and leave the module partitioned on its device."""
        module = self.lightning_module
        self._lightning_module = None
        super().teardown()
        self._lightning_module = module

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return names and shapes, of which hooks may remove some: `save_checkpoint` writes the shards of weights."""
        named = self.lightning_module.state_dict(keep_vars=True).items()
        return {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in named}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # `save_checkpoint` writes the shards of moments.

    def save_checkpoint(self, checkpoint: Any, filepath: str | Path, storage_options: Any = None) -> None:
        """Write a directory as `zeromesh.save` does, with Lightning's other state in it before it is complete. Tensors that a hook
        has removed from the checkpoint's `state_dict` are left out. Raises `ConfigError` for added ones."""
        names, kept = set(self.lightning_module.state_dict(keep_vars=True)), checkpoint["state_dict"]
        changed = [each for each, value in kept.items() if each not in names or not value.is_meta]
        if changed:
            why = f"a hook on_save_checkpoint has put {some(changed, 4)} into state_dict, whose weights are divided among ranks"
            raise ConfigError(f"{why}; it may delete entries alone: keep values of its own under another key of the checkpoint")
        directory, name = Path(filepath), f"lightning-{checkpoint['global_step']}.ckpt"
        super().save_checkpoint(checkpoint, directory / name, storage_options)
        state, optimizer = {"lightning": name}, next(iter(self.optimizers), None)
        save(directory, self.model, optimizer, state=state, alone=True, without=names - kept.keys())
        for earlier in directory.glob("lightning-*.ckpt") if self.is_global_zero else ():
            if earlier.name != name:
                self.checkpoint_io.remove_checkpoint(earlier)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> Any:
        """Load weights, for `fit` with moments; returns Lightning's other state. Raises `CheckpointError` for other checkpoints."""
        state = load(checkpoint_path, self.model, next(iter(self.optimizers), None)) or {}
        if "lightning" not in state:
            raise CheckpointError(f"{checkpoint_path} is no checkpoint of ZeromeshStrategy")
        checkpoint = super().load_checkpoint(Path(checkpoint_path) / state["lightning"], weights_only)
        missing = sorted(self.lightning_module.state_dict(keep_vars=True).keys() - checkpoint["state_dict"].keys())
        if missing and self.lightning_module.strict_loading:
            raise CheckpointError(f"{checkpoint_path} lacks {some(missing, 4)}; set the module's strict_loading=False")
        return checkpoint

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Do nothing, as `load_checkpoint` has loaded the weights."""


def _clip_gradients(optimizer: Any, limit: float = 0.0, algorithm: str = "norm") -> None:
    if algorithm != "norm":
        raise ConfigError(f"gradient_clip_algorithm is {algorithm}, and gradients are sharded; set it to norm")
    if limit > 0:
        optimizer.clip_grad_norm_(limit)
