"""The form of a saved state: torch's `state` and `param_groups`, with palsgd's part inside.

Every parameter's entry in `state` has the inner optimizer's tensors and, under the key "palsgd",
those of palsgd that are like the parameter: the anchor, the outer optimizer's and the method's. The
entry of the first trained parameter also has all numbers (`scalars`, as bytes) and the few tensors
that are like no parameter. Whatever carries the state of a torch optimizer, parameter by parameter,
thus carries everything.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from palsgd.replica import Replica
from palsgd.scalars import decode, encode, without_room
from palsgd.sharding import is_sharded, local_tensor

OWN = "palsgd"  # the key of palsgd's part in a parameter's entry
_SCALARS = "scalars"
_PLACE = "palsgd tensor"  # the key of a dict that stands for a tensor in the scalars
_LIKE_MODEL, _LOOSE = "like the model", "loose"


class ModelLike(dict[str, Tensor]):
    """One tensor for each trained parameter, by name."""


def packed(fields: dict[str, Any], inner: dict[str, Any], replica: Replica) -> dict[str, Any]:
    """The fields of a state in torch's form. `inner` is the inner optimizer's state."""
    own: dict[str, dict[str, Any]] = {name: {} for name in replica.names}
    loose = own[replica.names[0]]
    tree = _without_tensors(fields, "", own, loose)
    loose[_SCALARS] = _row(encode(tree, replica.device), replica)
    entries = dict(inner["state"])
    for number, name in zip(_numbers(replica), replica.names, strict=True):
        entries[number] = {**entries.get(number, {}), OWN: own[name]}
    # in the order of the parameters; a user's own entries, which have no number, go last
    ordered = sorted(entries.items(), key=lambda pair: (not isinstance(pair[0], int), pair[0]))
    return {**inner, "state": dict(ordered)}


def check_form(state: Any) -> None:
    """Refuse what is no state of an optimizer at all. Whose state it is, is checked when it is
    loaded."""
    state = state if isinstance(state, Mapping) else {}
    groups = state.get("param_groups", [])
    listed = isinstance(groups, list | tuple) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
        for group in groups
    )
    if not state or not listed or not isinstance(state.get("state", {}), Mapping):
        raise ValueError(
            "this is no state of an optimizer, which has `state` and `param_groups`; give what "
            "state_dict() returned"
        )


def compact(state: Mapping[str, Any], *, inner: bool = True) -> dict[str, Any]:
    """A state for a file of this rank that is read whole: without the room that its numbers have to
    grow and, unless `inner`, without the tensors of the inner optimizer."""
    entries: dict[Any, Any] = {}
    for key, entry in state["state"].items():
        if not isinstance(entry, Mapping):
            entries[key] = entry
            continue
        own = dict(entry.get(OWN, {}))
        if _SCALARS in own:
            own[_SCALARS] = without_room(_own_row(own[_SCALARS], 0))
        entries[key] = {**(entry if inner else {}), OWN: own}
    return {**state, "state": entries}


def _entries(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of parameters. Others may put values of their own beside them."""
    return [entry for entry in state["state"].values() if isinstance(entry, Mapping)]


