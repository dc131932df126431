"""The top of a page as a picture, taken by a browser that is installed."""

import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def take_screenshot(page: Path, picture: Path, *, width: int = 1280, height: int = 1830) -> Path:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ValueError(f"a picture needs a browser; install one of {', '.join(BROWSERS)}")
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={profile}", f"--window-size={width},{height}",
                f"--screenshot={picture.resolve()}", page.resolve().as_uri(),
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    if done.returncode or not picture.exists():
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"{browser} took no picture of {page}: {said}")
    return picture
