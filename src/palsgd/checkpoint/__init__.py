"""Checkpoints: what all workers need to go on bit for bit, as files that are whole or absent.

Every rank writes one file. When all have written, each disk gets a manifest, and the save its name.
Workers may share a disk or have one each. Nothing in a checkpoint is code, and nothing is parsed
before its checksum was compared.
"""

from palsgd.checkpoint.loading import Loaded, load
from palsgd.checkpoint.model_file import save_model
from palsgd.checkpoint.saving import save
from palsgd.checkpoint.step_folders import Saved, find

__all__ = ["Loaded", "Saved", "find", "load", "save", "save_model"]
