"""How an optimizer is called: the names of its arguments, in help texts and in errors."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer

from palsgd.options import OPTIONS

Kind = TypeVar("Kind", bound=type[Optimizer])


def documented(kind: Kind) -> Kind:
    """Add the options that all optimizers share to the docstring and the signature of a class, and
    check the names of the arguments it is built with."""
    kind.__doc__ = explained(kind.__doc__)
    own, refused = kind.__init__, kind.refused  # type: ignore[attr-defined]
    signature = inspect.signature(own)
    if _takes_any(signature):
        signature = joined(signature, inspect.signature(kind.__mro__[1]), {"method", *refused})
        kind.__signature__ = signature  # type: ignore[attr-defined]
    known = set(signature.parameters) - {"self"}

    @functools.wraps(own)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        check_names(kind.__name__, args, keywords, known, refused)
        own(self, *args, **keywords)

    kind.__init__ = init  # type: ignore[misc, method-assign]
    return kind


def explained(text: str | None) -> str:
    """A docstring, with the options that all optimizers share."""
    return inspect.cleandoc(text or "") + "\n\n" + inspect.cleandoc(OPTIONS)


def named(build: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """A function that builds an optimizer, with this signature, which its arguments must fit."""

    @functools.wraps(build)
    def checked(*args: Any, **keywords: Any) -> Any:
        # outer= is the method's own to refuse, with its reason
        known = {*signature.parameters, "outer"}
        check_names(build.__name__, args, keywords, known, {})
        return build(*args, **keywords)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def joined(
    own: inspect.Signature, shared: inspect.Signature, hidden: set[str]
) -> inspect.Signature:
    """The parameters of `own`, with those of `shared` in place of its **keywords."""
    first = [p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD]
    first = [p for p in first if p.name != "self"]
    hidden = hidden | {p.name for p in first}
    more = [p.replace(kind=p.KEYWORD_ONLY) for n, p in shared.parameters.items() if n not in hidden]
    return own.replace(parameters=[*first, *more])


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def check_names(
    title: str,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    known: set[str],
    refused: Mapping[str, str],
) -> None:
    """Raise a TypeError for a keyword that is refused or unknown, and where the model or the inner
    optimizer is missing."""
    for name in keywords:
        if name in refused:
            raise TypeError(refused[name])
    if not {"model", "inner"} <= {*("model", "inner")[: len(args)], *keywords}:
        raise TypeError(
            f"{title} needs a model and an inner optimizer of its parameters; use for instance "
            f"{title}(model, torch.optim.AdamW(model.parameters(), lr=1e-3))"
        )
    unknown = next((name for name in keywords if name not in known), None)
    if unknown is not None:
        nearest = difflib.get_close_matches(unknown[:60], sorted(known), n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"it takes {', '.join(sorted(known))}"
        raise TypeError(f"{title} got an unexpected keyword {unknown!r}; {hint}")
