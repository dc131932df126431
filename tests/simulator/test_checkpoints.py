"""A simulation that stops and goes on ends as one that was never disturbed, bit for bit."""

import itertools
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import palsgd
from palsgd import registry
from palsgd.optimizer import builder_of
from palsgd.simulator import Checkpoints, programs
from support.methods import METHODS as OWN
from support.problems import batches, mse

ENGINES = {"stacked": True, "exact": False}
EVERYTHING = dict(
    sync_every=6, fragments=2, delay=3, compress="int8", warmup_steps=2, max_norm=1.0,
    outer=palsgd.nesterov(lr=0.5, momentum=0.8), draws="independent",
)  # fmt: skip


def net():
    """Statistics, random numbers, and tensors that fragments cut."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, 7), torch.nn.BatchNorm1d(7), torch.nn.Dropout(0.2), torch.nn.Tanh(),
        torch.nn.Linear(7, 3),
    )  # fmt: skip


COMMON = dict(
    workers=3, steps=21, model=net, loss=mse, data=partial(batches, dtype=torch.float32),
    evaluate=lambda model: (float(model[0].weight.sum()), "a text"), evaluate_every=2,
    progress=False,
)  # fmt: skip


def inner_of(model, kind):
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9 if kind == "momentum" else 0)


def registered(name, inner, model, **changes):
    """A method of the registry with every option that it takes."""
    row = registry.row(name)
    refused = {*row.method.refuses, *(("outer",) if row.fixed_outer else ())}
    options = {k: v for k, v in (EVERYTHING | changes).items() if k not in refused}
    if not row.mixes:
        options.pop("draws", None)
    if not row.rounds:
        options = {"max_norm": 1.0}
    scheduler = partial(CosineAnnealingLR, T_max=21)
    return builder_of(row)(model, inner_of(model, inner), scheduler=scheduler, **options)


def begun(**changes):
    ((program,),) = programs([{}], **{**COMMON, **changes})
    return program


def undisturbed(make):
    program = make()
    while program.advance():
        pass
    return program


def relayed(make, folder):
    """Every stretch between two pauses is trained by a new program, from files."""
    checkpoints = Checkpoints(folder)
    for stretches in itertools.count():
        program = make()
        state = checkpoints.newest()
        if state is not None:
            program.load(state)
        if not program.advance():
            assert stretches >= 3
            return program
        checkpoints.save(program.clock, program.state())


def without_seconds(history):
    return repr([{k: v for k, v in entry.items() if k != "seconds"} for entry in history])


COUNTS = ("gradient_steps", "mixing_steps", "syncs", "messages", "bytes_sent", "bytes_on_the_wire",
          "distance", "beta_min", "beta_max")  # fmt: skip


def assert_same(mine, theirs):
    assert mine.engine == theirs.engine
    assert without_seconds(mine.history) == without_seconds(theirs.history)
    for name, x in theirs.model.state_dict().items():
        assert torch.equal(mine.model.state_dict()[name], x), name
    for own, other in zip(mine.ledgers, theirs.ledgers, strict=True):
        assert [getattr(own, k) for k in COUNTS] == [getattr(other, k) for k in COUNTS]


def assert_goes_on(make, folder):
    pairs = zip(relayed(make, folder).results(), undisturbed(make).results(), strict=True)
    for mine, theirs in pairs:
        assert_same(mine, theirs)


# -- every method ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", registry.names())
def test_every_method_goes_on_bit_for_bit_from_every_evaluation(name, engine, tmp_path):
    inner = "sgd" if name == "scaffold" else "adamw" if name == "slowmo" else "momentum"
    method, every = partial(registered, name, inner), 2 if registry.row(name).rounds else 6
    make = partial(begun, method=method, vectorize=ENGINES[engine], evaluate_every=every)
    assert_goes_on(make, tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [
    dict(compress="topk:0.3", delay=0), dict(compress=None, fragments=1, delay=5),
    dict(compress=None, fragments=1, delay=0, blend=0.3, buffers="local"),
    dict(compress=None, fragments=1, delay=0, draws="shared", on_nonfinite="skip"),
])  # fmt: skip
def test_options_go_on_bit_for_bit(options, engine, tmp_path):
    method = partial(registered, "palsgd", "adamw", **options)
    assert_goes_on(partial(begun, method=method, vectorize=ENGINES[engine]), tmp_path)


@pytest.mark.parametrize("name", ["growing", "ring", "remembering", "distance", "momentum"])
def test_methods_with_states_lengths_and_anchors_of_their_own_go_on(name, tmp_path):
    def method(model):
        inner = inner_of(model, "momentum")
        return palsgd.LocalOptimizer(model, inner, OWN[name](3), sync_every=4, warmup_steps=2)

    assert_goes_on(partial(begun, method=method, vectorize=True), tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_time_on_a_cluster_goes_on(engine, tmp_path):
    cluster = palsgd.Cluster.parse("100mbit,20ms,step=50ms,cv=0.3", workers=3)
    method = partial(registered, "palsgd", "momentum")
    make = partial(begun, method=method, vectorize=ENGINES[engine], cluster=cluster)
    assert_goes_on(make, tmp_path)
    assert "time_s" in undisturbed(make).histories[0][-1]


# -- data ------------------------------------------------------------------------------------------


class Counting:
    """Data that say themselves where they are."""

    drawn = 0

    def __init__(self, worker):
        self.worker, self.index = worker, 0

    def __iter__(self):
        return self

    def __next__(self):
        Counting.drawn += 1
        self.index += 1
        return batches(self.worker, torch.float32)[self.index % 5]

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


def shuffled(worker):
    """A loader whose passes depend on torch's global generator."""
    return DataLoader(batches(worker, torch.float32), batch_size=None, shuffle=True)


