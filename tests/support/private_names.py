"""Names of other libraries that these do not promise, and that we use: how each is reached, and what if it is gone.

What is so where a name is gone:

    needed     the part that needs it says so when it is loaded (`hiddenstate/_torch_names.py`)
    optional   there is another way, or an error in a sentence where it is first used
    late       not looked up beforehand, since that would load torch's compiler; used only where that is loaded
    engine     the fast engine does not build; its inner files are not guarded one by one
    known      as good as promised: code everywhere rests on it
"""

from typing import NamedTuple


class PrivateName(NamedTuple):
    """How a name is reached, and what if it is gone."""

    expression: str
    gone: str


_NEEDED = {
    "_BatchNorm": "torch.nn.modules.batchnorm._BatchNorm",
    "_C": "torch._C",
    "_ConvNd": "torch.nn.modules.conv._ConvNd",
    "_autograd": "torch._C._autograd",
    "_cudnn_rnn_flatten_weight": "torch._cudnn_rnn_flatten_weight",
    "_current_graph_task_id": "torch._C._current_graph_task_id",
    "_dynamo": "torch._C._dynamo",
    "_get_mkldnn_enabled": "torch._C._get_mkldnn_enabled",
    "_is_any_autocast_enabled": "torch._C._is_any_autocast_enabled",
    "_len_torch_dispatch_stack": "torch._C._len_torch_dispatch_stack",
    "_len_torch_function_stack": "torch._C._len_torch_function_stack",
    "_top_saved_tensors_default_hooks": "torch._C._autograd._top_saved_tensors_default_hooks",
    "_unsafe_set_version_counter": "torch._C._autograd._unsafe_set_version_counter",
}
_OPTIONAL = {
    "_current_level": "torch.autograd.forward_ad._current_level",
    "_flat_weights": "torch.nn.LSTM(1, 1)._flat_weights",
    "_flat_weights_names": "torch.nn.LSTM(1, 1)._flat_weights_names",
}
_LATE = {
    "_dynamo_marked_constant": "torch.compiler.assume_constant_result(lambda: 0)._dynamo_marked_constant",
    "_import_module": "__import__('torch._dynamo')._dynamo.symbolic_convert._import_module",
    "_stance": "__import__('torch._dynamo')._dynamo.eval_frame._stance",
    "_torchdynamo_disable": "torch.compiler.disable(lambda: None)._torchdynamo_disable",
}
_ENGINE = {
    "_cuda_getCurrentRawStream": "torch.cuda.is_available() and torch._C._cuda_getCurrentRawStream",
    "_decomp": "__import__('torch._decomp')._decomp.get_decompositions",
    "_foreach_copy_": "torch._foreach_copy_",
    "_functorch": "torch._C._functorch",
    "_log_softmax": "torch.ops.aten._log_softmax",
    "_log_softmax_backward_data": "torch.ops.aten._log_softmax_backward_data",
    "_prelu_kernel": "torch.ops.aten._prelu_kernel",
    "_prelu_kernel_backward": "torch.ops.aten._prelu_kernel_backward",
    "_ops": "torch._ops.OpOverload",
    "_pop_saved_tensors_default_hooks": "torch._C._autograd._pop_saved_tensors_default_hooks",
    "_push_saved_tensors_default_hooks": "torch._C._autograd._push_saved_tensors_default_hooks",
    "_python_dispatch": "torch.utils._python_dispatch.TorchDispatchMode",
    "_schema": "torch.ops.aten.add.Tensor._schema.is_mutable",
    "_set_vmap_fallback_warning_enabled": "torch._C._functorch._set_vmap_fallback_warning_enabled",
    "_softmax_backward_data": "torch.ops.aten._softmax_backward_data",
    "_subclasses": "__import__('torch._subclasses')._subclasses.FakeTensorMode",
    "_to_copy": "torch.ops.aten._to_copy",
    "_unsafe_view": "torch.ops.aten._unsafe_view",
}
_KNOWN = {
    "_backward_hooks": "torch.nn.Linear(1, 1)._backward_hooks",
    "_backward_pre_hooks": "torch.nn.Linear(1, 1)._backward_pre_hooks",
    "_buffers": "torch.nn.Linear(1, 1)._buffers",
    "_cdata": "torch.zeros(1).untyped_storage()._cdata",
    "_asdict": "__import__('collections').namedtuple('Pair', 'a b')._asdict",
    "_base": "torch.zeros(2)[:1]._base",
    "_fields": "__import__('collections').namedtuple('Pair', 'a b')._fields",
    "_forward_hooks": "torch.nn.Linear(1, 1)._forward_hooks",
    "_forward_pre_hooks": "torch.nn.Linear(1, 1)._forward_pre_hooks",
    "_get_running_loop": "__import__('asyncio')._get_running_loop",
    "_getframe": "__import__('sys')._getframe",
    "_modules": "torch.nn.Linear(1, 1)._modules",
    "_parameters": "torch.nn.Linear(1, 1)._parameters",
    "_pytree": "torch.utils._pytree",
    "_replace": "__import__('collections').namedtuple('Pair', 'a b')._replace",
    "_version": "torch.zeros(1)._version",
}

OF_OTHERS = {
    name: PrivateName(expression, gone)
    for gone, names in {
        "needed": _NEEDED,
        "optional": _OPTIONAL,
        "late": _LATE,
        "engine": _ENGINE,
        "known": _KNOWN,
    }.items()
    for name, expression in names.items()
}

# Reached by a string, where the source does not show them: expression -> what if it is gone.
BY_STRING = {
    "torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu": "needed",
    "torch._VF.lstm_cell, torch._VF.gru_cell": "needed",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "optional",
    "__import__('torch._dynamo')._dynamo.decorators.skip": "late",
    "torch._C._get_tracing_state": "optional",
    "torch._guards.TracingContext.try_get": "optional",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "optional",
    "torch._C._functorch.peek_interpreter_stack": "optional",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "optional",
    "torch.overrides._get_current_function_mode_stack": "optional",
    "torch.ops.aten._assert_async.msg": "optional",
    "torch.nn.modules.module._global_forward_hooks": "optional",
    "torch.nn.modules.module._global_forward_pre_hooks": "optional",
    "torch.nn.modules.module._global_backward_hooks": "optional",
    "torch.nn.modules.module._global_backward_pre_hooks": "optional",
    "torch.compile(torch.nn.Linear(1, 1))._orig_mod": "optional",
    "torch.stack([torch.ones(1, requires_grad=True)]).grad_fn._saved_dim": "optional",
    "torch.ones(1, 1, requires_grad=True).transpose(0, 1).grad_fn._saved_dim0": "optional",
    "torch.ones(1, 1, requires_grad=True).transpose(0, 1).grad_fn._saved_dim1": "optional",
    "torch.ones(1, 1, requires_grad=True).permute(1, 0).grad_fn._saved_dims": "optional",
}
