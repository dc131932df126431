"""Dependencies point downwards, and what a method is called is known to its own file alone."""

import ast
from pathlib import Path

import pytest

import palsgd
from palsgd import registry

ROOT = Path(palsgd.__file__).parent
# From the bottom to the top. A module imports from its own layer and from those below; imports for
# types, and those inside functions, count too.
LAYERS = (
    ("checks", "digest", "disk", "errors", "events", "feed", "finite", "flat", "interrupts"),
    ("json_files", "outer", "progress", "references", "rows", "scalars", "sharding"),
    ("tensor_files", "unsynced", "units"),
    (
        *("auto_interval", "codecs", "ledger", "meter", "offload", "pacing", "replica", "schedule"),
        *("process_groups", "two_levels", "wrapped"),
    ),
    (
        *("agreement", "anchor", "buffers", "inner", "memory", "packing", "passes"),
        *("position", "transports"),
    ),
    (
        *("averaged_state", "composed", "method", "methods", "method_state", "method_view"),
        *("registry", "tensors"),
    ),
    ("options", "parts", "payload", "schedulers"),
    ("keywords",),
    ("guard", "untrained"),
    ("pending_sync", "warmup"),
    ("course", "sync_tail"),
    ("outgoing", "sync_changes"),
    ("sync",),
    ("bookkeeping",),
    ("meetings", "steps"),
    ("worker",),
    (
        *("assembly", "driver", "evaluation", "live_state", "settings", "state", "state_0_1"),
        *("state_optimizers", "state_parts", "state_rank", "welcome"),
    ),
    ("local_optimizer",),
    ("leaving", "loop", "optimizer"),
    ("checkpoint",),
    ("integrations",),
    ("cluster",),
    ("simulator",),
    ("theory",),
    ("lab",),
    ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
# What points upwards, and why.
UPWARDS = {
    ("methods", "optimizer"): "palsgd.methods.FedProx(...) builds an optimizer when it is called",
    ("payload", "worker"): "of a type: the sizes of the messages of a worker that was built",
}
WHOLE = ("theory", "lab")  # they use the library as its users do: import palsgd


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def unit(path: Path) -> str:
    """The module or package of palsgd that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The units of palsgd that a file imports; "palsgd" for the package itself."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            whole = node.module == "palsgd"
            names = [f"palsgd.{a.name}" for a in node.names] if whole else [node.module or ""]
        found |= {[*n.split("."), "palsgd"][1] for n in names if n.split(".")[0] == "palsgd"}
    return found


def test_every_module_is_in_one_layer():
    assert {unit(path) for path in modules()} == set(HEIGHT)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_from_below(path):
    own = unit(path)
    for other in imported(path):
        if other == "palsgd":
            assert own in WHOLE, f"{path} imports the whole package"
        elif HEIGHT[other] > HEIGHT[own]:
            assert (own, other) in UPWARDS, f"{own} imports {other}, which lies above it"


def test_exceptions_are_still_needed():
    found = {(unit(path), other) for path in modules() for other in imported(path)}
    assert set(UPWARDS) <= found


# -- names of methods ------------------------------------------------------------------------------

# The name of the program is also that of a method. Here it is the program's.
PROGRAM = {
    ("lab/trainer.py", "palsgd"): "the version in config.yaml",
    ("lab/run_fields.py", "palsgd"): "the version in config.yaml",
    ("lab/tuning/record.py", "palsgd"): "the version in tuned.yaml",
    ("theory/results.py", "palsgd"): "the version in results.json",
    ("lab/cli/running.py", "palsgd"): "the command line to go on with",
    ("lab/report/about.py", "palsgd"): "the version in a report",
}


def named(tree: ast.AST) -> set[str]:
    """Names of methods that are compared with, listed, or given to a call by keyword."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            found += [node.left, *node.comparators]
        elif isinstance(node, ast.List | ast.Tuple | ast.Set):
            found += node.elts
        elif isinstance(node, ast.Dict):
            found += [*node.keys, *node.values]
        elif isinstance(node, ast.Call):
            found += [*node.args, *(k.value for k in node.keywords)]
        elif isinstance(node, ast.MatchValue):
            found.append(node.value)
    texts = {each.value for each in found if isinstance(each, ast.Constant)}
    return {text for text in texts if text in registry.names()}


def calls_for_a_logger(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger"


class WithoutLoggers(ast.NodeTransformer):
    def visit_Call(self, node):
        return ast.Constant(None) if calls_for_a_logger(node) else self.generic_visit(node)


@pytest.mark.parametrize(
    "path", [p for p in modules() if unit(p) != "methods"], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_module_but_a_methods_own_compares_or_lists_names_of_methods(path):
    tree = WithoutLoggers().visit(ast.parse(path.read_text()))
    where = str(path.relative_to(ROOT))
    assert {name for name in named(tree) if (where, name) not in PROGRAM} == set()


def test_a_comparison_with_a_name_would_be_found():
    for code in ('m == "ddp"', 'x = ("ddp", 1)', 'f(method="diloco")', 'x = {"method": "ddp"}'):
        assert named(ast.parse(code))
