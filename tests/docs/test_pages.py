"""The other pages: their code runs, and their tables are those of the code."""

import ast
import dataclasses
import inspect
import os
import re

import pytest
import torch
import torch.distributed as dist

import palsgd
from palsgd import events, state
from palsgd.tensors import RESERVED
from support.pages import blocks, code_blocks, executed, page, pages, section
from support.places import ROOT


def parameters(model):
    return torch.nn.utils.parameters_to_vector(model.parameters())


@pytest.fixture(scope="module")
def extending():
    return executed("docs/extending.md", *code_blocks(page("docs/extending.md")))


# -- docs/uneven.md ------------------------------------------------------------------------------


def test_the_outer_step_of_the_page_is_nesterovs_and_its_optimizer_trains():
    found = executed("docs/uneven.md", *code_blocks(page("docs/uneven.md")))
    own, known = (torch.nn.Parameter(torch.arange(5.0)) for _ in range(2))
    steps = found["SeparatelyRounded"]([own], lr=0.7), palsgd.nesterov(0.7, 0.5)([known])
    for scale in (1.0, -0.3, 2.0):
        for param, outer in zip((own, known), steps, strict=True):
            param.grad = scale * torch.linspace(0.1, 0.5, 5)
            outer.step()
    torch.testing.assert_close(own, known)
    assert found["opt"].ledger.speeds == []


# -- docs/extending.md ---------------------------------------------------------------------------


def test_the_median_of_the_page_ignores_the_worker_that_is_far_away(extending):
    found = extending["result"].model(torch.ones(1, 1)).item()
    assert found == pytest.approx(2.0, abs=0.2)


def test_the_listener_of_the_page_heard_of_every_sync(extending):
    assert len(extending["distances"]) == 3
    assert all(distance > 0 for distance in extending["distances"])
    assert extending["opt"].clock == 6


def test_the_transport_and_the_codec_of_the_page_are_taken(extending):
    assert extending["Half"]().ratio == 0.5
    assert extending["opt"].transport.seconds == 0.01
    blocks = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    decoded = extending["Half"]().decode(extending["Half"]().encode(blocks))
    torch.testing.assert_close(decoded, blocks, rtol=1e-3, atol=1e-6)


def public(kind) -> set[str]:
    """The names a subclass may override: those that the class itself has or declares."""
    own = set(vars(kind)) | set(inspect.get_annotations(kind))
    return {name for name in own if not name.startswith("_")}


# What the library asks of a method, and no method has to write.
ASKED = {
    "acts_after_gradient",
    "overrides",
    "shares_anchor",
    "varies_length",
    "settings",
    "refusals",
}


