"""TinyStories as GPT-2 tokens: per split a file of 16-bit numbers, mapped into memory.

A split is one run of tokens: END story END story ... END. So every story has an END before it,
from which a model predicts the first word, and one behind it, which the model predicts last.
"""

import hashlib
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
import torch
from torch import Tensor

from palsgd.checks import check_int, check_text
from palsgd.json_files import read_json_object
from palsgd.lab.atomic import atomic_path, atomic_write
from palsgd.lab.data.download import Progress, fetch

END = 50256
SPLITS = ("train", "valid")
SEPARATOR = "<|endoftext|>"
TEXTS = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
TOKENIZER = "https://huggingface.co/openai-community/gpt2/resolve/main"
NOT_A_TARGET = -100
LONGEST = 2**24  # characters of a story or of a line; stories have some thousand
UNPACKED = 100  # times the size of a packed file; texts have five

Encode = Callable[[list[str]], Iterable[list[int]]]


class Stories:
    """The stories of a split, on the device (on a CPU they stay in the file)."""

    def __init__(self, folder: Path, split: str, device: torch.device | str):
        # torch has few operations on unsigned 16-bit numbers, so tokens are read as signed ones.
        # The file is mapped copy-on-write, as torch needs writable memory.
        found = read(folder, split)
        ends = np.flatnonzero(found == np.uint16(END).astype(np.int16))
        self._tokens = torch.from_numpy(found).to(device)
        self._ends = torch.from_numpy(ends).to(device)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def rows(self, which: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, one story per row, cut off or padded to `context` tokens."""
        places = self._ends[which, None] + torch.arange(context + 1, device=which.device)
        padding = places > self._ends[which + 1, None]
        words = self._tokens[places.clamp(max=len(self._tokens) - 1)].long() & 0xFFFF
        words.masked_fill_(padding, END)
        return words[:, :-1], words[:, 1:].masked_fill(padding[:, 1:], NOT_A_TARGET)


def is_prepared(folder: Path) -> bool:
    return all((folder / f"{split}.json").exists() for split in SPLITS)


def require(folder: Path, tokenizer: Path) -> None:
    """Raise a ValueError unless there are tokens, or texts and a tokenizer to make them."""
    if not is_prepared(folder):
        for split in SPLITS:
            _texts(folder, split)
        _tokenizer_files(tokenizer)


def count_stories(folder: Path, split: str) -> int:
    """In the texts of a split, which are read to the end."""
    return sum(1 for path in _texts(folder, split) for _ in filter(None, _stories(path, None)))


def prepare(
    source: Path, destination: Path, tokenizer: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Encode the texts in `source`. The record of what was encoded is returned and kept beside the
    tokens."""
    texts = {split: _texts(source, split) for split in SPLITS}
    encode = _encoder(tokenizer)
    try:
        return {s: _write(destination, s, texts[s], encode, progress) for s in SPLITS}
    except OSError as error:
        raise ValueError(
            f"could not write tokens into {destination} ({error}); copy the texts to a folder "
            "that can be written"
        ) from error


def download(texts: Path, tokenizer: Path, progress: Progress | None = None) -> None:
    """Download the texts and the tokenizer files that are missing."""
    for split in SPLITS:
        if not _found(texts, split):
            name = f"TinyStories-{split}.txt"
            fetch(f"{TEXTS}/{name}", texts / name, progress)
    for name in ("vocab.json", "merges.txt"):
        fetch(f"{TOKENIZER}/{name}", tokenizer / name, progress)


def read(folder: Path, split: str) -> np.ndarray:
    """The tokens of a split, as many as its record says."""
    path, expected = folder / f"{split}.bin", read_record(folder, split)["tokens"]
    try:
        found = np.memmap(path, dtype=np.int16, mode="c")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is missing or corrupt ({error}); prepare it again") from error
    if len(found) != expected:
        raise ValueError(f"{path} has {len(found)} tokens, not {expected}; prepare it again")
    return found


def read_record(folder: Path, split: str) -> dict[str, Any]:
    """What was said of a split when it was encoded: its tokens, stories and sources."""
    path, fix = folder / f"{split}.json", "prepare it again"
    found = {"stories": 0, "sources": []} | read_json_object(path, fix=fix)
    try:
        check_int("tokens", found.get("tokens"), least=1)
        check_int("stories", found["stories"])
        for source in found["sources"]:
            check_text("name", source["name"]), check_text("sha256", source["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of tokens ({error}); {fix}") from None
    return found


def _found(source: Path, split: str) -> list[Path]:
    """The text files of a split. A file that exists packed and unpacked counts once."""
    packed = {path.stem: path for path in sorted(source.glob(f"*{split}*.txt.xz"))}
    plain = {path.name: path for path in sorted(source.glob(f"*{split}*.txt"))}
    return list((packed | plain).values())


def _texts(source: Path, split: str) -> list[Path]:
    found = _found(source, split)
    if not found:
        raise ValueError(
            f"no TinyStories in {source}: looked for {split}.bin, *{split}*.txt and "
            f"*{split}*.txt.xz; get TinyStories-{split}.txt from {TEXTS}, or use the workload "
            "stories, which needs no files"
        )
    return found


def _tokenizer_files(folder: Path) -> list[Path]:
    files = [folder / name for name in ("vocab.json", "merges.txt")]
    for path in files:
        if not path.exists():
            raise ValueError(f"{path} is missing; get GPT-2's from {TOKENIZER}/{path.name}")
    return files


def _encoder(folder: Path) -> Encode:
    from tokenizers import Tokenizer, models, pre_tokenizers

    files = _tokenizer_files(folder)
    try:
        tokenizer = Tokenizer(models.BPE.from_file(*map(str, files)))
    except Exception as error:  # the library raises plain ones
        raise ValueError(f"{folder} has no GPT-2 tokenizer ({error}); copy it again") from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda stories: [found.ids for found in tokenizer.encode_batch(stories)]


def _write(
    folder: Path, split: str, texts: list[Path], encode: Encode, progress: Progress | None
) -> dict[str, Any]:
    record: dict[str, Any] = {"tokens": 1, "stories": 0, "sources": []}
    with atomic_path(folder / f"{split}.bin") as part, open(part, "wb") as file:
        file.write(np.uint16(END).tobytes())
        for path in texts:
            stories = filter(None, _stories(path, progress))
            while some := list(islice(stories, 1000)):
                words = [word for ids in encode(some) for word in (*ids, END)]
                file.write(np.array(words, dtype=np.uint16).tobytes())
                record["tokens"] += len(words)
                record["stories"] += len(some)
            record["sources"].append({"name": path.name, "sha256": _sha256(path)})
        if not record["stories"]:
            raise ValueError(f"{texts[0]} has no stories; download it again")
    atomic_write(folder / f"{split}.json", json.dumps(record, indent=2) + "\n")
    return record


def _stories(path: Path, progress: Progress | None) -> Iterator[str]:
    """The stories of a text file, which are separated by <|endoftext|>."""
    story, total = "", path.stat().st_size
    try:
        with open(path, "rb") as raw, io.TextIOWrapper(_unpacked(raw, path), "utf-8") as text:
            for line in _lines(text, most=UNPACKED * total):
                *ended, rest = line.split(SEPARATOR)
                for end in ended:
                    yield (story + end).strip()
                    story = ""
                    if progress:
                        progress(path.name, raw.tell(), total)
                story += rest
                if len(story) > LONGEST:
                    raise OSError(f"a story of more than {LONGEST:,} characters")
    except (OSError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is corrupt ({error}); download it again") from error
    yield story.strip()


def _lines(text: TextIO, *, most: int) -> Iterator[str]:
    """The lines of a text that has no more than `most` characters: a few packed bytes may stand for
    more than there is memory or time."""
    count = 0
    while line := text.readline(LONGEST):
        count += len(line)
        if len(line) == LONGEST:
            raise OSError(f"a line of more than {LONGEST:,} characters")
        if count > most:
            raise OSError(f"it unpacks to more than {UNPACKED} times its size")
        yield line


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    return cast(BinaryIO, lzma.LZMAFile(raw)) if path.suffix == ".xz" else raw


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
