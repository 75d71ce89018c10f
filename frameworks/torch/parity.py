"""Models of PyTorch, for jobs and comparisons with other frameworks: their weights, by layer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from polyhvd.errors import InvalidArgumentError
from polyhvd.training.interception import Stepping, intercept
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = [
    "batch_norm_of",
    "check_optimizer",
    "kept_of",
    "load_file",
    "on_input",
    "on_output",
    "on_step",
    "outputs_of",
    "rate_of",
    "save_file",
    "states_of",
    "to_numpy",
    "weights_of",
]

Tensor = torch.Tensor
_NORMS = (torch.nn.modules.batchnorm._NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm)
_OF_NORMS = {"weight": "scale", "bias": "offset", "running_mean": "mean", "running_var": "variance"}
_OF_CELLS = {
    "weight_ih": "input kernel",
    "weight_hh": "state kernel",
    "bias_ih": "input bias",
    "bias_hh": "state bias",
}


def weights_of(model: Any) -> list[Weight]:
    """The weights of a module, layer by layer in the order in which they were made; or a list of tensors.

    Args:
        model: a ``torch.nn.Module``; or tensors in an order that is the same on every rank, also by name, as
            ``state_dict()`` has them, whose counters are left out.

    Raises:
        InvalidArgumentError: a lazy layer has no weights yet, or it has none at all.
    """
    found: list[Weight] = []
    seen: set[int] = set()
    for name, role, tensor, layer in _named(model):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(f"{name} has no shape yet; run the model once before its mapping")
        found.append(_weight(name, role, tensor, layer))
    if not found:
        raise InvalidArgumentError(f"{type(model).__name__} has no weights; pass the model that is trained")
    return found


def _named(model: Any) -> Iterator[tuple[str, str, Tensor, torch.nn.Module | None]]:
    if not isinstance(model, torch.nn.Module):
        items = model.items() if isinstance(model, Mapping) else enumerate(model)
        yield from ((str(name), "", tensor, None) for name, tensor in items if tensor.is_floating_point())
        return
    for path, module in model.named_modules():
        roles = _roles(module)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            is_weight = tensor is not None and (key in module._parameters or key in roles)
            if is_weight:
                role = roles.get(key, roles.get(key.partition("_l")[0], ""))
                yield f"{path}.{key}" if path else key, role, tensor, module


def _roles(module: torch.nn.Module) -> dict[str, str]:
    """The roles of a layer's parameters, by name; other parameters have none."""
    if isinstance(module, _NORMS):
        return _OF_NORMS
    if isinstance(module, (torch.nn.RNNBase, torch.nn.RNNCellBase)):
        return _OF_CELLS
    if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        return {"weight": "table"}
    if isinstance(module, (torch.nn.Linear, torch.nn.modules.conv._ConvNd)):
        return {"weight": "kernel", "bias": "bias"}
    return {}


def _weight(name: str, role: str, tensor: Tensor, layer: torch.nn.Module | None) -> Weight:
    def read() -> Any:
        return to_numpy(tensor)

    def write(array: Any) -> None:
        with torch.no_grad():
            tensor.copy_(_from_numpy(array))

    return Weight(
        name=name,
        role=role,
        source=tensor,
        layout=Layout(tuple(tensor.shape)),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=tensor.requires_grad,
        read=read,
        write=write,
        layer=layer,
    )


def _is_trained(layer: torch.nn.Module) -> bool:
    """Return whether a pass is one of training, not of an evaluation between two steps."""
    return torch.is_grad_enabled() or (
        layer.training and not any(weight.requires_grad for weight in layer.parameters())
    )


