"""What Keras needs, of its own package or TensorFlow's."""
