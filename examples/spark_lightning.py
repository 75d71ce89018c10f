"""A small network in Lightning as an estimator of Spark ML, with checkpoints and predictions.

On this machine, on handwritten digits::

    python examples/spark_lightning.py --workers 2

with ``spark-submit --master yarn examples/spark_lightning.py --folder hdfs:///user/me/digits`` on a cluster.
"""

import sys
import tempfile

import cloudpickle
import common
import lightning
import torch
from pyspark.sql import SparkSession

from polyhvd.spark import Store
from polyhvd.spark.lightning import LightningEstimator, LightningModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors do not have this file


class Digits(lightning.LightningModule):
    def __init__(self, pixels, lr):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(pixels, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )
        self.lr = lr

    def forward(self, pixels):
        return self.layers(pixels)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self(batch["pixels"]), batch["label"])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_accuracy", (self(batch["pixels"]).argmax(dim=1) == batch["label"]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def main():
    args = common.spark_arguments("Lightning on Spark", epochs=5, batch_size=16, lr=0.05)
    train, test = common.load(args.data)
    spark = common.spark_session(SparkSession, args)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as own:
        folder = args.folder or own
        estimator = LightningEstimator(
            num_proc=args.workers,
            store=Store.create(f"{folder}/store"),
            model=Digits(train.pixels[0].size, args.lr * args.workers),
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
            print(f"epoch {epoch['epoch'] + 1}/{args.epochs} loss {epoch['loss']:.4f}")
        fitted.write().overwrite().save(f"{folder}/model")
        predicted = LightningModel.load(f"{folder}/model").transform(common.frame(spark, test))
        rows = predicted.select("label", "label__output").collect()
        correct = sum(int(row.label__output.toArray().argmax() == row.label) for row in rows)
        print(f"test accuracy {correct / len(rows):.4f}, {args.workers} ranks", flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
