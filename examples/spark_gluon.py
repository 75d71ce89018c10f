"""A small network in Gluon as an estimator of Spark ML, with checkpoints and predictions.

On this machine, on handwritten digits::

    python examples/spark_gluon.py --workers 2

with ``spark-submit --master yarn examples/spark_gluon.py --folder hdfs:///user/me/digits`` on a cluster.
"""

import tempfile

import common
from pyspark.sql import SparkSession

from polyhvd.spark import Store
from polyhvd.spark.mxnet import GluonEstimator, GluonModel

import mxnet as mx  # isort: skip  # after polyhvd, which restores names that NumPy has removed
from mxnet import gluon  # isort: skip


def main():
    args = common.spark_arguments("Gluon on Spark", epochs=5, batch_size=16, lr=0.05)
    train, test = common.load(args.data)
    spark = common.spark_session(SparkSession, args)
    mx.random.seed(args.seed)
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Dense(64, activation="relu", in_units=train.pixels[0].size), gluon.nn.Dense(10, in_units=64)
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    with tempfile.TemporaryDirectory() as own:
        folder = args.folder or own
        estimator = GluonEstimator(
            num_proc=args.workers,
            store=Store.create(f"{folder}/store"),
            model=net,
            optimizer=mx.optimizer.SGD(learning_rate=args.lr, momentum=0.9),
            loss=gluon.loss.SoftmaxCrossEntropyLoss(),
            metrics=["accuracy"],
            feature_cols=["pixels"],
            label_cols=["label"],
            validation=0.1,
            batch_size=args.batch_size,
            epochs=args.epochs,
            random_seed=args.seed,
            run_id="digits",  # a second run of this program with the same --folder goes on with this one
        )
        fitted = estimator.fit(common.frame(spark, train))
        for entry in fitted.getHistory():
            print(f"epoch {entry['epoch'] + 1}/{args.epochs} loss {entry['train']['loss']:.4f}")
        fitted.write().overwrite().save(f"{folder}/model")
        predicted = GluonModel.load(f"{folder}/model").transform(common.frame(spark, test))
        rows = predicted.select("label", "label__output").collect()
        correct = sum(int(row.label__output.toArray().argmax() == row.label) for row in rows)
        print(f"test accuracy {correct / len(rows):.4f}, {args.workers} ranks", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
