"""Where the lab's batches come from."""

import json
import lzma
import math
import urllib.request
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch

from palsgd.lab.data import crops, images, tokens
from palsgd.lab.data.download import fetch
from palsgd.lab.data.grammar import Grammar, Rule, Slot
from palsgd.lab.data.sharding import Shards, class_counts, random_stream
from palsgd.lab.data.stories import GRAMMAR
from support.pictures import write_photographs
from support.places import SHARED

TOKENIZER, STORIES = SHARED / "gpt2-tokenizer", SHARED / "tinystories"
needs_tokenizer = pytest.mark.skipif(not TOKENIZER.exists(), reason=f"no {TOKENIZER} here")
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"no {STORIES} here")


# Sharding


LABELS = torch.arange(1200) % 10


def epoch(number, *, sharding="reshuffled", seed=1, workers=3, size=4, examples=40, shards=None):
    """The batches of an epoch, by worker and index."""
    shards = shards or Shards(sharding, examples, seed=seed, labels=LABELS[:examples])
    rounds = examples // (workers * size)
    return {
        (worker, index): shards.batch(
            worker=worker, workers=workers, size=size, index=index
        ).tolist()
        for worker in range(workers)
        for index in range(number * rounds, (number + 1) * rounds)
    }


every_sharding = pytest.mark.parametrize("sharding", ["reshuffled", "fixed", "dirichlet:0.5"])


@every_sharding
def test_workers_share_an_epoch_without_overlap_and_equally(sharding):
    batches = epoch(0, sharding=sharding)
    seen = [i for batch in batches.values() for i in batch]
    assert len(seen) == len(set(seen)) == 36  # the most that fills a batch of four for all three
    assert all(len(batch) == 4 for batch in batches.values())


@every_sharding
def test_every_epoch_has_its_own_order_and_leaves_out_others(sharding):
    epochs = [epoch(number, sharding=sharding) for number in range(8)]
    left_out = {frozenset(range(40)) - {i for b in each.values() for i in b} for each in epochs}
    assert len(left_out) > 1
    assert epochs[0][0, 0] != epochs[1][0, 3]


@every_sharding
def test_batches_depend_on_the_seed_and_on_nothing_that_was_asked_before(sharding):
    shards = Shards(sharding, 40, seed=1, labels=LABELS[:40])
    first = epoch(2, sharding=sharding)
    for number in (*range(20), 2):  # more epochs than are kept
        batches = epoch(number, shards=shards)
    shards.batch(worker=0, workers=2, size=4, index=0)  # of another run
    assert batches == epoch(2, shards=shards) == first
    assert epoch(2, sharding=sharding, seed=2) != first


@every_sharding
def test_a_batch_costs_no_new_permutation(sharding, monkeypatch):
    shards = Shards(sharding, 40, seed=77, labels=LABELS[:40])
    before = epoch(0, shards=shards)
    monkeypatch.setattr("palsgd.lab.data.sharding.random_stream", None)
    assert epoch(0, shards=shards) == before


@pytest.mark.parametrize("sharding", ["fixed", "dirichlet:0.5"])
def test_fixed_shards_are_all_examples_in_equal_parts_and_a_worker_sees_its_own_alone(sharding):
    shards = Shards(sharding, 41, seed=1, labels=LABELS[:41])
    parts = [set(shards.part(worker, 3).tolist()) for worker in range(3)]
    assert sorted(map(len, parts)) == [13, 14, 14]
    assert set.union(*parts) == set(range(41))
    seen = [set() for _ in parts]
    for number in range(30):
        for (worker, _), batch in epoch(number, shards=shards, examples=41).items():
            seen[worker].update(batch)
    assert seen == parts  # all of them, as every epoch leaves out others


def test_reshuffled_examples_come_to_every_worker():
    seen = {i for n in range(60) for (w, _), batch in epoch(n).items() if w == 0 for i in batch}
    assert seen == set(range(40))


