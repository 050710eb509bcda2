"""What the functions of torch do to a signal, by name: one table for calls, methods and operators alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# They give no signal: numbers, shapes, or tensors that depend on a shape alone.
SHAPE_QUERIES = _names(
    "shape size dim ndim ndimension numel nelement len dtype device is_cuda is_nested requires_grad "
    "grad_fn grad layout is_contiguous stride storage_offset is_floating_point is_complex element_size "
    "is_meta is_sparse is_mkldnn is_quantized is_leaf names result_type zeros_like ones_like empty_like "
    "full_like  new_zeros new_ones new_empty new_full new_tensor item tolist "
    "get_device is_inference itemsize backward_hooks data_ptr version is_shared is_pinned has_names "
    "nbytes output_nr retains_grad"
)

CASTS = _names(
    "to float half double bfloat16 type type_as cuda cpu int long bool detach data alias clone "
    "contiguous requires_grad_ nan_to_num identity view_as_real lift_fresh real checkpoint"
)

TO_INTEGERS = _names("int long bool")

# Every value goes on as it is, in another place; some may be left out, repeated, or masked to zero.
REARRANGING = CASTS | _names(
    "view reshape flatten unflatten ravel permute transpose t T mT H mH adjoint swapaxes swapdims "
    "swap_axes movedim moveaxis squeeze unsqueeze expand expand_as view_as reshape_as repeat "
    "repeat_interleave tile roll flip fliplr flipud rot90 getitem narrow select index_select gather "
    "take_along_dim masked_fill masked_select pad pixel_shuffle pixel_unshuffle channel_shuffle unfold "
    "fold tril triu as_strided broadcast_to diagonal constant_pad_nd take slice index im2col col2im "
    "unsafe_view sort reshape_alias"
)

SPLITS = _names(
    "chunk split tensor_split unbind split_with_sizes hsplit vsplit dsplit unsafe_chunk unsafe_split"
)

# Means, extremes and sums over positions: passed through, and not counted, unless they are `RESIZING`.
REDUCTIONS = _names(
    "mean sum std var std_mean var_mean norm vector_norm amax amin max min nansum nanmean median "
    "logsumexp prod"
)
_POOLINGS = [
    f"{kind}_pool{n}d" for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)
]
POOLING = REDUCTIONS | _names(
    "interpolate upsample upsample_nearest upsample_bilinear fractional_max_pool2d "
    "fractional_max_pool3d max_unpool1d max_unpool2d max_unpool3d grid_sample cumsum segment_reduce "
    "scatter_add scatter_reduce index_add pad_packed_sequence pack_padded_sequence cumprod"
) | frozenset(_POOLINGS) | frozenset(f"{name}_with_indices" for name in _POOLINGS)  # fmt: skip

# What they give is not of the size of what they got, by a factor that depends on how much they add up.
RESIZING = _names(
    "sum nansum norm vector_norm prod logsumexp cumsum cumprod scatter_add scatter_reduce index_add "
    "lp_pool1d lp_pool2d "
    "lp_pool3d"
)

DROPOUTS = _names("dropout dropout1d dropout2d dropout3d feature_dropout native_dropout")
# These keep mean and variance: nothing is to be made up for.
ALPHA_DROPOUTS = _names("alpha_dropout feature_alpha_dropout")

# What they draw is noise, not a constant: it comes out differently every time.
DRAWING = _names(
    "bernoulli rand randn rand_like randn_like uniform normal exponential randint multinomial poisson"
)

SCALINGS = _names("mul div neg multiply divide true_divide rdiv")
SUMS = _names("add sub rsub subtract lerp")
ELEMENTWISE = SCALINGS | SUMS | _names(
    "relu relu6 leaky_relu prelu rrelu elu selu celu gelu silu mish softplus softsign softshrink "
    "hardshrink tanhshrink hardtanh hardsigmoid hardswish sigmoid logsigmoid log_sigmoid tanh threshold "
    "sin cos tan asin acos atan sinh cosh asinh acosh atanh arctan arcsinh arctanh sinc exp exp2 expm1 "
    "log log2 log10 log1p sqrt rsqrt square pow rpow float_power abs absolute sign sgn erf erfc erfinv "
    "reciprocal clamp clamp_min clamp_max clip maximum minimum where gt ge lt le eq ne greater less "
    "logical_and logical_or logical_not heaviside floor ceil round trunc frac expit logit fmax fmin "
    "hypot rtruediv floor_divide remainder positive xlogy logaddexp addcmul addcdiv"
)  # fmt: skip

NORMS = _names(
    "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm native_layer_norm "
    "native_batch_norm native_group_norm sync_batch_norm"
)
# One unit depends on the others: no gain follows from them.
NORMALIZING = _names(
    "softmax log_softmax softmin normalize gumbel_softmax softmax2d cosine_similarity renorm multi_margin"
)
MIXING = _names(
    "matmul mm bmm mv dot inner outer einsum tensordot addmm baddbmm addbmm addmv kron cdist bilinear "
    "linear scaled_dot_product_attention conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d chain_matmul multi_dot vdot"
)
JOINING = _names("cat concat concatenate stack hstack vstack dstack column_stack")

_OPERATORS = {
    "radd": "add", "iadd": "add", "rmul": "mul", "imul": "mul", "isub": "sub", "truediv": "div",
    "itruediv": "div", "idiv": "div", "rmatmul": "matmul", "imatmul": "matmul", "ipow": "pow",
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "concat": "cat",
    "concatenate": "cat",
}  # fmt: skip


def name_of(function: Callable[..., Any] | str) -> str:
    """What a function is called in the tables: properties, operators and in-place forms by their plain name.

    >>> import torch
    >>> [name_of(f) for f in (torch.Tensor.add_, torch.Tensor.__rsub__, torch.Tensor.T.__get__, "relu_")]
    ['add', 'rsub', 'T', 'relu']
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    name = name.strip("_").removeprefix("linalg_")
    return _OPERATORS.get(name, name)


def kind_of(name: str) -> str:
    """The role of a function that gets a signal and no weight.

    >>> [kind_of(name) for name in ("tanh", "view", "softmax", "qr")]
    ['elementwise', 'rearrange', 'normalizing', 'unknown']
    """
    return _KINDS.get(name, "unknown")


_KINDS = {
    name: kind
    for kind, names in (
        ("pool", POOLING), ("rearrange", REARRANGING), ("split", SPLITS),
        ("dropout", DROPOUTS | ALPHA_DROPOUTS), ("elementwise", ELEMENTWISE), ("norm", NORMS),
        ("normalizing", NORMALIZING), ("mix", MIXING), ("cat", JOINING), ("gate", {"glu"}),
    )
    for name in names
}  # fmt: skip
