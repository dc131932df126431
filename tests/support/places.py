"""Where the repository's folders are, so that no test counts its own parent folders."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
BENCH = ROOT / "bench"
STUDIES = ROOT / "lab" / "studies"
GOLDEN = ROOT / "tests" / "golden"
SHARED = ROOT.parent / "shared" / "data"  # data sets; tests that need one skip where it is absent