def _without_own(entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    return {name: value for name, value in entry.items() if name != OWN}


def is_plain(state: Mapping[str, Any]) -> bool:
    """Is this the state of a torch optimizer without palsgd's part?"""
    if not {"state", "param_groups"} <= set(state):
        return False
    return not any(entry.get(OWN) for entry in _entries(state))


def unpacked(
    state: Mapping[str, Any], replica: Replica, rank: int
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The fields, None if palsgd's part is missing, and the inner optimizer's state. `rank` is the
    number of this rank among those of its worker."""
    entries = {key: _without_own(entry) for key, entry in state["state"].items()}
    inner = {**state, "state": {key: entry for key, entry in entries.items() if entry != {}}}
    if is_plain(state):
        return None, inner
    keys = [key for group in state["param_groups"] for key in group["params"]]
    numbers = _numbers(replica)
    if max(numbers) >= len(keys):
        raise ValueError(
            f"the parameter groups of the state have {len(keys)} parameters, and those of this "
            f"optimizer {len(_all_params(replica.inner))}; load it into an optimizer of the same "
            "parameters"
        )
    found = [state["state"].get(keys[number], {}).get(OWN, {}) for number in numbers]
    own = dict(zip(replica.names, found, strict=True))
    loose = found[0]
    if _SCALARS not in loose:
        raise ValueError(
            f"the state has nothing at the first trained parameter, {replica.names[0]}, where its "
            "numbers are; load it into an optimizer of the same parameters"
        )
    tree = decode(_own_row(loose[_SCALARS], rank))
    return _with_tensors(tree, own, loose, replica), inner


def numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved state holds beside tensors: clock, settings, counts, ledger and so on."""
    entries = (entry.get(OWN, {}) for entry in _entries(state))
    found = next((own[_SCALARS] for own in entries if _SCALARS in own), None)
    if found is None:
        raise ValueError(
            "the state is that of a plain optimizer; give what the state_dict() of a palsgd "
            "optimizer returned"
        )
    return decode(_own_row(found, 0))


def refuse_palsgd_state(inner: Optimizer) -> None:
    """Raise if a palsgd state was loaded into a plain optimizer, which took it for its own."""
    if any(isinstance(entry, dict) and OWN in entry for entry in inner.state.values()):
        raise ValueError(
            "the inner optimizer was given the state of a palsgd optimizer, which it cannot use; "
            "build it without, and load that state into the palsgd optimizer"
        )


# -- tensors, apart from the rest --------------------------------------------------------------


def _without_tensors(
    value: Any, path: str, own: dict[str, dict[str, Any]], loose: dict[str, Any]
) -> Any:
    """`value` with a dict that names its place instead of each tensor, which goes there."""
    if isinstance(value, ModelLike):
        for name, tensor in value.items():
            own[name][path] = tensor
        return {_PLACE: _LIKE_MODEL, "key": path}
    if isinstance(value, Tensor) and value.dim() > 0:  # a number is kept among the numbers
        loose[path] = value.detach().clone()
        return {_PLACE: _LOOSE, "key": path}
    if isinstance(value, dict):
        return {k: _without_tensors(v, _joined(path, k), own, loose) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        found = [_without_tensors(v, _joined(path, i), own, loose) for i, v in enumerate(value)]
        return found if isinstance(value, list) else tuple(found)
    return value


def _joined(path: str, key: Any) -> str:
    # torch's helpers take a dot for the end of a name
    return f"{path}/{key}".lstrip("/").replace(".", "_")


def _with_tensors(
    tree: Any, own: dict[str, dict[str, Any]], loose: dict[str, Any], replica: Replica
) -> Any:
    """The inverse of `_without_tensors`. A tensor that the state lacks becomes None."""
    if isinstance(tree, dict) and tree.get(_PLACE) == _LIKE_MODEL:
        names = [name for name in own if tree["key"] in own[name]]
        params = dict(zip(replica.names, replica.params, strict=True))
        if not names:
            return None
        like = ((name, own[name][tree["key"]], params[name]) for name in names)
        return ModelLike({name: _local(tensor, param) for name, tensor, param in like})
    if isinstance(tree, dict) and tree.get(_PLACE) == _LOOSE:
        return loose.get(tree["key"])
    if isinstance(tree, dict):
        return {key: _with_tensors(value, own, loose, replica) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_with_tensors(value, own, loose, replica) for value in tree)
    return tree


# -- parameters --------------------------------------------------------------------------------


def _all_params(inner: Optimizer) -> list[Tensor]:
    return [p for group in inner.param_groups for p in group["params"]]


def _numbers(replica: Replica) -> list[int]:
    """The number that torch gives each trained parameter in a state."""
    number = {p: i for i, p in enumerate(_all_params(replica.inner))}
    return [number[p] for p in replica.params]


# -- shards ------------------------------------------------------------------------------------


def like_shard(local: Tensor, param: Tensor) -> Tensor:
    """`local` as a DTensor that is sharded as `param` is."""
    if not is_sharded(param):
        return local
    return type(param).from_local(
        local, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def _local(saved: Tensor, param: Tensor) -> Tensor:
    """This rank's part of a saved tensor that is like `param`, whether it was saved as a shard or
    whole."""
    if is_sharded(param) and not is_sharded(saved) and saved.shape == param.shape:
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = param.device_mesh, param.placements
        saved = distribute_tensor(saved, mesh, placements, src_data_rank=None)
    return local_tensor(saved)


def _row(mine: Tensor, replica: Replica) -> Tensor:
    """A tensor of this rank alone. For a sharded worker it is a row of a matrix with one row for
    each rank, so that a checkpoint keeps all of them."""
    sharded = next((p for p in replica.params if is_sharded(p)), None)
    if sharded is None:
        return mine
    from torch.distributed.tensor import Replicate, Shard

    rows = [Replicate() if place.is_replicate() else Shard(0) for place in sharded.placements]
    return type(sharded).from_local(mine[None], sharded.device_mesh, rows)


def _own_row(rows: Tensor, rank: int) -> Tensor:
    rows = local_tensor(rows)
    if rows.dim() == 1:
        return rows
    return rows[rank if len(rows) > 1 else 0]


def snapshot(value: Any) -> Any:
    """A copy of everything inside dicts and lists, tensors included."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(snapshot(each) for each in value)
    return value
