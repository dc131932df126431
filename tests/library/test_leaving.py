"""SIGTERM: all workers leave at the same sync, with what they have done saved, within a bound."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import palsgd
from palsgd.leaving import EXIT_CODE
from support.commands import environment
from support.patience import patient
from support.problems import batches, linear, train, vector
from support.stepping import sgd

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of its own")

STEPS = 40
RULES = {
    "plain": dict(sync_every=6, mix_prob=0.3, mix_rate=2.0),
    "independent": dict(sync_every=4, mix_prob=0.6, mix_rate=1.0, draws="independent"),
    "delay": dict(sync_every=8, mix_prob=0.3, mix_rate=2.0, delay=3),
    "fragments": dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, fragments=3),
    "warmup": dict(sync_every=6, mix_prob=0.3, mix_rate=2.0, warmup_steps=20),
}


def built(rules):
    model = linear()
    return model, palsgd.PALSGD(model, sgd(model, momentum=0.9), seed=11, **rules)


def left_job(rules, asked_at):
    """Worker 1 is asked to leave after so many steps of its own; then all start again."""
    model, opt = built(rules)
    steps = 0

    def ask():
        nonlocal steps
        steps += 1
        if steps == asked_at and dist.get_rank() == 1:
            opt.leave()

    train(model, opt, batches(), STEPS, on_step=ask)
    left_at, saved = opt.clock, (opt.state_dict(), model.state_dict(), opt.leaving)
    again, resumed = built(rules)
    again.load_state_dict(saved[1])
    resumed.load_state_dict(saved[0])
    at = resumed.gradient_steps % 5  # a list begins anew after a load
    rest = batches()[at:] + batches()[:at]
    train(again, resumed, rest, STEPS)
    whole, undisturbed = built(rules)
    train(whole, undisturbed, batches(), STEPS)
    return left_at, saved[2], vector(again).tolist(), vector(whole).tolist()


@pytest.mark.parametrize("rules", RULES)
def test_all_workers_leave_at_the_sync_after_one_was_asked_and_go_on_bit_for_bit(world, rules):
    found = world.run(left_job, workers=2, rules=RULES[rules], asked_at=9)
    clocks = {clock for clock, *_ in found}
    assert len(clocks) == 1, clocks
    assert 9 <= clocks.pop() < STEPS
    for _, leaving, again, whole in found:
        assert leaving
        assert again == whole


def alone_job():
    model, opt = built(RULES["plain"])
    train(model, opt, batches(), STEPS, on_step=lambda: opt.clock > 9 and opt.leave())
    return opt.clock


def test_a_single_worker_leaves_at_once(world):
    (clock,) = world.run(alone_job, workers=1)
    assert 9 < clock < 16


def wrapped_job(asked_at, hears):
    """The gradients of this wrapper are averaged in backward, where no header travels."""
    model = DistributedDataParallel(linear())
    opt = palsgd.PALSGD(model, sgd(model), sync_every=6, mix_prob=0.3, warmup_steps=100)
    if hears:  # as leave_on_sigterm does
        opt.hear_leavers()

    def ask():
        if opt.clock == asked_at and dist.get_rank() == 1:
            opt.leave()

    train(model, opt, batches(), 130, on_step=ask)
    return opt.clock


def test_workers_that_average_in_backward_ask_every_few_steps_who_was_asked(world):
    assert world.run(wrapped_job, workers=2, asked_at=21, hears=True) == [32, 32]
    assert world.run(wrapped_job, workers=2, asked_at=21, hears=False) == [106, 106]


def going_on_job(rules):
    model, opt = built(rules)
    opt.leave()
    clocks, refusal, data = [], "", batches()  # the same loader goes on where it was
    while opt.clock < STEPS:
        train(model, opt, data, STEPS)
        clocks.append(opt.clock)
        if not refusal:
            refusal = refused(opt)
    whole, undisturbed = built(rules)
    train(whole, undisturbed, batches(), STEPS)
    return clocks, refusal, vector(model).tolist(), vector(whole).tolist()


def refused(opt):
    try:
        opt.step()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("rules", ["plain", "delay"])
def test_a_step_after_leaving_is_refused_and_another_loop_goes_on_bit_for_bit(world, rules):
    for clocks, refusal, asked, unasked in world.run(going_on_job, workers=2, rules=RULES[rules]):
        assert len(clocks) > 3
        assert f"opt.leaving became True at clock {clocks[0]}" in refusal
        assert "go on with another palsgd.until()" in refusal
        assert asked == unasked


# -- signals -------------------------------------------------------------------------------------

SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import palsgd

rank, folder, within_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
opt = palsgd.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.01), sync_every=4)
palsgd.leave_on_sigterm(opt, within_s=within_s)
torch.manual_seed(rank)
opt.on(palsgd.events.Synced, lambda event: print("synced", flush=True))
for batch in palsgd.until([torch.randn(2, 3)], opt, steps=10**9):
    model(batch).square().sum().backward()
    opt.step()
    opt.zero_grad()
    time.sleep(0.01)
assert opt.leaving
print("left at", opt.clock, flush=True)
sys.exit(143)
"""


@contextmanager
def two_workers(folder, within_s):
    """Two that have synced."""
    (folder / "script.py").write_text(SCRIPT)
    processes = [
        subprocess.Popen(
            [sys.executable, folder / "script.py", str(rank), folder, str(within_s)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(GLOO_SOCKET_IFNAME="lo"),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout.readline() == "synced\n", process.communicate()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_sigterm_to_one_worker_ends_all_at_one_clock_with_143(tmp_path):
    with two_workers(tmp_path, within_s=patient(60)) as processes:
        processes[1].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=patient(60)) for process in processes]
    assert [process.returncode for process in processes] == [EXIT_CODE] * 2
    clocks = {out.splitlines()[-1] for out, _ in said}
    assert len(clocks) == 1
    assert clocks.pop().startswith("left at ")
    assert not any(err for _, err in said), said


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_waits_for_a_lost_one_leaves_within_its_bound_or_when_asked_again(
    tmp_path, again
):
    with two_workers(tmp_path, within_s=patient(60) if again else 0.5) as (lost, waits):
        lost.send_signal(signal.SIGSTOP)
        for _ in range(1 + again):
            waits.send_signal(signal.SIGTERM)
            time.sleep(1)  # two at once are one
        _, err = waits.communicate(timeout=patient(30))
        lost.send_signal(signal.SIGCONT)
    assert waits.returncode == EXIT_CODE
    why = "SIGTERM came again" if again else "no sync was reached within 0.5 s of SIGTERM"
    assert err == f"palsgd: {why}; this worker leaves without saving\n"


def in_thread():
    import threading

    errors = []

    def call():
        try:
            _, opt = built(RULES["plain"])
            palsgd.leave_on_sigterm(opt)
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return errors


def test_a_call_in_another_thread_is_refused(world):
    (errors,) = world.run(in_thread, workers=1)
    assert "call it there, or call opt.leave() yourself" in errors[0]
