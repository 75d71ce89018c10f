"""Keras support, for the keras package and for TensorFlow's."""
