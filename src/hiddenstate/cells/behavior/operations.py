"""What operations do, by name, where it matters for what crosses."""


def _named(names: str) -> set[str]:
    return set(names.split())


# Operations that hand numbers on as they are: views, copies, parts, and parts put together.
MOVES = _named(
    """
    __getitem__ unbind chunk split split_with_sizes tensor_split select narrow view reshape transpose permute t
    T mT H squeeze unsqueeze flatten unflatten expand expand_as repeat repeat_interleave tile contiguous clone
    detach detach_ to float double half bfloat16 type_as cpu cuda stack cat concat concatenate hstack vstack
    index_select gather alias copy_ __setitem__ data movedim swapaxes swapdims take_along_dim flip roll view_as
    reshape_as broadcast_to requires_grad_ ravel squeeze_ unsqueeze_ __iter__ module_call real imag view_as_real
    view_as_complex type
    """
)

# Operations by which a mask mixes two values; whether they did so is checked on the numbers.
BLENDS = _named(
    """
    where mul add sub rsub lerp masked_fill masked_fill_ mul_ add_ sub_ addcmul masked_scatter masked_scatter_
    index_copy index_copy_ index_put index_put_ scatter scatter_ __iadd__ __imul__ __mul__ __add__ __rsub__
    __sub__ __radd__ __rmul__ multiply
    """
)

# Operations by which sums, lists and extremes are collected.
COLLECTS = _named(
    """
    add add_ __add__ __iadd__ __radd__ sub sub_ __sub__ __isub__ cat concat concatenate stack hstack vstack
    __setitem__ index_add index_add_ scatter_add scatter_add_ index_put index_put_ index_copy_ copy_ maximum
    minimum max min logaddexp logical_or logical_and __or__ __ior__ __and__ __iand__ bitwise_or bitwise_and
    scatter_ scatter alias masked_scatter masked_scatter_ baddbmm
    """
)

GROWS = {"cat", "concat", "concatenate", "hstack", "vstack", "stack", "pad", "_pad"}

# Operations that draw random numbers: replayed as drawn.
DRAWS = _named(
    """
    rand randn randint rand_like randn_like randint_like randperm normal normal_ uniform_ bernoulli bernoulli_
    multinomial poisson exponential_ geometric_ cauchy_ log_normal_ random_ dropout dropout1d dropout2d
    dropout3d alpha_dropout feature_alpha_dropout dropout_ gumbel_softmax rrelu rrelu_ feature_dropout
    """
)

# Operations that draw in some modes only.
MAY_DRAW = {"multi_head_attention_forward", "scaled_dot_product_attention", "rnn_tanh", "rnn_relu", "lstm", "gru"}

# Memory that nobody has written yet.
UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided"}

# What tells nothing of a tensor's content.
PASSIVE = {"size", "dim", "stride", "is_floating_point", "numel", "type", "is_complex", "__len__", "ndimension"}
PASSIVE |= {"_set_grad_enabled", "get_default_dtype", "is_tensor", "storage_offset", "is_contiguous", "element_size"}
PASSIVE |= {"backward", "requires_grad_", "retain_grad", "register_hook", "is_inference", "has_names", "__hash__"}
PASSIVE |= {"__repr__", "__format__", "data_ptr", "untyped_storage", "get_device", "is_shared", "manual_seed"}
PASSIVE |= {"nelement"}

# What takes a shape from its operand, and nothing of its content; and what takes it from its second one.
SHAPE_ONLY = {"new_zeros", "new_ones", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like", "full_like"}
SHAPE_ONLY |= {"rand_like", "randn_like", "randint_like"}
SHAPE_OF = {"expand_as", "view_as", "reshape_as", "type_as"}

# What moves its first operand by the others.
INDEXED = {"__getitem__", "index_select", "gather", "take_along_dim"}
