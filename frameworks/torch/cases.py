"""Cases of ``polyhvd parity`` in PyTorch: layers, losses and optimizers as polyhvd/parity describes them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from polyhvd.torch.batch_norm import SyncBatchNorm
from polyhvd.torch.wrappers import DistributedOptimizer
from torch import nn

from polyhvd.parity.layers import Layer
from polyhvd.parity.session import Session
from polyhvd.training.mapping import Weight

__all__ = ["TorchSession"]

Tensor = torch.Tensor
_FUNCTIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


class _Recurrent(nn.Module):
    def __init__(self, cell: nn.RNNBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.cell(x)[0]
        return states


class _Attention(nn.Module):
    def __init__(self, heads: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = layers

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, units = x.shape
        query, key, value = (
            layer(x).reshape(batch, steps, self.heads, units // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        made: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, steps, units))
        return made


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module, around: nn.Module) -> None:
        super().__init__()
        self.inner, self.around = inner, around

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.inner(x) + self.around(x)
        return total


class _Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


class _Mean(nn.Module):
    def __init__(self, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=self.axes)


class TorchSession(Session):
    """A case in PyTorch."""

    def make(self) -> Any:
        """A module."""
        made = self.case.of("torch")
        if made is None:
            raise LookupError
        return self._all(made) if isinstance(made, list) else made

    def _all(self, layers: Sequence[Layer]) -> nn.Sequential:
        return nn.Sequential(*map(self._one, layers))

    def _one(self, layer: Layer) -> nn.Module:
        kind, given = layer.kind, layer.options
        if kind == "dense":
            return nn.Linear(given["inputs"], given["units"], bias=given["bias"])
        if kind == "convolution":
            sizes = (given["inputs"], given["units"], given["kernel"], given["stride"], given["padding"])
            return nn.Conv2d(*sizes, bias=given["bias"])
        if kind == "batch_normalization":
            if self.synchronized and self.process_set is not None:
                return SyncBatchNorm(
                    given["units"], given["epsilon"], 1.0 - given["keep"], process_set=self.process_set
                )
            norm = nn.BatchNorm2d if given.get("images", True) else nn.BatchNorm1d
            return norm(given["units"], given["epsilon"], 1.0 - given["keep"])
        if kind == "layer_normalization":
            return nn.LayerNorm(given["units"], given["epsilon"])
        if kind == "activation":
            return _FUNCTIONS[given["function"]]()
        if kind == "max_pool":
            return nn.MaxPool2d(given["size"])
        if kind == "embedding":
            return nn.Embedding(
                given["words"], given["units"], sparse=given["sparse"] and self.case.optimizer.takes_sparse
            )
        if kind in ("lstm", "gru"):
            cell = (nn.LSTM if kind == "lstm" else nn.GRU)(given["inputs"], given["units"], batch_first=True)
            if kind == "lstm":
                cell.bias_hh_l0.requires_grad_(False)
            return _Recurrent(cell)
        if kind == "attention":
            return _Attention(given["heads"], [self._one(item) for item in layer.inner])
        if kind == "residual":
            around = self._all(layer.around) if layer.around else nn.Identity()
            return _Residual(self._all(layer.inner), around)
        others: dict[str, type[nn.Module]] = {"flatten": nn.Flatten, "last": _Last}
        if kind in others:
            return others[kind]()
        return _Mean({"global_average_pool": (2, 3), "mean_over_time": (1,)}[kind])

    def prepare(self) -> None:
        """An optimizer of torch.optim."""
        self.model.train()
        self._trained = [item for item in self.model.parameters() if item.requires_grad]
        self._optimizer = self._make_optimizer()
        self._local: dict[Tensor, Tensor] = {}
        for parameter in self._trained:
            parameter.register_hook(functools.partial(self._on_gradient, parameter))
        if self.process_set is not None:
            self._optimizer = DistributedOptimizer(
                self._optimizer,
                named_parameters=[item for item in self.model.named_parameters() if item[1].requires_grad],
                backward_passes_per_step=self.case.optimizer.accumulate,
                process_set=self.process_set,
            )
        if self.case.optimizer.name == "rmsprop":
            self._add_epsilon(begins=True)

    def _make_optimizer(self) -> Any:
        wanted, weights = self.case.optimizer, self._trained
        decay = wanted.coupled_decay
        if wanted.name in ("sgd", "momentum", "nesterov"):
            nesterov = wanted.name == "nesterov"
            return torch.optim.SGD(
                weights, wanted.rate, wanted.uses_momentum, weight_decay=decay, nesterov=nesterov
            )
        if wanted.name == "adam":
            return torch.optim.Adam(weights, wanted.rate, wanted.betas, wanted.epsilon, decay)
        if wanted.name == "adamw":
            return torch.optim.AdamW(weights, wanted.rate, wanted.betas, wanted.epsilon, wanted.weight_decay)
        if wanted.name == "rmsprop":  # epsilon comes into the root by what is in the state
            return torch.optim.RMSprop(weights, wanted.rate, wanted.rho, 0.0, decay)
        return torch.optim.Adagrad(
            weights, wanted.rate, weight_decay=decay, initial_accumulator_value=wanted.epsilon, eps=0.0
        )

    def _add_epsilon(self, *, begins: bool) -> None:
        """Have RMSprop divide by the root of ``v + epsilon``: it finds ``v + epsilon / rho`` in its state."""
        wanted = self.case.optimizer
        for parameter in self._trained:
            state = self._optimizer.state[parameter]
            if begins:
                state["step"] = torch.tensor(0.0)
                state["square_avg"] = torch.full_like(parameter, wanted.epsilon / wanted.rho)
            else:
                state["square_avg"].add_(wanted.epsilon * (1.0 / wanted.rho - 1.0))

    def compute(self, inputs: Any, targets: Any, *, is_first: bool, is_last: bool) -> float:
        """Return the loss, and compute the gradients with autograd."""
        if is_first:
            self._optimizer.zero_grad()
            self._local.clear()
        with self._computing():
            outputs = self.model(torch.from_numpy(inputs)).float()
        wanted = torch.from_numpy(targets)
        if self.case.loss == "cross_entropy":
            loss = nn.functional.cross_entropy(outputs, wanted)
        else:
            loss = nn.functional.mse_loss(outputs, wanted)
        (loss * (self.case.loss_scale / self.case.optimizer.accumulate)).backward()
        return float(loss.detach())

    def _computing(self) -> Any:
        if self.case.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.case.precision))

    def _on_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        gradient = gradient.detach().clone()
        self._local[parameter] = self._local[parameter] + gradient if parameter in self._local else gradient

    def local_gradient_of(self, weight: Weight) -> Any:
        """The gradients of all parts that autograd has computed: the parameter's may be averaged already."""
        local = self._local.get(weight.source)
        return local if local is None else local / self.case.loss_scale

    def reduce(self) -> None:
        """DistributedOptimizer's, which has begun in backward."""
        if self.process_set is not None:
            self._optimizer.synchronize()
        if self.case.loss_scale != 1.0:
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad.div_(self.case.loss_scale)

    def gradient_of(self, weight: Weight) -> Any:
        """The parameter's."""
        return weight.source.grad

    def update(self, rate: float) -> None:
        """A step of the optimizer."""
        wanted = self.case.optimizer
        if wanted.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, wanted.clip_norm)
        for group in self._optimizer.param_groups:
            if group["lr"] != rate:
                self._scale_buffers(group["lr"] / rate)
            group["lr"] = rate
        skips = self.process_set is not None
        with self._optimizer.skip_synchronize() if skips else contextlib.nullcontext():
            self._optimizer.step()
        if wanted.name == "rmsprop":
            self._add_epsilon(begins=False)

    def states_of(self, weight: Weight) -> dict[str, Any]:
        """Return the states of the optimizer, without the epsilon that RMSProp and Adagrad add to theirs."""
        found = super().states_of(weight)
        wanted = self.case.optimizer
        extra = {"rmsprop": wanted.epsilon / wanted.rho, "adagrad": wanted.epsilon}.get(wanted.name, 0.0)
        if extra and "second moment" in found:
            found["second moment"] = found["second moment"].astype("float64") - extra
        return found

    def _scale_buffers(self, factor: float) -> None:
        """The others have the learning rate in their momentum: what was added stays as large as it was."""
        if self.case.optimizer.uses_momentum:
            for state in self._optimizer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"].mul_(factor)
