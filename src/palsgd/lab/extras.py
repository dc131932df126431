"""Which extra of the package brings a library that may be missing."""

# pyproject.toml has the same extras; a test compares them, and both with what the source imports.
BROUGHT = {
    "lab": (
        *("jinja2", "matplotlib", "pandas", "rich", "scipy", "sklearn"),
        *("tokenizers", "typer", "yaml"),
    ),
    "vision": ("PIL", "torchvision"),
    "tensorboard": ("tensorboard",),
}


def missing(error: ModuleNotFoundError) -> str:
    """What is missing, and what to install.

    Example:
        >>> missing(ModuleNotFoundError("No module named 'PIL'", name="PIL"))
        "No module named 'PIL'; it comes with: pip install 'palsgd[lab,vision]'"
    """
    name = (error.name or "").partition(".")[0]
    found = [extra for extra, modules in BROUGHT.items() if name in modules]
    if not found:
        return f"{error}; install it"
    extras = dict.fromkeys(("lab", *found))
    return f"{error}; it comes with: pip install 'palsgd[{','.join(extras)}]'"
