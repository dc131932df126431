"""Lightning: with `Trainer(strategy=LocalStrategy(...))` every process is a worker of palsgd.

Lightning goes by batches: validations, checkpoints and metrics that are reduced over processes come
after so many batches on every process, and each is an exchange. So all workers must have the same
syncs behind them after equally many batches, and end with the same batch. Balanced draws and
`RunEnd` give that; what does not is refused.
"""

import copy
import inspect
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from palsgd import checkpoint as saves
from palsgd.checks import in_error, warn
from palsgd.integrations.clocked_scheduler import follow_clock
from palsgd.integrations.run_end import RunEnd
from palsgd.keywords import check_names
from palsgd.local_optimizer import LocalOptimizer
from palsgd.loop import clock_after
from palsgd.optimizer import PALSGD

# Lightning comes as two packages, whose classes are not each other's. A program that has imported
# the older one means that one.
_OLDER = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
try:
    if _OLDER:
        from pytorch_lightning import Callback, LightningModule, Trainer
        from pytorch_lightning.plugins.environments import SLURMEnvironment
        from pytorch_lightning.strategies import DDPStrategy
        from pytorch_lightning.trainer.states import TrainerFn
    else:
        from lightning.pytorch import Callback, LightningModule, Trainer
        from lightning.pytorch.plugins.environments import SLURMEnvironment
        from lightning.pytorch.strategies import DDPStrategy
        from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing}; palsgd.integrations.lightning needs: pip install 'palsgd[integrations]'",
        name=missing.name,
    ) from None

_KEY = "palsgd"  # in Lightning's checkpoint: where the workers' files lie, beside it
_REFUSED = {
    "scheduler": "LocalStrategy takes no scheduler=; return it from configure_optimizers, with "
    "'interval': 'step'",
    "group": "LocalStrategy takes no group=; every process of the Trainer is a worker",
    "transport": "LocalStrategy takes no transport=; workers exchange in Lightning's process group",
}


