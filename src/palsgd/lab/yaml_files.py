"""YAML files, read so that none can do harm: the one place of the lab that parses YAML.

A file is a mapping of texts, numbers, lists and mappings. What YAML has beyond JSON is refused as
it is met, in one line with the file's name: tags, which make objects; anchors and aliases, by which
a few lines unfold to gigabytes. So are names that are there twice, of which YAML keeps the last,
and whatever is beyond the bounds of `palsgd.json_files`. Dates are texts.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import yaml

from palsgd.checks import check_text, in_error, is_whole
from palsgd.json_files import MOST_DEPTH, read_text, whole_number

MOST_BYTES = 2**18  # a second or two to parse; files of ours have some thousand
_LONGEST_NUMBER = 40  # characters; no float needs more than 25
_PREFIX = "tag:yaml.org,2002:"
# of what YAML takes from the look of a word
_KINDS = {_PREFIX + kind for kind in ("bool", "int", "float", "null")}


def read_yaml(path: str | Path, *, fix: str) -> dict[str, Any]:
    """The mapping in a YAML file. `fix` ends the error, a ValueError of one line, for a file that
    has none.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from palsgd.lab.yaml_files import read_yaml
        >>> path = Path(tempfile.mkdtemp()) / "cluster.yaml"
        >>> _ = path.write_text("rate: 100mbit\\nworkers: 4\\n")
        >>> read_yaml(path, fix="give another")
        {'rate': '100mbit', 'workers': 4}
    """
    try:
        found = yaml.load(read_text(path, fix=fix, most=MOST_BYTES), _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not plain YAML ({_reason(error)}); {fix}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path} has no fields such as `name: value`; {fix}")
    return found


def yaml_text(value: Mapping[str, Any], *, width: int = 80) -> str:
    """The value as YAML that `read_yaml` reads: a list that is there twice is written twice."""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=width)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar = {
        first: [each for each in resolvers if each[0] in _KINDS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    # The scanner comes first and does not recurse, so depth is bounded here: its time for a text is
    # linear in the depth, and the parts behind it recurse.

    def fetch_flow_collection_start(self, token: Any) -> None:
        self._check_depth()
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        added = super().add_indent(column)
        self._check_depth()
        return added

    def _check_depth(self) -> None:
        if self.flow_level + len(self.indents) > MOST_DEPTH:
            self._refuse(f"more than {MOST_DEPTH} lists and mappings inside each other")

    def fetch_alias(self) -> None:
        self._refuse("an alias (*name)")

    def fetch_anchor(self) -> None:
        self._refuse("an anchor (&name)")

    def fetch_tag(self) -> None:
        self._refuse("a tag (!name)")

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) and not is_whole(key):
                why = f"the name {in_error(key)} is no text or whole number"
                self._refuse(why, key_node.start_mark)
            if key in found:
                self._refuse(f"the name {in_error(key)} is there twice", key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=deep)
        return found

    def construct_text(self, node: Any) -> str:
        return self._checked(node, lambda node: check_text("a text", node.value))

    def construct_whole_number(self, node: Any) -> int:
        return self._checked(node, lambda node: whole_number(self.construct_yaml_int(node)))

    def construct_number(self, node: Any) -> float:
        return self._checked(node, self.construct_yaml_float)

    def _checked(self, node: Any, value: Callable[[Any], Any]) -> Any:
        if node.tag != _PREFIX + "str" and len(node.value) > _LONGEST_NUMBER:
            self._refuse(f"a number of {len(node.value)} digits", node.start_mark)
        try:
            return value(node)
        except ValueError as error:  # such as 0x_, which looks like a number
            self._refuse(str(error), node.start_mark)

    def _refuse(self, why: str, mark: Any = None) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=why, problem_mark=mark or self.get_mark())


_Loader.add_constructor(_PREFIX + "str", _Loader.construct_text)
_Loader.add_constructor(_PREFIX + "int", _Loader.construct_whole_number)
_Loader.add_constructor(_PREFIX + "float", _Loader.construct_number)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _reason(error: yaml.YAMLError) -> str:
    """In one line, where YAML's own errors show the text around them."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    where = "" if mark is None else f", line {mark.line + 1}"
    return f"{error.problem or error.context}{where}"