@pytest.mark.parametrize(
    ("title", "kind", "left_out"),
    [
        ("Method", palsgd.Method, ASKED),
        ("Codec", palsgd.Codec, set()),
        ("Transport", palsgd.Transport, {"worker", "workers"}),
    ],
)
def test_the_page_lists_every_member_of_a_contract_and_none_that_is_gone(title, kind, left_out):
    table = re.split(r"\n\n(?=\|)", section("docs/extending.md", title))[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert listed == public(kind) - left_out


# -- docs/two-levels.md ----------------------------------------------------------------------------


def trained_by_the_page():
    code = executed("docs/two-levels.md", *code_blocks(page("docs/two-levels.md")))
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    opt = code["train"](net, [(inputs, inputs.sum(1, keepdim=True))], ranks_per_worker=2, steps=16)
    return opt.clock, opt.transport.workers, parameters(net).tolist()


def test_the_loop_of_the_page_on_two_levels_trains_two_workers_of_two_ranks(world):
    got = world.run(trained_by_the_page, workers=4)
    assert all(found == got[0] for found in got)  # the last step is a sync
    assert got[0][:2] == (16, 2)


# -- docs/elastic.md -------------------------------------------------------------------------------


def trained_by_the_elastic_page(port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(dist.get_rank())}
    dist.barrier()  # both have connected
    dist.destroy_process_group()  # the page has none
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)

    def batches_of(worker):
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(worker))
        return [(inputs, inputs.sum(1, keepdim=True))]

    code = executed("docs/elastic.md", *code_blocks(page("docs/elastic.md")))
    opt = code["train"](net, batches_of, steps=16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return opt.clock, opt.transport.members, parameters(net).tolist()


def test_the_loop_of_the_page_on_workers_that_leave_trains_two_that_stay(world):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    got = world.run(trained_by_the_elastic_page, workers=2, port=store.port)
    assert got[0] == got[1]
    assert got[0][:2] == (16, (0, 1))


# -- docs/operations.md --------------------------------------------------------------------------


def trained_by_the_operators_page():
    code = executed("docs/operations.md", *code_blocks(page("docs/operations.md")))
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    data = [(inputs, inputs.sum(1, keepdim=True))]
    opt = code["train"](net, data, "nothing is saved", 16, sync_every=8)
    return opt.clock, opt.leaving


def test_the_loop_of_the_page_on_operations_trains_to_its_end_if_nobody_asks_it_to_leave(world):
    assert world.run(trained_by_the_operators_page, workers=2) == [(16, False)] * 2


# -- docs/extending.md: what `w` has ---------------------------------------------------------------

FUNCTIONS = {"norm", "group", "mix_group"}
COLUMNS = ("before_gradient", "after_gradient", "apply", "global_model")  # one slot of each


def table_of_w() -> dict[str, set[str]]:
    """For each column of the table, what it says `w` has there."""
    text = section("docs/extending.md", "Method").split("### What `w` has")[1].split("\n### ")[0]
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    found: dict[str, set[str]] = {slot: set() for slot in COLUMNS}
    for name, *cells in rows:
        for slot, cell in zip(COLUMNS, cells, strict=True):
            found[slot] |= set(re.findall(r"`(\w+)", name)) if cell.strip() else set()
    return found


class Looking(palsgd.Method):
    """Notes what its slots find in `w`."""

    def note(self, slot, w):
        self.found[slot] = {name for name in RESERVED | FUNCTIONS if hasattr(w, name)}

    def before_gradient(self, w):
        self.note("before_gradient", w)

    def after_gradient(self, w, rate, mixing):
        self.note("after_gradient", w)

    def apply(self, w, reduced, outer):
        self.note("apply", w)
        outer.step()

    def global_model(self, w):
        self.note("global_model", w)


def test_rules_find_what_the_page_says_they_find():
    Looking.found = {}
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = palsgd.LocalOptimizer(
        model, inner, method=Looking(), sync_every=2, transport=palsgd.Alone()
    )
    for batch in palsgd.until([torch.ones(1, 2)], opt, steps=2):
        model(batch).sum().backward()
        opt.step()
    with opt.anchor_weights():
        pass
    assert Looking.found == table_of_w()


def test_the_page_lists_every_event_with_its_fields():
    kinds = [k for k in vars(events).values() if isinstance(k, type)]
    own = [k for k in kinds if issubclass(k, events.Event) and k is not events.Event]
    common = {field.name for field in dataclasses.fields(events.Event)}
    text = section("docs/extending.md", "Events")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.*?) \|$", text, flags=re.MULTILINE))
    assert set(rows) == {kind.__name__ for kind in own}
    for kind in own:
        fields = {field.name for field in dataclasses.fields(kind)} - common
        assert set(re.findall(r"`(\w+)`", rows[kind.__name__])) == fields


# -- docs/state.md -------------------------------------------------------------------------------

PLACE = re.compile(r"(<!-- schema -->\n).*?(<!-- end of the schema -->)", re.DOTALL)


def schema_table() -> str:
    head = ["| field | whose | kind | what it holds |", "|---|---|---|---|"]
    rows = [f"| `{f.name}` | {f.scope} | {f.kind} | {f.meaning} |" for f in state.SCHEMA]
    return "\n".join([*head, *rows]) + "\n"


def test_the_table_of_a_states_fields_is_that_of_the_schema():
    """PALSGD_REWRITE_GOLDEN=1 writes it anew."""
    path = ROOT / "docs" / "state.md"
    wanted = PLACE.sub(lambda found: found[1] + schema_table() + found[2], path.read_text())
    if os.environ.get("PALSGD_REWRITE_GOLDEN"):
        path.write_text(wanted)
    assert path.read_text() == wanted


def test_the_run_that_the_page_resumes_ends_where_one_that_goes_on_does():
    found = executed("docs/state.md", *code_blocks(page("docs/state.md")))
    assert found["opt"].clock == 6
    assert not found["opt"].synced
    found["train"](found["model"], found["opt"], 12)
    assert found["opt"].clock == found["resumed"].clock == 12
    assert torch.equal(parameters(found["model"]), parameters(found["again"]))
    assert state.numbers(found["kept"][1])["version"] == state.VERSION


# -- all pages -----------------------------------------------------------------------------------


def test_the_methods_that_a_page_composes_are_built():
    (code,) = code_blocks(section("docs/methods.md", "Several at once"))
    found = executed("docs/methods.md", code)
    assert str(found["opt"].method) == "PALSGD + SlowMo"


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_code_of_a_page_can_be_parsed_and_names_what_palsgd_has(path):
    for block in blocks(path.read_text(), "python"):
        tree = ast.parse(block.text)
        for node in ast.walk(tree):
            own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if own and node.value.id == "palsgd":
                assert hasattr(palsgd, node.attr), f"palsgd has no {node.attr}"


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{target} is not there"


# Words of release 0.1.0 and what they are called now. The changelog may name them.
GONE = {
    "roll call": "header",
    "in flight": "pending",
    "flight": "pending sync",
    "lane": "stacked worker",
    "outlook": "forecast",
    "local_rule": "after_gradient",
    "global_rule": "apply",
    "after_exchange": "on",
    "pseudo_async": "methods/palsgd.py",
}


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_the_names_of_today(path):
    text = path.read_text().lower()
    assert [word for word in GONE if re.search(rf"\b{word}s?\b", text)] == []