def test_fixed_shards_depend_on_the_seed():
    one, other = (Shards("fixed", 40, seed=seed).part(0, 2).tolist() for seed in (1, 2))
    assert set(one) != set(other)


def test_the_smaller_a_is_the_fewer_classes_a_worker_has():
    """By the share of the commonest class of a worker, in the mean."""

    def commonest(a):
        found = []
        for seed in range(30):
            shards = Shards(f"dirichlet:{a}", 1200, seed=seed, labels=LABELS)
            labels = [LABELS[shards.part(worker, 4)].bincount(minlength=10) for worker in range(4)]
            found += [float(counts.max() / counts.sum()) for counts in labels]
        return np.mean(found)

    at = {a: commonest(a) for a in (0.1, 1.0, 1000.0)}
    assert at[0.1] > at[1.0] + 0.05 > at[1000.0] + 0.15
    assert at[1000.0] < 0.15


def test_shares_of_classes_are_dirichlets_where_classes_hardly_run_out():
    supply, draw = np.full(5, 10**6), np.random.default_rng(3)
    counts = class_counts(supply * 100, 400, 0.7, random_stream(0))
    expected = draw.dirichlet(np.full(5, 0.7), size=20_000)
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert counts.sum(axis=0).tolist() == (supply * 100).tolist()
    assert shares.mean() == pytest.approx(0.2)
    assert shares.var() == pytest.approx(expected.var(), rel=0.15)


def test_classes_that_run_out_are_dealt_to_those_who_asked_and_nothing_is_left():
    supply = np.array([1, 500, 3, 0, 96])
    for seed in range(20):
        counts = class_counts(supply, 7, 0.05, random_stream(seed))
        assert counts.min() >= 0
        assert counts.sum(axis=0).tolist() == supply.tolist()
        assert sorted(set(counts.sum(axis=1).tolist())) == [85, 86]


def test_shards_by_labels_need_labels():
    with pytest.raises(ValueError, match=r"^sharding=dirichlet:1 deals .* none; use fixed or"):
        Shards("dirichlet:1", 40, seed=0)


def test_too_few_examples_for_a_batch_say_so_in_one_line():
    with pytest.raises(ValueError, match=r"^10 examples give each of 4 workers 2, fewer .* 3; use"):
        Shards("reshuffled", 10, seed=0).batch(worker=0, workers=4, size=3, index=0)


# The grammar of stories


def read_back(grammar, words):
    """All ways to derive a text, as their log-probabilities: a parser of its own, which knows
    only the rules and the words."""

    def sentence(cells, at, memory, state, log_p):
        if not cells:
            yield from derivations(state, at, memory, log_p)
        elif at < len(words) and cells[0][0] != "{":
            if words[at] == cells[0]:
                yield from sentence(cells[1:], at + 1, memory, state, log_p)
        elif at < len(words):
            name = cells[0][1:-1]
            slot = grammar.slots[name]
            weights = {i: 1 / i for i in range(1, len(slot.words) + 1)}
            for i, word in enumerate(slot.words, start=1):
                if word != words[at] or memory.get(slot.follows or name, i) != i:
                    continue
                drawn = name not in memory and not slot.follows
                gain = math.log(weights[i] / sum(weights.values())) if drawn else 0.0
                known = memory | {name: i} if slot.remembered else memory
                yield from sentence(cells[1:], at + 1, known, state, log_p + gain)

    def derivations(state, at, memory, log_p):
        if state not in grammar.rules:
            if at == len(words):
                yield log_p
            return
        total = sum(rule.weight for rule in grammar.rules[state])
        for rule in grammar.rules[state]:
            start = log_p + math.log(rule.weight / total)
            yield from sentence(rule.sentence.split(), at, memory, rule.leads_to, start)

    return list(derivations(grammar.start, 0, {}, 0.0))


def test_a_story_has_one_derivation_with_the_probability_the_generator_says():
    texts = GRAMMAR.draw(200, random_stream(5))
    for words, nats in zip(texts.words, texts.nats, strict=True):
        found = read_back(GRAMMAR, GRAMMAR.text(words).split())
        assert found == [pytest.approx(-nats, rel=1e-12)]


