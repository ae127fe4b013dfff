"""Ways to use a layer in a step of training, beside one forward and one backward.

A use is a function of the model, its tokens [T,H] and the number of the step. It runs forwards and backwards, leaves
gradients in the parameters' `grad`, and returns what else must be equal: outputs and gradients that it asked for.
`BUILDS` change the model before it is optimized.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.properties.life import Results, loss_of, plain_step
from tests.properties.written import EXPERTS, PRODUCTS, SPELLINGS, WrittenLayer, module_source

__all__ = ["BUILDS", "LAYERS", "USES", "layer_of"]

LAYERS = (
    "where",
    "mask",
    "hit",
    "splits",
    "token mask",
    "scatter add",
    "one hot einsum",
    "gathered flat",
    "sorted back",
)
"""Spellings of loops, then products of dense layers."""


def layer_of(spelling: str) -> WrittenLayer:
    """Write a layer whose number of experts per token is `self.k`."""
    init = ["self.k = 2"]
    routing = ["w, i = torch.topk(logits.softmax(-1), self.k)"]
    if spelling in SPELLINGS:
        loop = SPELLINGS[spelling]
        body = [*loop.select, f"Y = self.ex[e]({loop.rows}) * {loop.weight}", *loop.add[0]]
        lines = ["out = torch.zeros_like(x)", *loop.start, loop.header, *("    " + line for line in body), *loop.end]
    else:
        init += [f"self.{name} = nn.Parameter(torch.randn(self.num, {size}) / 3)" for name, size in _STACKED.items()]
        lines = list(PRODUCTS[spelling])
    name = "Used" + spelling.title().replace(" ", "")
    return WrittenLayer(name, module_source(name, 4, EXPERTS["gated"], init, [*routing, *lines, "return out"]), {})


_STACKED = {"up": "H, 12", "down": "12, H"}


# Uses: backwards of other kinds.

_Use = Callable[[nn.Module, Tensor, int], Results]
USES: dict[str, _Use] = {}


def _used(function: _Use) -> _Use:
    USES[function.__name__.replace("_", " ")] = function
    return function


@_used
def offloaded(model: nn.Module, x: Tensor, number: int) -> Results:
    with torch.autograd.graph.save_on_cpu():
        return plain_step(model, x, number)


@_used
def copied_when_saved(model: nn.Module, x: Tensor, number: int) -> Results:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: [saved.clone()], lambda packed: packed[0].clone()):
        return plain_step(model, x, number)


@_used
def of_input_only(model: nn.Module, x: Tensor, number: int) -> Results:
    return {"d x alone": torch.autograd.grad(loss_of(model(x)), x)[0]}


@_used
def of_router_only(model: nn.Module, x: Tensor, number: int) -> Results:
    return {"d router alone": torch.autograd.grad(loss_of(model(x)), model.router.weight)[0]}


@_used
def of_last_parameter_only(model: nn.Module, x: Tensor, number: int) -> Results:
    last = list(model.parameters())[-1]
    return {"d last": torch.autograd.grad(loss_of(model(x)), last, allow_unused=True)[0]}


@_used
def into_some_leaves(model: nn.Module, x: Tensor, number: int) -> Results:
    loss_of(model(x)).backward(inputs=[model.router.weight])
    return {}


@_used
def input_first(model: nn.Module, x: Tensor, number: int) -> Results:
    loss = loss_of(model(x))
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return {"d x alone": first}


@_used
def backward_twice(model: nn.Module, x: Tensor, number: int) -> Results:
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    return {}


@_used
def backward_of_two_losses(model: nn.Module, x: Tensor, number: int) -> Results:
    out = model(x)
    out[:, :4].sum().backward(retain_graph=True)
    out[:, 4:].pow(2).sum().backward()
    return {"output": out}


@_used
def backward_again_after_it_was_freed(model: nn.Module, x: Tensor, number: int) -> Results:
    loss = loss_of(model(x))
    loss.backward()
    loss.backward()
    return {}


@_used
def second_derivative(model: nn.Module, x: Tensor, number: int) -> Results:
    loss = loss_of(model(x))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + first.pow(2).sum()).backward()
    return {}


@_used
def several_forwards(model: nn.Module, x: Tensor, number: int) -> Results:
    losses = [loss_of(model(part)) for part in (x, x[:1] * 0.5, x.flip(0))]
    for loss in losses if number % 2 else reversed(losses):
        loss.backward()
    return {}


@_used
def accumulated(model: nn.Module, x: Tensor, number: int) -> Results:
    for part in x.split(2):
        plain_step(model, part, number)
    return {}


@_used
def part_of_output(model: nn.Module, x: Tensor, number: int) -> Results:
    loss_of(model(x)[1:2]).backward()
    return {}


@_used
def without_backward(model: nn.Module, x: Tensor, number: int) -> Results:
    model(x)
    return plain_step(model, x, number)


@_used
def checkpointed(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(lambda tokens: checkpoint(model, tokens, use_reentrant=False), x, number)


@_used
def checkpointed_reentrantly(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(lambda tokens: checkpoint(model, tokens, use_reentrant=True), x, number)


@_used
def in_another_thread(model: nn.Module, x: Tensor, number: int) -> Results:
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(model(x)))
    thread.start()
    thread.join()
    loss_of(outputs[0]).backward()
    return {"output": outputs[0]}


@_used
def with_anomalies_detected(model: nn.Module, x: Tensor, number: int) -> Results:
    with torch.autograd.detect_anomaly(check_nan=False):
        return plain_step(model, x, number)


@_used
def on_one_thread(model: nn.Module, x: Tensor, number: int) -> Results:
    with torch.autograd.set_multithreading_enabled(False):
        return plain_step(model, x, number)


# Uses: modes and state.


@_used
def inference_first(model: nn.Module, x: Tensor, number: int) -> Results:
    if number == 0:
        with torch.inference_mode():
            return {"output": model(x).clone()}
    if number == 1:
        with torch.no_grad():
            return {"output": model(x)}
    return plain_step(model, x, number)


@_used
def inference_last(model: nn.Module, x: Tensor, number: int) -> Results:
    results = plain_step(model, x, number)
    with torch.inference_mode():
        return results | {"again": model(x).clone()}


@_used
def evaluated_between(model: nn.Module, x: Tensor, number: int) -> Results:
    model.train(number % 2 == 0)
    return plain_step(model, x, number)


@_used
def in_autocast(model: nn.Module, x: Tensor, number: int) -> Results:
    with torch.autocast("cpu", torch.bfloat16, enabled=number != 1):
        out = model(x)
    loss_of(out).backward()
    return {"output": out}


@_used
def input_without_gradient(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(model, x.detach(), number)


@_used
def router_frozen_between(model: nn.Module, x: Tensor, number: int) -> Results:
    model.router.weight.requires_grad_(number % 2 == 0)
    return plain_step(model, x, number)


@_used
def experts_frozen_between(model: nn.Module, x: Tensor, number: int) -> Results:
    for name, parameter in model.named_parameters():
        if name.startswith(("ex.", "up", "down")):
            parameter.requires_grad_(number % 2 == 1)
    return plain_step(model, x, number)


@_used
def one_expert_frozen_between(model: nn.Module, x: Tensor, number: int) -> Results:
    for parameter in model.ex[1].parameters():
        parameter.requires_grad_(number % 2 == 1)
    return plain_step(model, x, number)


@_used
def another_number_of_choices(model: nn.Module, x: Tensor, number: int) -> Results:
    model.k = (2, 1, 3, 4)[number]
    return plain_step(model, x, number)


@_used
def fewer_experts(model: nn.Module, x: Tensor, number: int) -> Results:
    if number == 2:
        model.num -= 1
        model.ex = model.ex[: model.num]
        model.skew = model.skew[: model.num].clone()
        model.router.weight = nn.Parameter(model.router.weight.detach()[: model.num].clone())
        for name in _STACKED:
            if hasattr(model, name):
                setattr(model, name, nn.Parameter(getattr(model, name).detach()[: model.num].clone()))
    return plain_step(model, x, number)


@_used
def experts_swapped(model: nn.Module, x: Tensor, number: int) -> Results:
    if number == 1:
        model.ex[0], model.ex[1] = model.ex[1], model.ex[0]
    if number == 2:
        model.ex[0] = copy.deepcopy(model.ex[2])
    return plain_step(model, x, number)


@_used
def parameters_loaded(model: nn.Module, x: Tensor, number: int) -> Results:
    state = {name: value * 0.9 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=number == 2)
    return plain_step(model, x, number)


@_used
def data_swapped(model: nn.Module, x: Tensor, number: int) -> Results:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    return plain_step(model, x, number)


@_used
def dtype_changed(model: nn.Module, x: Tensor, number: int) -> Results:
    dtype = torch.float64 if number % 2 == 0 else torch.float32
    model.to(dtype)
    for parameter in model.parameters():
        parameter.grad = None
    return plain_step(model, x.detach().to(dtype).requires_grad_(), number)


@_used
def with_other_parameters(model: nn.Module, x: Tensor, number: int) -> Results:
    others = {name: (value * 0.9).detach().requires_grad_() for name, value in model.named_parameters()}
    results = plain_step(lambda tokens: torch.func.functional_call(model, others, (tokens,)), x, number)
    return results | {f"d other {name}": value.grad for name, value in others.items()}


@_used
def copy_trained(model: nn.Module, x: Tensor, number: int) -> Results:
    copied = copy.deepcopy(model)
    results = plain_step(copied, x, number)
    results |= {f"d copied {name}": value.grad for name, value in copied.named_parameters()}
    return results | plain_step(model, x, number)


# Uses: inputs.


@_used
def no_tokens(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(model, x[:0] if number % 2 else x, number)


@_used
def no_tokens_first(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(model, x if number % 2 else x[:0], number)


@_used
def one_token(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(model, x[:1], number)


@_used
def transposed(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(model, x.t().contiguous().t(), number)


@_used
def strided(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(model, x.repeat(2, 2)[::2, ::2], number)


@_used
def expanded(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(model, x[:1].expand_as(x), number)


@_used
def leading_dimension_kept_apart(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(lambda tokens: model(tokens.view(-1, tokens.shape[-1])), x[None], number)


@_used
def applied_twice(model: nn.Module, x: Tensor, number: int) -> Results:
    return plain_step(lambda tokens: model(model(tokens)), x, number)


@_used
def not_a_number(model: nn.Module, x: Tensor, number: int) -> Results:
    place = torch.zeros_like(x)
    place[0] = float("nan") if number % 2 else float("inf")
    return {"output": model(x + place)}


@_used
def result_written(model: nn.Module, x: Tensor, number: int) -> Results:
    out = model(x)
    out.mul_(2).add_(1)
    loss_of(out).backward()
    return {"output": out}


@_used
def input_written_before_backward(model: nn.Module, x: Tensor, number: int) -> Results:
    tokens = x * 1
    out = model(tokens)
    with torch.no_grad():
        tokens.mul_(2)
    loss_of(out).backward()
    return {"output": out}


@_used
def parameters_written_before_backward(model: nn.Module, x: Tensor, number: int) -> Results:
    out = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    loss_of(out).backward()
    return {"output": out}


@_used
def buffers_written_before_backward(model: nn.Module, x: Tensor, number: int) -> Results:
    out = model(x)
    model.skew.add_(3)
    model.merging.fill_(0)
    loss_of(out).backward()
    return {"output": out}


# Uses: hooks and exceptions.


class _Stopped(Exception):
    """Raised by a hook in the midst of a step."""


def _stop(*_: Any) -> Any:
    raise _Stopped


def _interrupt(model: nn.Module, loss: Tensor) -> None:
    """Run a backward that a hook ends, and drop what it left in the gradients."""
    with contextlib.suppress(_Stopped):
        loss.backward()
    model.zero_grad()


@_used
def stopped_in_forward(model: nn.Module, x: Tensor, number: int) -> Results:
    num_saved = 0

    def pack(saved: Tensor) -> Tensor:
        nonlocal num_saved
        num_saved += 1
        return _stop() if num_saved > number else saved

    with contextlib.suppress(_Stopped), torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        model(x)
    return plain_step(model, x, number)


@_used
def stopped_in_backward(model: nn.Module, x: Tensor, number: int) -> Results:
    tokens = x * 1
    tokens.register_hook(_stop)
    _interrupt(model, loss_of(model(tokens)))
    return plain_step(model, x, number)


@_used
def stopped_at_a_saved_tensor(model: nn.Module, x: Tensor, number: int) -> Results:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, _stop):
        loss = loss_of(model(x))
    _interrupt(model, loss)
    return plain_step(model, x, number)


@_used
def stopped_at_a_parameter(model: nn.Module, x: Tensor, number: int) -> Results:
    hook = model.router.weight.register_hook(_stop)
    _interrupt(model, loss_of(model(x.detach().requires_grad_())))
    hook.remove()
    return plain_step(model, x, number)


@_used
def wrong_size(model: nn.Module, x: Tensor, number: int) -> Results:
    with contextlib.suppress(RuntimeError):
        model(x[:, :-1])
    return plain_step(model, x, number)


@_used
def gradients_hooked(model: nn.Module, x: Tensor, number: int) -> Results:
    hooks = [parameter.register_hook(lambda gradient: gradient * 2) for parameter in model.parameters()]
    results = plain_step(model, x, number)
    for hook in hooks:
        hook.remove()
    return results


@_used
def gradients_used_at_once(model: nn.Module, x: Tensor, number: int) -> Results:
    seen: Results = {}

    def use(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen[f"shape {tuple(parameter.shape)}"] = seen.get(f"shape {tuple(parameter.shape)}", 0) + parameter.grad.sum()
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(use) for parameter in model.parameters()]
    results = plain_step(model, x, number)
    for hook in hooks:
        hook.remove()
    return results | seen


@_used
def module_hooked(model: nn.Module, x: Tensor, number: int) -> Results:
    hooks = [
        model.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        model.register_forward_hook(lambda module, args, out: out + 1),
        model.register_full_backward_hook(lambda module, into, out: (into[0] * 3,)),
    ]
    results = plain_step(model, x, number)
    for hook in hooks:
        hook.remove()
    return results


@_used
def expert_hooked(model: nn.Module, x: Tensor, number: int) -> Results:
    hook = model.ex[1].register_forward_hook(lambda module, args, out: out * 2)
    results = plain_step(model, x, number)
    hook.remove()
    return results


# Builds.


class _Stack(nn.Module):
    """Two layers with the same experts, or one layer twice.

    Args:
        first, second: layers of one class.
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.router = first.router
        self.skew = first.skew

    def forward(self, x: Tensor) -> Tensor:
        middle: Tensor = self.first(x)
        out: Tensor = self.second(x + middle)
        return out


