"""The split for choosing settings: what a run trains on and is evaluated on, and that the test set
is not loaded."""

import itertools

import numpy as np
import pytest
import torch

from palsgd.lab import workloads
from palsgd.lab.data import cifar10, tokens
from palsgd.lab.data.splits import held_out
from palsgd.lab.workloads.imagenet_resnet50 import ImageNetResNet50
from support.pictures import write_original, write_photographs


class SmallResNet50(ImageNetResNet50):
    resolution = 32


def both(name, **settings):
    return [workloads.load(name, split=split, **settings) for split in ("test", "choose")]


def rows(images, labels):
    """Examples as a set of bytes."""
    pairs = zip(images.numpy(), labels.numpy(), strict=True)
    return {image.tobytes() + label.tobytes() for image, label in pairs}


def trained_on(workload):
    return rows(workload.train_images, workload.train_labels)


def evaluated_on(workload):
    return rows(workload.test_images, workload.test_labels)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2])
def test_training_and_held_out_examples_are_all_examples_and_none_twice(share):
    train, held = held_out(1437, share)
    assert len(held) == round(1437 * share)
    assert sorted([*train, *held]) == list(range(1437))
    assert np.array_equal(held_out(1437, share)[1], held)


def test_digits_have_1150_to_train_287_to_choose_and_360_to_test():
    test, choose = both("digits")
    assert (len(test.train_labels), len(test.test_labels)) == (1437, 360)
    assert (len(choose.train_labels), len(choose.test_labels)) == (1150, 287)
    assert choose.examples == 1150


@pytest.mark.parametrize("name", ["digits", "cifar10-cnn"])
def test_a_run_that_chooses_has_the_training_data_alone_in_two_parts(tmp_path, name):
    write_original(tmp_path, rows=8)
    test, choose = both(name, data=tmp_path)
    assert trained_on(choose) | evaluated_on(choose) == trained_on(test)
    assert not trained_on(choose) & evaluated_on(choose)
    assert not (trained_on(choose) | evaluated_on(choose)) & evaluated_on(test)


def test_the_held_out_part_is_the_same_for_every_seed():
    one, other = (workloads.load("digits", split="choose", seed=seed) for seed in (1, 2))
    assert torch.equal(one.test_images, other.test_images)


def test_a_tenth_of_cifar10_is_held_out_and_the_test_batch_is_not_opened(tmp_path):
    write_original(tmp_path, rows=8)
    (tmp_path / "test_batch").unlink()
    choose = workloads.load("cifar10-cnn", data=tmp_path, split="choose")
    assert (len(choose.train_labels), len(choose.test_labels)) == (36, 4)
    assert round(choose.held_out * 50_000) == 5_000
    with pytest.raises(ValueError, match="test_batch is missing"):
        workloads.load("cifar10-cnn", data=tmp_path)


def test_a_split_of_cifar10_is_the_same_alone_as_beside_the_other(tmp_path):
    write_original(tmp_path)
    for split, whole in zip(cifar10.SPLITS, cifar10.load(tmp_path), strict=True):
        alone = cifar10.load_split(tmp_path, split)
        assert torch.equal(alone.images, whole.images)
        assert torch.equal(alone.labels, whole.labels)


def write_stories(folder, split, count):
    """Stories of three tokens, each with its number in it."""
    words = np.array([tokens.END] + [w for i in range(count) for w in (i, i, i, tokens.END)])
    (folder / f"{split}.bin").write_bytes(words.astype(np.uint16).tobytes())
    (folder / f"{split}.json").write_text(f'{{"tokens": {len(words)}}}')


def stories_of(batches):
    return [int(row[0]) for _, targets in batches for row in targets]


def test_the_last_stories_of_the_training_data_are_held_out(tmp_path):
    write_stories(tmp_path, "train", 600)
    write_stories(tmp_path, "valid", 50)
    test, choose = both("tinystories-gptneo-8m", data=tmp_path)
    assert stories_of(test.validation(0, 1)) == list(range(50))
    assert test.examples == 600
    assert stories_of(choose.validation(0, 1)) == list(range(594, 600))
    assert choose.examples == 594
    seen = [choose.batch(worker=0, workers=1, size=54, index=index) for index in range(11)]
    assert sorted(stories_of(seen)) == list(range(594))


def test_the_validation_stories_are_not_opened_by_a_run_that_chooses(tmp_path):
    write_stories(tmp_path, "train", 600)
    write_stories(tmp_path, "valid", 50)
    (tmp_path / "valid.bin").unlink()
    choose = workloads.load("tinystories-gptneo-8m", data=tmp_path, split="choose")
    assert choose.examples == 594
    with pytest.raises(ValueError, match=r"valid\.bin"):
        workloads.load("tinystories-gptneo-8m", data=tmp_path)


def test_stories_of_the_grammar_are_chosen_on_another_stream():
    test, choose = both("stories")
    texts = [{row.numpy().tobytes() for row in each._valid[1]} for each in (test, choose)]
    assert len(texts[0]) == len(texts[1]) == 500
    assert not texts[0] & texts[1]
    for key in itertools.product(range(2), range(4), range(4)):  # and training has others still
        seed, worker, index = key
        choose.seed = seed
        batch = choose.batch(worker=worker, workers=4, size=16, index=index)
        assert not {row.numpy().tobytes() for row in batch[1]} & (texts[0] | texts[1])


def test_photographs_are_held_out_of_train_and_val_is_not_opened(tmp_path):
    write_photographs(tmp_path / "imagenet", sizes=((32, 32),), count=100)
    test = SmallResNet50(data=tmp_path)
    assert (test.examples, len(test.photographs.val)) == (200, 200)
    for path in (tmp_path / "imagenet" / "val").rglob("*.png"):
        path.write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"val.* is missing or not an image"):
        SmallResNet50(data=tmp_path)
    choose = SmallResNet50(data=tmp_path, split="choose")
    paths = [{path for path, _ in part.samples} for part in held_parts(choose)]
    assert [len(part) for part in paths] == [198, 2]
    assert paths[0] | paths[1] == {path for path, _ in test.photographs.train.samples}
    assert choose.examples == 198
    assert len(choose.photographs.train.classes) == 2
    (images, labels), *rest = choose.validation(0, 1)
    assert not rest
    assert images.shape == (2, 3, 32, 32)
    assert labels.tolist() == held_parts(choose)[1].targets


def held_parts(workload):
    return workload.photographs.train, workload.photographs.val
