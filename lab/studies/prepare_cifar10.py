"""CIFAR-10 in parts that each stay below a size, for machines that take only small files at once.

    python lab/studies/prepare_cifar10.py FOLDER --most 60 --out data/cifar10-parts
    python lab/studies/prepare_cifar10.py --join data/cifar10-parts --out data/cifar10

FOLDER has CIFAR-10 as lossless WebP sprites (data_batch_1.webp to test_batch.webp and
labels_filenames.tsv.xz, 102 MB in all), a form that the lab reads. No lossless form of it is much
smaller, so its files are shared out as they are: `part-1`, `part-2`, ... of at most --most MiB.
`--join` puts those that have arrived together again, and says which are missing. `SUMS` goes with
every part, so that a joined folder is known to be the original, bit for bit.
"""

import argparse
import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

FILES = (
    *(f"data_batch_{number}.webp" for number in range(1, 6)), "test_batch.webp",
    "labels_filenames.tsv.xz",
)  # fmt: skip
SUMS = "SUMS"


def shares(sizes: dict[str, int], most: int) -> list[list[str]]:
    """The names in as many lists as it takes, none of which has more than `most` bytes."""
    found: list[list[str]] = []
    for name, size in sizes.items():
        if size > most:
            raise ValueError(f"{name} has {size} bytes, above --most; allow {size / 2**20:.0f} MiB")
        room = (part for part in found if sum(sizes[each] for each in part) + size <= most)
        part = next(room, None)
        if part is None:
            found.append([name])
        else:
            part.append(name)
    return found


def split(folder: Path, out: Path, most: int) -> list[Path]:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {missing[0]}; give the folder of the WebP sprites")
    sums = "".join(f"{_digest(folder / name)}  {name}\n" for name in FILES)
    made = []
    for number, names in enumerate(shares(_sizes(folder), most), start=1):
        part = out / f"part-{number}"
        part.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(folder / name, part / name)
        (part / SUMS).write_text(sums)
        made.append(part)
    return made


def join(parts: Path, out: Path) -> None:
    """Move the files of all parts into one folder, and compare them with their checksums."""
    there = {path.name: path for path in sorted(parts.glob("part-*/*"))}
    if SUMS not in there:
        raise ValueError(f"{parts} has no part-1/{SUMS}; give the folder of the parts")
    sums = dict(line.split("  ")[::-1] for line in there[SUMS].read_text().splitlines())
    missing = [name for name in sums if name not in there and not (out / name).is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing; bring the other parts too")
    out.mkdir(parents=True, exist_ok=True)
    for name, digest in sums.items():
        if name in there:
            shutil.copyfile(there[name], out / name)
        if _digest(out / name) != digest:
            raise ValueError(f"{out / name} has not the SHA-256 of {SUMS}; bring its part again")


def _sizes(folder: Path) -> dict[str, int]:
    """In the order of FILES, the largest first where they differ much."""
    return {name: (folder / name).stat().st_size for name in FILES}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="CIFAR-10 in parts, and joined again")
    parser.add_argument("folder", nargs="?", type=Path, help="of the WebP sprites")
    parser.add_argument("--join", type=Path, help="folder of the parts, to put together")
    parser.add_argument("--most", type=float, default=60, help="MiB of a part")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    try:
        if args.join is not None:
            join(args.join, args.out)
        elif args.folder is not None:
            print(*split(args.folder, args.out, int(args.most * 2**20)), sep="\n")
        else:
            raise ValueError("give the folder of the sprites, or --join and that of the parts")
    except ValueError as error:
        print(f"prepare_cifar10: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
