"""ResNet-18 in Gluon, PyTorch and Keras: one network, the same layers in the same order.

Each function imports its framework, because ``polyhvd parity migrate`` calls each in a separate process::

    polyhvd parity migrate resnet18.params resnet18.pt --model examples/migration_model.py

docs/moving-from-mxnet.md explains the steps.
"""

import numpy as np

CLASSES = 10
CHANNELS = (64, 128, 256, 512)


def example_inputs():
    """Inputs with which both models must agree: images as Gluon and PyTorch take them."""
    return np.random.default_rng(0).random((32, 1, 28, 28), dtype=np.float32)


def gluon_model():
    from mxnet.gluon.model_zoo import vision

    return vision.resnet18_v1(classes=CLASSES)


def torch_model():
    from torch import nn
    from torch.nn.functional import relu

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            self.downsample = nn.Identity()
            if inputs != outputs:
                convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
                self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

        def forward(self, x):
            return relu(self.body(x) + self.downsample(x))

    layers = [
        nn.Conv2d(1, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    inputs = 64
    for stage, outputs in enumerate(CHANNELS):
        layers += [Block(inputs, outputs, 2 if stage else 1), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def keras_model():
    from keras import Input, Model, Sequential, layers

    def convolution(outputs, size, stride):
        return [
            # padding="same" would pad what has a stride on one side more than on the other.
            layers.ZeroPadding2D(size // 2),
            layers.Conv2D(outputs, size, stride, use_bias=False),
            # Keras' own defaults are momentum=0.99 and epsilon=1e-3.
            layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
        ]

    def block(x, outputs, stride):
        # Layers of layers: Keras sorts those of one model by their way to the output, Gluon as they are made.
        body = [*convolution(outputs, 3, stride), layers.ReLU(), *convolution(outputs, 3, 1)]
        body = Sequential(body)(x)
        if x.shape[-1] != outputs:
            x = Sequential(convolution(outputs, 1, stride))(x)
        return layers.ReLU()(layers.Add()([body, x]))

    image = Input((28, 28, 1))
    stem = [*convolution(64, 7, 2), layers.ReLU()]
    # Behind a ReLU, zeros are as good as the borders that the others leave out.
    x = Sequential([*stem, layers.ZeroPadding2D(1), layers.MaxPooling2D(3, 2)])(image)
    for stage, outputs in enumerate(CHANNELS):
        x = block(block(x, outputs, 2 if stage else 1), outputs, 1)
    x = layers.GlobalAveragePooling2D()(x)
    return Model(image, layers.Dense(CLASSES)(x))