def test_the_entropy_of_stories_is_what_generated_ones_have():
    texts = GRAMMAR.draw(40_000, random_stream(6))
    for found, exact in ((texts.nats, GRAMMAR.entropy), (texts.lengths, GRAMMAR.mean_length)):
        error = found.std() / math.sqrt(len(found))
        assert abs(found.mean() - exact) < 4 * error
        assert error < 0.002 * exact


def test_the_entropy_of_a_small_grammar_is_that_of_all_its_texts():
    grammar = Grammar(
        {
            "name": Slot(["ann", "bob", "eve"], remembered=True),
            "she": Slot(["she", "he", "she"], follows="name"),
            "how": Slot(["well", "badly"]),
        },
        {
            "start": [Rule(2, "{name} slept {how} .", "more"), Rule(1, "nobody came .", "end")],
            "more": [
                Rule(1, "{she} slept {how} and {how} .", "end"),
                Rule(3, "{name} ate .", "end"),
            ],
        },
        start="start",
    )
    texts = grammar.draw(20_000, random_stream(0))
    probability = dict(zip(map(grammar.text, texts.words), np.exp(-texts.nats), strict=True))
    assert len(probability) == 1 + 3 * 2 * (2 * 2 + 1)
    assert sum(probability.values()) == pytest.approx(1)
    entropy = -sum(p * math.log(p) for p in probability.values())
    assert grammar.entropy == pytest.approx(entropy)
    lengths = sum(p * (len(text.split()) + 1) for text, p in probability.items())
    assert grammar.mean_length == pytest.approx(lengths)
    counts = Counter(map(grammar.text, texts.words))
    for text, p in probability.items():
        assert abs(counts[text] - 20_000 * p) < 5 * math.sqrt(20_000 * p)


def test_a_grammar_that_cannot_be_read_back_is_refused():
    slots = {"a": Slot(["x", "y"]), "b": Slot(["y", "z"])}
    rules = {"start": [Rule(1, "go {a} .", "end"), Rule(1, "go {b} .", "end")]}
    with pytest.raises(AssertionError):
        Grammar(slots, rules, start="start")


def repeats(name, texts):
    """How often a slot's words come up in each text."""
    numbers = [GRAMMAR.vocabulary.index(word) for word in GRAMMAR.slots[name].words]
    return np.isin(texts.words, numbers).sum(axis=1)


@pytest.mark.parametrize("name", ["hero", "friend"])
def test_what_is_worth_remembering_is_what_its_further_mentions_would_cost(name):
    counts = repeats(name, GRAMMAR.draw(20_000, random_stream(7)))
    weights = 1 / np.arange(1, len(GRAMMAR.slots[name].words) + 1)
    weights /= weights.sum()
    nats = -(weights * np.log(weights)).sum()
    assert np.maximum(counts - 1, 0).mean() * nats == pytest.approx(GRAMMAR.worth[name], rel=0.03)


def test_what_must_be_remembered_comes_up_again_in_every_story():
    """Else models learn it late or not at all, and seeds end apart by what it counts."""
    texts = GRAMMAR.draw(5_000, random_stream(8))
    assert list(GRAMMAR.worth) == ["hero", "friend"]
    for name in GRAMMAR.worth:
        assert (repeats(name, texts) > 1).all(), name


def test_stories_come_back_to_who_and_what_they_began_with():
    text = GRAMMAR.text(GRAMMAR.draw(1, random_stream(3)).words[0]).split()
    (hero,) = set(text) & set(GRAMMAR.slots["hero"].words)
    places = [i for i, word in enumerate(text) if word == hero]
    assert places[-1] - places[0] > 40


# Tokens


def write_texts(folder, train="One day.\nTwo.\n<|endoftext|>\nThe end.\n<|endoftext|>\n"):
    folder.mkdir(exist_ok=True)
    (folder / "tiny_train.txt").write_text(train, encoding="utf-8")
    with lzma.open(folder / "tiny_valid.txt.xz", "wt", encoding="utf-8") as file:
        file.write("Hello world<|endoftext|>")
    return folder


