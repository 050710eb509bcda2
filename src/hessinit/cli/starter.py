"""The file that `hessinit new` writes: it runs as it is, and says what to put in place of what."""

from __future__ import annotations

STARTER = '''\
"""A problem for hessinit: a model, its loss, and data. It runs as it is; put your own in.

    hessinit measure {name}:problem                how sharp is each layer?
    hessinit initialize {name}:problem --lr 0.1    weights that fit a learning rate
    hessinit track {name}:problem --lr 0.1         sharpness while it trains
    hessinit compare {name}:problem                which start trains best?
    hessinit sweep {name}:problem                  how large should weights be?
"""

import torch
from hessinit.digits import load_digits
from torch import nn


class Net(nn.Module):
    """Your model. Names of layers in the tables are those of these attributes."""

    def __init__(self):
        super().__init__()
        self.hidden1 = nn.Linear(64, 32)
        self.hidden2 = nn.Linear(32, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, images):
        signal = torch.tanh(self.hidden1(images.flatten(1)))
        signal = torch.tanh(self.hidden2(signal))
        return self.output(signal)  # logits: the softmax belongs to the loss


def problem():
    """Called without arguments, and again for every training that is compared.

    So build the model in here: every training needs a new one. Draw random numbers freely, hessinit seeds
    torch, numpy and random before.
    """
    model = Net()

    # Any function of (output, targets), or a loss of torch.nn. It should average over examples.
    loss = nn.CrossEntropyLoss()

    # (inputs, targets), the examples along the first dimension: tensors, or tuples and dicts of them. A list
    # of such pairs, or a DataLoader, is fine, too. A few hundred examples are enough to measure.
    images, labels = load_digits()  # 1,797 real handwritten digits of 8×8 pixels
    data = images[:1000], labels[:1000]

    return model, loss, data

    # A model that is not called as model(inputs) says how in a fourth value:
    #
    #     def forward(model, inputs):
    #         return model(inputs["tokens"], mask=inputs["mask"]).logits
    #
    #     return model, loss, data, {{"forward": forward}}
'''


def write_starter(name: str) -> str:
    """The text of the file, for a file of that name.

    >>> write_starter("net.py").splitlines()[2].strip()
    'hessinit measure net.py:problem                how sharp is each layer?'
    """
    return STARTER.format(name=name)
