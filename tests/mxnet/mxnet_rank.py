"""What a rank of these tests runs: ``python mxnet_rank.py <test file> <function>``."""

import importlib.util
import sys

import polyhvd.mxnet as hvd  # isort: skip - mends NumPy before mxnet is imported
import mxnet
import numpy

path, function = sys.argv[1:]
spec = importlib.util.spec_from_file_location("test_file", path)
assert spec is not None
assert spec.loader is not None
test_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test_file)
numpy.random.seed(0)
mxnet.random.seed(0)
getattr(test_file, function)(hvd, mxnet, numpy)