@needs_tokenizer
def test_stories_become_gpt2_tokens_each_between_two_ends(tmp_path):
    seen = []
    found = tokens.prepare(
        write_texts(tmp_path / "text"), tmp_path / "out", TOKENIZER, lambda *now: seen.append(now)
    )
    valid = np.fromfile(tmp_path / "out" / "valid.bin", dtype=np.uint16).tolist()
    assert valid == [tokens.END, 15496, 995, tokens.END]
    assert found["train"]["stories"] == 2
    assert json.loads((tmp_path / "out" / "train.json").read_text()) == found["train"]
    assert found["train"]["sources"][0]["name"] == "tiny_train.txt"
    assert len(found["train"]["sources"][0]["sha256"]) == 64
    assert seen[-1][0] == "tiny_valid.txt.xz"
    assert seen[-1][1] == seen[-1][2] > 0


@needs_tokenizer
def test_a_story_is_one_row_and_padding_is_no_target(tmp_path):
    tokens.prepare(write_texts(tmp_path), tmp_path, TOKENIZER)
    stories = tokens.Stories(tmp_path, "train", "cpu")
    whole = np.fromfile(tmp_path / "train.bin", dtype=np.uint16).astype(np.int64).tolist()
    second = whole[whole.index(tokens.END, 1) + 1 : -1]
    inputs, targets = stories.rows(torch.tensor([1, 0]), context=12)
    padding = 12 - len(second) - 1
    assert len(stories) == 2
    assert inputs[0].tolist() == [tokens.END, *second] + [tokens.END] * padding
    assert targets[0].tolist() == [*second, tokens.END] + [-100] * padding


@needs_tokenizer
def test_a_long_story_is_cut_off(tmp_path):
    tokens.prepare(write_texts(tmp_path), tmp_path, TOKENIZER)
    inputs, targets = tokens.Stories(tmp_path, "train", "cpu").rows(torch.tensor([0]), context=3)
    assert inputs.shape == targets.shape == (1, 3)
    assert torch.equal(inputs[0, 1:], targets[0, :-1])
    assert (targets != -100).all()
    assert (targets != tokens.END).all()


@needs_tokenizer
def test_a_file_there_packed_and_unpacked_counts_once(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "tiny_valid.txt").write_text("Hello world<|endoftext|>")
    found = tokens.prepare(tmp_path, tmp_path, TOKENIZER)
    assert [source["name"] for source in found["valid"]["sources"]] == ["tiny_valid.txt"]


@needs_tokenizer
def test_a_corrupt_text_is_named_and_nothing_half_is_left(tmp_path):
    write_texts(tmp_path / "text", train="One.<|endoftext|>" * 5000)
    packed = (tmp_path / "text" / "tiny_valid.txt.xz").read_bytes()
    (tmp_path / "text" / "tiny_valid.txt.xz").write_bytes(packed[:-20])
    with pytest.raises(ValueError, match=r"tiny_valid\.txt\.xz is corrupt .*; download it again$"):
        tokens.prepare(tmp_path / "text", tmp_path / "out", TOKENIZER)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train.bin", "train.json"]
    assert not tokens.is_prepared(tmp_path / "out")


@needs_tokenizer
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ValueError, match=r"could not write tokens into .*file/out .*; copy the texts"
    ):
        tokens.prepare(write_texts(tmp_path / "text"), tmp_path / "file" / "out", TOKENIZER)


def test_tokens_that_do_not_fit_their_record_are_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(np.full(5, tokens.END, np.uint16).tobytes())
    (tmp_path / "train.json").write_text('{"tokens": 6}')
    with pytest.raises(ValueError, match=r"train\.bin has 5 tokens, not 6; prepare it again"):
        tokens.Stories(tmp_path, "train", "cpu")


