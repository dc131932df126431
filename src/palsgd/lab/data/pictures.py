"""Pictures in files, of the kinds that data sets come in."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Pillow knows more kinds by their content, some of which other programs draw.
KINDS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")
MOST_PIXELS = 2**26  # 60,000 tiles of CIFAR-10 are a little fewer


def read_picture(path: Path | str) -> Any:
    """The picture of a file, in red, green and blue."""
    with opened_picture(path) as image:
        return image.convert("RGB")


@contextmanager
def opened_picture(path: Path | str) -> Iterator[Any]:
    """A picture whose size is known and whose pixels are not yet read. Inside, what is wrong with
    the file is raised as a ValueError that names it."""
    from PIL import Image

    # what Pillow raises for damaged files, of the many kinds it reads
    damages = (OSError, SyntaxError, ValueError, EOFError, struct.error)
    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(path, formats=KINDS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are more than is read")
            yield image
    except (*damages, *bombs) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is missing or not an image ({reason}); copy it again") from error
