"""Hugging Face's Trainer: a callback that keeps its training local, and its files whole."""

import gc
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import DefaultFlowCallback, TrainerCallback
from transformers.trainer_utils import has_length

from palsgd import checkpoint
from palsgd.checks import in_error, warn
from palsgd.integrations.clocked_scheduler import follow_clock
from palsgd.integrations.run_end import RunEnd
from palsgd.local_optimizer import LocalOptimizer
from palsgd.loop import clock_after
from palsgd.outer import takes_metric
from palsgd.packing import numbers
from palsgd.replica import unwrapped

FOLDER = "palsgd"  # of the workers' own files, in Trainer's checkpoint-N


class LocalTrainingCallback(TrainerCallback):  # type: ignore[misc]
    """Lets a Trainer train with a palsgd optimizer.

    The `DistributedDataParallel` that Trainer makes stays local. `max_steps` counts the clock,
    steps without data included; without it, training takes `num_train_epochs` passes over the data.
    The learning rate follows the clock, whichever scheduler Trainer has. Training ends synced.
    Evaluations and the model file of a checkpoint are of the global model. Every worker's own state
    is in the folder `palsgd` of `checkpoint-N`, and `train(resume_from_checkpoint=...)` goes on
    from it bit for bit. After `palsgd.leave_on_sigterm(opt)`, SIGTERM saves and stops.

    Give it as the last callback, and build `opt` after the `TrainingArguments`, which join the
    process group, from a model that is on `args.device`.

    Args:
        opt: the palsgd optimizer that the Trainer is given.
        resume_from: the checkpoint that `train(resume_from_checkpoint=...)` is given, if it is not
            in the `output_dir` of this run.

    Raises:
        ValueError: `opt` is no palsgd optimizer. In `Trainer(...)` and `train()`: something would
            exchange between syncs, or let workers take unequally many iterations.

    Example:
        >>> import tempfile, torch, palsgd
        >>> from transformers import Trainer, TrainingArguments
        >>> from palsgd.integrations.huggingface import LocalTrainingCallback
        >>> class Model(torch.nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": (super().forward(x) - labels).square().mean()}
        >>> model = Model(2, 1)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> opt = palsgd.LocalSGD(model, inner, sync_every=4, transport=palsgd.Alone())
        >>> args = TrainingArguments(
        ...     tempfile.mkdtemp(), max_steps=6, use_cpu=True, report_to="none", disable_tqdm=True
        ... )
        >>> data = [{"x": torch.ones(2), "labels": torch.zeros(1)}] * 8
        >>> trainer = Trainer(
        ...     model, args, train_dataset=data, optimizers=(opt, None),
        ...     callbacks=[LocalTrainingCallback(opt)],
        ... )
        >>> trainer.train().global_step, opt.clock, opt.synced  # doctest: +ELLIPSIS
        {...}
        (6, 6, True)
    """

    def __init__(self, opt: LocalOptimizer, *, resume_from: str | Path | None = None):
        if not isinstance(opt, LocalOptimizer):
            raise ValueError(
                f"LocalTrainingCallback got {in_error(opt)}; give it the palsgd optimizer that "
                "Trainer is given, as in Trainer(optimizers=(opt, None))"
            )
        self.opt = opt
        self._resume_from = resume_from
        self._end: RunEnd | None = None  # None if training ends with its data
        self._start = 0  # the clock at which the run began
        self._finished = False
        self._saved_at = -1  # the iteration whose files of the workers were written last
        self._passed_by: list[int] = []  # workers whose states were not loaded here
        opt.register_load_state_dict_pre_hook(partial(_own_state, self._passed_by))

    # -- what Trainer calls --------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        _check_arguments(args)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        opt = self.opt
        _check_arguments(args)  # also of a callback that was added after the Trainer was made
        _check_loop(opt, args, optimizer, train_dataloader, state)
        _stop_counting_tokens(args)
        for wrapper in _wrappers_of(opt.model):
            opt.attach(wrapper)
        by_data = args.max_steps <= 0
        if lr_scheduler is not None and not takes_metric(lr_scheduler):
            scale = dict(steps=state.max_steps, ticks=clock_after(opt, state.max_steps))
            follow_clock(opt, lr_scheduler, **(scale if by_data else {}))
        if state.global_step:
            self._resume(args, state)
        else:
            self._begin()
        self._end = None if by_data else RunEnd(opt, self._start + args.max_steps)
        self._finished, self._saved_at = False, -1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.opt.leaving:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        elif self._reached(state):
            self._finish()
            state.max_steps = state.global_step  # then Trainer evaluates and saves, as at any end
            control = DefaultFlowCallback().on_step_end(args, state, control)
        self._save_if_due(args, state, control)
        return control

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_training_stop:  # another callback may have asked for it
            self._finish()
        self._save_if_due(args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.opt._evaluation.shows_global:
            raise RuntimeError(
                f"checkpoint-{state.global_step} was written with a worker's local model, as a "
                "callback behind this one asked for it; give LocalTrainingCallback last"
            )
        self._save(args, state)  # of a save that the metric of an evaluation has asked for

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not args.load_best_model_at_end:
            self._finish()
            return
        # The model holds the best weights now. In evaluation mode the optimizer leaves them there.
        model = unwrapped(self.opt.model)
        best = deepcopy(model.state_dict())
        self._finish()
        self.opt.eval()
        model.load_state_dict(best)

    # -- the end -------------------------------------------------------------------------------

    def _reached(self, state: Any) -> bool:
        if self._end is None:
            return state.global_step >= state.max_steps
        return self._end.reached()

    def _finish(self) -> None:
        """Sync what is not synced. All workers get here in the same iteration."""
        synced = self._end is not None and self._end.synced
        if not (self._finished or self.opt.leaving or synced):
            self.opt.finish()
        self._finished = True

    # -- files ---------------------------------------------------------------------------------

    def _save_if_due(self, args: Any, state: Any, control: Any) -> None:
        """Before Trainer writes its own files, as it removes older checkpoints right after that.
        It writes the model that it finds, which is then the global one."""
        if control.should_save:
            self._save(args, state)
            self.opt.eval()

    def _save(self, args: Any, state: Any) -> None:
        if not args.save_only_model and self._saved_at != state.global_step:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
            opt = self.opt
            checkpoint.save(folder, opt.model, opt, keep=1, extra={"start": self._start})
            self._saved_at = state.global_step

    def _begin(self) -> None:
        if self._passed_by:
            raise ValueError(
                f"worker {self.opt.transport.worker} was given the state of worker "
                f"{self._passed_by[-1]}, which a LocalTrainingCallback does not load, as each "
                "worker has its own; use train(resume_from_checkpoint=...)"
            )
        self._start = self.opt.clock

    def _resume(self, args: Any, state: Any) -> None:
        """Load this worker's own files, as Trainer has loaded the rest of a checkpoint."""
        opt, found = self.opt, Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder = Path(self._resume_from or found) / FOLDER
        remedy = "give LocalTrainingCallback(opt, resume_from=...) the same folder as train()"
        shown = [p.detach().clone() for p in _parameters(opt)]
        try:
            loaded = checkpoint.load(folder, opt.model, opt)
        except ValueError as error:
            raise ValueError(f"{error} ({remedy}, if it is another one)") from None
        self._passed_by.clear()
        self._start = loaded.extra["start"]
        with opt.anchor_weights():
            same = all(map(torch.equal, shown, _parameters(opt)))
        if not same:
            raise ValueError(
                f"{folder} is of another checkpoint than the model that Trainer has loaded; "
                f"{remedy}"
            )


def _parameters(opt: LocalOptimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def _own_state(passed_by: list[int], opt: Any, state: dict[str, Any]) -> dict[str, Any] | None:
    """Trainer saves worker 0's state and gives it to all workers. The others keep theirs until the
    callback loads their own files."""
    try:
        saved = numbers(state)["worker"]
    except ValueError:  # the state of a plain optimizer, which is loaded into the inner one
        return None
    number, workers = saved["number"], opt.transport.workers
    if saved["of"] != workers:
        raise ValueError(
            f"the checkpoint is of {saved['of']} workers, and there are {workers}; start "
            f"{saved['of']} processes, or a new run from its model.safetensors"
        )
    if number == opt.transport.worker:
        return None
    passed_by.append(number)
    found: dict[str, Any] = opt.state_dict()
    return found


def _check_arguments(args: Any) -> None:
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise ValueError(
                f"TrainingArguments({name}=...) cuts one model over all processes, so that they "
                "are no workers; leave it out, or use accelerate's FSDP2 and "
                "palsgd.integrations.accelerate"
            )
    if args.fp16:
        raise ValueError(
            "TrainingArguments(fp16=True) skips steps on some workers and not on others, and "
            "Trainer exchanges after equally many; use bf16=True"
        )


def _check_loop(opt: LocalOptimizer, args: Any, given: Any, loader: Any, state: Any) -> None:
    used = getattr(given, "optimizer", given)  # inside accelerate's proxy
    if used is not opt:
        raise ValueError(
            f"Trainer trains with another {type(used).__name__} than its LocalTrainingCallback "
            "has; give both the same palsgd optimizer"
        )
    if args.world_size < opt.transport.workers:
        raise ValueError(
            f"Trainer knows of {args.world_size} process(es) and the optimizer of "
            f"{opt.transport.workers} workers, so that all would train on the same data; use "
            "TrainingArguments(use_cpu=True) where there is no GPU"
        )
    if opt._worker.course.draws_alone:
        raise ValueError(
            f"draws={opt.config['draws']!r} gives workers unequally many batches between two "
            "syncs, and Trainer exchanges after equally many; use draws='balanced'"
        )
    if issubclass(type(loader), DataLoaderDispatcher):
        raise ValueError(
            "the loader reads all batches on process 0 and sends them to the others at every step; "
            "use TrainingArguments(accelerator_config={'dispatch_batches': False})"
        )
    if state.is_hyper_param_search:
        raise ValueError(
            "hyperparameter_search() trains one model after another, and this callback has the "
            "optimizer of one; start a Trainer for each set of hyper-parameters"
        )
    length = len(loader) if has_length(loader) else None
    opt.transport.agree({"the number of batches in an epoch": length})


def _stop_counting_tokens(args: Any) -> None:
    """Have no number exchanged in every step."""
    if args.average_tokens_across_devices and args.world_size > 1:
        args.average_tokens_across_devices = False
        warn(
            "average_tokens_across_devices=True exchanges a number at every step, so it was "
            "switched off: the loss of a worker is the mean over its own tokens; give "
            "TrainingArguments(average_tokens_across_devices=False)"
        )


def _wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """What Trainer has put around the model. It tells its callbacks of the model alone."""
    gc.collect()  # a wrapper of an earlier Trainer may be waiting for it
    inside = unwrapped(model)
    # by type(), as some objects of torch warn when they are asked for their class
    found = (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))
    return [wrapper for wrapper in found if unwrapped(wrapper) is inside]
