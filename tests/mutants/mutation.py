"""Single-line bugs: every place of a source text where one small change makes another program."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.Pow: ("**", "*"),
}


@dataclass(frozen=True)
class Mutant:
    """A replacement of some characters of one line."""

    file: str
    line: int  # from 1
    start: int
    stop: int
    text: str  # what stands there instead
    what: str  # the line as it becomes, for people

    def applied(self, source: str) -> str:
        lines = source.splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.start] + self.text + old[self.stop :]
        return "".join(lines)


def mutants_of(source: str, file: str = "") -> list[Mutant]:
    """All mutants of a source text, in its order. Each of them compiles."""
    lines, tree, found = source.splitlines(), ast.parse(source), []
    for line, start, stop, text in _changes(tree, lines):
        old = lines[line - 1]
        new = old[:start] + text + old[stop:]
        mutant = Mutant(file, line, start, stop, text, new.strip())
        changed = [*lines[: line - 1], new, *lines[line:]]
        if new.strip() != old.strip() and _compiles(changed, tree, line):
            found.append(mutant)
    return sorted(set(found), key=lambda m: (m.line, m.start, m.text))


def chosen(files: list[Path], root: Path, *, count: int, seed: int) -> list[Mutant]:
    """`count` mutants of these files, the same ones for the same sources and seed. A line has at
    most one, so that they are spread over the code."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path in files:
        for mutant in mutants_of(path.read_text(), str(path.relative_to(root))):
            by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    draw = random.Random(seed)
    lines = draw.sample(sorted(by_line), count)
    return sorted((draw.choice(by_line[line]) for line in lines), key=lambda m: (m.file, m.line))


def _changes(tree: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, int, str]]:
    """Line, first and last column, and new text of every change."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operators = _COMPARISONS[type(node.ops[0])]
            yield from _between(node.left, node.comparators[0], lines, *operators)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            yield from _between(node.left, node.right, lines, *_ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            operators = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _between(node.values[0], node.values[1], lines, *operators)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from _instead(node, lines, ast.unparse(node.operand))
        elif isinstance(node, ast.Constant):
            yield from _instead(node, lines, _other_constant(node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.YieldFrom)):
            yield from _instead(node, lines, "pass")
        elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            yield from _between(node.target, node.value, lines, *_ARITHMETIC[type(node.op)])


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside functions that compute something."""
    for function in _functions(tree):
        if function.name not in ("__repr__", "__str__"):
            yield from (found for part in function.body for found in _and_below(part))


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Of a module and its classes; not those inside others."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


# Assertions and the texts of errors are no arithmetic. Annotations and defaults are the
# signature's. `strict` of zip() is an assertion too, and a negative constant stands for "none yet",
# which another negative number would mean as well.
_SKIPPED = (
    ast.Assert,
    ast.Raise,
    ast.JoinedStr,
    ast.Import,
    ast.ImportFrom,
    ast.arguments,
)


def _and_below(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, _SKIPPED) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _and_below(child)


def _between(
    left: ast.expr, right: ast.expr, lines: list[str], old: str, new: str
) -> Iterator[tuple[int, int, int, str]]:
    """The operator between two operands on one line."""
    if left.end_lineno == right.lineno and left.end_col_offset is not None:
        between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
        start = left.end_col_offset + between.find(old)
        if old in between:
            yield right.lineno, start, start + len(old), new


def _instead(
    node: ast.expr | ast.stmt, lines: list[str], text: str | None
) -> Iterator[tuple[int, int, int, str]]:
    plain = lines[node.lineno - 1].isascii()  # columns of the tree are counted in bytes
    if text is not None and node.lineno == node.end_lineno and plain:
        assert node.end_col_offset is not None
        yield node.lineno, node.col_offset, node.end_col_offset, text


def _other_constant(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, (int, float)):
        return repr(value + 1)
    return None


def _compiles(lines: list[str], tree: ast.Module, line: int) -> bool:
    """Does the function of this line compile? The whole text takes many times as long."""
    place = next(each for each in _functions(tree) if each.lineno <= line <= (each.end_lineno or 0))
    around = ["if True:"] if place.col_offset else []  # a method is indented
    text = "\n".join([*around, *lines[place.lineno - 1 : place.end_lineno]])
    try:
        compile(text, "mutant", "exec")
    except SyntaxError:  # parentheses around an operand, for example
        return False
    return True
