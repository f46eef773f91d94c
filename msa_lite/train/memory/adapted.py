"""Linear layers with a LoRA adapter, run forward and backward as one function.

    y = x Wᵀ + b + s (x Aᵀ) Bᵀ

PEFT makes these products one by one: it scales and adds outputs of full width, and autograd adds two gradients of the
inputs. Here the adapter's products are added to the base's in place, in both directions. That keeps x and x Aᵀ for the
backward pass, as PEFT does, but makes no other tensor beside y and the gradients.

PEFT's layers stay what they are, with their weights and names; their forward pass alone is replaced, and only where it
would compute just this. All else goes PEFT's way: several adapters or none, dropout, DoRA and other variants, biases of
adapters, 4-bit layers, embeddings, convolutions, experts, autocast, hooks on the layers inside.
"""

from __future__ import annotations

from functools import cache
from typing import Any


def speed_up(model: Any) -> Any:
    """Have the adapted linear layers of a model run as one function where they can; return the model."""
    from peft.tuners.lora import Linear

    for module in model.modules():
        if type(module) is Linear:
            module.__class__ = _classes()[1]
    return model


@cache
def _classes() -> tuple[Any, Any]:
    """Return the autograd function and the class of layers that run it. They need torch and PEFT, which load slowly."""
    import torch
    from peft.tuners.lora import Linear
    from torch.autograd.function import once_differentiable

    class AdaptedProduct(torch.autograd.Function):
        """The formula above: x (…, in), W (out, in), b (out,) or None, A (r, in), B (out, r) give y (…, out)."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any, a: Any, b: Any, scale: float) -> Any:
            rows = x.reshape(-1, x.shape[-1])
            inner = rows @ a.T
            y = rows @ weight.T if bias is None else torch.addmm(bias, rows, weight.T)
            y.addmm_(inner, b.T, alpha=scale)
            # W is saved by save_for_backward: it may move between forward and backward, as in a checkpointed layer.
            ctx.save_for_backward(x, inner, weight, a, b)
            ctx.scale = scale
            return y.view(*x.shape[:-1], -1)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Any) -> Any:
            x, inner, weight, a, b = ctx.saved_tensors
            rows, of_y = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
            of_x, of_weight, of_bias, of_a, of_b = (None,) * 5
            needs_x, needs_weight, needs_bias, needs_a, needs_b, _ = ctx.needs_input_grad
            if needs_b:
                of_b = (of_y.T @ inner).mul_(ctx.scale)
            if needs_a or needs_x:
                of_inner = (of_y @ b).mul_(ctx.scale)
                of_a = of_inner.T @ rows if needs_a else None
            if needs_x:
                of_x = (of_y @ weight).addmm_(of_inner, a).view_as(x)
            if needs_weight:
                of_weight = of_y.T @ rows
            if needs_bias:
                of_bias = of_y.sum(0)
            return of_x, of_weight, of_bias, of_a, of_b, None

    class AdaptedLinear(Linear):
        """PEFT's layer with another forward pass."""

        def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Run the layer on (…, in) inputs."""
            name = None if args or kwargs else _plain_adapter(self)
            if name is None or not _same_dtype(self, name, x):
                return super().forward(x, *args, **kwargs)
            base, a, b = self.base_layer, self.lora_A[name], self.lora_B[name]
            return AdaptedProduct.apply(x, base.weight, base.bias, a.weight, b.weight, self.scaling[name])

    return AdaptedProduct, AdaptedLinear


def _plain_adapter(layer: Any) -> str | None:
    """Return the active adapter's name if it is the only one and PEFT would compute just this module's formula, else
    None."""
    import torch

    names = layer.active_adapters
    if len(names) != 1 or names[0] not in layer.lora_A or layer.disable_adapters or layer.merged:
        return None
    name = names[0]
    if name in layer.lora_variant or (layer.training and not _is_off(layer.lora_dropout[name])):
        return None
    modules = (layer.base_layer, layer.lora_A[name], layer.lora_B[name])
    if any(type(module) is not torch.nn.Linear or _is_hooked(module) for module in modules):
        return None
    return name if all(module.bias is None for module in modules[1:]) else None


def _is_off(dropout: Any) -> bool:
    import torch

    return isinstance(dropout, torch.nn.Identity) or getattr(dropout, "p", None) == 0


def _is_hooked(module: Any) -> bool:
    """Check whether a call of the module does more than its class's forward pass."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _same_dtype(layer: Any, name: str, x: Any) -> bool:
    """Check that all are of one dtype on one device, plain tensors, and that nothing casts them."""
    import torch

    tensors = (layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
    if torch.is_autocast_enabled(x.device.type) or type(x) is not torch.Tensor:
        return False
    return all(
        type(t) in (torch.nn.Parameter, torch.Tensor) and t.dtype == x.dtype and t.device == x.device for t in tensors
    )