def endless(worker):
    return (batches(worker, torch.float32)[i * i % 5] for i in itertools.count())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("data", [shuffled, endless, Counting])
def test_data_go_on_where_they_were(data, engine, tmp_path):
    method = partial(registered, "palsgd", "momentum", fragments=1, delay=0, compress=None)
    make = partial(begun, method=method, vectorize=ENGINES[engine], data=data)
    assert_goes_on(make, tmp_path)


def test_data_with_a_state_are_not_drawn_again(tmp_path):
    method = partial(registered, "ddp", "sgd")
    make = partial(begun, method=method, data=Counting, vectorize=False, evaluate_every=6)
    Counting.drawn = 0
    undisturbed(make)
    once, Counting.drawn = Counting.drawn, 0
    relayed(make, tmp_path)
    assert Counting.drawn == once == 3 * 21


# -- many runs -------------------------------------------------------------------------------------


GRID = [
    {"seed": 1},
    {"seed": 2, "method": partial(registered, "palsgd", "momentum", outer=palsgd.nesterov(0.2))},
    {"seed": 3, "method": partial(registered, "localsgd", "momentum")},
    {"seed": 4, "method": partial(registered, "palsgd", "momentum", sync_every=8)},
]


class StoppedError(Exception):
    pass


def stopping(after):
    """An evaluation that ends the simulation once."""
    seen = itertools.count(1)

    def evaluate(model):
        if next(seen) == after:
            raise StoppedError
        return COMMON["evaluate"](model)

    return evaluate


@pytest.mark.parametrize("engine", ENGINES)
def test_many_runs_go_on_in_the_programs_in_which_they_began(engine, tmp_path):
    known = {**COMMON, "method": partial(registered, "palsgd", "momentum")}
    known["vectorize"] = ENGINES[engine]
    expected = palsgd.simulate_many(GRID, **known)
    for after in (4, 6, 5):
        with pytest.raises(StoppedError):
            palsgd.simulate_many(GRID, **known | {"evaluate": stopping(after)}, checkpoint=tmp_path)
    # all alone each run would round otherwise; the folder knows who was together
    for mine, theirs in zip(
        palsgd.simulate_many(GRID, **known, checkpoint=tmp_path, at_once=1), expected, strict=True
    ):
        assert_same(mine, theirs)
    never = known | {"evaluate": lambda model: pytest.fail("it is trained again")}
    for mine, theirs in zip(
        palsgd.simulate_many(GRID, **never, checkpoint=tmp_path), expected, strict=True
    ):
        assert_same(mine, theirs)