def test_missing_texts_and_tokenizers_are_named(tmp_path):
    with pytest.raises(
        ValueError, match=r"looked for train\.bin, \*train\*\.txt .* workload stories"
    ):
        tokens.prepare(tmp_path, tmp_path, tmp_path)
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"vocab\.json is missing; get GPT-2's from https"):
        tokens.prepare(write_texts(tmp_path), tmp_path, tmp_path)


@pytest.mark.slow
@needs_tokenizer
@needs_stories
def test_real_stories_are_read_whole(tmp_path):
    found = tokens.prepare(STORIES, tmp_path, TOKENIZER)
    stories = tokens.Stories(tmp_path, "valid", "cpu")
    assert found["train"]["stories"] + found["valid"]["stories"] == 13_456
    assert len(stories) == found["valid"]["stories"]
    _, targets = stories.rows(torch.arange(len(stories)), context=2000)
    # every token but the first END is predicted once
    assert (targets != -100).sum() == found["valid"]["tokens"] - 1


# Downloads


def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(
        ValueError, match=r"^could not download https://a/b .*no route.* by hand"
    ) as e:
        fetch("https://a/b", tmp_path / "b")
    assert "\n" not in str(e.value)
    assert not list(tmp_path.iterdir())


def test_a_download_reports_progress_and_happens_once(tmp_path):
    source = tmp_path / "source.txt"
    source.write_bytes(b"x" * 3_000_000)
    seen = []
    for _ in range(2):
        fetch(source.as_uri(), tmp_path / "copy.txt", lambda *now: seen.append(now))
    assert (tmp_path / "copy.txt").read_bytes() == source.read_bytes()
    assert seen == [("copy.txt", n, 3_000_000) for n in (2**20, 2**21, 3_000_000)]


# Photographs


def opened(root, **other):
    settings = dict(resolution=48, seed=0, device=torch.device("cpu")) | other
    return images.open_folders(root, **settings)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_batch_of_photographs_is_a_function_of_seed_worker_and_index(tmp_path, in_memory):
    root = write_photographs(tmp_path)
    first, again = (opened(root, in_memory=in_memory) for _ in range(2))
    batches = {
        (worker, index): first.batch(worker=worker, workers=2, size=2, index=index)
        for index in range(5)
        for worker in range(2)
    }
    for worker, index in [(1, 3), (0, 4), (1, 0)]:  # out of order, so not what was decoded ahead
        found = again.batch(worker=worker, workers=2, size=2, index=index)
        assert same(found, batches[worker, index])
    other = opened(root, in_memory=in_memory, seed=1)
    assert not same(other.batch(worker=0, workers=2, size=2, index=0), batches[0, 0])
    assert batches[0, 0][0].shape == (2, 3, 48, 48)


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_photograph_is_cropped_anew_each_time(tmp_path, in_memory):
    photographs = opened(write_photographs(tmp_path, count=1), in_memory=in_memory)
    cats = []
    for index in range(3):
        found, labels = photographs.batch(worker=0, workers=1, size=2, index=index)
        cats.append(found[labels == 0])
    assert not any(torch.equal(a, b) for a, b in combinations(cats, 2))


def test_photographs_are_decoded_before_they_are_asked_for(tmp_path, monkeypatch):
    photographs = opened(write_photographs(tmp_path), in_memory=False)
    photographs.batch(worker=0, workers=1, size=2, index=0)
    monkeypatch.setattr(photographs, "_begin", lambda *batch: [])
    ahead = photographs.batch(worker=0, workers=1, size=2, index=1)
    assert len(ahead[1]) == 2


def test_only_photographs_of_one_small_size_are_kept_in_memory(tmp_path):
    same_size = write_photographs(tmp_path / "a")
    mixed = write_photographs(tmp_path / "b", sizes=((40, 30), (30, 40)))
    assert isinstance(opened(same_size), images.InMemory)
    assert isinstance(opened(same_size, resolution=32), images.FromFiles)
    assert isinstance(opened(mixed), images.FromFiles)


