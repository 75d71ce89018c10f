"""A small network in Keras as an estimator of Spark ML, with checkpoints and predictions.

On this machine, on handwritten digits::

    python examples/spark_keras.py --workers 2

with ``spark-submit --master yarn examples/spark_keras.py --folder hdfs:///user/me/digits`` on a cluster.
"""

import tempfile

import common
import keras
from pyspark.sql import SparkSession

from polyhvd.spark import Store
from polyhvd.spark.keras import KerasEstimator, KerasModel


def main():
    args = common.spark_arguments("Keras on Spark", epochs=5, batch_size=16, lr=0.05)
    train, test = common.load(args.data)
    spark = common.spark_session(SparkSession, args)
    keras.utils.set_random_seed(args.seed)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((train.pixels[0].size,)), layers.Dense(64, "relu"), layers.Dense(10, "softmax")]
    )
    with tempfile.TemporaryDirectory() as own:
        folder = args.folder or own
        estimator = KerasEstimator(
            num_proc=args.workers,
            store=Store.create(f"{folder}/store"),
            model=model,
            optimizer=keras.optimizers.SGD(args.lr, momentum=0.9),
            loss="sparse_categorical_crossentropy",
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
        for epoch, loss in enumerate(fitted.getHistory()["loss"]):
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f}")
        fitted.write().overwrite().save(f"{folder}/model")
        predicted = KerasModel.load(f"{folder}/model").transform(common.frame(spark, test))
        rows = predicted.select("label", "label__output").collect()
        correct = sum(int(row.label__output.toArray().argmax() == row.label) for row in rows)
        print(f"test accuracy {correct / len(rows):.4f}, {args.workers} ranks", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
