"""Several inner optimizers as one: Muon takes matrices only, AdamW the rest."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Joined(Optimizer):
    """Groups and state are those of the parts, whose order is kept."""

    def __init__(self, parts: Sequence[Optimizer]):
        self.parts = list(parts)
        if not self.parts or not all(isinstance(part, Optimizer) for part in self.parts):
            kinds = ", ".join(type(part).__name__ for part in self.parts) or "none"
            raise ValueError(f"inner must be torch optimizers, got {kinds}; give one or a list")
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        kept = {p: state for part in self.parts for p, state in part.state.items()}
        return defaultdict(dict, kept)

    @state.setter
    def state(self, value: Any) -> None:
        """The base class would install a state of its own; the parts have theirs."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __repr__(self) -> str:
        return " + ".join(type(part).__name__ for part in self.parts)
