"""Mini-batches are the images, converted; an epoch shows each at most once."""

from __future__ import annotations

import torch

from hessinit.digits import load_digits
from hessinit.paper.experiment import Setting
from hessinit.paper.minibatches import images_of

DIGITS = Setting("table-4", "digits", "two-hidden", (0,))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_batch_holds_the_images_asked_for_in_float32_between_0_and_1() -> None:
    pixels, labels = load_digits()
    index = torch.tensor([5, 1796, 0])
    inputs, targets = images_of(DIGITS).batch(index, flat=False)
    assert torch.equal(inputs, pixels[index])
    assert torch.equal(targets, labels[index])
    assert torch.equal(images_of(DIGITS).batch(index, flat=True)[0], pixels[index].flatten(1))


def test_writing_to_a_batch_does_not_change_the_set() -> None:
    index = torch.arange(4)
    images_of(DIGITS).batch(index, flat=True)[0].fill_(9)
    assert torch.equal(images_of(DIGITS).batch(index, flat=False)[0], load_digits()[0][:4])


def test_a_set_is_read_once_whatever_the_experiment() -> None:
    other = Setting("table-5", "digits", "3x3", (7,))
    assert images_of(DIGITS) is images_of(other)


def test_an_epoch_shows_every_image_at_most_once_in_full_batches() -> None:
    images = images_of(DIGITS)
    batches = list(images.epoch(128, seeded()))
    assert [len(batch) for batch in batches] == [128] * 14  # 1797 = 14 · 128 + 5
    assert len(torch.cat(batches).unique()) == 14 * 128
    whole = torch.cat(list(images.epoch(3, seeded(1))))
    assert torch.equal(whole.sort().values, torch.arange(1797))


def test_epochs_differ_and_follow_from_the_generator() -> None:
    images, source = images_of(DIGITS), seeded(2)
    first, second = (torch.cat(list(images.epoch(32, source))) for _ in range(2))
    assert not torch.equal(first, second)
    again = seeded(2)
    assert torch.equal(torch.cat(list(images.epoch(32, again))), first)


def test_a_drawn_batch_has_different_images() -> None:
    index = images_of(DIGITS).draw(1000, seeded())
    assert len(index.unique()) == 1000
    assert not torch.equal(index, images_of(DIGITS).draw(1000, seeded(1)))
