"""A small network in PyTorch as an estimator of Spark ML, with a pipeline, checkpoints and predictions.

On this machine, on handwritten digits::

    python examples/spark_torch.py --workers 2

with ``spark-submit --master yarn examples/spark_torch.py --folder hdfs:///user/me/digits`` on a cluster.
"""

import tempfile

import common
import torch
from pyspark.sql import SparkSession

from polyhvd.spark import Store
from polyhvd.spark.torch import TorchEstimator, TorchModel


def accuracy(outputs, labels):
    return (outputs.argmax(dim=1) == labels).float().mean()


def main():
    args = common.spark_arguments("PyTorch on Spark", epochs=5, batch_size=16, lr=0.05)
    train, test = common.load(args.data)
    spark = common.spark_session(SparkSession, args)
    torch.manual_seed(args.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(train.pixels[0].size, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    with tempfile.TemporaryDirectory() as own:
        folder = args.folder or own
        estimator = TorchEstimator(
            num_proc=args.workers,
            store=Store.create(f"{folder}/store"),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
            loss=torch.nn.CrossEntropyLoss(),
            metrics=[accuracy],
            feature_cols=["pixels"],
            label_cols=["label"],
            validation=0.1,
            batch_size=args.batch_size,
            epochs=args.epochs,
            random_seed=args.seed,
            run_id="digits",  # a second run of this program with the same --folder goes on with this one
        )
        fitted = estimator.fit(common.frame(spark, train))
        for epoch in fitted.getHistory():
            print(f"epoch {epoch['epoch'] + 1}/{args.epochs} loss {epoch['train']['loss']:.4f}")
        fitted.write().overwrite().save(f"{folder}/model")
        predicted = TorchModel.load(f"{folder}/model").transform(common.frame(spark, test))
        rows = predicted.select("label", "label__output").collect()
        correct = sum(int(row.label__output.toArray().argmax() == row.label) for row in rows)
        print(f"test accuracy {correct / len(rows):.4f}, {args.workers} ranks", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