class LocalStrategy(DDPStrategy):
    """Trains every process of a Lightning `Trainer` as a worker of palsgd.

    `configure_optimizers` returns the inner optimizer of a worker, as for any other strategy.
    Validation, and the model in Lightning's checkpoints, are the global model. Beside a checkpoint
    lies a folder with the state of each worker, and `fit(ckpt_path=...)` goes on bit for bit.

    Args:
        optimizer: what is built around the inner optimizer: `palsgd.PALSGD`, or any other optimizer
            of palsgd, such as `palsgd.DiLoCo` or `palsgd.methods.FedProx`.
        elastic: may `fit(ckpt_path=...)` go on with another number of workers? See
            `palsgd.checkpoint.load`.
        ddp: arguments of Lightning's `DDPStrategy`, such as `timeout`, `process_group_backend` and
            `start_method`, and of the `DistributedDataParallel` that averages in a warm-up.
        settings: the settings of the optimizer, such as `sync_every`. `Trainer(max_steps=...)` is
            the clock at which training ends, steps without data included.

    Raises:
        TypeError: a setting is unknown, or is Lightning's to choose.
        ValueError: `optimizer` is not built as those of palsgd are. In `fit()`: something would
            exchange between syncs, or let workers take unequally many batches.

    Example:
        >>> from palsgd.integrations.lightning import LocalStrategy
        >>> strategy = LocalStrategy(sync_every=64, mix_prob=0.1)
        >>> LocalStrategy(sync_evry=64)
        Traceback (most recent call last):
        TypeError: PALSGD got an unexpected keyword 'sync_evry'; did you mean sync_every?
    """

    def __init__(
        self,
        optimizer: Callable[..., LocalOptimizer] = PALSGD,
        *,
        elastic: bool = False,
        ddp: Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        known = set(inspect.signature(optimizer).parameters)
        if not {"model", "inner"} <= known:
            raise ValueError(
                f"optimizer={in_error(optimizer)} is not built as palsgd.PALSGD is; give an "
                "optimizer of palsgd, and return the inner one from configure_optimizers"
            )
        check_names(optimizer.__name__, (None, None), settings, known, _REFUSED)
        super().__init__(**(ddp or {}))
        self._build, self._settings, self._elastic = optimizer, settings, elastic
        self._hooks = _Hooks(self)
        self._clocked: Any = None  # Lightning's record of the scheduler that follows the clock
        self._folder = Path()  # of the checkpoint that was loaded
        self._random: dict[str, torch.Tensor] | None = None  # of a loaded worker
        self._run_end: RunEnd | None = None  # with max_steps
        self._finished = -1  # the gradient steps at the last sync that ended training

    @property
    def opt(self) -> LocalOptimizer:
        """The palsgd optimizer of this process, which `fit()` builds."""
        if not self.optimizers:
            raise RuntimeError("there is no optimizer before fit(); read it in on_fit_start")
        return self.optimizers[0]

    @property
    def _fits(self) -> bool:
        """Is this fit(), or what follows it? validate() and test() may load other weights."""
        module = self.lightning_module
        return bool(self.optimizers) and module.trainer.state.fn == TrainerFn.FITTING

    # -- building --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._ask_at_syncs(trainer)
            if self._hooks not in trainer.callbacks:
                trainer.callbacks.insert(0, self._hooks)
        super().setup(trainer)

    def _ask_at_syncs(self, trainer: Trainer) -> None:
        """At every batch Lightning broadcasts whether the first process has received SIGTERM. Here
        the header of a sync says whether any process has, so that all of them end there."""
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        trainer._signal_connector._sigterm_notifier_fn = self._leave
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            warn(
                "Lightning answers Slurm's signal to requeue in the middle of a step, on each "
                "process in another one, where workers cannot save together; give "
                "Trainer(plugins=[SLURMEnvironment(auto_requeue=False)]) and let SIGTERM end the "
                "job at a sync"
            )

    def _leave(self, number: int, frame: FrameType | None) -> None:
        if self.optimizers:
            self.opt.leave()

    def configure_ddp(self) -> None:
        """Give all workers the weights of the first, as a DistributedDataParallel would. The model
        is not wrapped: a wrapper averages gradients."""
        assert self.lightning_module is not None
        if any(isinstance(module, nn.SyncBatchNorm) for module in self.lightning_module.modules()):
            raise ValueError(
                "SyncBatchNorm exchanges in every forward pass; leave sync_batchnorm=True out: "
                "palsgd averages the statistics of BatchNorm at every sync"
            )
        with torch.no_grad():
            for tensor in (*self.lightning_module.parameters(), *self.lightning_module.buffers()):
                first = tensor.contiguous()
                dist.broadcast(first, src=0)
                tensor.copy_(first)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the palsgd optimizer around the one that `configure_optimizers` returns."""
        self._reset_optimizers_and_schedulers()  # those of an earlier fit() must not exchange
        self._run_end, self._finished, self._random = None, -1, None
        super().setup_optimizers(trainer)
        inner, self.optimizers = self._only_optimizer(), []
        opt = self._build(self.lightning_module, inner, **self._settings)
        self._check(opt)
        self._clock_scheduler(opt, trainer)
        opt.hear_leavers()
        if opt.schedule.warmup:  # a wrapper averages while backward runs, and before clipping
            super().configure_ddp()
            opt.attach(self.model)
        self.optimizers = [opt]

    def _only_optimizer(self) -> Optimizer:
        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and "
                "LocalStrategy builds on one; give one optimizer with a parameter group for each "
                "part of the model"
            )
        return self.optimizers[0]

    def _clock_scheduler(self, opt: LocalOptimizer, trainer: Trainer) -> None:
        """Step the scheduler that Lightning would step at every batch with the clock instead, as
        often over the whole run as Lightning would."""
        self._clocked = None
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:  # the user steps it
            return
        by_steps = (each for each in self.lr_scheduler_configs if each.interval == "step")
        found = [each for each in by_steps if not each.reduce_on_plateau]
        if not found:
            return
        if len(found) > 1 or found[0].frequency != 1:
            raise ValueError(
                f"configure_optimizers returned {len(found)} schedulers with 'interval': 'step', "
                f"with frequency {[each.frequency for each in found]}; palsgd steps one, at every "
                "step of the clock: join several by torch.optim.lr_scheduler.ChainedScheduler"
            )
        (self._clocked,) = found
        steps, ticks = _length(opt, trainer)
        follow_clock(opt, self._clocked.scheduler, steps=steps, ticks=ticks)

    def _check(self, opt: LocalOptimizer) -> None:
        """Refuse what would let workers be at different batches when they exchange."""
        if opt._worker.course.draws_alone:
            raise ValueError(
                f"draws={opt.facts.draws!r} lets workers take unequally many batches between two "
                "syncs, and Lightning exchanges after equally many; use draws='balanced'"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' skips steps on some workers and not on others, and Lightning "
                "exchanges after equally many batches; use precision='bf16-mixed'"
            )

    # -- training --------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.lightning_module is not None
        trainer, opt = self.lightning_module.trainer, self.opt
        batches = trainer.num_training_batches
        length = int(batches) if batches < math.inf else None
        opt.transport.agree({"the number of batches in an epoch": length})
        if self._random is not None:
            _set_random(self._random, self.root_device)
        if trainer.max_steps != -1:
            # Batches before this optimizer was built, such as those of a run of plain DDP, count.
            before = trainer.global_step - opt.gradient_steps
            self._run_end = RunEnd(opt, max(0, trainer.max_steps - before))
            if self._run_end.reached():
                trainer.should_stop = True

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "LightningModule | nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self.opt.leaving:  # all workers are at the same batch, right after a sync
            trainer._signal_connector.received_sigterm = True
            return output
        if self._was_last(trainer):  # before the validation and the save that may follow it
            self.finish()
        return output

    def _was_last(self, trainer: Trainer) -> bool:
        """Was this the last batch, as far as it is known before callbacks have been called?"""
        if self._run_end is not None and self._run_end.reached() and not trainer.should_stop:
            trainer.should_stop = True
            return True
        return trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs

    def finish(self) -> None:
        """Sync what the workers have done since the last sync, after the last batch of a run."""
        opt = self.opt
        if opt.gradient_steps != self._finished and opt.clock != opt.schedule.end:
            opt.finish()
        self._finished = opt.gradient_steps

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.optimizers:
            self.opt.train()

    # -- checkpoints -----------------------------------------------------------------------------

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Inside, the model is where it was trained. After fit() Lightning moves it to the CPU,
        where an exchange over NCCL does not reach it."""
        module = self.lightning_module
        assert module is not None
        moved = module.device != self.root_device
        if moved:
            module.to(self.root_device)
        try:
            yield
        finally:
            if moved:
                module.cpu()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The global model."""
        if not self._fits:
            return super().lightning_module_state_dict()
        with self._on_device(), self.opt.anchor_weights():
            return copy.deepcopy(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of the inner optimizer, from which a run with another strategy can go on."""
        with self.opt.training_state():
            state = self.opt.inner.state_dict()
            return copy.deepcopy(state) if self.opt._evaluation.lasts else state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save the workers' states first, so that a checkpoint never names what is not there."""
        if self._fits and "optimizer_states" in checkpoint:
            folder, random = _folder_of(filepath), _get_random(self.root_device)
            with self._on_device():
                saved = saves.save(folder, self.lightning_module, self.opt, extra=random)
            checkpoint[_KEY] = f"{saved.parent.name}/{saved.name}"
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            shutil.rmtree(_folder_of(filepath), ignore_errors=True)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        self._folder = Path(checkpoint_path).parent
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the state of this worker. The checkpoint of another strategy has none: its optimizer
        state becomes that of the inner optimizer, and the clock starts at 0."""
        if _KEY not in checkpoint:
            super().load_optimizer_state_dict(checkpoint)
            return
        folder = self._folder / checkpoint[_KEY]
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is not there, and it has the workers' states of this checkpoint; copy "
                "it beside the checkpoint, or load the model alone: "
                f"{type(self.lightning_module).__name__}.load_from_checkpoint(...)"
            )
        loaded = saves.load(folder, self.lightning_module, self.opt, elastic=self._elastic)
        self._random = loaded.extra
        if self._clocked is not None:
            # Lightning is about to load the scheduler of the first worker into all.
            place = self.lr_scheduler_configs.index(self._clocked)
            checkpoint["lr_schedulers"][place] = self._clocked.scheduler.state_dict()


class _Hooks(Callback):
    """Acts before all other callbacks do, and before the hooks of the module. The hooks of a
    strategy come after them."""

    def __init__(self, strategy: LocalStrategy):
        self._strategy = strategy

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy._fits:
            self._strategy.opt.eval()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.finish()


def _folder_of(filepath: str | Path) -> Path:
    """Where the workers' states of a checkpoint lie."""
    if "://" in str(filepath):
        raise ValueError(
            f"{filepath} is no path of a disk, and palsgd writes the workers' states to disks "
            "alone; give ModelCheckpoint a dirpath of one, or save_weights_only=True"
        )
    return Path(f"{filepath}.{_KEY}")


def _length(opt: LocalOptimizer, trainer: Trainer) -> tuple[int, int]:
    """How many steps a scheduler is made for, and the clock at the end of training; 0 if training
    has no end."""
    batches = trainer.estimated_stepping_batches
    if not 0 <= batches < math.inf:
        return 0, 0
    steps = int(batches)
    return steps, steps if trainer.max_steps == steps else clock_after(opt, steps)


def _get_random(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's random numbers, as dropout draws them."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def _set_random(found: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(found["cpu"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