def test_a_run_that_failed_stays_failed_and_the_others_go_on(tmp_path):
    def broken(worker):
        rows = batches(worker, torch.float32)
        return [*rows[:4], (rows[4][0] * float("nan"), rows[4][1])]

    grid = [{}, {"data": broken, "seed": 1}, {"seed": 2}]
    known = {**COMMON, "method": partial(registered, "diloco", "momentum"), "vectorize": True}

    def make():
        ((program,),) = programs(grid, **known)
        return program

    mine, theirs = relayed(make, tmp_path).results(), undisturbed(make).results()
    assert str(mine[1].error) == str(theirs[1].error)
    assert "the loss of worker" in str(mine[1].error)
    for own, other in zip(mine, theirs, strict=True):
        assert_same(own, other)


# -- files -----------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_cut_off_or_damaged_is_left_out(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest() is None
    for clock in (10, 20, 30):
        checkpoints.save(clock, [("a", {"clock": clock}), ("b", torch.ones(100))])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-30"]

    def interrupted():
        yield "a", {"clock": 40}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(40, interrupted())
    (tmp_path / "step-50.77.part").mkdir()  # what a kill leaves
    assert checkpoints.newest()["a"] == {"clock": 30}
    path = tmp_path / "step-30" / "b.pt"
    whole = path.read_bytes()
    zeroed = whole[:300] + bytes(16) + whole[316:]  # in the ones
    for damaged in (whole[:-10], b"", zeroed):
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="step-30 is damaged and left out"):
            assert checkpoints.newest()["a"] == {"clock": 20}
    for damaged in ("", "[]", "{}", '{"b": 1}'):
        path.write_bytes(whole)
        (path.parent / "contents.json").write_text(damaged)
        with pytest.warns(UserWarning, match="step-30 is damaged and left out"):
            assert checkpoints.newest()["a"] == {"clock": 20}
    checkpoints.save(30, [("a", {"clock": 30})])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-30"]


def test_what_is_not_a_tensor_or_plain_is_refused_when_it_is_saved(tmp_path):
    class Score:
        pass

    method = partial(registered, "diloco", "sgd")
    with pytest.raises(ValueError, match="evaluate returned a Score, which a checkpoint cannot"):
        palsgd.simulate(
            **COMMON | {"evaluate": lambda model: Score()}, method=method, checkpoint=tmp_path
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_of_another_simulation_is_refused(engine, tmp_path):
    known = {**COMMON, "checkpoint": tmp_path, "vectorize": ENGINES[engine]}
    palsgd.simulate(**known, method=partial(registered, "diloco", "sgd"))
    with pytest.raises(ValueError, match="steps was 21, and is 22 now; use the old value, or"):
        palsgd.simulate(**known | {"steps": 22}, method=partial(registered, "diloco", "sgd"))
    with pytest.raises(ValueError, match="saved under other settings"):
        palsgd.simulate(**known, method=partial(registered, "palsgd", "sgd"))


def test_the_stack_is_not_copied_to_be_saved():
    program = begun(method=partial(registered, "palsgd", "momentum"), vectorize=True)
    program.advance()
    stack = program._engine.stack
    saved = dict(program.state())["stack"]
    mine = [*stack.params, *itertools.chain(*stack.state), *stack.buffers.values()]
    theirs = [*saved["params"], *itertools.chain(*saved["state"]), *saved["buffers"].values()]
    assert [x.data_ptr() for x in mine] == [x.data_ptr() for x in theirs]