def _tied(model: nn.Module) -> nn.Module:
    second = copy.deepcopy(model)
    second.ex = model.ex
    for name in _STACKED:
        if hasattr(model, name):
            setattr(second, name, getattr(model, name))
    return _Stack(model, second)


def _tied_experts(model: nn.Module) -> nn.Module:
    model.ex[1] = model.ex[0]
    return model


def _tied_weights(model: nn.Module) -> nn.Module:
    model.ex[1].down.weight = model.ex[0].down.weight
    return model


def _transposed_parameters(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > 1:
                laid_out = parameter.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
                setattr(module, name, nn.Parameter(laid_out))
    return model


def _views_of_one_buffer(model: nn.Module) -> nn.Module:
    """All parameters are views of one flat tensor, as sharded optimizers lay them out."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    start = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            view = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            setattr(module, name, nn.Parameter(view))
    return model


BUILDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "one layer twice": lambda model: _Stack(model, model),
    "two layers with the same experts": _tied,
    "one expert twice": _tied_experts,
    "two experts with one matrix": _tied_weights,
    "parameters transposed in memory": _transposed_parameters,
    "parameters in one buffer": _views_of_one_buffer,
    "float32": lambda model: model.float(),
    "bfloat16": lambda model: model.bfloat16(),
    "float16": lambda model: model.half(),
}