def on_input(
    layer: torch.nn.Module, listener: Callable[[Any], None], *, trained: bool = True
) -> Callable[[], None]:
    """Call ``listener`` with each input of a layer, by default in training; returns a function to end it."""

    def hook(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not trained or _is_trained(layer):
            listener(given[0] if given else next(iter(named.values()), None))

    return layer.register_forward_pre_hook(hook, with_kwargs=True).remove


def on_output(model: torch.nn.Module, listener: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``listener`` with each output of a model in training; returns a function that ends it."""

    def hook(_: Any, given: tuple[Any, ...], made: Any) -> None:
        if _is_trained(model):
            listener(made)

    return model.register_forward_hook(hook).remove


def check_optimizer(optimizer: Any, weights: Sequence[Weight]) -> None:
    """Check that an optimizer trains a model.

    Raises:
        InvalidArgumentError: it is not an optimizer of PyTorch, or has none of the model's weights.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups or not callable(getattr(optimizer, "step", None)):
        raise InvalidArgumentError(
            "parity.watch: optimizer: expected one of PyTorch, as the model is, or None, found "
            f"{type(optimizer).__name__}"
        )
    known = {id(tensor) for group in groups for tensor in group["params"]}
    if not any(id(weight.source) in known for weight in weights):
        raise InvalidArgumentError(
            f"parity.watch: optimizer: this {type(optimizer).__name__} has none of the model's weights; pass "
            "the one that was made of its parameters()"
        )


def on_step(optimizer: Any, around: Stepping) -> Callable[[], None]:
    """Have each step within ``around``, which is given what returns the gradient of a source.

    A DistributedOptimizer has averaged gradients before the step: of each, a copy from before that counts.
    """
    own: dict[int, Tensor] = {}

    def keep(parameter: Tensor, gradient: Tensor) -> None:
        own[id(parameter)] = gradient.detach().clone()

    def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with around(lambda source: own.get(id(source), source.grad)):
            made = original(*args, **kwargs)
        own.clear()
        return made

    distributed = getattr(optimizer, "_gradients", None) or getattr(optimizer, "_mapped", None)
    observers: list[Any] = [] if distributed is None else distributed.observers
    observers.append(keep)
    end_step = intercept(optimizer, "step", step)

    def end() -> None:
        end_step()
        observers.remove(keep)

    return end


def rate_of(optimizer: Any) -> float:
    """The learning rate of an optimizer, of its first group."""
    return float(optimizer.param_groups[0]["lr"])


def kept_of(optimizer: Any, source: Any) -> dict[str, tuple[Tensor, float]]:
    """The state that an optimizer keeps for a parameter: "momentum" and "second moment", each with a factor.

    The momentum of SGD is returned times the learning rate, which other frameworks include in it.
    """
    state = optimizer.state.get(source)
    found: dict[str, tuple[Tensor, float]] = {}
    if not state:
        return found
    buffer = state.get("momentum_buffer")
    if buffer is not None:
        groups = optimizer.param_groups
        group = groups[0]
        if len(groups) > 1:
            group = next(each for each in groups if any(item is source for item in each["params"]))
        found["momentum"] = buffer, float(group["lr"])
    if (first := state.get("exp_avg")) is not None:
        found["momentum"] = first, 1.0
    for key in ("exp_avg_sq", "square_avg", "sum"):
        if (second := state.get(key)) is not None:
            found["second moment"] = second, 1.0
    return found


def states_of(optimizer: Any, source: Any) -> dict[str, Any]:
    """The result of :func:`kept_of` as arrays, multiplied by their factors."""
    kept = kept_of(optimizer, source)
    return {
        kind: to_numpy(tensor) if factor == 1.0 else to_numpy(tensor) * np.float32(factor)
        for kind, (tensor, factor) in kept.items()
    }


def batch_norm_of(layer: Any) -> tuple[float, bool] | None:
    """How a layer updates its running statistics in a step; its variance is unbiased."""
    if not isinstance(layer, torch.nn.modules.batchnorm._NormBase) or layer.momentum is None:
        return None
    return 1.0 - layer.momentum, True


def to_numpy(tensor: Tensor) -> Any:
    """A copy of the values, sparse ones made dense."""
    tensor = tensor.detach().cpu()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype == torch.bfloat16:  # which NumPy knows by ml_dtypes
        import ml_dtypes

        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return tensor.numpy().copy()


def _from_numpy(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def load_file(model: torch.nn.Module, path: str) -> None:
    """Give a model the weights of a file, which has to have all of them and no other.

    Args:
        model: to be overwritten.
        path: of a state dict, or of a dict with one as its "state_dict".

    Raises:
        InvalidArgumentError: the weights are not those of the model.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InvalidArgumentError(
            f"{path}: expected a state dict, found objects such as a whole model, which would run code of "
            "the file; write it by torch.save(model.state_dict(), ...)"
        ) from None
    if isinstance(stored, Mapping) and isinstance(stored.get("state_dict"), Mapping):
        stored = stored["state_dict"]
    if not isinstance(stored, Mapping):
        raise InvalidArgumentError(f"{path}: expected a state dict, found {type(stored).__name__}")
    known = model.state_dict().keys()
    for wrapper in ("module.", "_orig_mod."):  # of DistributedDataParallel, and of torch.compile
        if all(name.startswith(wrapper) for name in stored) and not any(wrapper in name for name in known):
            stored = {name.removeprefix(wrapper): value for name, value in stored.items()}
    try:
        model.load_state_dict(stored)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise InvalidArgumentError(f"{path}: {' '.join(lines[:2])}") from None


def save_file(model: torch.nn.Module, path: str) -> None:
    """Write the state dict of a model.

    Args:
        model: whose weights are written.
        path: of the file.
    """
    torch.save(model.state_dict(), path)


def outputs_of(model: torch.nn.Module, inputs: Sequence[Any]) -> tuple[Any, bool]:
    """Apply a model to arrays of NumPy, not in training mode; return an array, or a list of them.

    Args:
        model: that is run once.
        inputs: as it takes them, one after the other.

    Returns:
        the outputs, and whether images in them have their channels last.
    """
    first = next(model.parameters(), torch.zeros(()))
    given = [torch.from_numpy(each).to(first.device) for each in inputs]
    given = [each.to(first.dtype) if each.is_floating_point() else each for each in given]
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            made = model(*given)
    finally:
        for module in trained:
            module.training = True
    return [to_numpy(each) for each in made] if isinstance(made, (list, tuple)) else to_numpy(made), False