def test_in_memory_and_from_files_are_nearly_the_same_picture(tmp_path):
    image = pytest.importorskip("PIL.Image")
    root = write_photographs(tmp_path)
    for i, path in enumerate(sorted(root.rglob("*.png"))):  # smooth, with four unlike corners
        across, down = np.meshgrid(np.linspace(0, 200, 40), np.linspace(0, 200, 30))
        pixels = np.stack([across, down, np.full_like(across, 15 * i)], axis=2)
        image.fromarray(pixels.astype(np.uint8)).save(path)
    which = dict(worker=0, workers=1, size=8, index=1)
    (a, labels), (b, same_labels) = (
        opened(root, in_memory=kept).batch(**which) for kept in (False, True)
    )
    assert torch.equal(labels, same_labels)
    assert (a - b).abs().max() < 0.15  # rounding to bytes, and the border pixels of a crop
    assert (a - b.flip(3)).abs().max() > 0.5


def test_validation_sees_the_middle_of_every_photograph_in_order(tmp_path):
    root = write_photographs(tmp_path)
    kept, read = opened(root, in_memory=True), opened(root, in_memory=False)
    found, labels = read.plain("val", slice(2, 6))
    assert labels.tolist() == [0, 0, 1, 1]
    assert found.shape == (4, 3, 48, 48)
    assert (found - kept.plain("val", slice(2, 6))[0]).abs().max() < 0.1


def test_random_crops_have_the_law_of_torchvision():
    transforms = pytest.importorskip("torchvision.transforms")
    height, width, count = 60, 100, 4000
    chances = random_stream(0).random((count, *crops.CHANCES))
    ours = np.array(
        [
            (c.top, c.left, c.height, c.width)
            for c in (crops.random_crop(height, width, each) for each in chances)
        ]
    )
    torch.manual_seed(0)
    blank = torch.zeros(3, height, width)
    theirs = np.array(
        [
            transforms.RandomResizedCrop.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3])
            for _ in range(count)
        ]
    )
    error = np.sqrt((ours.var(0) + theirs.var(0)) / count)
    assert (abs(ours.mean(0) - theirs.mean(0)) < 4 * error).all()
    assert (abs(ours.std(0) - theirs.std(0)) < 5 * error).all()
    assert (ours[:, 0] + ours[:, 2] <= height).all()
    assert (ours[:, 1] + ours[:, 3] <= width).all()


def test_a_crop_that_never_fits_is_the_middle():
    crop = crops.random_crop(10, 1000, np.zeros(crops.CHANCES) + 0.9)
    assert (crop.top, crop.height, crop.width) == (0, 10, 13)
    assert crop.left == (1000 - 13) // 2


def test_a_shifted_image_is_a_window_of_the_padded_one_mirrored_half_the_time():
    padded = torch.arange(3 * 40 * 40, dtype=torch.float32).view(1, 3, 40, 40)
    found = crops.shifted(padded, torch.zeros(400, dtype=torch.int64), random_stream(0), size=32)
    mirrored, corners = 0, set()
    for image in found:
        flipped = bool(image[0, 0, 0] > image[0, 0, 1])
        plain = image.flip(2) if flipped else image
        top, left = divmod(int(plain[0, 0, 0]), 40)
        assert torch.equal(plain, padded[0, :, top : top + 32, left : left + 32])
        mirrored += flipped
        corners.add((top, left))
    assert 150 < mirrored < 250
    assert {top for top, _ in corners} == {left for _, left in corners} == set(range(9))


def test_missing_and_broken_photographs_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"looked for train/CLASS.* val/CLASS.* workload digits"):
        opened(tmp_path / "nowhere")
    root = write_photographs(tmp_path)
    (root / "val" / "dog" / "3.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"3\.png is missing or not an image"):
        opened(root, in_memory=False).plain("val", slice(0, 8))
    (root / "val" / "dog").rename(root / "val" / "fox")
    with pytest.raises(ValueError, match="the class dog is not in both"):
        opened(root)
