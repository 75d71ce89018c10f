"""A small convolutional network in plain JAX, trained on handwritten digits with a compiled step.

On two ranks::

    polyhvdrun -np 2 python examples/jax_digits.py
"""

import common
import jax
import jax.numpy as jnp
import numpy as np
import polyhvd.jax as hvd

args = common.arguments("digits with JAX", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job, and trains on its own part of the images.
hvd.init()
train, test = common.load(args.data)
shard = train.shard(hvd.rank(), hvd.size())
mine = test.shard(hvd.rank(), hvd.size(), even=False)
rng = np.random.default_rng([args.seed, hvd.rank()])


def initial(key, pixels):
    """Weights of two convolutions and two dense layers, each with a bias."""
    height, width = pixels.shape[1:]
    shapes = [(3, 3, 1, 16), (3, 3, 16, 32), (height // 4 * (width // 4) * 32, 64), (64, 10)]
    scaled = [
        jax.random.normal(k, s) * np.sqrt(2 / np.prod(s[:-1]))
        for k, s in zip(jax.random.split(key, 4), shapes, strict=True)
    ]
    return [{"w": w, "b": jnp.zeros(w.shape[-1])} for w in scaled]


def scores(params, x):
    *convolutions, hidden, last = params
    for layer in convolutions:
        x = jax.lax.conv_general_dilated(
            x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + layer["b"])
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ hidden["w"] + hidden["b"])
    return x @ last["w"] + last["b"]


def cross_entropy(params, x, y):
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(params, x)), y[:, None], axis=1).mean()


# A step averages over hvd.size() batches, so it may be as many times longer.
lr = args.lr * hvd.size()


@jax.jit
def train_step(params, momentum, x, y):
    # The average of all ranks' gradients is the gradient of all their batches together.
    loss, gradients = hvd.value_and_grad(cross_entropy)(params, x, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m - lr * g, momentum, gradients)
    return jax.tree.map(jnp.add, params, momentum), momentum, loss


# All ranks start from the weights of rank 0.
params = hvd.broadcast_parameters(initial(jax.random.key(args.seed), train.pixels), root_rank=0)
momentum = jax.tree.map(jnp.zeros_like, params)

progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
for _ in range(args.epochs):
    loss = 0.0
    order = rng.permutation(len(shard))
    for begin in range(0, len(shard), args.batch_size):
        batch = order[begin : begin + args.batch_size]
        x, y = jnp.asarray(shard.pixels[batch][..., None]), jnp.asarray(shard.labels[batch])
        params, momentum, step_loss = train_step(params, momentum, x, y)
        loss += float(step_loss) * len(batch) / len(shard)
        progress.step()
    progress.end_epoch(float(hvd.allreduce(loss, name="loss")))

# Every rank tests its part of the test images; the sum over ranks covers them all.
correct = scores(params, jnp.asarray(mine.pixels[..., None])).argmax(axis=1) == mine.labels
accuracy = float(hvd.allreduce(correct.sum(), name="correct", op=hvd.Sum)) / len(test)
progress.finish(accuracy)
