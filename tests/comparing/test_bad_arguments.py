"""What cannot be compared is refused before any run: the value, the rule and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import digit_problem as problem
import pytest
import torch
from torch import nn

from hessinit.comparing.sweep import sweep
from hessinit.errors import ProblemError

MODEL = problem.build()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"build": MODEL}, "build is a Sequential, and every run needs a new model; pass a function"),
        ({"build": 3}, "build is a int; it must be a function without arguments"),
        ({"build": lambda: MODEL}, r"build\(\) returned the same model twice.*copy.deepcopy\(model\)"),
        ({"build": lambda: nn.Sequential(MODEL)}, "models that share their weights"),
        ({"build": lambda: 3}, "model is a int; it must be a torch.nn.Module"),
        ({"loss": nn.CrossEntropyLoss}, "loss is the class CrossEntropyLoss; pass an instance"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, r"the loss has shape \(32,\); it must be a single"),
        ({"loss": lambda output, target: torch.ones(())}, "does not depend on any trainable parameter"),
        ({"forward": 3}, "forward is a int; it must be callable"),
        ({"schemes": []}, r"schemes=\[\] holds no start; name at least one"),
        ({"schemes": ["he", "he"]}, "schemes holds 'he' twice"),
        ({"schemes": ["orthogonl"]}, "schemes='orthogonl' is unknown.*Did you mean 'orthogonal'?"),
        ({"schemes": ["kaiming"]}, "schemes='kaiming' is unknown.*Did you mean 'he'?"),
        ({"schemes": ["he+warmpu"]}, r"schemes='he\+warmpu' is unknown.*Did you mean 'he\+warmup'?"),
        ({"schemes": [problem.draw]}, "schemes holds a function without a name.*{'draw': draw}"),
        ({"schemes": {"one": 3}}, "schemes holds 3, a int; a start is a name, such as 'he', or a function"),
        ({"schemes": 5}, "schemes=5 must be a list of names"),
        ({"learning_rates": []}, "learning_rates is empty; give at least one number"),
        ({"learning_rates": 0.1}, r"learning_rates=0.1 must be a list of numbers, such as \[0.01, 0.1\]"),
        ({"learning_rates": [0.1, 0]}, "0 in learning_rates must be a number above 0"),
        ({"learning_rates": [-1]}, "-1 in learning_rates must be a number above 0"),
        ({"learning_rates": [float("inf")]}, "inf in learning_rates must be a number above 0"),
        ({"learning_rates": ["0.1"]}, "'0.1' in learning_rates must be a number above 0"),
        ({"learning_rates": [0.1, 0.1]}, "learning_rates holds 0.1 twice"),
        ({"seeds": 0}, "seeds=0 must be a whole number, 1 or more"),
        ({"seeds": []}, "seeds is empty; pass how many"),
        ({"seeds": [1, 1]}, "seeds holds 1 twice"),
        ({"seeds": [-1]}, "a seed in seeds=-1 must be a whole number, 0 or more"),
        ({"steps": 9}, "steps=9 must be a whole number, 10 or more"),
        ({"steps": 12.5}, "steps=12.5 must be a whole number, 10 or more"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number, 1 or more"),
        (
            {"batch_size": 401},
            "the data hold 400 examples, fewer than batch_size=401; pass batch_size=400 or less",
        ),
        ({"warmup": 13}, "warmup=13 is longer than the run; it must be at most steps=12"),
        ({"optimizer": "sgdd"}, "optimizer='sgdd' is unknown; choose from 'sgd', 'momentum', 'adam'"),
        ({"optimizer": torch.optim.SGD(MODEL.parameters())}, "optimizer is a SGD of one model.*lambda"),
        ({"optimizer": lambda parameters, lr: 3}, "optimizer returned a int; it must be called as"),
        ({"workers": 0}, "workers=0 must be a whole number, 1 or more"),
        ({"executor": 3, "workers": None}, "executor is a int; it must be a concurrent.futures.Executor"),
        ({"executor": 3}, "workers=1 and executor= are both given"),
        ({"device": "gpu7"}, "device='gpu7' cannot be used here.*Leave it out"),
        ({"device": "meta"}, "device='meta' holds no numbers, so nothing can be trained there; pass a real"),
        ({"build": lambda: problem.build().to("meta")}, r"build\(\) puts its weights on the device 'meta'"),
        ({"warmup": 3}, r"warmup=3 would change nothing, .*such as 'default\+warmup', or leave warmup out"),
        ({"progress": 1}, "progress=1 must be True or False"),
        ({"curvature_at_start": None}, "curvature_at_start=None must be True or False"),
        ({"folder": __file__}, "folder='.*' is a file; pass the name of a folder"),
        ({"folder": Path(__file__).parent}, "holds other things .*; pass a folder of its own"),
        ({"folder": 3}, "folder=3 must be the path of a folder"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        problem.small(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stds": []}, "stds is empty; give at least one number"),
        ({"stds": [0.1, 0.0]}, "0.0 in stds must be a number above 0"),
        ({"stds": 0.1}, r"stds=0.1 must be a list of numbers, such as \[0.5, 0.05\]"),
        ({"learning_rate": 0}, "0 in learning_rate must be a number above 0"),
        ({"layers": []}, r"layers=\[\] must be names or globs"),
        ({"layers": [3]}, r"layers=\[3\] must be names or globs"),
        ({"layers": ["fc9"]}, "layers='fc9' fits no parameter of the model; its layers are 1, 3"),
        ({"warmup": 0}, "warmup=0 must be a whole number, 1 or more"),
    ],
)
def test_bad_arguments_of_a_sweep_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        sweep(problem.build, problem.LOSS, problem.data(), **{"steps": 12, "workers": 1, **arguments})
