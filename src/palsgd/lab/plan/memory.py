"""Bytes that training holds on each device, activations not counted."""

from palsgd.cluster import Work

# tensors of inner state per parameter, with momentum
STATE = {"sgd": 1, "nesterov": 1, "adam": 2, "adamw": 2}
MESSAGE = 128 * 2**20  # bytes: the longest bucket of a sync, unless bucket_mb says otherwise


def memory(work: Work, *, inner: str, workers: int, outer_state: int = 1) -> dict[str, float]:
    """The bytes by purpose. Models are in fp32; the outer optimizer has `outer_state` tensors."""
    payload = work.payload(workers)
    model = float(payload.itemsize * work.parameters)
    found = {"model": model, "gradients": model, "inner optimizer": STATE[inner] * model}
    if work.is_ddp:
        return found | {"DDP's buckets": model}
    part = float(payload.itemsize * max(payload.fragments))
    found |= {"anchor": model, "outer optimizer": outer_state * model}
    found["messages"] = part if work.carries.whole else min(part, MESSAGE)
    if work.delay:
        found["messages"] = part
        found["fragment as it was sent"] = part
    # residues of the messages and, with two coded steps, of the means that this worker coded
    if payload.codec is not None:
        means = 0.0 if payload.codec.gathered else model / workers
        found["compression residues"] = model + means
    return found
