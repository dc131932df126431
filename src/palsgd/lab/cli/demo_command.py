"""`palsgd demo`."""

from palsgd.lab.cli.common_options import Force, Out, Quiet, Resume, method_names, settings_from
from palsgd.lab.cli.running import run_compared


def demo(
    out: Out = None, quiet: Quiet = False, force: Force = False, resume: Resume = False
) -> None:
    """Four methods on handwritten digits, in real processes: a table and a report in a minute.

    Example: palsgd demo
    """
    settings, methods = settings_from("digits", None), method_names(None)
    run_compared(settings, methods, out, "demo", quiet=quiet, force=force, resume=resume)
