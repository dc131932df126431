"""Messages that several workers exchange round after round, in memory or over a transport."""

import hashlib

import numpy as np
import torch

from palsgd.codecs import BLOCK, Codec, find_codec
from palsgd.transports import Message, Transport, average_in_memory

CODECS = ["bf16", "int8", "int4", "topk:0.05", "sign"]


class Sign(Codec):
    """One bit per value, and the mean magnitude of the block."""

    gathered = True
    decay = 0.8

    def encode(self, blocks):
        bits = (blocks >= 0).view(len(blocks), -1, 8).to(torch.uint8)
        packed = (bits << torch.arange(8, dtype=torch.uint8)).sum(dim=2, dtype=torch.uint8)
        scale = blocks.abs().mean(dim=1, keepdim=True)
        return torch.cat([packed, scale.view(torch.uint8)], dim=1)

    def decode(self, codes):
        bits = codes[:, : BLOCK // 8, None] >> torch.arange(8, dtype=torch.uint8) & 1
        scale = codes[:, BLOCK // 8 :].clone().view(torch.float32)
        return (bits.view(-1, BLOCK).float() * 2 - 1) * scale


def codec_of(name):
    return find_codec(Sign() if name == "sign" else name)


def brought(worker, turn, size=3000, exact=7, dtype=torch.float32):
    """What a worker brings to a round: values of many magnitudes, the same on any machine."""
    rng = np.random.default_rng([worker, turn])
    mantissas = rng.uniform(-1, 1, size=size + exact)
    values = np.ldexp(mantissas, rng.integers(-6, 6, size=size + exact))
    return torch.tensor(values.astype(np.float32), dtype=dtype)


def rounds_in_memory(name, workers, turns=3, exact=7, **kw):
    """The messages of the last of several rounds, residues carried along; and the bytes."""
    codec, left = codec_of(name), [None] * workers
    for turn in range(turns):
        values = [brought(k, turn, exact=exact, **kw) for k in range(workers)]
        pairs = zip(values, left, strict=True)
        messages = [Message(v, exact, codec, residue) for v, residue in pairs]
        sent = average_in_memory(messages)
        left = [message.residue for message in messages]
    return messages, sent


def rounds_over(transport: Transport, name, turns=3, exact=7, **kw):
    """The same for one worker, over a transport; as NumPy arrays."""
    codec, left = codec_of(name), None
    for turn in range(turns):
        values = brought(transport.worker, turn, exact=exact, **kw)
        message = Message(values, exact, codec, left)
        sent = transport.exchange(message)
        left = message.residue
    return (*arrays(message), sent)


def arrays(message):
    left = message.residue
    if left is None:
        return message.values.numpy(), None, None
    return message.values.numpy(), left.own.numpy(), left.mean.numpy()


def digest(messages):
    """Of the bits of the mean and of all that was left."""
    found = hashlib.sha256(messages[0].values.numpy().tobytes())
    rows = -(-len(messages[0].residue.own) // (len(messages) * BLOCK)) * BLOCK
    for message in messages:  # with zeros up to whole blocks, as the hashes were recorded
        own = padded(message.residue.own.numpy(), len(messages) * rows)
        found.update(own.tobytes() + padded(message.residue.mean.numpy(), rows).tobytes())
    return found.hexdigest()[:16]


def padded(values, size):
    return np.pad(values, (0, size - len(values)))
