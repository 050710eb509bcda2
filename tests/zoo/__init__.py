"""Small problems, one for each thing that people build; each is held against a dense fp64 truth."""

from __future__ import annotations

import pytest

from zoo import layers, losses, sequences, structure
from zoo.problem import Problem

PROBLEMS: tuple[Problem, ...] = (
    *layers.PROBLEMS, *sequences.PROBLEMS, *losses.PROBLEMS, *structure.PROBLEMS, *losses.COUPLED
)  # fmt: skip

# One of each structure. Where a test runs over the whole zoo, the others belong to the sweep.
SOME = (
    "mlp_relu", "mlp_gelu", "mlp_one_example", "conv2d_rectangular_strides", "conv_transpose1d", "max_pool2d",
    "embedding_bag_mean", "tied_autoencoder", "instance_norm", "batch_norm2d_eval", "lstm_batch_first",
    "multihead_attention", "encoder_layer_pre_norm", "loss_cross_entropy_everything_at_once",
    "loss_one_minus_cosine_similarity", "residual_mlp", "sequence_outputs", "dropout_in_eval_mode",
    "uneven_data_loader", "bilinear", "weight_read_beside_the_call", "loss_contrastive_between_outputs",
)  # fmt: skip
MARKS = {problem: () if problem.name in SOME else pytest.mark.sweep for problem in PROBLEMS}
ZOO = [pytest.param(problem, id=problem.name, marks=marks) for problem, marks in MARKS.items()]
