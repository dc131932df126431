"""What torch has: DistributedDataParallel, its bf16 hook, and PostLocalSGDOptimizer."""

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from trainee import Trainee


class TorchDDP(Trainee):
    def __init__(self, *args: Any, hook: str | None = None, bucket_mb: int | None = None):
        self.hook, self.bucket_mb = hook, bucket_mb
        super().__init__(*args)

    def prepare(self) -> None:
        super().prepare()
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=self.bucket_mb)
        if self.hook == "bf16":
            self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)


class PostLocalSGD(Trainee):
    """Local from the first step, as everyone here: its hook hands gradients on as they are."""

    def __init__(self, *args: Any, sync_every: int):
        self.sync_every = sync_every
        super().__init__(*args)

    def prepare(self) -> None:
        super().prepare()
        self.model = DistributedDataParallel(self.net)
        state = PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
        self.model.register_comm_hook(state, post_localSGD_hook)
        # The averager meets after step `warmup_steps`, counted from 0, and every period after it.
        averager = PeriodicModelAverager(self.sync_every, warmup_steps=self.sync_every - 1)
        self.inner = PostLocalSGDOptimizer(self.inner, averager)
