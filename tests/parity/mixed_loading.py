"""polyhvd.parity.load between ranks of different frameworks, as every rank uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drivers
import mixed_training
import numpy as np
import pytest

from polyhvd import parity

__all__ = ["by_name", "convolutions", "moved", "proven", "recurrent", "refused"]

Array = np.ndarray[Any, Any]
_WORDS, _INPUTS, _UNITS = 20, 6, 5


def _torch() -> tuple[Any, Callable[[Array], Any]]:
    import torch
    from torch import nn

    layers = nn.ModuleList(
        [
            nn.Embedding(_WORDS, _INPUTS),
            nn.LSTM(_INPUTS, _UNITS, batch_first=True),
            nn.GRU(_UNITS, _UNITS, batch_first=True),
            nn.RNN(_UNITS, _UNITS, batch_first=True),
            nn.LayerNorm(_UNITS),
            nn.Linear(_UNITS, 3),
        ]
    )

    def run(words: Array) -> Any:
        x = layers[0](torch.from_numpy(words))
        for cell in layers[1:4]:
            x, _ = cell(x)
        return layers[5](layers[4](x))

    return layers, run


def _gluon() -> tuple[Any, Callable[[Array], Any]]:
    import mxnet as mx
    from mxnet.gluon import nn, rnn

    mx.util.set_np_shape(False)  # as Gluon has it; other tests of this process change it
    net = nn.Sequential()
    net.add(
        nn.Embedding(_WORDS, _INPUTS),
        rnn.LSTM(_UNITS, layout="NTC", input_size=_INPUTS),
        rnn.GRU(_UNITS, layout="NTC", input_size=_UNITS),
        rnn.RNN(_UNITS, activation="tanh", layout="NTC", input_size=_UNITS),
        nn.LayerNorm(in_channels=_UNITS),
        nn.Dense(3, flatten=False, in_units=_UNITS),
    )
    net.initialize(mx.init.Normal(0.3))
    return net, lambda words: net(mx.nd.array(words))


def _keras() -> tuple[Any, Callable[[Array], Any]]:
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            layers.Input((7,), dtype="int32"),
            layers.Embedding(_WORDS, _INPUTS),
            layers.LSTM(_UNITS, return_sequences=True),
            layers.GRU(_UNITS, return_sequences=True),
            layers.SimpleRNN(_UNITS, return_sequences=True),
            layers.LayerNormalization(epsilon=1e-5),
            layers.Dense(3),
        ]
    )
    return model, lambda words: model(words)


_NETS = {"torch": _torch, "mxnet": _gluon, "tensorflow": _keras}


def recurrent(name: str) -> None:
    """Embedding, LSTM, GRU and a plain cell compute the same with the weights of any rank."""
    driver = drivers.get(name)
    model, run = _NETS[driver.framework]()
    words = np.random.default_rng(5).integers(0, _WORDS, (4, 7))
    for root in range(driver.hvd.size()):
        model, run = _NETS[driver.framework]()
        assert not parity.compare("before", run(words), raises=False).agree
        loaded = parity.load(model, from_=root)
        assert len(loaded) == len(parity.models.weights_of(model))
        parity.compare("after", run(words), rtol=1e-4, atol=1e-5)
        again = parity.load(model, from_=root)  # what was loaded changes nothing
        assert again == loaded
        parity.compare("again", run(words), rtol=1e-4, atol=1e-5)


def convolutions(name: str) -> None:
    """Convolutions, batch normalization and what follows a Flatten compute the same."""
    driver = drivers.get(name)
    net = mixed_training.net_of(driver.framework)
    parity.load(net.model, from_=driver.hvd.size() - 1)
    images = np.random.default_rng(5).standard_normal((3, 2, 8, 8), np.float32)
    parity.compare("scores", net.scores(images), rtol=1e-4, atol=1e-5)


def by_name(name: str) -> None:
    """Arrays of a file, in another order, find their weights by rules for names."""
    net = mixed_training.net_of(drivers.get(name).framework)
    weights = parity.models.weights_of(net.model)
    filed = {f"old/{w.name}": np.asarray(w.layout.array_to_common(w.read())) + 1 for w in reversed(weights)}
    parity.load(net.model, from_=filed, names=lambda old: old.removeprefix("old/"))
    for weight in weights:
        np.testing.assert_array_equal(
            weight.layout.array_to_common(weight.read()), filed[f"old/{weight.name}"], err_msg=weight.name
        )


def refused(name: str) -> None:
    """Models that do not match, and names that are not there: one error, and nothing is written."""
    net = mixed_training.net_of(drivers.get(name).framework)
    other = mixed_training.net_of(drivers.get(name).framework, 11)
    before = [weight.read() for weight in parity.models.weights_of(net.model)]
    invalid = drivers.get(name).hvd.InvalidArgumentError
    with pytest.raises(invalid, match=r"at weight 8, .*\[10, 12\].*\[11, 12\].*nothing was loaded"):
        parity.load(net.model, from_=other.model)
    with pytest.raises(invalid, match="'gone', which the model does not have"):
        parity.load(net.model, from_=other.model, names=lambda _: "gone")
    with pytest.raises(invalid, match="nothing is called"):
        parity.load(net.model, from_=other.model, names=lambda _: None)
    with pytest.raises(invalid, match="no weight 'gone'"):
        parity.load(net.model, from_=other.model, layouts={"gone": parity.Layout((1,))})
    with pytest.raises(invalid, match="expected a model"):
        parity.load(net.model, from_="weights.pt")
    for weight, kept in zip(parity.models.weights_of(net.model), before, strict=True):
        np.testing.assert_array_equal(weight.read(), kept)


#: Layers that make of an image what Keras has in another order than other frameworks.
_MOVING = ("Permute", "Reshape", "Mean", "Sum", "Dense", "Flatten", "Add", "ConvLSTM2D")


def _moving(kind: str) -> Any:
    """A model of Keras with such a layer before its last one."""
    import keras
    from keras import layers, ops

    given = keras.Input((2, 6, 5, 3) if kind == "ConvLSTM2D" else (6, 5, 3))
    image = given if kind == "ConvLSTM2D" else layers.Conv2D(4, 3)(given)
    flatten = layers.Flatten()
    made = {
        "Permute": lambda: layers.Reshape((12, 4))(layers.Permute((1, 3, 2))(image)),
        "Reshape": lambda: layers.Reshape((3, 16))(image),
        "Mean": lambda: flatten(ops.mean(image, axis=-1)),
        "Sum": lambda: ops.sum(flatten(image), axis=-1, keepdims=True),
        "Dense": lambda: flatten(layers.Dense(5)(image)),
        "Flatten": lambda: layers.Flatten("channels_first")(image),
        "Add": lambda: flatten(layers.Add()([image, layers.Dense(4)(layers.GlobalMaxPooling2D()(image))])),
        "ConvLSTM2D": lambda: flatten(layers.ConvLSTM2D(4, 3)(image)),
    }[kind]()
    return keras.Model(given, (layers.LSTM if len(made.shape) == 3 else layers.Dense)(5)(made))


def moved(name: str) -> None:
    """Images that Keras makes rows or steps of in another way than Flatten: all ranks refuse, by name."""
    driver = drivers.get(name)
    model = mixed_training.net_of(driver.framework).model
    unsupported = driver.hvd.UnsupportedError
    for kind in _MOVING:
        refused = rf"(lstm|dense).*kernel.*{kind} '.*not followed"
        if driver.framework == "tensorflow":
            model = _moving(kind)
            with pytest.raises(unsupported, match=refused):
                parity.load(model, from_=model)
        with pytest.raises(unsupported, match=refused):
            parity.load(model, from_=0)


def proven(name: str) -> None:
    """A model of Keras whose code makes rows by a function: the check names the layer, on every rank."""
    driver = drivers.get(name)
    if driver.framework == "torch":
        from torch import nn

        model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(48, 3))
    elif driver.framework == "mxnet":
        import mxnet as mx
        from mxnet.gluon import nn as gluon

        mx.util.set_np_shape(False)  # as Gluon has it; other tests of this process change it
        model = gluon.HybridSequential()
        model.add(gluon.Conv2D(4, 3, in_channels=3), gluon.Dense(3, in_units=48))
        model.initialize()
        model.hybridize()
    else:
        import keras
        from keras import layers, ops

        class Rows(keras.Model):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.convolution, self.dense = layers.Conv2D(4, 3), layers.Dense(3)

            def call(self, x: Any) -> Any:
                return self.dense(ops.reshape(self.convolution(x), (-1, 48)))

        model = Rows()
        model(np.zeros((1, 6, 5, 3), np.float32))
    weights = parity.models.weights_of(model)
    before = [weight.read() for weight in weights]
    images = np.random.default_rng(5).standard_normal((2, 3, 6, 5)).astype(np.float32)
    for check in (None, images):
        with pytest.raises(
            parity.ParityError, match=r"mapping is wrong for layer '.*dense.*nothing was loaded"
        ):
            parity.load(
                model, from_=driver.hvd.allgather_object(driver.framework).index("tensorflow"), check=check
            )
        for weight, array in zip(weights, before, strict=True):
            np.testing.assert_array_equal(weight.read(), array)
    layouts = {}
    if driver.framework == "tensorflow":
        layout = parity.Layout((48, 3), view=(4, 3, 4, 3), axes=(3, 2, 0, 1), common=(3, 48))
        layouts = {weights[2].name: layout}
    parity.load(model, from_=0, layouts=layouts, check=images)
    with pytest.raises(
        driver.hvd.InvalidArgumentError, match=r"does not take inputs of .*nothing was loaded"
    ):
        parity.load(model, from_=0, layouts=layouts, check=images[:, :2])
