"""Written for Horovod: a graph of TensorFlow 1, in a MonitoredTrainingSession."""

import hashlib
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()
passes = int(sys.argv[1])

hvd.init()

numbers = np.random.default_rng(7)
centers = numbers.normal(size=(10, 64)).astype(np.float32)
labels = numbers.integers(0, 10, 640)
images = centers[labels] + numbers.normal(scale=0.5, size=(640, 64)).astype(np.float32)

image = tf.placeholder(tf.float32, [None, 64], name="image")
label = tf.placeholder(tf.int64, [None], name="label")
tf.set_random_seed(hvd.rank())
hidden = tf.nn.relu(image @ tf.get_variable("hidden", [64, 32]))
logits = hidden @ tf.get_variable("logits", [32, 10])
loss = tf.losses.sparse_softmax_cross_entropy(label, logits)

opt = tf.train.AdamOptimizer(0.005 * hvd.size())

opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=passes, average_aggregated_gradients=True)

global_step = tf.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=global_step)

hooks = [
    hvd.BroadcastGlobalVariablesHook(0),
    tf.train.StopAtStepHook(last_step=80 // hvd.size()),
]

config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())

checkpoint_dir = "./checkpoints" if hvd.rank() == 0 else None

losses = []
mine = np.random.default_rng(hvd.rank())
with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as session:
    while not session.should_stop():
        rows = mine.integers(0, len(images), 32)
        feed = {image: images[rows], label: labels[rows]}
        _, value = session.run([train_op, loss], feed_dict=feed)
        losses.append(float(value))
        if not session.should_stop():
            weights = session.run(tf.trainable_variables())

assert len(losses) == 80 // hvd.size()
assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5]), losses
print("RESULT", hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest())
