"""Our GPT-Neo against Hugging Face's, and its loss against torch's."""

import warnings

import pytest
import torch
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

import palsgd
from palsgd.lab.models import linear_cross_entropy as module
from palsgd.lab.models.gpt_neo import GPTNeo
from palsgd.lab.models.linear_cross_entropy import linear_cross_entropy
from support.engines import check

SMALL = dict(vocab=101, positions=300, hidden=32, heads=4, layers=4)


def library_model(**sizes):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPTNeoConfig(
        vocab_size=sizes["vocab"], max_position_embeddings=sizes["positions"],
        hidden_size=sizes["hidden"], num_heads=sizes["heads"], num_layers=sizes["layers"],
        attention_types=[[["global", "local"], sizes["layers"] // 2]], window_size=256,
        resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPTNeoForCausalLM(config)


def tokens(batch, length, vocab, seed=0):
    rng = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randint(vocab, (2, batch, length), generator=rng)
    targets[0, length // 2 :] = -100
    return inputs, targets


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 280])  # within one local window, and beyond it
def test_outputs_and_gradients_are_those_of_the_library_model(length):
    theirs = library_model(**SMALL).double()
    ours = GPTNeo(**SMALL).double()
    ours.load_state_dict(theirs.state_dict())
    inputs, targets = tokens(3, length, SMALL["vocab"])
    logits = theirs(inputs).logits
    # it computes attention scores in fp32 whatever the model's precision
    torch.testing.assert_close(ours(inputs), logits, rtol=1e-4, atol=1e-6)
    cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    ours(inputs, targets).backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-7, msg=name)


def test_local_layers_look_back_one_window_only():
    ours = GPTNeo(**{**SMALL, "layers": 2}).double()
    ours.transformer.h = ours.transformer.h[1:]  # the local layer alone
    inputs, _ = tokens(1, 290, SMALL["vocab"])
    changed = inputs.clone()
    changed[0, 0] = (inputs[0, 0] + 1) % SMALL["vocab"]
    same = (ours(inputs) == ours(changed)).all(dim=-1)[0]
    assert not same[255]
    assert same[256:].all()


def test_weights_load_across_in_both_directions():
    theirs, ours = library_model(**SMALL), GPTNeo(**SMALL)
    theirs.load_state_dict(ours.state_dict())
    again = GPTNeo(**SMALL)
    again.load_state_dict(theirs.state_dict())
    for name, weight in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        (dict(positions=300, hidden=128, heads=8, layers=8), 8_054_656),
        (dict(positions=1024, hidden=768, heads=12, layers=12), 124_412_160),
    ],
)
def test_the_papers_models_have_the_papers_sizes(sizes, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in GPTNeo(**sizes).parameters()) == count


@pytest.mark.parametrize("chunk_bytes", [1, 3000, 2**30])
@pytest.mark.parametrize("words", [7, 64, 70])  # padded and not
def test_the_loss_in_chunks_is_cross_entropy(monkeypatch, chunk_bytes, words):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(12, 5, dtype=torch.float64, generator=rng, requires_grad=True)
    weight = torch.randn(words, 5, dtype=torch.float64, generator=rng, requires_grad=True)
    targets = torch.randint(words, (12,), generator=rng)
    targets[3] = targets[7] = -100
    mine = linear_cross_entropy(hidden, weight, targets)
    theirs = cross_entropy(hidden @ weight.T, targets)
    torch.testing.assert_close(mine, theirs)
    with torch.no_grad():  # another way: no gradients along with it
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), theirs)
    torch.testing.assert_close(
        torch.autograd.grad(3 * mine, (hidden, weight)),
        torch.autograd.grad(3 * theirs, (hidden, weight)),
    )


