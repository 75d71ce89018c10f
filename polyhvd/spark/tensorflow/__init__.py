"""TensorFlow's own services on tasks of Spark."""