def test_the_loss_is_the_same_where_torch_cannot_compile_it(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(module, "_gains_from_fusion", lambda logits: True)
    monkeypatch.setattr(module, "_compiled", fails)
    hidden, weight = torch.randn(6, 4), torch.randn(9, 4)
    targets = torch.randint(9, (6,))
    for _ in range(2):
        mine = linear_cross_entropy(hidden.requires_grad_(), weight, targets)
        torch.testing.assert_close(mine, cross_entropy(hidden @ weight.T, targets))
    assert caplog.text.count("slower, as torch.compile says: no C compiler") == 1


def test_the_operator_passes_torchs_own_checks():
    hidden, weight = torch.randn(2, 6, 4), torch.randn(2, 9, 4)
    inputs = (hidden.requires_grad_(), weight.requires_grad_(), torch.zeros(2, 6).long())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the checker itself
        torch.library.opcheck(module._losses_and_gradients, (*inputs, torch.full((2, 6), 1 / 6)))


def test_stacked_workers_have_their_own_loss_and_gradient():
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 8, 4, dtype=torch.float64, generator=rng, requires_grad=True)
    weight = torch.randn(3, 9, 4, dtype=torch.float64, generator=rng, requires_grad=True)
    targets = torch.randint(9, (3, 8), generator=rng)
    losses = vmap(linear_cross_entropy)(hidden, weight, targets)
    grads = torch.autograd.grad((losses * torch.tensor([1, 2, 3])).sum(), (hidden, weight))
    for k in range(3):
        own = hidden[k].detach().requires_grad_(), weight[k].detach().requires_grad_()
        loss = cross_entropy(own[0] @ own[1].T, targets[k])
        torch.testing.assert_close(losses[k], loss)
        expected = torch.autograd.grad((k + 1) * loss, own)
        torch.testing.assert_close((grads[0][k], grads[1][k]), expected)


def test_under_autocast_the_loss_is_near_that_in_full_precision():
    ours = GPTNeo(**SMALL)
    inputs, targets = tokens(4, 64, SMALL["vocab"])
    with torch.autocast("cpu", torch.bfloat16):
        low = ours(inputs, targets)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, ours(inputs, targets), rtol=2e-3, atol=0)


def test_too_long_an_input_is_refused_with_the_number_of_positions():
    with pytest.raises(ValueError, match="301 tokens long and the model has 300 positions"):
        GPTNeo(**SMALL)(torch.zeros(1, 301, dtype=torch.long))


def story_batches(worker):
    return [tokens(3, 20, 29, seed=10 * worker + i) for i in range(5)]


def lm_loss(model, batch):
    return model(*batch)


def low_precision_loss(model, batch):
    with torch.autocast("cpu", torch.bfloat16):
        return model(*batch)


def tiny():
    return GPTNeo(vocab=29, positions=32, hidden=16, heads=2, layers=2)


def palsgd_adamw(model):
    return palsgd.PALSGD(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), sync_every=8, mix_prob=0.2,
        mix_rate=16.0, warmup_steps=10, max_norm=1.0, draws="independent",
    )  # fmt: skip


def both(model, loss, steps):
    return [
        palsgd.simulate(
            workers=3, steps=steps, model=model, loss=loss, data=story_batches,
            method=palsgd_adamw, vectorize=vectorize,
        )
        for vectorize in (True, False)
    ]  # fmt: skip


@pytest.mark.slow
def test_gpt_neo_stays_equal_in_both_engines_for_two_hundred_steps():
    check(*both(lambda: tiny().double(), lm_loss, 200), rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_gpt_neo_in_bf16_autocast_trains_alike_in_both_engines():
    fast, exact = both(tiny, low_precision_loss, 100)
    for mine, theirs in zip(fast.history, exact.history, strict=True):
        torch.testing.assert_close(mine["loss"], theirs["loss"], rtol=0.02, atol=0)
    assert fast.history[-1]["loss"] < 0.97 * fast.history[0]["loss"]


@pytest.mark.slow
def test_the_library_model_too_runs_stacked():
    def model():
        return library_model(vocab=29, positions=32, hidden=16, heads=2, layers=2)

    def loss(model, batch):
        logits = model(batch[0]).logits
        return cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    fast, exact = both(model, loss, 40)
    check(fast, exact, rtol=1e-2, atol=1e-4)


def test_functional_call_reaches_the_tied_weight_once():
    model = tiny()
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names
    inputs, targets = tokens(2, 10, 29)
    doubled = {"transformer.wte.weight": 2 * model.transformer.wte.weight}
    assert functional_call(model, doubled, (inputs, targets)) != model(inputs, targets)
